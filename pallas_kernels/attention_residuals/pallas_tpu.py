"""Attention Residuals on a TPU: one pass over the sources forward, one backward.

A grid step has a tile of tokens of every source on the chip. The kernels copy the bank's tiles by themselves, a step ahead:
rows that are not valid yet are neither read nor computed with. The backward kernel adds to the bank's cotangent
in place, so that a site reads and writes it once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.tpu_chip import SPARE, VMEM_BYTES, cores

LANES = 128
GROUP = 16  # tokens that the inner loops have in registers: a tile of bfloat16
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
MOST_ROWS = 16  # of the bank: a program per count, and its statistics side by side in the lanes
SCALES = 64  # lane from which on the statistics hold products with the key, after the scales
TILES = (128, 64, 32, 16)  # tokens of a grid step, largest first
SLOTS = 3  # tiles of the bank's cotangent: one comes, one is worked on, one goes


class Plan(NamedTuple):
    """What is known when a call is traced."""

    eps: float  # of the norm of the sources
    out_eps: float | None  # of the norm of the mixture; None: there is none
    rows: int  # of the bank, that a call may read
    fixed: bool  # all of them are valid


def unsupported(bank, count, prefix, out_norm) -> str | None:
    """Why the kernels cannot run a call, or None."""
    rows, *_, width = bank.shape
    if bank.dtype != jnp.bfloat16 or prefix.dtype != jnp.bfloat16:
        return f"bank is {bank.dtype} and prefix {prefix.dtype}; needs bfloat16"
    if width % LANES:
        return f"width {width} is no multiple of {LANES}"
    rows = min(rows, count) if isinstance(count, int) else rows
    if rows == 0 or prefix.size == 0:
        return "there is nothing to mix"
    if rows > MOST_ROWS:
        return f"{rows} rows; the kernels are compiled for each number up to {MOST_ROWS}"
    if not _tile(GROUP, _backward_bytes(rows, width), GROUP):
        return f"{rows} rows of width {width} do not fit on the chip"
    return None


def pallas_tpu(
    bank: Float[Array, "M B T D"],
    count: int | Int[Array, ""],
    prefix: Float[Array, "B T D"],
    query: Float[Array, " D"],
    norm: Float[Array, " D"],
    eps: float,
    out_norm: Float[Array, " D"] | None,
    out_eps: float | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "M B T D"]]:
    """The op by the fused kernels; arguments as in `api.attention_residuals`."""
    fixed = isinstance(count, int)
    rows = min(count, bank.shape[0]) if fixed else bank.shape[0]
    plan = Plan(eps, None if out_norm is None else out_eps, rows, fixed)
    key = norm.astype(jnp.float32) * query.astype(jnp.float32)
    gain = jnp.ones_like(key) if out_norm is None else out_norm.astype(jnp.float32)
    count = jnp.asarray(count, jnp.int32).reshape(1)
    B, T, D = prefix.shape
    if T % GROUP == 0:
        return _mix(plan, bank, count, prefix, key, gain)
    # An experiment or a decoding step: all rows' tokens as one row, which copies the bank.
    more = ((0, 0), (0, -B * T % GROUP), (0, 0))
    folded = jnp.pad(bank.reshape(len(bank), 1, B * T, D), ((0, 0), *more))
    x, _ = _mix(plan, folded, count, jnp.pad(prefix.reshape(1, B * T, D), more), key, gain)
    return x[:, : B * T].reshape(prefix.shape), bank


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(plan: Plan, bank, count, prefix, key, gain):
    return _mix_forward(plan, bank, count, prefix, key, gain)[0]


def _mix_forward(plan, bank, count, prefix, key, gain):
    x, stats = _forward(plan, bank, count, prefix, key, gain)
    return (x, bank), (bank, count, prefix, key, gain, stats)


def _mix_backward(plan, residuals, cotangents):
    bank, count, prefix, key, gain, stats = residuals
    dx, d_bank = cotangents
    d_bank, d_prefix, d_key, d_gain = _backward(
        plan, bank, count, prefix, key, gain, stats, dx, d_bank
    )
    return d_bank, None, d_prefix, d_key.astype(key.dtype), d_gain.astype(gain.dtype)


_mix.defvjp(_mix_forward, _mix_backward)


def _rounded(gain, dtype):
    """The norm's weight as its product sees it; the gradient stays float32."""
    return gain.astype(dtype).astype(jnp.float32)


