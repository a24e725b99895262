"""The backward kernels: the gradient of the memory, from the last chunk to the first; then all else."""
# pyrefly: ignore-errors
# (branches on constants are taken when a kernel is compiled: names are bound on one side only)

import triton
import triton.language as tl

from k3jax.pallas_kernels.kda.gpu_chunk import (
    BF16,
    CHUNK,
    SHIFT,
    TILE,
    add_dot,
    channel_sums,
    dot,
    fine_sum,
    log2_decay,
    norm_factor,
    read_marks,
    tokens_seen,
)


@triton.jit
def carry_back(
    d_o, rows_q, rows_k, columns, attention, inverses, decay, d_leaving, first, count, H,
    d_v, d_entering, d_states,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    ERASE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """The gradient of the memory of some value channels through all chunks, dS^T [BV, K].

        dE = A^T dO + columns dS,  dR = (I + L)^-T dE = dV
        dS <- Diag(D) dS + rows_q^T dO - rows_k^T dR

    Arrays as in `gpu_forward.carry`; d_states is dS as it leaves each chunk; d_o is 0 at padding.
    """
    DTYPE: tl.constexpr = rows_q.dtype.element_ty
    n, h = tl.program_id(0) // H, tl.program_id(0) % H
    i, channel = tl.arange(0, CHUNK), tl.arange(0, K)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    start, chunks = tl.load(first + n).to(tl.int64), tl.load(count + n)
    memory = (n.to(tl.int64) * H + h) * V * K + value[:, None] * K + channel[None, :]
    dS = tl.load(d_leaving + memory)
    rows = i[:, None] * K + channel[None, :]
    pairs = i[:, None] * CHUNK + i[None, :]
    for m in tl.range(0, chunks, num_stages=STAGES):
        token = start + chunks - 1 - m
        c = token * H + h
        row_q = tl.load(rows_q + c * (CHUNK * K) + rows)
        column = tl.load(columns + c * (CHUNK * K) + rows)
        A = tl.load(attention + c * (CHUNK * CHUNK) + pairs)
        kept = tl.load(decay + c * K + channel)
        at = (token * CHUNK * H + h) * V + i[None, :] * (H * V) + value[:, None]
        do = tl.load(d_o + at).to(DTYPE)
        s = dS.to(DTYPE)
        if OUTPUT:
            tl.store(d_states + c * V * K + value[:, None] * K + channel[None, :], s)
        dR = add_dot(s, tl.trans(column), dot(do, A))
        dS = add_dot(do, row_q, dS * kept[None, :])
        if ERASE:
            row_k = tl.load(rows_k + c * (CHUNK * K) + rows)
            T = tl.load(inverses + c * (CHUNK * CHUNK) + pairs)
            dR = dot(dR.to(DTYPE), T)
            dS = add_dot((-dR).to(DTYPE), row_k, dS)
        if OUTPUT:
            tl.store(d_v + at, dR.to(d_v.dtype.element_ty))
    tl.store(d_entering + memory, dS)


@triton.jit
def gradients(
    q, k, v, z, beta, gate, marks, errors, states, o, d_o, d_v, d_states, H,
    d_q, d_k, d_z, d_beta, d_gate,
    q_scale: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, V: tl.constexpr,
    G_MIN2: tl.constexpr, GATED: tl.constexpr, MASKED: tl.constexpr, ERASE: tl.constexpr,
):  # fmt: skip
    """The gradients of KB channels of one chunk of one head, from those of outputs and memories.

    Arrays as in `gpu_forward` and `carry_back`; d_beta is [K / KB, chunks 32, H], of which the sum
    counts, d_gate [chunks, H, 2, K].
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    part = tl.program_id(0) % (K // KB)
    tile = (tl.program_id(0) // (K // KB)).to(tl.int64)
    c, h = tile // H, (tile % H).to(tl.int32)
    i, value = tl.arange(0, CHUNK), tl.arange(0, V)
    channel = part * KB + tl.arange(0, KB)
    token = c * CHUNK + i
    at_v = (token * H + h)[:, None] * V + value[None, :]
    at = (token * H + h)[None, :] * K + channel[:, None]
    memory = tile * V * K + value[:, None] * K + channel[None, :]
    b = tl.load(beta + token * H + h)
    document = i
    if MASKED:
        real, document, last = read_marks(marks, token)
        b = tl.where(real, b, 0.0)
    seen, near = tokens_seen(document, MASKED)
    strict = seen & (i[:, None] > i[None, :])
    one_tile = i[:, None] // TILE == i[None, :] // TILE

    # between the tokens of the chunk; a token's pair with itself does not involve g
    do, E = tl.load(d_o + at_v).to(DTYPE), tl.load(errors + at_v)
    dr = tl.load(d_v + at_v).to(DTYPE)
    dA = dot(do, tl.trans(E))
    own = tl.sum(tl.where(i[:, None] == i[None, :], dA, 0.0), 1)
    dA_near = tl.where(strict & one_tile, dA, 0.0).to(DTYPE)
    dA_over = tl.where(strict & ~one_tile, dA, 0.0).to(DTYPE)
    if ERASE:
        dL = -dot(dr, tl.trans(E))
        dL_near = tl.where(strict & one_tile, dL, 0.0).to(DTYPE)
        dL_over = tl.where(strict & ~one_tile, dL, 0.0).to(DTYPE)
    if GATED:
        # <q, dq> and <k, dk>, over all channels, without either: outputs are linear in q; what a
        # key predicts is linear in it, and so is what it writes
        along_q = tl.sum(do.to(tl.float32) * tl.load(o + at_v).to(tl.float32), 1)
        along_k = tl.sum(dr.to(tl.float32) * E.to(tl.float32), 1)
        if ERASE:
            known = tl.load(v + at_v).to(tl.float32)
            if MASKED:
                known = tl.where(real[:, None], known, 0.0)
            along_k -= tl.sum(dr.to(tl.float32) * (known - E.to(tl.float32)), 1)
    M, dM = tl.load(states + memory), tl.load(d_states + memory)
    through = tl.sum(M.to(tl.float32) * dM.to(tl.float32), 0)

    # rows and columns, as in the forward pass
    q_factor = norm_factor(q, token, h, H, q_scale, K, GATED)
    k_factor = norm_factor(k, token, h, H, 1.0, K, GATED)
    q_i = tl.load(q + at).to(tl.float32) * q_factor[None, :]
    k_i = tl.load(k + at).to(tl.float32) * k_factor[None, :]
    z_i = tl.load(z + at).to(tl.float32)
    if MASKED:
        q_i, k_i = tl.where(real[None, :], q_i, 0.0), tl.where(real[None, :], k_i, 0.0)
        z_i = tl.where(real[None, :], z_i, 0.0)
    g, sigmoid = log2_decay(z_i, gate, h * K + channel[:, None], G_MIN2, H * K, GATED)
    if MASKED:
        g = tl.where(real[None, :], g, 0.0)
    N = channel_sums(g, near, DTYPE)
    # N is never positive, which the compiler does not know: so these tiles move to where products
    # leave theirs, once, instead of every product of theirs on its own.
    q_i, k_i = tl.where(N > 0, 0.0, q_i), tl.where(N > 0, 0.0, k_i)
    sigmoid = tl.where(N > 0, 0.0, sigmoid)
    first = tl.exp2(tl.sum(tl.where(i[None, :] == TILE - 1, N, 0.0), 1))[:, None]
    second = tl.exp2(tl.sum(tl.where(i[None, :] == CHUNK - 1, N, 0.0), 1))[:, None]
    behind = i[None, :] >= TILE
    unshift: tl.constexpr = 2.0**-60
    into = tl.where(behind, first, 1.0) * unshift
    out_of = tl.where(behind, second, first * second) * (1.0 / unshift)
    through = first * second * through[:, None]
    if MASKED:
        into = tl.where((document == 0)[None, :], into, 0.0)
        out_of = tl.where((document == last)[None, :], out_of, 0.0)
        through = tl.where(last > 0, 0.0, through)
    grow = tl.exp2(N + SHIFT)
    row_q, row_k = (q_i * grow).to(DTYPE), (k_i * grow).to(DTYPE)
    column = k_i * b[None, :] * tl.exp2(-N - SHIFT)
    over = tl.where(behind, column, column * first).to(DTYPE)
    column = column.to(DTYPE)

    # queries; G collects what the decay up to a token takes part in
    d_row = add_dot(over, tl.trans(dA_over), dot(column, tl.trans(dA_near)))
    d_row += dot(tl.trans(M), tl.trans(do)) * into
    G = row_q.to(tl.float32) * d_row
    d_i = d_row * grow + (own * b)[None, :] * k_i
    if GATED:
        # through the norm: of y = s x / |x| the gradient without its share along y
        d_i = q_factor[None, :] * (d_i - q_i * (along_q / (q_scale * q_scale))[None, :])
    if MASKED:
        d_i = tl.where(real[None, :], d_i, 0.0)
    tl.store(d_q + at, d_i.to(d_q.dtype.element_ty))

    # keys and beta
    d_column, d_over = dot(row_q, dA_near), dot(row_q, dA_over)
    if ERASE:
        d_column, d_over = add_dot(row_k, dL_near, d_column), add_dot(row_k, dL_over, d_over)
    G -= column.to(tl.float32) * d_column + over.to(tl.float32) * d_over
    d_column += tl.where(behind, d_over, d_over * first)
    d_leave = dot(tl.trans(dM), tl.trans(E)) * out_of
    G_leave = column.to(tl.float32) * d_leave
    d_column = (d_column + d_leave) * tl.exp2(-N - SHIFT) + own[None, :] * q_i
    d_b = tl.sum(k_i * d_column, 0)
    if BF16 != DTYPE:
        # The same, for <b E, d(b E)> = <E, dV>, without terms that cancel where keys are alike.
        whole = tl.sum(E.to(tl.float32) * dr.to(tl.float32), 1) if part == 0 else own * 0.0
        d_b = tl.where(b == 0.0, d_b, whole / b)
    if MASKED:
        d_b = tl.where(real, d_b, 0.0)
    all_tokens = tl.num_programs(0) // (K // KB) // H * CHUNK
    tl.store(d_beta + (part.to(tl.int64) * all_tokens + token) * H + h, d_b)
    d_i = b[None, :] * d_column
    if ERASE:
        d_row = add_dot(over, tl.trans(dL_over), dot(column, tl.trans(dL_near)))
        d_row -= dot(tl.trans(M), tl.trans(dr)) * into
        G += row_k.to(tl.float32) * d_row
        d_i += d_row * grow
    if GATED:
        d_i = k_factor[None, :] * (d_i - k_i * along_k[None, :])
    if MASKED:
        d_i = tl.where(real[None, :], d_i, 0.0)
    tl.store(d_k + at, d_i.to(d_k.dtype.element_ty))

    # a token's decay acts on rows from it on, on columns before it, on what passes through
    d_g = fine_sum(G, seen, DTYPE) + fine_sum(G_leave, tl.trans(strict.to(tl.float32)), DTYPE)
    d_g += through
    if MASKED:
        d_g = tl.where(real[None, :], d_g, 0.0)
    if GATED:
        factor: tl.constexpr = -0.6931471805599453 * 0.6931471805599453 * G_MIN2
        d_a = d_g * factor * sigmoid * (1.0 - sigmoid)
        tl.store(d_gate + tile * 2 * K + channel, tl.sum(d_a * z_i, 1))
        tl.store(d_gate + tile * 2 * K + K + channel, tl.sum(d_a, 1))
        d_g = d_a * tl.load(gate + h * K + channel)[:, None]
    tl.store(d_z + at, d_g.to(d_z.dtype.element_ty))
