"""Triton kernels of the experts' feed-forward: products whose results are finished on chip.

The activation is a(g, u) = cap(g) sigmoid(g) cap(u), with cap(z) = b tanh(z / b), or z where there is no
bound b: SiTU-GLU (K3 report, Eq. 12) and SwiGLU. Tiles as in `gpu_kernels`.
"""

import triton
import triton.language as tl

from k3jax.pallas_kernels.grouped_matmul.gpu_kernels import clear, find, multiply, put


@triton.jit
def tanh(x):
    """Near 0 by its series, where 1 - 2 / (1 + exp 2x) cancels."""
    s = x * x
    near = x * (1 + s * (-1 / 3 + s * (2 / 15 - s * (17 / 315))))
    return tl.where(s < 0.04, near, 1 - 2 / (1 + tl.exp(2 * x)))


@triton.jit
def cap(x, BOUND: tl.constexpr):
    """b tanh(x / b) and its derivative; x and 1 without a bound."""
    if BOUND is None:
        return x, tl.full(x.shape, 1.0, tl.float32)
    else:
        t = tanh(x / BOUND)
        return BOUND * t, 1 - t * t


@triton.jit
def activated(gate, up, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr):
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return cap(gate, GATE_CAP)[0] * tl.sigmoid(gate) * cap(up, UP_CAP)[0]


