"""Estimates for a TPU: `uv run --extra aot python -m k3jax.pallas_kernels.attention_residuals.bench`.

A small case is compared with the definition first. Then a line of JSON per estimate on stdout and a table on stderr:
the Pallas kernels beside the plain JAX form as XLA compiles it. Nothing runs on a TPU (`tpu_cost`). No peer has the op.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.attention_residuals import attention_residuals, reference
from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES
from k3jax.pallas_kernels.tpu_cost.compare import Case, compare

WIDTH, TOKENS, EPS = 7168, 8192, 1e-5
PASSES = ("fwd", "2 sites, fwd+bwd")
IMPLS = {"pallas_tpu": "k3jax pallas_tpu", "chunked": "k3jax chunked, XLA"}


def case(backend: str, sources: int, tokens: int, backward: bool):
    """One site forward; or two in a row, each with its norm, with all gradients and the bank threaded."""
    rows = sources - 1

    def site(bank, prefix, weights):
        return attention_residuals(
            bank, rows, prefix, weights[0], weights[1],
            eps=EPS, out_norm=weights[2], out_eps=EPS, backend=backend,
        )  # fmt: skip

    def two(bank, prefix, weights):
        x, bank = site(bank, prefix, weights[0])
        return site(bank, prefix + x, weights[1])[0]

    def gradients(bank, prefix, weights, dx):
        x, pull = jax.vjp(two, bank, prefix, weights)
        return x, pull(dx)

    prefix = jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.bfloat16)
    bank = jax.ShapeDtypeStruct((rows, *prefix.shape), prefix.dtype)
    weights = (jax.ShapeDtypeStruct((WIDTH,), jnp.float32),) * 3
    if backward:
        return gradients, (bank, prefix, (weights, weights), prefix)
    return (lambda *args: site(*args)[0]), (bank, prefix, weights)


def _row_moves(sources: int, backward: bool) -> int:
    """Rows read and written: forward every source and x; backward also dx, and every gradient; the bank's is added to."""
    forward = sources + 1
    return 2 * (forward + sources + 1 + sources + sources - 1) if backward else forward


def _check() -> None:
    """Both backends against the definition."""
    rng = np.random.default_rng(0)
    bank, prefix, query, norm, out_norm = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape, dtype in [((2, 1, 64, 128), "bfloat16"), ((1, 64, 128), "bfloat16")]
        + [((128,), "float32")] * 3
    )
    want = reference.attention_residuals(bank, 2, prefix, query, norm, EPS, out_norm, EPS)
    for backend in IMPLS:
        with pltpu.force_tpu_interpret_mode():
            got, _ = attention_residuals(
                bank, 2, prefix, query, norm,
                eps=EPS, out_norm=out_norm, out_eps=EPS, backend=backend,
            )  # fmt: skip
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        if not error < 1e-2:
            sys.exit(f"{backend} is wrong: relative error {error:.1e}")


def main(
    chips: tuple[str, ...] = tuple(TOPOLOGIES),
    sources: tuple[int, ...] = (9, 5, 3),
    measured: int = 1024,
    simulate: bool = True,
) -> None:
    """Estimates both backends.

    Args:
        chips: v5e, v5p, v6e, tpu7x.
        sources: rows of the bank and the prefix.
        measured: tokens that are compiled; the result is scaled to 8,192.
        simulate: False counts instructions without latencies: seconds instead of minutes.
    """
    _check()
    cases = []
    for n in sources:
        for name in PASSES:
            backward = name != PASSES[0]
            problem: dict[str, Any] = {"sources": n, "T": TOKENS, "D": WIDTH, "dtype": "bfloat16"}
            for backend, impl in IMPLS.items():
                arguments = {"backend": backend, "sources": n, "tokens": measured}
                cases.append(
                    Case(
                        op="attention_residuals",
                        impl=impl,
                        problem=problem | {"pass": name},
                        target="k3jax.pallas_kernels.attention_residuals.bench:case",
                        kwargs=arguments | {"backward": backward},
                        flops=0.0,
                        moved=2.0 * WIDTH * TOKENS * _row_moves(n, backward),
                        repeats=TOKENS / measured,
                    )
                )
    compare(cases, chips, simulate=simulate)


if __name__ == "__main__":
    tyro.cli(main)
