"""Grouped matmul calls that the TPU compiler must accept, as factories for `tpu_cost`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.grouped_matmul import experts, grouped_matmul
from k3jax.pallas_kernels.grouped_matmul.bench import situ


def matmul(M: int = 600, K: int = 384, N: int = 256, E: int = 5, dtype: str = "bfloat16"):
    """(values and gradients of `grouped_matmul`, its inputs)."""
    x, w, dy = (jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), (E, K, N), (M, N)))

    def call(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="pallas_tpu"), x, w)
        return y, pull(dy)

    return call, (x, w, jax.ShapeDtypeStruct((E,), jnp.int32), dy)


def feed_forward(
    M: int = 600, L: int = 384, F: int = 256, E: int = 5, dtype: str = "bfloat16"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(values and gradients of `experts`, and its forward pass alone; its inputs)."""
    shapes = ((M, L), (E, L, F), (E, L, F), (E, F, L))
    floats = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    floats.append(jax.ShapeDtypeStruct((M,), jnp.float32))

    def call(floats, sizes, dy):
        def run(*floats):
            return experts(*floats, sizes, situ, backend="pallas_tpu")

        y, pull = jax.vjp(run, *floats)
        return y, pull(dy), run(*floats)

    return call, (floats, jax.ShapeDtypeStruct((E,), jnp.int32), floats[0])
