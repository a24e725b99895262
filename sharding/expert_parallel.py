"""Rows to the ranks that hold their experts, and back: the all-to-all of expert parallelism.

Ranks along the axis `expert` hold equal, contiguous parts of the experts. A row is one token for one
of its experts; the rows of a rank, in the order of experts, are in the order of ranks too. They
travel in *rounds*: a rank can receive a fixed number of rows in one (its *room*), the counts that all
ranks exchange first say who sends what in which round, and every rank finds the number of rounds
from them. So a rank in demand costs rounds; it never costs a row, memory, or a wait for the host.

What the experts are is an argument, `Op`. Forward and backward pass are written out here, for the
sake of memory: the input of the exchange is kept, not the A times more rows it becomes, which travel
again in the backward pass; and what the experts keep of the first round, usually the only one.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.sharding.annotate import axis_index, axis_size

logger = logging.getLogger("k3jax")

AXIS = "expert"
# Room of a rank over the rows it sends: the load of a rank is the sum of E / R experts', which
# Quantile Balancing keeps near equal; a step with a rank above this takes one round more.
ROOM = 1.25

Transport = Literal["ragged", "padded"]


class Dispatch(NamedTuple):
    """Rows (token, choice) sorted by expert; rows of padding tokens lie behind the last expert."""

    order: Int[Array, " rows"]  # token-major index of each sorted row
    inverse: Int[Array, " rows"]  # sorted position of each token-major row
    group_sizes: Int[Array, " E"]  # rows per expert


def plan_dispatch(
    ids: Int[Array, "tokens A"], mask: Bool[Array, " tokens"] | None, num_experts: int
) -> Dispatch:
    """Sort the (token, choice) rows by expert, stably. Cost: two sorts of tokens * A integers."""
    if mask is not None:
        ids = jnp.where(mask[:, None], ids, num_experts)
    expert = ids.reshape(-1)
    order = jnp.argsort(expert)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    return Dispatch(order, jnp.argsort(order), group_sizes)


@jax.custom_vjp
def dispatch_rows(z: Float[Array, "tokens L"], plan: Dispatch) -> Float[Array, "rows L"]:
    """The rows (token, choice) in the order of experts: a gather.

    Autodiff alone would scatter-add in the backward pass, which is slower and, on GPUs, not
    deterministic; a row's sorted position is known, so that too is a gather: `combine_rows`.
    """
    return z[plan.order // (plan.order.shape[0] // z.shape[0])]


@jax.custom_vjp
def combine_rows(y: Float[Array, "rows L"], plan: Dispatch, like: Any) -> Float[Array, "tokens L"]:
    """Float32 sum over each token's rows; `like` is any array with one entry per token."""
    return y[plan.inverse].astype(jnp.float32).reshape(like.shape[0], -1, y.shape[-1]).sum(1)


dispatch_rows.defvjp(
    lambda z, plan: (dispatch_rows(z, plan), (z[:, :0], plan)),
    lambda saved, d: (combine_rows(d, saved[1], saved[0]).astype(d.dtype), None),
)
combine_rows.defvjp(
    lambda y, plan, like: (combine_rows(y, plan, like), (y[:0], plan, like)),
    lambda saved, du: (dispatch_rows(du.astype(saved[0].dtype), saved[1]), None, None),
)


class Op(Protocol):
    """The experts of one rank: rows in the order of experts times their weights; hashable.

    Rows beyond the sum of `group_sizes` are 0 and must give 0.
    """

    def __call__(self, rows: Array, p: Array, group_sizes: Array, matrices: Any) -> Array:
        """The outputs; differentiable."""
        ...

    def forward(
        self, rows: Array, p: Array, group_sizes: Array, matrices: Any
    ) -> tuple[Array, Any]:
        """The outputs, and what `backward` needs beside the arguments."""
        ...

    def backward(
        self, saved: Any, dy: Array, rows: Array, p: Array, group_sizes: Array, matrices: Any
    ) -> tuple[Array, Array, Any]:
        """The gradients by rows, p and matrices."""
        ...


