"""The grouped matmul and the experts' feed-forward on NVIDIA GPUs, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.grouped_matmul import composed
from k3jax.pallas_kernels.grouped_matmul.visits import plan_tiles
from k3jax.pallas_kernels.triton_call import INTERPRETED, capability, triton_call, unavailable


def unsupported(x: jax.Array, *ws: jax.Array) -> str | None:
    """Why the kernels cannot run this call, or None; ws as the ops take them: w, or w1, w3 and w2."""
    if (reason := unavailable()) is not None:
        return reason
    (M, K), (E, _, N) = x.shape, ws[0].shape
    if M == 0 or E == 0:
        return "there are no rows or no groups"
    if x.dtype not in (jnp.bfloat16, jnp.float32) or any(w.dtype != x.dtype for w in ws):
        return f"x is {x.dtype} and w {ws[0].dtype}; both must be bfloat16 or float32"
    if K * N >= 2**31:
        return f"matrices of {K} x {N} have more than 2**31 elements"
    return None


class Sizes(NamedTuple):
    """Of one program: its part of the result, how much it contracts at once, and its resources."""

    rows: int
    columns: int
    block: int
    warps: int
    stages: int
    small: int = 16  # rows of the narrow tile for what is left of a group


def _hopper() -> bool:
    """227 KB of shared memory per program, and products of whole warp groups."""
    return 9 <= capability() < 12


def rows_sizes(x: jax.Array, groups: int) -> Sizes:
    """For products with the rows x of so many groups.

    From some 100 rows per group on a large tile counts, which reads less from the second-level cache:
    TFLOP/s on an H200 at 256 rows are 354 with 128 x 128, 430 with 128 x 256, 462 with four stages and
    541 with narrow tiles for what is left. With few rows everything comes from memory, and 32 x 128 with
    a block of 128 reads 4.2 TB/s either way; a block of 64 4.0 if w is transposed.
    """
    mean = x.shape[0] // groups
    if x.dtype == jnp.float32:
        return Sizes(64, 64, 32, 4, 2)
    if mean < 24:
        return Sizes(32, 128, 128, 4, 2)
    if mean < 80:
        return Sizes(64, 128, 64, 4, 4 if _hopper() else 3)
    return Sizes(128, 256, 64, 8, 4, 32) if _hopper() else Sizes(128, 128, 64, 8, 3, 32)


def matrices_sizes(x: jax.Array, groups: int) -> Sizes:
    """For gradients of the matrices: `rows` and `columns` are those of the matrix, `block` is of rows.

    TFLOP/s on an H200 at 256 rows are 361 with 128 x 128, of which two fit a multiprocessor, and 340
    with 128 x 256; at 2,048 rows 506 and 533. With few rows the writing counts: 64 x 256 reaches 4.1
    TB/s at 9 rows (128 x 128 4.0) and 3.0 at 36 (2.6).
    """
    mean = x.shape[0] // groups
    if x.dtype == jnp.float32:
        return Sizes(64, 64, 32, 4, 2)
    if mean < 80:
        return Sizes(64, 256, 16 if mean < 24 else 32, 4, 2)
    if mean < 400 or not _hopper():
        return Sizes(128, 128, 64, 8, 3)
    return Sizes(128, 256, 64, 8, 3)


def _launch(kernel: Any, args, outputs: list[tuple[tuple[int, ...], Any]], programs, size, **more):
    return triton_call(
        kernel, *args, out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
        grid=(programs,), num_warps=size.warps, num_stages=size.stages, ROWS=size.rows,
        COLUMNS=size.columns, BLOCK=size.block,
        PRECISION="tf32x3",  # of float32; bfloat16 has one precision
        **more,
    )  # fmt: skip


def _rows(kernel, args, group_sizes, outputs, depth, size, **more):
    """A kernel whose programs are tiles of rows times tiles of the first output's columns."""
    (M, columns), _ = outputs[0]
    tiles = plan_tiles(group_sizes, M, size.rows)
    programs = tiles.group.shape[0] * -(-columns // size.columns)
    return _launch(
        kernel, (*args, *tiles), outputs, programs, size, SMALL=size.small,
        GROUPS=group_sizes.shape[0], DEPTH=depth, COLS=columns, **more,
    )  # fmt: skip


def _product(x, w, group_sizes, transposed=False):
    from k3jax.pallas_kernels.grouped_matmul.gpu_kernels import rows_kernel

    (M, K), E = x.shape, w.shape[0]
    output = (M, w.shape[1 if transposed else 2]), x.dtype
    size = rows_sizes(x, E)
    return _rows(rows_kernel, (x, w), group_sizes, [output], K, size, TRANSPOSED=transposed)[0]


def _matrices(x, d, group_sizes):
    from k3jax.pallas_kernels.grouped_matmul.gpu_kernels import matrices_kernel

    (_, K), N, E = x.shape, d.shape[1], group_sizes.shape[0]
    size = matrices_sizes(x, E)
    programs = E * -(-K // size.rows) * -(-N // size.columns)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return _launch(
        matrices_kernel, (x, d, ends), [((E, K, N), x.dtype)], programs, size, DEPTH=K, COLS=N
    )[0]


@jax.custom_vjp
def grouped_matmul(x, w, group_sizes):
    """Arguments as `api.grouped_matmul`."""
    return _product(x, w, group_sizes)


def _matmul_fwd(x, w, group_sizes):
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _matmul_bwd(saved, dy):
    x, w, group_sizes = saved
    return _product(dy, w, group_sizes, transposed=True), _matrices(x, dy, group_sizes), None


grouped_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def caps(activation: Any) -> dict[str, float | None] | None:
    """Bounds of an activation that the kernels compute, `ActivationConfig`'s; None: of no such."""
    if getattr(activation, "kind", None) not in ("situ", "swiglu"):
        return None
    return {"GATE_CAP": activation.gate_cap, "UP_CAP": activation.up_cap}


def _columns(F: int) -> int:
    """Columns of a program of `_elementwise`: a power of two, which divides F if one can."""
    return min(max(F & -F, 64), 1024)


def _elementwise(kernel, args, group_sizes, outputs, **bounds):
    """A kernel whose programs are a few whole or partial rows [M, F] of the first output."""
    (M, F), _ = outputs[0]
    columns = _columns(F)
    rows = 1024 // columns
    used = group_sizes.sum(dtype=jnp.int32, keepdims=True)
    return triton_call(
        kernel, *args, used, out_shape=[jax.ShapeDtypeStruct(*output) for output in outputs],
        grid=(-(-M // rows) * -(-F // columns),), num_warps=4, M=M, F=F, ROWS=rows,
        COLUMNS=columns, EXACT=INTERPRETED, **bounds,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def experts(x, w1, w3, w2, p, group_sizes, activation: Callable):
    """Arguments as `api.experts`."""
    return experts_forward(x, w1, w3, w2, p, group_sizes, activation)[0]


def experts_forward(x, w1, w3, w2, p, group_sizes, activation: Callable):
    """Arguments as `api.experts_forward`: three products, and the weighted activation in one pass.

    An activation that the kernels do not know is XLA's.
    """
    from k3jax.pallas_kernels.grouped_matmul.gpu_experts import activation_kernel

    if (bounds := caps(activation)) is None:
        return composed.forward(grouped_matmul, x, w1, w3, w2, p, group_sizes, activation)
    g, u = _product(x, w1, group_sizes), _product(x, w3, group_sizes)
    (a,) = _elementwise(activation_kernel, (g, u, p), group_sizes, [(g.shape, g.dtype)], **bounds)
    return _product(a, w2, group_sizes), (g, u)


def experts_backward(saved, dy, x, w1, w3, w2, p, group_sizes, activation: Callable):
    """Arguments as `api.experts_backward`; no expert output is kept or made.

    dL/dp = <a, w2^T dy> (moe_parallelism 1). Both products that give dx are one kernel.
    """
    from k3jax.pallas_kernels.grouped_matmul.gpu_experts import activation_dx_kernel, up_dx_kernel

    if (bounds := caps(activation)) is None:
        return composed.backward(
            grouped_matmul, saved, dy, x, w1, w3, w2, p, group_sizes, activation
        )
    (M, L), (E, _, F) = x.shape, w1.shape
    t = _product(dy, w2, group_sizes, transposed=True)
    hidden, parts = ((M, F), x.dtype), ((M, -(-F // _columns(F))), jnp.float32)
    dg, du, a, dp = _elementwise(
        activation_dx_kernel, (t, *saved, p), group_sizes, [hidden, hidden, hidden, parts], **bounds
    )
    dx_size, output = rows_sizes(x, E), ((M, L), x.dtype)
    (dx,) = _rows(up_dx_kernel, (dg, du, w1, w3), group_sizes, [output], F, dx_size)
    dw1, dw3 = (_matrices(x, d, group_sizes) for d in (dg, du))
    return dx, dw1, dw3, _matrices(a, dy, group_sizes), dp.sum(1).astype(p.dtype)


def _experts_fwd(x, w1, w3, w2, p, group_sizes, activation):
    y, saved = experts_forward(x, w1, w3, w2, p, group_sizes, activation)
    return y, (saved, x, w1, w3, w2, p, group_sizes)


def _experts_bwd(activation, residuals, dy):
    saved, x, w1, w3, w2, p, group_sizes = residuals
    gradients = experts_backward(saved, dy, x, w1, w3, w2, p, group_sizes, activation)
    return *gradients, None


experts.defvjp(_experts_fwd, _experts_bwd)
