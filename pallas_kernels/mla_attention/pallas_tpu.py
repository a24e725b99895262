"""Causal softmax attention of gated MLA on a TPU: what the kernels take, and their derivative rule."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.mla_attention.tpu_backward import backward
from k3jax.pallas_kernels.mla_attention.tpu_forward import (
    HEADROOM,
    TOP,
    TOTAL,
    M,
    Sizes,
    forward,
)
from k3jax.pallas_kernels.mla_attention.tpu_grid import (
    F32,
    LANES,
    LOG2E,
    block_size,
    round_up,
)

WIDEST = 256  # channels of q, k and v that fit


def unsupported(q, k, k_shared, v, *_) -> str | None:
    """Why the kernels cannot run a call, or None."""
    dtypes = {x.dtype for x in (q, k, k_shared, v)}
    if len(dtypes) > 1 or dtypes.pop() not in (jnp.bfloat16, jnp.float32):
        return (
            f"q is {q.dtype}, k {k.dtype}, k_shared {k_shared.dtype}, v {v.dtype}; needs bfloat16 "
            "or float32 for all"
        )
    if k.shape[-1] % LANES or v.shape[-1] % LANES:
        return f"N = {k.shape[-1]} and V = {v.shape[-1]}; needs multiples of {LANES}"
    if k_shared.shape[-1] % 16 or not k_shared.shape[-1]:
        return f"R = {k_shared.shape[-1]}; needs a multiple of 16, at least 16"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"Q = {q.shape[-1]} and V = {v.shape[-1]}; at most {WIDEST} fit"
    return None


def pallas_tpu(
    q: Float[Array, "B T H Q"],
    k: Float[Array, "B T H N"],
    k_shared: Float[Array, "B T R"],
    v: Float[Array, "B T H V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """`api.mla_attention` by the fused kernels.

    Numerics: float32 logits, softmax and accumulation; matmul operands in the inputs' dtype, p
        rounded to it; nothing is rounded for float32 inputs.
    Cost: neither logits nor keys per head leave the chip; pairs of blocks without a common
        document are skipped. Keeps the inputs, o and two numbers per query for the backward pass.
    """
    T = q.shape[1]
    block = block_size(T, q.dtype)
    padding = round_up(T, block) - T

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x

    sizes = Sizes(
        n=(T + padding) // block,
        block=block,
        N=k.shape[-1],
        R=k_shared.shape[-1],
        V=v.shape[-1],
        scale=scale,
        segmented=segment_ids is not None,
    )
    if segment_ids is not None:
        segment_ids = padded(segment_ids)
    # Padding after the row needs no mask: causality keeps it from all queries but its own.
    qT = jnp.transpose(padded(q), (0, 2, 3, 1))
    o, tops = _attend(sizes, qT, padded(k), padded(k_shared), padded(v), segment_ids)
    top = tops[:, :, :T].max((0, 2), initial=-jnp.inf) / LOG2E
    return o[:, :T], jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Sizes, qT, k, k_shared, v, segment_ids):
    o, stats = _checked(sizes, qT, k, k_shared, v, segment_ids)
    return o, stats[:, :, TOP]


def _checked(sizes, qT, k, k_shared, v, segment_ids):
    """The forward kernel; anew by its exact form if a logit has exceeded what the first stands."""
    run = functools.partial(forward, sizes, qT, k, k_shared, v, segment_ids)
    if sizes.n == 1:
        return run(exact=False)  # all blocks are on the diagonal

    def too_high(state):
        exact, (_, stats) = state
        return ~exact & jnp.any(stats[:, :, TOP] - stats[:, :, M] > HEADROOM)

    def again(_):
        return jnp.ones((), bool), run(exact=True)

    # A loop and not a branch: what does not enter it is passed on without a copy.
    return jax.lax.while_loop(too_high, again, (jnp.zeros((), bool), run(exact=False)))[1]


def _attend_forward(sizes, qT, k, k_shared, v, segment_ids):
    o, stats = _checked(sizes, qT, k, k_shared, v, segment_ids)
    kept = (qT, k, k_shared, v, segment_ids, o, stats[:, :, M], stats[:, :, TOTAL])
    return (o, stats[:, :, TOP]), kept


def _attend_backward(sizes, residuals, cotangents):
    qT, k, k_shared, v, segment_ids, o, m, total = residuals
    # p stays exp2(s - m), as in the forward pass: its sum divides d_o instead. The logarithm of the
    # sum is no choice: beside a logit of 1e4 float32 keeps three digits of it.
    d_o = (cotangents[0] / total.swapaxes(1, 2)[..., None]).astype(v.dtype)
    # Of the rounded d_o, as dp is: what both have in common (v has a mean) then cancels.
    delta = (o * d_o.astype(F32)).sum(-1).swapaxes(1, 2)  # B H T
    return *backward(sizes, qT, k, k_shared, v, d_o, m, delta, segment_ids), None


_attend.defvjp(_attend_forward, _attend_backward)
