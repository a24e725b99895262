"""The backward Triton kernels, one for the keys' gradients and one for the queries'.

    p = exp2(bits q k^T - m)        dp = d_o v^T          ds = p (dp - delta)
    dv = p^T d_o                    dk = scale ds^T q     dq = scale ds k

with d_o divided by the sum that makes p a softmax, and delta = o . d_o. Logits are made twice, 7
products instead of 5: no order of additions into dq depends on which program comes first, so that
a step repeats to the last bit, and nothing is added up in memory.
"""

import triton
import triton.language as tl

from k3jax.pallas_kernels.mla_attention.gpu_forward import place, ranges, tile


@triton.jit
def _of_keys_step(
    i, k_n, k_r, values, q, d_o, tops, deltas, key, end, dk_n, dk_r, dv, bits,
    T: tl.constexpr, H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr, QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of queries from token i on, with p and its gradient as [keys, queries]."""
    local = tl.arange(0, QUERIES)
    left = T - i
    at = tl.cast(i, tl.int64) * H
    q += at * (N + R)
    q_n = tile(q, local, left, N, H * (N + R), tl.arange(0, NP), NP, MASKED)
    q_r = tile(q + N, local, left, R, H * (N + R), tl.arange(0, RP), RP, MASKED)
    do = tile(d_o + at * V, local, left, V, H * V, tl.arange(0, VP), VP, MASKED)
    if MASKED:
        m = tl.load(tops + i + local, mask=local < left, other=0.0)
        delta = tl.load(deltas + i + local, mask=local < left, other=0.0)
    else:
        m, delta = tl.load(tops + i + local), tl.load(deltas + i + local)
    s = tl.dot(k_n, tl.trans(q_n), input_precision=PRECISION)
    s = tl.dot(k_r, tl.trans(q_r), s, input_precision=PRECISION)
    p = tl.exp2(s * bits - m[None, :])
    if MASKED:
        query = (i + local)[None, :]
        p = tl.where((query >= key[:, None]) & (query < end[:, None]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    # delta is where the product starts: taken off it afterwards, it takes registers meanwhile.
    dp = tl.broadcast_to(-delta[None, :], p.shape)
    dp = tl.dot(values, tl.trans(do), dp, input_precision=PRECISION)
    ds = (p * dp).to(q_n.dtype)
    dk_n = tl.dot(ds, q_n, dk_n, input_precision=PRECISION)
    dk_r = tl.dot(ds, q_r, dk_r, input_precision=PRECISION)
    return dk_n, dk_r, dv


@triton.jit
def of_keys(
    q, k, k_shared, v, d_o, tops, deltas, ends, dk, dk_shared, dv,
    bits: tl.constexpr, scale: tl.constexpr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [B T H N], what each head adds to dk_shared [B H T R], and dv [B T H V]."""
    n: tl.constexpr = (T + KEYS - 1) // KEYS
    j, which = place(n, B * H, GROUP)
    b, h = (which // H).to(tl.int64), which % H
    first_key = j * KEYS
    local = tl.arange(0, KEYS)
    key = first_key + local
    end = tl.load(ends + b * T + key, mask=key < T, other=0)

    at, left = b * T + first_key, T - first_key
    k_n = tile(k + (at * H + h) * N, local, left, N, H * N, tl.arange(0, NP), NP, True)
    k_r = tile(k_shared + at * R, local, left, R, R, tl.arange(0, RP), RP, True)
    values = tile(v + (at * H + h) * V, local, left, V, H * V, tl.arange(0, VP), VP, True)
    q += (b * T * H + h) * (N + R)
    d_o += (b * T * H + h) * V
    tops += (b * H + h) * T
    deltas += (b * H + h) * T

    dk_n = tl.zeros([KEYS, NP], tl.float32)
    dk_r = tl.zeros([KEYS, RP], tl.float32)
    acc = tl.zeros([KEYS, VP], tl.float32)
    last = tl.max(end)
    first, whole, whole_end = ranges(first_key, first_key + KEYS, tl.min(end), last, QUERIES)
    for i in tl.range(whole, whole_end, QUERIES, num_stages=STAGES):
        dk_n, dk_r, acc = _of_keys_step(
            i, k_n, k_r, values, q, d_o, tops, deltas, key, end, dk_n, dk_r, acc, bits,
            T, H, N, R, V, NP, RP, VP, QUERIES, PRECISION, False,
        )  # fmt: skip
    gap = whole_end - whole
    for i in tl.range(first, last - gap, QUERIES, num_stages=STAGES):
        i = tl.where(i < whole, i, i + gap)
        dk_n, dk_r, acc = _of_keys_step(
            i, k_n, k_r, values, q, d_o, tops, deltas, key, end, dk_n, dk_r, acc, bits,
            T, H, N, R, V, NP, RP, VP, QUERIES, PRECISION, True,
        )  # fmt: skip

    row = local[:, None]
    n_at, r_at = tl.arange(0, NP)[None, :], tl.arange(0, RP)[None, :]
    v_at = tl.arange(0, VP)[None, :]
    real = key[:, None] < T
    dk += (at * H + h) * N
    tl.store(dk + row * (H * N) + n_at, (dk_n * scale).to(k_n.dtype), mask=real & (n_at < N))
    dk_shared += ((b * H + h) * T + first_key) * R
    tl.store(dk_shared + row * R + r_at, dk_r * scale, mask=real & (r_at < R))
    dv += (at * H + h) * V
    tl.store(dv + row * (H * V) + v_at, acc.to(values.dtype), mask=real & (v_at < V))


@triton.jit
def _of_queries_step(
    j, q_n, q_r, do, m, delta, k, k_shared, v, row, start, dq_n, dq_r, bits,
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
    dp = tl.broadcast_to(-delta[:, None], [do.shape[0], KEYS])
    dp = tl.dot(do, tl.trans(values), dp, input_precision=PRECISION)
    p = tl.exp2(s * bits - m[:, None])
    if MASKED:
        key = (j + local)[None, :]
        p = tl.where((key <= row[:, None]) & (key >= start[:, None]), p, 0.0)
    ds = (p * dp).to(k_n.dtype)
    dq_n = tl.dot(ds, k_n, dq_n, input_precision=PRECISION)
    dq_r = tl.dot(ds, k_r, dq_r, input_precision=PRECISION)
    return dq_n, dq_r


@triton.jit
def of_queries(
    q, k, k_shared, v, d_o, tops, deltas, starts, dq,
    bits: tl.constexpr, scale: tl.constexpr,
    B: tl.constexpr, T: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    NP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B T H N + R]."""
    n: tl.constexpr = (T + QUERIES - 1) // QUERIES
    i, which = place(n, B * H, GROUP)
    i = n - 1 - i
    b, h = (which // H).to(tl.int64), which % H
    first_row = i * QUERIES
    local = tl.arange(0, QUERIES)
    row = first_row + local
    real = row < T
    start = tl.load(starts + b * T + row, mask=real, other=T)

    at, left = (b * T + first_row) * H + h, T - first_row
    q += at * (N + R)
    q_n = tile(q, local, left, N, H * (N + R), tl.arange(0, NP), NP, True)
    q_r = tile(q + N, local, left, R, H * (N + R), tl.arange(0, RP), RP, True)
    do = tile(d_o + at * V, local, left, V, H * V, tl.arange(0, VP), VP, True)
    numbers = (b * H + h) * T + row
    m = tl.load(tops + numbers, mask=real, other=0.0)
    delta = tl.load(deltas + numbers, mask=real, other=0.0)
    k += (b * T * H + h) * N
    k_shared += b * T * R
    v += (b * T * H + h) * V

    dq_n = tl.zeros([QUERIES, NP], tl.float32)
    dq_r = tl.zeros([QUERIES, RP], tl.float32)
    end = tl.minimum(first_row + QUERIES, T)
    first, whole, whole_end = ranges(tl.min(start), tl.max(start), first_row, end, KEYS)
    for j in tl.range(whole, whole_end, KEYS, num_stages=STAGES):
        dq_n, dq_r = _of_queries_step(
            j, q_n, q_r, do, m, delta, k, k_shared, v, row, start, dq_n, dq_r, bits,
            T, H, N, R, V, NP, RP, VP, KEYS, PRECISION, False,
        )  # fmt: skip
    gap = whole_end - whole
    for j in tl.range(first, end - gap, KEYS, num_stages=STAGES):
        j = tl.where(j < whole, j, j + gap)
        dq_n, dq_r = _of_queries_step(
            j, q_n, q_r, do, m, delta, k, k_shared, v, row, start, dq_n, dq_r, bits,
            T, H, N, R, V, NP, RP, VP, KEYS, PRECISION, True,
        )  # fmt: skip

    n_at, r_at = tl.arange(0, NP)[None, :], tl.arange(0, RP)[None, :]
    dq += at * (N + R) + local[:, None] * (H * (N + R))
    tl.store(dq + n_at, (dq_n * scale).to(q_n.dtype), mask=real[:, None] & (n_at < N))
    tl.store(dq + N + r_at, (dq_r * scale).to(q_n.dtype), mask=real[:, None] & (r_at < R))
