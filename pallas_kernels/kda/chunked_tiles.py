"""The part of a KDA chunk that knows no memory: decays, scores of pairs, the triangular inverse.

A chunk of C tokens is cut into n tiles of t. Arrays are laid out [*lead C K]. What meets the same
keys lies together: with R = 2, token i has the rows 2i, its query, and 2i + 1, its key. With R = 1,
without erasure, only queries look back.

Every exponent is a sum of log-decays over tokens between a write and a read, hence <= 0: nothing is
divided by a decay, nothing overflows, no two large sums are subtracted. The one exception is kept
in bounds by a promise, see `Tiles.near_row`. README.md has the derivation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

# A log-decay that empties the memory: exp of it is exactly 0 in float32 and float64, and sums of
# it stay finite (an infinity would meet the zeros of the summation matrices as NaN).
FORGET = -1e30
# Tokens per tile. Under a promise a tile is one product of factors exp(G) and exp(-G), which
# float32 holds for up to MOST_NATS. Otherwise it is made of halves of halves, of which a small tile
# needs fewer.
BOUNDED_TILE, HALVED_TILE = 16, 8
MOST_NATS = 80.0
# exp(-80) times a small q, or a small gradient, would be flushed to zero. Both factors get half of
# the range, by a power of two, which rounds nothing: 2**58 = exp(40.2).
BALANCE = 2.0**58


def einsum(equation: str, *operands: Array | np.ndarray, out: jnp.dtype) -> Array:
    """A contraction in full precision that accumulates in `out`."""
    return jnp.einsum(
        equation, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out
    )


def reshape_last(x: Array, count: int, *shape: int) -> Array:
    """x with another shape in place of its last `count` axes.

    Where a mesh splits the other axes, JAX follows a reshape only if told what becomes of them.
    """
    spec = jax.typeof(x).sharding.spec
    split = any(axis is not None for axis in spec)
    out = PartitionSpec(*spec[: x.ndim - count], *[None] * len(shape)) if split else None
    return jax.lax.reshape(x, (*x.shape[: x.ndim - count], *shape), out_sharding=out)


def inner(a: Float[Array, "*lead X"], b: Float[Array, "*lead X"]) -> Float[Array, "*lead"]:
    """sum_x a b, as a matmul: a CPU takes longer for a sum along rows."""
    return einsum("...x,x->...", a * b, jnp.ones(a.shape[-1], a.dtype), out=a.dtype)


def sum_rows(
    marks: np.ndarray | Float[Array, "*any i m"], x: Float[Array, "*lead m K"]
) -> Float[Array, "*lead i K"]:
    """For each row of `marks`, of 0, 1 and -1, the sum of the rows of x that it marks.

    A matrix is repeated for every x: to meet a shared one XLA would transpose all of x.
    """
    repeated = jnp.asarray(marks, x.dtype) + jnp.zeros_like(x[..., :1, :1])
    return einsum("...im,...mk->...ik", repeated, x, out=x.dtype)


def halving(size: int) -> tuple[np.ndarray, np.ndarray]:
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


def tile_sums(n: int) -> np.ndarray:
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


def half(x: Float[Array, "*lead n R K"], s: int, which: int) -> Float[Array, "*lead b m K"]:
    """Of every block of 2s tiles the left (0) or right (1) half, its m = s R rows in one."""
    n, R, K = x.shape[-3:]
    return reshape_last(x, 3, n // (2 * s), 2, s * R, K)[..., which, :, :]


def from_half(x: Float[Array, "*lead b m K"], s: int, which: int) -> Float[Array, "*lead n R K"]:
    """The transpose of `half`: zeros in the other half."""
    b, m, K = x.shape[-3:]
    zero = jnp.zeros_like(x)
    both = jnp.stack([zero, x] if which else [x, zero], axis=-3)
    return reshape_last(both, 4, 2 * b * s, m // s, K)


def each(decay: Float[Array, "*lead t K"], R: int) -> Float[Array, "*lead Rt K"]:
    """The decay of a token for each of its R rows."""
    t, K = decay.shape[-2:]
    return reshape_last(jnp.stack([decay] * R, axis=-2), 3, R * t, K)


class Tiles(NamedTuple):
    """Decays of the tiles of a chunk, and the rows and columns that carry them."""

    rows: Float[Array, "*lead n Rt K"]  # q and k
    columns: Float[Array, "*lead n t K"]  # k
    row_decay: Float[Array, "*lead n t K"]  # from the start of the tile to the token, inclusive
    column_decay: Float[Array, "*lead n t K"]  # after the token to the end of the tile
    tile_decay: Float[Array, "*lead x n K"]  # over whole tiles: `tile_sums` but for its last row
    gamma: Float[Array, "*lead K"]  # over the whole chunk
    # Between tokens of a tile, as factors of the row and of the column. Halved: one product per
    # level, of factors <= 1. Bounded: one of exp(G) exp(-G), summed from the start of the tile, for
    # a reference further on would let later tokens into the rounding of earlier ones.
    near_row: Float[Array, "*lead n l t K"]
    near_column: Float[Array, "*lead n l t K"]
    near_pairs: Bool[Array, "*any l Rt t"] | np.ndarray  # what each product is for
    # Decayed operands: inside a tile; of the neighbouring halves of 2s tiles, per level; back to the
    # start of the chunk, and ahead to its end. `near` and `read` are rounded, the others are not:
    # the memory would keep the error, and that of `levels` would add up in dg.
    near: tuple[Array, Array]
    levels: tuple[tuple[Array, Array], ...]
    read: Float[Array, "*lead RC K"]
    write: Float[Array, "*lead C K"]


def over_tiles(
    x: Float[Array, "*lead n R K"], decay: Float[Array, "*lead x n K"], row: int
) -> Float[Array, "*lead n R K"]:
    """x decayed over whole tiles, as this row of `tile_sums` says."""
    return x * decay[..., row, :, None, :] if x.shape[-3] > 1 else x


TO_START, TO_END = -2, -1  # rows of `tile_decay`; that of level s = 2**l is l - 1


def tiles(
    q: Float[Array, "*lead C K"],
    k: Float[Array, "*lead C K"],
    g: Float[Array, "*lead C K"],
    starts: Bool[Array, "*any C"] | None,
    *,
    bounded: bool,
    erase: bool,
    dtype: jnp.dtype,
) -> Tiles:
    """Everything about a chunk that follows from its q, k and g.

    Args:
        starts: tokens before which the memory is emptied, for all heads (H = 1).
        bounded: a promise that MOST_NATS bounds the decay of 16 tokens.
        dtype: of `near` and `read`.
    """
    C, K = q.shape[-2:]
    t = BOUNDED_TILE if bounded else HALVED_TILE
    n, R = C // t, 2 if erase else 1
    rows = reshape_last(jnp.stack([q, k] if erase else [q], axis=-2), 3, n, R * t, K)
    columns, g = reshape_last(k, 2, n, t, K), reshape_last(g, 2, n, t, K)
    i, j = np.mgrid[:t, :t]
    inside, pairs = (np.zeros((0, t, t)), (j < i)[None]) if bounded else halving(t)
    marks, near_pairs, document = np.stack([j <= i, j > i, *inside]), pairs, None
    if starts is not None:
        # Sums stay inside a document: bit for bit, none depends on another one (KF-048).
        starts = reshape_last(starts, 1, n, t)
        document = jnp.cumsum(starts, axis=-1)
        same = (document[..., :, None] == document[..., None, :])[..., None, :, :]
        marks, near_pairs = jnp.where(same, marks, 0), pairs & same
        g = jnp.where(starts[..., None], 0, g)

    sums = sum_rows(reshape_last(jnp.asarray(marks, g.dtype), 3, len(inside) * t + 2 * t, t), g)
    decays, whole = jnp.exp(sums), sums[..., t - 1, :]
    row, column, near_row = decays[..., :t, :], decays[..., t : 2 * t, :], decays[..., 2 * t :, :]
    if bounded:
        near_row = row[..., None, :, :] * BALANCE
        near_column = jnp.exp(-sums[..., None, :t, :]) / BALANCE
    else:
        near_row = near_column = reshape_last(near_row, 2, len(pairs), t, K)
    if document is not None:
        document, last = document[..., None], document[..., -1:]
        row = jnp.where(document > 0, 0, row)
        column = jnp.where(document < last[..., None], 0, column)
        whole = jnp.where(last > 0, FORGET, whole)
    tile = jnp.exp(sum_rows(tile_sums(n), whole))
    gamma, tile = tile[..., -1, :], tile[..., :-1, :]
    tile = reshape_last(tile, 2, tile.shape[-2] // n, n, K)

    near = rows[..., None, :, :] * each(near_row, R), columns[..., None, :, :] * near_column
    back, ahead = rows * each(row, R), columns * column
    levels = []
    for level in range(n.bit_length() - 1):
        right, left = back, ahead
        if level:
            right, left = (over_tiles(x, tile, level - 1) for x in (back, ahead))
        levels.append((half(right, 2**level, 1), half(left, 2**level, 0)))
    return Tiles(
        rows=rows,
        columns=columns,
        row_decay=row,
        column_decay=column,
        tile_decay=tile,
        gamma=gamma,
        near_row=near_row,
        near_column=near_column,
        near_pairs=near_pairs.repeat(R, axis=-2),
        near=(near[0].astype(dtype), near[1].astype(dtype)),
        levels=tuple(levels),
        read=reshape_last(over_tiles(back, tile, TO_START), 3, R * C, K).astype(dtype),
        write=reshape_last(over_tiles(ahead, tile, TO_END), 3, C, K),
    )


def scores(x: Tiles) -> tuple[list[Array], list[Array]]:
    """row_i . (column_j decayed from j to i), block by block: of queries and of keys.

    Returns: [*lead n t t], then per level the blocks [*lead b s s] below the diagonal. Queries see
    their own column (j = i), keys do not. Without erasure the keys repeat the queries.
    """
    wide = x.gamma.dtype
    t, K = x.columns.shape[-2:]
    near = einsum("...ik,...jk->...ij", *x.near, out=wide)
    near = jnp.sum(jnp.where(x.near_pairs, near, 0), axis=-3)
    R = near.shape[-2] // t
    own = inner(reshape_last(x.rows, 2, t, R, K)[..., 0, :], x.columns)
    blocks = [near, *(einsum("...ik,...jk->...ij", *level, out=wide) for level in x.levels)]
    blocks = [reshape_last(y, 2, y.shape[-1], R, y.shape[-1]) for y in blocks]
    queries, keys = ([y[..., r, :] for y in blocks] for r in (0, R - 1))
    queries[0] += own[..., None] * np.eye(t, dtype=wide)
    return queries, keys


def join(
    diagonal: Float[Array, "*lead d s s"], below: Float[Array, "*lead b s s"]
) -> Float[Array, "*lead b s2 s2"]:
    """[[d_0, 0], [below, d_1]] for every two neighbouring blocks of the diagonal, d = 2b."""
    b, s, _ = below.shape[-3:]
    halves = np.arange(2)
    I, J = halves[:, None, None, None], halves[:, None]  # of the rows, of the columns
    lower_left = jnp.where(I > J, below[..., None, :, None, :], 0)
    joined = jnp.where(I == J, reshape_last(diagonal, 3, b, 2, s, 1, s), lower_left)
    return reshape_last(joined, 5, b, 2 * s, 2 * s)


def lower(blocks: list[Array]) -> Float[Array, "*lead C C"]:
    """The lower triangular matrix of these blocks."""
    return functools.reduce(join, blocks)[..., 0, :, :]


def inverse(blocks: list[Array], beta: Float[Array, "*lead C"]) -> Float[Array, "*lead C C"]:
    """(I + P Diag(beta))^-1 of the strictly lower triangular matrix P of these blocks.

    The inverse grows by merging neighbouring blocks, B_21 = -B_22 P_21 B_11, from single tokens to
    tiles to the chunk. Unlike products of powers of P this does not cancel when keys are alike.
    XLA's own triangular solve is a LAPACK call per matrix on a CPU, whose threads wait spinning.
    """
    tile, *below = blocks
    n, t = tile.shape[-3:-1]
    wide = tile.dtype
    beta = reshape_last(beta, 1, n, t, 1)
    tile = tile * jnp.swapaxes(beta, -2, -1)
    pairs = halving(t)[1]
    grown = jnp.eye(t, dtype=wide) - jnp.where(pairs[0], tile, 0)
    for level in pairs[1:]:
        merged = einsum("...ij,...jk->...ik", jnp.where(level, tile, 0), grown, out=wide)
        grown = grown - einsum("...ij,...jk->...ik", grown, merged, out=wide)
    for block in below:
        b, s, _ = block.shape[-3:]
        block = block * jnp.swapaxes(half(beta, s // t, 0), -2, -1)
        first, second = (reshape_last(grown, 3, b, 2, s, s)[..., h, :, :] for h in (0, 1))
        merged = einsum("...ij,...jk->...ik", block, first, out=wide)
        merged = einsum("...ij,...jk->...ik", second, merged, out=wide)
        grown = join(grown, -merged)
    return grown[..., 0, :, :]


def sum_after_and_before(
    after: Float[Array, "*lead n t K"],
    before: Float[Array, "*lead n t K"],
    starts: Bool[Array, "*any C"] | None,
) -> Float[Array, "*lead n t K"]:
    """Per token of a chunk the sum of `after` from it on and of `before` up to the token before.

    Of documents `after` is summed inside each: over the next ones it would cancel, but only up to
    rounding (KF-048). `before` is zero but for the one that reaches the end of the chunk.
    """
    n, t, K = after.shape[-3:]
    if starts is not None:
        C = n * t
        i, j = np.mgrid[:C, :C]
        document = jnp.cumsum(starts, axis=-1)
        later = (document[..., :, None] == document[..., None, :]) & (j >= i)
        marks = jnp.concatenate(jnp.broadcast_arrays(later, j < i), axis=-1).astype(after.dtype)
        both = [reshape_last(x, 3, C, K) for x in (after, before)]
        return reshape_last(sum_rows(marks, jnp.concatenate(both, axis=-2)), 2, n, t, K)
    i, j = np.mgrid[:t, :t]
    ones, zeros = np.ones((1, t)), np.zeros((1, t))
    marks = np.block([[j >= i, j < i], [ones, zeros], [zeros, ones]])
    sums = sum_rows(marks, jnp.concatenate([after, before], axis=-2))
    i, j = np.mgrid[:n, :n]
    marks = np.stack([j > i, j < i], axis=-1).reshape(n, 2 * n)
    others = sum_rows(marks, reshape_last(sums[..., t:, :], 3, 2 * n, K))
    return sums[..., :t, :] + others[..., None, :]


class TileGradients(NamedTuple):
    """What the products of a chunk's tiles give back to its tokens."""

    rows: Float[Array, "*lead n t R K"]  # of q and of k as a row
    columns: Float[Array, "*lead n t K"]  # of k as a column
    g: Float[Array, "*lead n t K"]


