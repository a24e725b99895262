"""The experts' feed-forward out of three grouped matmuls, for every platform."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def experts(matmul: Callable[..., jax.Array], x, w1, w3, w2, p, group_sizes, activation):
    """Arguments as `api.experts`, behind the grouped matmul to use."""
    gate, up = (matmul(x, w, group_sizes) for w in (w1, w3))
    return _project(matmul, activation(gate, up), w2, p, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(matmul, a, w2, p, group_sizes):
    y = matmul(a, w2, group_sizes)
    return (y.astype(jnp.float32) * p[:, None]).astype(a.dtype)


def _project_bwd(matmul, saved, dy):
    a, w2, p, group_sizes = saved

    def weigh_then_project(a, w2, p):
        weighted = (a.astype(jnp.float32) * p[:, None]).astype(a.dtype)
        return matmul(weighted, w2, group_sizes)

    return *jax.vjp(weigh_then_project, a, w2, p)[1](dy), None


_project.defvjp(lambda matmul, *args: (_project(matmul, *args), args), _project_bwd)
