"""TPU kernel for the gradient of the matrices: every group's x^T d.

Grid: (column tiles of the gradient, visits). The float32 sum over a group's rows stays on chip
while the group's visits pass, and is rounded once. Groups without rows are visited too: exactly 0.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.grouped_matmul.tpu_rows import (
    ALIGN,
    BUDGET,
    LANES,
    LIMIT,
    Even,
    Sizes,
    Tables,
    column_tile,
)
from k3jax.pallas_kernels.grouped_matmul.visits import Visits

DEEP = 512  # rows of one product's result


def weights_sizes(rows: int, groups: int, depth: int, columns: int, itemsize: int) -> Sizes | None:
    """Blocks that fit on chip, or None; chunks fill the contracted side of a wide matrix unit."""
    mean = rows // max(groups, 1)
    chunk = 512 if mean >= 2048 else 256  # fewer additions to the sum, more rows of other groups
    tile = min(512 if mean >= 128 else 256, -(-rows // chunk) * chunk)
    held = 2 * itemsize * tile * depth
    per_column = depth * (4 + 2 * itemsize) + 2 * itemsize * tile
    if (most := (BUDGET - held) // per_column) < min(columns, LANES):
        return None
    return Sizes(tile, chunk, column_tile(columns, most))


def gradient_of_weights(
    x: jax.Array,
    d: jax.Array,
    visits: Visits,
    sizes: Sizes,
    groups: int,
    *,
    name: str,
    even: int | None = None,
) -> jax.Array:
    """[E, K, N] sums of x_m^T d_m over each group's rows, in x's dtype; arguments as `multiply_rows`."""
    (M, K), N = x.shape, d.shape[1]
    tn, tile = sizes.columns, sizes.tile
    lookup = Even(even, tile, M) if even else Tables(visits)
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    pieces = [slice(k, min(k + DEEP, K)) for k in range(0, K, DEEP)]

    def kernel(*refs):
        tables, (x_ref, d_ref, out_ref, sum_ref) = refs[: lookup.tables], refs[lookup.tables :]
        v = pl.program_id(1)
        first, last = lookup.rows(tables, v)
        begin = first // ALIGN * ALIGN
        before = lookup.group(tables, jnp.maximum(v - 1, 0))
        new = jnp.logical_or(v == 0, lookup.group(tables, v) != before)

        @pl.when(jnp.logical_and(new, first >= last))
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        def chunk(s):
            start = jnp.minimum(begin + s * sizes.chunk, tile - sizes.chunk)
            start = pl.multiple_of(start, ALIGN)
            row = start + jax.lax.broadcasted_iota(jnp.int32, (sizes.chunk, 1), 0)
            # A clamped chunk begins before the rows that are still to come.
            inside = (row >= jnp.maximum(first, begin + s * sizes.chunk)) & (row < last)
            rows, fresh = pl.ds(start, sizes.chunk), jnp.logical_and(new, s == 0)
            right = jnp.where(inside, d_ref[rows, :], 0).astype(d.dtype)
            for piece in pieces:
                left = jnp.where(inside, x_ref[rows, piece], 0).astype(x.dtype)
                part = jax.lax.dot_general(
                    left, right, (((0,), (0,)), ((), ())),
                    precision=exact, preferred_element_type=jnp.float32,
                )  # fmt: skip
                total = jnp.where(fresh, 0.0, sum_ref[piece, :]) + part
                sum_ref[piece, :] = total
                out_ref[piece, :] = total.astype(out_ref.dtype)

        lookup.loop(tables, v, sizes.chunk, begin, last, chunk, lambda s: None)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=lookup.tables,
            grid=(pl.cdiv(N, tn), lookup.count),
            in_specs=[
                pl.BlockSpec((tile, K), lambda j, v, *t: (lookup.tile(t, v), 0)),
                pl.BlockSpec((tile, tn), lambda j, v, *t: (lookup.tile(t, v), j)),
            ],
            out_specs=pl.BlockSpec((None, K, tn), lambda j, v, *t: (lookup.group(t, v), 0, j)),
            scratch_shapes=[pltpu.VMEM((K, tn), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((groups, K, N), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
        name=name,
    )(*lookup.operands, x, d)
