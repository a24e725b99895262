"""The short convolution in plain JAX: W shifted copies of the row. Runs everywhere."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def chunked(
    x: Float[Array, "B T H K"],
    kernel: Float[Array, "W H K"],
    past: Float[Array, "B W1 H K"],
    reach: Int[Array, "B T"] | None,
) -> Float[Array, "B T H K"]:
    """Outputs; arguments as in `pallas_tpu.pallas_tpu`."""
    W, T = kernel.shape[0], x.shape[1]
    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)  # B W-1+T H K
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(W):
        tap = inputs[:, j : j + T].astype(jnp.float32)
        if reach is not None:
            # A select, and before the product: padding and other documents may hold anything, and
            # the kernel's gradient multiplies what stands here.
            counts = (reach >> (W - 1 - j)) & 1
            tap = jnp.where((counts > 0)[..., None, None], tap, 0)
        y += tap * kernel[j].astype(jnp.float32)
    return jax.nn.silu(y).astype(x.dtype)