def apply_experts(
    op: Op,
    z: Float[Array, "tokens L"],
    weights: Float[Array, "tokens A"],
    plan: Dispatch,
    matrices: Any,
    *,
    keep_rows: bool = False,
    room: float = ROOM,
    transport: Transport | None = None,
) -> Float[Array, "tokens L"]:
    """Weighted sum of each token's experts, float32, wherever the experts are.

    Args:
        op: the experts.
        z: inputs of the experts; only they travel, and the outputs in the same width.
        weights: combine weight of each row, float32.
        plan: of this rank's tokens over all experts.
        matrices: pytree of this rank's experts, [ceil(E / R), ...]; those beyond E get no rows.
        keep_rows: keep the first round's rows for the backward pass, instead of sending them again:
            right where the backward pass follows at once, as in a layer that is recomputed.
        room: rows that a rank can receive in one round, over those it sends.
        transport: `ragged` sends what there is; `padded`, for platforms that cannot (CPU), an equal
            part of the room to each rank. None chooses by the platform.

    Numerics: rows, and the gradients that travel, in z's dtype; sums over a token's rows, and of the
    gradients of matrices over rounds, in float32.
    Cost: `bytes_per_token`; two int32 per expert; with one rank nothing.
    """
    if axis_size(AXIS) == 1:
        p = dispatch_rows(weights.reshape(-1, 1), plan)[:, 0]
        y = op(dispatch_rows(z, plan), p, plan.group_sizes, matrices)
        return combine_rows(y, plan, weights)
    ranks, rows = axis_size(AXIS), plan.order.shape[0]
    each = max(math.ceil(room * rows / ranks), 1)
    way = Way(transport or choose_transport(), each, keep_rows)
    return _exchange(op, way, z, weights, plan, matrices)


def bytes_per_token(
    active: int, dim: int, ranks: int, itemsize: int = 2, *, keep_rows: bool = False
) -> tuple[float, float]:
    """Bytes that a rank sends per token and layer: (forward, forward and backward).

    Rows of evenly spread tokens, of which 1 / ranks stay: inputs there, with their weights in
    float32, and outputs back; in the backward pass inputs and gradients there, and gradients back,
    those of the weights too. (A TPU moves one weight as a row of 128 numbers.) `keep_rows` spares the
    inputs of the backward pass; where the layer is recomputed, its forward part is to be added.
    """
    remote = active * (ranks - 1) / ranks
    trips = 4 if keep_rows else 5
    return remote * (2 * dim * itemsize + 4), remote * (trips * dim * itemsize + 2 * 4)


# ---------------------------------------------------------------------------------------- transport


class Way(NamedTuple):
    """How rows travel; static."""

    transport: Transport
    each: int  # rows of a round per pair of ranks, on average or at most
    keep_rows: bool = False

    @property
    def room(self) -> int:
        return self.each * axis_size(AXIS)

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
        nth = jnp.arange(self.each)
        source = jnp.where(nth < size[me][:, None], x_at[me][:, None] + nth, x.shape[0])
        sent = x.at[source].get(mode="fill", fill_value=0)
        got = jax.lax.all_to_all(sent, AXIS, split_axis=0, concat_axis=0, tiled=True)
        to = jnp.where(nth < size[:, me, None], out_at[:, me, None] + nth, out.shape[0])
        return out.at[to].set(got, mode="drop")


@functools.cache  # logs each reason once
def _log_transport(name: str, why: str) -> None:
    logger.info("exchange of experts' rows runs as %s (%s)", name, why)


