"""The short convolution on an NVIDIA GPU: one Triton kernel forward, one backward."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import triton_call

MOST_TAPS = 8
FEWEST_TOKENS = 16  # shorter rows leave a program nothing to go along


class Tile(NamedTuple):
    """What a program works on."""

    tokens: int
    ahead: int  # rows loaded together
    channels: int
    warps: int


FORWARD = Tile(tokens=64, ahead=8, channels=128, warps=1)
BACKWARD = Tile(tokens=125, ahead=4, channels=256, warps=2)


def unsupported(x, kernel) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if (reason := triton_call.unavailable()) is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}; needs bfloat16 or float32"
    if not 1 < kernel.shape[0] <= MOST_TAPS:
        return f"{kernel.shape[0]} taps; takes 2 to {MOST_TAPS}"
    if x.shape[1] < FEWEST_TOKENS:
        return f"T = {x.shape[1]}; needs {FEWEST_TOKENS} tokens"
    if x.size == 0:
        return "x is empty"
    return None


def triton_gpu(
    x: Float[Array, "B T H K"],
    kernel: Float[Array, "W H K"],
    past: Float[Array, "B W1 H K"],
    reach: Int[Array, "B T"] | None,
) -> Float[Array, "B T H K"]:
    """Outputs by the fused kernels; arguments as in `pallas_tpu.pallas_tpu`.

    Numerics: float32 inside; the kernel's gradient is summed in float32, by tile and then over the
        tiles, in the same order every time.
    Cost: reads x and writes y once; backward reads x and dy and writes dx once.
    """
    B, T, H, K = x.shape
    y = _conv(
        x.reshape(B, T, H * K),
        kernel.astype(jnp.float32).reshape(-1, H * K),
        past.astype(x.dtype).reshape(B, -1, H * K),
        reach,
    )
    return y.reshape(x.shape)


@jax.custom_vjp
def _conv(x, taps, past, reach):
    return forward(x, taps, past, reach)


def _conv_forward(x, taps, past, reach):
    return forward(x, taps, past, reach), (x, taps, past, reach)


def _conv_backward(residuals, dy):
    x, taps, past, reach = residuals
    return *backward(x, taps, past, reach, dy), None


_conv.defvjp(_conv_forward, _conv_backward)


def _launch(kernel, tile: Tile, x, taps, past, reach, *more, out_shape):
    B, T, C = x.shape
    masked = reach is not None
    return triton_call.triton_call(
        kernel, x, taps, past, reach if masked else taps, *more, T, out_shape=out_shape,
        grid=(B * -(-T // tile.tokens) * -(-C // tile.channels),), num_warps=tile.warps,
        C=C, W=taps.shape[0], MASKED=masked,
        TILE=tile.tokens, AHEAD=tile.ahead, BLOCK=tile.channels,
        EXACT=triton_call.INTERPRETED,
    )  # fmt: skip


def forward(x, taps, past, reach, tile: Tile = FORWARD):
    from k3jax.pallas_kernels.short_conv import gpu_kernels

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _launch(gpu_kernels.forward, tile, x, taps, past, reach, out_shape=[out])[0]


def backward(x, taps, past, reach, dy, tile: Tile = BACKWARD):
    """(dx, d_taps, d_past)"""
    from k3jax.pallas_kernels.short_conv import gpu_kernels

    B, T, C = x.shape
    sums = (B * -(-T // tile.tokens), *taps.shape)
    shapes = [(x.shape, x.dtype), (past.shape, jnp.float32), (sums, jnp.float32)]
    out = [jax.ShapeDtypeStruct(*s) for s in shapes]
    dx, d_past, d_taps = _launch(
        gpu_kernels.backward, tile, x, taps, past, reach, dy, out_shape=out
    )
    return dx, d_taps.sum(0), d_past.astype(past.dtype)
