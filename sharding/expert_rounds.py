"""The rounds in which tokens travel to experts on other ranks: who sends what, and where it belongs.

Integers, mostly: `expert_parallel` moves activations by them. All ranks first learn the choices of
all tokens, so that a rank knows what will arrive. It has room for a fixed number of arrivals, and of
rows (one for each expert of an arrival), takes as many of its arrivals in their order as fit in both,
and tells the others how many from whom.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.sharding.annotate import axis_index, axis_size
from k3jax.sharding.counting_sort import running_sum, stable_sort

AXIS = "expert"
FURTHER = 4  # of the first round's room, which they also need memory for, further rounds have 1/4
SLAB = 512  # arrivals that are added up at a time
Transport = Literal["ragged", "padded"]


class Dispatch(NamedTuple):
    """Rows (token, choice) sorted by expert; rows of padding tokens lie behind the last expert."""

    order: Int[Array, " rows"]  # token-major index of each sorted row
    inverse: Int[Array, " rows"]  # sorted position of each token-major row
    group_sizes: Int[Array, " E"]  # rows per expert


def plan_dispatch(
    ids: Int[Array, "tokens A"], mask: Bool[Array, " tokens"] | None, num_experts: int
) -> Dispatch:
    """Sort the (token, choice) rows by expert, stably."""
    if mask is not None:
        ids = jnp.where(mask[:, None], ids, num_experts)
    order, inverse, sizes = stable_sort(ids.reshape(-1), num_experts + 1)
    return Dispatch(order, inverse, sizes[:-1])


def visits(active: int, num_experts: int, held: int) -> float:
    """Share of the tokens that choose some of `held` experts, if they choose evenly."""
    every = math.comb(num_experts, active)
    return (every - math.comb(num_experts - held, active)) / every


class Way(NamedTuple):
    """How tokens travel; static."""

    transport: Transport
    arrivals: int  # tokens of a round per pair of ranks, on average (ragged) or at most (padded)
    rows: int  # the same of rows
    held: int  # experts of a rank
    most: int  # rows of one token at one rank, at most
    keep_rows: bool = False

    @property
    def room(self) -> int:
        """Arrivals of a round."""
        return self.arrivals * axis_size(AXIS)

    @property
    def room_rows(self) -> int:
        return self.rows * axis_size(AXIS)

    @property
    def further(self) -> "Way":
        """Of the rounds after the first: what did not fit there is little as a rule."""
        arrivals = -(-self.arrivals // FURTHER)
        rows = max(min(-(-self.rows // FURTHER), arrivals * self.most), self.most)
        return self._replace(arrivals=arrivals, rows=rows)

    @property
    def lanes(self) -> int:
        """Parts of the room: ragged fills it with whatever comes, padded has one for each source."""
        return 1 if self.transport == "ragged" else axis_size(AXIS)

    def move(self, x: Array, out: Array, x_at: Array, out_at: Array, size: Array) -> Array:
        """`out` with rows of all ranks' `x` written to it.

        Rank s sends `size[s, d]` rows from `x_at[s, d]` on to rank d, which writes them to `out`
        from `out_at[s, d]` on. All ranks know all of these numbers.
        """
        me = axis_index(AXIS)
        if self.transport == "ragged":
            return jax.lax.ragged_all_to_all(
                x, out, x_at[me], size[me], out_at[me], size[:, me], axis_name=AXIS
            )
        nth = jnp.arange(self.arrivals)
        source = jnp.where(nth < size[me][:, None], x_at[me][:, None] + nth, x.shape[0])
        sent = x.at[source].get(mode="fill", fill_value=0)
        got = jax.lax.all_to_all(sent, AXIS, split_axis=0, concat_axis=0, tiled=True)
        to = jnp.where(nth < size[:, me, None], out_at[:, me, None] + nth, out.shape[0])
        return out.at[to].set(got, mode="drop")


def plan_way(
    tokens: int,
    active: int,
    num_experts: int,
    room: float,
    transport: Transport,
    keep_rows: bool = False,
) -> Way:
    """The room of a round: `room` times what even loads need, but for one token in any case."""
    ranks = axis_size(AXIS)
    held = -(-num_experts // ranks)
    most = min(active, held)
    arrivals = math.ceil(room * tokens * visits(active, num_experts, held))
    arrivals = max(min(arrivals, tokens), 1)
    rows = math.ceil(room * tokens * active / ranks)
    rows = max(min(rows, arrivals * most), most)
    return Way(transport, arrivals, rows, held, most, keep_rows)


class Survey(NamedTuple):
    """What this rank sends and gets. "All tokens" are those of rank 0, then of rank 1, ..."""

    pairs: Dispatch  # (token, rank) pairs of this rank's tokens, sorted by rank
    choices: Int[Array, "all A"]  # of all tokens: numbers of this rank's experts; beyond: others'
    number: Int[Array, " all+1"]  # how many of the tokens before each come here
    rows: Int[Array, " all+1"]  # how many rows they have here


def survey(ids: Int[Array, "tokens A"], way: Way) -> Survey:
    """From the choices of this rank's tokens; numbers beyond the R * held experts mean none."""
    ranks, held, active = axis_size(AXIS), way.held, ids.shape[1]
    names = jnp.arange(ranks)
    goes = (ids[..., None] // held == names).any(1)
    slots = jnp.sort(jnp.where(goes, names, ranks), axis=1)[:, : min(active, ranks)]
    choices = jax.lax.all_gather(ids, AXIS, tiled=True) - axis_index(AXIS) * held
    choices = jnp.where((choices >= 0) & (choices < held), choices, held)
    count = (choices < held).sum(1)
    number, rows = (jnp.pad(running_sum(n), (1, 0)) for n in (count > 0, count))
    return Survey(plan_dispatch(slots, None, ranks), choices, number, rows)


class Round(NamedTuple):
    """What travels at once. Matrices are [source, destination]; the others are of this rank."""

    sent: Int[Array, "R R"]  # first pair at the source
    place: Int[Array, "R R"]  # first arrival in the destination's buffer
    size: Int[Array, "R R"]
    group_sizes: Int[Array, " E_local"]  # rows of each of this rank's experts
    arrival: Int[Array, " rows"]  # of each row, in the order of experts; beyond the last: `room`
    choice: Int[Array, " rows"]  # which of all tokens' choices it is
    rows: Int[Array, "room A"]  # those of each arrival; behind them `rows`
    most_first: Int[Array, " room+"]  # arrivals by number of rows; behind them numbers beyond

    def arrive(self, x: Float[Array, "pairs L"], way: Way) -> Float[Array, "room L"]:
        """Inputs, or gradients of sums, from their sources; anything behind them."""
        out = empty((way.room, *x.shape[1:]), x.dtype)
        return way.move(x, out, self.sent, self.place, self.size)

    def leave(
        self, x: Float[Array, "room L"], out: Float[Array, "pairs L"], way: Way
    ) -> Float[Array, "pairs L"]:
        """The way back: `out` with the results of this round where their tokens came from."""
        return way.move(x, out, self.place.T, self.sent.T, self.size.T)

    def spread(self, x: Float[Array, "room L"]) -> Float[Array, "rows L"]:
        """A row for each expert of an arrival, in the order of experts; zeros behind them."""
        return x.at[self.arrival].get(mode="fill", fill_value=0)

    def pick(self, weights: Float[Array, "all A"]) -> Float[Array, " rows"]:
        return weights.reshape(-1).at[self.choice].get(mode="fill", fill_value=0)

    def gather(self, y: Float[Array, "rows L"], way: Way) -> Float[Array, "room L"]:
        """Float32 sum over each arrival's rows, rounded; no scatter-add, as for `combine_rows`.

        Most arrivals have one row, or a few have many: the others are added up some arrivals at a
        time, those with most rows first, so that few rows are read that are not there.
        """
        sums = y.at[self.rows[:, 0]].get(mode="fill", fill_value=0)
        if way.most == 1:
            return sums
        slab = min(SLAB, way.room)

        def add(n, sums):
            these = jax.lax.dynamic_slice_in_dim(self.most_first, n * slab, slab)
            rows = self.rows.at[these].get(mode="fill", fill_value=y.shape[0])

            def nth(k, total):
                return total + y.at[rows[:, k]].get(mode="fill", fill_value=0)

            count = (rows[0] < y.shape[0]).sum()
            total = jax.lax.fori_loop(0, count, nth, jnp.zeros((slab, *y.shape[1:]), jnp.float32))
            return sums.at[these].set(total.astype(y.dtype), mode="drop", unique_indices=True)

        several = (self.rows[:, 1] < y.shape[0]).sum()
        return jax.lax.fori_loop(0, -(-several // slab), add, sums)


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """A buffer of which only rows that have arrived are read; tests fill it with NaN."""
    return jnp.zeros(shape, dtype)


def start(known: Survey, way: Way) -> Int[Array, " lanes"]:
    """Where the first round begins in each lane, among all tokens."""
    return jnp.arange(way.lanes) * (known.choices.shape[0] // way.lanes)


def take(begin: Int[Array, " lanes"], known: Survey, way: Way) -> Int[Array, " lanes"]:
    """Where a round ends that begins there: before the token that is one too many, in either way."""

    def until(total, room):
        return jnp.searchsorted(total[1:], total[begin] + room // way.lanes, side="right")

    end = jnp.minimum(until(known.number, way.room), until(known.rows, way.room_rows))
    every = known.choices.shape[0] // way.lanes
    return jnp.minimum(end, (jnp.arange(way.lanes) + 1) * every).astype(begin.dtype)


def plan_round(
    begin: Int[Array, " lanes"], known: Survey, way: Way
) -> tuple[Round, Int[Array, " lanes"], Bool[Array, ""]]:
    """The round, where the next one begins, and whether there is one, of which all say the same."""
    every, active = known.choices.shape
    ranks, held, number = axis_size(AXIS), way.held, known.number
    end = take(begin, known, way)

    # What comes from each source, which all ranks tell each other.
    source = jnp.arange(ranks) * (every // ranks)
    low, high = (
        jnp.clip(jnp.repeat(x, ranks // way.lanes), source, source + every // ranks)
        for x in (begin, end)
    )
    size, done = number[high] - number[low], number[low] - number[source]
    left = number[-1] - (done + size).sum()
    told = jnp.concatenate([size, done, known.pairs.group_sizes, left[None]])
    told = jax.lax.all_gather(told, AXIS)
    size, done, pairs = told[:, :ranks].T, told[:, ranks : 2 * ranks].T, told[:, 2 * ranks : -1]
    sent = jnp.cumsum(pairs, 1) - pairs + done
    if way.transport == "ragged":
        place = jnp.cumsum(size, 0) - size
    else:
        place = jnp.broadcast_to(jnp.arange(ranks)[:, None] * way.arrivals, size.shape)

    # The arrivals: which of all tokens each of them is, and its choices here.
    lane, nth = jnp.divmod(jnp.arange(way.room), way.room // way.lanes)
    nth += number[begin][lane]
    token = jnp.searchsorted(number[1:], nth, side="right")
    token = jnp.where(nth < number[end][lane], token, every)
    choices = known.choices.at[token].get(mode="fill", fill_value=held)
    here = choices < held

    # Their rows in the order of experts.
    order, inverse, group_sizes = stable_sort(choices.reshape(-1), held + 1)
    order, used = order[: way.room_rows], jnp.arange(way.room_rows) < group_sizes[:-1].sum()
    arrival = jnp.where(used, order // active, way.room)
    choice = token.at[arrival].get(mode="fill", fill_value=0) * active + order % active
    nowhere = every * active + jnp.arange(way.room_rows)  # each another one, for a scatter
    most_first = stable_sort((~here).sum(1), active + 1).order
    beyond = way.room + jnp.arange(-way.room % min(SLAB, way.room), dtype=most_first.dtype)
    found = Round(
        sent,
        place,
        size,
        group_sizes[:-1],
        arrival,
        jnp.where(used, choice, nowhere),
        jnp.sort(jnp.where(here, inverse.reshape(here.shape), way.room_rows), 1, stable=False),
        jnp.concatenate([most_first, beyond]),
    )
    return found, end, told[:, -1].any()
