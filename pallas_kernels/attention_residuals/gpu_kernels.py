"""The bodies of the GPU kernels of Attention Residuals (`triton_gpu.py`).

A program has all channels of a token in registers, and meets its sources one after the other: the
valid rows of the bank, then the prefix. Loads run ahead into shared memory; in the backward pass, whose
programs go from token to token, also those of the next token.
"""

import triton
import triton.language as tl


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(a, b):
    """The sums of two rows, in one pass over the warps."""
    return tl.reduce((a, b), 0, _add)


@triton.jit
def _mine(N):
    """How many of the N tokens this program has: every num_programs-th."""
    return tl.cdiv(N - tl.program_id(0), tl.num_programs(0))


@triton.jit
def _step(step, rows):
    """(token, source) of a step of the backward pass: each source of a token, and back again."""
    steps = 2 * rows + 2
    turn = step % steps
    token = tl.program_id(0).to(tl.int64) + tl.cast(step // steps, tl.int64) * tl.num_programs(0)
    return token, tl.minimum(turn, steps - 1 - turn)


@triton.jit
def _source(bank, prefix, token, i, rows, N, D: tl.constexpr):
    """Where source i of a token begins: a row of the bank, or the prefix."""
    return tl.where(i < rows, bank + (i * tl.cast(N, tl.int64) + token) * D, prefix + token * D)


@triton.jit
def forward(
    bank, count, prefix, key, gain, N, x, stats,
    D: tl.constexpr, EPS: tl.constexpr, NORMED: tl.constexpr, OUT_EPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax over the sources as they come: the sum so far is scaled when the largest score grows.

    stats has a row for each token: of each source the scale and the product with the key, then the
    logarithm of the softmax's denominator.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    rows = tl.load(count)
    keys = tl.load(key + columns, mask=inside, other=0.0)
    stats += token * (2 * ROWS + 3)
    h = tl.zeros((BLOCK,), tl.float32)
    top, total = -float("inf"), 0.0
    for i in tl.range(rows + 1, num_stages=STAGES):
        source = _source(bank, prefix, token, i, rows, N, D)
        v = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        square, product = _sums(v * v, v * keys)
        scale = tl.rsqrt(square / D + EPS)
        tl.store(stats + 2 * i, scale)
        tl.store(stats + 2 * i + 1, product)
        score = scale * product
        higher = tl.maximum(top, score)
        old, new = tl.exp(top - higher), tl.exp(score - higher)
        h = old * h + new * v
        total = old * total + new
        top = higher
    tl.store(stats + 2 * ROWS + 2, top + tl.log(total))
    h = (h / total).to(x.dtype.element_ty)
    if NORMED:
        wide = h.to(tl.float32)
        normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + OUT_EPS)).to(h.dtype)
        gains = tl.load(gain + columns, mask=inside, other=0.0)
        h = (gains * normed.to(tl.float32)).to(h.dtype)
    tl.store(x + token * D + columns, h, mask=inside)


@triton.jit
def backward(
    bank, count, prefix, key, gain, stats, dx, d_bank, N, same, d_prefix, d_key, d_gain,
    D: tl.constexpr, NORMED: tl.constexpr, OUT_EPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cotangents of the sources, each added to what later sites hand back, in place.

    A token has two steps per source: one for the mixture, then, in reverse order and from the
    cache, one for the source's cotangent. d_key is summed in registers and d_gain in the program's row of
    the result, which stays in the cache.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    rows = tl.load(count)
    d_key += tl.program_id(0).to(tl.int64) * D
    d_gain += tl.program_id(0).to(tl.int64) * D
    keys = tl.load(key + columns, mask=inside, other=0.0)
    d_keys = tl.zeros((BLOCK,), tl.float32)
    d = tl.zeros((BLOCK,), tl.float32)  # first the mixture, then its cotangent
    mean = 0.0  # their product
    token, i = _step(0, rows)
    its = stats + token * (2 * ROWS + 3)
    next_scale, next_product = tl.load(its + 2 * i), tl.load(its + 2 * i + 1)
    next_log_total = tl.load(its + 2 * ROWS + 2)
    for step in tl.range(_mine(N) * (2 * rows + 2), num_stages=STAGES):
        here, i = _step(step, rows)
        turn = step % (2 * rows + 2)
        source = _source(bank, prefix, here, i, rows, N, D)
        v = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        # With the last source of the mixture its cotangent comes, then those of the bank's rows.
        beside = _source(d_bank, dx, here, i, rows, N, D)
        wanted = inside & (((turn > rows) & (i < rows)) | (turn == rows))
        other = tl.load(beside + columns, mask=wanted, other=0.0).to(tl.float32)
        scale, product, log_total = next_scale, next_product, next_log_total
        token, next_i = _step(step + 1, rows)
        its = stats + tl.minimum(token, N - 1) * (2 * ROWS + 3)
        next_scale, next_product = tl.load(its + 2 * next_i), tl.load(its + 2 * next_i + 1)
        next_log_total = tl.load(its + 2 * ROWS + 2)
        p = tl.exp(scale * product - log_total)
        if turn <= rows:
            d = tl.where(turn == 0, p * v, d + p * v)
            if turn == rows:
                if NORMED:
                    h = d.to(dx.dtype.element_ty).to(tl.float32)
                    gains = tl.load(gain + columns, mask=inside, other=0.0)
                    square, pull = _sums(h * h, other * gains * h)
                    out_scale = tl.rsqrt(square / D + OUT_EPS)
                    share = other * (h * out_scale).to(dx.dtype.element_ty).to(tl.float32)
                    share += tl.load(d_gain + columns, mask=inside & (step > rows), other=0.0)
                    tl.store(d_gain + columns, share, mask=inside)
                    cube = out_scale * out_scale * out_scale
                    d = out_scale * (other * gains) - (cube * pull / D) * h
                    mean = cube * pull * OUT_EPS  # <d, h>, after what cancels
                else:
                    mean = tl.sum(d * other, 0)
                    d = other
        else:
            towards = p * (tl.sum(d * v, 0) - mean) * scale
            # Alone a source has weight one, whatever its score.
            towards = tl.where(rows > 0, towards, 0.0)
            d_keys += towards * v
            share = p * d + towards * keys - towards * product * scale * scale / D * v
            share = (share + other).to(d_bank.dtype.element_ty)
            result = _source(d_bank, d_prefix, here, i, rows, N, D)
            tl.store(result + columns, share, mask=inside)
    tl.store(d_key + columns, d_keys, mask=inside)
    if not NORMED:
        tl.store(d_gain + columns, tl.zeros((BLOCK,), tl.float32), mask=inside)
