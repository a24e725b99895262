"""Tokens to the ranks that hold their experts, and sums back: the all-to-all of expert parallelism.

Ranks along the axis `expert` hold equal, contiguous parts of the experts. A token travels once to
each rank that holds some of its experts, however many; there it becomes a row per expert, and what
returns is one sum (moe_parallelism 3, D.4). All ranks first learn the choices of all tokens, 8 bytes
each, so that a rank knows what will arrive and where it belongs.

Tokens travel in *rounds*: a rank has room for a fixed number of arrivals, and of rows, in one. It
takes as many of its arrivals, in their order, as fit in both, and tells the others, who agree whether
there is a further round, of a part of that room. So a rank in demand costs rounds; it never costs a
row, memory, or a wait for the host.

What the experts are is an argument, `Op`. Forward and backward pass are written out here, for the
sake of memory: the input of the exchange is kept, not the copies that it becomes, which travel again
in the backward pass; and what the experts keep of the first round, usually the only one.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.sharding.annotate import axis_size
from k3jax.sharding.expert_rounds import (
    AXIS,
    Dispatch,
    Survey,
    Transport,
    Way,
    plan_dispatch,
    plan_round,
    plan_way,
    start,
    survey,
    visits,
)

logger = logging.getLogger("k3jax")

# Room of a rank over what it would get with even loads. The load of a rank is the sum of E / R
# experts', which Quantile Balancing keeps near equal; a step with a rank above this takes one round
# more.
ROOM = 1.25


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
    ids: Int[Array, "tokens A"],
    mask: Bool[Array, " tokens"] | None,
    num_experts: int,
    matrices: Any,
    *,
    keep_rows: bool = False,
    room: float = ROOM,
    transport: Transport | None = None,
) -> Float[Array, "tokens L"]:
    """Weighted sum of each token's experts, float32, wherever the experts are; 0 for padding tokens.

    Args:
        op: the experts.
        z: inputs of the experts; only they travel, and sums of outputs in the same width.
        weights: combine weight of each choice, float32.
        ids: the experts of each token, distinct.
        mask: False for padding.
        num_experts: of all ranks.
        matrices: pytree of this rank's experts, [ceil(E / R), ...]; those beyond E get no rows.
        keep_rows: keep the first round's arrivals for the backward pass, instead of sending them
            again: right where the backward pass follows at once, as in a layer that is recomputed.
        room: arrivals and rows that a rank can take in one round, over those of even loads.
        transport: `ragged` sends what there is; `padded`, for platforms that cannot (CPU), an equal
            part of the room to each rank. None chooses by the platform.

    Numerics: tokens, and the gradients that travel, in z's dtype. A rank adds up its rows of a token
    in float32 and rounds the sum to z's dtype, once; the sum over ranks, and that of the gradients
    of matrices over rounds, is float32.
    Cost: `bytes_per_token`, and 3 R + 1 numbers per round; with one rank nothing.
    """
    if axis_size(AXIS) == 1:
        plan = plan_dispatch(ids, mask, num_experts)
        p = dispatch_rows(weights.reshape(-1, 1), plan)[:, 0]
        y = op(dispatch_rows(z, plan), p, plan.group_sizes, matrices)
        return combine_rows(y, plan, weights)
    ranks, held = axis_size(AXIS), jax.tree.leaves(matrices)[0].shape[0]
    if not 0 <= ranks * held - num_experts < ranks:
        raise ValueError(
            f"{ranks} ranks with {held} experts each do not hold {num_experts} experts"
        )
    if mask is not None:
        ids = jnp.where(mask[:, None], ids, ranks * held)
    tokens, active = ids.shape
    transport = transport or choose_transport()
    way = plan_way(tokens, active, num_experts, room, transport, keep_rows)
    return _exchange(op, way, z, weights, ids, matrices)


def bytes_per_token(
    active: int,
    dim: int,
    ranks: int,
    num_experts: int,
    itemsize: int = 2,
    *,
    keep_rows: bool = False,
) -> tuple[float, float]:
    """Bytes that a rank sends per token and layer: (forward, forward and backward).

    Of evenly spread tokens, to the other ranks that hold some of their experts: inputs there, sums
    back; in the backward pass inputs and gradients there, and gradients back. `keep_rows` spares the
    inputs of the backward pass; where the layer is recomputed, its forward part is to be added.
    All other ranks get the choices, as int32 and float32, and give the gradients of the weights.
    """
    others, held = ranks - 1, -(-num_experts // ranks)
    parts = (min(held, max(num_experts - r * held, 0)) for r in range(ranks))
    copies = sum(visits(active, num_experts, part) for part in parts) * others / ranks
    trips = 4 if keep_rows else 5
    choices = others * active * 4
    return copies * 2 * dim * itemsize + 2 * choices, copies * trips * dim * itemsize + 3 * choices


# ---------------------------------------------------------------------------------------- transport


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


# ----------------------------------------------------------------------------- forward and backward


def _rounds(
    turn: Callable[..., Any], known: Survey, way: Way, begin: Array, more: Array, state: Any
):
    """The rounds after the first, of which there are usually none: `turn(trip, its way, *state)`."""
    way = way.further

    def body(carry):
        begin, _, state = carry
        trip, begin, more = plan_round(begin, known, way)
        return begin, more, turn(trip, way, *state)

    return jax.lax.while_loop(lambda carry: carry[1], body, (begin, more, state))[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(op, way, z, weights, ids, matrices):
    def run(*args):
        return op(*args), None

    return _forward(run, way, z, weights, ids, matrices)[0]


def _forward(run, way, z, weights, ids, matrices):
    """The result, and what the backward pass may use again.

    That is the survey, all weights, the first round with the begin of the next, and of the first
    round (arrivals, what `run` keeps).
    """
    known, every = survey(ids, way), jax.lax.all_gather(weights, AXIS, tiled=True)
    sent = dispatch_rows(z, known.pairs)

    def turn(trip, way, y):
        x = trip.arrive(sent, way)
        done, saved = run(trip.spread(x), trip.pick(every), trip.group_sizes, matrices)
        return trip.leave(trip.gather(done, way), y, way), (x if way.keep_rows else None, saved)

    # The first round lies in the open: the compiler may lay it beside what does not depend on it.
    first, begin, more = plan_round(start(known, way), known, way)
    y, saved = turn(first, way, jnp.zeros_like(sent))
    (y,) = _rounds(lambda *args: turn(*args)[:1], known, way, begin, more, (y,))
    return combine_rows(y, known.pairs, weights), (known, every, (first, begin, more), saved)


def _exchange_fwd(op, way, z, weights, ids, matrices):
    u, kept = _forward(op.forward, way, z, weights, ids, matrices)
    return u, (z, matrices, *kept)


def _exchange_bwd(op, way, residuals, du):
    z, matrices, known, every, (first, begin, more), kept = residuals
    # In a program without loops the compiler would find the tokens travelling for the second time,
    # and keep those of the forward pass instead.
    z, du = jax.lax.optimization_barrier((z, du))
    sent, d_sums = dispatch_rows(z, known.pairs), dispatch_rows(du.astype(z.dtype), known.pairs)

    def turn(trip, way, dz, dp, kept=None):
        x = None if kept is None else kept[0]
        x = trip.spread(trip.arrive(sent, way) if x is None else x)
        p, sizes = trip.pick(every), trip.group_sizes
        saved = op.forward(x, p, sizes, matrices)[1] if kept is None else kept[1]
        dy = trip.spread(trip.arrive(d_sums, way))
        dx, dq, dm = op.backward(saved, dy, x, p, sizes, matrices)
        dz = trip.leave(trip.gather(dx, way), dz, way)
        return dz, dp.at[trip.choice].set(dq, mode="drop", unique_indices=True), dm

    def add(trip, way, dz, dp, total):
        dz, dp, dm = turn(trip, way, dz, dp)
        return dz, dp, jax.tree.map(lambda total, d: total + d.astype(total.dtype), total, dm)

    dz, dp = jnp.zeros_like(sent), jnp.zeros_like(every.reshape(-1))
    dz, dp, dm = turn(first, way, dz, dp, kept)
    total = jax.tree.map(lambda d: d.astype(jnp.promote_types(d.dtype, jnp.float32)), dm)
    dz, dp, total = _rounds(add, known, way, begin, more, (dz, dp, total))
    dp = jax.lax.psum_scatter(dp.reshape(every.shape), AXIS, tiled=True)
    return (
        combine_rows(dz, known.pairs, dp).astype(z.dtype),
        dp,
        None,
        jax.tree.map(lambda total, d: total.astype(d.dtype), total, dm),
    )


_exchange.defvjp(_exchange_fwd, _exchange_bwd)
