"""The forward TPU kernel of KDA; tpu_step.py has the operands, README.md the algorithm."""

from types import SimpleNamespace

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.kda.tpu_step import (
    CHUNK,
    TILE,
    TILES,
    Piece,
    Plan,
    Step,
    Timed,
    dot,
    emit,
    fine_dot,
    halves,
    halves_dot,
    iota,
    tile,
)

# When the work on a chunk begins, in chunks after its own time; its pace; and the time from the
# first head to one past the last.
TIMES = {
    "numbers": (-0.5, 0.1, 0.0),
    "decays": (0.0, 0.1, 0.32),
    "keys": (-0.05, 0.07, 0.88),
    "queries": (0.3, 0.0875, 0.52),
    "totals": (0.75, 0.0105, 0.52),
    "rows": (0.79, 0.016, 0.6),
    "columns": (0.91, 0.008, 0.6),
    "scores": (1.6, 0.016, 0.16),
    "substitute": (2.25, 0.032, 0.0),
    "merge tiles": (3.25, 0.075, 0.0),
    "merge": (3.5, 0.23436, 0.0),
    "recur": (0.05, 0.105, 0.0),
}
PIPELINED = 4  # chunks a step: with fewer, an inverse would come after the recurrence that needs it


def forward_kernel(plan: Plan, *references) -> None:
    """A block of chunks: inputs, operands, inverse; and the recurrence of the block before it.

    What would begin after the end of the step falls to the step of the next block. So a buffer is
    read before it is written anew: a chunk's recurrence ends before the next block's operands of
    that chunk begin.
    """
    refs = SimpleNamespace(**dict(zip(plan.names, references, strict=True)))
    step = Step(plan, refs)
    block = jnp.maximum(pl.program_id(1) - 1, 0)

    @pl.when(refs.first[block] > 0)
    def _():
        refs.memory[...] = refs.state[0]

    work: list[Timed] = []

    def add(name: str, c: int, h: int, piece: Piece) -> None:
        start, pace, spread = TIMES[name]
        start += c + h / plan.heads * spread
        if start >= plan.chunks >= PIPELINED:
            start -= plan.chunks
        work.append(Timed(start, pace, piece))

    for c in range(plan.chunks):
        add("numbers", c, 0, step.numbers(c))
    for a, c, h in plan.chains:
        add("recur", c, 0, _recur(step, a, c, h))
        for name, make in (
            ("decays", step.decays),
            ("keys", step.keys_to_unit),
            ("queries", step.queries_to_unit),
            ("totals", step.totals),
        ):
            add(name, c, h, make(a, c, h))
        add("scores", c, h, _scores(step, a, c, h))
        for I in range(TILES):
            add("rows", c, h, step.rows(a, c, h, I))
            add("columns", c, h, step.columns(a, c, h, I))
        if plan.erase:
            add("merge", c, h, _merge(step, a))
    for c in range(plan.chunks if plan.erase else 0):
        first = c * plan.heads
        # The last of an odd number of heads is its own partner.
        pairs = [
            (a, min(a + 1, first + plan.heads - 1)) for a in range(first, first + plan.heads, 2)
        ]
        add("substitute", c, 0, _substitute(step, pairs))
        for n, pair in enumerate(pairs):
            add("merge tiles", c, 2 * n, _merge_tiles(step, pair))
    emit(work)
    refs.final[0] = refs.memory[...]


def _scores(step: Step, a, c, h) -> Piece:
    """refs.reads = tril(q+ kc-^T), and L = strictly lower k+ kc-^T."""
    plan, refs = step.plan, step.refs
    products = []
    for I in range(TILES):
        rows = refs.near_rows[a, 2 * TILE * I : 2 * TILE * (I + 1)]
        x = dot(rows, step.columns_for(a, I), "nt")
        if I + 1 < TILES:
            later = jnp.zeros((2 * TILE, CHUNK - TILE * (I + 1)), jnp.float32)
            x = jnp.concatenate([x, later], 1)
        products.append(x)
        yield
    reads = jnp.concatenate([x[:TILE] for x in products], 0)
    refs.reads[a] = step.near(reads, c, strictly=False).astype(step.op)
    yield
    if plan.erase:
        L = jnp.concatenate([x[TILE:] for x in products], 0)
        refs.L[a] = step.near(L, c, strictly=True)
        yield


