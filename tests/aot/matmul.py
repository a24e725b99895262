"""A kernel whose cost is known: a matrix product by blocks."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 512


def blocked(n: int):
    """bfloat16 [n, n] @ [n, n], accumulated in VMEM, as (function, shapes)."""

    def body(a, b, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    square = (BLOCK, BLOCK)
    product = pl.pallas_call(
        body,
        grid=(n // BLOCK,) * 3,
        in_specs=[
            pl.BlockSpec(square, lambda i, j, k: (i, k)),
            pl.BlockSpec(square, lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec(square, lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((n, n), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM(square, jnp.float32)],
        name="blocked_matmul",
    )
    x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
    return product, (x, x)


def looped(n: int, steps: int):
    """A product in a loop of `steps`: XLA prints the body once."""

    def run(x, w):
        return jax.lax.fori_loop(0, steps, lambda _, x: jnp.tanh(x @ w), x)

    x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
    return run, (x, x)
