"""What both TPU kernels of KDA share: the order of issue, and a chunk's operands.

README.md derives the algorithm and draws the tiles. Names follow it: a chunk has 64 tokens, a tile
16; rows (q, k) look back in time, columns (beta k) are looked back at. Log-decays are in base 2
here, so that every decay is one exp2.

A grid step holds several independent chains (a chunk of a head). A matmul returns after 150 to 250
cycles, so a chain is cut into pieces that the kernels emit in turn with those of other chains, by
a timetable; the compiler keeps close to the order in which it gets them.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.kda.gates import LOG2E

CHUNK, TILE, TILES = 64, 16, 4
CENTRE = 2.0**60
Piece = Iterator[None]
Chain = tuple[int, int, int]  # index, chunk, head


class Timed(NamedTuple):
    """A piece of work that starts at a time, and goes on until its next yield every `pace`.

    The unit of time is what a step spends on one chunk of all its heads.
    """

    start: float
    pace: float
    piece: Piece


def emit(work: list[Timed]) -> None:
    """Emits all pieces by their timetable."""
    queue = [(start, n, pace, piece) for n, (start, pace, piece) in enumerate(work)]
    heapq.heapify(queue)
    while queue:
        time, n, pace, piece = heapq.heappop(queue)
        if next(piece, "ended") != "ended":
            heapq.heappush(queue, (time + pace, n, pace, piece))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shape of a grid step and the static choices of a call."""

    chunks: int  # chunks per grid step
    heads: int  # heads per grid step
    K: int  # key channels, a multiple of 128
    V: int  # value channels, a multiple of 128
    dtype: str  # of matmul operands: bfloat16 or float32
    gate: str | None  # how z becomes g: bounded, or None where g is given
    g_min: float  # nats per token, >= -5: 16 tokens of it fit the range of float32
    q_scale: float | None  # L2-normalise q and k, and multiply q by this; None: use both as given
    erase: bool  # the delta rule; False writes without correcting
    masked: bool  # documents start inside chunks, or there is padding
    snapshots: bool  # forward: return the memory entering every chunk, in float32
    save: bool = False  # forward: return what the backward kernel needs
    names: tuple[str, ...] = ()  # of the kernel's references, in order

    @property
    def tokens(self) -> int:
        return self.chunks * CHUNK

    @property
    def chains(self) -> list[Chain]:
        """Every chain of a step."""
        return [(c * self.heads + h, c, h) for c in range(self.chunks) for h in range(self.heads)]


def dot(a, b, contract: str = "nn"):
    """a b, a b^T ("nt") or a^T b ("tn"), accumulated in float32; float32 operands at full precision."""
    axes = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}[contract]
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def halves(x):
    """float32 as a sum of two numbers of bfloat16, to 16 bits: the upper half of the word, the rest.

    One above the other and rounded together: two bfloat16 arrays would be repacked on a v5e.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.concatenate([high, x - high], 0).astype(jnp.bfloat16)


def fine_dot(plan: Plan, a, b):
    """a b of float32 operands inside the triangular inverse: all of it, or 16 bits for bfloat16 runs."""
    if plan.dtype == "float32":
        return dot(a, b)
    n, a, b = a.shape[1], halves(a), halves(b)
    return halves_dot(a, b[:n], b[n:])


def halves_dot(a, high, low):
    """The product of two sums of two bfloat16 numbers, a's as `halves` gives them: three of four."""
    m = a.shape[0] // 2
    both = dot(a, high)
    return both[:m] + (both[m:] + dot(a[:m], low))


def fine_sums(plan: Plan, ones, x):
    """ones x for a 0/1 matrix, given twice side by side: sums exact to 16 bits of x or better."""
    if plan.dtype == "float32":
        return dot(ones[:, :CHUNK], x)
    return dot(ones, halves(x))


def iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def tile(I: int) -> slice:
    return slice(TILE * I, TILE * (I + 1))


