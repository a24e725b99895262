"""Causal softmax attention of gated MLA by its definition, with all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention(
    q: Float[Array, "B T H Q"],
    k: Float[Array, "B T H N"],
    k_shared: Float[Array, "B T R"],
    v: Float[Array, "B T H V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """As `api.mla_attention`, in float32 (float64 if the inputs are); o keeps that dtype.

    Cost: O(T^2 (Q + V)) per head, and as many logits in memory.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, k, k_shared, v = (x.astype(wide) for x in (q, k, k_shared, v))
    q_own, q_shared = jnp.split(q, [k.shape[-1]], axis=-1)
    logits = jnp.einsum("bthn,bshn->bhts", q_own, k)
    logits = scale * (logits + jnp.einsum("bthr,bsr->bhts", q_shared, k_shared))
    T = q.shape[1]
    mask = jnp.tril(jnp.ones((T, T), bool))[None, None]
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = mask & (same & (segment_ids[:, :, None] > 0))[:, None]
    logits = jnp.where(mask, logits, -jnp.inf)
    real = mask.any(-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(real, logits, 0.0), axis=-1)
    o = jnp.einsum("bhts,bshv->bthv", jnp.where(mask, p, 0.0), v)
    top = logits.max((0, 2, 3), initial=-jnp.inf)
    return o, jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
