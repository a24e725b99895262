"""The short convolution on a TPU: one kernel forward, one backward.

A grid step has a tile of tokens of all channels. The kernels see tokens as rows and channels as columns, and hold a tile in
float32, 128 columns after the other: so a tap is a load from some rows higher up. Forward the last rows of a tile
stay for the next one; backward the tiles run from the last to the first, and the first rows stay.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.tpu_chip import VMEM_BYTES, cores

LANES = 128
HALO = 8  # rows kept of a neighbouring tile: a tile of float32
BEFORE = 16  # rows of a tile of bfloat16
TILES = (128, 64, 32, 16)  # tokens of a grid step, largest first
UNROLL = 2  # groups of 128 columns that an inner step works on
STRIP = 32  # rows that it has in registers


class Plan(NamedTuple):
    """What is known when a call is traced."""

    masked: bool  # documents, padding or a cut tile: taps are masked
    tile: int
    parts: int  # cores that share the channels


def unsupported(x, kernel) -> str | None:
    """Why the kernels cannot run a call, or None."""
    T, channels = x.shape[1], x.shape[2] * x.shape[3]
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}; needs bfloat16 or float32"
    if channels % LANES:
        return f"{channels} channels are no multiple of {LANES}"
    if not 1 < kernel.shape[0] <= HALO:
        return f"{kernel.shape[0]} taps; takes 2 to {HALO}"
    if TILES[-1] > T:
        return f"T = {T}; needs {TILES[-1]} tokens"
    if not _tile(T, channels, x.dtype):
        return f"{channels} channels do not fit on the chip"
    return None


def pallas_tpu(
    x: Float[Array, "B T H K"],
    kernel: Float[Array, "W H K"],
    past: Float[Array, "B W1 H K"],
    reach: Int[Array, "B T"] | None,
) -> Float[Array, "B T H K"]:
    """Outputs by the fused kernels.

    Args:
        x, kernel: as in `api.short_conv`.
        past: the W - 1 inputs before x.
        reach: bit d tells whether a token's tap on the token d before it counts, bit 0 whether the token is real;
            None: all do.

    Numerics: float32 inside; the kernel's gradient is summed in float32.
    Cost: reads x and writes y once; backward reads x and dy and writes dx once.
    """
    B, T, H, K = x.shape
    channels = H * K
    tile = _tile(T, channels, x.dtype)
    shared_by = cores()
    plan = Plan(
        masked=reach is not None or T % tile != 0,
        tile=tile,
        parts=shared_by if channels % (shared_by * UNROLL * LANES) == 0 else 1,
    )
    if plan.masked and reach is None:
        reach = jnp.full((B, T), 2**HALO - 1, jnp.int32)
    rows = x.reshape(B, T, channels)
    halo = past.astype(jnp.float32).reshape(B, -1, channels)
    halo = jnp.pad(halo, ((0, 0), (HALO - halo.shape[1], 0), (0, 0)))
    taps = kernel.astype(jnp.float32).reshape(-1, channels)
    return _conv(plan, rows, taps, halo, None if reach is None else reach[..., None]).reshape(
        x.shape
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(plan, x, taps, halo, reach):
    return _forward(plan, x, taps, halo, reach)


def _conv_forward(plan, x, taps, halo, reach):
    return _forward(plan, x, taps, halo, reach), (x, taps, halo, reach)


def _conv_backward(plan, residuals, dy):
    x, taps, halo, reach = residuals
    dx, d_taps, d_halo = _backward(plan, x, taps, halo, reach, dy)
    return dx, d_taps, d_halo, None


_conv.defvjp(_conv_forward, _conv_backward)


def _tile(T: int, channels: int, dtype) -> int:
    """Tokens of a grid step: the largest that fit and, if possible, divide a row; 0 if none fit."""
    # Backward: x, dy and dx twice, a tile of x and of dz in float32.
    token = channels * (6 * jnp.dtype(dtype).itemsize + 8)
    fitting = [n for n in TILES if (n + 2 * HALO) * token < VMEM_BYTES * 3 // 4 and n <= T]
    even = [n for n in fitting if T % n == 0]
    return next(iter([n for n in even if n >= 64] or fitting), 0)


class _Layout:
    """Grid (parts of the channels, rows of the batch, tiles) and its blocks."""

    def __init__(self, plan: Plan, shape, taps: int, *, reverse: bool):
        self.plan, self.taps = plan, taps
        B, self.T, channels = shape
        self.tiles = pl.cdiv(self.T, plan.tile)
        self.width = channels // plan.parts
        self.grid = (plan.parts, B, self.tiles)
        self.reverse = reverse

    def time(self, step):
        return self.tiles - 1 - step if self.reverse else step

    def tokens(self, width=None) -> pl.BlockSpec:
        column = (lambda p: p) if width is None else (lambda p: 0)
        shape = (None, self.plan.tile, width or self.width)
        return pl.BlockSpec(shape, lambda p, b, s: (b, self.time(s), column(p)))

    def before(self) -> pl.BlockSpec:
        """The rows right before a tile; for the first tile any."""
        ahead = self.plan.tile // BEFORE
        return pl.BlockSpec(
            (None, BEFORE, self.width),
            lambda p, b, s: (b, jnp.maximum(self.time(s) * ahead - 1, 0), p),
        )

    def row(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, HALO, self.width), lambda p, b, s: (b, 0, p))

    def weights(self, *lead: int) -> pl.BlockSpec:
        return pl.BlockSpec((*lead, self.width), lambda p, b, s: (*[0] * len(lead), p))

    def scratch(self, *, tail: bool = False):
        rows = self.plan.tile + (2 if tail else 1) * HALO
        return pltpu.VMEM((self.width // LANES, rows, LANES), jnp.float32)

    def masks(self):
        rows = self.plan.tile + 2 * HALO
        return pltpu.VMEM((self.taps, rows, LANES), jnp.int32)

    def params(self):
        return pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        )


def _forward(plan, x, taps, halo, reach):
    at = _Layout(plan, x.shape, taps.shape[0], reverse=False)
    masks = [] if reach is None else [reach]
    return pl.pallas_call(
        functools.partial(_forward_kernel, at),
        grid=at.grid,
        in_specs=[at.tokens(), at.weights(at.taps), at.row(), *[at.tokens(1)] * len(masks)],
        out_specs=at.tokens(),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[at.scratch(), at.masks()],
        compiler_params=at.params(),
        name="short_conv_forward",
    )(x, taps, halo, *masks)


def _backward(plan, x, taps, halo, reach, dy):
    at = _Layout(plan, x.shape, taps.shape[0], reverse=True)
    masks = [] if reach is None else [reach]
    B, _, channels = x.shape
    dx, d_taps, d_halo = pl.pallas_call(
        functools.partial(_backward_kernel, at),
        grid=at.grid,
        in_specs=[at.tokens(), at.before(), at.tokens(), at.weights(at.taps), at.row()]
        + [at.tokens(1)] * len(masks),
        out_specs=[at.tokens(), at.weights(at.taps, HALO), at.row()],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((at.taps, HALO, channels), jnp.float32),
            jax.ShapeDtypeStruct((B, HALO, channels), jnp.float32),
        ],
        scratch_shapes=[at.scratch(), at.scratch(tail=True), at.masks()],
        compiler_params=at.params(),
        name="short_conv_backward",
    )(x, x, dy, taps, halo, *masks)
    return dx, d_taps.sum(1), d_halo


def _columns(at: _Layout, body):
    """`body(group, columns)` for each group of 128 columns."""

    def step(n, _):
        for j in range(UNROLL):
            group = n * UNROLL + j
            body(group, pl.ds(pl.multiple_of(group * LANES, LANES), LANES))
        return 0

    groups = at.width // LANES
    if groups % UNROLL:
        for n in range(groups):
            body(n, pl.ds(n * LANES, LANES))
    else:
        jax.lax.fori_loop(0, groups // UNROLL, step, 0)


def _set_masks(at: _Layout, reach, masks, time):
    """All ones where a tap counts, else zero: an `and` with it removes whatever stands there, NaN too."""
    bits = jnp.broadcast_to(reach[...], (at.plan.tile, LANES))
    if at.T % at.plan.tile:
        row = jax.lax.broadcasted_iota(jnp.int32, bits.shape, 0)
        bits = jnp.where(row + time * at.plan.tile < at.T, bits, 0)
    for d in range(at.taps):
        masks[d, pl.ds(HALO, at.plan.tile)] = -((bits >> d) & 1)


def _keep(x, mask):
    return pltpu.bitcast(pltpu.bitcast(x, jnp.int32) & mask, jnp.float32)


def _strips(tile: int):
    """(first row, rows) of each strip of a tile."""
    size = min(tile, STRIP)
    return [(r, size) for r in range(0, tile, size)]


def _fill(at: _Layout, xs, masks, group, new, first):
    """A tile in float32, padding cleared, and the rows before it."""
    xs[group, :HALO] = first
    for r, rows in _strips(at.plan.tile):
        part = new[r : r + rows].astype(jnp.float32)
        if at.plan.masked:
            part = _keep(part, masks[0, pl.ds(HALO + r, rows)])
        xs[group, pl.ds(HALO + r, rows)] = part


def _convolve(at: _Layout, xs, masks, group, taps, columns, r, rows):
    """(taps' inputs, nearest first; their sum with the weights) of a strip."""
    inputs, z = [], jnp.zeros((rows, LANES), jnp.float32)
    for d in range(at.taps):
        tap = xs[group, pl.ds(HALO + r - d, rows)]
        if at.plan.masked and d:
            tap = _keep(tap, masks[d, pl.ds(HALO + r, rows)])
        inputs.append(tap)
        term = tap * taps[pl.ds(at.taps - 1 - d, 1), columns]
        z = z + term if d else term
    return inputs, z


def _forward_kernel(at: _Layout, x, taps, halo, *refs):
    *reach, y, xs, masks = refs
    step, tile = pl.program_id(2), at.plan.tile
    if at.plan.masked:
        _set_masks(at, reach[0], masks, step)

    def body(group, columns):
        first = jnp.where(step == 0, halo[:, columns], xs[group, pl.ds(tile, HALO)])
        _fill(at, xs, masks, group, x[:, columns], first)
        for r, rows in _strips(tile):
            _, z = _convolve(at, xs, masks, group, taps, columns, r, rows)
            half = 0.5 * z
            y[pl.ds(r, rows), columns] = (half * jnp.tanh(half) + half).astype(y.dtype)

    _columns(at, body)


def _backward_kernel(at: _Layout, x, before, dy, taps, halo, *refs):
    *reach, dx, d_taps, d_halo, xs, zs, masks = refs
    step, tile = pl.program_id(2), at.plan.tile
    time = at.time(step)

    @pl.when((step == 0) & (pl.program_id(1) == 0))
    def _():
        d_taps[...] = jnp.zeros_like(d_taps)

    if at.plan.masked:
        for d in range(at.taps):  # the rows after this tile are the first of the one before it
            masks[d, pl.ds(HALO + tile, HALO)] = masks[d, pl.ds(HALO, HALO)]
            masks[d, :HALO] = jnp.zeros((HALO, LANES), jnp.int32)
        _set_masks(at, reach[0], masks, time)

    def body(group, columns):
        first = before[pl.ds(BEFORE - HALO, HALO), columns].astype(jnp.float32)
        _fill(at, xs, masks, group, x[:, columns], jnp.where(time == 0, halo[:, columns], first))
        after = zs[group, pl.ds(HALO, HALO)]  # of the tile after this one, which came before
        zs[group, pl.ds(HALO + tile, HALO)] = jnp.where(step == 0, 0.0, after)
        zs[group, :HALO] = jnp.zeros((HALO, LANES), jnp.float32)
        sums = [d_taps[n, :, columns] for n in range(at.taps)]
        for r, rows in _strips(tile):
            inputs, z = _convolve(at, xs, masks, group, taps, columns, r, rows)
            sigma = 0.5 * jnp.tanh(0.5 * z) + 0.5
            slope = sigma + z * (sigma - sigma * sigma)
            dz = dy[pl.ds(r, rows), columns].astype(jnp.float32) * slope
            if at.plan.masked:
                dz = _keep(dz, masks[0, pl.ds(HALO + r, rows)])
            zs[group, pl.ds(HALO + r, rows)] = dz
            for d, tap in enumerate(inputs):
                share = dz * tap
                for top in range(0, rows, HALO):
                    sums[at.taps - 1 - d] += share[top : top + HALO]
        for n in range(at.taps):
            d_taps[n, :, columns] = sums[n]

        def spread(start, rows):
            """Cotangent of the inputs in some rows, counted from the halo's first."""
            total = jnp.zeros((rows, LANES), jnp.float32)
            for d in range(at.taps):
                later = zs[group, pl.ds(start + d, rows)]
                if at.plan.masked and d:
                    later = _keep(later, masks[d, pl.ds(start + d, rows)])
                term = later * taps[pl.ds(at.taps - 1 - d, 1), columns]
                total = total + term if d else term
            return total

        for r, rows in _strips(tile):
            dx[pl.ds(r, rows), columns] = spread(HALO + r, rows).astype(dx.dtype)

        @pl.when(time == 0)
        def _():
            d_halo[:, columns] = spread(0, HALO)

    _columns(at, body)
