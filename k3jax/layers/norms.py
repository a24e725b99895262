"""RMS normalisation: the Kimi form, and the gated form that follows the KDA read-out."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.sharding.annotate import param


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
    """Root-mean-square normalisation of the last dimension.

        y = w * cast(x / sqrt(mean(x^2) + eps))                 (architecture 4.1)

    Args:
        x: activations.
        weight: one factor per channel.
        eps: added to the mean square, > 0.

    Returns: the normalised activations in x's dtype.
    Numerics: float32 statistics; rounded to x's dtype *before* the product with the weight, as in
    the reference model (a fused float32 product differs by one rounding).
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * normed.astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*batch V"],
    weight: Float[Array, " V"],
    gate: Float[Array, "*batch V"],
    eps: float,
) -> Float[Array, "*batch V"]:
    """RMS normalisation of each head's read-out, times a sigmoid gate.

        y = (x / sqrt(mean(x^2) + eps) * w) * sigmoid(gate)     (architecture 5.1)

    Args:
        x: read-out of the memory, one vector per head.
        weight: one factor per channel, shared by the heads.
        gate: gate logits.
        eps: added to the mean square, > 0.

    Returns: the gated read-out in the gate's dtype.
    Numerics: float32 throughout, rounded once at the end.
    """
    out = rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), eps)
    return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with its weight, initialised to one."""

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        rngs: nnx.Rngs,
        param_dtype: str = "float32",
        axis: str | None = "embed",
    ):
        self.eps = eps
        self.weight = param(rngs, nnx.initializers.ones, (dim,), (axis,), param_dtype)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.weight[...], self.eps)
