"""The forward kernels: what chunks do without the memory, all at once; then the memory."""
# pyrefly: ignore-errors
# (branches on constants are taken when a kernel is compiled: names are bound on one side only)

import triton
import triton.language as tl

from k3jax.pallas_kernels.kda.gpu_chunk import (
    CHUNK,
    SHIFT,
    TILE,
    add_dot,
    dot,
    fine_dot,
    log2_decay,
    read_marks,
    token_sums,
    tokens_seen,
    unit_factor,
)


@triton.jit
def prepare(
    q, k, z, beta, gate, marks, H,
    rows_q, rows_k, columns, attention, lower, decay,
    q_scale: tl.constexpr, K: tl.constexpr, G_MIN2: tl.constexpr,
    GATED: tl.constexpr, MASKED: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: rows as they see what enters, columns as they leave, A and L, decay.

    q, k, z are [chunks 32, H, K], beta [chunks 32, H], marks [chunks, 32]; rows and columns are
    [chunks, H, 32, K], pairs [chunks, H, 32, 32], decay [chunks, H, K].
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    tile = tl.program_id(0).to(tl.int64)
    c, h = tile // H, (tile % H).to(tl.int32)
    i, channel = tl.arange(0, CHUNK), tl.arange(0, K)
    token = c * CHUNK + i
    at = (token * H + h)[:, None] * K + channel[None, :]
    z_i, b = tl.load(z + at).to(tl.float32), tl.load(beta + token * H + h)
    q_i, k_i = tl.load(q + at), tl.load(k + at)
    g, _ = log2_decay(z_i, gate, h * K + channel[None, :], G_MIN2, H * K, GATED)
    document = i
    if MASKED:
        real, document, last = read_marks(marks, token)
        g, b = tl.where(real[:, None], g, 0.0), tl.where(real, b, 0.0)
        q_i, k_i = tl.where(real[:, None], q_i, 0.0), tl.where(real[:, None], k_i, 0.0)
    q_factor, k_factor = unit_factor(q_i, q_scale, GATED), unit_factor(k_i, 1.0, GATED)
    seen, near = tokens_seen(document, MASKED)
    N = token_sums(g, near, DTYPE)
    # N is never positive, which the compiler does not know: so q and k move to where the sums are as
    # they were read, in half the bytes that they have later.
    q_i = tl.where(N > 0, 0.0, q_i).to(tl.float32) * q_factor[:, None]
    k_i = tl.where(N > 0, 0.0, k_i).to(tl.float32) * k_factor[:, None]
    first = tl.exp2(tl.sum(tl.where(i[:, None] == TILE - 1, N, 0.0), 0))[None, :]  # of a whole tile
    second = tl.exp2(tl.sum(tl.where(i[:, None] == CHUNK - 1, N, 0.0), 0))[None, :]
    behind = i[:, None] >= TILE
    grow, shrink = tl.exp2(N + SHIFT), tl.exp2(-N - SHIFT)
    into, out_of = tl.where(behind, first, 1.0), tl.where(behind, second, first * second)
    through = first * second
    if MASKED:
        into = tl.where((document == 0)[:, None], into, 0.0)
        out_of = tl.where((document == last)[:, None], out_of, 0.0)
        through = tl.where(last > 0, 0.0, through)
    tl.store(decay + tile * K + channel[None, :], through)
    row_q, row_k, column = q_i * grow, k_i * grow, k_i * b[:, None] * shrink
    to = (tile * CHUNK + i)[:, None] * K + channel[None, :]
    unshift: tl.constexpr = 2.0**-60
    tl.store(rows_q + to, (row_q * (into * unshift)).to(DTYPE))
    tl.store(rows_k + to, (row_k * (into * unshift)).to(DTYPE))
    tl.store(columns + to, (column * (out_of * (1.0 / unshift))).to(DTYPE))
    # the second tile sees the columns of the first behind that tile's decay
    over = tl.trans(tl.where(behind, column, column * first).to(DTYPE))
    column = tl.trans(column.to(DTYPE))
    row_q, row_k = row_q.to(DTYPE), row_k.to(DTYPE)
    pair = (tile * CHUNK + i)[:, None] * CHUNK + i[None, :]
    A = tl.where(behind, dot(row_q, over), dot(row_q, column))
    tl.store(attention + pair, tl.where(seen, A, 0.0).to(DTYPE))
    if ERASE:
        L = tl.where(behind, dot(row_k, over), dot(row_k, column))
        tl.store(lower + pair, tl.where(seen & (i[:, None] > i[None, :]), L, 0.0))


@triton.jit
def invert(lower, inverses):
    """(I + L)^-1 of a strictly lower triangular matrix, of [tiles, 32, 32], by substitution.

    One warp a matrix, a thread a column of it, so that nothing passes between threads; in two
    halves. Powers of L would cancel catastrophically where keys are alike.
    """
    HALF: tl.constexpr = CHUNK // 2
    row, column = tl.arange(0, HALF), tl.arange(0, CHUNK)[None, :]
    at = tl.program_id(0).to(tl.int64) * (CHUNK * CHUNK) + row * CHUNK
    top = (row[:, None] == column).to(tl.float32)
    bottom = (row[:, None] + HALF == column).to(tl.float32)
    for m in tl.range(0, HALF):
        done = tl.sum(tl.where(row[:, None] == m, top, 0.0), 0)[None, :]
        top -= tl.load(lower + at + m)[:, None] * done
        bottom -= tl.load(lower + at + HALF * CHUNK + m)[:, None] * done
    for m in tl.range(0, HALF - 1):
        done = tl.sum(tl.where(row[:, None] == m, bottom, 0.0), 0)[None, :]
        bottom -= tl.load(lower + at + (HALF * CHUNK + HALF) + m)[:, None] * done
    to = inverses + at[:, None] + column
    tl.store(to, top.to(inverses.dtype.element_ty))
    tl.store(to + HALF * CHUNK, bottom.to(inverses.dtype.element_ty))


@triton.jit
def carry(
    v, marks, rows_q, rows_k, columns, attention, inverses, decay, entering, first, count, H,
    o, leaving, states, errors,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, ERASE: tl.constexpr, SUMMARY: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The memory of some value channels of a head through all chunks of a sequence, S^T [BV, K].

        R = V - rows_k S,  E = (I + L)^-1 R,  O = rows_q S + A E,  S <- Diag(D) S + columns^T E

    Transposed, every product takes its first operand from registers, and nothing that a chunk waits
    for passes through shared memory. v, o and errors (E) are [chunks 32, H, V]; entering and leaving
    [sequences, H, V, K]; states [chunks, H, V, K]; first and count, chunks of each sequence.
    SUMMARY: without outputs, of zeros and behind them the identity that enter.
    """
    DTYPE: tl.constexpr = rows_q.dtype.element_ty
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    i, channel = tl.arange(0, CHUNK), tl.arange(0, K)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    start, chunks = tl.load(first + n).to(tl.int64), tl.load(count + n)
    if SUMMARY:
        S = (value[:, None] == V + channel[None, :]).to(tl.float32)
    else:
        memory = (n.to(tl.int64) * H + h) * V * K
        S = tl.load(entering + memory + value[:, None] * K + channel[None, :])
    rows = i[:, None] * K + channel[None, :]
    pairs = i[:, None] * CHUNK + i[None, :]
    for m in tl.range(0, chunks, num_stages=STAGES):
        c = (start + m) * H + h
        row_k = tl.load(rows_k + c * (CHUNK * K) + rows)
        column = tl.load(columns + c * (CHUNK * K) + rows)
        kept = tl.load(decay + c * K + channel)
        at = ((start + m) * CHUNK * H + h) * V + i[None, :] * (H * V) + value[:, None]
        if SUMMARY:
            R = tl.load(v + at, mask=(value < V)[:, None], other=0.0).to(tl.float32)
        else:
            R = tl.load(v + at).to(tl.float32)
        if MASKED:
            R = tl.where(tl.load(marks + (start + m) * CHUNK + i)[None, :] >= 0, R, 0.0)
        s = S.to(DTYPE)
        if KEEP:
            tl.store(states + c * V * K + value[:, None] * K + channel[None, :], s)
        if ERASE:
            T = tl.load(inverses + c * (CHUNK * CHUNK) + pairs)
            known = dot(s, tl.trans(row_k))
        if not SUMMARY:
            O = dot(s, tl.trans(tl.load(rows_q + c * (CHUNK * K) + rows)))
        E = dot((R - known).to(DTYPE), tl.trans(T)).to(DTYPE) if ERASE else R.to(DTYPE)
        S = add_dot(E, column, S * kept[None, :])
        if KEEP:
            tl.store(errors + at, E)
        if not SUMMARY:
            A = tl.load(attention + c * (CHUNK * CHUNK) + pairs)
            tl.store(o + at, add_dot(E, tl.trans(A), O).to(o.dtype.element_ty))
    width = V + K if SUMMARY else V
    memory = (n.to(tl.int64) * H + h) * width * K
    tl.store(leaving + memory + value[:, None] * K + channel[None, :], S)


@triton.jit
def chain(
    memory, summaries, transitions, H, parts,
    out,
    K: tl.constexpr, V: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BV: tl.constexpr,
    BACK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """From the summaries of parts, S^T <- S^T M^T + E^T, the memory that enters each.

    With BACK the gradient of the memory that leaves each, from the last to the first:
    dS^T <- dS^T M + E^T. summaries [N, parts, H, X, K] hold E^T in the first V rows, transitions
    [N, parts, H, Y, K] hold M^T in the last K; out is [N, parts, H, V, K].
    """
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    channel = tl.arange(0, K)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    inner = value[:, None] * K + channel[None, :]
    S = tl.load(memory + (n.to(tl.int64) * H + h) * V * K + inner)
    for m in range(parts):
        part = parts - 1 - m if BACK else m
        at = (n.to(tl.int64) * parts + part) * H + h
        tl.store(out + at * V * K + inner, S)
        own = tl.load(summaries + at * X * K + inner)
        M = tl.load(transitions + (at * Y + Y - K) * K + channel[:, None] * K + channel[None, :])
        S = own + fine_dot(S, tl.trans(M) if BACK else M, tl.float32 if EXACT else tl.bfloat16)