def between(I: int, J: int) -> slice:
    """Where the columns of tile J lie that are decayed up to the start of tile I > J."""
    start = TILE * (I * (I - 1) // 2 + J)
    return slice(start, start + TILE)


def earlier(I: int) -> slice:
    """`between(I, J)` of all J: where the columns of the tiles before I lie for the rows of I."""
    return slice(between(I, 0).start, between(I, I - 1).stop)


class Step:
    """Where a chain's data lie, and the operands of its matmuls, made from the inputs.

    E, the decay from the start of a token's tile to the token, multiplies rows, 1 / E columns of
    the same tile: 16 tokens of at most 5 nats stay inside the range of float32 and bfloat16. The
    factor CENTRE on one side and its inverse on the other keep small q and k off the lower end.
    Columns of earlier tiles decay to the end of theirs and over the tiles in between.
    """

    def __init__(self, plan: Plan, refs: SimpleNamespace):
        self.plan, self.refs = plan, refs
        self.op = jnp.dtype(plan.dtype)
        self.i, self.j = iota((CHUNK, CHUNK), 0), iota((CHUNK, CHUNK), 1)
        i, j = iota((CHUNK, 2 * CHUNK), 0), iota((CHUNK, 2 * CHUNK), 1) % CHUNK
        within = (i // TILE == j // TILE) & (i >= j)
        self.to_row = jnp.where(within, 1.0, 0.0).astype(self.op)  # from the start of the tile

    def tokens(self, c: int) -> slice:
        return slice(c * CHUNK, (c + 1) * CHUNK)

    def keys(self, c: int, h: int) -> tuple[slice, slice]:
        """Where chunk c of head h lies in a block of keys."""
        return self.tokens(c), slice(h * self.plan.K, (h + 1) * self.plan.K)

    def values(self, c: int, h: int) -> tuple[slice, slice]:
        return self.tokens(c), slice(h * self.plan.V, (h + 1) * self.plan.V)

    def live(self, x, c: int, t: slice = slice(0, CHUNK)):
        """x [tokens, X], zero at padding whatever it is there."""
        if not self.plan.masked:
            return x
        return jnp.where(self.refs.live[c, t, : x.shape[1]] > 0, x, 0.0)

    def near(self, x, c: int, *, strictly: bool):
        """x [64, 64], zero where the row may not see the column: later, or of another document."""
        seen = self.i > self.j if strictly else self.i >= self.j
        if self.plan.masked:
            seen = seen & (self.refs.alike[c] > 0)
        return jnp.where(seen, x, 0.0)

    def log_decay(self, c: int, h: int):
        """g in bits per token (architecture.md 5.3)."""
        plan, where = self.plan, self.keys(c, h)
        x = self.refs.g[where].astype(jnp.float32)
        if plan.gate == "bounded":
            grown = self.grown(x, where[1])
            g = (plan.g_min * LOG2E) * pltpu.reciprocal(1.0 + grown, full_range=False)
        else:
            g = x * LOG2E
        return self.live(g, c)

    def grown(self, z, head: slice):
        """exp(-exp(A) (z + dt)), what the gate's sigmoid adds 1 to."""
        slope, bias = self.refs.gate[0:1, head], self.refs.gate[1:2, head]
        return jnp.exp2(jnp.minimum(z * slope + bias, 126.0))

    # Pieces; nothing here depends on the memory.

    def numbers(self, c) -> Piece:
        """What is a number per token, copied along the lanes: the marks, then beta of each head."""
        plan, refs = self.plan, self.refs
        x, wide = refs.rows[0, c].T, (CHUNK, max(plan.K, plan.V))
        yield
        if plan.masked:
            live, starts = (x[:, n : n + 1] for n in (plan.heads, plan.heads + 1))
            last = starts[CHUNK - 1 :]
            if hasattr(refs, "late_live"):
                refs.late_live[c] = refs.live[c]
            refs.live[c] = jnp.broadcast_to(live, wide)
            yield
            refs.enters[c] = jnp.broadcast_to(jnp.where(starts == 0, 1.0, 0.0), wide)
            yield
            refs.leaves[c] = jnp.broadcast_to(jnp.where(starts == last, 1.0, 0.0), wide)
            refs.passes[c] = jnp.broadcast_to(jnp.where(last == 0, 1.0, 0.0), (1, wide[1]))
            yield
            same = starts == refs.rows[0, c, plan.heads + 1 : plan.heads + 2]
            refs.alike[c] = jnp.where(same, 1.0, 0.0)
            yield
        for h in range(plan.heads):
            refs.beta[c * plan.heads + h] = jnp.broadcast_to(x[:, h : h + 1], (CHUNK, plan.K))
            yield

    def decays(self, a, c, h) -> Piece:
        """refs.sums = the sum of g from the start of a token's tile."""
        refs = self.refs
        g = self.log_decay(c, h)
        yield
        refs.sums[a] = fine_sums(self.plan, self.to_row, g)
        if hasattr(refs, "decay"):
            refs.decay[a] = g
        yield

    def keys_to_unit(self, a, c, h) -> Piece:
        yield from self._unit("k", 1.0, a, c, h)

    def queries_to_unit(self, a, c, h) -> Piece:
        yield from self._unit("q", self.plan.q_scale, a, c, h)

    def _unit(self, name, scale, a, c, h) -> Piece:
        refs = self.refs
        x = self.live(getattr(refs, name)[self.keys(c, h)].astype(jnp.float32), c)
        yield
        if self.plan.q_scale is not None:
            length = jax.lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) + 1e-6) * scale
            yield
            x = x * length
            if hasattr(refs, name + "_norm"):
                getattr(refs, name + "_norm")[a] = jnp.broadcast_to(length, (CHUNK, self.plan.K))
        getattr(refs, name + "_unit")[a] = x
        yield

    def totals(self, a, c, h) -> Piece:
        """refs.totals: the decay over every tile, then from the chunk's start to that of every tile.

        Of the latter CENTRE is divided out: rows, which are multiplied by it, already have that.
        """
        plan, refs = self.plan, self.refs
        before = 1 / CENTRE
        for I in range(TILES):
            total = jnp.exp2(refs.sums[a, TILE * I + TILE - 1 : TILE * I + TILE])
            refs.totals[a, I : I + 1] = total
            refs.totals[a, TILES + I : TILES + I + 1] = jnp.broadcast_to(before, total.shape)
            before = before * total
        yield
        through = before * CENTRE
        refs.through[a] = through * refs.passes[c, :, : plan.K] if plan.masked else through
        yield

    def rows(self, a, c, h, I: int) -> Piece:
        """One tile of q and k as rows, decayed from the start of the tile and of the chunk."""
        plan, refs, op, t = self.plan, self.refs, self.op, tile(I)
        E = jnp.exp2(refs.sums[a, t])
        yield
        E = E * CENTRE
        yield
        for unit, near, far in ((refs.q_unit, 0, 0), (refs.k_unit, TILE, CHUNK)):
            x = unit[a, t] * E
            yield
            refs.near_rows[a, 2 * TILE * I + near : 2 * TILE * I + near + TILE] = x.astype(op)
            yield
            x = x * self.before(a, I)
            if plan.masked:
                x = x * refs.enters[c, t, : plan.K]
            yield
            refs.far_rows[a, far + TILE * I : far + TILE * (I + 1)] = x.astype(op)
            yield

    def columns(self, a, c, h, J: int) -> Piece:
        """One tile of beta k as columns, for rows of its own tile, of later ones, and the memory."""
        plan, refs, op, t = self.plan, self.refs, self.op, tile(J)
        inverse = jnp.exp2(-refs.sums[a, t])
        yield
        x = refs.k_unit[a, t] * refs.beta[a, t]
        yield
        x = x * (inverse * (1 / CENTRE))
        yield
        refs.near_columns[a, t] = x.astype(op)
        yield
        later, far = self.further(a, J)
        for I, decay in later.items():
            refs.between_columns[a, between(I, J)] = (x * decay).astype(op)
            yield
        x = x * far
        if plan.masked:
            x = x * refs.leaves[c, t, : plan.K]
        yield
        refs.far_columns[a, t] = x.astype(op)
        yield

    def before(self, a, I: int):
        """The decay from the chunk's start to that of tile I, over CENTRE."""
        return self.refs.totals[a, TILES + I : TILES + I + 1]

    def further(self, a, J: int):
        """The decay from the start of tile J to that of each later tile; CENTRE times that to the end."""
        totals = [self.refs.totals[a, I : I + 1] for I in range(J, TILES)]
        decay, later = totals[0], {}
        for I in range(J + 1, TILES):
            later[I] = decay
            decay = decay * totals[I - J]
        far = CENTRE
        for total in totals:
            far = far * total
        return later, far

    def columns_for(self, a, I: int):
        """What the rows of tile I look back at: tiles 0 ... I."""
        near = self.refs.near_columns[a, tile(I)]
        if I == 0:
            return near
        return jnp.concatenate([self.refs.between_columns[a, earlier(I)], near], 0)
