"""The bodies of the GPU kernels of SiTU-GLU (`triton_gpu.py`).

At the memory's speed a multiprocessor has 45 instructions for an element, so each hyperbolic tangent is a
quotient, from one exponential, and all quotients share one division.
"""

import triton
import triton.language as tl

from k3jax.pallas_kernels.triton_math import exp2, inverse, sigmoid


@triton.jit
def _tanh(x, CAP: tl.constexpr, EXACT: tl.constexpr):
    """(a, b) with tanh(x / CAP) = a / b; near zero from its series, where 1 - exp cancels."""
    y = x * (1 / CAP)
    size = tl.abs(y)
    e = exp2(size * -2.885390081777927, EXACT)  # exp(-2 size)
    square = size * size
    near = size * (1 - square * (0.3333333333 - square * 0.1333333333))
    a = tl.where(size < 0.15, near, 1 - e)
    return tl.where(y < 0, -a, a), tl.where(size < 0.15, 1.0, 1 + e)


@triton.jit
def _load(x, i, N: tl.constexpr):
    return tl.load(x + i, mask=i < N, other=0.0).to(tl.float32)


@triton.jit
def forward(
    gate, up, out,
    N: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u = _load(gate, i, N), _load(up, i, N)
    a, below = _tanh(g, GATE_CAP, EXACT)
    below *= 1 + exp2(g * -1.4426950408889634, EXACT)
    if UP_CAP == 0:  # a linear branch
        a *= GATE_CAP * u
    else:
        b, more = _tanh(u, UP_CAP, EXACT)
        a *= (GATE_CAP * UP_CAP) * b
        below *= more
    tl.store(out + i, (a * inverse(below, EXACT)).to(out.dtype.element_ty), mask=i < N)


@triton.jit
def backward(
    gate, up, d_out, d_gate, d_up,
    N: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """da/dg = b2 t2 s (1 - t1^2 + b1 t1 (1 - s)), da/du = b1 t1 s (1 - t2^2)"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u, d = _load(gate, i, N), _load(up, i, N), _load(d_out, i, N)
    a, below = _tanh(g, GATE_CAP, EXACT)
    s = sigmoid(g, EXACT)
    d *= s
    if UP_CAP == 0:  # a linear branch
        t = a * inverse(below, EXACT)
        up_branch, up_slope = u, 1.0
    else:
        b, more = _tanh(u, UP_CAP, EXACT)
        both = inverse(below * more, EXACT)
        t, t2 = a * (more * both), b * (below * both)
        up_branch, up_slope = UP_CAP * t2, 1 - t2 * t2
    d_g = d * up_branch * (1 - t * t + GATE_CAP * t * (1 - s))
    tl.store(d_gate + i, d_g.to(d_gate.dtype.element_ty), mask=i < N)
    d_u = d * (GATE_CAP * t) * up_slope
    tl.store(d_up + i, d_u.to(d_up.dtype.element_ty), mask=i < N)
