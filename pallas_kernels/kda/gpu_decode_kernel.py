"""The body of `gpu_decode.py`'s kernel."""

import triton
import triton.language as tl


@triton.jit
def step(
    q, k, v, g, beta, state, slots, has_state, o, same,
    N: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    POOL: tl.constexpr, HAS: tl.constexpr, ERASE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some value channels of one head's memory: they have nothing to do with the others.

    S' = Diag(exp g) S,   S'' = S' + beta k (v - S'^T k)^T,   o = S''^T q
    """
    blocks: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // blocks  # of the batch
    b, h = head // HV, head % HV
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    key, value = rows < K, columns < V
    memory = b
    if POOL:
        memory = tl.load(slots + b)
    owned = (memory >= 0) & (memory < N)  # else an idle row: reads nothing, writes nothing
    full = owned
    if HAS:
        full &= tl.load(has_state + b) != 0
    at = (memory.to(tl.int64) * HV + h) * (K * V) + rows[:, None] * V + columns[None, :]
    inside = key[:, None] & value[None, :]
    S = tl.load(state + at, mask=inside & full, other=0.0)
    pair = (b * H + h // (HV // H)) * K + rows
    qs = tl.load(q + pair, mask=key, other=0.0).to(tl.float32)
    ks = tl.load(k + pair, mask=key, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + head * K + rows, mask=key, other=0.0))
    vs = tl.load(v + head * V + columns, mask=value, other=0.0)
    S *= decay[:, None]
    error = vs.to(tl.float32)
    if ERASE:
        error -= tl.sum(S * ks[:, None], 0)
    S += ks[:, None] * (tl.load(beta + head).to(tl.float32) * error)[None, :]
    tl.store(state + at, S, mask=inside & owned)
    out = tl.sum(S * qs[:, None], 0).to(o.dtype.element_ty)
    tl.store(o + head * V + columns, out, mask=value)
