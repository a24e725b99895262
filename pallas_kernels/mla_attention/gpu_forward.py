"""The forward Triton kernel: a block of queries meets its blocks of keys, with a running maximum.

    s = bits q [k | k_shared]^T      m = max_s s      p = exp2(s - m)      o = p v / sum_s p

Documents are runs of tokens, so a query sees the keys from the start of its document to itself, and
no id is compared: two numbers per query say everything, `start` and its own index. Blocks of keys
that every query of the block sees in full need no mask and come first; then those at both ends.
"""

import triton
import triton.language as tl


@triton.jit
def place(n, count, GROUP: tl.constexpr):
    """(block, which) of this program, for `count` heads of all rows with n blocks each.

    GROUP heads at a time pass from their first block to their last: programs that run at the same
    time read the same keys, and those that begin last have the least to do.
    """
    program = tl.program_id(0)
    group = program // (n * GROUP)
    first = group * GROUP
    size = tl.minimum(count - first, GROUP)
    program -= first * n
    return program // size, first + program % size


@triton.jit
def tile(x, row, T, width, stride, channels, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """x[channels] of the tokens `row` beyond token 0 at x: zeros outside of T tokens and `width`."""
    at = x + row[:, None] * stride + channels[None, :]
    if MASKED:
        inside = row[:, None] < T
        if width != WIDTH:
            inside = inside & (channels[None, :] < width)
        return tl.load(at, mask=inside, other=0.0)
    if width != WIDTH:
        return tl.load(at, mask=channels[None, :] < width, other=0.0)
    return tl.load(at)


@triton.jit
def ranges(lo, hi, diagonal, end, BLOCK: tl.constexpr):
    """Splits the tokens [lo, end) in blocks: those of [hi, diagonal) need no mask.

    Returns: the first block of all, the first without a mask, the first of those after it; in tokens.
    """
    first = lo // BLOCK * BLOCK
    whole_end = tl.maximum(diagonal // BLOCK * BLOCK, first)
    whole = tl.minimum(tl.cdiv(hi, BLOCK) * BLOCK, whole_end)
    return first, tl.maximum(whole, first), whole_end


@triton.jit
def _step(
    j, q_n, q_r, k, k_shared, v, row, start, m, total, acc, bits,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys from token j on."""
    local = tl.arange(0, KEYS)
    left = T - j
    at = tl.cast(j, tl.int64)
    k_n = tile(k + at * H * N, local, left, N, H * N, tl.arange(0, NP), NP, MASKED)
    k_r = tile(k_shared + at * R, local, left, R, R, tl.arange(0, RP), RP, MASKED)
    values = tile(v + at * H * V, local, left, V, H * V, tl.arange(0, VP), VP, MASKED)
    s = tl.dot(q_n, tl.trans(k_n), input_precision=PRECISION)
    s = tl.dot(q_r, tl.trans(k_r), s, input_precision=PRECISION)
    if MASKED:
        key = (j + local)[None, :]
        s = tl.where((key <= row[:, None]) & (key >= start[:, None]), s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * bits)
    reference = m_new
    if MASKED:  # there may be no key yet
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * bits - reference[:, None])
    decay = tl.exp2(m - reference)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return m_new, total, acc


@triton.jit
def forward(
    q, k, k_shared, v, starts, o, tops, totals, bits: tl.constexpr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o [B T H V], and per query, [B H T], its largest scaled logit in bits and its sum."""
    n: tl.constexpr = (T + QUERIES - 1) // QUERIES
    i, which = place(n, B * H, GROUP)
    i = n - 1 - i
    b, h = (which // H).to(tl.int64), which % H
    first_row = i * QUERIES
    local = tl.arange(0, QUERIES)
    row = first_row + local
    start = tl.load(starts + b * T + row, mask=row < T, other=T)

    at = (b * T + first_row) * H + h
    q += at * (N + R)
    left = T - first_row
    q_n = tile(q, local, left, N, H * (N + R), tl.arange(0, NP), NP, True)
    q_r = tile(q + N, local, left, R, H * (N + R), tl.arange(0, RP), RP, True)
    k += (b * T * H + h) * N
    k_shared += b * T * R
    v += (b * T * H + h) * V

    m = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VP], tl.float32)
    end = tl.minimum(first_row + QUERIES, T)
    first, whole, whole_end = ranges(tl.min(start), tl.max(start), first_row, end, KEYS)
    for j in tl.range(whole, whole_end, KEYS, num_stages=STAGES):
        m, total, acc = _step(
            j, q_n, q_r, k, k_shared, v, row, start, m, total, acc, bits,
            T, H, N, R, V, NP, RP, VP, KEYS, PRECISION, False,
        )  # fmt: skip
    gap = whole_end - whole
    for j in tl.range(first, end - gap, KEYS, num_stages=STAGES):
        j = tl.where(j < whole, j, j + gap)
        m, total, acc = _step(
            j, q_n, q_r, k, k_shared, v, row, start, m, total, acc, bits,
            T, H, N, R, V, NP, RP, VP, KEYS, PRECISION, True,
        )  # fmt: skip

    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    channels = tl.arange(0, VP)
    o += at * V
    inside = (row[:, None] < T) & (channels[None, :] < V)
    tl.store(o + local[:, None] * (H * V) + channels[None, :], acc, mask=inside)
    numbers = (b * H + h) * T + row
    tl.store(tops + numbers, m, mask=row < T)
    tl.store(totals + numbers, total, mask=row < T)
