"""The compiled programs of generation: a chunk of a prompt, a block of tokens, snapshots.

On a mesh every device has all rows, and its part of the weights and of the heads' memories: a model may
be larger than a device, and a step is the same for all.

Every shape depends on the engine's sizes only and a slot is an argument, so there is one program of
each kind, and one per chunk bucket for prompts (KF-037, KF-117). The state is donated: it is updated
where it lies (KF-036).
"""

import contextlib
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from k3jax.decode_state import (
    DecodeState,
    decode_state_specs,
    init_decode_state,
    kda_caches,
    put_row,
    take_row,
)
from k3jax.model import K3Config
from k3jax.sample import SamplingConfig, SamplingRows, sample_tokens, sampling_rows
from k3jax.sharding.annotate import pmax, region
from k3jax.sharding.mesh import AXES
from k3jax.train_state import abstract_model, merge, weight_specs

BLOCK = 16  # tokens per call of the compiled loop, and so per flush to the terminal
MAX_STOP_IDS = 8  # token ids that may end one request
IDLE = SamplingConfig(temperature=0.0)  # needs no draw, no sort, no penalty

Weights = tuple[Any, Any]  # parameters and buffers, pure dicts


class Slots(NamedTuple):
    """What the device holds of the requests, one row per slot."""

    state: DecodeState
    logits: Float[Array, "B X"]  # after the row's last token, float32
    seen: Bool[Array, "B X"]  # tokens of its prompt and output
    active: Bool[Array, " B"]  # False: free, being prefilled, or done
    count: Int[Array, " B"]  # tokens generated
    limit: Int[Array, " B"]  # tokens to generate
    seed: UInt32[Array, " B"]
    stop_ids: Int[Array, "B N"]  # -1: none
    sampling: SamplingRows


class Admission(NamedTuple):
    """A request as its slot gets it."""

    page_table: Int[np.ndarray, " M"]
    seen: Bool[np.ndarray, " X"]
    limit: Int[np.ndarray, ""]
    seed: UInt32[np.ndarray, ""]
    stop_ids: Int[np.ndarray, " N"]
    sampling: SamplingRows  # one row


class Place(NamedTuple):
    """What names a program: the model, and the devices that share it (None: one has it whole).

    The config stands for the graph of the model, which takes milliseconds to hash.
    """

    cfg: K3Config
    mesh: Mesh | None = None

    def specs(self, part: Any) -> Any:
        """PartitionSpecs of "weights", of "slots", of a "row" of them; of None: the same everywhere."""
        if isinstance(part, tuple):
            return tuple(map(self.specs, part))
        assert self.mesh is not None
        if part == "weights":
            return weight_specs(self.cfg, self.mesh)
        everywhere: Any = PartitionSpec()
        state = decode_state_specs(self.cfg, self.mesh.shape, rows=None, paged=True)
        if part == "row":
            return kda_caches(state)
        return Slots(state, *(everywhere,) * 8) if part == "slots" else everywhere

    def activate(self) -> Any:
        """Context in which its programs run."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def program(ins: tuple[Any, ...], outs: Any, donate: int | None = None) -> Callable:
    """Compiles `fn(cfg, *args)` as `fn(place, *args)`, on every device of the place.

    Args:
        ins, outs: parts that the arguments and results are, as `Place.specs` names them.
        donate: index of an argument whose memory the result takes.
    """

    def compiled(fn: Callable) -> Any:
        @partial(jax.jit, static_argnums=0, donate_argnums=() if donate is None else donate + 1)
        @functools.wraps(fn)
        def run(place: Place, *args):
            local = partial(fn, place.cfg)
            if place.mesh is None:
                return local(*args)
            return region(local, place.mesh, place.specs(ins), place.specs(outs))(*args)

        return run

    return compiled


def init_slots(place: Place, slots: int, max_len: int, *, pages: int, page_tokens: int) -> Slots:
    """Empty slots; `pages` as in `init_decode_state`."""

    def make() -> Slots:
        return _empty(place.cfg, slots, max_len, pages=pages, page_tokens=page_tokens)

    if place.mesh is None:
        return make()
    where = jax.tree.map(lambda spec: NamedSharding(place.mesh, spec), place.specs("slots"))
    with place.activate():
        return jax.jit(make, out_shardings=where)()


def _empty(cfg: K3Config, slots: int, max_len: int, *, pages: int, page_tokens: int) -> Slots:
    rows = (slots,)
    return Slots(
        state=init_decode_state(cfg, slots, max_len, pages=pages, page_tokens=page_tokens),
        logits=jnp.zeros((slots, cfg.vocab_size), jnp.float32),
        seen=jnp.zeros((slots, cfg.vocab_size), bool),
        active=jnp.zeros(rows, bool),
        count=jnp.zeros(rows, jnp.int32),
        limit=jnp.zeros(rows, jnp.int32),
        seed=jnp.zeros(rows, jnp.uint32),
        stop_ids=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
        sampling=sampling_rows([IDLE] * slots),
    )


def _model(cfg: K3Config, weights: Weights) -> Any:
    graphdef, _, _ = abstract_model(cfg)
    return merge(graphdef, *weights)


@program(("slots", None, None), "slots", donate=0)
def admit(_: K3Config, slots: Slots, slot: Int[Array, ""], request: Admission) -> Slots:
    """A request into a free slot: no tokens yet, not active."""
    state = slots.state
    assert state.page_table is not None
    state = state._replace(
        length=state.length.at[slot].set(0),
        page_table=state.page_table.at[slot].set(request.page_table),
    )

    def put(rows, value):
        return rows.at[slot].set(value)

    return slots._replace(
        state=state,
        seen=put(slots.seen, request.seen),
        active=put(slots.active, False),
        count=put(slots.count, 0),
        limit=put(slots.limit, request.limit),
        seed=put(slots.seed, request.seed),
        stop_ids=put(slots.stop_ids, request.stop_ids),
        sampling=jax.tree.map(lambda x, new: put(x, new[0]), slots.sampling, request.sampling),
    )


@program(("slots", None), "row")
def snapshot(_: K3Config, slots: Slots, slot: Int[Array, ""]) -> Any:
    """A copy of what the slot's request has beside its pages."""
    return kda_caches(take_row(slots.state, slot))


