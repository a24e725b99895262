"""Sorts and running sums of small integers that a TPU's compiler is quickly done with.

XLA unrolls a sort: that of 160,000 pairs with `jnp.argsort` takes the compiler six seconds, a running
sum as long nine, and an exchange between experts has a dozen of them in each of the passes of each
kind of layer. A sort of single unsigned integers takes half of that, counting next to nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

BLOCK = 256  # integers that are counted by one row of a triangular matrix
MOST_KEYS = 256  # above this counting needs too much memory: a number for each key and block


class Sorted(NamedTuple):
    order: Int[Array, " n"]  # index of each sorted entry
    inverse: Int[Array, " n"]  # sorted position of each entry
    sizes: Int[Array, " bound"]  # entries of each key


def stable_sort(keys: Int[Array, " n"], bound: int) -> Sorted:
    """Sort keys from 0 to bound - 1; equal ones stay in their order.

    Cost: an unstable sort of n integers; n * bound sums on the matrix unit, or a second sort if there
    are many keys.
    """
    n = keys.size
    if bound * n < 2**31:
        packed = keys.astype(jnp.int32) * n + jnp.arange(n, dtype=jnp.int32)
        order = jax.lax.sort(packed, is_stable=False) % n
    else:
        order = jnp.argsort(keys)
    if bound > MOST_KEYS:
        sizes = jnp.zeros(bound, jnp.int32).at[keys].add(1)
        return Sorted(order, jnp.argsort(order), sizes)
    padded = jnp.pad(keys, (0, -n % BLOCK), constant_values=bound).reshape(-1, BLOCK)
    this = padded[..., None] == jnp.arange(bound)
    # Counts of a block are exact in bfloat16 products with float32 sums.
    earlier = jnp.einsum(
        "ij,bjk->bik",
        jnp.tri(BLOCK, k=-1, dtype=jnp.bfloat16),
        this.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    ).astype(jnp.int32)
    counts = this.sum(1, dtype=jnp.int32)
    sizes = counts.sum(0)
    before = jnp.cumsum(counts, 0) - counts + jnp.cumsum(sizes) - sizes
    inverse = jnp.where(this, earlier + before[:, None], 0).sum(-1)
    return Sorted(order, inverse.reshape(-1)[:n], sizes)


def running_sum(x: Int[Array, " n"]) -> Int[Array, " n"]:
    """Inclusive sums of integers whose sums over a block stay below 2^24."""
    n = x.size
    blocks = jnp.pad(x, (0, -n % BLOCK)).reshape(-1, BLOCK).astype(jnp.float32)
    within = jnp.matmul(
        blocks, jnp.tri(BLOCK, dtype=jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    ).astype(jnp.int32)
    totals = within[:, -1]
    return (within + (jnp.cumsum(totals) - totals)[:, None]).reshape(-1)[:n]
