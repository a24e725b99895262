"""What a segment of a row does to any memory that enters it, and the adjoint of that: two passes
over the chunks that make no output.

They are for callers with a derivative rule of their own, such as context parallelism; `kda_summary`
is differentiable and takes any backend. With the quantities of chunked.py, per chunk

    W = beta (I + P Diag(beta))^-1 k+,   U = beta (I + P Diag(beta))^-1 v
    S  <- gamma S + k^r^T (U - W S)                                          (kcp.md, 3)
    dS <- gamma dS + q+^T do - k+^T y - W^T k^r dS,                          (kcp.md, 5)
          y = (I + P Diag(beta))^-T beta A^T do

of which only the terms with S run from chunk to chunk. The transition M is what the first line makes
of the identity with U = 0.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.kda import chunked_tiles
from k3jax.pallas_kernels.kda.api import document_starts
from k3jax.pallas_kernels.kda.chunked import is_bounded, layout
from k3jax.pallas_kernels.kda.chunked_tiles import einsum, reshape_last
from k3jax.pallas_kernels.kda.config import Config

# Chunks per step of the compiled loop. A step is short where few heads lie on a device: with 12 of
# them and 8192 tokens an H200 takes 2.9 ms with 4, and 3.6 ms with 1.
UNROLL = 4


def segment_summary(
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    g_min: float | None = None,
    chunk_size: int = 64,
    transition: bool = True,
) -> tuple[Float[Array, "B H K K"] | None, Float[Array, "B H K V"]]:
    """S_out = M S_in + E of a segment  (kcp.md, Eq. 1).

    Args:
        k, v, g, beta, segment_ids, g_min, chunk_size: as in `kda`. A document that begins after the
            segment's first real token makes M zero; whether one begins *at* that token is for the
            caller to know, who then sets M to zero.
        transition: whether M is wanted.

    Returns: M, or None, and E, float32.
    Numerics: float32 operands whatever the inputs are: rounded ones would add up along the chain
        of segments.
    Cost: 8 C K^2 per chunk and head for M and E, and the inverse. Chunks before all rows' last
        documents are skipped.
    """
    wide = jnp.promote_types(k.dtype, jnp.float32)
    (B, _, H, K), V = k.shape, v.shape[3]
    columns = K if transition else 0
    start = jnp.zeros((B, H, K, columns + V), wide)
    start += jnp.eye(K, columns + V, dtype=wide) if transition else 0

    def group(S, k, v, beta, tiles, keys):
        inverse = beta[..., None] * chunked_tiles.inverse(keys, beta)
        W = einsum("...ij,...jk->...ik", inverse, tiles.read, out=wide)
        U = einsum("...ij,...jv->...iv", inverse, v, out=wide)

        def step(S, chunk):
            W, U, write, gamma = chunk
            u = jnp.pad(U, [(0, 0)] * (U.ndim - 1) + [(columns, 0)])
            u -= einsum("...ck,...kv->...cv", W, S, out=wide)
            return gamma[..., None] * S + einsum("...ck,...cv->...kv", write, u, out=wide), None

        chunks = W, U, tiles.write, tiles.gamma
        return jax.lax.scan(step, S, chunks, unroll=UNROLL)[0]

    def body(S, x, starts):
        k, v, g, beta = x
        tiles = _tiles(k, k, g, starts, erase=False, g_min=g_min)  # rows are keys only
        return group(S, k, v, beta, tiles, chunked_tiles.scores(tiles)[1])

    S = _over_groups(body, start, (k, v, g, beta), segment_ids, chunk_size, backwards=False)
    return S[..., :columns] if transition else None, S[..., columns:]


def segment_gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    d_o: Float[Array, "B T H V"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    g_min: float | None = None,
    chunk_size: int = 64,
) -> Float[Array, "B H K V"]:
    """The gradient of the memory entering a segment, from those of the segment's outputs.

    Args, numerics: as in `segment_summary`; outputs at padding are 0, hence without gradient.
    Cost: 4 C K V per chunk and head from chunk to chunk, scores and inverse. Chunks after all rows'
        first documents are skipped.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    (B, _, H, K), V = q.shape, d_o.shape[3]

    def body(d_S, x, starts):
        q, k, g, beta, d_o = x
        tiles = _tiles(q, k, g, starts, erase=True, g_min=g_min)
        queries, keys = chunked_tiles.scores(tiles)
        inverse = beta[..., None] * chunked_tiles.inverse(keys, beta)
        read = reshape_last(tiles.read, 2, beta.shape[-1], 2, K)
        read_q, read_k = read[..., 0, :], read[..., 1, :]
        W = einsum("...ij,...jk->...ik", inverse, read_k, out=wide)
        d_u = einsum("...ij,...iv->...jv", chunked_tiles.lower(queries), d_o, out=wide)
        d_own = einsum("...ck,...cv->...kv", read_q, d_o, out=wide)
        d_own -= einsum("...ck,...cv->...kv", W, d_u, out=wide)

        def step(d_S, chunk):
            W, d_own, write, gamma = chunk
            d_u = einsum("...ck,...kv->...cv", write, d_S, out=wide)
            d_own -= einsum("...ck,...cv->...kv", W, d_u, out=wide)
            return gamma[..., None] * d_S + d_own, None

        chunks = W, d_own, tiles.write, tiles.gamma
        return jax.lax.scan(step, d_S, chunks, reverse=True, unroll=UNROLL)[0]

    start, arrays = jnp.zeros((B, H, K, V), wide), (q, k, g, beta, d_o)
    return _over_groups(body, start, arrays, segment_ids, chunk_size, backwards=True)


