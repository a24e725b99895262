"""Rows of tokens cut into contiguous windows along the mesh axis `context`, one per rank.

What a rank needs of the others: tokens next to its window, and the memory that enters it. Inside
the region; the identity for an axis of size 1.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from k3jax.sharding.annotate import axis_index, axis_size, concatenated

AXIS = "context"
# Up to so many ranks every rank receives the summaries of all others in one all-gather, (P - 1) x
# 12.58 MB per row and K3 layer (kcp.md, 8): one round, and a ring moves it in both directions at
# once. Beyond the GPUs of a host the bytes and the buffer for them (805 MB at 64 ranks) weigh more
# than rounds: a scan by doubling receives log2 P x 12.58 MB, 75 MB at 64, in log2 P rounds.
MOST_GATHERED = 8

Form = Literal["gather", "scan"]


def window_size(tokens: int, ranks: int) -> int:
    """Tokens per rank of a row.

    Raises: ValueError naming row length and ranks if they do not divide: a window that is longer
        than the others would hand its memory on at the wrong token (KF-014).
    """
    if tokens % ranks:
        longer = -(-tokens // ranks) * ranks
        raise ValueError(
            f"a row of {tokens} tokens does not divide over {ranks} context ranks: pad it to "
            f"{longer}, or change --mesh.context"
        )
    return tokens // ranks


def window(x: Array, length: int, axis: int = 1) -> Array:
    """This rank's part, `length` tokens, of whole rows; x itself if that is all of it.

    Raises: ValueError if the rows do not consist of one such window per rank.
    """
    if x.shape[axis] == length:
        return x
    ranks = axis_size(AXIS)
    if window_size(x.shape[axis], ranks) != length:
        raise ValueError(
            f"a row of {x.shape[axis]} tokens on {ranks} context ranks has windows of "
            f"{x.shape[axis] // ranks} tokens, not of {length}"
        )
    return jax.lax.dynamic_slice_in_dim(x, axis_index(AXIS) * length, length, axis)


def gather_tokens(x: Array) -> Array:
    """The whole rows [B, T, ...] of all ranks' windows; the gradient sums over the ranks."""
    return concatenated(x, 1, AXIS)