def _forward_bytes(rows: int, width: int) -> int:
    """On-chip bytes of a token: every source and the result twice, sums and weights."""
    return 2 * (rows + 2) * width * 2 + (3 * rows + 5) * LANES * 4


def _backward_bytes(rows: int, width: int) -> int:
    """Sources, dx and d_prefix twice, the bank's cotangent in its slots, the mixture and its own."""
    return (2 * (rows + 3) + SLOTS * rows + 3) * width * 2 + (4 * rows + 6) * LANES * 4


def _tile(tokens: int, token_bytes: int, most: int) -> int:
    """Tokens of a grid step: the largest that fit and, if possible, divide a row; 0 if none fit."""
    fitting = [n for n in TILES if n <= most and n * token_bytes <= VMEM_BYTES - SPARE]
    short = [n for n in fitting if n <= tokens] or fitting[-1:]
    even = [n for n in short if tokens % n == 0 and n >= 32]
    return next(iter(even or short), 0)


class _Grid:
    """(parts, tiles of a part): the tiles of all rows of the batch, one after the other."""

    def __init__(self, plan: Plan, shape, tile: int):
        B, T, _ = shape
        self.tile, self.tiles = tile, pl.cdiv(T, tile)
        self.T, self.plan = T, plan
        total = B * self.tiles
        parts = cores() if total % cores() == 0 else 1
        self.steps = total // parts
        self.grid = (parts, self.steps)

    def at(self, part, step):
        """(row of the batch, tile of it) of a grid step."""
        n = part * self.steps + step
        return n // self.tiles, n % self.tiles

    def groups(self):
        """Groups of this step's tile: the last tile of a row may be cut."""
        if self.T % self.tile == 0:
            return self.tile // GROUP
        _, tile = self.at(pl.program_id(0), pl.program_id(1))
        return jnp.minimum(self.T - tile * self.tile, self.tile) // GROUP

    def scalars(self, count):
        return () if self.plan.fixed else (count,)

    def count(self, refs):
        """(number of valid rows, the other references)"""
        return (self.plan.rows, refs) if self.plan.fixed else (refs[0][0], refs[1:])

    def spec(self, **specs):
        return pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0 if self.plan.fixed else 1, grid=self.grid, **specs
        )

    def token(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.tile, width), lambda p, s, *_: (*self.at(p, s), 0))

    def whole(self, *shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _when(condition, body):
    """`pl.when`, or a plain call where the answer is known."""
    if condition is True:
        body()
    elif condition is not False:
        pl.when(condition)(body)


def _lane():
    return jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)


def _fold(x):
    """Sums the vector registers of a row: [tokens, n 128] to [tokens, 128]."""
    return sum(x[:, c : c + LANES] for c in range(0, x.shape[1], LANES))


def _row_sum(x):
    return jnp.sum(x, axis=1, keepdims=True)


def _chunk(width: int) -> int:
    """Columns that an inner step works on."""
    return next(n for n in (1792, 1024, 896, 768, 640, 512, 384, 256, 128) if width % n == 0)


def _group(g):
    return pl.ds(pl.multiple_of(g * GROUP, GROUP), GROUP)


def _at(c, size):
    return pl.ds(pl.multiple_of(c * size, LANES), size)


def _lanes(c, size):
    """The columns of a chunk, a vector register each."""
    return [pl.ds(pl.multiple_of(c * size, LANES) + j, LANES) for j in range(0, size, LANES)]


