"""MXFP4: 4-bit floats in groups of 32 that share a power-of-two scale (checkpoint format, section 5)."""

import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

GROUP = 32  # consecutive inputs of one output row with a common scale
BIAS = 127  # the scale byte b stands for 2^(b - 127) (E8M0)
NAN_SCALE = 255
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, by code; bit 3 is the sign

Rule = Literal["compressed_tensors", "ocp"]

_VALUES = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(NAN_SCALE) - BIAS), np.float32(np.nan))
# The two values of a byte; as one number of 8 bytes they are looked up four times as fast.
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], -1).view("c8")[:, 0]


def dequantize_mxfp4(
    packed: UInt8[Any, "*lead O half"], scale: UInt8[Any, "*lead O groups"], dtype: Any
) -> Float[Any, "*lead O I"]:
    """Weights from their codes.

        w[o, i] = E2M1(nibble(packed[o, i // 2], i mod 2)) 2^(scale[o, i // 32] - 127)

    Args:
        packed: two codes a byte, the even input in the low four bits.
        scale: one E8M0 byte per 32 inputs; 255 makes the group NaN.
        dtype: of the result; bfloat16 holds every value exactly.

    Returns: NumPy for NumPy, JAX for JAX.
    Numerics: float32; JAX flushes results below 2^-126 to zero.
    Raises: ValueError if the shapes do not belong together.
    """
    groups = packed.shape[-1] * 2 // GROUP
    if packed.shape[-1] * 2 % GROUP or scale.shape != (*packed.shape[:-1], groups):
        raise ValueError(
            f"mxfp4: scales {scale.shape} do not fit codes {packed.shape}: one byte of scale for "
            f"every {GROUP // 2} bytes of codes is needed"
        )
    if isinstance(packed, jax.Array):
        # Arithmetic, not a table: it fuses into whatever reads the weights.
        codes = jnp.stack([packed & 15, packed >> 4], -1).astype(jnp.uint32)
        exponent, mantissa = (codes >> 1) & 3, codes & 1
        half = jnp.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1))  # 2 |w|
        # 2^-127 is below JAX's normal numbers: 2^-126 and half of the code's value instead.
        bits = jnp.maximum(scale, 1).astype(jnp.uint32) << 23
        power = jnp.where(
            scale == NAN_SCALE, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32)
        )
        unit = jnp.repeat(jnp.where(scale > 0, 0.5, 0.25), GROUP, -1).reshape(codes.shape)
        value = half.astype(jnp.float32) * jnp.where(codes & 8, -unit, unit)
        values = value.reshape(*scale.shape, GROUP) * power[..., None]
    else:
        pairs = _PAIRS.take(packed).view(np.float32)
        values = pairs.reshape(*scale.shape, GROUP) * _POWERS[scale][..., None]
    return values.reshape(*packed.shape[:-1], -1).astype(dtype)


def quantize_mxfp4(
    w: Float[np.ndarray, "*lead O I"], rule: Rule = "compressed_tensors"
) -> tuple[UInt8[np.ndarray, "*lead O half"], UInt8[np.ndarray, "*lead O groups"]]:
    """(packed, scale) of weights: nearest code, halfway to the even one, after clipping to 6 scales.

        scale = 127 + floor(log2 amax) - 2, one more if amax >= 1.75 2^floor(log2 amax)

    Args:
        w: weights, inputs last.
        rule: "compressed_tensors" is the release's; "ocp" (Microscaling 1.0) leaves out the one more,
            so that up to a quarter of the largest value is clipped.

    Returns: codes and scales; an all-zero group has scale byte 0. Zeros keep their sign, so that
    decoded codes encode to themselves (compressed-tensors writes a weight of -0 as +0).
    Raises: ValueError for a width that is no multiple of 32 and for numbers that are not finite.
    """
    if w.shape[-1] % GROUP:
        raise ValueError(f"mxfp4: width {w.shape[-1]} is no multiple of {GROUP}")
    grouped = np.asarray(w, np.float32).reshape(*w.shape[:-1], -1, GROUP)
    amax = np.abs(grouped).max(-1)
    if not np.isfinite(amax).all():
        raise ValueError("mxfp4: weights are not finite")
    mantissa, exponent = np.frexp(amax)  # amax = mantissa 2^exponent, mantissa in [1/2, 1)
    up = (mantissa >= 0.875) if rule == "compressed_tensors" else 0
    scale = np.where(amax > 0, np.clip(BIAS + exponent - 1 + up - 2, 0, NAN_SCALE - 1), 0)
    size = np.ldexp(np.abs(grouped), (BIAS - scale)[..., None])
    codes = np.signbit(grouped).astype(np.uint8) << 3
    for low, (a, b) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = (a + b) / 2
        codes += size > middle if low % 2 == 0 else size >= middle  # halfway: the even code
    codes = codes.reshape(*w.shape[:-1], -1)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale.astype(np.uint8)
