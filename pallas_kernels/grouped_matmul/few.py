"""The experts' feed-forward for few tokens, as in decoding: each choice fetches its own matrices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def experts_of_few(
    z: Float[Array, "tokens L"],
    ids: Int[Array, "tokens A"],
    p: Float[Array, "tokens A"],
    matrices: tuple[Any, Any, Any],
    take: Callable[[Any, Int[Array, " rows"]], Float[Array, "rows ins outs"]],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> Float[Array, "tokens L"]:
    """Weighted sum of each token's experts, without sorting rows by expert.

        u = sum_a p_a w2_a a(w1_a z, w3_a z)                    (architecture 8, steps 5-6)

    Args:
        z: latents.
        ids: experts of each token.
        p: combine weights, float32; 0 for padding.
        matrices: w1, w3, w2 of all experts, in whatever form `take` reads.
        take: the matrices [in, out] of some experts, in z's dtype.
        activation: a(gate, up), elementwise.

    Returns: float32.
    Numerics: as `experts`.
    Cost: reads A matrices of each kind per token, those of others never; tokens that choose the same
        expert read it twice, so this is for fewer choices than there are experts.
    """
    w1, w3, w2 = (take(w, ids.reshape(-1)) for w in matrices)

    def product(x, w):
        return jnp.einsum("ri,rio->ro", x, w, preferred_element_type=jnp.float32)

    rows = jnp.repeat(z, ids.shape[1], 0)
    a = activation(product(rows, w1).astype(z.dtype), product(rows, w3).astype(z.dtype))
    a = (a.astype(jnp.float32) * p.reshape(-1, 1)).astype(z.dtype)
    y = product(a, w2).astype(z.dtype).astype(jnp.float32)
    return y.reshape(*ids.shape, -1).sum(1)
