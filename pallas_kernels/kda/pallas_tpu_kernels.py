"""The two Pallas kernels of KDA on a TPU: what one grid step does with a block of chunks and heads.

README.md derives the algorithm and draws the tiles. Names follow it: a chunk has 64 tokens, a tile
16; rows (q, k) look back in time, columns (kc = beta k) are looked back at. Log-decays are in
base 2 here, so that every decay is one exp2.

A step holds several independent chains (a chunk of a head). A matmul returns after 150 to 250
cycles, so the kernels emit the chains' pieces in turn: `interleave` is the order of issue.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CHUNK, TILE, TILES = 64, 16, 4
CENTRE = 2.0**60
LOG2E = 1.4426950408889634
Piece = Iterator[None]


class Stage(NamedTuple):
    """Pieces that may run in any order, `width` at a time, taking turns at every yield."""

    width: int
    turns: int  # of one piece, about
    pieces: list[Piece]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shape of a grid step and the static choices of a call."""

    chunks: int  # chunks per grid step
    heads: int  # heads per grid step
    K: int  # key channels, a multiple of 128
    V: int  # value channels, a multiple of 128
    dtype: str  # of matmul operands: bfloat16 or float32
    gate: str | None  # how z becomes g: bounded, softplus, or None where g is given
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
    def chains(self) -> list[tuple[int, int, int]]:
        """(index, chunk, head) of every chain of a step."""
        return [(c * self.heads + h, c, h) for c in range(self.chunks) for h in range(self.heads)]


