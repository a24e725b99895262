"""The grid of both TPU kernels: pairs of blocks at or below the diagonal, and the documents in them.

A row of the triangle has one pair more than the row before it. Rows are folded, the longest with the
shortest, so that the grid is a rectangle without idle steps and its indices are plain arithmetic:
nothing that grows with T lies in scalar memory, and a static profiler sees every step.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from k3jax.pallas_kernels.tpu_chip import VMEM_BYTES

LANES = 128
LARGEST_BLOCK = 2048  # tokens
LOG2E = 1.4426950408889634
F32 = jnp.float32


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def block_size(T: int, dtype) -> int:
    """Tokens of a block: blocks are alike, as few as the largest allows, and halves are blocks too."""
    largest = LARGEST_BLOCK // (4 if dtype == F32 else 1)  # of float32 products the code is long
    return round_up(-(-T // -(-T // largest)), 2 * LANES if T > LANES else LANES)


def split(size: int, most: int) -> list[slice]:
    return [slice(a, min(a + most, size)) for a in range(0, size, most)]


def folded(n: int) -> tuple[int, int]:
    """Grid of a triangle of n rows."""
    return (n + 1) // 2, n + 1 - n % 2


def unfold(n: int, r, c):
    """(row, position in it, whether it is the last) of a grid step; row i has positions 0 ... i."""
    longer = c < n - r
    row, at = jnp.where(longer, n - 1 - r, r - n % 2), jnp.where(longer, c, c - (n - r))
    return row, at, at == row


def document_tables(segment_ids: Int[Array, "B T"], block: int) -> list[Int[Array, "B n"]]:
    """Smallest and largest id of each block, padding apart, and its first and last partner.

    The first partner is a block at or before it, the last one at or after it, with a range of ids
    that meets its own. Exact where ids increase along the row, else more than needed.
    """
    blocks = segment_ids.reshape(segment_ids.shape[0], -1, block)
    largest = blocks.max(-1)
    smallest = jnp.where(blocks > 0, blocks, jnp.iinfo(jnp.int32).max).min(-1)
    index = jnp.arange(blocks.shape[1], dtype=jnp.int32)
    meet = smallest[:, :, None] <= largest[:, None, :]  # of block i and block j
    meet &= meet.swapaxes(1, 2)
    meet |= index[:, None] == index
    first = jnp.where(meet, index, blocks.shape[1]).min(-1)
    last = jnp.where(meet, index, -1).max(-1)
    # Not by way of `smallest`: padding in a block makes it mixed.
    lowest = blocks.min(-1)
    return [x.astype(jnp.int32) for x in (lowest, largest, first, last)]


def mixed(lowest, largest, b, i, j):
    """Whether not all pairs of two blocks may attend: they hold padding or several documents."""
    same = (lowest[b, i] == largest[b, i]) & (lowest[b, j] == largest[b, j])
    return ~(same & (lowest[b, i] == lowest[b, j]) & (lowest[b, i] > 0))


def matmul(a, b, contract: tuple[int, int]):
    """a and b contracted over one dimension of each, float32 out; float32 operands are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=F32)


def column(row: Int[Array, "1 S"]) -> Int[Array, "S 1"]:
    """A row of numbers as a column, by way of a full tile."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:, :1]


def allowed(shape, keys: slice, queries: slice, causal: bool, k_segment, q_segment):
    """[keys, queries]: which pairs may attend; None if all may."""
    mask = None
    if causal:
        key = keys.start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        query = queries.start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        mask = key <= query
    if q_segment is not None:
        q = q_segment[:, queries]
        same = (k_segment[keys] == q) & (q > 0)
        mask = same if mask is None else mask & same
    return mask


def kernel_call(kernel, name, grid, scalars, inputs, outputs, scratch, updates=None):
    """One kernel over (rows, heads, pairs of blocks); everything by name, as the kernel sees it.

    `updates`: inputs whose memory an output of the same shape takes over.
    """
    names = (*scalars, *inputs, *outputs, *scratch)
    operands, results = [*scalars, *inputs], [*outputs]
    updates = {operands.index(a): results.index(b) for a, b in (updates or {}).items()}

    def run(*refs):
        kernel(dict(zip(names, refs, strict=True)))

    order = [pltpu.PARALLEL, pltpu.PARALLEL, *[pltpu.ARBITRARY] * (len(grid) - 2)]
    out = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch.values()],
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=order,
            vmem_limit_bytes=VMEM_BYTES,
        ),
        input_output_aliases=updates,
        name=name,
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    return dict(zip(outputs, out, strict=True))
