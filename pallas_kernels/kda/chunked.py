"""Kimi Delta Attention in chunks: matmuls inside a chunk, one memory handed from chunk to chunk.

What a chunk does without the memory is in `chunked_tiles.py`, where the layout of arrays is
explained too. Here chunks are worked on in groups, lead = (chunk, row, head): all that does not
depend on the memory at once, then the memory from chunk to chunk. README.md has the derivation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.kda import chunked_tiles
from k3jax.pallas_kernels.kda.chunked_tiles import Tiles, einsum, inner, reshape_last
from k3jax.pallas_kernels.kda.config import Config

# A group has as many chunks as give an array [*lead C K] this many elements. A CPU wants them to
# stay in its cache, an accelerator wants work to spread.
GROUP_ELEMENTS = {"cpu": 1 << 14, "other": 1 << 23}


class Links(NamedTuple):
    """Memories outside the chain of chunks: of packed documents, or snapshots. Per chunk:"""

    slot: Int[Array, "*chunks"]  # which of them it touches
    opens: Bool[Array, "*chunks"] | None  # whether it takes that memory instead of the one before
    closes: Bool[Array, "*chunks"]  # whether it leaves its memory there


class Group(NamedTuple):
    """Inputs of a group of chunks."""

    q: Float[Array, "*chunks B C H K"]
    k: Float[Array, "*chunks B C H K"]
    v: Float[Array, "*chunks B C H V"]
    g: Float[Array, "*chunks B C H K"]
    beta: Float[Array, "*chunks B C H"]
    starts: Bool[Array, "*chunks B C"] | None
    links: Links | None

    @property
    def operands(self) -> jnp.dtype:
        """Of rounded matmuls. float16 is not among them: the memory can exceed its range (KF-021)."""
        return self.q.dtype if self.q.dtype == jnp.bfloat16 else self.g.dtype


class Prepared(NamedTuple):
    """What does not depend on the memory; heads moved in front of tokens."""

    v: Float[Array, "*lead C V"]
    beta: Float[Array, "*lead C 1"]
    tiles: Tiles
    attention: Float[Array, "*lead C C"]  # A_ij = q_i . (k_j decayed from j to i), j <= i
    keys: list[Array]  # P, as A but with k_i for q_i and j < i, in blocks
    inverse: Float[Array, "*lead C C"] | None  # (I + P Diag(beta))^-1
    links: Links | None

    def read(self, row: int) -> Float[Array, "*lead C K"]:
        """Of all tokens, the queries (0) or keys (-1), decayed from the start of the chunk."""
        C, K = self.tiles.write.shape[-2:]
        R = self.tiles.read.shape[-2] // C
        return reshape_last(self.tiles.read, 2, C, R, K)[..., row, :]


def is_bounded(cfg: Config) -> bool:
    """Whether a tile may be one product. Not for autodiff, whose dg would not cancel exactly."""
    nats = None if cfg.g_min is None else -cfg.g_min * chunked_tiles.BOUNDED_TILE
    return nats is not None and nats <= chunked_tiles.MOST_NATS and not cfg.plain_autodiff


def _of_all_heads(
    starts: Bool[Array, "*chunks B C"] | None,
) -> Bool[Array, "*chunks B 1 C"] | None:
    return None if starts is None else starts[..., None, :]


def _prepare(x: Group, cfg: Config) -> Prepared:
    wide, dtype = x.g.dtype, x.operands
    q, k, v, g = (jnp.moveaxis(a, -2, -3).astype(wide) for a in (x.q, x.k, x.v, x.g))
    beta = jnp.moveaxis(x.beta, -1, -2)
    tiles = chunked_tiles.tiles(
        q,
        k,
        g,
        _of_all_heads(x.starts),
        bounded=is_bounded(cfg),
        erase=cfg.erase,
        dtype=dtype,
    )
    queries, keys = chunked_tiles.scores(tiles)
    return Prepared(
        v=v,
        beta=beta[..., None],
        tiles=tiles,
        attention=chunked_tiles.lower(queries).astype(dtype),
        keys=keys,
        inverse=chunked_tiles.inverse(keys, beta) if cfg.erase else None,
        links=x.links,
    )


def _take(memories: Float[Array, "M B H K V"], slot: Int[Array, ""]) -> Float[Array, "B H K V"]:
    return jax.lax.dynamic_index_in_dim(memories, slot, keepdims=False)


def _put(memories: Float[Array, "M B H K V"], slot, condition, memory) -> Array:
    memory = jnp.where(condition, memory, _take(memories, slot))
    return jax.lax.dynamic_update_index_in_dim(memories, memory, slot, axis=0)


def _memories(
    memory: Float[Array, "B H K V"],
    kept: Float[Array, "M B H K V"] | None,
    given: Float[Array, "M B H K V"] | None,
    x: Prepared,
    cfg: Config,
) -> tuple[tuple[Array, Array | None], tuple[Array, Array]]:
    """Hands the memory S through the chunks of a group.

        e = (I + P Diag(beta))^-1 (v - k+ S)     the errors that the tokens correct
        S <- gamma S + k^r^T (beta e)            k+ decays from the chunk's start, k^r to its end

    Returns: S and the kept memories after the group; S before every chunk and e.
    """
    dtype, wide = x.tiles.read.dtype, memory.dtype

    def step(carry, chunk):
        S, kept = carry
        v, beta, keys, inverse, write, gamma, links = chunk
        if given is not None:
            S = jnp.where(links.opens, _take(given, links.slot), S)
        e = v
        if cfg.erase:
            e = v - einsum("...ck,...kv->...cv", keys, S.astype(dtype), out=wide)
            e = einsum("...ij,...jv->...iv", inverse, e, out=wide)
        after = einsum("...ck,...cv->...kv", write, beta * e, out=wide) + gamma[..., None] * S
        if kept is not None:
            kept = _put(kept, links.slot, links.closes, after)
        return (after, kept), (S, e)

    keys = x.read(-1) if cfg.erase else None
    chunks = (x.v, x.beta, keys, x.inverse, x.tiles.write, x.tiles.gamma, x.links)
    return jax.lax.scan(step, (memory, kept), chunks)


def _forward_group(carry, x: Group, given: Array | None, cfg: Config):
    """o = q+ S + A u,  u = beta e"""
    p, wide, dtype = _prepare(x, cfg), x.g.dtype, x.operands
    memory, kept = carry
    carry, (S, e) = _memories(memory, kept, given, p, cfg)
    o = einsum("...ck,...kv->...cv", p.read(0), S.astype(dtype), out=wide)
    o += einsum("...ij,...jv->...iv", p.attention, (p.beta * e).astype(dtype), out=wide)
    return carry, jnp.moveaxis(o, -3, -2).astype(x.v.dtype)


def _backward_group(
    carry,
    group: tuple[Group, Array, Array],
    given: Array | None,
    d_given: Array | None,
    cfg: Config,
):
    """Gradients of a group's inputs from those of its outputs and of the memory leaving it.

        du = A^T do + k^r dS - P^T y,   y = (I + P Diag(beta))^-T beta (A^T do + k^r dS)
        dv = y,   dbeta = du . e
        dS <- gamma dS + q+^T do - k+^T y
        dA = do u^T,   dP = -y u^T,   dq+ = do S^T,   dk+ = -y S^T,   dk^r = u dS^T

    `tile_gradients` goes on from the last line; gamma adds gamma sum_v S dS to every dg of a chunk.
    """
    x, d_o, memory = group
    d_memory, d_kept = carry
    p, wide, dtype = _prepare(x, cfg), x.g.dtype, x.operands
    d_o = jnp.moveaxis(d_o, -2, -3).astype(dtype)
    _, (S, e) = _memories(memory, None, given, p, cfg)
    d_u = einsum("...ij,...iv->...jv", p.attention, d_o, out=wide)

    def step(carry, chunk):
        d_S, d_kept = carry
        d_o, d_u, beta, inverse, read, write, gamma, links = chunk
        if d_given is not None:
            d_S += jnp.where(links.closes, _take(d_given, links.slot), 0)
        d_u += einsum("...ck,...kv->...cv", write, d_S, out=wide)
        y, seen = beta * d_u, d_o
        if cfg.erase:
            y = einsum("...ij,...iv->...jv", inverse, y, out=wide)
            seen = jnp.stack([d_o, -y], axis=-2)
            seen = reshape_last(seen, 3, read.shape[-2], y.shape[-1])
        before = einsum("...ck,...cv->...kv", read, seen, out=wide) + gamma[..., None] * d_S
        if d_kept is not None:
            d_kept = _put(d_kept, links.slot, links.opens, before)
            before = jnp.where(links.opens, 0, before)
        return (before, d_kept), (d_S, d_u, y, seen)

    tiles = p.tiles
    chunks = (d_o, d_u, p.beta, p.inverse, tiles.read, tiles.write, tiles.gamma, p.links)
    carry, (d_S, d_u, y, seen) = jax.lax.scan(step, (d_memory, d_kept), chunks, reverse=True)
    if cfg.erase:
        d_u -= einsum("...ij,...iv->...jv", chunked_tiles.lower(p.keys), y, out=wide)
    d_beta = inner(d_u, e)
    u = p.beta * e
    d_read = einsum("...iv,...kv->...ik", seen, S.astype(dtype), out=wide)
    d_write = einsum("...cv,...kv->...ck", u, d_S, out=wide)
    d_rows, d_columns, d_g = chunked_tiles.tile_gradients(
        tiles, seen, u, d_read, d_write, _of_all_heads(x.starts)
    )
    d_g += (tiles.gamma * inner(S, d_S))[..., None, None, :]
    own = inner(d_o.astype(wide), u)
    own = reshape_last(own, 1, *d_columns.shape[-3:-1], 1)
    d_q = d_rows[..., 0, :] + own * tiles.columns
    d_k = d_columns + own * reshape_last(tiles.rows, 2, *d_rows.shape[-3:])[..., 0, :]
    if cfg.erase:
        d_k += d_rows[..., 1, :]

    def tokens_first(d: Array, like: Array) -> Array:
        d = reshape_last(d, d.ndim - p.v.ndim + 2, p.v.shape[-2], d.shape[-1])
        return jnp.moveaxis(d, -3, -2).astype(like.dtype)

    d_inputs = [tokens_first(d, like) for d, like in ((d_q, x.q), (d_k, x.k), (y, x.v), (d_g, x.g))]
    return carry, (*d_inputs, jnp.moveaxis(d_beta, -1, -2))


class Layout(NamedTuple):
    """How tokens are cut: into `segments` of `groups` of `chunks` of C tokens."""

    C: int
    chunks: int
    groups: int
    segments: int
    token: Int[Array, " places"] | None  # of each place; T where none is. None: in order
    place: Int[Array, " T"] | None  # of each token; past the end for tokens of no document
    links: Links | None

    def cut(self, x: Array) -> Array:
        """[B, T, ...] to [segments, (groups,) chunks, B, C, ...], padded by neutral zeros."""
        if self.token is not None:
            x = jnp.take(x, self.token, axis=1, mode="fill", fill_value=0)
        places = self.segments * self.groups * self.chunks * self.C
        x = jnp.pad(x, ((0, 0), (0, places - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
        x = x.reshape(x.shape[0], -1, self.C, *x.shape[2:])
        return self.stack(jnp.moveaxis(x, 1, 0))

    def stack(self, x: Array) -> Array:
        """Lays the leading axis of chunks out in segments and groups."""
        groups = (self.groups,) if self.groups > 1 else ()
        return x.reshape(self.segments, *groups, self.chunks, *x.shape[1:])

    def uncut(self, x: Array, T: int) -> Array:
        """The transpose of `cut`."""
        x = jnp.moveaxis(x.reshape(-1, *x.shape[2 + (self.groups > 1) :]), 0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        if self.place is None:
            return x[:, :T]
        return jnp.take(x, self.place, axis=1, mode="fill", fill_value=0)

    def inputs(self, q, k, v, g, beta, starts) -> Group:
        q, k, v, g, beta = (self.cut(x) for x in (q, k, v, g, beta))
        starts = None if starts is None else self.cut(starts)
        return Group(q, k, v, g, beta, starts, jax.tree.map(self.stack, self.links))


def layout(
    q: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> Layout:
    B, T, H, K = q.shape
    # No chunk longer than the row needs: at T = 1 a chunk of 64 would be 98% padding.
    C = min(cfg.chunk_size, max(16, 1 << (T - 1).bit_length()))
    # With documents, the most chunks that any division of T tokens can need.
    count = -(-T // C) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1
    elements = GROUP_ELEMENTS["cpu" if dispatch.platform() == "cpu" else "other"]
    chunks = max(1, min(count, elements // (B * H * C * max(K, v.shape[-1]))))
    groups = -(-min(count, cfg.checkpoint_every) // chunks)
    segments = -(-count // (chunks * groups))
    chunks = -(-count // (segments * groups))  # as many steps, with less padding
    total = segments * groups * chunks
    if cu_seqlens is not None:
        return Layout(C, chunks, groups, segments, *_place_documents(cu_seqlens, T, C, total))
    links = None
    if cfg.snapshot_every:
        end = (np.arange(total) + 1) * C
        closes = (end % cfg.snapshot_every == 0) & (end <= T)
        links = Links(jnp.asarray((end - 1) // cfg.snapshot_every), None, jnp.asarray(closes))
    return Layout(C, chunks, groups, segments, None, None, links)


def _place_documents(
    cu_seqlens: Int[Array, " offsets"], T: int, C: int, total: int
) -> tuple[Array, Array, Links]:
    """Places packed documents so that no chunk holds tokens of two of them."""
    documents = cu_seqlens.shape[0] - 1
    ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // C))  # in chunks
    begins = jnp.pad(ends, (1, 0))[:-1]
    chunk = jnp.arange(total)
    owner = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), documents - 1)
    used = chunk < ends[-1]
    links = Links(owner, used & (chunk == begins[owner]), used & (chunk == ends[owner] - 1))

    place = jnp.arange(total * C)
    mine = owner[place // C]
    token = cu_seqlens[mine] + place - begins[mine] * C
    token = jnp.where(used[place // C] & (token < cu_seqlens[mine + 1]), token, T)

    at = jnp.arange(T)
    mine = jnp.clip(jnp.searchsorted(cu_seqlens, at, side="right") - 1, 0, documents - 1)
    inside = (at >= cu_seqlens[0]) & (at < cu_seqlens[-1])
    place = jnp.where(inside, begins[mine] * C + at - cu_seqlens[mine], total * C)
    return token, place, links


def _forward(cfg: Config, keep: bool, q, k, v, g, beta, state, starts, cu_seqlens):
    """The outputs of `chunked`, and with `keep` the memory before every segment."""
    T, cut = q.shape[1], layout(q, v, cu_seqlens, cfg)
    memory, kept, given, snapshots = state, None, None, None
    count = T // cfg.snapshot_every if cfg.snapshot_every else 0
    if cu_seqlens is not None:
        memory, kept = jnp.zeros_like(state[:1]), state[:, None]
        given = kept
    elif cfg.snapshot_every:
        kept = jnp.broadcast_to(jnp.zeros_like(state), (max(1, count), *state.shape))

    def group(carry, x):
        return _forward_group(carry, x, given, cfg)

    if cfg.plain_autodiff:
        group = jax.checkpoint(group, prevent_cse=False)

    def segment(carry, x):
        after, o = jax.lax.scan(group, carry, x) if cut.groups > 1 else group(carry, x)
        return after, (o, carry[0] if keep else None)

    inputs = cut.inputs(q, k, v, g, beta, starts)
    (memory, kept), (o, memories) = jax.lax.scan(segment, (memory, kept), inputs)
    if kept is not None and cu_seqlens is not None:
        memory = kept[:, 0]
    elif kept is not None:
        snapshots = jnp.moveaxis(kept[:count], 0, 1)
    o = cut.uncut(o, T)
    return (o, memory, snapshots), memories


def _backward(cfg: Config, saved, cotangents):
    q, k, v, g, beta, state, starts, cu_seqlens, memories = saved
    d_o, d_memory, d_snapshots = cotangents
    T, cut = q.shape[1], layout(q, v, cu_seqlens, cfg)
    given, d_given, d_kept = None, None, None
    if cu_seqlens is not None:
        # What leaves an empty document is what entered it.
        given, d_given = state[:, None], d_memory[:, None]
        empty = (jnp.diff(cu_seqlens) == 0)[:, None, None, None, None]
        d_memory, d_kept = jnp.zeros_like(state[:1]), jnp.where(empty, d_given, 0)
    elif cfg.snapshot_every and d_snapshots.size:
        d_given = jnp.moveaxis(d_snapshots, 1, 0)

    def group(carry, x):
        return _backward_group(carry, x, given, d_given, cfg)

    def again(memory, x):
        (after, _), _ = _memories(memory, None, given, _prepare(x, cfg), cfg)
        return after, memory

    def segment(carry, x):
        if cut.groups == 1:
            return group(carry, x)
        inputs, d_o, memory = x
        _, memories = jax.lax.scan(again, memory, inputs)
        return jax.lax.scan(group, carry, (inputs, d_o, memories), reverse=True)

    x = (cut.inputs(q, k, v, g, beta, starts), cut.cut(d_o), memories)
    (d_memory, d_kept), d_inputs = jax.lax.scan(segment, (d_memory, d_kept), x, reverse=True)
    d_q, d_k, d_v, d_g, d_beta = (cut.uncut(d, T) for d in d_inputs)
    if starts is not None:
        d_g = jnp.where(starts[..., None, None], 0, d_g)
    d_state = d_memory if d_kept is None else d_kept[:, 0]
    return d_q, d_k, d_v, d_g, d_beta, d_state, None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_rule(cfg: Config, *arrays):
    return _forward(cfg, False, *arrays)[0]


def _forward_rule(cfg: Config, *arrays):
    out, memories = _forward(cfg, True, *arrays)
    return out, (*arrays, memories)


_with_rule.defvjp(_forward_rule, _backward)


def chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "N H K V"],
    starts: Bool[Array, "B T"] | None,
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"], Float[Array, "B M H K V"] | None]:
    """KDA chunk by chunk; arguments as in `reference.recurrent`.

    Returns: outputs in v's dtype, final memories, and the snapshots if asked for.
    Numerics: g, exponents, the triangular inverse and S are in g's dtype (float32), and so are
        matmuls. If q is bfloat16, those of pairs inside a tile and those of outputs have bfloat16
        operands, and so has what reads S; they too accumulate in g's dtype.
    Cost: O(T (C (K + V) + K V)) per head in T / C sequential steps. The backward pass keeps the
        inputs and one memory per `checkpoint_every` chunks (fewer where small chunks are grouped),
        and recomputes one group of chunks at a time.
    """
    arrays = (q, k, v, g, beta, state, starts, cu_seqlens)
    if cfg.plain_autodiff:
        return _forward(cfg, False, *arrays)[0]
    return _with_rule(cfg, *arrays)
