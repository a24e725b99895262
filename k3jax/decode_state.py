"""Decode state of the hybrid model: conv inputs and memory for KDA, latents for MLA, one length per row."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from k3jax.layers.kda import KDACache
from k3jax.layers.mla import MLACache

Cache = KDACache | MLACache


class DecodeState(NamedTuple):
    """Everything needed to continue a batch of sequences.

    length: tokens consumed so far by each row, int32.
    caches: stack -> layer -> cache, as the parameters lie, with their leading axis.
    """

    length: Int[Array, " B"]
    caches: dict[str, dict[str, Cache]]


def state_bytes(state: DecodeState) -> int:
    """Bytes held by a state, real or abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def compact_rows(
    tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"]]:
    """Move each row's real tokens to the front, in order; padding goes to the right.

    Returns: tokens, segment ids (1 real, 0 padding), and for each slot the column that it came from.
    """
    order = jnp.argsort(~mask, axis=1, stable=True)
    take = jax.vmap(lambda row, idx: row[idx])
    return take(tokens, order), take(mask.astype(jnp.int32), order), order


class SlotPool:
    """Which slots of a pool of states are in use: what a server asks before it launches a step."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))

    def allocate(self) -> int | None:
        """A free slot, or None if there is no free slot. What it holds is the last user's."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        if not 0 <= slot < self.size or slot in self._free:
            raise ValueError(f"slot {slot} is not in use; the pool has slots 0 to {self.size - 1}")
        self._free.append(slot)
