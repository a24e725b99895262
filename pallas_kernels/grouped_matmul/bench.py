"""Estimates the TPU kernels beside their peers: `python -m k3jax.pallas_kernels.grouped_matmul.bench`.

    uv run --extra aot --with tokamax==0.0.17 python -m k3jax.pallas_kernels.grouped_matmul.bench

Figures are estimates from the compiled programs (`tpu_cost`), instructions counted without
latencies. The profiler cannot read group sizes from memory, so all groups are equal and known to
the compiler here; in a real call each group costs one chunk of rows (128 to 512) more on average,
two at most. The peers get the same help: their number of tiles is fixed, and of branches on the size only the full one stays.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels import tpu_cost
from k3jax.pallas_kernels.grouped_matmul import pallas_tpu, reference
from k3jax.pallas_kernels.tpu_cost.compare import Case, compare

MODULE = "k3jax.pallas_kernels.grouped_matmul.bench"
LATENT, HIDDEN = 3584, 3072  # of K3's experts
ROWS = {16: 8, 256: 4, 1024: 2, 4096: 1}  # rows per expert: experts, so that programs stay small
TILINGS = ((512, 896, 1024), (256, 1792, 1024), (1024, 512, 512))  # of the peer; they divide K, N
LIMIT = 2e-2  # largest error against float32 (k3jax.testing's table)


def situ(gate: jax.Array, up: jax.Array) -> jax.Array:
    """K3's activation (Eq. 12), for the benchmark."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    return (4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * 25 * jnp.tanh(u / 25)).astype(gate.dtype)


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def experts(rows: int, groups: int, backward: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The experts' feed-forward; with `backward` also all gradients."""
    M, E, L, F = rows * groups, groups, LATENT, HIDDEN
    floats = (_array(M, L), _array(E, L, F), _array(E, L, F), _array(E, F, L))
    args = (*floats, _array(M, dtype=jnp.float32), _array(E, dtype=jnp.int32))

    def call(x, w1, w3, w2, p, sizes):
        return pallas_tpu.experts(x, w1, w3, w2, p, sizes, situ, rows)

    def with_gradients(dy, x, w1, w3, w2, p, sizes):
        def of_floats(x, w1, w3, w2, p):
            return call(x, w1, w3, w2, p, sizes)

        y, pull = jax.vjp(of_floats, x, w1, w3, w2, p)
        return y, pull(dy)

    return (with_gradients, (_array(M, L), *args)) if backward else (call, args)


def matmul(
    M: int, K: int, N: int, E: int, backward: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The plain grouped matmul."""
    x, w, sizes = _array(M, K), _array(E, K, N), _array(E, dtype=jnp.int32)

    def both(dy, x, w, sizes):
        y, pull = jax.vjp(lambda x, w: pallas_tpu.grouped_matmul(x, w, sizes, M // E), x, w)
        return y, pull(dy)

    if backward:
        return both, (_array(M, N), x, w, sizes)
    return (lambda x, w, sizes: pallas_tpu.grouped_matmul(x, w, sizes, M // E)), (x, w, sizes)


def tokamax_v1(
    M: int, K: int, N: int, E: int, backward: bool, tiling: tuple[int, int, int]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """tokamax's `pallas_mosaic_tpu` kernels; the tiles of rows are those of equal groups."""
    peer: Any = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel")
    plan = peer.make_group_metadata

    def fixed(*, m, tm, **kw):
        return plan(m=m, tm=tm, **kw)[0], max(m // tm, E)

    peer.make_group_metadata = fixed
    gmm, tgmm = peer.gmm.__wrapped__, peer.tgmm.__wrapped__
    tm, tk, tn = tiling
    options = (jax.lax.Precision.DEFAULT, jnp.bfloat16)

    def forward(x, w, sizes):
        return gmm(x, w, sizes, *options, (tm, tk, tn))

    def both(dy, x, w, sizes):
        dx = gmm(dy, w, sizes, *options, (tm, tn, tk), transpose_rhs=True)
        return forward(x, w, sizes), dx, tgmm(x.T, dy, sizes, *options, (tm, tk, tn))

    args = (_array(M, K), _array(E, K, N), _array(E, dtype=jnp.int32))
    return (both, (_array(M, N), *args)) if backward else (forward, args)


def tokamax_v2(
    M: int, K: int, N: int, E: int, transposed: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """tokamax's `pallas_mosaic_tpu_v2` kernel for products with rows, with its own tile sizes."""
    peer: Any = importlib.import_module("tokamax._src.ops.gmm_v2.gmm_v2")
    plan, tiles = peer.fill_metadata, peer.calculate_tiling

    def fixed(sizes, offset, tables, *, cfgs):
        plan(sizes, offset, tables, cfgs=cfgs)
        return max(M // cfgs.tiles.tile_m, E)

    def full(*args, **kw):
        found = tiles(*args, **kw)
        return found.__class__(found.tile_m, found.tile_k, found.tile_n, found.tile_m)

    peer.fill_metadata = fixed
    w = _array(E, N, K) if transposed else _array(E, K, N)
    options = {"zero_initialize": False, "transpose_rhs": transposed, "tile_info": full}
    return (
        lambda x, w, sizes: peer.gmm_v2(
            x, w, sizes, preferred_element_type=jnp.bfloat16, **options
        ),
        (_array(M, K), w, _array(E, dtype=jnp.int32)),
    )


def expert_cases() -> Iterator[Case]:
    for rows, groups in ROWS.items():
        matrices = 3 * groups * LATENT * HIDDEN * 2
        latents, products = rows * groups * LATENT * 2, 2 * rows * groups * LATENT * HIDDEN
        for backward in (False, True):
            name = "fwd+bwd" if backward else "fwd"
            yield Case(
                op="experts",
                impl="k3jax pallas_tpu",
                problem={"rows": rows, "experts": groups, "pass": name},
                target=f"{MODULE}:experts",
                kwargs={"rows": rows, "groups": groups, "backward": backward},
                flops=(9 if backward else 3) * products,
                # forward x, y; backward dy, dx, and x again, as it is not kept on chip
                moved=(3 if backward else 1) * matrices + (5 if backward else 2) * latents,
            )


def matmul_cases(peers: bool) -> Iterator[Case]:
    shapes = {(4096, 1024, 512, 8)} | {
        (rows * groups, LATENT, HIDDEN, groups) for rows, groups in ROWS.items() if rows < 4096
    }
    for M, K, N, E in sorted(shapes):
        for backward in (False, True):
            problem = {"M": M, "K": K, "N": N, "E": E, "pass": "fwd+bwd" if backward else "fwd"}
            shape: dict[str, Any] = {"M": M, "K": K, "N": N, "E": E}
            floors = {
                "flops": (3 if backward else 1) * 2 * M * K * N,
                "moved": (3 if backward else 1) * 2 * E * K * N
                + 2 * M * ((3 * K + 2 * N) if backward else K + N),
            }
            impls = {"k3jax pallas_tpu": ("matmul", shape | {"backward": backward})}
            if peers:
                for tiling in TILINGS:
                    if tiling[0] <= M // E and K % tiling[1] == 0 and N % tiling[2] == 0:
                        kwargs = shape | {"backward": backward, "tiling": tiling}
                        impls[f"tokamax v1 {tiling}"] = ("tokamax_v1", kwargs)
                if not backward:
                    impls["tokamax v2"] = ("tokamax_v2", shape)
            for impl, (factory, kwargs) in impls.items():
                yield Case(
                    op="grouped_matmul", impl=impl, problem=problem,
                    target=f"{MODULE}:{factory}", kwargs=kwargs, **floors,
                )  # fmt: skip


def check() -> None:
    """Ends the program if the kernels are wrong, on a small case under the interpreter."""
    draw, sizes = np.random.default_rng(0).standard_normal, jnp.array([40, 0, 30, 7])
    shapes = ((90, 128), (4, 128, 256), (4, 128, 256), (4, 256, 128))
    arrays = [jnp.asarray(draw(s) / s[-2] ** 0.5, jnp.bfloat16) for s in shapes]
    p = jnp.asarray(draw(90), jnp.float32)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = pallas_tpu.experts(*arrays, p, sizes, situ)
    x, w1, w3, w2 = (a.astype(jnp.float32) for a in arrays)
    want = reference.experts(x, w1, w3, w2, p, sizes, situ)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    if not error <= LIMIT:
        sys.exit(f"experts: error {error:.2g}, allowed {LIMIT}; nothing measured")


def main(
    chips: tuple[str, ...] = tuple(tpu_cost.TOPOLOGIES), peers: bool = True, simulate: bool = False
) -> int:
    """Estimates the experts' feed-forward and the grouped matmul.

    Args:
        chips: v5e, v5p, v6e, tpu7x.
        peers: also tokamax's, which must be installed.
        simulate: also walk the programs with latencies: minutes for each large case.
    """
    jax.config.update("jax_platforms", "cpu")
    check()
    cases = [*matmul_cases(peers), *expert_cases()]
    return int(any("error" in record for record in compare(cases, chips, simulate=simulate)))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
