"""Kimi Delta Attention in chunks: matmuls inside a chunk, one memory handed from chunk to chunk.

Tokens are cut into chunks of C, chunks into n tiles of t. The arrays of a group of chunks are laid
out [*lead C K], lead = (chunk, row, head). What meets the same keys lies together: with R = 2 token
i has the rows 2i, its query, and 2i + 1, its key. README.md has the derivation.

Every exponent is a sum of log-decays over tokens between a write and a read, hence <= 0: nothing is
divided by a decay, nothing overflows, no two large sums are subtracted. The one exception is kept
in bounds by a promise (`Config.g_min`), see `_near_decays`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.kda.config import Config

# A log-decay that empties the memory: exp of it is exactly 0 in float32 and float64, and sums of
# it stay finite (an infinity would meet the zeros of the summation matrices as NaN).
FORGET = -1e30
# Tokens per tile. Under a promised g_min a tile is one product of factors exp(G) and exp(-G), which
# float32 holds for up to MOST_NATS. Otherwise it is made of halves of halves, of which a small tile
# needs fewer.
BOUNDED_TILE, HALVED_TILE = 16, 8
MOST_NATS = 80.0
# exp(-80) times a small q, or a small gradient, would be flushed to zero. Both factors get half of
# the range, by a power of two, which rounds nothing: 2**58 = exp(40.2).
BALANCE = 2.0**58
# A group of chunks is worked on at once: as many as give an array [*lead C K] this many elements.
# A CPU wants it to stay in its cache, an accelerator wants work to spread.
GROUP_ELEMENTS = {"cpu": 1 << 14, "other": 1 << 22}


def _einsum(equation: str, *operands: Array, out: jnp.dtype) -> Array:
    return jnp.einsum(
        equation, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out
    )


def _sum_rows(marks: np.ndarray, x: Float[Array, "*lead m K"]) -> Float[Array, "*lead i K"]:
    """For each row of the 0/1 matrix `marks` [i, m], the sum of the rows of x that it marks.

    The matrix is repeated for every x: to meet a shared one XLA would transpose all of x.
    """
    repeated = jnp.asarray(marks, x.dtype) + jnp.zeros_like(x[..., :1, :1])
    return _einsum("...im,...mk->...ik", repeated, x, out=x.dtype)


def _inner(a: Float[Array, "*lead X"], b: Float[Array, "*lead X"]) -> Float[Array, "*lead"]:
    """sum_x a b, as a matmul: a CPU takes longer for a sum along rows."""
    return _einsum("...x,x->...", a * b, jnp.ones(a.shape[-1], a.dtype), out=a.dtype)


def _halving(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits the pairs (i > j) of a tile by the block boundary that separates them.

    For every block size s = 1, 2, 4, ... a pair is handled if i lies in the right and j in the left
    half of the same block of 2s tokens. Seen from that boundary a row has the decays from the
    boundary to itself (inclusive), a column the decays after itself up to the boundary.

    Returns: per s, the tokens whose decays are summed [s, size, size], and the pairs, likewise.
    """
    i, j = np.mgrid[:size, :size]
    summed, pairs = [], []
    for s in (2**n for n in range(size.bit_length() - 1)):
        same_half, right = i // s == j // s, i // s % 2 == 1
        summed.append(same_half & np.where(right, j <= i, j > i))
        pairs.append((i // (2 * s) == j // (2 * s)) & ~same_half & (i > j))
    return np.stack(summed), np.stack(pairs)


def _half(x: Float[Array, "*lead n R K"], s: int, which: int) -> Float[Array, "*lead b s*R K"]:
    """Of every block of 2s tiles the left (0) or right (1) half, its rows in one."""
    *lead, n, R, K = x.shape
    return x.reshape(*lead, n // (2 * s), 2, s * R, K)[..., which, :, :]


def _unhalf(x: Float[Array, "*lead b m K"], s: int, which: int) -> Float[Array, "*lead n R K"]:
    """The transpose of `_half`: zeros in the other half."""
    *lead, b, m, K = x.shape
    zero = jnp.zeros_like(x)
    both = jnp.stack([zero, x] if which else [x, zero], axis=-3)
    return both.reshape(*lead, 2 * b * s, m // s, K)


def _join(
    diagonal: Float[Array, "*lead d s s"], below: Float[Array, "*lead b s s"]
) -> Float[Array, "*lead b s2 s2"]:
    """[[d_0, 0], [below, d_1]] for every two neighbouring blocks of the diagonal, d = 2b."""
    *lead, b, s, _ = below.shape
    half = np.arange(2)
    I, J = half[:, None, None, None], half[:, None]  # halves of the rows and of the columns
    lower = jnp.where(I > J, below[..., None, :, None, :], 0)
    joined = jnp.where(I == J, diagonal.reshape(*lead, b, 2, s, 1, s), lower)
    return joined.reshape(*lead, b, 2 * s, 2 * s)


def _is_bounded(cfg: Config) -> bool:
    """Whether a tile may be one product. Not for autodiff, whose dg would not cancel exactly."""
    promised = cfg.g_min is not None and cfg.g_min * BOUNDED_TILE >= -MOST_NATS
    return promised and not cfg.plain_autodiff


def _tile_sums(n: int) -> np.ndarray:
    """0/1 matrices [., n] of the whole tiles between tile I and the boundary that it looks to.

    Per level s = 2, 4, ..., n / 2 the middle of its block of 2s tiles; the start of the chunk; its
    end. A last row marks the whole chunk.
    """
    I, m = np.mgrid[:n, :n]
    sums = []
    for s in (2**level for level in range(1, n.bit_length() - 1)):
        middle = I // (2 * s) * 2 * s + s
        sums.append(np.where(middle <= I, (middle <= m) & (m < I), (m > I) & (m < middle)))
    return np.concatenate([*sums, m < I, m > I, np.ones((1, n), bool)])


class _Terms(NamedTuple):
    """Decays of a group of chunks, and the operands that carry them.

    R is 2, rows of queries and of keys, or 1 without erasure, when queries alone look back.
    """

    rows: Float[Array, "*lead n Rt K"]  # q and k
    columns: Float[Array, "*lead n t K"]  # k
    row_decay: Float[Array, "*lead n t K"]  # from the start of the tile to the token, inclusive
    column_decay: Float[Array, "*lead n t K"]  # after the token to the end of the tile
    near_row_decay: Float[Array, "*lead n l t K"]  # towards the boundaries inside a tile
    near_column_decay: Float[Array, "*lead n l t K"]
    near_pairs: Bool[Array | np.ndarray, "*any l Rt t"]  # the pairs that they are for
    tile_decay: Float[Array, "*lead x n K"]  # over whole tiles, the rows of `_tile_sums`
    # Operands of the products rows . columns: inside a tile; of neighbouring halves, per level;
    # looking back to the start of the chunk, ahead to its end.
    near: tuple[Array, Array]
    levels: tuple[tuple[Array, Array], ...]
    read: Float[Array, "*lead RC K"]
    write: Float[Array, "*lead C K"]
    gamma: Float[Array, "*lead K"]  # decay of the whole chunk


def _terms(
    q: Float[Array, "*lead C K"],
    k: Float[Array, "*lead C K"],
    g: Float[Array, "*lead C K"],
    starts: Bool[Array, "G B 1 C"] | None,
    cfg: Config,
    dtype: jnp.dtype,
) -> _Terms:
    """Decays and decayed operands; the operands are rounded to `dtype`."""
    *lead, C, K = q.shape
    t = BOUNDED_TILE if _is_bounded(cfg) else HALVED_TILE
    n, R = C // t, 2 if cfg.erase else 1
    rows = jnp.stack([q, k], axis=-2).reshape(*lead, n, 2 * t, K) if cfg.erase else q
    rows = rows.reshape(*lead, n, R * t, K)
    columns = k.reshape(*lead, n, t, K)
    g = g.reshape(*lead, n, t, K)

    # The decays of the tile, and towards the boundaries inside it.
    i, j = np.mgrid[:t, :t]
    near_g = g
    if starts is not None:
        starts = starts.reshape(*starts.shape[:-1], n, t)
        g = jnp.where(starts[..., None], FORGET, g)
    if _is_bounded(cfg):
        pairs = (j < i)[None]
        if starts is None:
            sums = _sum_rows(np.concatenate([j <= i, j > i, -1.0 * (j <= i)]), g)
            decays = jnp.exp(sums)
            near_row, near_column = decays[..., :t, :], decays[..., 2 * t :, :]
        else:
            sums = _sum_rows(np.concatenate([j <= i, j > i]), g)
            decays = jnp.exp(sums)
            # Summed inside each document: bit for bit, none depends on its neighbours (KF-048).
            document = jnp.cumsum(starts, axis=-1)
            same = document[..., :, None] == document[..., None, :]
            near_g = jnp.where(starts[..., None], 0, near_g)
            near = _einsum(
                "...ij,...jk->...ik", (same & (j <= i)).astype(g.dtype), near_g, out=g.dtype
            )
            near_row, near_column = jnp.exp(near), jnp.exp(-near)
            pairs = pairs & same[..., None, :, :]
        near_row = near_row[..., None, :, :] * BALANCE
        near_column = near_column[..., None, :, :] / BALANCE
    else:
        halves, pairs = _halving(t)
        sums = _sum_rows(np.concatenate([j <= i, j > i, *halves]), g)
        decays = jnp.exp(sums)
        near_row = near_column = decays[..., 2 * t :, :].reshape(*lead, n, -1, t, K)
    row, column = decays[..., :t, :], decays[..., t : 2 * t, :]
    tile = jnp.exp(_sum_rows(_tile_sums(n), sums[..., t - 1, :]))
    gamma, tile = tile[..., -1, :], tile[..., :-1, :].reshape(*lead, -1, n, K)

    def scaled(x: Float[Array, "*lead n R K"], index: int) -> Float[Array, "*lead n R K"]:
        return x * tile[..., index, :, None, :] if n > 1 else x

    near = rows[..., None, :, :] * _each(near_row, R), columns[..., None, :, :] * near_column
    back, ahead = rows * _each(row, R), columns * column
    levels = []
    for level in range(n.bit_length() - 1):
        s, x = 2**level, (back, ahead)
        if level:
            x = scaled(back, level - 1), scaled(ahead, level - 1)
        levels.append((_half(x[0], s, 1).astype(dtype), _half(x[1], s, 0).astype(dtype)))
    return _Terms(
        rows=rows,
        columns=columns,
        row_decay=row,
        column_decay=column,
        near_row_decay=near_row,
        near_column_decay=near_column,
        near_pairs=pairs.repeat(R, axis=-2),
        tile_decay=tile,
        near=(near[0].astype(dtype), near[1].astype(dtype)),
        levels=tuple(levels),
        read=scaled(back, -2).reshape(*lead, R * C, K).astype(dtype),
        write=scaled(ahead, -1).reshape(*lead, C, K).astype(dtype),
        gamma=gamma,
    )


def _each(decay: Float[Array, "*lead t K"], R: int) -> Float[Array, "*lead Rt K"]:
    """The decay of a token for each of its R rows."""
    return jnp.repeat(decay, R, axis=-2)


def _scores(terms: _Terms) -> tuple[list[Array], list[Array]]:
    """rows_i . (columns_j decayed from j to i), block by block: of queries and of keys.

    Returns: [*lead n t t], then per level the blocks [*lead b s s] below the diagonal. Queries see
    their own column (j = i), keys do not. Without erasure the blocks of keys repeat the queries'.
    """
    wide = terms.gamma.dtype
    *lead, n, t, K = terms.columns.shape
    near = _einsum("...ik,...jk->...ij", *terms.near, out=wide)
    near = jnp.sum(jnp.where(terms.near_pairs, near, 0), axis=-3)
    R = near.shape[-2] // t
    own = _inner(terms.rows.reshape(*lead, n, t, R, K)[..., 0, :], terms.columns)
    blocks = [near, *(_einsum("...ik,...jk->...ij", *x, out=wide) for x in terms.levels)]
    blocks = [x.reshape(*x.shape[:-2], -1, R, x.shape[-1]) for x in blocks]
    queries, keys = ([x[..., r, :] for x in blocks] for r in (0, R - 1))
    queries[0] += own[..., None] * np.eye(t, dtype=wide)
    return queries, keys


def _lower(blocks: list[Array]) -> Float[Array, "*lead C C"]:
    """The lower triangular matrix of these blocks."""
    return functools.reduce(_join, blocks)[..., 0, :, :]


def _inverse(blocks: list[Array], beta: Float[Array, "*lead C"]) -> Float[Array, "*lead C C"]:
    """(I + P Diag(beta))^-1 of the strictly lower triangular matrix P of these blocks.

    The inverse grows by merging neighbouring blocks, B_21 = -B_22 P_21 B_11, from single tokens to
    tiles to the chunk. Unlike products of powers of P this does not cancel when keys are alike.
    XLA's own triangular solve is a LAPACK call per matrix on a CPU, whose threads wait spinning.
    """
    tile, *below = blocks
    n, t = tile.shape[-3:-1]
    wide = tile.dtype
    beta = beta.reshape(*beta.shape[:-1], n, t, 1)
    tile = tile * jnp.swapaxes(beta, -2, -1)
    pairs = _halving(t)[1]
    inverse = jnp.eye(t, dtype=wide) - jnp.where(pairs[0], tile, 0)
    for level in pairs[1:]:
        merged = _einsum("...ij,...jk->...ik", jnp.where(level, tile, 0), inverse, out=wide)
        inverse = inverse - _einsum("...ij,...jk->...ik", inverse, merged, out=wide)
    for block in below:
        *lead, b, s, _ = block.shape
        block = block * jnp.swapaxes(_half(beta, s // t, 0), -2, -1)
        halves = inverse.reshape(*lead, b, 2, s, s)
        merged = _einsum("...ij,...jk->...ik", block, halves[..., 0, :, :], out=wide)
        merged = _einsum("...ij,...jk->...ik", halves[..., 1, :, :], merged, out=wide)
        inverse = _join(inverse, -merged)
    return inverse[..., 0, :, :]


class _Links(NamedTuple):
    """Memories outside the chain of chunks: of packed documents, or snapshots. Per chunk:"""

    slot: Int[Array, " *N"]  # which of them it touches
    opens: Bool[Array, " *N"] | None  # whether it takes that memory instead of the one before
    closes: Bool[Array, " *N"]  # whether it leaves its memory there


def _put(
    kept: Float[Array, "M B H K V"],
    slot: Int[Array, ""],
    condition: Bool[Array, ""],
    memory: Float[Array, "B H K V"],
) -> Float[Array, "M B H K V"]:
    before = jax.lax.dynamic_index_in_dim(kept, slot, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(
        kept, jnp.where(condition, memory, before), slot, axis=0
    )


class _Group(NamedTuple):
    """Inputs of a group of G chunks."""

    q: Float[Array, "*G B C H K"]
    k: Float[Array, "*G B C H K"]
    v: Float[Array, "*G B C H V"]
    g: Float[Array, "*G B C H K"]
    beta: Float[Array, "*G B C H"]
    starts: Bool[Array, "*G B C"] | None
    links: _Links | None


class _Prepared(NamedTuple):
    """What does not depend on the memory; heads moved in front of tokens."""

    v: Float[Array, "*lead C V"]
    beta: Float[Array, "*lead C"]
    terms: _Terms
    attention: Float[Array, "*lead C C"]  # A_ij = q_i . (k_j decayed from j to i), j <= i
    keys: list[Array]  # P, as A but with k_i and j < i, in blocks
    inverse: Float[Array, "*lead C C"] | None  # (I + P Diag(beta))^-1
    links: _Links | None


def _prepare(x: _Group, cfg: Config) -> _Prepared:
    wide, dtype = x.g.dtype, _operands(x)
    q, k, v, g = (jnp.moveaxis(a, -2, -3).astype(wide) for a in (x.q, x.k, x.v, x.g))
    beta = jnp.moveaxis(x.beta, -1, -2)
    starts = None if x.starts is None else x.starts[:, :, None]
    terms = _terms(q, k, g, starts, cfg, dtype)
    queries, keys = _scores(terms)
    inverse = _inverse(keys, beta) if cfg.erase else None
    return _Prepared(v, beta, terms, _lower(queries).astype(dtype), keys, inverse, x.links)


def _operands(x: _Group) -> jnp.dtype:
    """Matmul operands. float16 is not among them: the memory can exceed its range (KF-021)."""
    return x.q.dtype if x.q.dtype == jnp.bfloat16 else x.g.dtype


def _memories(
    memory: Float[Array, "B H K V"],
    kept: Float[Array, "M B H K V"] | None,
    given: Float[Array, "M B H K V"] | None,
    x: _Prepared,
    cfg: Config,
) -> tuple[tuple[Array, Array | None], tuple[Array, Array]]:
    """Hands the memory S through the chunks of a group.

        e = (I + P Diag(beta))^-1 (v - k+ S)     the errors that the tokens correct
        S <- gamma S + k^r^T (beta e)            k+ decays from the chunk's start, k^r to its end

    Returns: S and the kept memories after the group; S before every chunk and e.
    """
    terms, dtype, wide = x.terms, x.terms.write.dtype, memory.dtype
    keys = None
    if cfg.erase:
        keys = terms.read.reshape(*terms.write.shape[:-1], 2, -1)[..., 1, :]

    def step(carry, chunk):
        S, kept = carry
        v, beta, keys, inverse, write, gamma, links = chunk
        if links is not None and links.opens is not None:
            entering = jax.lax.dynamic_index_in_dim(given, links.slot, keepdims=False)
            S = jnp.where(links.opens, entering, S)
        e = v
        if cfg.erase:
            e = v - _einsum("...ck,...kv->...cv", keys, S.astype(dtype), out=wide)
            e = _einsum("...ij,...jv->...iv", inverse, e, out=wide)
        u = (beta[..., None] * e).astype(dtype)
        after = _einsum("...ck,...cv->...kv", write, u, out=wide)
        after += gamma[..., None] * S
        if kept is not None:
            kept = _put(kept, links.slot, links.closes, after)
        return (after, kept), (S, e)

    chunks = (x.v, x.beta, keys, x.inverse, terms.write, terms.gamma, x.links)
    return jax.lax.scan(step, (memory, kept), chunks)


def _forward_group(carry, x: _Group, given, cfg: Config):
    """Outputs of a group, and the memory that entered it.

    o = q+ S + A u,  u = beta e
    """
    p = _prepare(x, cfg)
    terms, wide = p.terms, x.g.dtype
    memory, kept = carry
    (memory, kept), (S, e) = _memories(memory, kept, given, p, cfg)
    queries = terms.read.reshape(*e.shape[:-1], -1, terms.read.shape[-1])[..., 0, :]
    u = (p.beta[..., None] * e).astype(queries.dtype)
    o = _einsum("...ck,...kv->...cv", queries, S.astype(queries.dtype), out=wide)
    o += _einsum("...ij,...jv->...iv", p.attention, u, out=wide)
    return (memory, kept), jnp.moveaxis(o, -3, -2).astype(x.v.dtype)


def _backward_group(carry, xs: tuple[_Group, Array, Array], given, d_given, cfg: Config):
    """Gradients of a group's inputs from those of its outputs and of the memory leaving it.

        du = A^T do + k^r dS - P^T y,   y = (I + P Diag(beta))^-T beta (A^T do + k^r dS)
        dv = y,   dbeta = du . e
        dS <- gamma dS + q+^T do - k+^T y
        dA = do u^T,   dP = -y u^T,   dq+ = do S^T,   dk+ = -y S^T,   dk^r = u dS^T

    Summed over all that a token's query, key as a row and key as a column take part in, that is
    dq, dk = dr + dc, and per channel

        dg_t = sum_(i >= t) (q dq + k dr - k dc)_i + sum_(j < t) (k^r dk^r)_j + gamma sum_v S dS

    In this line dq and dc leave out a token's pair with itself, and dc leaves out k^r: both cancel
    exactly, but their rounding would drown the dg of steep decays.
    """
    x, d_o, memory = xs
    d_memory, d_kept = carry
    p = _prepare(x, cfg)
    terms, wide, dtype = p.terms, x.g.dtype, _operands(x)
    *lead, C, V = p.v.shape
    n, t, K = terms.columns.shape[-3:]
    R, beta = terms.rows.shape[-2] // t, p.beta[..., None]
    d_o = jnp.moveaxis(d_o, -2, -3).astype(dtype)
    _, (S, e) = _memories(memory, None, given, p, cfg)
    u, S_operand = (beta * e).astype(dtype), S.astype(dtype)
    d_u = _einsum("...ij,...iv->...jv", p.attention, d_o, out=wide)

    def step(carry, chunk):
        d_S, d_kept = carry
        d_o, d_u, beta, inverse, read, write, gamma, links = chunk
        if links is not None:
            arriving = jax.lax.dynamic_index_in_dim(d_given, links.slot, keepdims=False)
            d_S += jnp.where(links.closes, arriving, 0)
        d_u += _einsum("...ck,...kv->...cv", write, d_S.astype(dtype), out=wide)
        y, seen = beta * d_u, d_o
        if cfg.erase:
            y = _einsum("...ij,...iv->...jv", inverse, y, out=wide)
            seen = jnp.stack([d_o, -y.astype(dtype)], axis=-2).reshape(*y.shape[:-2], 2 * C, V)
        before = _einsum("...ck,...cv->...kv", read, seen, out=wide) + gamma[..., None] * d_S
        if d_kept is not None:
            d_kept = _put(d_kept, links.slot, links.opens, before)
            before = jnp.where(links.opens, 0, before)
        return (before, d_kept), (d_S, d_u, y, seen)

    chunks = (d_o, d_u, beta, p.inverse, terms.read, terms.write, terms.gamma, p.links)
    carry, (d_S, d_u, y, seen) = jax.lax.scan(step, (d_memory, d_kept), chunks, reverse=True)
    if cfg.erase:
        d_u -= _einsum("...ij,...iv->...jv", _lower(p.keys), y, out=wide)
    d_beta = _inner(d_u, e)

    def scaled(x: Array, index: int) -> Array:
        return x * terms.tile_decay[..., index, :, None, :] if n > 1 else x

    # Of the decayed rows and columns of the tiles.
    d_back = _einsum("...iv,...kv->...ik", seen, S_operand, out=wide)
    d_back = scaled(d_back.reshape(*lead, n, R * t, K), -2)
    d_write = _einsum("...cv,...kv->...ck", u, d_S.astype(dtype), out=wide)
    d_ahead = jnp.zeros_like(terms.columns)
    seen, u = seen.reshape(*lead, n, R * t, V), u.reshape(*lead, n, t, V)
    for level, (rows, columns) in enumerate(terms.levels):
        s = 2**level
        d_pair = _einsum("...iv,...jv->...ij", _half(seen, s, 1), _half(u, s, 0), out=wide)
        d_pair = d_pair.astype(dtype)
        d_rows = _unhalf(_einsum("...ij,...jk->...ik", d_pair, columns, out=wide), s, 1)
        d_columns = _unhalf(_einsum("...ij,...ik->...jk", d_pair, rows, out=wide), s, 0)
        if level:
            d_rows, d_columns = scaled(d_rows, level - 1), scaled(d_columns, level - 1)
        d_back, d_ahead = d_back + d_rows, d_ahead + d_columns
    d_pair = _einsum("...iv,...jv->...ij", seen, u, out=wide)
    d_pair = jnp.where(terms.near_pairs, d_pair[..., None, :, :], 0).astype(dtype)
    rows, columns = terms.near
    d_near_rows = _einsum("...ij,...jk->...ik", d_pair, columns, out=wide)
    d_near_columns = _einsum("...ij,...ik->...jk", d_pair, rows, out=wide)

    # Of the tokens. Pairs inside a tile flow as rounded, so that what cancels does so in bfloat16.
    own = _inner(d_o.astype(wide), u.reshape(*lead, C, V).astype(wide)).reshape(*lead, n, t, 1)
    d_rows, d_columns = d_back * _each(terms.row_decay, R), d_ahead * terms.column_decay
    flow = terms.rows * d_rows + jnp.sum(terms.near[0] * d_near_rows, axis=-3)
    flow = jnp.sum(flow.reshape(*lead, n, t, R, K), axis=-2)
    flow -= terms.columns * d_columns + jnp.sum(terms.near[1] * d_near_columns, axis=-3)
    d_write = d_write.reshape(*lead, n, t, K)
    written = terms.write.reshape(*lead, n, t, K) * d_write
    through = terms.gamma * _inner(S, d_S)
    starts = None if x.starts is None else x.starts[:, :, None]
    d_g = _sum_after_and_before(flow, written, starts) + through[..., None, None, :]

    d_rows += jnp.sum(d_near_rows * _each(terms.near_row_decay, R), axis=-3)
    d_columns += jnp.sum(d_near_columns * terms.near_column_decay, axis=-3)
    d_columns += scaled(d_write, -1) * terms.column_decay
    rows, d_rows = (x.reshape(*lead, n, t, R, K) for x in (terms.rows, d_rows))
    d_q = d_rows[..., 0, :] + own * terms.columns
    d_k = d_columns + own * rows[..., 0, :]
    if cfg.erase:
        d_k += d_rows[..., 1, :]

    def tokens_first(d: Array, like: Array) -> Array:
        return jnp.moveaxis(d.reshape(*lead, C, -1), -3, -2).astype(like.dtype)

    pairs = ((d_q, x.q), (d_k, x.k), (y, x.v), (d_g, x.g))
    gradients = (tokens_first(d, like) for d, like in pairs)
    return carry, (*gradients, jnp.moveaxis(d_beta, -1, -2))


def _sum_after_and_before(
    after: Float[Array, "*lead n t K"],
    before: Float[Array, "*lead n t K"],
    starts: Bool[Array, "G B 1 C"] | None,
) -> Float[Array, "*lead n t K"]:
    """Per token of a chunk the sum of `after` from it on and of `before` up to the token before.

    With documents `after` is summed inside each: over their border it would cancel, but only up to
    rounding (KF-048). `before` is zero in all documents but the one that reaches the chunk's end.
    """
    *lead, n, t, K = after.shape
    if starts is not None:
        C = n * t
        i, j = np.mgrid[:C, :C]
        document = jnp.cumsum(starts, axis=-1)
        later = (document[..., :, None] == document[..., None, :]) & (j >= i)
        marks = jnp.concatenate(jnp.broadcast_arrays(later, j < i), axis=-1).astype(after.dtype)
        both = jnp.concatenate([x.reshape(*lead, C, K) for x in (after, before)], axis=-2)
        sums = _einsum("...ij,...jk->...ik", marks, both, out=after.dtype)
        return sums.reshape(after.shape)
    i, j = np.mgrid[:t, :t]
    ones, zeros = np.ones((1, t)), np.zeros((1, t))
    marks = np.block([[j >= i, j < i], [ones, zeros], [zeros, ones]])
    sums = _sum_rows(marks, jnp.concatenate([after, before], axis=-2))
    i, j = np.mgrid[:n, :n]
    marks = np.stack([j > i, j < i], axis=-1).reshape(n, 2 * n)
    tiles = _sum_rows(marks, sums[..., t:, :].reshape(*lead, 2 * n, K))
    return sums[..., :t, :] + tiles[..., None, :]


class _Layout(NamedTuple):
    """How the tokens are cut: `segments` of `groups` groups of `chunks` chunks of C tokens."""

    C: int
    chunks: int
    groups: int
    segments: int
    token: Int[Array, " places"] | None  # of each place; T where none is. None: in order
    place: Int[Array, " T"] | None  # of each token; past the end for tokens of no document
    links: _Links | None

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
        groups = () if self.groups == 1 else (self.groups,)
        return x.reshape(self.segments, *groups, self.chunks, *x.shape[1:])

    def uncut(self, x: Array, T: int) -> Array:
        """The transpose of `cut`."""
        x = jnp.moveaxis(x.reshape(-1, *x.shape[2 + (self.groups > 1) :]), 0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        if self.place is None:
            return x[:, :T]
        return jnp.take(x, self.place, axis=1, mode="fill", fill_value=0)


def _layout(
    q: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> _Layout:
    B, T, H, K = q.shape
    # No chunk longer than the row needs: at T = 1 a chunk of 64 would be 98% padding.
    C = min(cfg.chunk_size, max(16, 1 << (T - 1).bit_length()))
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # With documents, the most chunks that any division of T tokens can need.
    count = T // C + documents if documents else -(-T // C)
    elements = GROUP_ELEMENTS["cpu" if jax.default_backend() == "cpu" else "other"]
    chunks = max(1, min(count, elements // (B * H * C * max(K, v.shape[-1]))))
    groups = max(1, min(count, cfg.checkpoint_every) // chunks)
    groups += groups * chunks < min(count, cfg.checkpoint_every)
    segments = -(-count // (chunks * groups))
    # The same number of steps with less padding.
    chunks = -(-count // (segments * groups))
    total = segments * groups * chunks
    if cu_seqlens is not None:
        return _Layout(C, chunks, groups, segments, *_place_documents(cu_seqlens, T, C, total))
    links = None
    if cfg.snapshot_every is not None:
        end = (np.arange(total) + 1) * C
        closes = (end % cfg.snapshot_every == 0) & (end <= T)
        links = _Links(jnp.asarray((end - 1) // cfg.snapshot_every), None, jnp.asarray(closes))
    return _Layout(C, chunks, groups, segments, None, None, links)


def _place_documents(
    cu_seqlens: Int[Array, " offsets"], T: int, C: int, total: int
) -> tuple[Array, Array, _Links]:
    """Places packed documents so that no chunk holds tokens of two of them."""
    documents = cu_seqlens.shape[0] - 1
    ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // C))  # in chunks
    begins = jnp.pad(ends, (1, 0))[:-1]
    chunk = jnp.arange(total)
    owner = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), documents - 1)
    used = chunk < ends[-1]
    links = _Links(owner, used & (chunk == begins[owner]), used & (chunk == ends[owner] - 1))

    place = jnp.arange(total * C)
    mine = owner[place // C]
    token = cu_seqlens[mine] + place - begins[mine] * C
    token = jnp.where(used[place // C] & (token < cu_seqlens[mine + 1]), token, T)

    at = jnp.arange(T)
    mine = jnp.clip(jnp.searchsorted(cu_seqlens, at, side="right") - 1, 0, documents - 1)
    inside = (at >= cu_seqlens[0]) & (at < cu_seqlens[-1])
    place = jnp.where(inside, begins[mine] * C + at - cu_seqlens[mine], total * C)
    return token, place, links


def _inputs(layout: _Layout, q, k, v, g, beta, starts) -> _Group:
    links = jax.tree.map(layout.stack, layout.links)
    q, k, v, g, beta = (layout.cut(x) for x in (q, k, v, g, beta))
    return _Group(q, k, v, g, beta, None if starts is None else layout.cut(starts), links)


def _forward(
    cfg: Config, keep: bool, q, k, v, g, beta, state, starts, cu_seqlens
) -> tuple[tuple[Array, Array, Array | None], Array | None]:
    """The outputs of `chunked`, and with `keep` the memory before every segment."""
    layout = _layout(q, v, cu_seqlens, cfg)
    memory, kept, given, snapshots = state, None, None, 0
    if cu_seqlens is not None:
        memory, kept = jnp.zeros_like(state[:1]), state[:, None]
        given = kept
    elif cfg.snapshot_every is not None:
        snapshots = q.shape[1] // cfg.snapshot_every
        kept = jnp.broadcast_to(jnp.zeros_like(state), (max(1, snapshots), *state.shape))

    def group(carry, x):
        return _forward_group(carry, x, given, cfg)

    if cfg.plain_autodiff:
        group = jax.checkpoint(group, prevent_cse=False)

    def segment(carry, x):
        after, o = group(carry, x) if layout.groups == 1 else jax.lax.scan(group, carry, x)
        return after, (o, carry[0] if keep else None)

    x = _inputs(layout, q, k, v, g, beta, starts)
    (memory, kept), (o, memories) = jax.lax.scan(segment, (memory, kept), x)
    o = layout.uncut(o, q.shape[1])
    if kept is not None and cu_seqlens is not None:
        return (o, kept[:, 0], None), memories
    if kept is not None:
        kept = jnp.moveaxis(kept[:snapshots], 0, 1)
    return (o, memory, kept), memories


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(cfg: Config, *arrays):
    return _forward(cfg, False, *arrays)[0]


def _kda_forward(cfg: Config, *arrays):
    out, memories = _forward(cfg, True, *arrays)
    return out, (*arrays, memories)


def _kda_backward(cfg: Config, saved, cotangents):
    q, k, v, g, beta, state, starts, cu_seqlens, memories = saved
    d_o, d_memory, d_snapshots = cotangents
    layout = _layout(q, v, cu_seqlens, cfg)
    given, d_given, d_kept = None, None, None
    if cu_seqlens is not None:
        # What leaves an empty document is what entered it.
        given, d_given = state[:, None], d_memory[:, None]
        empty = (jnp.diff(cu_seqlens) == 0)[:, None, None, None, None]
        d_memory, d_kept = jnp.zeros_like(state[:1]), jnp.where(empty, d_given, 0)
    elif cfg.snapshot_every is not None:
        d_given = jnp.moveaxis(d_snapshots, 1, 0)
        if d_given.shape[0] == 0:
            d_given = jnp.zeros_like(state)[None]

    def group(carry, x):
        return _backward_group(carry, x, given, d_given, cfg)

    def recompute(memory, x):
        (after, _), _ = _memories(memory, None, given, _prepare(x, cfg), cfg)
        return after, memory

    def segment(carry, x):
        if layout.groups == 1:
            return group(carry, x)
        inputs, d_o, memory = x
        _, memories = jax.lax.scan(recompute, memory, inputs)
        return jax.lax.scan(group, carry, (inputs, d_o, memories), reverse=True)

    x = (_inputs(layout, q, k, v, g, beta, starts), layout.cut(d_o), memories)
    (d_memory, d_kept), gradients = jax.lax.scan(segment, (d_memory, d_kept), x, reverse=True)
    d_q, d_k, d_v, d_g, d_beta = (layout.uncut(d, q.shape[1]) for d in gradients)
    d_state = d_memory if cu_seqlens is None else d_kept[:, 0]
    if starts is not None:
        d_g = jnp.where(starts[..., None, None], 0, d_g)
    return d_q, d_k, d_v, d_g, d_beta, d_state, None, None


_kda.defvjp(_kda_forward, _kda_backward)


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
    Numerics: g, exponents, the triangular inverse and S are in g's dtype (float32); the operands of
        the other matmuls are rounded to bfloat16 if q is, and accumulate in g's dtype.
    Cost: O(T (C (K + V) + K V)) per head in T / C sequential steps. The backward pass keeps the
        inputs and one memory per `checkpoint_every` chunks, and recomputes a group of chunks at a
        time.
    """
    arrays = (q, k, v, g, beta, state, starts, cu_seqlens)
    if cfg.plain_autodiff:
        return _forward(cfg, False, *arrays)[0]
    return _kda(cfg, *arrays)
