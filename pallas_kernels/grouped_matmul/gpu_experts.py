"""Triton kernels of the experts' feed-forward beside the products: the activation, both ways.

SiTU-GLU (K3 report, Eq. 12) or SwiGLU, a(g, u). These are passes of their own and not the ends of products: a product
fills a multiprocessor with 8 warps, too few to hide 60 to 80 instructions per element.
"""

import triton
import triton.language as tl

from k3jax.pallas_kernels.grouped_matmul.gpu_kernels import clear, find, multiply, put
from k3jax.pallas_kernels.situ.gpu_kernels import activation, activation_slopes


@triton.jit
def place(M, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of this program: rows, offsets of the elements, which exist, and its column tile."""
    tiles: tl.constexpr = tl.cdiv(F, COLUMNS)
    rows = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * F + cols[None, :]
    return rows, at, (rows < M)[:, None] & (cols < F)[None, :], column


@triton.jit
def activation_kernel(
    g, u, p, used, a,
    M: tl.constexpr, F: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
    EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """p a(g, u); 0 in the rows of no group."""
    rows, at, exists, _ = place(M, F, ROWS, COLUMNS)
    live = rows < tl.load(used)
    gate = tl.load(g + at, mask=exists & live[:, None], other=0).to(tl.float32)
    up = tl.load(u + at, mask=exists & live[:, None], other=0).to(tl.float32)
    weight = tl.load(p + rows, mask=live, other=0)[:, None]
    value = activation(gate, up, GATE_CAP, UP_CAP, EXACT)
    tl.store(a + at, (value * weight).to(a.dtype.element_ty), mask=exists)


@triton.jit
def activation_dx_kernel(
    t, g, u, p, used, dg, du, a, dp,
    M: tl.constexpr, F: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
    EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """From t = dy w2^T: dg, du, p a(g, u), and <a(g, u), t> of the tile's columns; else zeros."""
    rows, at, exists, column = place(M, F, ROWS, COLUMNS)
    live = rows < tl.load(used)
    filled = exists & live[:, None]
    t = tl.load(t + at, mask=filled, other=0).to(tl.float32)
    gate = tl.load(g + at, mask=filled, other=0).to(tl.float32)
    up = tl.load(u + at, mask=filled, other=0).to(tl.float32)
    weight = tl.load(p + rows, mask=live, other=0)[:, None]
    value, by_gate, by_up = activation_slopes(gate, up, GATE_CAP, UP_CAP, EXACT)
    tl.store(a + at, (value * weight).to(a.dtype.element_ty), mask=exists)
    part = dp + rows.to(tl.int64) * tl.cdiv(F, COLUMNS) + column
    tl.store(part, tl.sum(value * t, 1), mask=rows < M)
    t *= weight
    tl.store(du + at, (t * by_up).to(du.dtype.element_ty), mask=exists)
    tl.store(dg + at, (t * by_gate).to(dg.dtype.element_ty), mask=exists)


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
