"""Where the tokens of a call lie for a fused kernel: every document fills whole blocks."""

import jax.numpy as jnp


def cut_segments(x, size: int):
    """[B, T, ...] to [segments, B, size, ...]; what is left of T stays behind."""
    x = x[:, : x.shape[1] // size * size]
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]), 1, 0)


def join_segments(x):
    """The way back."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Rows:
    """[B, T, X] to [B T', X] and back: every row of the batch fills whole blocks."""

    def __init__(self, B: int, T: int, block: int):
        self.B, self.T, self.padded = B, T, round_up(T, block)

    def __call__(self, x):
        x = jnp.pad(x, ((0, 0), (0, self.padded - self.T), (0, 0)))
        return x.reshape(self.B * self.padded, x.shape[-1])

    def back(self, x):
        return x.reshape(self.B, self.padded, x.shape[-1])[:, : self.T]


class Documents:
    """[1, T, X] to [T', X] and back: every packed document begins a block."""

    def __init__(self, source, slot):
        self.source, self.slot = source, slot

    def __call__(self, x):
        return jnp.take(x[0], self.source, axis=0, mode="fill", fill_value=0)

    def back(self, x):
        return jnp.take(x, self.slot, axis=0, mode="fill", fill_value=0)[None]


def layout(B: int, T: int, block: int, cu_seqlens):
    """Where tokens lie, and the document of each block."""
    if cu_seqlens is None:
        place = Rows(B, T, block)
        return place, jnp.repeat(jnp.arange(B, dtype=jnp.int32), place.padded // block)
    N = cu_seqlens.shape[0] - 1
    blocks = T // block + N  # the most that any division of T tokens can need
    lengths = jnp.diff(cu_seqlens)
    ends = jnp.cumsum(-(-lengths // block))
    begins = ends - -(-lengths // block)
    owner = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    owner = jnp.minimum(owner, jnp.max(jnp.where(lengths > 0, jnp.arange(N), 0)))
    offset = jnp.arange(blocks * block) - jnp.repeat(begins[owner], block) * block
    document = jnp.repeat(owner, block)
    inside = offset < lengths[document]
    source = jnp.where(inside, cu_seqlens[document] + offset, T)
    token = jnp.arange(T)
    document = jnp.clip(jnp.searchsorted(cu_seqlens, token, side="right") - 1, 0, N - 1)
    slot = begins[document] * block + token - cu_seqlens[document]
    slot = jnp.where((token >= cu_seqlens[0]) & (token < cu_seqlens[-1]), slot, blocks * block)
    return Documents(source, slot), owner.astype(jnp.int32)
