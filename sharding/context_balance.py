"""Equal work for causal attention over the mesh axis `context`: half of each window changes its rank.

A row is split into windows, one per rank, in order. Causal attention over them is unbalanced: the last
of P ranks would do 2P - 1 times the work of the first. So each window is two chunks, and a rank gives
its second chunk to its mirror for that of the mirror. Rank r then holds

    chunk 2r  and  chunk 2 (P - 1 - r) + 1     of 2P,

whose queries see 2r + 1 and 2 (P - 1 - r) + 2 chunks of keys: 2P + 1 together, on every rank.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

AXIS = "context"


def held_chunks(rank, ranks: int):
    """The two chunks that a rank holds after the exchange, in the order in which it holds them."""
    return 2 * rank, 2 * (ranks - 1 - rank) + 1


def place_of(chunk, ranks: int):
    """Where `gather` puts a chunk: 2 * rank + half. Its own inverse."""
    return jnp.where(chunk % 2 == 0, chunk, 2 * ranks - chunk)


def exchange(x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
    """Swaps the second half of the tokens with that of the mirror rank; its own inverse.

    Cost: T / 2 tokens out and as many in; the derivative is the same swap.
    """
    kept, moved = jnp.split(x, 2, axis=1)
    ranks = jax.lax.axis_size(AXIS)
    mirror = [(rank, ranks - 1 - rank) for rank in range(ranks)]
    return jnp.concatenate([kept, jax.lax.ppermute(moved, AXIS, mirror)], axis=1)


def to_chunks(row: Int[Array, "B S"], ranks: int) -> Int[Array, "B N C"]:
    """A whole row as its 2P chunks; windows of odd length get one more token, 0, at their end."""
    windows = row.reshape(row.shape[0], ranks, -1)
    windows = jnp.pad(windows, ((0, 0), (0, 0), (0, windows.shape[2] % 2)))
    return windows.reshape(row.shape[0], 2 * ranks, -1)


def held(chunks: Int[Array, "B N C"]) -> Int[Array, "B T"]:
    """Of a row by chunks, the part of the tokens that this rank holds after the exchange."""
    here = held_chunks(jax.lax.axis_index(AXIS), chunks.shape[1] // 2)
    return chunks[:, jnp.stack(here)].reshape(len(chunks), -1)


def gather(x: Float[Array, "N ..."]) -> Float[Array, "M ..."]:
    """The blocks of all ranks, in the order of ranks."""
    return jax.lax.all_gather(x, AXIS, axis=0, tiled=True)


def scatter_sum(x: Float[Array, "M ..."]) -> Float[Array, "N ..."]:
    """Sum over ranks, of which each keeps its own blocks: the transpose of `gather`."""
    return jax.lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)
