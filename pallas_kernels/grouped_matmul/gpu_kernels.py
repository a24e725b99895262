"""Triton kernels of the grouped matmul: rows times their group's matrix, and the gradient by it.

A tile of rows begins at the first row of its group (`plan_tiles`), so no tile has rows of two groups. Of
a group's last tile few rows may be left: up to SMALL take a narrow tile. Rows that a tile has too many
repeat its last one and are not stored, so no row is masked in the inner loop. Offsets inside one matrix
or one tile are 32 bits, those of matrices and tiles 64.
"""

import triton
import triton.language as tl


@triton.jit
def find(group, first, last, COLS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of this program's tile: group, first row, number of rows, first column."""
    tiles = tl.cdiv(COLS, COLUMNS)
    v = tl.program_id(0) // tiles
    begin = tl.load(first + v)
    count = tl.load(last + v) - begin
    return tl.load(group + v).to(tl.int64), begin.to(tl.int64), count, tl.program_id(0) % tiles


@triton.jit
def put(at, tile, rows, count, cols, COLS: tl.constexpr):
    """Stores the tile's first `count` rows."""
    mask = (rows < count)[:, None] & (cols < COLS)[None, :]
    tl.store(at + rows[:, None] * COLS + cols[None, :], tile.to(at.dtype.element_ty), mask=mask)


@triton.jit
def clear(at, begin, count, column, COLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros for rows of no group."""
    tile = tl.zeros((ROWS, COLUMNS), tl.float32)
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    put(at + begin * COLS, tile, tl.arange(0, ROWS), count, cols, COLS)


@triton.jit
def multiply(
    acc, x, w, rows, cols, DEPTH: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x[rows] @ w[:, cols], with w [DEPTH, COLS], or [COLS, DEPTH] if TRANSPOSED."""
    k = tl.arange(0, BLOCK)
    x_at = x + rows[:, None] * DEPTH + k[None, :]
    if TRANSPOSED:
        w_at = w + cols[:, None] * DEPTH + k[None, :]
    else:
        w_at = w + k[:, None] * COLS + cols[None, :]
    for start in tl.range(0, DEPTH, BLOCK):
        if DEPTH % BLOCK == 0 and COLS % COLUMNS == 0:
            a, b = tl.load(x_at), tl.load(w_at)
        else:
            deep, wide = start + k < DEPTH, cols < COLS
            a = tl.load(x_at, mask=deep[None, :], other=0)
            if TRANSPOSED:
                b = tl.load(w_at, mask=wide[:, None] & deep[None, :], other=0)
            else:
                b = tl.load(w_at, mask=deep[:, None] & wide[None, :], other=0)
        x_at += BLOCK
        w_at += BLOCK if TRANSPOSED else BLOCK * COLS
        acc = tl.dot(a, b.T if TRANSPOSED else b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def rows_tile(
    x, w, y, count, cols, DEPTH: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    here = tl.minimum(rows, count - 1)
    acc = multiply(acc, x, w, here, cols, DEPTH, COLS, TRANSPOSED, COLUMNS, BLOCK, PRECISION)
    put(y, acc, rows, count, cols, COLS)


@triton.jit
def rows_kernel(
    x, w, group, first, last, y,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, SMALL: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x w for one tile of one group; zeros for the rows of no group."""
    e, begin, count, column = find(group, first, last, COLS, COLUMNS)
    if count <= 0:
        return
    if e == GROUPS:
        clear(y, begin, count, column, COLS, ROWS, COLUMNS)
        return
    x += begin * DEPTH
    w += e * (DEPTH * COLS)
    y += begin * COLS
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    if count <= SMALL:
        rows_tile(x, w, y, count, cols, DEPTH, COLS, TRANSPOSED, SMALL, COLUMNS, BLOCK, PRECISION)
    else:
        rows_tile(x, w, y, count, cols, DEPTH, COLS, TRANSPOSED, ROWS, COLUMNS, BLOCK, PRECISION)


@triton.jit
def matrices_kernel(
    x, d, ends, dw,
    DEPTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[e] = x[rows of e]^T d[rows of e], ROWS x COLUMNS of it; zeros for a group without rows."""
    n_k, n_c = tl.cdiv(DEPTH, ROWS), tl.cdiv(COLS, COLUMNS)
    pid = tl.program_id(0)
    e = (pid // (n_k * n_c)).to(tl.int64)
    k = pid % (n_k * n_c) // n_c * ROWS + tl.arange(0, ROWS)
    c = pid % n_c * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(ends + e - 1, mask=e > 0, other=0)
    count = tl.load(ends + e) - begin
    rows = tl.arange(0, BLOCK)
    x_at = x + begin.to(tl.int64) * DEPTH + rows[:, None] * DEPTH + k[None, :]
    d_at = d + begin.to(tl.int64) * COLS + rows[:, None] * COLS + c[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, count, BLOCK):
        live = (start + rows < count)[:, None]
        a = tl.load(x_at, mask=live & (k < DEPTH)[None, :], other=0)
        b = tl.load(d_at, mask=live & (c < COLS)[None, :], other=0)
        acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        x_at += BLOCK * DEPTH
        d_at += BLOCK * COLS
    mask = (k < DEPTH)[:, None] & (c < COLS)[None, :]
    at = dw + e * (DEPTH * COLS) + k[:, None] * COLS + c[None, :]
    tl.store(at, acc.to(dw.dtype.element_ty), mask=mask)
