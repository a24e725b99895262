"""The grouped matmul and the experts' feed-forward: entry points and choice of backend."""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.grouped_matmul import (
    blocked,
    composed,
    pallas_tpu,
    ragged,
    reference,
    triton_gpu,
)


def backends() -> dict[str, dispatch.Backend]:
    """Backends of `grouped_matmul`, best first.

    Off TPU `ragged_dot` expands to one dense product per group, E times the work and memory
    (KF-063), so there it only runs when asked for.
    """
    ragged_dot = {"ragged": (ragged.ragged, dispatch.always)}
    kernels = {
        "pallas_tpu": (pallas_tpu.grouped_matmul, pallas_tpu.unsupported),
        "triton_gpu": (triton_gpu.grouped_matmul, triton_gpu.unsupported),
    }
    plain = {
        "blocked": (blocked.blocked, dispatch.always),
        "reference": (reference.dense, dispatch.always),
    }
    on_tpu = dispatch.platform() == "tpu"
    return kernels | (ragged_dot | plain if on_tpu else plain | ragged_dot)


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    *,
    backend: str | None = None,
) -> Float[Array, "M N"]:
    """Multiply each row by the matrix of its group.

        y_m = x_m w_e   for the group e that row m lies in      (architecture 8, step 5)

    Args:
        x: rows sorted by group.
        w: one matrix per group, in x's dtype.
        group_sizes: rows of each group, in order, 0 allowed; rows beyond their sum give 0.
        backend: `pallas_tpu`, `triton_gpu`, `ragged`, `blocked` or `reference`; None takes the first
            that can run.

    Returns: products in x's dtype.
    Numerics: float32 accumulation.
    Cost: 2 M K N, and less than two blocks of rows more per group.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape} do not fit [M, K] and [E, K, N]")
    if group_sizes.shape != (w.shape[0],):
        raise ValueError(f"group_sizes has shape {group_sizes.shape}, w has {w.shape[0]} groups")
    run = dispatch.choose("grouped_matmul", backends(), backend, x, w)
    return run(x, w, group_sizes)


def _composed(function: Callable) -> dispatch.Backend:
    return functools.partial(function, grouped_matmul), dispatch.always


EXPERTS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.experts, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.experts, triton_gpu.unsupported),
    "composed": _composed(composed.experts),
    "reference": (reference.experts, dispatch.always),
}
FORWARD: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.experts_forward, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.experts_forward, triton_gpu.unsupported),
    "composed": _composed(composed.forward),
}
BACKWARD: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.experts_backward, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.experts_backward, triton_gpu.unsupported),
    "composed": _composed(composed.backward),
}


def experts(
    x: Float[Array, "M L"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    p: Float[Array, " M"],
    group_sizes: Int[Array, " E"],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    backend: str | None = None,
) -> Float[Array, "M L"]:
    """Every row through the feed-forward of its expert, times the row's combine weight.

        y_m = p_m (w2_e a(w1_e x_m, w3_e x_m))                  (architecture 8, steps 5-6)

    Args:
        x: latents sorted by expert.
        w1, w3: gate and up projections, in x's dtype.
        w2: down projections.
        p: combine weight of each row, float32.
        group_sizes: rows of each expert, in order, 0 allowed; rows beyond their sum give 0.
        activation: a(gate, up), elementwise, float32 from float32; hashable.
        backend: `pallas_tpu`, `triton_gpu`, `composed` or `reference`; None takes the first that can
            run.

    Returns: weighted outputs in x's dtype; their sum over a token's rows is the layer's output.
    Numerics: products, activation and weighting in float32; gate, up and activation are rounded to
        x's dtype between the matrices.
    The gradient is that of w2 (p a), the same function: dL/dp = <a, w2^T dL/dy> needs no expert
    output, so none is kept for the backward pass (moe_parallelism 1).
    """
    _check(x, w1, w3, w2, p, group_sizes)
    run = dispatch.choose("experts", EXPERTS, backend, x, w1, w3, w2)
    return run(x, w1, w3, w2, p, group_sizes, activation)


Saved = tuple[Float[Array, "M F"], Float[Array, "M F"]]  # w1_e x and w3_e x, in x's dtype


def experts_forward(
    x: Float[Array, "M L"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    p: Float[Array, " M"],
    group_sizes: Int[Array, " E"],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    backend: str | None = None,
) -> tuple[Float[Array, "M L"], Saved]:
    """`experts`, and what `experts_backward` needs beside the arguments.

    The two are for a caller that differentiates by hand, as across an exchange of rows between
    devices; `experts` itself is differentiable.
    """
    _check(x, w1, w3, w2, p, group_sizes)
    run = dispatch.choose("experts", FORWARD, backend, x, w1, w3, w2)
    return run(x, w1, w3, w2, p, group_sizes, activation)


def experts_backward(
    saved: Saved,
    dy: Float[Array, "M L"],
    x: Float[Array, "M L"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    p: Float[Array, " M"],
    group_sizes: Int[Array, " E"],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    backend: str | None = None,
) -> tuple[
    Float[Array, "M L"],
    Float[Array, "E L F"],
    Float[Array, "E L F"],
    Float[Array, "E F L"],
    Float[Array, " M"],
]:
    """The gradients of `experts` by x, w1, w3, w2 and p; `backend` as for `experts_forward`."""
    _check(x, w1, w3, w2, p, group_sizes)
    run = dispatch.choose("experts", BACKWARD, backend, x, w1, w3, w2)
    return run(saved, dy, x, w1, w3, w2, p, group_sizes, activation)


def _check(x, w1, w3, w2, p, group_sizes):
    if x.ndim != 2 or w1.shape != w3.shape or w1.ndim != 3 or x.shape[1] != w1.shape[1]:
        raise ValueError(f"x {x.shape}, w1 {w1.shape}, w3 {w3.shape} do not fit [M, L], [E, L, F]")
    if w2.shape != (w1.shape[0], w1.shape[2], w1.shape[1]):
        raise ValueError(f"w2 has shape {w2.shape}, w1 {w1.shape}: w2 must be [E, F, L]")
    if group_sizes.shape != w1.shape[:1] or p.shape != x.shape[:1]:
        raise ValueError(
            f"group_sizes {group_sizes.shape} and p {p.shape} do not fit {w1.shape[0]} experts "
            f"and {x.shape[0]} rows"
        )
