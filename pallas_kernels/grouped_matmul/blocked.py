"""Grouped matmul in plain JAX: rows laid out in blocks of one group, one batched product.

Each group is padded to whole blocks, so a block needs a single weight matrix. G groups with rows
take at most (M + G (size - 1)) / size blocks, whatever their sizes; work and memory follow the
rows and their padding, not E times the rows.
"""

import jax.numpy as jnp


def block_rows(rows: int, groups: int) -> int:
    """Rows per block: a power of two near half the mean group, between 1 and 128.

    Larger blocks multiply more padding; smaller ones fetch each weight matrix more often.
    """
    mean = max(rows // max(2 * groups, 1), 1)
    return min(1 << (mean.bit_length() - 1), 128)


def blocked(x, w, group_sizes):
    """Arguments as `api.grouped_matmul`; a group without rows gets exactly no gradient."""
    M, _ = x.shape
    E, _, N = w.shape
    if M == 0 or E == 0:
        return jnp.zeros((M, N), x.dtype)
    size = block_rows(M, E)
    num_blocks = (M + min(E, M) * (size - 1)) // size

    first_row = jnp.cumsum(group_sizes) - group_sizes
    blocks = -(-group_sizes // size)
    last_block = jnp.cumsum(blocks)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    group = jnp.searchsorted(last_block, block, side="right").astype(jnp.int32)
    used = group < E
    group = jnp.minimum(group, E - 1)
    within = block - (last_block - blocks)[group]  # which block of its group
    offset = within[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    filled = used[:, None] & (offset < group_sizes[group][:, None])
    source = jnp.where(filled, first_row[group][:, None] + offset, M)  # M: out of range, reads 0

    rows = x.at[source].get(mode="fill", fill_value=0)  # blocks, size, K
    y = jnp.einsum("bsk,bkn->bsn", rows, w[group], preferred_element_type=jnp.float32)
    y = y.astype(x.dtype).reshape(-1, N)
    out = jnp.zeros((M, N), x.dtype)
    return out.at[source.reshape(-1)].set(y, mode="drop", unique_indices=True)
