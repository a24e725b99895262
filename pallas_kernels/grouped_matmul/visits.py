"""Which rows of which tile meet the matrix of which group: the steps of the kernels' grids."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Visits(NamedTuple):
    """One entry per visit: the rows of one group inside one tile of rows.

    The number of visits is fixed by the shapes; what is left over repeats the last visit without
    rows, which moves nothing and computes nothing.
    """

    group: Int[
        Array, " V"
    ]  # whose matrix is on chip; beyond the last group, that of the last visit
    tile: Int[Array, " V"]
    first: Int[Array, " V"]  # rows first <= row < last of the tile belong to the visit
    last: Int[Array, " V"]
    live: Int[Array, " V"]  # 0: rows of no group, which become 0


def plan_visits(group_sizes: Int[Array, " E"], rows: int, tile: int, *, every: bool) -> Visits:
    """The visits in the order of rows.

    Args:
        group_sizes: rows of each group; at most `rows` together.
        rows: rows of the array.
        tile: rows of a tile.
        every: also visit groups without rows, and not the rows beyond the last group (for gradients
            of the matrices); else the other way round (for products with the rows).
    """
    E, tiles = group_sizes.shape[0], -(-rows // tile)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    if not every:  # the rows behind the last group are one more group
        starts, ends = jnp.append(starts, ends[-1:]), jnp.append(ends, jnp.int32(rows))
    count = jnp.where(ends > starts, (ends - 1) // tile - starts // tile + 1, int(every))
    upto = jnp.cumsum(count)
    visit = jnp.minimum(jnp.arange(tiles + E, dtype=jnp.int32), upto[-1] - 1)
    group = jnp.searchsorted(upto, visit, side="right", method="compare_all").astype(jnp.int32)
    nth = visit - (upto - count)[group]
    at = jnp.minimum(starts[group] // tile + nth, tiles - 1)  # an empty group may start at the end
    first = jnp.maximum(starts[group] - at * tile, 0)
    last = jnp.minimum(ends[group] - at * tile, tile)
    again = jnp.arange(tiles + E) > visit
    live = (group < E).astype(jnp.int32)
    held = jnp.max(jnp.where(group_sizes > 0, jnp.arange(E, dtype=jnp.int32), 0))
    group = group if every else jnp.where(live > 0, group, held)
    return Visits(group, at, first, jnp.where(again, first, last), live)


class Tiles(NamedTuple):
    """One entry per tile: rows first <= row < last of one group; none (0, 0) in what is left over."""

    group: Int[Array, " V"]  # E: rows of no group, which become 0
    first: Int[Array, " V"]
    last: Int[Array, " V"]


def plan_tiles(group_sizes: Int[Array, " E"], rows: int, tile: int) -> Tiles:
    """Tiles that begin where their group begins, in the order of rows.

    Args:
        group_sizes: rows of each group; at most `rows` together.
        rows: rows of the array, at least 1.
        tile: most rows of a tile.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    ends = jnp.append(ends, jnp.int32(rows))  # the rows behind the last group are one more group
    starts = jnp.append(jnp.int32(0), ends[:-1])
    count = -(-(ends - starts) // tile)
    upto = jnp.cumsum(count)
    most = (rows + min(ends.shape[0], rows) * (tile - 1)) // tile
    v = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(upto, v, side="right", method="compare_all").astype(jnp.int32)
    used, group = group < ends.shape[0], jnp.minimum(group, ends.shape[0] - 1)
    first = starts[group] + (v - (upto - count)[group]) * tile
    last = jnp.minimum(first + tile, ends[group])
    return Tiles(group, jnp.where(used, first, 0), jnp.where(used, last, 0))