@triton.jit
def multiply_two(
    acc1, acc2, x, w1, w2, rows, cols, DEPTH: tl.constexpr, COLS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc1 + x[rows] @ w1[:, cols] and acc2 + x[rows] @ w2[:, cols], both w [DEPTH, COLS]."""
    k = tl.arange(0, BLOCK)
    x_at = x + rows[:, None] * DEPTH + k[None, :]
    at = k[:, None] * COLS + cols[None, :]
    for start in tl.range(0, DEPTH, BLOCK):
        if DEPTH % BLOCK == 0 and COLS % COLUMNS == 0:
            a, b1, b2 = tl.load(x_at), tl.load(w1 + at), tl.load(w2 + at)
        else:
            deep = start + k < DEPTH
            inside = deep[:, None] & (cols < COLS)[None, :]
            a = tl.load(x_at, mask=deep[None, :], other=0)
            b1 = tl.load(w1 + at, mask=inside, other=0)
            b2 = tl.load(w2 + at, mask=inside, other=0)
        x_at += BLOCK
        at += BLOCK * COLS
        acc1 = tl.dot(a, b1, acc1, input_precision=PRECISION)
        acc2 = tl.dot(a, b2, acc2, input_precision=PRECISION)
    return acc1, acc2


@triton.jit
def up_tile(
    x, w1, w3, p, a, g, u, count, cols, DEPTH: tl.constexpr, COLS: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    here = tl.minimum(rows, count - 1)
    zero = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate, up = multiply_two(
        zero, zero, x, w1, w3, here, cols, DEPTH, COLS, COLUMNS, BLOCK, PRECISION
    )
    gate, up = gate.to(a.dtype.element_ty), up.to(a.dtype.element_ty)
    if SAVE:
        put(g, gate, rows, count, cols, COLS)
        put(u, up, rows, count, cols, COLS)
    else:
        value = activated(gate, up, GATE_CAP, UP_CAP)
        put(a, value * tl.load(p + here)[:, None], rows, count, cols, COLS)


@triton.jit
def up_kernel(
    x, w1, w3, p, group, first, last, a, g, u,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr, SAVE: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """g = x w1 and u = x w3, both if SAVE, and p a(g, u) for one tile; zeros for rows of no group."""
    e, begin, count, column = find(group, first, last, COLS, COLUMNS)
    if count <= 0:
        return
    if e == GROUPS:
        clear(a, begin, count, column, COLS, ROWS, COLUMNS)
        if SAVE:
            clear(g, begin, count, column, COLS, ROWS, COLUMNS)
            clear(u, begin, count, column, COLS, ROWS, COLUMNS)
        return
    x += begin * DEPTH
    w1 += e * (DEPTH * COLS)
    w3 += e * (DEPTH * COLS)
    p += begin
    a += begin * COLS
    g += begin * COLS
    u += begin * COLS
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    if count <= SMALL:
        up_tile(
            x, w1, w3, p, a, g, u, count, cols, DEPTH, COLS, GATE_CAP, UP_CAP, SAVE, SMALL,
            COLUMNS, BLOCK, PRECISION,
        )  # fmt: skip
    else:
        up_tile(
            x, w1, w3, p, a, g, u, count, cols, DEPTH, COLS, GATE_CAP, UP_CAP, SAVE, ROWS,
            COLUMNS, BLOCK, PRECISION,
        )  # fmt: skip
    if SAVE:
        tl.debug_barrier()
        for start in range(0, count, SMALL):
            rows = start + tl.arange(0, SMALL)
            at = rows[:, None] * COLS + cols[None, :]
            mask = (rows < count)[:, None] & (cols < COLS)[None, :]
            gate = tl.load(g + at, mask=mask, other=0)
            up = tl.load(u + at, mask=mask, other=0)
            weight = tl.load(p + rows, mask=rows < count, other=0)
            value = activated(gate, up, GATE_CAP, UP_CAP)
            put(a, value * weight[:, None], rows, count, cols, COLS)


@triton.jit
def down_dx_tile(
    dy, w2, dg, count, cols, DEPTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    here = tl.minimum(rows, count - 1)
    t = tl.zeros((ROWS, COLUMNS), tl.float32)
    t = multiply(t, dy, w2, here, cols, DEPTH, COLS, True, COLUMNS, BLOCK, PRECISION)
    put(dg, t, rows, count, cols, COLS)


@triton.jit
def down_dx_kernel(
    dy, w2, g, u, p, group, first, last, dg, du, a, dp,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, GATE_CAP: tl.constexpr,
    UP_CAP: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From t = dy w2^T of one tile: dg, du, p a(g, u), and <a(g, u), t> over its columns; else zeros.

    In dg t waits for its turn, rounded: finished as a whole, a tile would spill kilobytes per thread.
    """
    tiles = tl.cdiv(COLS, COLUMNS)
    e, begin, count, column = find(group, first, last, COLS, COLUMNS)
    if count <= 0:
        return
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    dp += begin * tiles + column
    if e == GROUPS:
        clear(dg, begin, count, column, COLS, ROWS, COLUMNS)
        clear(du, begin, count, column, COLS, ROWS, COLUMNS)
        clear(a, begin, count, column, COLS, ROWS, COLUMNS)
        rows = tl.arange(0, ROWS)
        tl.store(dp + rows * tiles, tl.zeros((ROWS,), tl.float32), mask=rows < count)
        return
    dy += begin * DEPTH
    w2 += e * (DEPTH * COLS)
    g += begin * COLS
    u += begin * COLS
    p += begin
    dg += begin * COLS
    du += begin * COLS
    a += begin * COLS
    if count <= SMALL:
        down_dx_tile(dy, w2, dg, count, cols, DEPTH, COLS, SMALL, COLUMNS, BLOCK, PRECISION)
    else:
        down_dx_tile(dy, w2, dg, count, cols, DEPTH, COLS, ROWS, COLUMNS, BLOCK, PRECISION)
    tl.debug_barrier()
    for start in range(0, count, SMALL):
        rows = start + tl.arange(0, SMALL)
        at = rows[:, None] * COLS + cols[None, :]
        mask = (rows < count)[:, None] & (cols < COLS)[None, :]
        gate = tl.load(g + at, mask=mask, other=0).to(tl.float32)
        up = tl.load(u + at, mask=mask, other=0).to(tl.float32)
        t = tl.load(dg + at, mask=mask, other=0).to(tl.float32)
        weight = tl.load(p + rows, mask=rows < count, other=0)[:, None]
        s = tl.sigmoid(gate)
        gate, d_gate = cap(gate, GATE_CAP)
        up, d_up = cap(up, UP_CAP)
        gated = gate * s
        value = gated * up
        put(a, value * weight, rows, count, cols, COLS)
        tl.store(dp + rows * tiles, tl.sum(value * t, 1), mask=rows < count)
        t *= weight
        put(du, t * gated * d_up, rows, count, cols, COLS)
        put(dg, t * up * (d_gate * s + gated * (1 - s)), rows, count, cols, COLS)


@triton.jit
def up_dx_tile(
    dg, du, w1, w3, dx, count, cols, DEPTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    here = tl.minimum(rows, count - 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc = multiply(acc, dg, w1, here, cols, DEPTH, COLS, True, COLUMNS, BLOCK, PRECISION)
    acc = multiply(acc, du, w3, here, cols, DEPTH, COLS, True, COLUMNS, BLOCK, PRECISION)
    put(dx, acc, rows, count, cols, COLS)


@triton.jit
def up_dx_kernel(
    dg, du, w1, w3, group, first, last, dx,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
    SMALL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = dg w1^T + du w3^T for one tile; zeros for the rows of no group."""
    e, begin, count, column = find(group, first, last, COLS, COLUMNS)
    if count <= 0:
        return
    if e == GROUPS:
        clear(dx, begin, count, column, COLS, ROWS, COLUMNS)
        return
    dg += begin * DEPTH
    du += begin * DEPTH
    w1 += e * (DEPTH * COLS)
    w3 += e * (DEPTH * COLS)
    dx += begin * COLS
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    if count <= SMALL:
        up_dx_tile(dg, du, w1, w3, dx, count, cols, DEPTH, COLS, SMALL, COLUMNS, BLOCK, PRECISION)
    else:
        up_dx_tile(dg, du, w1, w3, dx, count, cols, DEPTH, COLS, ROWS, COLUMNS, BLOCK, PRECISION)