def _substitute(step: Step, pairs: list[tuple[int, int]]) -> Piece:
    """refs.blocks = the inverses of a chain's four diagonal blocks, 16 tokens each, side by side.

    They lie side by side, two chains fill the 128 lanes, and forward substitution runs on all of
    them at once, in float32 on the vector unit.
    """
    refs, L, X = step.refs, {}, {}
    lane = iota((8, 128), 1)
    for p in pairs:
        both = jnp.concatenate([_side_by_side(refs.L[a]) for a in p], 1)
        for r in range(2):
            L[p, r] = both[8 * r : 8 * r + 8]
            X[p, r] = jnp.where(lane % TILE == iota((8, 128), 0) + 8 * r, 1.0, 0.0)
        yield
    for j in range(TILE - 1):
        for p in pairs:
            row = X[p, j // 8][j % 8 : j % 8 + 1]
            for r in range((j + 1) // 8, 2):
                # Column j of every block, copied along the lanes of that block.
                factor = jnp.take_along_axis(L[p, r], lane // TILE * TILE + j, axis=1)
                X[p, r] = X[p, r] - factor * row
        yield
    for p in pairs:
        both = jnp.concatenate([X[p, 0], X[p, 1]], 0)
        for n, a in enumerate(p):
            refs.blocks[a] = both[:, n * CHUNK : (n + 1) * CHUNK]
    yield


def _side_by_side(L):
    """[64, 64] to [16, 64]: the four diagonal blocks of 16, each at its own lanes."""
    block = iota((TILE, CHUNK), 1) // TILE
    x = L[:TILE]
    for n in range(1, TILES):
        x = jnp.where(block >= n, L[tile(n)], x)
    return x


def _merge_tiles(step: Step, pair: tuple[int, int]) -> Piece:
    """From 16 tokens to 32: A_21 = -A_22 L_21 A_11 (architecture.md 5.5, option b), two chains at once.

    The inverses of a chain's two blocks replace the first 32 rows of refs.L, which are read before;
    `_merge` needs its last 32. A NaN at a real token reaches the partner: lanes are shared.
    """
    plan, refs = step.plan, step.refs
    lane = iota((TILE, 128), 1)
    even = lane // TILE % 2 == 0
    X = jnp.concatenate([refs.blocks[a] for a in pair], 1)
    L = [
        jnp.where(lane[:, :CHUNK] < CHUNK // 2, refs.L[a, tile(1)], refs.L[a, tile(3)])
        for a in pair
    ]
    T = _block_dot(plan, jnp.concatenate(L, 1), X)
    yield
    M = _block_dot(plan, jnp.concatenate([X[:, TILE:], X[:, :TILE]], 1), T)
    yield
    X = jnp.concatenate([jnp.where(even, X, 0.0), jnp.where(even, -M, X)], 0)
    for n, a in enumerate(pair):
        refs.L[a, : CHUNK // 2] = X[:, n * CHUNK : (n + 1) * CHUNK]
    yield


def _block_dot(plan: Plan, a, b):
    """Of eight blocks of 16 lanes, the even ones: each block of a times that of b."""
    if plan.dtype == "float32":
        i, j = (iota((128, 128), axis) // TILE for axis in (0, 1))
        return dot(a, jnp.where((i == j) & (i % 2 == 0), jnp.concatenate([b] * 8, 0), 0.0))
    # Two rows of bfloat16 make a row of words.
    i, j = iota((64, 128), 0) // 8, iota((64, 128), 1) // TILE
    mask = jnp.where((i == j) & (i % 2 == 0), -1, 0)
    words = pltpu.bitcast(halves(b), jnp.int32)
    high, low = (
        pltpu.bitcast(jnp.concatenate([x] * 8, 0) & mask, jnp.bfloat16)
        for x in (words[:8], words[8:])
    )
    return halves_dot(halves(a), high, low)


def _merge(step: Step, a: int) -> Piece:
    """From 32 tokens to 64: refs.inverse = (I + L)^-1."""
    plan, refs, half = step.plan, step.refs, CHUNK // 2
    left = iota((half, CHUNK), 1) < half
    X = refs.L[a, :half]
    T = fine_dot(plan, refs.L[a, half:][:, :half], X[:, :half])
    yield
    M = -fine_dot(plan, X[:, half:], T)
    yield
    refs.inverse[a, :half] = jnp.where(left, X, 0.0).astype(step.op)
    M = jnp.where(left, jnp.concatenate([M, M], 1), X)
    refs.inverse[a, half:] = M.astype(step.op)
    yield


def _recur(step: Step, a, c, h) -> Piece:
    """The sequential part: a chunk reads the memory, corrects what it finds, writes, and answers."""
    plan, refs, op = step.plan, step.refs, step.op
    S = refs.memory[h].astype(op)
    if plan.save or plan.snapshots:
        refs.states[c, h] = refs.memory[h].astype(refs.states.dtype)
    read = dot(refs.far_rows[a], S, "nt")
    yield
    e = refs.v[step.values(c, h)].astype(jnp.float32)
    if plan.masked:
        e = jnp.where(refs.late_live[c, :, : plan.V] > 0, e, 0.0)
    if plan.erase:
        error = (e - read[CHUNK:]).astype(op)
        yield
        e = dot(refs.inverse[a], error)
    e = e.astype(op)
    yield
    new = dot(e, refs.far_columns[a], "tn")
    yield
    refs.memory[h] = refs.memory[h] * refs.through[a] + new
    yield
    o = read[:CHUNK] + dot(refs.reads[a], e)
    if plan.save:
        refs.saved_reads[c, h] = refs.reads[a]
        if plan.erase:
            refs.saved_inverse[c, h] = refs.inverse[a]
    yield
    refs.o[step.values(c, h)] = o.astype(refs.o.dtype)
    yield