def _tiles(q, k, g, starts, *, erase: bool, g_min: float | None) -> chunked_tiles.Tiles:
    bounded = is_bounded(Config(g_min=g_min))
    return chunked_tiles.tiles(q, k, g, starts, bounded=bounded, erase=erase, dtype=g.dtype)


def _over_groups(
    body, start, arrays, segment_ids, chunk_size: int, *, backwards: bool
) -> Float[Array, "B H K X"]:
    """`body(memory, arrays [chunks B H C ...], starts [chunks B 1 C])` from group to group."""
    wide, starts = start.dtype, None
    if segment_ids is not None:
        real, starts = segment_ids > 0, document_starts(segment_ids)
        # A select, because padding may hold anything. Zeros neither decay nor write nor read.
        arrays = [jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0) for x in arrays]
    cut = layout(arrays[0], arrays[-1], None, Config(chunk_size=chunk_size))
    xs = [cut.cut(x) for x in arrays]
    xs = None if starts is None else cut.cut(starts), _alive(starts, cut, backwards), xs

    def group(memory, x):
        starts, alive, arrays = x
        heads_first = functools.partial(_heads_first, wide)
        starts = None if starts is None else starts[..., None, :]

        def work(memory):
            return body(memory, [heads_first(a) for a in arrays], starts)

        if alive is None:
            return work(memory), None
        return jax.lax.cond(alive, work, lambda memory: memory, memory), None

    return jax.lax.scan(group, start, xs, reverse=backwards)[0]


def _heads_first(dtype, x: Array) -> Array:
    return jnp.moveaxis(x, 3, 2).astype(dtype)  # chunks B C H ... -> chunks B H C ...


def _alive(
    starts: Bool[Array, "B T"] | None, cut, backwards: bool
) -> Bool[Array, " groups"] | None:
    """The groups that a memory can get through: from the last document on, or up to the first."""
    if starts is None:
        return None
    T, size = starts.shape[1], cut.chunks * cut.C
    token, group = jnp.arange(T), jnp.arange(cut.segments)
    if backwards:
        end = jnp.min(jnp.where(starts, token, T - 1), axis=1)
        return group <= jnp.max(end) // size
    begin = jnp.max(jnp.where(starts, token, 0), axis=1)
    return group >= jnp.min(begin) // size