def interleave(*streams: list[Stage]) -> None:
    """Emits independent streams so that all advance evenly; the stages of one follow each other."""
    streams = tuple(stages for stages in streams if stages)
    runs = {n: _turns(stages) for n, stages in enumerate(streams)}
    total = [sum(x.turns * -(-len(x.pieces) // x.width) for x in stages) for stages in streams]
    done = dict.fromkeys(runs, 0.0)
    while runs:
        n = min(runs, key=done.__getitem__)
        done[n] += 1 / total[n]
        if next(runs[n], "ended") == "ended":
            del runs[n]


def _turns(stages: list[Stage]) -> Iterator[None]:
    for stage in stages:
        waiting, active = list(stage.pieces), []
        while waiting or active:
            while waiting and len(active) < stage.width:
                active.append(waiting.pop(0))
            active = [piece for piece in active if next(piece, "ended") != "ended"]
            yield


def _dot(a, b, contract: str = "nn"):
    """a b, a b^T ("nt") or a^T b ("tn"), accumulated in float32; float32 operands at full precision."""
    axes = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}[contract]
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _halves(x):
    """float32 as a sum of two numbers of bfloat16, to 16 bits: the upper half of the word, the rest.

    One above the other and rounded together: two bfloat16 arrays would be repacked on a v5e.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.concatenate([high, x - high], 0).astype(jnp.bfloat16)


def _fine_dot(plan: Plan, a, b):
    """a b of float32 operands inside the triangular inverse: all of it, or 16 bits for bfloat16 runs."""
    if plan.dtype == "float32":
        return _dot(a, b)
    (m, n), a, b = a.shape, _halves(a), _halves(b)
    both = _dot(a, b[:n])
    return both[:m] + (both[m:] + _dot(a[:m], b[n:]))


def _sums(plan: Plan, ones, x):
    """ones x for a 0/1 matrix, given twice side by side: sums exact to 16 bits of x or better."""
    if plan.dtype == "float32":
        return _dot(ones[:, :CHUNK], x)
    return _dot(ones, _halves(x))


def _iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _tile(x, I):
    return x[I * TILE : (I + 1) * TILE]


class _Step:
    """What both kernels share: where a chain's data lie, and its operands made from the inputs."""

    def __init__(self, plan: Plan, refs: SimpleNamespace, numbers):
        self.plan, self.refs, self.numbers = plan, refs, numbers
        self.op = jnp.dtype(plan.dtype)
        self.i, self.j = _iota((CHUNK, CHUNK), 0), _iota((CHUNK, CHUNK), 1)
        i, j = _iota((CHUNK, 2 * CHUNK), 0), _iota((CHUNK, 2 * CHUNK), 1) % CHUNK
        within = (i // TILE == j // TILE) & (i >= j)
        self.to_row = jnp.where(within, 1.0, 0.0).astype(self.op)  # from the start of the tile
        self.from_row = jnp.where(i <= j, 1.0, 0.0).astype(self.op)  # to the end of the chunk
        self.before_row = jnp.where(i > j, 1.0, 0.0).astype(self.op)  # from the start of the chunk
        # One row per token of what is a number per token: beta of each head, then the marks.
        self.per_token = [numbers[0, c].T for c in range(plan.chunks)]
        self.marks = {c: self._marks(c) for c in range(plan.chunks)}
        self.totals = {}  # of a chain: the decay over each of its tiles
        self.d_beta, self.d_gate = {}, {}  # of a chunk and head; of a head

    def tokens(self, c: int) -> slice:
        return slice(c * CHUNK, (c + 1) * CHUNK)

    def keys(self, c: int, h: int) -> tuple[slice, slice]:
        """Where chunk c of head h lies in a block of keys."""
        return self.tokens(c), slice(h * self.plan.K, (h + 1) * self.plan.K)

    def values(self, c: int, h: int) -> tuple[slice, slice]:
        return self.tokens(c), slice(h * self.plan.V, (h + 1) * self.plan.V)

    def beta(self, c: int, h: int):
        return self.per_token[c][:, h : h + 1]

    def _marks(self, c: int) -> SimpleNamespace:
        """Masks of chunk c: who may read whom, who reads the entering memory, who reaches the end."""
        read, write = self.i >= self.j, self.i > self.j
        if not self.plan.masked:
            return SimpleNamespace(read=read, write=write)
        heads = self.plan.heads
        live, starts = (self.per_token[c][:, n : n + 1] for n in (heads, heads + 1))
        same = starts == self.numbers[0, c, heads + 1 : heads + 2]
        last = starts[CHUNK - 1 :]
        return SimpleNamespace(
            read=read & same,
            write=write & same,
            live=live > 0,
            enters=jnp.where(starts == 0, 1.0, 0.0),
            leaves=jnp.where(starts == last, 1.0, 0.0),
            passes=jnp.where(last == 0, 1.0, 0.0),
        )

    def load(self, ref, where, c: int):
        """A chunk of an input in float32, zero at padding whatever lies there."""
        x = ref[where].astype(jnp.float32)
        return jnp.where(self.marks[c].live, x, 0.0) if self.plan.masked else x

    def log_decay(self, c: int, h: int):
        """g in bits per token (architecture.md 5.3)."""
        plan, where = self.plan, self.keys(c, h)
        x = self.refs.g[where].astype(jnp.float32)
        if plan.gate == "bounded":
            grown = self.grown(x, where[1])
            g = (plan.g_min * LOG2E) * pltpu.reciprocal(1.0 + grown, full_range=False)
        else:
            g = x * LOG2E
        return jnp.where(self.marks[c].live, g, 0.0) if plan.masked else g

    def each(self, piece, only: int | None = None) -> list[Piece]:
        """One piece for every chain of the step, or of one chunk."""
        return [piece(*chain) for chain in self.plan.chains if only in (None, chain[1])]

    def grown(self, z, head: slice):
        """exp(-exp(A) (z + dt)), what the gate's sigmoid adds 1 to."""
        slope, bias = self.refs.gate[0:1, head], self.refs.gate[1:2, head]
        return jnp.exp2(jnp.minimum(z * slope + bias, 126.0))

    def inputs(self, chunk: int | None = None) -> list[Stage]:
        pieces = (self.decays, self.keys_to_unit, self.queries_to_unit)
        return [Stage(2, 3, self.each(piece, chunk)) for piece in pieces]

    def operands(self, chunk: int | None = None) -> list[Piece]:
        both = zip(self.each(self.rows, chunk), self.each(self.columns, chunk), strict=True)
        return [piece for pair in both for piece in pair]

    # Inputs to operands; nothing here depends on the memory.
    #
    # E, the decay from the start of a token's tile to the token, multiplies rows, 1 / E columns of
    # the same tile: 16 tokens of at most 5 nats stay inside the range of float32 and bfloat16. The
    # factor CENTRE on one side and its inverse on the other keep small q and k off the lower end.
    # Columns of earlier tiles decay to the end of theirs and over the tiles in between.

    def decays(self, a, c, h) -> Piece:
        refs = self.refs
        g = self.log_decay(c, h)
        yield
        refs.sums[a] = _sums(self.plan, self.to_row, g)
        if hasattr(refs, "decay"):
            refs.decay[a] = g
        yield

    def keys_to_unit(self, a, c, h) -> Piece:
        yield from self._unit("k", 1.0, a, c, h)

    def queries_to_unit(self, a, c, h) -> Piece:
        yield from self._unit("q", self.plan.q_scale, a, c, h)

    def _unit(self, name, scale, a, c, h) -> Piece:
        refs = self.refs
        x = self.load(getattr(refs, name), self.keys(c, h), c)
        yield
        if self.plan.q_scale is not None:
            length = jax.lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) + 1e-6) * scale
            yield
            x = x * length
            if hasattr(refs, name + "_norm"):
                getattr(refs, name + "_norm")[a] = length
        getattr(refs, name + "_unit")[a] = x.astype(self.op)
        yield

    def rows(self, a, c, h) -> Piece:
        plan, refs, op = self.plan, self.refs, self.op
        before, totals = 1 / CENTRE, []
        for I in range(TILES):
            t = slice(TILE * I, TILE * (I + 1))
            E = self.row_decay(a, t)
            totals.append(E[TILE - 1 :] * (1 / CENTRE))
            for unit, near, far in ((refs.q_unit, 0, 0), (refs.k_unit, TILE, CHUNK)):
                x = unit[a, t].astype(jnp.float32) * E
                refs.near_rows[a, 2 * TILE * I + near : 2 * TILE * I + near + TILE] = x.astype(op)
                x = x * before
                if plan.masked:
                    x = x * self.marks[c].enters[t]
                refs.far_rows[a, far + TILE * I : far + TILE * (I + 1)] = x.astype(op)
            before = before * totals[I]
            yield
        through = before * CENTRE
        refs.through[a] = through * self.marks[c].passes if plan.masked else through
        self.totals[a] = totals
        yield

    def columns(self, a, c, h) -> Piece:
        plan, refs, op = self.plan, self.refs, self.op
        beta = self.beta(c, h)
        for J in range(TILES):
            t = slice(TILE * J, TILE * (J + 1))
            x = refs.k_unit[a, t].astype(jnp.float32) * beta[t] * self.column_decay(a, t)
            refs.near_columns[a, t] = x.astype(op)
            x = x * self.totals[a][J]
            for I in range(J + 1, TILES):
                refs.between_columns[a, _between(I, J)] = x.astype(op)
                x = x * self.totals[a][I]
            x = x * CENTRE
            if plan.masked:
                x = x * self.marks[c].leaves[t]
            refs.far_columns[a, t] = x.astype(op)
            yield

    def row_decay(self, a, t: slice):
        """CENTRE E of some tokens."""
        return jnp.exp2(self.refs.sums[a, t]) * CENTRE

    def column_decay(self, a, t: slice):
        """1 / (CENTRE E) of some tokens."""
        return jnp.exp2(-self.refs.sums[a, t]) * (1 / CENTRE)

    def columns_for(self, a, I: int):
        """What the rows of tile I look back at: tiles 0 ... I."""
        near = self.refs.near_columns[a, TILE * I : TILE * (I + 1)]
        if I == 0:
            return near
        between = slice(_between(I, 0).start, _between(I, I - 1).stop)
        return jnp.concatenate([self.refs.between_columns[a, between], near], 0)


def _between(I: int, J: int) -> slice:
    """Where the columns of tile J lie that are decayed up to the start of tile I > J."""
    start = TILE * (I * (I - 1) // 2 + J)
    return slice(start, start + TILE)


def forward_kernel(plan: Plan, *references) -> None:
    """A chunk takes four slots, of which each has one of these for every head, of four chunks:

        inputs       gate, norms, sums of the decay
        operands     rows, columns and their products
        inverse      of the triangular system
        recurrence   read, correct, write: waits for one matmul after the other

    Slots are the chunks of a block, and the last of a block's work falls into the step of the next
    one: slot s has the inputs of chunk s, the operands of s - 1, the inverse of s - 2, and the
    recurrence of chunk s of the block before. So a buffer is read before it is written anew.
    """
    refs = SimpleNamespace(**dict(zip(plan.names, references, strict=True)))
    step, before = _Step(plan, refs, refs.rows), _Step(plan, refs, refs.late_rows)
    block, n, memory = jnp.maximum(pl.program_id(1) - 1, 0), plan.chunks, {}
    first = refs.first[block] > 0
    for h in range(plan.heads):
        memory[h] = jnp.where(first, refs.state[0, h], refs.memory[h])

    def recurrence(c: int) -> list[Stage]:
        pieces = before.each(functools.partial(_recur(before), memory), c)
        return [Stage(plan.heads, 6, pieces)]

    def operands(of: _Step, c: int) -> list[Stage]:
        return [Stage(1, 5, of.operands(c)), Stage(1, 6, of.each(_scores(of), c))]

    for s in range(n):
        if n >= PIPELINED:
            interleave(
                recurrence(s),
                step.inputs(s),
                operands(step if s >= 1 else before, (s - 1) % n),
                _inverse(step, (s - 2) % n),
            )
        else:
            interleave(recurrence(s), step.inputs(s))
    for c in range(n if n < PIPELINED else 0):
        interleave(operands(step, c) + _inverse(step, c))
    for h in range(plan.heads):
        refs.memory[h] = memory[h]
        refs.final[0, h] = memory[h]


PIPELINED = 3  # chunks a step: with fewer, an inverse would come after the recurrence that needs it


def _scores(step: _Step) -> Callable[..., Piece]:
    """refs.reads = tril(q+ kc-^T), and L = strictly lower k+ kc-^T in the forms that `_inverse` needs."""
    plan, refs = step.plan, step.refs

    def piece(a, c, h):
        products = []
        for I in range(TILES):
            rows = refs.near_rows[a, 2 * TILE * I : 2 * TILE * (I + 1)]
            x = _dot(rows, step.columns_for(a, I), "nt")
            if I + 1 < TILES:
                later = jnp.zeros((2 * TILE, CHUNK - TILE * (I + 1)), jnp.float32)
                x = jnp.concatenate([x, later], 1)
            products.append(x)
            yield
        reads = jnp.concatenate([x[:TILE] for x in products], 0)
        refs.reads[a] = jnp.where(step.marks[c].read, reads, 0.0).astype(step.op)
        yield
        if plan.erase:
            L = jnp.concatenate([x[TILE:] for x in products], 0)
            refs.L[a] = jnp.where(step.marks[c].write, L, 0.0)
            yield

    return piece


def _inverse(step: _Step, chunk: int) -> list[Stage]:
    """refs.inverse = (I + L)^-1 of every head of a chunk.

    The two halves of a chain, 32 tokens each, lie side by side, two chains fill the 128 lanes, and
    forward substitution runs on all of them at once, in float32 on the vector unit. Matmuls merge
    the halves: A_21 = -A_22 L_21 A_11 (architecture.md 5.5, option b).
    """
    plan, refs = step.plan, step.refs
    if not plan.erase:
        return []
    half, wide = CHUNK // 2, {}
    chains = [a for a, c, _ in plan.chains if c == chunk]
    lane = _iota((8, 128), 1)
    left = _iota((half, CHUNK), 1) < half

    def substitute():
        L, X = {}, {}
        for p in pairs:
            both = [refs.L[a] for a in p]
            both = jnp.concatenate([jnp.where(left, x[:half], x[half:]) for x in both], 1)
            for r in range(half // 8):
                L[p, r] = both[8 * r : 8 * r + 8]
                X[p, r] = jnp.where(lane % half == _iota((8, 128), 0) + 8 * r, 1.0, 0.0)
            yield
        for j in range(half - 1):
            row = {p: X[p, j // 8][j % 8 : j % 8 + 1] for p in pairs}
            for r in range((j + 1) // 8, half // 8):
                for p in pairs:
                    # Column j of every half, copied along the lanes of that half.
                    factor = jnp.take_along_axis(L[p, r], lane // half * half + j, axis=1)
                    X[p, r] = X[p, r] - factor * row[p]
                yield
        for p in pairs:
            both = jnp.concatenate([X[p, r] for r in range(half // 8)], 0)
            wide[p[1]], wide[p[0]] = both[:, CHUNK:], both[:, :CHUNK]

    def merge(a, c, h):
        X = wide[a]
        T = _fine_dot(plan, refs.L[a, half:][:, :half], X[:, :half])
        yield
        M = -_fine_dot(plan, X[:, half:], T)
        yield
        refs.inverse[a, :half] = jnp.where(left, X, 0.0).astype(step.op)
        M = jnp.where(left, jnp.concatenate([M, M], 1), X)
        refs.inverse[a, half:] = M.astype(step.op)
        yield

    # An odd chain is its own partner.
    pairs = list(zip(chains[::2], chains[1::2] + chains[-1:], strict=False))
    return [Stage(1, 90, [substitute()]), Stage(len(chains), 4, step.each(merge, chunk))]


def _recur(step: _Step) -> Callable[..., Piece]:
    """The sequential part: a chunk reads the memory, corrects what it finds, writes, and answers."""
    plan, refs, op = step.plan, step.refs, step.op

    def chunk(memory, a, c, h):
        S = memory[h].astype(op)
        if plan.save or plan.snapshots:
            refs.states[c, h] = memory[h].astype(refs.states.dtype)
        read = _dot(refs.far_rows[a], S, "nt")
        yield
        e = step.load(refs.v, step.values(c, h), c)
        if plan.erase:
            error = (e - read[CHUNK:]).astype(op)
            yield
            e = _dot(refs.inverse[a], error)
        e = e.astype(op)
        yield
        new = _dot(e, refs.far_columns[a], "tn")
        yield
        memory[h] = memory[h] * refs.through[a] + new
        yield
        o = read[:CHUNK] + _dot(refs.reads[a], e)
        if plan.save:
            refs.saved_reads[c, h] = refs.reads[a]
            if plan.erase:
                refs.saved_inverse[c, h] = refs.inverse[a]
        yield
        refs.o[step.values(c, h)] = o.astype(refs.o.dtype)
        yield

    return chunk


def backward_kernel(plan: Plan, *references) -> None:
    """A block, last chunk first: its operands, the gradient on its way through the memory, the rest.

    The three follow each other at a distance of one chunk, so that the sequential part, which waits
    for one matmul after the other, runs beside the collecting of the chunk before.
    """
    refs = SimpleNamespace(**dict(zip(plan.names, references, strict=True)))
    step = _Step(plan, refs, refs.rows)
    recur, collect, memory = _recur_back(step), _collect(step), {}
    block = pl.num_programs(1) - 1 - pl.program_id(1)
    last = refs.last[block] > 0
    for h in range(plan.heads):
        memory[h] = jnp.where(last, refs.d_final[0, h], refs.d_memory[h])
    for slot in range(plan.chunks + 2):
        streams: list[list[Stage]] = []
        prepared, recurring, collected = (plan.chunks - 1 - slot + n for n in range(3))
        if 0 <= recurring < plan.chunks:
            pieces = step.each(functools.partial(recur, memory), recurring)
            streams.append([Stage(plan.heads, 5, pieces)])
        if prepared >= 0:
            errors = Stage(plan.heads, 3, step.each(_errors(step), prepared))
            operands = Stage(1, 5, step.operands(prepared))
            streams.append([*step.inputs(prepared), operands, errors])
        if collected < plan.chunks:
            streams.append([Stage(1, 45, step.each(collect, collected))])
        interleave(*streams)
    for h in range(plan.heads):
        refs.d_memory[h] = memory[h]
        refs.d_state[0, h] = memory[h]
    _finish(step)


def _errors(step: _Step) -> Callable[..., Piece]:
    """refs.errors = what was written for each key: (I + L)^-1 (v - k+ S), or v without erasing."""
    refs, op = step.refs, step.op

    def piece(a, c, h):
        v = step.load(refs.v, step.values(c, h), c)
        if not step.plan.erase:
            refs.errors[a] = v.astype(op)
            yield
            return
        read = _dot(refs.far_rows[a, CHUNK:], refs.states[c, h].astype(op), "nt")
        yield
        refs.errors[a] = _dot(refs.inverse[c, h], (v - read).astype(op)).astype(op)
        yield

    return piece


def _recur_back(step: _Step) -> Callable[..., Piece]:
    """The sequential part: what the loss wants of the memory that leaves a chunk and enters it."""
    plan, refs, op = step.plan, step.refs, step.op

    def chunk(memory, a, c, h):
        leaving = memory[h].astype(op)
        refs.d_leaving[a] = leaving
        d_o = step.load(refs.d_o, step.values(c, h), c).astype(op)
        refs.d_rows_v[a, :CHUNK] = d_o
        yield
        d_errors = _dot(refs.reads[c, h], d_o, "tn")
        d_errors = d_errors + _dot(refs.far_columns[a], leaving, "nt")
        yield
        if plan.erase:
            d_errors = _dot(refs.inverse[c, h], d_errors.astype(op), "tn")
            yield
            refs.d_rows_v[a, CHUNK:] = (-d_errors).astype(op)
        rows = slice(0, (2 if plan.erase else 1) * CHUNK)
        wanted = _dot(refs.d_rows_v[a, rows], refs.far_rows[a, rows], "tn")
        if plan.masked:
            d_errors = jnp.where(step.marks[c].live, d_errors, 0.0)
        refs.dv[step.values(c, h)] = d_errors.astype(refs.dv.dtype)
        yield
        memory[h] = memory[h] * refs.through[a] + wanted
        yield

    return chunk


def _collect(step: _Step) -> Callable[..., Piece]:
    """Gradients of a chain's inputs, given those of its rows' values and of the leaving memory."""
    plan, refs, op = step.plan, step.refs, step.op

    def piece(a, c, h):
        marks, where, beta = step.marks[c], step.keys(c, h), step.beta(c, h)
        rows = slice(0, (2 if plan.erase else 1) * CHUNK)
        S, leaving, errors = refs.states[c, h].astype(op), refs.d_leaving[a], refs.errors[a]
        d_scores = _dot(refs.d_rows_v[a, rows], errors, "nt")
        yield
        d_far = _dot(refs.d_rows_v[a, rows], S)
        yield
        d_columns = _dot(errors, leaving)
        yield
        # A token's own pair does not involve g: kept apart, it cannot leave a rounding error there.
        d_reads = jnp.where(marks.write, d_scores[:CHUNK], 0.0).astype(op)
        own = refs.d_rows_v[a, :CHUNK].astype(jnp.float32) * errors.astype(jnp.float32)
        own = jnp.sum(own, 1, keepdims=True)
        d_writes = jnp.where(marks.write, d_scores[-CHUNK:], 0.0).astype(op)  # if erasing
        yield
        passing = jnp.sum(S.astype(jnp.float32) * leaving.astype(jnp.float32), 0, keepdims=True)
        yield
        d_rows_near, d_columns_near = [], []
        for I in range(TILES):
            t = slice(TILE * I, TILE * (I + 1))
            d_tile = d_reads[t]
            near = refs.near_rows[a, 2 * TILE * I : 2 * TILE * I + (2 if plan.erase else 1) * TILE]
            if plan.erase:
                d_tile = jnp.concatenate([d_tile, d_writes[t]], 0)
            d_tile = d_tile[:, : TILE * (I + 1)]
            d_rows_near.append(_dot(d_tile, step.columns_for(a, I)))
            yield
            d_columns_near.append(_dot(d_tile, near, "tn"))
            yield
        before, betas = 1 / CENTRE, []
        for J in range(TILES):
            t = slice(TILE * J, TILE * (J + 1))
            q, k = (x[a, t].astype(jnp.float32) for x in (refs.q_unit, refs.k_unit))
            E, inverse = step.row_decay(a, t), step.column_decay(a, t)

            far = before * marks.enters[t] if plan.masked else before
            d_q = (d_rows_near[J][:TILE] + far * d_far[t]) * E + own[t] * beta[t] * k
            d_k_row = 0.0
            if plan.erase:
                d_k_row = (d_rows_near[J][TILE:] + far * d_far[CHUNK:][t]) * E
            yield
            later = d_columns[t] * CENTRE
            later = later * marks.leaves[t] if plan.masked else later
            for I in reversed(range(J + 1, TILES)):
                later = later * step.totals[a][I] + d_columns_near[I][t]
            d_column = inverse * d_columns_near[J][t] + (inverse * step.totals[a][J]) * later
            d_column = d_column + own[t] * q
            yield
            betas.append(jnp.sum(d_column * k, 1, keepdims=True))
            d_column = d_column * beta[t]
            d_k = d_k_row + d_column
            yield
            # Rows less columns, both as the matmuls had them: what a pair adds to its row it takes
            # from its column to the last bit, and rounding does not pile up in the sum over tokens.
            near, far_key = 2 * TILE * J, slice(CHUNK + t.start, CHUNK + t.stop)
            parts = [(refs.near_rows[a, near : near + TILE], d_rows_near[J][:TILE])]
            parts.append((refs.far_rows[a, t], d_far[t]))
            if plan.erase:
                near += TILE
                parts.append((refs.near_rows[a, near : near + TILE], d_rows_near[J][TILE:]))
                parts.append((refs.far_rows[a, far_key], d_far[far_key]))
            log = sum(x.astype(jnp.float32) * d for x, d in parts)
            parts = [(refs.near_columns[a, t], d_columns_near[J][t])]
            for I in range(J + 1, TILES):
                parts.append((refs.between_columns[a, _between(I, J)], d_columns_near[I][t]))
            refs.d_sums[a, t] = log - sum(x.astype(jnp.float32) * d for x, d in parts)
            refs.d_leaves[a, t] = refs.far_columns[a, t].astype(jnp.float32) * d_columns[t]
            yield
            for name, unit, d in (("q", q, d_q), ("k", k, d_k)):
                if plan.q_scale is not None:
                    along = jnp.sum(unit * d, 1, keepdims=True)
                    along = along * plan.q_scale**-2 if name == "q" else along
                    d = (d - unit * along) * getattr(refs, name + "_norm")[a, t]
                if plan.masked:
                    d = jnp.where(marks.live[t], d, 0.0)
                out = getattr(refs, "d" + name)
                out[slice(where[0].start + t.start, where[0].start + t.stop), where[1]] = d.astype(
                    out.dtype
                )
                yield
            before = before * step.totals[a][J]
        step.d_beta[c, h] = jnp.concatenate(betas, 0)
        yield
        # A row decays with the tokens up to its own, a column with those after it.
        d_g = _sums(plan, step.from_row, refs.d_sums[a]) + refs.through[a] * passing
        yield
        d_g = d_g + _sums(plan, step.before_row, refs.d_leaves[a])
        yield
        if plan.gate == "bounded":
            # g = c r with r = 1 / (1 + 2^x), so dg/dx = -ln(2) c r^2 2^x: no difference to cancel.
            z, slope = step.load(refs.g, where, c), refs.gate[0:1, where[1]]
            grown = step.grown(z, where[1])
            yield
            g = refs.decay[a]
            d_exponent = d_g * (g * grown * g) * (-1 / (plan.g_min * LOG2E**3))
            yield
            step.d_gate[h] = step.d_gate.get(h, 0.0) + jnp.concatenate(
                [jnp.sum(x, 0, keepdims=True) for x in (d_exponent * z, d_exponent)], 0
            )
            yield
            d_g = d_exponent * slope
        if plan.masked:
            d_g = jnp.where(marks.live, d_g, 0.0)
        refs.dg[where] = d_g.astype(refs.dg.dtype)
        yield

    return piece


def _finish(step: _Step) -> None:
    plan, lane = step.plan, _iota((CHUNK, 128), 1)
    for c in range(plan.chunks):
        columns = jnp.zeros((CHUNK, 128), jnp.float32)
        for h in range(plan.heads):
            columns = jnp.where(lane == h, step.d_beta[c, h], columns)
        step.refs.d_beta[0, c] = columns.T[: plan.heads]
    for h in range(plan.heads):
        at = slice(h * plan.K, (h + 1) * plan.K)
        step.refs.d_gate[0, :, at] = step.d_gate.get(h, jnp.zeros((2, plan.K), jnp.float32))