def halo(x: Array, size: int, before: Array | None = None) -> Array:
    """The `size` tokens in front of this rank's window, those next to it last.

    Args:
        x: the window [B, T, ...], or, as no more is needed, its last min(size, T) tokens. Where a
            window is shorter than `size`, tokens come from ranks further back.
        size: tokens, at least 1.
        before: what lies in front of the row [B, size, ...], the same on all ranks; None: zeros.

    Cost: one neighbour exchange of `size` tokens (one per window that they reach over).
    """
    ranks = axis_size(AXIS)
    x = x[:, -size:]
    held = x.shape[1]
    if before is None:
        before = jnp.zeros((x.shape[0], size, *x.shape[2:]), x.dtype)
    if ranks == 1:
        return before
    hops = min(-(-size // held), ranks - 1)
    pieces = [_shift(x, hop) for hop in range(hops, 0, -1)]
    tokens = jnp.concatenate(pieces, axis=1)[:, -size:]
    missing = [(0, 0)] * x.ndim
    missing[1] = (size - tokens.shape[1], 0)
    # A rank whose window begins at token n < size sees the last size - n tokens of `before`.
    outside = [(0, 0)] * x.ndim
    outside[1] = (0, size)
    at = jnp.minimum(axis_index(AXIS) * held, size)
    outer = jax.lax.dynamic_slice_in_dim(jnp.pad(before, outside), at, size, axis=1)
    return jnp.pad(tokens, missing) + outer.astype(x.dtype)


def from_next(x: Array) -> Array:
    """The first token [B, 1, ...] of the window after this one; zeros after the last."""
    return jnp.zeros_like(x[:, :1]) if axis_size(AXIS) == 1 else _shift(x[:, :1], -1)


def from_owner(x: Array, owned: Bool[Array, "..."]) -> Array:
    """On every rank the x of the one rank where `owned`, which broadcasts against x, is true."""
    return x if axis_size(AXIS) == 1 else jax.lax.psum(jnp.where(owned, x, 0), AXIS)


def entering_state(
    transition: Float[Array, "B H K K"] | None,
    zero_start_state: Float[Array, "B H K V"],
    state_in: Float[Array, "B H K V"] | None = None,
    *,
    form: Form | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H K V"] | None]:
    """The memory entering this rank's window, of what every window does to a memory.

        S_out = M S_in + E,   (M_2, E_2) after (M_1, E_1) = (M_2 M_1, M_2 E_1 + E_2)   (kcp.md, 2)

    Not differentiable: `leaving_gradient` is the adjoint.

    Args:
        transition: M of this window, float32. May be None for 2 ranks without `state_in`, where no
            memory crosses a whole window.
        zero_start_state: E of this window, float32.
        state_in: memory in front of the row, the same on all ranks; None: zeros.
        form: how ranks exchange summaries; None chooses by the size of the axis.

    Returns: the entering memory, and, if `state_in` is given, the one after the last rank, the same
        on all ranks.
    Numerics: float32, full precision: products of rounded transitions drift with P (KF-015).
    """
    return _fold(transition, zero_start_state, state_in, False, form)


def leaving_gradient(
    transition: Float[Array, "B H K K"] | None,
    entering_gradient: Float[Array, "B H K V"],
    d_last: Float[Array, "B H K V"] | None = None,
    *,
    form: Form | None = None,
) -> Float[Array, "B H K V"]:
    """The gradient of the memory leaving this rank's window: dS_in = M^T dS_out + dE, from the last
    rank to the first  (kcp.md, 5).

    Args:
        entering_gradient: dE, that of the memory entering the window, from the window's outputs.
        d_last: gradient of the memory after the last rank: this rank's share of it.
    """
    if d_last is not None and axis_size(AXIS) > 1:
        d_last = jax.lax.psum(d_last, AXIS)
    transposed = None if transition is None else jnp.swapaxes(transition, -1, -2)
    return _fold(transposed, entering_gradient, d_last, True, form)[0]


def _shift(x: Array, distance: int) -> Array:
    """x of the rank `distance` before this one; zeros where there is none."""
    ranks = axis_size(AXIS)
    pairs = [(i, i + distance) for i in range(ranks) if 0 <= i + distance < ranks]
    return jax.lax.ppermute(x, AXIS, pairs)


def _fold(M, E, start, backwards: bool, form: Form | None):
    """The value before this rank's window, and after all windows (None without `start`)."""
    ranks = axis_size(AXIS)
    if M is None and (ranks > 2 or start is not None):
        raise ValueError(f"{ranks} ranks or a memory in front of the row need the transition")
    if ranks == 1:
        before = jnp.zeros_like(E) if start is None else start
        return before, None if start is None else _apply(M, before, E)
    form = form or ("gather" if ranks <= MOST_GATHERED else "scan")
    return (_by_gather if form == "gather" else _by_scan)(M, E, start, backwards, ranks)


def _by_gather(M, E, start, backwards, ranks):
    K, rank = E.shape[-2], axis_index(AXIS)
    pairs = jax.lax.all_gather(E if M is None else jnp.concatenate([M, E], axis=-1), AXIS)
    place = ranks - 1 - rank if backwards else rank

    def step(i, S):
        at = ranks - 1 - i if backwards else i
        pair = jax.lax.dynamic_index_in_dim(pairs, at, keepdims=False)
        return pair if M is None else _apply(pair[..., :K], S, pair[..., K:])

    before = jax.lax.fori_loop(0, place, step, jnp.zeros_like(E) if start is None else start)
    return before, None if start is None else jax.lax.fori_loop(place, ranks, step, before)


def _by_scan(M, E, start, backwards, ranks):
    """Doubling: after each round a rank knows twice as many of the windows before its own."""
    K, rank = E.shape[-2], axis_index(AXIS)
    place = ranks - 1 - rank if backwards else rank
    M_before, E_before = None, jnp.zeros_like(E)  # of the windows before; None: the identity
    M_to, E_to = M, E  # of those and this one
    distance = 1
    while distance < ranks:
        shift = -distance if backwards else distance
        if 2 * distance >= ranks and start is None:  # nothing enters: what a memory becomes is moot
            E_far, M_far = _shift(E_to, shift), None
        else:
            pair = _shift(jnp.concatenate([M_to, E_to], axis=-1), shift)
            M_far = jnp.where(place < distance, jnp.eye(K, dtype=E.dtype), pair[..., :K])
            E_far = pair[..., K:]
        if M_before is None:
            M_before, E_before = M_far, E_far
        else:
            E_before = _apply(M_before, E_far, E_before)
            M_before = None if M_far is None else _apply(M_before, M_far)
        distance *= 2
        if distance < ranks:
            assert M_before is not None
            M_to, E_to = _apply(M, M_before), _apply(M, E_before, E)
    if start is None:
        return E_before, None
    assert M_before is not None
    before = _apply(M_before, start, E_before)
    return before, from_owner(_apply(M, before, E), place == ranks - 1)


def _apply(M: Array, S: Array, E: Array | float = 0.0) -> Array:
    return jnp.matmul(M, S, precision=jax.lax.Precision.HIGHEST) + E
