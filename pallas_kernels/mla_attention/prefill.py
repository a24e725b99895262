"""A chunk of tokens against a paged cache: the expanded form of MLA while a prompt is read."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.mla_attention.pages import (
    empty_softmax,
    join_softmax,
    normalised,
    walk_pages,
)

VISIT = 512  # cached tokens whose keys and values exist at once


def mla_prefill(
    q: Float[Array, "B T H Q"],
    pages: Float[Array, "P S C"],
    page_table: Int[Array, "B M"],
    position: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    lengths: Int[Array, " B"],
    kernel: Float[Array, "R H J"],
    *,
    scale: float,
) -> Float[Array, "B T H V"]:
    """Causal attention of several queries per request to the tokens in its pages.

        o_t = sum_s p_s W_V c_s,   p = softmax_s(scale q_t . [W_K c_s | k_r,s])   over s <= position_t

    Args:
        q: queries [q_n | q_r].
        pages: cache rows [c | k_r]; those of the queries' own tokens are among them.
        page_table: pages of each request in order; entries past its length are not looked at.
        position: index of each query's token in its request.
        real: False for padding.
        lengths: tokens of each request, those of the queries included.
        kernel: [W_K | W_V] of each head, in q's dtype.
        scale: factor on q . k.

    Returns: sums of values in float32, exactly 0 at padding.
    Numerics: keys, values and p in q's dtype; float32 logits, softmax and accumulation.
    Cost: O(T (Q + V) + R (N + V)) per head and cached token; memory does not grow with them.
    """
    rank, shared = kernel.shape[0], pages.shape[2] - kernel.shape[0]
    nope, wide = q.shape[3] - shared, jnp.promote_types(q.dtype, jnp.float32)

    def visit(carry, rows, positions):
        c, k_r = jnp.split(rows.astype(q.dtype), [rank], axis=-1)
        k_n, v = jnp.split(jnp.einsum("bsr,rhj->bshj", c, kernel), [nope], axis=-1)
        k_r = jnp.broadcast_to(k_r[:, :, None], (*k_n.shape[:3], shared))
        k = jnp.concatenate([k_n, k_r], axis=-1)
        logits = scale * jnp.einsum("bthq,bshq->bhts", q, k, preferred_element_type=wide)
        seen = (positions <= position[..., None]) & real[..., None]
        return join_softmax(
            carry,
            jnp.where(seen[:, None], logits, -jnp.inf),
            lambda p: jnp.einsum(
                "bhts,bshv->bhtv", p.astype(v.dtype), v, preferred_element_type=wide
            ),
        )

    batch, tokens, heads, _ = q.shape
    carry = empty_softmax((batch, heads, tokens, kernel.shape[2] - nope), wide)
    found = walk_pages(visit, carry, pages, page_table, lengths, tokens=VISIT)
    return jnp.moveaxis(normalised(found), 1, 2)
