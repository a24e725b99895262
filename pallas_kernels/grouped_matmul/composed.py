"""The experts' feed-forward out of three grouped matmuls, for every platform."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Matmul = Callable[..., jax.Array]


def experts(matmul: Matmul, x, w1, w3, w2, p, group_sizes, activation):
    """Arguments as `api.experts`, behind the grouped matmul to use."""
    return forward(matmul, x, w1, w3, w2, p, group_sizes, activation)[0]


def forward(matmul: Matmul, x, w1, w3, w2, p, group_sizes, activation):
    """`api.experts_forward`, behind the grouped matmul to use."""
    g, u = matmul(x, w1, group_sizes), matmul(x, w3, group_sizes)
    return _down(matmul, g, u, w2, p, group_sizes, activation), (g, u)


def _down(matmul, g, u, w2, p, group_sizes, activation):
    """The combine weight meets the activation, in front of w2: so an output is rounded once, and
    the derivative by p is <a, w2^T dy> of itself.
    """
    a = activation(g, u)
    weighted = (a.astype(jnp.float32) * p[:, None]).astype(g.dtype)
    return matmul(weighted, w2, group_sizes)


def backward(matmul: Matmul, saved, dy, x, w1, w3, w2, p, group_sizes, activation):
    """`api.experts_backward`; of each product only the gradient is computed."""

    def pull(function, *args):
        return jax.vjp(function, *args)[1]

    def up(x, w):
        return matmul(x, w, group_sizes)

    def down(g, u, w2, p):
        return _down(matmul, g, u, w2, p, group_sizes, activation)

    dg, du, dw2, dp = pull(down, *saved, w2, p)(dy)
    dx1, dw1 = pull(up, x, w1)(dg)
    dx3, dw3 = pull(up, x, w3)(du)
    return dx1 + dx3, dw1, dw3, dw2, dp
