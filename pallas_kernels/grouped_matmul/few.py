"""The experts' feed-forward for few tokens, as in decoding: rows are not sorted by expert."""

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


def experts_of_all(
    z: Float[Array, "tokens L"],
    ids: Int[Array, "tokens A"],
    p: Float[Array, "tokens A"],
    w1: Float[Array, "E L F"],
    w3: Float[Array, "E L F"],
    w2: Float[Array, "E F L"],
    activation: Callable[[jax.Array, jax.Array], jax.Array],
) -> Float[Array, "tokens L"]:
    """The same with every expert applied to every token, at weight 0 where it was not chosen.

    Args: as in `experts_of_few`; padding must be finite.

    Returns: float32.
    Numerics: as `experts`, but the sum over a token's experts is taken in one product, unrounded.
    Cost: reads each expert once. Where some token chooses it anyway, and up to about a hundred tokens,
        this takes an accelerator no longer than its memory needs for that; E / A times the products.
    """
    wide = {"preferred_element_type": jnp.float32}
    g, u = (jnp.einsum("tl,elf->etf", z, w, **wide).astype(z.dtype) for w in (w1, w3))
    rows = jnp.arange(z.shape[0])[:, None]
    share = jnp.zeros((z.shape[0], w1.shape[0])).at[rows, ids].set(p)
    a = (activation(g, u).astype(jnp.float32) * share.T[:, :, None]).astype(z.dtype)
    return jnp.einsum("etf,efl->tl", a, w2, **wide)