def choose_transport() -> Transport:
    """`ragged` where the program is for a TPU or GPU; the choice is logged once.

    The mesh's devices may be others than this process runs on: a CPU compiles for them.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    if platform in ("tpu", "gpu", "cuda", "rocm"):
        _log_transport("ragged", f"this is a {platform}")
        return "ragged"
    _log_transport("padded", f"XLA has no ragged all-to-all for {platform}")
    return "padded"


# ------------------------------------------------------------------------------------------- rounds


class Round(NamedTuple):
    """What travels at once. Matrices are [source, destination]; `order` and `back` are this rank's."""

    sent: Int[Array, "R R"]  # first row at the source
    place: Int[Array, "R R"]  # first row in the destination's buffer
    size: Int[Array, "R R"]
    order: Int[Array, " room"]  # buffer row of each row in the order of this rank's experts
    back: Int[Array, " room"]  # the inverse
    group_sizes: Int[Array, " E_local"]  # rows of each of this rank's experts

    def arrive(self, x: Float[Array, "rows ..."], way: Way) -> Float[Array, "room ..."]:
        """Rows from their sources, in the order of this rank's experts; zeros behind them."""
        buffer = way.move(x, empty((way.room, *x.shape[1:]), x.dtype), *self[:3])
        return buffer.at[self.order].get(mode="fill", fill_value=0)

    def leave(
        self, y: Float[Array, "room ..."], out: Float[Array, "rows ..."], way: Way
    ) -> Float[Array, "rows ..."]:
        """The way back: `out` with the results of this round where their rows came from."""
        buffer = y.at[self.back].get(mode="clip")
        return way.move(buffer, out, self.place.T, self.sent.T, self.size.T)


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """A buffer of which only rows that have arrived are read; tests fill it with NaN."""
    return jnp.zeros(shape, dtype)


def all_counts(group_sizes: Int[Array, " E"], held: int) -> Int[Array, "R R E_local"]:
    """Rows of every source for every expert of every destination, of `held` experts each."""
    ranks = axis_size(AXIS)
    spare = ranks * held - group_sizes.shape[0]
    if not 0 <= spare < ranks:
        raise ValueError(
            f"{ranks} ranks with {held} experts each do not hold {group_sizes.shape[0]} experts"
        )
    counts = jax.lax.all_gather(jnp.pad(group_sizes, (0, spare)), AXIS)
    return counts.reshape(ranks, ranks, held)


