"""Grouped matmul by XLA's `ragged_dot`, where the compiler has a kernel for it."""

import jax
import jax.numpy as jnp


def ragged(x, w, group_sizes):
    """XLA's own grouped product; rows beyond the last group are made 0."""
    y = jax.lax.ragged_dot(x, w, group_sizes.astype(jnp.int32))
    return jnp.where((jnp.arange(x.shape[0]) < group_sizes.sum())[:, None], y, 0)
