"""The grouped matmul and the experts' feed-forward on TPU, forward and backward."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.grouped_matmul.tpu_rows import Product, multiply_rows, rows_sizes
from k3jax.pallas_kernels.grouped_matmul.tpu_weights import gradient_of_weights, weights_sizes
from k3jax.pallas_kernels.grouped_matmul.visits import plan_visits

ONE = (Product(((0, 0),)),)
TWO = (Product(((0, 0),)), Product(((0, 1),)))  # the same rows with two matrices
SUM = (Product(((0, 0), (1, 1))),)  # two rows, each with its matrix


def unsupported(x: jax.Array, *ws: jax.Array) -> str | None:
    """Why the kernels cannot run this call, or None; ws as the ops take them: w, or w1, w3 and w2."""
    (M, K), (E, _, N) = x.shape, ws[0].shape
    if M == 0 or E == 0:
        return "there are no rows or no groups"
    if x.dtype not in (jnp.bfloat16, jnp.float32) or any(w.dtype != x.dtype for w in ws):
        return f"x is {x.dtype} and w {ws[0].dtype}; both must be bfloat16 or float32"
    size = x.dtype.itemsize
    plans = [rows_sizes(M, E, [K], [K], N, size, 1), rows_sizes(M, E, [N], [N], K, size, 1)]
    plans += [weights_sizes(M, E, K, N, size)]
    if len(ws) > 1:
        plans += [rows_sizes(M, E, [K], [K, K], N, size, 3), rows_sizes(M, E, [K], [K], N, size, 5)]
        plans += [rows_sizes(M, E, [N, N], [N, N], K, size, 1), weights_sizes(M, E, N, K, size)]
    if None in plans:
        return f"matrices of {K} x {N} do not fit on the chip"
    return None


def _rows(xs, ws, group_sizes, products, finish, *, even=None, transposed=False, **options):
    x, w = xs[0], ws[0]
    depths = [w.shape[2 if transposed else 1] for w in ws]
    columns = w.shape[1 if transposed else 2]
    arrays = len(options["out_dtypes"]) + len(options.get("beside", ()))
    widths = [x.shape[1] for x in xs]
    sizes = rows_sizes(x.shape[0], w.shape[0], widths, depths, columns, x.dtype.itemsize, arrays)
    assert sizes is not None, "unsupported() has let this call pass"
    visits = plan_visits(group_sizes, x.shape[0], sizes.tile, every=False)
    return multiply_rows(
        xs, ws, visits, sizes, products, finish, transposed=transposed, even=even, **options
    )


def _matrices(x, d, group_sizes, *, even=None, name):
    (M, K), E = x.shape, group_sizes.shape[0]
    sizes = weights_sizes(M, E, K, d.shape[1], x.dtype.itemsize)
    assert sizes is not None, "unsupported() has let this call pass"
    visits = plan_visits(group_sizes, M, sizes.tile, every=True)
    return gradient_of_weights(x, d, visits, sizes, E, name=name, even=even)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x, w, group_sizes, even=None):
    """Arguments as `api.grouped_matmul`; `even` as for `multiply_rows`."""
    (y,) = _rows(
        [x], [w], group_sizes, ONE, lambda y: (y,),
        out_dtypes=[x.dtype], name="grouped_matmul", even=even,
    )  # fmt: skip
    return y


def _matmul_fwd(x, w, group_sizes, even):
    return grouped_matmul(x, w, group_sizes, even), (x, w, group_sizes)


def _matmul_bwd(even, saved, dy):
    x, w, group_sizes = saved
    (dx,) = _rows(
        [dy], [w], group_sizes, ONE, lambda dx: (dx,), transposed=True,
        out_dtypes=[x.dtype], name="grouped_matmul_dx", even=even,
    )  # fmt: skip
    return dx, _matrices(x, dy, group_sizes, name="grouped_matmul_dw", even=even), None


grouped_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def experts(x, w1, w3, w2, p, group_sizes, activation: Callable, even=None):
    """Arguments as `api.experts`; two kernels."""
    (a,) = _rows(
        [x], [w1, w3], group_sizes, TWO, lambda g, u: _activated(activation, x.dtype, g, u)[2:],
        out_dtypes=[x.dtype], name="experts_up", even=even,
    )  # fmt: skip
    return _down(a, w2, p, group_sizes, even)


def _activated(activation, dtype, g, u):
    """From the rounded g and u, as the backward pass sees them."""
    g, u = (b.astype(dtype).astype(jnp.float32) for b in (g, u))
    return g, u, activation(g, u)


def _down(a, w2, p, group_sizes, even):
    (y,) = _rows(
        [a], [w2], group_sizes, ONE, lambda y, p: (y * p,), weights=p,
        out_dtypes=[a.dtype], name="experts_down", even=even,
    )  # fmt: skip
    return y


def experts_forward(x, w1, w3, w2, p, group_sizes, activation: Callable, even=None):
    """Arguments as `api.experts_forward`; two kernels."""
    g, u, a = _rows(
        [x], [w1, w3], group_sizes, TWO, lambda g, u: _activated(activation, x.dtype, g, u),
        out_dtypes=[x.dtype] * 3, name="experts_up", even=even,
    )  # fmt: skip
    return _down(a, w2, p, group_sizes, even), (g, u)


def experts_backward(saved, dy, x, w1, w3, w2, p, group_sizes, activation: Callable, even=None):
    """Arguments as `api.experts_backward`; five kernels.

    No expert output is kept or made: dL/dp = <a, w2^T dy> (moe_parallelism 1).
    """
    g, u = saved

    def finish(t, g, u, p):
        a, pull = jax.vjp(activation, g, u)
        dg, du = pull(t * p)
        return dg, du, a * p, a * t

    dg, du, a, dp = _rows(
        [dy], [w2], group_sizes, ONE, finish, transposed=True, beside=[g, u], weights=p,
        row_sums=True, out_dtypes=[x.dtype] * 3, name="experts_down_dx", even=even,
    )  # fmt: skip
    (dx,) = _rows(
        [dg, du], [w1, w3], group_sizes, SUM, lambda dx: (dx,), transposed=True,
        out_dtypes=[x.dtype], name="experts_up_dx", even=even,
    )  # fmt: skip
    dw1 = _matrices(x, dg, group_sizes, name="experts_up_dw", even=even)
    dw3 = _matrices(x, du, group_sizes, name="experts_up_dw", even=even)
    dw2 = _matrices(a, dy, group_sizes, name="experts_down_dw", even=even)
    return dx, dw1, dw3, dw2, dp.sum((0, 2)).astype(p.dtype)


def _experts_fwd(x, w1, w3, w2, p, group_sizes, activation, even):
    y, saved = experts_forward(x, w1, w3, w2, p, group_sizes, activation, even)
    return y, (saved, x, w1, w3, w2, p, group_sizes)


def _experts_bwd(activation, even, residuals, dy):
    saved, x, w1, w3, w2, p, group_sizes = residuals
    gradients = experts_backward(saved, dy, x, w1, w3, w2, p, group_sizes, activation, even)
    return *gradients, None


experts.defvjp(_experts_fwd, _experts_bwd)
