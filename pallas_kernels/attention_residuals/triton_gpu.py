"""Attention Residuals on an NVIDIA GPU: one Triton kernel forward, one backward.

Forward reads every source once. Backward reads it from memory once, and once more from the cache, and adds to the
bank's cotangent in place. Rows that are not valid are neither read nor written.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import triton_call

WIDEST = 16384  # bytes of a source's channels, which a program holds in registers


class Plan(NamedTuple):
    """What is known when a call is traced."""

    eps: float  # of the norm of the sources
    out_eps: float | None  # of the norm of the mixture; None: there is none


def unsupported(bank, count, prefix, out_norm) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if (reason := triton_call.unavailable()) is not None:
        return reason
    if bank.dtype != prefix.dtype or bank.dtype not in (jnp.bfloat16, jnp.float32):
        return f"bank is {bank.dtype} and prefix {prefix.dtype}; needs bfloat16 or float32 of both"
    if bank.size == 0 or prefix.size == 0 or (isinstance(count, int) and count == 0):
        return "there is nothing to mix"
    if bank.shape[-1] * bank.dtype.itemsize > WIDEST:
        return f"width {bank.shape[-1]} of {bank.dtype}; takes up to {WIDEST} bytes"
    return None


def triton_gpu(
    bank: Float[Array, "M B T D"],
    count: int | Int[Array, ""],
    prefix: Float[Array, "B T D"],
    query: Float[Array, " D"],
    norm: Float[Array, " D"],
    eps: float,
    out_norm: Float[Array, " D"] | None,
    out_eps: float | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "M B T D"]]:
    """The op by the fused kernels; arguments as in `api.attention_residuals`."""
    key = norm.astype(jnp.float32) * query.astype(jnp.float32)
    gain = jnp.ones_like(key) if out_norm is None else out_norm.astype(jnp.float32)
    count = jnp.minimum(jnp.asarray(count, jnp.int32), len(bank)).reshape(1)
    return _mix(Plan(eps, out_eps), bank, count, prefix, key, gain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(plan: Plan, bank, count, prefix, key, gain):
    return forward(plan, bank, count, prefix, key, gain)[0], bank


def _mix_forward(plan, bank, count, prefix, key, gain):
    x, stats = forward(plan, bank, count, prefix, key, gain)
    return (x, bank), (bank, count, prefix, key, gain, stats)


def _mix_backward(plan, residuals, cotangents):
    d_bank, d_prefix, d_key, d_gain = backward(plan, *residuals, *cotangents)
    return d_bank, None, d_prefix, d_key, d_gain


_mix.defvjp(_mix_forward, _mix_backward)


def _warps(width: int) -> int:
    """Warps of a program: 32 channels in each thread."""
    return max(1, triton_call.power_of_two(width) // 1024)


def _stages(dtype) -> int:
    """Rows on their way while one is worked on, and one: what an RTX 4090's shared memory holds."""
    return 3 if jnp.dtype(dtype).itemsize == 2 else 2


def _programs() -> int:
    """Of one warp that run at once in the backward pass."""
    multiprocessors = getattr(jax.local_devices()[0], "core_count", 132)  # an H200 has 132
    return 8 * multiprocessors


def _rounded(gain, dtype):
    """The norm's weight as its product sees it; the gradient stays float32."""
    return gain.astype(dtype).astype(jnp.float32)


def _launch(kernel, plan: Plan, bank, *args, out_shape, programs, aliases=None, **constants):
    D = bank.shape[-1]
    return triton_call.triton_call(
        kernel, bank, *args, out_shape=out_shape, grid=(programs,), num_warps=_warps(D),
        aliases=aliases, D=D, NORMED=plan.out_eps is not None, OUT_EPS=plan.out_eps or 0.0,
        ROWS=bank.shape[0], BLOCK=triton_call.power_of_two(D), STAGES=_stages(bank.dtype), **constants,
    )  # fmt: skip


def forward(plan: Plan, bank, count, prefix, key, gain):
    """x, and what the backward pass needs of each token's scores."""
    from k3jax.pallas_kernels.attention_residuals import gpu_kernels

    rows, B, T, _ = bank.shape
    out = [
        jax.ShapeDtypeStruct(prefix.shape, prefix.dtype),
        jax.ShapeDtypeStruct((B * T, 2 * rows + 3), jnp.float32),
    ]
    x, stats = _launch(
        gpu_kernels.forward, plan, bank, count, prefix, key, _rounded(gain, prefix.dtype), B * T,
        out_shape=out, programs=B * T, EPS=plan.eps,
    )  # fmt: skip
    return x, stats


def backward(plan: Plan, bank, count, prefix, key, gain, stats, dx, d_bank):
    """(d_bank with this site's share added in place, d_prefix, d_key, d_gain)."""
    from k3jax.pallas_kernels.attention_residuals import gpu_kernels

    _, B, T, D = bank.shape
    # As many as run at once: each goes from token to token with its own sums.
    programs = min(B * T, max(1, _programs() // _warps(D)))
    sums = jax.ShapeDtypeStruct((programs, D), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (bank, prefix)]
    d_bank, d_prefix, d_key, d_gain = _launch(
        gpu_kernels.backward, plan, bank, count, prefix, key, _rounded(gain, prefix.dtype), stats,
        dx, d_bank, B * T, out_shape=[*shapes, sums, sums], programs=programs, aliases={7: 0},
    )  # fmt: skip
    return d_bank, d_prefix, d_key.sum(0), d_gain.sum(0)