def tile_gradients(
    x: Tiles,
    seen: Float[Array, "*lead RC V"],
    written: Float[Array, "*lead C V"],
    d_read: Float[Array, "*lead RC K"],
    d_write: Float[Array, "*lead C K"],
    starts: Bool[Array, "*any C"] | None,
) -> TileGradients:
    """The transpose of `tiles` and `scores`, but for the scores of queries with their own column.

    Args:
        seen, written: the gradient of the score of row i and column j is seen_i . written_j.
        d_read, d_write: gradients of `read` and `write`.

    Per channel, summed over all that a token's rows and its column take part in,

        dg_t = sum_(i >= t) (rows d_rows - column d_column)_i + sum_(j < t) (write d_write)_j

    where d_column leaves out d_write. A score of i and j < i counts at i and, with the other sign,
    at j, so that it is left for j < t <= i. To leave d_write of the token itself out instead of
    cancelling it keeps the small dg of steep decays exact.
    """
    wide, dtype = x.gamma.dtype, x.read.dtype
    n, t, K = x.columns.shape[-3:]
    R = x.rows.shape[-2] // t
    d_write = reshape_last(d_write, 2, n, t, K)
    d_back = over_tiles(reshape_last(d_read, 2, n, R * t, K), x.tile_decay, TO_START)
    d_ahead = jnp.zeros_like(x.columns)
    V = seen.shape[-1]
    seen, written = reshape_last(seen, 2, n, R * t, V), reshape_last(written, 2, n, t, V)
    for level, (rows, columns) in enumerate(x.levels):
        s = 2**level
        d_pairs = einsum("...iv,...jv->...ij", half(seen, s, 1), half(written, s, 0), out=wide)
        d_rows = from_half(einsum("...ij,...jk->...ik", d_pairs, columns, out=wide), s, 1)
        d_columns = from_half(einsum("...ij,...ik->...jk", d_pairs, rows, out=wide), s, 0)
        if level:
            d_rows, d_columns = (
                over_tiles(y, x.tile_decay, level - 1) for y in (d_rows, d_columns)
            )
        d_back, d_ahead = d_back + d_rows, d_ahead + d_columns
    d_pairs = einsum("...iv,...jv->...ij", seen, written, out=wide)
    d_pairs = jnp.where(x.near_pairs, d_pairs[..., None, :, :], 0).astype(dtype)
    d_near_rows = einsum("...ij,...jk->...ik", d_pairs, x.near[1], out=wide)
    d_near_columns = einsum("...ij,...ik->...jk", d_pairs, x.near[0], out=wide)

    d_rows, d_columns = d_back * each(x.row_decay, R), d_ahead * x.column_decay
    # Of pairs inside a tile, which weigh most, the operands as rounded: so they cancel in bfloat16.
    flow = x.rows * d_rows + jnp.sum(x.near[0] * d_near_rows, axis=-3)
    flow = reshape_last(flow, 2, t, R, K)
    flow = sum(flow[..., r, :] for r in range(1, R)) + flow[..., 0, :]
    flow -= x.columns * d_columns + jnp.sum(x.near[1] * d_near_columns, axis=-3)
    d_g = sum_after_and_before(flow, reshape_last(x.write, 2, n, t, K) * d_write, starts)
    d_rows += jnp.sum(d_near_rows * each(x.near_row, R), axis=-3)
    d_columns += jnp.sum(d_near_columns * x.near_column, axis=-3)
    d_columns += over_tiles(d_write, x.tile_decay, TO_END) * x.column_decay
    return TileGradients(reshape_last(d_rows, 2, t, R, K), d_columns, d_g)
