"""Causal softmax attention of gated MLA on an NVIDIA GPU: what the kernels take, and their derivative rule."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.triton_call import capability, triton_call, unavailable

LOG2E = math.log2(math.e)
F32 = jnp.float32
WIDEST = {"N": 128, "R": 64, "V": 128}  # channels that fit


class Blocks(NamedTuple):
    """How a kernel divides its work."""

    queries: int  # per block
    keys: int
    num_warps: int
    stages: int  # blocks of keys (of queries, for the keys' gradients) in flight
    group: int = 16  # heads that are read at the same time


class Plan(NamedTuple):
    forward: Blocks
    of_keys: Blocks
    of_queries: Blocks


# For compute capability 9.0, with 227 KB of shared memory per program; for all others, within 99 KB
# (10.0: 108); and for float32.
HOPPER = Plan(Blocks(128, 64, 8, 3), Blocks(32, 64, 4, 3), Blocks(128, 64, 8, 3))
AMPERE = Plan(Blocks(64, 64, 4, 2), Blocks(64, 32, 8, 2), Blocks(64, 32, 4, 2))
FULL = Plan(Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1))


class Sizes(NamedTuple):
    scale: float
    N: int
    R: int
    V: int
    plan: Plan


def unsupported(q, k, k_shared, v, *_) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if (reason := unavailable()) is not None:
        return reason
    dtypes = {x.dtype for x in (q, k, k_shared, v)}
    if len(dtypes) > 1 or dtypes.pop() not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return (
            f"q is {q.dtype}, k {k.dtype}, k_shared {k_shared.dtype}, v {v.dtype}; needs bfloat16, "
            "float16 or float32 for all"
        )
    for name, x in {"N": k, "R": k_shared, "V": v}.items():
        if not 0 < x.shape[-1] <= WIDEST[name]:
            return f"{name} = {x.shape[-1]}; needs 1 to {WIDEST[name]}"
    return None


def _plan(dtype) -> Plan:
    if dtype == F32:
        return FULL
    return HOPPER if capability() == 9.0 else AMPERE


def triton_gpu(
    q: Float[Array, "B T H Q"],
    k: Float[Array, "B T H N"],
    k_shared: Float[Array, "B T R"],
    v: Float[Array, "B T H V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """`api.mla_attention` by the fused kernels.

    Numerics: float32 logits, softmax and accumulation; matmul operands in the inputs' dtype, p
        rounded to it; three products of halves stand for one of float32 inputs.
    Cost: neither logits nor keys per head leave the chip; pairs of blocks without a common
        document are skipped. Keeps the inputs, o and two numbers per query for the backward pass.
    """
    if scale < 0:  # the kernels scale the largest product, not the products
        q, scale = -q, -scale
    sizes = Sizes(scale, k.shape[-1], k_shared.shape[-1], v.shape[-1], _plan(q.dtype))
    o, tops = _attend(sizes, q, k, k_shared, v, *bounds(segment_ids, q.shape[:2]))
    top = tops.max((0, 2)) / LOG2E
    return o, jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))


def bounds(segment_ids: Int[Array, "B T"] | None, shape: tuple[int, ...]):
    """(starts, ends) [B T]: the first token of each token's document, and the first one after it;
    T and 0 at padding, which thus sees nothing and is seen by nothing."""
    T = shape[1]
    if segment_ids is None:
        return jnp.zeros(shape, jnp.int32), jnp.full(shape, T, jnp.int32)
    index = jnp.arange(T, dtype=jnp.int32)
    change = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.where(jnp.pad(change, ((0, 0), (1, 0))), index, 0)
    ends = jnp.where(jnp.pad(change, ((0, 0), (0, 1))), index + 1, T)
    real = segment_ids > 0
    starts = jnp.where(real, jax.lax.cummax(starts, axis=1), T)
    return starts, jnp.where(real, jax.lax.cummin(ends, axis=1, reverse=True), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Sizes, q, k, k_shared, v, starts, ends):
    o, tops, _ = _forward(sizes, q, k, k_shared, v, starts)
    return o, tops


def _forward(sizes, q, k, k_shared, v, starts):
    from k3jax.pallas_kernels.mla_attention.gpu_forward import forward

    B, T, H, _ = q.shape
    numbers = jax.ShapeDtypeStruct((B, H, T), F32)
    out_shape = [jax.ShapeDtypeStruct((B, T, H, sizes.V), F32), numbers, numbers]
    blocks = sizes.plan.forward
    return _call(forward, blocks, blocks.queries, sizes, q, k, k_shared, v, starts,
                 out_shape=out_shape)  # fmt: skip


def _call(kernel, blocks: Blocks, block: int, sizes: Sizes, q, *args, out_shape, **constants):
    """Runs a kernel with a program for each head and `block` tokens."""
    B, T, H, _ = q.shape
    return triton_call(
        kernel, q, *args, out_shape=out_shape, grid=(-(-T // block) * B * H,),
        num_warps=blocks.num_warps, num_stages=blocks.stages,
        bits=sizes.scale * LOG2E, B=B, T=T, H=H, N=sizes.N, R=sizes.R, V=sizes.V,
        NP=_padded(sizes.N), RP=_padded(sizes.R), VP=_padded(sizes.V),
        QUERIES=blocks.queries, KEYS=blocks.keys, GROUP=blocks.group, STAGES=blocks.stages,
        PRECISION="tf32x3" if q.dtype == F32 else "tf32", **constants,
    )  # fmt: skip


def _padded(width: int) -> int:
    """Channels of a tile: a power of two, as the matrix units take at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def _attend_forward(sizes, q, k, k_shared, v, starts, ends):
    o, tops, totals = _forward(sizes, q, k, k_shared, v, starts)
    return (o, tops), (q, k, k_shared, v, starts, ends, o, tops, totals)


