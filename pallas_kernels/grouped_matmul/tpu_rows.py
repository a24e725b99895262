"""TPU kernel for products of rows with the matrix of their group, and what follows elementwise.

Grid: (column tiles of the result, visits). A column tile of a group's matrix stays on chip while
all rows of the group pass, so that every matrix is read once; the rows are read once per column
tile. Inside a visit the rows go through the matrix units in chunks that start at the group's own
first row, hence a group, which the ends of tiles cut, costs less than two chunks more than its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.grouped_matmul.visits import Visits

BUDGET = 52 << 20  # bytes of on-chip memory for blocks; the rest of 64 MiB is the compiler's
LIMIT = 62 << 20
ALIGN = 16  # rows: bfloat16 lies in tiles of 16, and a load may begin at any of them
WIDE = 256  # columns of one product: those of a wide matrix unit
LANES = 128


@dataclass(frozen=True)
class Product:
    """A float32 result [rows, N]: the sum of x_i w_j over pairs (i, j) of operands."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sizes:
    tile: int  # rows on chip
    chunk: int  # rows of one pass through the matrix units
    columns: int  # of the result on chip


def column_tile(columns: int, most: int) -> int:
    """The widest tile of whole lanes, or of all columns, that cuts `columns` evenly."""
    if columns <= most:
        return columns
    units = range(most // 128, 0, -1)
    even = [128 * n for n in units if columns % (128 * n) == 0]
    wide = [n for n in even if n % 256 == 0]  # fills matrix units of 256
    if wide and 2 * wide[0] >= even[0]:
        return wide[0]
    return even[0] if even else most // 128 * 128


def rows_sizes(
    rows: int,
    groups: int,
    widths: Sequence[int],
    depths: Sequence[int],
    columns: int,
    itemsize: int,
    beside: int,
) -> Sizes | None:
    """Blocks that fit on chip; None if none do.

    Args:
        rows, groups: of the call.
        widths: of each array of rows.
        depths: contracted width of each matrix.
        columns: of the result.
        itemsize: bytes of an element.
        beside: further arrays of the result's shape that are read or written.
    """
    mean = rows // max(groups, 1)
    chunk = 256 if mean >= 512 else 128
    found = []
    for tile in (512, 256) if mean >= 128 else (256,):
        tile = min(tile, -(-rows // chunk) * chunk)
        held = 2 * itemsize * tile * sum(widths)
        per_column = 2 * itemsize * (sum(depths) + tile * beside)
        if (most := (BUDGET - held) // per_column) >= min(columns, LANES):
            found.append(Sizes(tile, min(chunk, tile), column_tile(columns, most)))
    # The rows are read once per column tile, hence the widest.
    return max(found, key=lambda sizes: sizes.columns, default=None)


def multiply_rows(
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    visits: Visits,
    sizes: Sizes,
    products: Sequence[Product],
    finish: Callable[..., tuple[jax.Array, ...]],
    *,
    transposed: bool = False,
    beside: Sequence[jax.Array] = (),
    weights: jax.Array | None = None,
    out_dtypes: Sequence[Any],
    row_sums: bool = False,
    name: str,
    even: int | None = None,
) -> list[jax.Array]:
    """finish(x w products, what lies beside them) for every row; 0 for rows of no group.

    Args:
        xs: [M, K] rows.
        ws: [E, K, N] matrices, or [E, N, K] if transposed.
        visits: of tiles of `sizes.tile` rows.
        products: float32 sums, the first arguments of `finish`.
        finish: (products ..., beside ..., [weights]) -> results, all float32 [rows, columns].
        beside: [M, N] arrays, read beside the products.
        weights: [M] float32, given to `finish` spread over the columns.
        out_dtypes: of the results [M, N].
        row_sums: the last result of `finish` is not written but summed over columns, to parts
            [column tiles, M, 128] in float32 that add up to [M].
        name: of the kernel.
        even: rows of every group, if known when compiling: the visits then are arithmetic, which
            the compiler's profiler can follow. For estimates.
    """
    M, N = xs[0].shape[0], ws[0].shape[1 if transposed else 2]
    J, tn = pl.cdiv(N, sizes.columns), sizes.columns
    lookup = Even(even, sizes.tile, M) if even else Tables(visits)
    grid = (J, lookup.count)
    pieces = [slice(n, min(n + WIDE, tn)) for n in range(0, tn, WIDE)]
    exact = jax.lax.Precision.HIGHEST if xs[0].dtype == jnp.float32 else None

    def rows_of(K):
        return pl.BlockSpec((sizes.tile, K), lambda j, v, *t: (lookup.tile(t, v), 0))

    def matrix(K):
        if transposed:
            return pl.BlockSpec((1, tn, K), lambda j, v, *t: (lookup.group(t, v), j, 0))
        return pl.BlockSpec((1, K, tn), lambda j, v, *t: (lookup.group(t, v), 0, j))

    result = pl.BlockSpec((sizes.tile, tn), lambda j, v, *t: (lookup.tile(t, v), j))
    in_specs = [rows_of(x.shape[1]) for x in xs]
    in_specs += [matrix(w.shape[2 if transposed else 1]) for w in ws]
    in_specs += [result] * len(beside)
    operands = [*xs, *ws, *beside]
    if weights is not None:
        # A column would take as much memory, and be spread over the lanes again for every product.
        in_specs.append(rows_of(LANES))
        operands.append(jnp.broadcast_to(weights.astype(jnp.float32)[:, None], (M, LANES)))
    outs = [jax.ShapeDtypeStruct((M, N), dtype) for dtype in out_dtypes]
    out_specs = [result] * len(outs)
    if row_sums:
        outs.append(jax.ShapeDtypeStruct((J, M, LANES), jnp.float32))
        out_specs.append(
            pl.BlockSpec((None, sizes.tile, LANES), lambda j, v, *t: (j, lookup.tile(t, v), 0))
        )
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def kernel(*refs):
        tables, refs = refs[: lookup.tables], refs[lookup.tables :]
        x_refs, refs = refs[: len(xs)], refs[len(xs) :]
        w_refs, refs = refs[: len(ws)], refs[len(ws) :]
        near, refs = refs[: len(beside)], refs[len(beside) :]
        p_ref, refs = (refs[0], refs[1:]) if weights is not None else (None, refs)
        out_refs = refs
        v = pl.program_id(1)
        first, last = lookup.rows(tables, v)
        begin = first // ALIGN * ALIGN

        def chunk_rows(s):
            start = jnp.minimum(begin + s * sizes.chunk, sizes.tile - sizes.chunk)
            start = pl.multiple_of(start, ALIGN)
            row = start + jax.lax.broadcasted_iota(jnp.int32, (sizes.chunk, 1), 0)
            return pl.ds(start, sizes.chunk), (row >= first) & (row < last)

        def write(ref, at, inside, value):
            """Of the chunk's other rows some may be finished: they belong to the groups around."""
            old = ref[at].astype(jnp.float32)
            ref[at] = jnp.where(inside, value, old).astype(ref.dtype)

        def chunk(s):
            rows, inside = chunk_rows(s)
            x = [ref[rows, :] for ref in x_refs]
            sums = 0.0
            for piece in pieces:
                done = []
                for product in products:
                    parts = [
                        jax.lax.dot_general(
                            x[i],
                            w_refs[j][0, piece, :] if transposed else w_refs[j][0, :, piece],
                            dims,
                            precision=exact,
                            preferred_element_type=jnp.float32,
                        )
                        for i, j in product.pairs
                    ]
                    done.append(sum(parts[1:], parts[0]))
                done += [ref[rows, piece].astype(jnp.float32) for ref in near]
                if p_ref is not None:
                    done.append(_wide(p_ref[rows, :], piece.stop - piece.start))
                values = finish(*done)
                if row_sums:
                    *values, last_one = values
                    if N % tn:  # the last column tile reaches beyond the matrices
                        column = jax.lax.broadcasted_iota(jnp.int32, last_one.shape, 1)
                        column += pl.program_id(0) * tn + piece.start
                        last_one = jnp.where(column < N, last_one, 0)
                    sums += _by_lane(last_one)
                for ref, value in zip(out_refs, values, strict=False):
                    write(ref, (rows, piece), inside, value)
            if row_sums:
                write(out_refs[-1], (rows, slice(None)), inside, sums)

        def clear(s):
            rows, inside = chunk_rows(s)
            for ref in out_refs:
                width = ref.shape[-1]
                write(ref, (rows, slice(None)), inside, jnp.zeros((sizes.chunk, width)))

        lookup.loop(tables, v, sizes.chunk, begin, last, chunk, clear)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=lookup.tables, grid=grid, in_specs=in_specs, out_specs=out_specs
        ),
        out_shape=outs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=LIMIT
        ),
        name=name,
    )(*lookup.operands, *operands)


def _wide(replicated: jax.Array, width: int) -> jax.Array:
    """[rows, 128] of equal lanes as something that spreads over `width` columns."""
    if width % LANES:
        return replicated[:, :1]
    return jnp.concatenate([replicated] * (width // LANES), axis=1)


def _by_lane(x: jax.Array) -> jax.Array:
    """[rows, 128] whose lanes add up to the sum of each row of x; whole registers are added."""
    if x.shape[1] % LANES:
        lane = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1)
        return jnp.where(lane == 0, x.sum(1, keepdims=True), 0)
    return sum(x[:, i : i + LANES] for i in range(LANES, x.shape[1], LANES)) + x[:, :LANES]


class Tables:
    """Visits read from scalar memory."""

    tables = len(Visits._fields)

    def __init__(self, visits: Visits):
        self.operands, self.count = tuple(visits), visits.tile.shape[0]

    def group(self, tables, v):
        return tables[0][v]

    def tile(self, tables, v):
        return tables[1][v]

    def rows(self, tables, v):
        return tables[2][v], tables[3][v]

    def loop(self, tables, v, chunk, begin, last, body, clear):
        steps = jnp.where(tables[2][v] < last, pl.cdiv(last - begin, chunk), 0)
        live = tables[4][v] > 0
        pl.loop(0, jnp.where(live, steps, 0))(body)
        pl.loop(0, jnp.where(live, 0, steps))(clear)


class Even:
    """Visits of groups of equal size, by arithmetic."""

    tables, operands = 0, ()

    def __init__(self, rows: int, tile: int, total: int):
        if max(rows, tile) % min(rows, tile) or total % rows:
            raise ValueError(f"groups of {rows} rows and tiles of {tile} do not fit")
        self.size, self.height = rows, tile
        self.count = total // min(rows, tile)

    def group(self, tables, v):
        return v * self.height // self.size if self.size > self.height else v

    def tile(self, tables, v):
        return v if self.size > self.height else v * self.size // self.height

    def rows(self, tables, v):
        first = 0 if self.size >= self.height else v * self.size % self.height
        return first, first + min(self.size, self.height)

    def loop(self, tables, v, chunk, begin, last, body, clear):
        pl.loop(0, pl.cdiv(min(self.size, self.height), chunk))(body)
