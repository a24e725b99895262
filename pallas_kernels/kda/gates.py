"""What turns projections into the inputs of KDA: normalised q and k, and the two decay gates."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LOG2E = 1.4426950408889634


def l2_normalize(x: Float[Array, "*lead K"], eps: float = 1e-6) -> Float[Array, "*lead K"]:
    """Scales every vector to length one: x / sqrt(sum x^2 + eps)  (architecture.md, 4.3).

    Args:
        x: queries or keys, per head.
        eps: added to the sum of squares (not to the mean), so a zero vector stays zero.

    Numerics: float32 inside, x's dtype out.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    norm = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * norm).astype(x.dtype)


def normalize_query(q: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """`l2_normalize(q) * K**-0.5`, the scale of the read-out; float32 inside, q's dtype out."""
    wide = l2_normalize(q.astype(jnp.promote_types(q.dtype, jnp.float32)))
    return (wide * q.shape[-1] ** -0.5).astype(q.dtype)


def log_decay(
    z: Float[Array, "*lead H K"], A_log: Float[Array, " H"], g_min: float | None
) -> Float[Array, "*lead H K"]:
    """`bounded_log_decay` if there is a bound, `softplus_log_decay` if g_min is None."""
    return softplus_log_decay(z, A_log) if g_min is None else bounded_log_decay(z, A_log, g_min)


@functools.partial(jax.checkpoint, static_argnums=2)
def _bounded(z, A_log, g_min):
    # The sigmoid is computed again in the backward pass: cheaper than to keep it as well as g.
    return g_min * jax.nn.sigmoid(jnp.exp(A_log)[:, None] * z)


def bounded_log_decay(
    z: Float[Array, "*lead H K"], A_log: Float[Array, " H"], g_min: float
) -> Float[Array, "*lead H K"]:
    """K3's gate: a log-decay between g_min and 0.

        g = g_min * sigmoid(exp(A_log) * z)      (K3 report, Eq. 5)

    Args:
        z: decay logits in float32, `dt_bias` included.
        A_log: log of the slope, one per head.
        g_min: lower bound in nats per token, negative (K3: -5).

    Returns: g in nats per token, float32.
    """
    if not g_min < 0:
        raise ValueError(f"g_min must be negative, got {g_min}; K3 uses -5.0")
    return _bounded(z, A_log, g_min)


def bounded_gate(A_log: Float[Array, " H"], dt_bias: Float[Array, "H K"]) -> Float[Array, "2 H K"]:
    """Slope and offset by which a kernel makes the bounded gate of raw logits z:

        g = g_min / (1 + 2^(slope z + offset)),  slope = -exp(A_log) / ln 2,  offset = slope dt_bias

    Numerics: float32.
    """
    slope = -jnp.exp(A_log.astype(jnp.float32)) * LOG2E
    slope = jnp.broadcast_to(slope[:, None], dt_bias.shape)
    return jnp.stack([slope, slope * dt_bias])


def softplus_log_decay(
    z: Float[Array, "*lead H K"], A_log: Float[Array, " H"]
) -> Float[Array, "*lead H K"]:
    """Kimi Linear's gate, without a lower bound: g = -exp(A_log) * softplus(z).

    Args:
        z: decay logits in float32, `dt_bias` included.
        A_log: log of the rate, one per head.

    Returns: g in nats per token, float32.
    """
    return -jnp.exp(A_log)[:, None] * jax.nn.softplus(z)
