"""Logical axis names on parameters: what a layer says about its arrays, without knowing a mesh."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


class Buffer(nnx.Variable):
    """Model state that is saved and restored but never differentiated (router biases)."""


def param(
    rngs: nnx.Rngs,
    init: Initializer,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: str = "float32",
) -> nnx.Param:
    """A parameter with one logical axis name per dimension.

    Args:
        rngs: source of the initialisation key (stream `params`).
        init: `init(key, shape, dtype)`, for example `nnx.initializers.normal(0.02)`; independent
            elements of one distribution, as training draws many weights at once.
        shape: array shape.
        axes: one logical name per dimension (see `rules.py`), None for a dimension never sharded.
        dtype: storage type; float32 master weights by default.

    Returns: an `nnx.Param` whose metadata `logical_axes` holds `axes`, and `init` the initialiser.
    Stacking layers in front adds an axis to the value only; readers prepend "layers" when the rank
    exceeds `len(axes)`.
    """
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} name {len(axes)} dimensions, shape {shape} has {len(shape)}")
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)), logical_axes=axes, init=init)
