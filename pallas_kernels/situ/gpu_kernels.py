"""The GPU kernels of SiTU-GLU (`triton_gpu.py`), and the activation as a function of other kernels.

    a(g, u) = cap(g) sigmoid(g) cap(u),   cap(z) = b tanh(z / b), or z where the bound b is None

At the memory's speed a multiprocessor has 45 instructions for an element, so each hyperbolic tangent is a
quotient, from one exponential, and all quotients share one division.
"""

import triton
import triton.language as tl

from k3jax.pallas_kernels.triton_math import exp2, inverse, sigmoid


@triton.jit
def _cap(x, CAP: tl.constexpr, EXACT: tl.constexpr):
    """(a, b) with cap(x) = a / b; near zero from its series, where 1 - exp cancels."""
    if CAP is None:
        return x, tl.full(x.shape, 1.0, tl.float32)
    else:
        y = x * (1 / CAP)
        size = tl.abs(y)
        e = exp2(size * -2.885390081777927, EXACT)  # exp(-2 size)
        square = size * size
        near = size * (1 - square * (0.3333333333 - square * 0.1333333333))
        a = CAP * tl.where(size < 0.15, near, 1 - e)
        return tl.where(y < 0, -a, a), tl.where(size < 0.15, 1.0, 1 + e)


@triton.jit
def _slope(capped, CAP: tl.constexpr):
    """Of cap, by its value."""
    if CAP is None:
        return tl.full(capped.shape, 1.0, tl.float32)
    else:
        t = capped * (1 / CAP)
        return 1 - t * t


@triton.jit
def activation(g, u, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, EXACT: tl.constexpr):
    """a(g, u), float32."""
    a, below = _cap(g, GATE_CAP, EXACT)
    b, more = _cap(u, UP_CAP, EXACT)
    below *= 1 + exp2(g * -1.4426950408889634, EXACT)
    return a * b * inverse(below * more, EXACT)


@triton.jit
def activation_slopes(g, u, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, EXACT: tl.constexpr):
    """a(g, u) and its derivatives by g and u, float32."""
    a, below = _cap(g, GATE_CAP, EXACT)
    b, more = _cap(u, UP_CAP, EXACT)
    both = inverse(below * more, EXACT)
    gate, up = a * (more * both), b * (below * both)
    s = sigmoid(g, EXACT)
    by_gate = s * up * (_slope(gate, GATE_CAP) + gate * (1 - s))
    return gate * s * up, by_gate, gate * s * _slope(up, UP_CAP)


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
    a = activation(_load(gate, i, N), _load(up, i, N), GATE_CAP, UP_CAP, EXACT)
    tl.store(out + i, a.to(out.dtype.element_ty), mask=i < N)


@triton.jit
def backward(
    gate, up, d_out, d_gate, d_up,
    N: tl.constexpr, GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, u, d = _load(gate, i, N), _load(up, i, N), _load(d_out, i, N)
    _, by_gate, by_up = activation_slopes(g, u, GATE_CAP, UP_CAP, EXACT)
    tl.store(d_gate + i, (d * by_gate).to(d_gate.dtype.element_ty), mask=i < N)
    tl.store(d_up + i, (d * by_up).to(d_up.dtype.element_ty), mask=i < N)
