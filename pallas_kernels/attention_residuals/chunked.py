"""Attention Residuals in plain JAX: runs everywhere."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def score(v: Float[Array, "*lead D"], key: Float[Array, " D"], eps: float) -> Float[Array, "*lead"]:
    """<rms(v), key>, float32, for key = norm * query (K3 report, Eq. 9)."""
    v = v.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(v * v, -1) + eps) * jnp.sum(v * key, -1)


def mix(
    bank: Float[Array, "M B T D"],
    count: int | Int[Array, ""],
    prefix: Float[Array, "B T D"],
    query: Float[Array, " D"],
    norm: Float[Array, " D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """The mixture; arguments as in `api.attention_residuals`.

    The bank is never copied: its scores and its sum are taken apart from those of `prefix`.
    """
    if isinstance(count, int):
        bank = bank[:count]
    key = norm.astype(jnp.float32) * query.astype(jnp.float32)
    valid = (jnp.arange(bank.shape[0]) < count)[:, None, None]
    scores = jnp.concatenate(
        [jnp.where(valid, score(bank, key, eps), -jnp.inf), score(prefix, key, eps)[None]]
    )  # [M+1, B, T]
    p = jax.nn.softmax(scores, axis=0)
    banked = jnp.sum(p[:-1, ..., None] * bank.astype(jnp.float32), axis=0)
    return (banked + p[-1, ..., None] * prefix.astype(jnp.float32)).astype(prefix.dtype)


def chunked(bank, count, prefix, query, norm, eps, out_norm, out_eps):
    """The op. Mix and norm are computed again in the backward pass, which then keeps what plain residuals keep (KF-070)."""

    def run(bank, prefix):
        h = mix(bank, count, prefix, query, norm, eps)
        if out_norm is None:
            return h
        # As `layers.norms.rms_norm`: rounded before the product with the weight.
        h = h.astype(jnp.float32)
        h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + out_eps)
        return out_norm.astype(prefix.dtype) * h.astype(prefix.dtype)

    return (run if out_norm is None else jax.checkpoint(run))(bank, prefix), bank
