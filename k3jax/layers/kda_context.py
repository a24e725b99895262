"""KDA over rows that several ranks share: where the op and the collectives of its memory meet.

Every rank has a window of the row. A window does S_out = M S_in + E to a memory, so ranks exchange
the two fixed-size matrices M and E, from which each works out the memory that enters its window
(kcp.md). `kda` and `kda_from_logits` are the ops of the same name with two differences: without a
`state` they return None in place of the memory, and `segment_ids` are those of the whole row.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.kda import api
from k3jax.pallas_kernels.kda.gates import l2_normalize, log_decay, normalize_query
from k3jax.pallas_kernels.kda.summary import segment_gradient, segment_summary
from k3jax.sharding import context_parallel
from k3jax.sharding.annotate import axis_index, axis_size

logger = logging.getLogger("k3jax")


def ranks() -> int:
    """Windows that a row is cut into."""
    return axis_size(context_parallel.AXIS)


def own(segment_ids: Int[Array, "B T"] | None, tokens: int) -> Int[Array, "B W"] | None:
    """Segment ids of this rank's window of so many tokens."""
    return None if segment_ids is None else context_parallel.window(segment_ids, tokens)


def _first_own_document(segment_ids: Int[Array, "B T"], tokens: int) -> Int[Array, "B 1"]:
    return _first_document(context_parallel.window(segment_ids, tokens))


def continues(segment_ids: Int[Array, "B T"], tokens: int) -> Bool[Array, " B"]:
    """Whether the window goes on with the document of the last real token before it.

    True too for a window of padding and where only padding lies before: what is handed through
    belongs to the next real token.
    """
    real, token = segment_ids > 0, jnp.arange(segment_ids.shape[1])
    begin = axis_index(context_parallel.AXIS) * tokens
    before = jnp.max(jnp.where(real & (token < begin), token, -1), axis=1, keepdims=True)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    first = _first_own_document(segment_ids, tokens)
    return ((before < 0) | (first == 0) | (first == previous))[:, 0]


def _first_document(segment_ids: Int[Array, "B T"]) -> Int[Array, "B 1"]:
    """Id of the first real token; 0 if there is none."""
    first = jnp.argmax(segment_ids > 0, axis=1)[:, None]
    return jnp.take_along_axis(segment_ids, first, axis=1)


def conv_past(
    streams: tuple[Float[Array, "B T H K"], ...],
    size: int,
    cache: Float[Array, "B size S H K"] | None,
    segment_ids: Int[Array, "B row"] | None,
) -> Float[Array, "B size S H K"]:
    """The inputs in front of this rank's window, for `short_conv_streams` as its cache.

    They are zero where they belong to another document than the window's first real token; no later
    token of the window may see them either.
    """
    x = jnp.stack([stream[:, -size:] for stream in streams], axis=2)
    past = context_parallel.halo(x, size, before=cache)
    if segment_ids is None:
        return past
    # As without ranks, what lies before the row belongs to its first document.
    outside = jnp.repeat(_first_document(segment_ids), size, axis=1)
    T = streams[0].shape[1]
    around = jnp.concatenate([outside, segment_ids], axis=1)
    begin = axis_index(context_parallel.AXIS) * T
    document = jax.lax.dynamic_slice_in_dim(around, begin, size, axis=1)
    same = document == _first_own_document(segment_ids, T)
    return jnp.where(same[..., None, None, None], past, 0)


def conv_cache(
    new: Float[Array, "B size S H K"], segment_ids: Int[Array, "B row"] | None, tokens: int
) -> Float[Array, "B size S H K"]:
    """The inputs before the end of the row, on all ranks, of those before each window's end."""
    last = jnp.full((new.shape[0],), ranks() * tokens - 1)
    if segment_ids is not None:
        token = jnp.arange(segment_ids.shape[1])
        last = jnp.max(jnp.where(segment_ids > 0, token, 0), axis=1)
    owned = last // tokens == axis_index(context_parallel.AXIS)
    return context_parallel.from_owner(new, owned[:, None, None, None, None])


@dataclass(frozen=True, kw_only=True)
class _Op:
    """The op of a window: its static settings."""

    from_logits: bool  # raw q, k and decay logits, or normalised ones and log-decays
    g_min: float | None
    chunk_size: int
    backend: str | None

    def __call__(self, arrays, state, segment_ids):
        q, k, v, decay, beta, gate = arrays
        run = api.kda_from_logits if self.from_logits else api.kda
        return run(
            q, k, v, decay, beta, *gate, g_min=self.g_min, state=state, segment_ids=segment_ids,
            chunk_size=self.chunk_size, backend=self.backend,
        )  # fmt: skip

    def activated(self, arrays):
        """q, k, v, g and beta."""
        q, k, v, decay, beta, gate = arrays
        if not self.from_logits:
            return q, k, v, decay, beta
        A_log, dt_bias = gate
        z = decay.astype(jnp.promote_types(q.dtype, jnp.float32)) + dt_bias
        return normalize_query(q), l2_normalize(k), v, log_decay(z, A_log, self.g_min), beta


