"""Slots of a state pool: which rows of a large array belong to the requests of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def check_slots(slots: Int[Array, " B"], size: int) -> None:
    """Raises if two requests share a slot, or if one names a slot that the pool does not have.

    For the host, before it launches a compiled step: of traced ids nothing is known, and `read`
    and `write` treat one outside 0 .. size - 1 as an idle row of the batch.
    """
    if isinstance(slots, jax.core.Tracer):
        return
    ids = np.asarray(slots)
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        bad = ids[(ids < 0) | (ids >= size)][0]
        raise ValueError(f"slots: id {bad} is outside the pool, which has slots 0 to {size - 1}")
    if len(set(ids.tolist())) < ids.size:
        raise ValueError(f"slots: {ids.tolist()} names a slot twice; one request per slot")


def read(
    pool: Float[Array, "N ..."],
    slots: Int[Array, " B"] | None,
    has_state: Bool[Array, " B"] | None,
) -> Float[Array, "B ..."]:
    """The states of a batch.

    Args:
        pool: all states; with `slots` None, the batch itself.
        slots: each request's row of the pool; an id outside it reads zeros.
        has_state: False for a request without history: it reads zeros, whatever its slot holds.
    """
    if slots is not None:
        pool = pool.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    if has_state is not None:
        # A select: a slot that was given back may hold anything, NaN included.
        pool = jnp.where(has_state.reshape(-1, *[1] * (pool.ndim - 1)), pool, 0)
    return pool


def write(
    pool: Float[Array, "N ..."], slots: Int[Array, " B"], new: Float[Array, "B ..."]
) -> Float[Array, "N ..."]:
    """The pool with the batch's new states; a write outside it is dropped, never moved elsewhere.

    In place if the compiled step donates the pool.
    """
    return pool.at[slots].set(new, mode="drop", wrap_negative_indices=False)
