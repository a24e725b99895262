"""Kimi Delta Attention in chunks: matmuls inside a chunk, one memory handed from chunk to chunk.

Every exponent below is a sum of log-decays over tokens between a write and a read, hence <= 0:
nothing is divided by a decay, nothing overflows, no two large sums are subtracted. That holds for
any gate, bounded or not. README.md has the derivation.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

TILE = 16
# A log-decay that empties the memory: exp of it is exactly 0 in float32 and float64, and sums of
# it stay finite (an infinity would meet the zeros of the summation matrices as NaN).
FORGET = -1e30


def _halving(size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Splits the pairs (i > j) of a tile by the block boundary that separates them.

    For every block size s = 1, 2, 4, ... a pair is handled if i lies in the right and j in the left
    half of the same block of 2s tokens. Seen from that boundary a row has the decays from the
    boundary to itself (inclusive), a column the decays after itself up to the boundary.

    Returns: per s, the tokens whose decays are summed [size, size], and the pairs [size, size].
    """
    i, j = np.mgrid[:size, :size]
    levels = []
    for s in (2**n for n in range(size.bit_length() - 1)):
        same_half, right = i // s == j // s, i // s % 2 == 1
        summed = same_half & np.where(right, j <= i, j > i)
        pairs = (i // (2 * s) == j // (2 * s)) & ~same_half & (i > j)
        levels.append((summed, pairs))
    return levels


_LEVELS = _halving(TILE)
_UP_TO = np.tril(np.ones((TILE, TILE), bool))


def _einsum(equation: str, *operands: Array | np.ndarray, out: jnp.dtype) -> Array:
    return jnp.einsum(
        equation, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=out
    )


def _sum_over(tokens: np.ndarray, g: Float[Array, "*lead m K"]) -> Float[Array, "*lead i K"]:
    """For each row of `tokens`, the sum of the log-decays it marks."""
    return _einsum("im,...mk->...ik", jnp.asarray(tokens, g.dtype), g, out=g.dtype)


def _both(rows: Float[Array, "*lead R K"], factor: Float[Array, "*lead t K"]):
    """Multiplies the query rows and the key rows of each tile by the same factor."""
    return rows * jnp.concatenate([factor, factor], axis=-2)


def _within_tiles(
    rows: Float[Array, "*lead n R K"],
    k: Float[Array, "*lead n t K"],
    g: Float[Array, "*lead n t K"],
    dtype: jnp.dtype,
) -> Float[Array, "*lead n R t"]:
    """rows_i . (k_j * decay from j to i) for i > j in one tile, 0 elsewhere."""
    scores = jnp.zeros((*rows.shape[:-1], TILE), g.dtype)
    for summed, pairs in _LEVELS:
        decay = jnp.exp(_sum_over(summed, g))
        left, right = _both(rows, decay).astype(dtype), (k * decay).astype(dtype)
        level = _einsum("...ik,...jk->...ij", left, right, out=g.dtype)
        scores += jnp.where(np.concatenate([pairs, pairs]), level, 0)
    return scores


def _solve(L: Float[Array, "*lead C C"], x: Float[Array, "*lead C V"]) -> Float[Array, "*lead C V"]:
    """(I + L)^-1 x for strictly lower L: tiles inverted, then forward substitution tile by tile.

    The inverse of a tile grows by merging neighbouring blocks of s tokens, A_21 = -A_22 L_21 A_11,
    for s = 1, 2, 4, 8. Unlike products of powers of L this does not cancel when keys are alike.
    XLA's own triangular solve is a LAPACK call per matrix on a CPU, whose threads wait spinning.
    """
    *lead, C, V = x.shape
    n, wide = C // TILE, x.dtype
    blocks, x = L.reshape(*lead, n, TILE, n, TILE), x.reshape(*lead, n, TILE, V)
    tile = jnp.stack([blocks[..., I, :, I, :] for I in range(n)], axis=-3)
    inverse = jnp.eye(TILE, dtype=wide) - jnp.where(_LEVELS[0][1], tile, 0)
    for _, pairs in _LEVELS[1:]:
        merged = _einsum("...ij,...jk->...ik", jnp.where(pairs, tile, 0), inverse, out=wide)
        inverse = inverse - _einsum("...ij,...jk->...ik", inverse, merged, out=wide)
    solved = []
    for I in range(n):
        rest = x[..., I, :, :]
        if I:
            row = blocks[..., I, :, :I, :].reshape(*lead, TILE, I * TILE)
            rest -= _einsum("...ij,...jv->...iv", row, jnp.concatenate(solved, axis=-2), out=wide)
        solved.append(_einsum("...ij,...jv->...iv", inverse[..., I, :, :], rest, out=wide))
    return jnp.concatenate(solved, axis=-2)


def _chunk(
    state: Float[Array, "*lead K V"],
    q: Float[Array, "*lead C K"],
    k: Float[Array, "*lead C K"],
    v: Float[Array, "*lead C V"],
    g: Float[Array, "*lead C K"],
    beta: Float[Array, "*lead C 1"],
) -> tuple[Float[Array, "*lead K V"], Float[Array, "*lead C V"]]:
    """One chunk (architecture.md 5.5). With G_i the sum of g up to token i of the chunk:

    A_ij = q_i . (exp(G_i - G_j) k_j), j <= i;   L_ij = beta_i k_i . (exp(G_i - G_j) k_j), j < i
    (I + L) U = beta (V - (exp(G) K) S)          pseudo-values U, by forward substitution
    O = (exp(G) Q) S + A U
    S <- exp(G_C) S + (exp(G_C - G) K)^T U
    """
    *lead, C, K = q.shape
    n, wide = C // TILE, g.dtype
    # Matmul operands. float16 is not among them: the memory can exceed its range (KF-021).
    dtype = q.dtype if q.dtype == jnp.bfloat16 else wide

    def tiles(x: Array) -> Array:
        return x.reshape(*lead, n, TILE, K).astype(wide)

    # Query and key rows of a tile lie together, [n, 2t, K]: both meet the same columns.
    rows = jnp.concatenate([tiles(q), tiles(beta * k)], axis=-2)
    columns, g = tiles(k), tiles(g)

    diagonal = jnp.sum(tiles(q) * columns, axis=-1)[..., None] * np.eye(TILE, dtype=wide)
    near = _within_tiles(rows, columns, g, dtype)
    near += jnp.concatenate([diagonal, jnp.zeros_like(diagonal)], axis=-2)

    # From here on rows look back to the start of their tile and columns ahead to the end of theirs.
    ahead = _sum_over(_UP_TO, g)
    rows, columns = _both(rows, jnp.exp(ahead)), columns * jnp.exp(_sum_over(~_UP_TO, g))
    # between[I, J]: decay over the tiles strictly between J and I; J = 0 is the start of the chunk
    # and I = n its end, tile J is entry J + 1.
    I, J, m = np.mgrid[: n + 1, -1:n, :n]
    between = _einsum(
        "ijm,...mk->...ijk", ((m > J) & (m < I)).astype(wide), ahead[..., -1, :], out=wide
    )
    between = jnp.exp(between)
    scores = near
    if n > 1:
        tile = np.arange(n)
        seen = columns[..., None, :, :, :] * between[..., :n, 1:, None, :]
        seen = jnp.where((tile[:, None] > tile)[:, :, None, None], seen, 0)
        seen = seen.reshape(*lead, n, C, K).astype(dtype)
        far = _einsum("...ik,...jk->...ij", rows.astype(dtype), seen, out=wide)
        far = far.reshape(*lead, n, 2 * TILE, n, TILE)
        scores = jnp.where((tile[:, None] == tile)[:, None, :, None], near[..., None, :], far)
        scores = scores.reshape(*lead, n, 2 * TILE, C)

    def queries_and_keys(x: Float[Array, "*lead n R X"]) -> list[Float[Array, "*lead C X"]]:
        return [half.reshape(*lead, C, x.shape[-1]) for half in jnp.split(x, 2, axis=-2)]

    rows = (rows * between[..., :n, 0, None, :]).astype(dtype)
    read, memory = queries_and_keys(
        _einsum("...nik,...kv->...niv", rows, state.astype(dtype), out=wide)
    )
    attention, L = queries_and_keys(scores)
    pseudo = _solve(L, beta * v - memory).astype(dtype)
    o = read + _einsum("...ij,...jv->...iv", attention.astype(dtype), pseudo, out=wide)
    columns = (columns * between[..., n, 1:, None, :]).reshape(*lead, C, K).astype(dtype)
    write = _einsum("...ck,...cv->...kv", columns, pseudo, out=wide)
    return between[..., n, 0, :, None] * state + write, o


def chunked(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "N H K V"],
    starts: Bool[Array, "B T"] | None,
    cu_seqlens: Int[Array, " n"] | None,
    chunk_size: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"]]:
    """KDA chunk by chunk; arguments as in `reference.recurrent`.

    Numerics: g, exponents, the triangular solve and S are in g's dtype (float32); the operands of
        the other matmuls are rounded to bfloat16 if q is, and accumulate in g's dtype.
    Cost: O(T (C (K + V) + K V)) per head in T / C sequential steps. The backward pass recomputes
        one chunk at a time from the memory that entered it.
    """
    T = q.shape[1]
    # No chunk longer than the row needs: at T = 1 a chunk of 64 would be 98% padding.
    C = min(chunk_size, max(TILE, 1 << (T - 1).bit_length()))
    if starts is not None:
        g = jnp.where(starts[..., None, None], FORGET, g)
    tokens = [q, k, v, g, beta[..., None]]
    step = jax.checkpoint(_chunk, prevent_cse=False)
    if cu_seqlens is None:
        state, o = jax.lax.scan(lambda S, x: step(S, *x), state, [_to_chunks(x, C) for x in tokens])
        return _from_chunks(o)[:, :T], state

    # Packed documents: each begins a chunk of its own, and the chunk where it begins takes its
    # memory from `state` instead of from the chunk before.
    slot, owner, first, last = _layout(cu_seqlens, T, C)
    tokens = [
        jnp.zeros((1, owner.shape[0] * C, *x.shape[2:]), x.dtype).at[:, slot].set(x, mode="drop")
        for x in tokens
    ]

    def body(S, x):
        fresh, entering, *chunk = x
        S, o = step(jnp.where(fresh, entering, S), *chunk)
        return S, (o, S)

    entering = state[owner][:, None]
    xs = (first, entering, *(_to_chunks(x, C) for x in tokens))
    _, (o, leaving) = jax.lax.scan(body, jnp.zeros_like(entering[0]), xs)
    o = jnp.take(_from_chunks(o), slot, axis=1, mode="fill", fill_value=0)
    has_tokens = (jnp.diff(cu_seqlens) > 0)[:, None, None, None]
    return o, jnp.where(has_tokens, leaving[last, 0], state)


def _to_chunks(x: Float[Array, "B T H X"], C: int) -> Float[Array, "N B H C X"]:
    """Cuts the tokens into chunks; the last is filled up with zeros: no decay, no write."""
    B, T, H, X = x.shape
    x = jnp.pad(x, ((0, 0), (0, -T % C), (0, 0), (0, 0)))
    return x.reshape(B, -1, C, H, X).transpose(1, 0, 3, 2, 4)


def _from_chunks(x: Float[Array, "N B H C X"]) -> Float[Array, "B N*C H X"]:
    N, B, H, C, X = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, X)


def _layout(cu_seqlens: Int[Array, " n"], T: int, C: int) -> tuple[Array, Array, Array, Array]:
    """Places packed documents so that no chunk holds tokens of two of them.

    Returns: slot of each token [T] (past the end for tokens of no document); document of each
    chunk; whether the chunk is its document's first; last chunk of each document.
    """
    documents = cu_seqlens.shape[0] - 1
    chunks = T // C + documents  # the most that any division of T tokens can need
    ends = jnp.cumsum(-(-jnp.diff(cu_seqlens) // C))
    begins = jnp.pad(ends, (1, 0))[:-1]
    token = jnp.arange(T)
    document = jnp.searchsorted(cu_seqlens, token, side="right") - 1
    inside = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])
    document = jnp.clip(document, 0, documents - 1)
    slot = jnp.where(inside, begins[document] * C + token - cu_seqlens[document], chunks * C)
    chunk = jnp.arange(chunks)
    owner = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), documents - 1)
    return slot, owner, chunk == begins[owner], jnp.maximum(ends - 1, 0)
