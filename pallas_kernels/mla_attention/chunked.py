"""Causal softmax attention in plain JAX, by blocks of queries: any platform, also against a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 512  # queries whose logits exist at once; no more than this: no scan


def attention(
    q: Float[Array, "B T H Q"],
    k: Float[Array, "B S G Q"],
    v: Float[Array, "B S G V"],
    *,
    scale: float,
    q_position: Int[Array, "B T"],
    q_segment: Int[Array, "B T"],
    k_segment: Int[Array, "B S"],
    block: int = QUERY_BLOCK,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Causal softmax attention inside documents.

        o_t = sum_s p_ts v_s,   p_t = softmax_s(scale q_t . k_s)
        over keys s <= q_position_t of the same document       (architecture 6.1)

    Args:
        q: queries.
        k: keys; G divides H, and H / G neighbouring heads share one key and value head.
        v: values; their width may differ from Q.
        scale: factor on q . k.
        q_position: index, among the keys, of each query's own token.
        q_segment: document of each query, 0 for padding.
        k_segment: document of each key, 0 for padding.
        block: queries per step of the scan that longer inputs go through.

    Returns: outputs in float32, exactly 0 for queries without a key; and the largest scaled logit
    of each head over all pairs that may attend, without gradient, 0 if there is none.
    Numerics: float32 logits, softmax and accumulation (training keeps o in float32, K3 report
    2.1.2); p is rounded to v's dtype for the product with v.
    Cost: O(T S (Q + V)) per head; O(block S) memory, as the backward pass recomputes each block.
    """
    batch, queries, heads, width = q.shape
    q = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], width)  # B T G R Q
    positions = jnp.arange(k.shape[1])

    def attend(q, q_position, q_segment):
        logits = jnp.einsum("btgrq,bsgq->bgrts", q, k, preferred_element_type=jnp.float32)
        mask = (positions <= q_position[:, :, None]) & (q_segment[:, :, None] > 0)
        mask &= q_segment[:, :, None] == k_segment[:, None, :]
        # Masked before exp: a huge masked logit would give inf there, and NaN in the backward pass.
        logits = jnp.where(mask[:, None, None], logits * scale, -jnp.inf)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-jnp.inf))
        p = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0))
        total = p.sum(-1)  # B G R T
        o = jnp.einsum(
            "bgrts,bsgv->btgrv", p.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        o = o / jnp.moveaxis(jnp.where(total == 0, 1, total), 3, 1)[..., None]
        return o, top.max((0, 3, 4), initial=-jnp.inf)

    if queries <= block:
        o, top = attend(q, q_position, q_segment)
    else:
        steps = -(-queries // block)

        def split(x):  # B T ... -> steps B block ...; the added queries are padding
            x = jnp.pad(x, ((0, 0), (0, steps * block - queries)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(batch, steps, block, *x.shape[2:]), 1, 0)

        body = jax.checkpoint(lambda _, xs: (None, attend(*xs)))
        _, (o, top) = jax.lax.scan(body, None, (split(q), split(q_position), split(q_segment)))
        o = jnp.moveaxis(o, 0, 1).reshape(batch, steps * block, *o.shape[3:])[:, :queries]
        top = top.max(0)
    top = jnp.where(jnp.isfinite(top), top, 0).reshape(heads)
    return o.reshape(batch, queries, heads, v.shape[-1]), top


def chunked(
    q: Float[Array, "B T H Q"],
    k: Float[Array, "B T H N"],
    k_shared: Float[Array, "B T R"],
    v: Float[Array, "B T H V"],
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """`api.mla_attention`: whole rows, each head with a key of its own made from both parts."""
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    position = jnp.broadcast_to(jnp.arange(q.shape[1]), segment_ids.shape)
    k_shared = jnp.broadcast_to(k_shared[:, :, None], (*k.shape[:3], k_shared.shape[-1]))
    return attention(
        q, jnp.concatenate([k, k_shared], -1), v, scale=scale,
        q_position=position, q_segment=segment_ids, k_segment=segment_ids,
    )  # fmt: skip
