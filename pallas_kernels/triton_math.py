"""Functions for Triton kernels that the special function unit has, without guards for denormals.

Triton's own spend three instructions more per element on numbers below 2**-126, which are zero here.
EXACT takes Triton's own: the interpreter has no machine instructions.
"""

import triton
import triton.language as tl


@triton.jit
def exp2(x, EXACT: tl.constexpr):
    """2**x, to 2**-22."""
    if EXACT:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def inverse(x, EXACT: tl.constexpr):
    """1 / x, to 2**-23."""
    if EXACT:
        return 1 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    return inverse(1 + exp2(x * -1.4426950408889634, EXACT), EXACT)
