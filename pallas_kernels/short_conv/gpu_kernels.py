# ruff: noqa: RUF005 (Triton has no starred expressions in tuples)
"""The bodies of the GPU kernels of the short convolution (`triton_gpu.py`).

A program has a tile of tokens of some channels. It goes from token to token with one row of channels at a
time: the W - 1 inputs before a token stay in registers, so that each is loaded once. Several rows
are loaded ahead of their use.
"""

import triton
import triton.language as tl

from k3jax.pallas_kernels.triton_math import sigmoid


@triton.jit
def _where(T, C: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """(row of the batch, first token, channels) of this program; neighbours share tokens."""
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) // blocks
    tiles = tl.cdiv(T, TILE)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return tile // tiles, tile % tiles * TILE, columns


@triton.jit
def _weights(taps, columns, C: tl.constexpr, W: tl.constexpr):
    """Rows of the kernel in float32, oldest first."""
    rows = tl.tuple([])
    for j in tl.static_range(W):
        row = tl.load(taps + j * C + columns, mask=columns < C, other=0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def _before(x, past, start, columns, C: tl.constexpr, W: tl.constexpr):
    """The W - 1 inputs before token `start`, oldest first; x and past begin at the row of the batch."""
    rows = tl.tuple([])
    for j in tl.static_range(W - 1):
        t = start - (W - 1) + j
        inside = columns < C
        own = tl.load(x + t.to(tl.int64) * C + columns, mask=inside & (t >= 0), other=0.0)
        # Before the row: `start` is below W - 1, and t + W - 1 a row of `past`.
        old = tl.load(past + (t + W - 1) * C + columns, mask=inside & (t < 0), other=0.0)
        rows = rows + (tl.where(t < 0, old, own).to(tl.float32),)
    return rows


@triton.jit
def _rows(x, start, end, columns, C: tl.constexpr, N: tl.constexpr):
    """N rows of x from `start` on, as stored; zeros from `end` on."""
    rows = tl.tuple([])
    for i in tl.static_range(N):
        t = start + i
        mask = (columns < C) & (t < end)
        rows = rows + (tl.load(x + t.to(tl.int64) * C + columns, mask=mask, other=0.0),)
    return rows


@triton.jit
def _bits(reach, start, end, N: tl.constexpr, MASKED: tl.constexpr):
    """Which taps count, of N tokens from `start` on; none from `end` on."""
    bits = tl.tuple([])
    for i in tl.static_range(N):
        t = start + i
        bits = bits + (tl.load(reach + t, mask=t < end, other=0) if MASKED else 0,)
    return bits


@triton.jit
def _taps(window, bits, W: tl.constexpr, MASKED: tl.constexpr):
    """The inputs that count for a token, oldest first: a select, whatever stands in the others."""
    if not MASKED:
        return window
    rows = tl.tuple([])
    for j in tl.static_range(W):
        counts = ((bits >> (W - 1 - j)) & 1) > 0
        rows = rows + (tl.where(counts, window[j], 0.0),)
    return rows


@triton.jit
def _convolve(taps, weights, W: tl.constexpr):
    z = taps[0] * weights[0]
    for j in tl.static_range(1, W):
        z += taps[j] * weights[j]
    return z


@triton.jit
def forward(
    x, taps, past, reach, T, y,
    C: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    b, first, columns = _where(T, C, TILE, BLOCK)
    b = b.to(tl.int64)
    x += b * T * C
    y += b * T * C
    weights = _weights(taps, columns, C, W)
    window = _before(x, past + b * (W - 1) * C, first, columns, C, W)
    end = tl.minimum(first + TILE, T)
    next_rows = _rows(x, first, end, columns, C, AHEAD)
    next_bits = _bits(reach + b * T, first, end, AHEAD, MASKED)
    for start in range(first, end, AHEAD):
        rows, bits = next_rows, next_bits
        next_rows = _rows(x, start + AHEAD, end, columns, C, AHEAD)
        next_bits = _bits(reach + b * T, start + AHEAD, end, AHEAD, MASKED)
        for i in tl.static_range(AHEAD):
            t = start + i
            window = window + (rows[i].to(tl.float32),)
            z = _convolve(_taps(window, bits[i], W, MASKED), weights, W)
            window = window[1:]
            result = (z * sigmoid(z, EXACT)).to(y.dtype.element_ty)
            tl.store(y + t.to(tl.int64) * C + columns, result, mask=(columns < C) & (t < end))


@triton.jit
def _zeros(N: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.tuple([])
    for _ in tl.static_range(N):
        rows = rows + (tl.zeros((BLOCK,), tl.float32),)
    return rows


@triton.jit
def _summed(sums, share, inputs, W: tl.constexpr):
    """The kernel's cotangent with a token's share."""
    rows = tl.tuple([])
    for j in tl.static_range(W):
        rows = rows + (sums[j] + share * inputs[j],)
    return rows


@triton.jit
def _spread(pending, dz, weights, bits, W: tl.constexpr, MASKED: tl.constexpr):
    """The cotangents of a token's W inputs, oldest first: of all but its own a part is pending."""
    rows = tl.tuple([])
    for j in tl.static_range(W - 1):
        counts = ((bits >> (W - 1 - j)) & 1) > 0
        rows = rows + (pending[j] + weights[j] * (tl.where(counts, dz, 0.0) if MASKED else dz),)
    return rows + (weights[W - 1] * dz,)


@triton.jit
def backward(
    x, taps, past, reach, dy, T, dx, d_past, d_taps,
    C: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile and the W - 1 tokens after it, whose taps reach into the tile.

    Token t completes the cotangent of input t - W + 1: those of the inputs since then are pending.
    d_taps has a row per tile, W times C.
    """
    b, first, columns = _where(T, C, TILE, BLOCK)
    b = b.to(tl.int64)
    inside = columns < C
    x += b * T * C
    dy += b * T * C
    dx += b * T * C
    d_past += b * (W - 1) * C
    weights = _weights(taps, columns, C, W)
    window = _before(x, past + b * (W - 1) * C, first, columns, C, W)
    pending, sums = _zeros(W - 1, BLOCK), _zeros(W, BLOCK)
    end = tl.minimum(first + TILE, T)
    stop = end + W - 1
    last = tl.minimum(stop, T)
    next_rows = _rows(x, first, last, columns, C, AHEAD)
    next_d_rows = _rows(dy, first, last, columns, C, AHEAD)
    next_bits = _bits(reach + b * T, first, last, AHEAD, MASKED)
    for start in range(first, stop, AHEAD):
        rows, d_rows, bits = next_rows, next_d_rows, next_bits
        next_rows = _rows(x, start + AHEAD, last, columns, C, AHEAD)
        next_d_rows = _rows(dy, start + AHEAD, last, columns, C, AHEAD)
        next_bits = _bits(reach + b * T, start + AHEAD, last, AHEAD, MASKED)
        for i in tl.static_range(AHEAD):
            t = start + i
            window = window + (rows[i].to(tl.float32),)
            inputs = _taps(window, bits[i], W, MASKED)
            z = _convolve(inputs, weights, W)
            window = window[1:]
            s = sigmoid(z, EXACT)
            dz = d_rows[i].to(tl.float32) * (s + z * s * (1 - s))
            if MASKED:
                dz = tl.where((bits[i] & 1) > 0, dz, 0.0)
            share = tl.where(t < end, dz, 0.0)  # what lies behind belongs to the next tile
            sums = _summed(sums, share, inputs, W)
            pending = _spread(pending, dz, weights, bits[i], W, MASKED)
            done = t - (W - 1)
            row = done.to(tl.int64) * C + columns
            result = pending[0].to(dx.dtype.element_ty)
            tl.store(dx + row, result, mask=inside & (done >= first) & (done < end))
            tl.store(d_past + row + (W - 1) * C, pending[0], mask=inside & (done < 0))
            pending = pending[1:]
    tile = (tl.program_id(0) // ((C + BLOCK - 1) // BLOCK)).to(tl.int64)
    for j in tl.static_range(W):
        tl.store(d_taps + (tile * W + j) * C + columns, sums[j], mask=inside)
