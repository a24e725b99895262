"""The experts' feed-forward out of three grouped matmuls, for every platform."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def experts(matmul: Callable[..., jax.Array], x, w1, w3, w2, p, group_sizes, activation):
    """Arguments as `api.experts`, behind the grouped matmul to use.

    The combine weight meets the activation, in front of w2: so an output is rounded once, and the
    derivative by p is <a, w2^T dy> of itself.
    """
    a = activation(matmul(x, w1, group_sizes), matmul(x, w3, group_sizes))
    weighted = (a.astype(jnp.float32) * p[:, None]).astype(x.dtype)
    return matmul(weighted, w2, group_sizes)
