"""One decoding step of absorbed MLA against a paged latent cache (architecture 6.2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.mla_attention import tpu_decode
from k3jax.pallas_kernels.mla_attention.pages import (
    empty_softmax,
    join_softmax,
    normalised,
    walk_pages,
)

VISIT = 2048  # tokens of every request whose logits exist at once


def mla_decode(
    q: Float[Array, "B H C"],
    pages: Float[Array, "P S W"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    kv_rank: int,
    backend: str | None = None,
) -> Float[Array, "B H R"]:
    """Attention of one query per head and request to the latents that all heads share.

        o = sum_s p_s c_s,   p = softmax_s(scale q . [c_s | k_r,s])   over s < length

    Args:
        q: absorbed queries [W_K^T q_n | q_r], C = kv_rank + R. Float32 keeps their second rounding
            out of the result (KF-043), also against a bfloat16 cache.
        pages: cache rows [c | k_r], S tokens a page; what lies past a request's length may be
            anything. Rows may be wider than q, the rest zeros: 640 instead of 576 channels take as
            much memory on a TPU and spare it a copy of the cache into the kernel's layout.
        page_table: pages of each request in order; entries past its length are not looked at.
        lengths: tokens of each request, 0 for a slot that is free.
        scale: factor on q . k: that of the expanded form, (N + R)**-0.5, not C**-0.5 (KF-042).
        kv_rank: width of c.
        backend: implementation; None takes the first that fits and logs it.

    Returns: sums of latents in float32, exactly 0 for requests of length 0.
    Numerics: float32 logits, softmax and accumulation; p in q's dtype.
    Cost: reads each page of a request once: bound by the bandwidth to the cache.
    """
    if q.shape[2] > pages.shape[2] or not 0 < kv_rank <= q.shape[2]:
        raise ValueError(
            f"mla_decode: q has {q.shape[2]} channels, a cache row {pages.shape[2]}, of which the "
            f"first {kv_rank} are to be values"
        )
    if page_table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"mla_decode: {q.shape[0]} queries, page table {page_table.shape}, lengths "
            f"{lengths.shape}"
        )
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pages.shape[2] - q.shape[2])))
    run = dispatch.choose("mla_decode", BACKENDS, backend, q, pages, kv_rank)
    return run(q, pages, page_table, lengths, scale, kv_rank)


def gathered(
    q: Float[Array, "B H C"],
    pages: Float[Array, "P S C"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    scale: float,
    kv_rank: int,
) -> Float[Array, "B H R"]:
    """`mla_decode` by copying a part of every request's pages together at a time."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = q.astype(wide)

    def visit(carry, rows, positions):
        rows = rows.astype(wide)
        logits = scale * jnp.einsum("bhc,bsc->bhs", q, rows)
        seen = (positions < lengths[:, None])[:, None]
        return join_softmax(
            carry,
            jnp.where(seen, logits, -jnp.inf),
            lambda p: jnp.einsum("bhs,bsr->bhr", p, rows[..., :kv_rank]),
        )

    carry = empty_softmax((*q.shape[:2], kv_rank), wide)
    return normalised(walk_pages(visit, carry, pages, page_table, lengths, tokens=VISIT))


BACKENDS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (tpu_decode.pallas_tpu, tpu_decode.unsupported),
    "gathered": (gathered, dispatch.always),
}