def num_rounds(counts: Int[Array, "R R E_local"], way: Way) -> Int[Array, ""]:
    """The same on every rank."""
    pairs = counts.sum(-1)
    if way.transport == "ragged":
        return (-(-pairs.sum(0) // way.room)).max()
    return (-(-pairs // way.each)).max()


def plan_round(counts: Int[Array, "R R E_local"], index: Any, way: Way) -> Round:
    """Round `index` of the exchange.

    Ragged: a destination numbers its arrivals by source, and takes as many as it has room for.
    Padded: it takes as many from each source.
    """
    pairs, me = counts.sum(-1), axis_index(AXIS)
    ranks = pairs.shape[0]
    if way.transport == "ragged":
        number = jnp.cumsum(pairs, 0) - pairs  # of the pair's first arrival
        begin = jnp.clip(index * way.room - number, 0, pairs)
        end = jnp.clip((index + 1) * way.room - number, 0, pairs)
        place = jnp.clip(number + begin - index * way.room, 0, way.room)
    else:
        begin = jnp.minimum(index * way.each, pairs)
        end = jnp.minimum((index + 1) * way.each, pairs)
        place = jnp.broadcast_to(jnp.arange(ranks)[:, None] * way.each, pairs.shape)
    sent = jnp.cumsum(pairs, 1) - pairs + begin

    # A pair's rows are in the order of experts: which of each expert's fall into the round?
    rows = counts[:, me]  # source, expert
    first = jnp.cumsum(rows, 1) - rows
    low, high = begin[:, me, None], end[:, me, None]
    size = jnp.clip(first + rows, low, high) - jnp.clip(first, low, high)
    in_buffer = place[:, me, None] + jnp.cumsum(size, 1) - size
    by_expert = size.T.reshape(-1)
    in_groups = (jnp.cumsum(by_expert) - by_expert).reshape(size.T.shape).T
    group_sizes = size.sum(0)
    order = _pieces(in_groups.T, in_buffer.T, way.room)
    order = jnp.where(jnp.arange(way.room) < group_sizes.sum(), order, way.room)
    back = _pieces(in_buffer, in_groups, way.room)
    return Round(sent, place, end - begin, order, back, group_sizes)


def _pieces(here: Array, there: Array, length: int) -> Int[Array, " length"]:
    """Position `there[k] + i` of position `here[k] + i`, for pieces k in ascending order of `here`.

    An empty piece begins where the next one does. Beyond the last the values mean nothing.
    """
    here, shift = here.reshape(-1), (there - here).reshape(-1)
    steps = jnp.zeros(length, jnp.int32).at[here].add(jnp.diff(shift, prepend=0), mode="drop")
    return jnp.arange(length, dtype=jnp.int32) + jnp.cumsum(steps)


# ----------------------------------------------------------------------------- forward and backward


def _rounds(count: Array, turn: Callable[..., Any], state: Any) -> Any:
    """The rounds after the first, of which there are usually none."""
    done = jax.lax.while_loop(
        lambda carry: carry[0] < count,
        lambda carry: (carry[0] + 1, turn(*carry)),
        (jnp.int32(1), state),
    )
    return done[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(op, way, z, weights, plan, matrices):
    def run(*args):
        return op(*args), None

    return _forward(run, way, z, weights, plan, matrices)[0]


def _forward(run, way, z, weights, plan, matrices):
    """The result, the counts, and of the first round (rows, weights, what `run` keeps)."""
    counts = all_counts(plan.group_sizes, jax.tree.leaves(matrices)[0].shape[0])
    rows, p = dispatch_rows(z, plan), weights.reshape(-1)[plan.order]

    def turn(index, y):
        trip = plan_round(counts, index, way)
        x, q = trip.arrive(rows, way), trip.arrive(p, way)
        done, saved = run(x, q, trip.group_sizes, matrices)
        return trip.leave(done, y, way), (x if way.keep_rows else None, q, saved)

    # The first round lies in the open: the compiler may lay it beside what does not depend on it.
    y, saved = turn(0, jnp.zeros_like(rows))
    y = _rounds(num_rounds(counts, way), lambda index, y: turn(index, y)[0], y)
    return combine_rows(y, plan, weights), counts, saved


def _exchange_fwd(op, way, z, weights, plan, matrices):
    u, counts, saved = _forward(op.forward, way, z, weights, plan, matrices)
    return u, (z, weights, plan, matrices, counts, saved)


def _exchange_bwd(op, way, residuals, du):
    z, weights, plan, matrices, counts, first = residuals
    # In a program without loops the compiler would find the rows travelling for the second time, and
    # keep those of the forward pass instead.
    z, weights, du = jax.lax.optimization_barrier((z, weights, du))
    rows, p = dispatch_rows(z, plan), weights.reshape(-1)[plan.order]
    d_rows = dispatch_rows(du.astype(z.dtype), plan)

    def turn(index, dz, dp, kept=None):
        trip = plan_round(counts, index, way)
        sizes = trip.group_sizes
        if kept is None:
            x, q = trip.arrive(rows, way), trip.arrive(p, way)
            saved = op.forward(x, q, sizes, matrices)[1]
        else:
            x, q, saved = kept
            x = trip.arrive(rows, way) if x is None else x
        dx, dq, dm = op.backward(saved, trip.arrive(d_rows, way), x, q, sizes, matrices)
        return trip.leave(dx, dz, way), trip.leave(dq, dp, way), dm

    def add(index, state):
        dz, dp, total = state
        dz, dp, dm = turn(index, dz, dp)
        return dz, dp, jax.tree.map(lambda total, d: total + d.astype(total.dtype), total, dm)

    dz, dp, dm = turn(0, jnp.zeros_like(rows), jnp.zeros_like(p), first)
    total = jax.tree.map(lambda d: d.astype(jnp.promote_types(d.dtype, jnp.float32)), dm)
    dz, dp, total = _rounds(num_rounds(counts, way), add, (dz, dp, total))
    return (
        combine_rows(dz, plan, weights).astype(z.dtype),
        dp[plan.inverse].reshape(weights.shape),
        None,
        jax.tree.map(lambda total, d: total.astype(d.dtype), total, dm),
    )


_exchange.defvjp(_exchange_fwd, _exchange_bwd)
