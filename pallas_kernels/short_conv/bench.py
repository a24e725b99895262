"""Estimates for a TPU: `uv run --extra aot python -m k3jax.pallas_kernels.short_conv.bench`.

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

from k3jax.pallas_kernels.short_conv import reference, short_conv
from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES
from k3jax.pallas_kernels.tpu_cost.compare import Case, compare

TOKENS, HEADS, HEAD_DIM, TAPS, STREAMS = 8192, 96, 128, 4, 3
IMPLS = {"pallas_tpu": "k3jax pallas_tpu", "chunked": "k3jax chunked, XLA"}


def case(backend: str, tokens: int, backward: bool, joined: bool = False):
    """q, k and v of packed documents, [B, T, H K] in and out; `joined`: side by side in one call."""
    x = jax.ShapeDtypeStruct((1, tokens, HEADS * HEAD_DIM), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((TAPS, HEADS, HEAD_DIM), jnp.float32)
    segment_ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def one(x, kernel, segment_ids):
        heads = x.reshape(*x.shape[:2], -1, HEAD_DIM)
        y, _ = short_conv(heads, kernel, segment_ids=segment_ids, backend=backend)
        return y.reshape(x.shape)

    def run(streams, kernels, segment_ids):
        if joined:
            y = one(jnp.concatenate(streams, 2), jnp.concatenate(kernels, 1), segment_ids)
            return tuple(jnp.split(y, STREAMS, 2))
        return tuple(one(x, w, segment_ids) for x, w in zip(streams, kernels, strict=True))

    def gradients(streams, kernels, segment_ids, dy):
        y, pull = jax.vjp(lambda x, w: run(x, w, segment_ids), streams, kernels)
        return y, pull(dy)

    args = ((x,) * STREAMS, (kernel,) * STREAMS, segment_ids)
    return (gradients, (*args, args[0])) if backward else (run, args)


def _check() -> None:
    """Both backends against the definition."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 100, 2, 128)).astype(np.float32)
    kernel = rng.normal(size=(TAPS, 2, 128)).astype(np.float32)
    ids = np.repeat([[1, 2, 3]], [40, 1, 59], axis=1).astype(np.int32)
    want, _ = reference.short_conv(x, kernel, np.zeros((1, TAPS - 1, 2, 128)), ids)
    for backend in IMPLS:
        with pltpu.force_tpu_interpret_mode():
            got, _ = short_conv(
                jnp.asarray(x), jnp.asarray(kernel), segment_ids=jnp.asarray(ids), backend=backend
            )
        error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
        if not error < 1e-5:
            sys.exit(f"{backend} is wrong: relative error {error:.1e}")


def main(
    chips: tuple[str, ...] = tuple(TOPOLOGIES), measured: int = 1024, simulate: bool = True
) -> None:
    """Estimates both backends, and XLA with the three streams side by side.

    Args:
        chips: v5e, v5p, v6e, tpu7x.
        measured: tokens that are compiled; the result is scaled to 8,192.
        simulate: False counts instructions without latencies: seconds instead of minutes.
    """
    _check()
    cases = []
    impls: dict[str, dict[str, Any]] = {name: {"backend": b} for b, name in IMPLS.items()}
    impls["k3jax chunked, XLA, side by side"] = {"backend": "chunked", "joined": True}
    stream = 2.0 * TOKENS * HEADS * HEAD_DIM
    for name, moves in (("fwd", 2), ("fwd+bwd", 5)):  # x, y; x, dy, dx
        problem = {"T": TOKENS, "H": HEADS, "K": HEAD_DIM, "streams": STREAMS, "dtype": "bfloat16"}
        for impl, options in impls.items():
            cases.append(
                Case(
                    op="short_conv",
                    impl=impl,
                    problem=problem | {"pass": name},
                    target="k3jax.pallas_kernels.short_conv.bench:case",
                    kwargs={"tokens": measured, "backward": name != "fwd", **options},
                    flops=0.0,
                    moved=STREAMS * moves * stream,
                    repeats=TOKENS / measured,
                )
            )
    compare(cases, chips, simulate=simulate)


if __name__ == "__main__":
    tyro.cli(main)
