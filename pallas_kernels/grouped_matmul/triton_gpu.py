"""The grouped matmul and the experts' feed-forward on NVIDIA GPUs, forward and backward."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.grouped_matmul import composed
from k3jax.pallas_kernels.grouped_matmul.visits import plan_tiles
from k3jax.pallas_kernels.triton_call import triton_call, unavailable


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
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    return 9 <= float(capability) < 12


def rows_sizes(x: jax.Array, groups: int) -> Sizes:
    """For products with the rows x of so many groups.

    With 128 rows or more per group a wide tile counts: multiprocessors together read about 7 TB/s from
    the H200's second-level cache, and 128 x 256 with four stages gives 541 TFLOP/s at 256 rows (three
    stages 430, 128 x 128 354, no narrow tiles 462). With few rows everything comes from memory
    (4.2 TB/s of 4.3), whatever the tile, as long as two programs share a multiprocessor.
    """
    mean = x.shape[0] // groups
    if x.dtype == jnp.float32:
        return Sizes(64, 64, 32, 4, 2)
    if mean < 24:
        return Sizes(32, 128, 128, 4, 2)
    if mean < 80:
        return Sizes(64, 128, 64, 4, 4 if _hopper() else 3)
    return Sizes(128, 256, 64, 8, 4, 32) if _hopper() else Sizes(128, 128, 64, 8, 3, 32)


def two_sizes(x: jax.Array, groups: int, save: bool) -> Sizes:
    """The same for two matrices at once; what is not saved is finished in registers, and they spill
    with four stages."""
    size = rows_sizes(x, groups)
    return size._replace(columns=size.columns // 2, stages=min(size.stages, 4 if save else 3))


def matrices_sizes(x: jax.Array, groups: int) -> Sizes:
    """For gradients of the matrices: `rows` and `columns` are those of the matrix, `block` is of rows.

    Reading from the second-level cache and writing the result add up (7 TB/s together). At 256 rows
    128 x 128 and two programs per multiprocessor give 361 TFLOP/s, 128 x 256 340; at 2,048 rows
    506 and 533. With few rows the writing counts, 64 x 256 reaches 4.1 TB/s of 4.3 and 128 x 128 4.0.
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def experts(x, w1, w3, w2, p, group_sizes, activation: Callable):
    """Arguments as `api.experts`; two kernels."""
    return _forward(x, w1, w3, w2, p, group_sizes, activation, save=False)[0]


def experts_forward(x, w1, w3, w2, p, group_sizes, activation: Callable):
    """Arguments as `api.experts_forward`; two kernels.

    An activation that they do not know runs between three of `grouped_matmul`.
    """
    return _forward(x, w1, w3, w2, p, group_sizes, activation, save=True)


def _forward(x, w1, w3, w2, p, group_sizes, activation, *, save):
    from k3jax.pallas_kernels.grouped_matmul.gpu_experts import up_kernel

    if (bounds := caps(activation)) is None:
        return composed.forward(grouped_matmul, x, w1, w3, w2, p, group_sizes, activation)
    M, (E, L, F) = x.shape[0], w1.shape
    kept = ((M, F) if save else (1, 1)), x.dtype
    a, g, u = _rows(
        up_kernel, (x, w1, w3, p), group_sizes, [((M, F), x.dtype), kept, kept], L, two_sizes(x, E, save),
        SAVE=save, **bounds,
    )  # fmt: skip
    return _product(a, w2, group_sizes), (g, u)


def experts_backward(saved, dy, x, w1, w3, w2, p, group_sizes, activation: Callable):
    """Arguments as `api.experts_backward`; five kernels, no expert output kept or made."""
    from k3jax.pallas_kernels.grouped_matmul.gpu_experts import down_dx_kernel, up_dx_kernel

    if (bounds := caps(activation)) is None:
        return composed.backward(
            grouped_matmul, saved, dy, x, w1, w3, w2, p, group_sizes, activation
        )
    M, (E, L, F) = x.shape[0], w1.shape
    size, hidden = rows_sizes(x, E), ((M, F), x.dtype)
    parts = (M, -(-F // size.columns)), jnp.float32
    dg, du, a, dp = _rows(
        down_dx_kernel, (dy, w2, *saved, p), group_sizes, [hidden, hidden, hidden, parts], L, size,
        **bounds,
    )  # fmt: skip
    output = (M, L), x.dtype
    (dx,) = _rows(up_dx_kernel, (dg, du, w1, w3), group_sizes, [output], F, size)
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