@program(("slots", None, None, "row"), "slots", donate=0)
def restore(
    _: K3Config, slots: Slots, slot: Int[Array, ""], length: Int[Array, ""], row: Any
) -> Slots:
    """The slot's request as a snapshot after `length` tokens left it, whose pages it shares."""
    own = take_row(slots.state, slot)
    caches = {stack: layers | row[stack] for stack, layers in own.caches.items()}
    own = DecodeState(length[None], caches, own.page_table)
    return slots._replace(state=put_row(slots.state, slot, own))


@program(("weights", "slots", None, None, None, None), "slots", donate=1)
def read_chunk(
    cfg: K3Config,
    weights: Weights,
    slots: Slots,
    slot: Int[Array, ""],
    tokens: Int[Array, "1 T"],
    count: Int[Array, ""],
    last: Bool[Array, ""],
) -> Slots:
    """The next `count` tokens of a slot's prompt, of the T given; with the last, it is active.

    A chunk begins at a multiple of its largest size whatever came before, so that a prompt gives the
    same state to the last bit in one go, restored from a snapshot, and beside any other requests.
    """
    model = _model(cfg, weights)
    row = take_row(slots.state, slot)
    real = (jnp.arange(tokens.shape[1]) < count)[None].astype(jnp.int32)
    h, _, row = model.hidden(tokens, segment_ids=real, state=row)
    logits = model.logits(jax.lax.dynamic_slice_in_dim(h, count - 1, 1, axis=1))[0, 0]
    return slots._replace(
        state=put_row(slots.state, slot, row),
        logits=slots.logits.at[slot].set(logits),
        active=slots.active.at[slot].set(last),
    )


class Block(NamedTuple):
    """Up to BLOCK tokens of every slot."""

    tokens: Int[Array, "B N"]
    logprobs: Float[Array, "B N"]  # as `sample_tokens` gives them
    counts: Int[Array, " B"]  # of them real
    active: Bool[Array, " B"]  # slots that go on


@program(("weights", "slots", None, None), ("slots", None), donate=1)
def generate_block(
    cfg: K3Config,
    weights: Weights,
    slots: Slots,
    keep: Bool[Array, " B"],
    allowed: Bool[Array, " X"],
) -> tuple[Slots, Block]:
    """BLOCK one-token steps, or fewer if before that no slot is active.

    A slot ends with a stop token, which is part of its tokens, or at its limit. Ended and free ones
    take part in every step and change nothing: their tokens are padding, their state stays.

    Args:
        keep: False ends a slot before the first step.
        allowed: as in `sample_tokens`.
    """
    model = _model(cfg, weights)
    rows = jnp.arange(keep.shape[0])

    def running(loop):
        i, slots, _ = loop
        return (i < BLOCK) & slots.active.any()

    def step(loop):
        i, slots, block = loop
        how = jax.tree.map(
            lambda own, idle: jnp.where(slots.active, own, idle),
            slots.sampling,
            sampling_rows([IDLE]),
        )
        token, logprob = sample_tokens(
            slots.logits, slots.seed, slots.count, how, allowed=allowed, seen=slots.seen
        )
        token = pmax(token, *AXES)  # rounding that differs from device to device parts no ways
        count = slots.count + slots.active
        stopped = (token[:, None] == slots.stop_ids).any(1)
        going = slots.active & ~stopped & (count < slots.limit)
        block = Block(
            block.tokens.at[:, i].set(token),
            block.logprobs.at[:, i].set(logprob),
            block.counts + slots.active,
            going,
        )
        h, _, state = model.hidden(
            token[:, None], segment_ids=going[:, None].astype(jnp.int32), state=slots.state
        )
        slots = slots._replace(
            state=state,
            logits=model.logits(h)[:, 0],
            seen=slots.seen.at[rows, token].max(slots.active),
            active=going,
            count=count,
        )
        return i + 1, slots, block

    slots = slots._replace(active=slots.active & keep)
    empty = jnp.zeros((keep.shape[0], BLOCK))
    block = Block(empty.astype(jnp.int32), empty, jnp.zeros_like(slots.count), slots.active)
    _, slots, block = jax.lax.while_loop(running, step, (jnp.int32(0), slots, block))
    return slots, block