def kda_from_logits(
    q, k, v, z, beta, A_log, dt_bias, *, g_min, state, segment_ids, chunk_size, backend
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """`kda` of raw projections (`pallas_kernels.kda.kda_from_logits`) on windows of rows."""
    op = _Op(from_logits=True, g_min=g_min, chunk_size=chunk_size, backend=backend)
    return _run(op, (q, k, v, z, beta, (A_log, dt_bias)), state, segment_ids)


def kda(
    q, k, v, g, beta, *, g_min, state, segment_ids, chunk_size, backend
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Kimi Delta Attention (`pallas_kernels.kda.kda`) on windows of rows.

    Args:
        q, k, v, g, beta: of this rank's window.
        state: memory entering the row's first token, the same on all ranks, or None.
        segment_ids: of the whole row.

    Returns: outputs of the window; with `state` the memory after the row, the same on all ranks.
    Numerics: M, E, and the memories made of them are float32.
    Cost: forward and backward each one pass over the window more, without outputs, and one exchange
        of M and E, whose size does not depend on T. A recomputed layer repeats those of its forward.
    """
    op = _Op(from_logits=False, g_min=g_min, chunk_size=chunk_size, backend=backend)
    return _run(op, (q, k, v, g, beta, ()), state, segment_ids)


def gathered(mix: Callable, q, k, v, g, beta, state, segment_ids):
    """A recurrence that has no summary: every rank runs whole rows and keeps its window."""
    _log_gathered(mix.__qualname__)
    rows = (context_parallel.gather_tokens(x) for x in (q, k, v, g, beta))
    o, state = mix(*rows, state, segment_ids)
    return context_parallel.window(o, q.shape[1]), state


@functools.cache
def _log_gathered(name: str) -> None:
    logger.info(
        "%s has no summary of a window: every context rank runs it on whole rows (slow)", name
    )


def _run(op: _Op, arrays, state, segment_ids):
    q = arrays[0]
    if state is not None:
        state = state.astype(jnp.promote_types(q.dtype, jnp.float32))
    return _on_window(op, arrays, state, segment_ids)


def _if_continued(x, segment_ids, tokens: int):
    """x [B H ...], but zeros where the window begins with a new document."""
    if segment_ids is None:
        return x
    return jnp.where(continues(segment_ids, tokens)[:, None, None, None], x, 0)


def _zeros(function: Callable):
    """Zeros in place of what a function without arguments returns."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_window(op: _Op, arrays, state, segment_ids):
    entering, last, _ = _enter(op, arrays, state, segment_ids)
    return op(arrays, entering, own(segment_ids, arrays[0].shape[1]))[0], last


def _enter(op: _Op, arrays, state, segment_ids):
    """The memory entering the window, that after the row if `state` is given, and M."""
    q, k, v, g, beta = op.activated(arrays)
    ids = own(segment_ids, q.shape[1])
    crossed = ranks() > 2 or state is not None  # otherwise no memory crosses a whole window

    def summary():
        return segment_summary(
            k, v, g, beta, segment_ids=ids, g_min=op.g_min, chunk_size=op.chunk_size,
            transition=crossed,
        )  # fmt: skip

    if state is None:  # nobody is after the last rank
        before = axis_index(context_parallel.AXIS) < ranks() - 1
        M, E = jax.lax.cond(before, summary, lambda: _zeros(summary))
    else:
        M, E = summary()
    # Nothing gets through a document's first token; that alone keeps documents apart (kcp.md, 6).
    M = None if M is None else _if_continued(M, segment_ids, q.shape[1])
    entering, last = context_parallel.entering_state(M, E, state)
    entering = _if_continued(entering, segment_ids, q.shape[1])
    return entering, last, M


def _forward(op: _Op, arrays, state, segment_ids):
    entering, last, M = _enter(op, arrays, state, segment_ids)
    ids = own(segment_ids, arrays[0].shape[1])
    (o, _), pull = jax.vjp(lambda arrays, memory: op(arrays, memory, ids), arrays, entering)
    return (o, last), (arrays, segment_ids, M, pull)


def _backward(op: _Op, saved, cotangents):
    """The memory's gradient runs from the last rank to the first; the rest is the op's own."""
    arrays, segment_ids, M, pull = saved
    d_o, d_last = cotangents
    q, k, _, g, beta = op.activated(arrays)
    rank, ids = axis_index(context_parallel.AXIS), own(segment_ids, q.shape[1])

    def gradient():
        return segment_gradient(
            q, k, g, beta, d_o, segment_ids=ids, g_min=op.g_min, chunk_size=op.chunk_size
        )

    d_E = jax.lax.cond(rank > 0, gradient, lambda: _zeros(gradient))  # nobody is before rank 0
    d_E = _if_continued(d_E, segment_ids, q.shape[1])
    d_arrays, d_entering = pull((d_o, context_parallel.leaving_gradient(M, d_E, d_last)))
    # Every rank differentiates its share: the memory in front of the row enters at rank 0 only.
    d_state = None if d_last is None else jnp.where(rank == 0, d_entering, 0)
    return d_arrays, d_state, None


_on_window.defvjp(_forward, _backward)