def _wide(x, size):
    return jnp.concatenate([x] * (size // LANES), axis=1)


def _spread(out, first, used, x):
    """One number per token and source, from a lane each to a whole register each."""
    for n, i in enumerate(used):
        out[first + n] = jnp.broadcast_to(x[:, i : i + 1], x.shape)


def _weighted(weights, sources, used, here):
    """Sum of the sources with their weights, float32."""
    terms = (w * sources[i][here].astype(jnp.float32) for w, i in zip(weights, used, strict=True))
    return functools.reduce(jnp.add, terms)


def _columns(width, size, body, start):
    """A loop over `size` columns at a time."""
    return jax.lax.fori_loop(0, width // size, body, start)


def _softmax(stats, count, rows):
    """(r, u, p) of each source, in lanes 0 .. rows: scale, product with the key, probability."""
    lane = _lane()
    u = pltpu.roll(stats, SCALES, 1)
    valid = (lane < count) | (lane == rows)
    score = jnp.where(valid, stats * u, -jnp.inf)
    e = jnp.exp(score - jnp.max(score, axis=1, keepdims=True))
    p = e / _row_sum(e)
    return jnp.where(valid, stats, 0.0), jnp.where(valid, u, 0.0), p


def _per_count(plan: Plan, count, body):
    """`body(sources)` with as many sources as are valid, the prefix last: a program for each number."""
    numbers = (plan.rows,) if plan.fixed else range(plan.rows + 1)
    for n in numbers:
        _when(plan.fixed or count == n, functools.partial(body, [*range(n), plan.rows]))


def _forward(plan: Plan, bank, count, prefix, key, gain):
    B, T, D = prefix.shape
    rows = plan.rows
    grid = _Grid(plan, prefix.shape, _tile(T, _forward_bytes(rows, D), 128))
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan, grid),
        grid_spec=grid.spec(
            in_specs=[ANYWHERE, grid.token(D), grid.whole(1, D), grid.whole(1, D)],
            out_specs=[grid.token(D), grid.token(LANES)],
            scratch_shapes=[
                *[pltpu.VMEM((rows + 1, grid.tile, LANES), jnp.float32)] * 3,
                pltpu.VMEM((2, rows, grid.tile, D), bank.dtype),
                pltpu.SemaphoreType.DMA((1, 2, rows)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, T, D), prefix.dtype),
            jax.ShapeDtypeStruct((B, T, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="attention_residuals_forward",
    )(*grid.scalars(count), bank, prefix, key[None], _rounded(gain, prefix.dtype)[None])


def _forward_kernel(plan: Plan, grid: _Grid, *refs):
    count, refs = grid.count(refs)
    bank, prefix, key, gain, x, stats, squares, products, weights, tiles, arrived = refs
    rows, (tokens, width) = plan.rows, x.shape
    came = _Tiles(plan, grid, count, bank, tiles, arrived, back=False).enter(pl.program_id(1))
    sources = [*(tiles.at[came, i] for i in range(rows)), prefix]
    size = _chunk(width)

    def run(used):
        def measure(g, _):
            at = _group(g)

            def add(c, sums):
                square, product = (list(x) for x in sums)
                for here in _lanes(c, size):
                    k = key[:, here]
                    for n, i in enumerate(used):
                        v = sources[i][at, here].astype(jnp.float32)
                        square[n] += v * v
                        product[n] += v * k
                return square, product

            zeros = [jnp.zeros((GROUP, LANES), jnp.float32) for _ in used]
            square, product = _columns(width, size, add, (zeros, zeros))
            for n in range(len(used)):
                squares[n, at], products[n, at] = square[n], product[n]
            return 0

        groups = grid.groups()
        jax.lax.fori_loop(0, groups, measure, 0)
        found = jnp.zeros((tokens, LANES), jnp.float32)
        for n, i in enumerate(used):
            r = jax.lax.rsqrt(_row_sum(squares[n]) / width + plan.eps)
            found = jnp.where(_lane() == i, r, found)
            found = jnp.where(_lane() == i + SCALES, _row_sum(products[n]), found)
        stats[...] = found
        _spread(weights, 0, used, _softmax(found, count, rows)[2])

        def mix(g, _):
            at = _group(g)
            p = [_wide(weights[n, at], size) for n in range(len(used))]

            def add(c, square):
                here = at, _at(c, size)
                h = _weighted(p, sources, used, here)
                h = h.astype(x.dtype)
                x[here] = h
                h = h.astype(jnp.float32)
                return square + _fold(h * h)

            squares[0, at] = _columns(width, size, add, jnp.zeros((GROUP, LANES), jnp.float32))
            return 0

        jax.lax.fori_loop(0, groups, mix, 0)
        if plan.out_eps is None:
            return
        scale = jax.lax.rsqrt(_row_sum(squares[0]) / width + plan.out_eps)
        weights[0] = jnp.broadcast_to(scale, (tokens, LANES))

        def normalize(g, _):
            at = _group(g)
            r = _wide(weights[0, at], size)

            def scaled(c, _):
                here = _at(c, size)
                normed = (x[at, here].astype(jnp.float32) * r).astype(x.dtype)
                x[at, here] = (gain[:, here] * normed.astype(jnp.float32)).astype(x.dtype)
                return 0

            return _columns(width, size, scaled, 0)

        jax.lax.fori_loop(0, groups, normalize, 0)

    _per_count(plan, count, run)


def _backward(plan: Plan, bank, count, prefix, key, gain, stats, dx, d_bank):
    """(d_bank with this site's share added in place, d_prefix, d_key, d_gain)."""
    B, T, D = prefix.shape
    rows = plan.rows
    grid = _Grid(plan, prefix.shape, _tile(T, _backward_bytes(rows, D), 64))
    parts, tile = grid.grid[0], grid.tile
    sums = pl.BlockSpec((None, GROUP, D), lambda p, s, *_: (p, 0, 0))
    scalars = grid.scalars(count)
    d_bank, d_prefix, d_key, d_gain = pl.pallas_call(
        functools.partial(_backward_kernel, plan, grid),
        grid_spec=grid.spec(
            in_specs=[
                ANYWHERE,
                grid.token(D),
                grid.token(D),
                grid.token(LANES),
                grid.whole(1, D),
                grid.whole(1, D),
                ANYWHERE,
            ],  # fmt: skip
            out_specs=[ANYWHERE, grid.token(D), sums, sums],
            scratch_shapes=[
                pltpu.VMEM((tile, D), bank.dtype),
                pltpu.VMEM((tile, D), jnp.float32),
                pltpu.VMEM((rows + 1, tile, LANES), jnp.float32),
                pltpu.VMEM((3 * (rows + 1), tile, LANES), jnp.float32),
                pltpu.VMEM((2, rows, tile, D), bank.dtype),
                pltpu.VMEM((SLOTS, rows, tile, D), bank.dtype),
                pltpu.SemaphoreType.DMA((1, 2, rows)),
                pltpu.SemaphoreType.DMA((2, SLOTS, rows)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(bank.shape, bank.dtype),
            jax.ShapeDtypeStruct(prefix.shape, prefix.dtype),
            jax.ShapeDtypeStruct((parts, GROUP, D), jnp.float32),
            jax.ShapeDtypeStruct((parts, GROUP, D), jnp.float32),
        ],
        input_output_aliases={len(scalars) + 6: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="attention_residuals_backward",
    )(*scalars, bank, prefix, dx, stats, key[None], _rounded(gain, prefix.dtype)[None], d_bank)
    return d_bank, d_prefix, d_key.sum((0, 1)), d_gain.sum((0, 1))


class _Tiles:
    """Tiles of the valid rows of a bank, copied to the chip a step ahead; with `back` returned after a step."""

    def __init__(self, plan, grid, count, hbm, slots, semaphores, *, back: bool):
        self.plan, self.grid, self.count = plan, grid, count
        self.hbm, self.slots, self.semaphores, self.back = hbm, slots, semaphores, back
        self.num = slots.shape[0]

    def _copies(self, step, back, run):
        """`run` on the copies of one step: each valid row's tile, of which the last may be cut."""
        b, t = self.grid.at(pl.program_id(0), step)
        slot = step % self.num
        tile, T = self.grid.tile, self.grid.T

        def row(i, size):
            here = self.hbm.at[i, b, pl.ds(pl.multiple_of(t * tile, GROUP), size)]
            there = self.slots.at[slot, i, pl.ds(0, size)]
            ends = (there, here) if back else (here, there)
            run(pltpu.make_async_copy(*ends, self.semaphores.at[int(back), slot, i]))

        def rows(size):
            for i in range(self.plan.rows):
                _when(self.plan.fixed or i < self.count, functools.partial(row, i, size))

        cut = T % tile
        if cut:
            last = t == self.grid.tiles - 1
            pl.when(last)(functools.partial(rows, cut))
            pl.when(jnp.logical_not(last))(functools.partial(rows, tile))
        else:
            rows(tile)

    def enter(self, step):
        """The slot that tile `step` is in; the next one is on its way."""

        @pl.when(step == 0)
        def _():
            self._copies(step, False, lambda copy: copy.start())

        @pl.when(step + 1 < self.grid.steps)
        def _():
            if self.back:

                @pl.when(step + 1 >= self.num)
                def _():
                    self._copies(step + 1 - self.num, True, lambda copy: copy.wait())

            self._copies(step + 1, False, lambda copy: copy.start())

        self._copies(step, False, lambda copy: copy.wait())
        return step % self.num

    def leave(self, step):
        """Tile `step` is on its way back."""
        self._copies(step, True, lambda copy: copy.start())

        @pl.when(step + 1 == self.grid.steps)
        def _():
            for before in range(min(self.num, self.grid.steps) - 1, -1, -1):
                self._copies(step - before, True, lambda copy: copy.wait())


def _backward_kernel(plan: Plan, grid: _Grid, *refs):
    count, refs = grid.count(refs)
    rows = plan.rows
    bank, prefix, dx, stats, key, gain, _, d_bank, d_prefix, d_key, d_gain, *scratch = refs
    h, dh, sums, weights, tiles, slots, arrived, finished = scratch
    tokens, width = dx.shape
    size = _chunk(width)
    step = pl.program_id(1)
    normed = plan.out_eps is not None

    @pl.when(step == 0)
    def _():
        d_key[...] = jnp.zeros_like(d_key)
        d_gain[...] = jnp.zeros_like(d_gain)

    came = _Tiles(plan, grid, count, bank, tiles, arrived, back=False).enter(step)
    sources = [*(tiles.at[came, i] for i in range(rows)), prefix]
    running = _Tiles(plan, grid, count, d_bank, slots, finished, back=True)
    slot = running.enter(step)

    def run(used):
        groups, num = grid.groups(), len(used)
        zero = jnp.zeros((GROUP, LANES), jnp.float32)
        r, u, p = _softmax(stats[...], count, rows)
        _spread(weights, 0, used, p)

        def mix(g, _):
            """The mixture again, and its product with the cotangent of its norm."""
            at = _group(g)
            w = [_wide(weights[n, at], size) for n in range(num)]

            def add(c, both):
                here = at, _at(c, size)
                mixed = _weighted(w, sources, used, here)
                mixed = mixed.astype(h.dtype)
                h[here] = mixed
                mixed = mixed.astype(jnp.float32)
                d_normed = dx[here].astype(jnp.float32) * gain[:, here[1]]
                return both[0] + _fold(mixed * mixed), both[1] + _fold(d_normed * mixed)

            sums[0, at], sums[1, at] = _columns(width, size, add, (zero, zero))
            return 0

        if normed:
            jax.lax.fori_loop(0, groups, mix, 0)
            scale = jax.lax.rsqrt(_row_sum(sums[0]) / width + plan.out_eps)
            pull = scale * scale * scale * _row_sum(sums[1]) / width
            for n, x in enumerate((scale, pull), num):
                weights[n] = jnp.broadcast_to(x, (tokens, LANES))

        def project(g, _):
            """Cotangent of the mixture, and its product with each source."""
            at = _group(g)
            if normed:
                scale, pull = (_wide(weights[n, at], size) for n in (num, num + 1))

            def add(c, products):
                here = _at(c, size)
                d = dx[at, here].astype(jnp.float32)
                if normed:
                    mixed = h[at, here].astype(jnp.float32)
                    rounded = (mixed * scale).astype(h.dtype).astype(jnp.float32)
                    d_gain[:, here] += d * rounded
                    d = scale * (d * gain[:, here]) - pull * mixed
                dh[at, here] = d
                return [
                    product + _fold(d * sources[i][at, here].astype(jnp.float32))
                    for product, i in zip(products, used, strict=True)
                ]

            for n, product in enumerate(_columns(width, size, add, [zero] * num)):
                sums[n, at] = product
            return 0

        jax.lax.fori_loop(0, groups, project, 0)
        dp = jnp.zeros((tokens, LANES), jnp.float32)
        for n, i in enumerate(used):
            dp = jnp.where(_lane() == i, _row_sum(sums[n]), dp)
        ds = p * (dp - _row_sum(p * dp))
        _spread(weights, num, used, ds * r)
        _spread(weights, 2 * num, used, ds * u * r * r * r / width)

        def hand_on(g, _):
            """Each source's share, added to what its row has from later sites."""
            at = _group(g)

            def add(c, _):
                for here in _lanes(c, size):
                    d, k = dh[at, here], key[:, here]
                    total = zero
                    for n, i in enumerate(used):
                        v = sources[i][at, here].astype(jnp.float32)
                        towards = weights[num + n, at]
                        total += towards * v
                        share = weights[n, at] * d + towards * k - weights[2 * num + n, at] * v
                        if i == rows:
                            d_prefix[at, here] = share.astype(d_prefix.dtype)
                        else:
                            share += slots[slot, i, at, here].astype(jnp.float32)
                            slots[slot, i, at, here] = share.astype(slots.dtype)
                    d_key[:, here] += total
                return 0

            return _columns(width, size, add, 0)

        jax.lax.fori_loop(0, groups, hand_on, 0)

    _per_count(plan, count, run)
    running.leave(step)
