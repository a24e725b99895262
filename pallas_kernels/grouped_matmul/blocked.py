"""Grouped matmul in plain JAX: rows laid out in blocks of one group, one batched product.

Each group is padded to whole blocks, so a block needs a single weight matrix. G groups with rows
take at most (M + G (size - 1)) / size blocks, whatever their sizes; work and memory follow the
rows and their padding, not E times the rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_rows(rows: int, groups: int) -> int:
    """Rows per block: a power of two near half the mean group, between 1 and 128.

    Larger blocks multiply more padding; smaller ones fetch each weight matrix more often.
    """
    mean = max(rows // max(2 * groups, 1), 1)
    return min(1 << (mean.bit_length() - 1), 128)


class Blocks(NamedTuple):
    """Rows in blocks of one group each."""

    group: Int[Array, " blocks"]  # whose matrix a block needs
    source: Int[Array, "blocks size"]  # row at each place; M, out of range, where there is none

    @classmethod
    def of(cls, M: int, group_sizes: Int[Array, " E"]) -> "Blocks":
        """The blocks of M > 0 rows that are sorted by group."""
        E = group_sizes.shape[0]
        size = block_rows(M, E)
        num_blocks = (M + min(E, M) * (size - 1)) // size

        first_row = jnp.cumsum(group_sizes) - group_sizes
        blocks = -(-group_sizes // size)
        last_block = jnp.cumsum(blocks)
        block = jnp.arange(num_blocks, dtype=jnp.int32)
        group = jnp.searchsorted(last_block, block, side="right", method="compare_all")
        used = group < E
        group = jnp.minimum(group, E - 1)
        within = block - (last_block - blocks)[group]  # which block of its group
        offset = within[:, None] * size + jnp.arange(size, dtype=jnp.int32)
        filled = used[:, None] & (offset < group_sizes[group][:, None])
        return cls(group, jnp.where(filled, first_row[group][:, None] + offset, M))

    def gather(self, x: Float[Array, "M K"]) -> Float[Array, "blocks size K"]:
        """The rows in their places, zeros in the others."""
        return x.at[self.source].get(mode="fill", fill_value=0)

    def scatter(self, y: Float[Array, "blocks size N"], M: int) -> Float[Array, "M N"]:
        """Rows back where they came from; zeros for those in no group."""
        out = jnp.zeros((M, y.shape[2]), y.dtype)
        flat = y.reshape(-1, y.shape[2])
        return out.at[self.source.reshape(-1)].set(flat, mode="drop", unique_indices=True)


def blocked(x, w, group_sizes):
    """Arguments as `api.grouped_matmul`; a group without rows gets exactly no gradient."""
    M, _ = x.shape
    E, _, N = w.shape
    if M == 0 or E == 0:
        return jnp.zeros((M, N), x.dtype)
    blocks = Blocks.of(M, group_sizes)
    y = jnp.einsum(
        "bsk,bkn->bsn", blocks.gather(x), w[blocks.group], preferred_element_type=jnp.float32
    )
    return blocks.scatter(y.astype(x.dtype), M)
