"""SiTU-GLU in plain JAX: runs everywhere, and fuses with what surrounds it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def chunked(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    gate_cap: float,
    up_cap: float | None,
) -> Float[Array, "*shape"]:
    """The activation; arguments as in `api.situ`."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    if up_cap is not None:
        u = up_cap * jnp.tanh(u / up_cap)
    return (gate_cap * jnp.tanh(g / gate_cap) * jax.nn.sigmoid(g) * u).astype(gate.dtype)