def _attend_backward(sizes, residuals, cotangents):
    q, k, k_shared, v, starts, ends, o, tops, totals = residuals
    # p stays exp2(s - m), as in the forward pass: its sum divides d_o instead. The logarithm of the
    # sum is no choice: beside a logit of 1e4 float32 keeps three digits of it.
    totals = totals.swapaxes(1, 2)[..., None]
    d_o = jnp.where(totals == 0, 0, cotangents[0] / totals).astype(v.dtype)
    # Of the rounded d_o, as dp is: what both have in common (v has a mean) then cancels.
    deltas = (o * d_o.astype(F32)).sum(-1).swapaxes(1, 2)  # B H T
    return *gradients(sizes, q, k, k_shared, v, d_o, tops, deltas, starts, ends), None, None


def gradients(sizes, q, k, k_shared, v, d_o, tops, deltas, starts, ends):
    """(dq, dk, dk_shared, dv) in the inputs' dtype."""
    from k3jax.pallas_kernels.mla_attention.gpu_backward import of_keys, of_queries

    B, T, H, _ = q.shape
    of_head = jax.ShapeDtypeStruct((B, H, T, sizes.R), F32)
    blocks = sizes.plan.of_keys
    dk, dk_shared, dv = _call(
        of_keys, blocks, blocks.keys, sizes, q, k, k_shared, v, d_o, tops, deltas, ends,
        out_shape=[_like(k), of_head, _like(v)], scale=sizes.scale,
    )  # fmt: skip
    blocks = sizes.plan.of_queries
    (dq,) = _call(
        of_queries, blocks, blocks.queries, sizes, q, k, k_shared, v, d_o, tops, deltas, starts,
        out_shape=[_like(q)], scale=sizes.scale,
    )  # fmt: skip
    return dq, dk, dk_shared.sum(1).astype(k_shared.dtype), dv


def _like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


_attend.defvjp(_attend_forward, _attend_backward)
