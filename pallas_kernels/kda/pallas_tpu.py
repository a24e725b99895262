"""KDA on a TPU: one fused Pallas kernel forward, one backward, and the layout of their operands.

Both kernels see tokens as rows and heads side by side, [tokens, H K], and a list of blocks: every
document (a row of the batch, or a packed one) fills whole blocks, and a block knows its document.
pallas_tpu_kernels.py has the algorithm.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.kda.config import Config
from k3jax.pallas_kernels.kda.pallas_tpu_kernels import (
    CHUNK,
    LOG2E,
    TILE,
    Plan,
    backward_kernel,
    forward_kernel,
)

LANES = 128
LOWEST_G = -5.0  # nats per token whose sum over a tile of 16 stays inside float32
VMEM_BYTES = 60 * 2**20
Inputs = dict[str, tuple[Array, pl.BlockSpec]]
Outputs = dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]


def unsupported(q, k, v, cfg: Config) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; needs bfloat16 or float32 for both"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"K = {q.shape[-1]} and V = {v.shape[-1]}; at most 256 fit"
    if cfg.g_min is None or cfg.g_min < LOWEST_G:
        return f"g_min = {cfg.g_min}; needs the promise that g >= {LOWEST_G}"
    if cfg.chunk_size != CHUNK:
        return f"chunk_size = {cfg.chunk_size}; works in chunks of {CHUNK}"
    if cfg.plain_autodiff:
        return "plain_autodiff; a kernel has no derivative but its own"
    return None


def pallas_tpu(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "N H K V"],
    starts: Bool[Array, "B T"] | None,
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"], Float[Array, "B S H K V"] | None]:
    """KDA by the fused kernels; arguments as in `reference.recurrent`.

    Numerics: float32 for g, its sums, the triangular inverse and the memory; other matmul operands
        in q's dtype, accumulated in float32. Causal to the bit.
    Cost: reads q, k, v, g and writes o once; keeps the memory and two [64, 64] matrices per chunk
        for the backward pass. On-chip memory does not depend on T.
    """
    gate = jnp.zeros((2, q.shape[2] * q.shape[3]), jnp.float32)
    return _run(q, k, v, g, beta, gate, state, starts, cu_seqlens, cfg, None)


def from_logits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    z: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    state: Float[Array, "N H K V"],
    starts: Bool[Array, "B T"] | None,
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"], Float[Array, "B S H K V"] | None]:
    """`pallas_tpu` of raw q, k and decay logits: the L2 norms and the bounded gate in the kernel."""
    slope = -jnp.exp(A_log.astype(jnp.float32)) * LOG2E
    slope = jnp.broadcast_to(slope[:, None], dt_bias.shape)
    gate = jnp.stack([slope.reshape(-1), (slope * dt_bias).reshape(-1)])
    return _run(q, k, v, z, beta, gate, state, starts, cu_seqlens, cfg, q.shape[-1] ** -0.5)


def _run(q, k, v, g, beta, gate, state, starts, cu_seqlens, cfg, q_scale):
    if (
        cfg.checkpoint_every > 1
        and cu_seqlens is None
        and q.shape[1] > cfg.checkpoint_every * CHUNK
    ):
        return _in_segments(q, k, v, g, beta, gate, state, starts, cfg, q_scale)
    B, T, H, K = q.shape
    V = v.shape[-1]
    heads = max(n for n in range(1, 5) if H % n == 0)
    if _cores() > 1 and heads == H and heads % 2 == 0:
        heads //= 2  # the cores share the head groups
    # A document begins a block of its own; packed ones are often short.
    chunks = 1 if cu_seqlens is not None else min(4, -(-T // CHUNK))
    plan = Plan(
        chunks=chunks,
        heads=heads,
        K=_round_up(K, LANES),
        V=_round_up(V, LANES),
        dtype=str(q.dtype),
        gate=None if q_scale is None else "bounded",
        g_min=cfg.g_min or LOWEST_G,
        q_scale=q_scale,
        erase=cfg.erase,
        masked=starts is not None or cu_seqlens is not None or T % (chunks * CHUNK) != 0,
        snapshots=cfg.snapshot_every is not None,
    )
    place, owner = _layout(B, T, plan.tokens, cu_seqlens)

    def wide(x, width):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    def tokens(x, width):
        return place(wide(x, width).reshape(B, T, -1))

    gate = wide(gate.reshape(2, H, K), plan.K).reshape(2, -1)
    numbers = [place(beta.astype(jnp.float32)).reshape(-1, CHUNK, H // heads, heads)]
    if plan.masked:
        live = place(jnp.ones((B, T, 1), jnp.float32)).reshape(-1, CHUNK)
        begins = jnp.zeros_like(live)
        if starts is not None:
            begins = jnp.cumsum(place(starts[..., None] * 1.0).reshape(-1, CHUNK), 1)
        marks = jnp.stack([live, begins], -1)[:, :, None]
        numbers.append(jnp.broadcast_to(marks, (*numbers[0].shape[:3], 2)))
    rows = jnp.concatenate(numbers, -1).transpose(2, 0, 3, 1)
    memory = jnp.pad(
        jnp.swapaxes(state.astype(jnp.float32), 2, 3),
        [(0, 0), (0, 0), (0, plan.V - V), (0, plan.K - K)],
    )
    o, final, states = _fused(
        plan, tokens(q, plan.K), tokens(k, plan.K), tokens(v, plan.V), tokens(g, plan.K),
        rows, gate, memory, owner,
    )  # fmt: skip
    visited = jnp.zeros(state.shape[0], bool).at[owner].set(True)  # not by empty documents
    final = jnp.where(visited[:, None, None, None], final, memory)
    o = place.back(o).reshape(B, T, H, plan.V)[..., :V]
    snapshots = None
    if cfg.snapshot_every:
        # The memory that enters a chunk; the last one of a row is the memory that leaves it.
        entering = states.reshape(B, -1, *states.shape[1:])
        after = cfg.snapshot_every // CHUNK * jnp.arange(1, T // cfg.snapshot_every + 1)
        padded = jnp.concatenate([entering, final[:, None]], 1)[:, after, :, :V, :K]
        snapshots = jax.lax.stop_gradient(jnp.swapaxes(padded, 3, 4))
    return o, jnp.swapaxes(final[:, :, :V, :K], 2, 3), snapshots


def _in_segments(q, k, v, g, beta, gate, state, starts, cfg, q_scale):
    """One segment after the other; the backward pass runs each again from the memory kept for it."""
    T, size = q.shape[1], cfg.checkpoint_every * CHUNK
    if cfg.snapshot_every and size % cfg.snapshot_every:
        raise ValueError(
            f"checkpoint_every={cfg.checkpoint_every} chunks are no multiple of "
            f"snapshot_every={cfg.snapshot_every} tokens"
        )
    whole = T // size * size
    marks = jnp.zeros(q.shape[:2], bool) if starts is None else starts

    def cut(x):
        x = x[:, :whole].reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    static = (dataclasses.replace(cfg, checkpoint_every=1), q_scale, starts is not None)
    segments = [cut(x) for x in (q, k, v, g, beta)]
    o, state, snapshots = _scan_segments(static, segments, gate, state, cut(marks))
    o, snapshots = joined(o), None if snapshots is None else joined(snapshots)
    if whole < T:
        rest = [x[:, whole:] for x in (q, k, v, g, beta)]
        tail, state, more = _segment(static, rest, gate, state, marks[:, whole:])
        o = jnp.concatenate([o, tail], 1)
        if snapshots is not None and more is not None:
            snapshots = jnp.concatenate([snapshots, more], 1)
    return o, state, snapshots


def _segment(static, arrays, gate, state, marks):
    cfg, q_scale, marked = static
    q, k, v, g, beta = arrays
    return _run(q, k, v, g, beta, gate, state, marks if marked else None, None, cfg, q_scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_segments(static, segments, gate, state, marks):
    return _scan_segments_forward(static, segments, gate, state, marks)[0]


def _scan_segments_forward(static, segments, gate, state, marks):
    def body(state, xs):
        o, leaving, snapshots = _segment(static, xs[0], gate, state, xs[1])
        return leaving, (o, snapshots, state)

    leaving, (o, snapshots, entering) = jax.lax.scan(body, state, (segments, marks))
    return (o, leaving, snapshots), (segments, gate, entering, marks)


def _scan_segments_backward(static, residuals, cotangents):
    segments, gate, entering, marks = residuals
    d_o, d_state, _ = cotangents

    def body(carry, xs):
        arrays, state, marks, d_o = xs

        def run(arrays, gate, state):
            return _segment(static, arrays, gate, state, marks)[:2]

        d_arrays, d_gate, d_state = jax.vjp(run, arrays, gate, state)[1]((d_o, carry[1]))
        return (carry[0] + d_gate, d_state), d_arrays

    start = (jnp.zeros_like(gate), d_state)
    (d_gate, d_state), d_segments = jax.lax.scan(
        body, start, (segments, entering, marks, d_o), reverse=True
    )
    return d_segments, d_gate, d_state, None


_scan_segments.defvjp(_scan_segments_forward, _scan_segments_backward)


def _cores() -> int:
    """TensorCores behind one device: a v5p has two, which share the parallel grid dimension."""
    kind = jax.sharding.get_abstract_mesh().abstract_device
    if kind is None and jax.default_backend() != "tpu":
        return 1  # interpreted
    return pltpu.get_tpu_info().num_cores


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class _Rows:
    """[B, T, X] to [B T', X] and back: every row of the batch fills whole blocks."""

    def __init__(self, B: int, T: int, block: int):
        self.B, self.T, self.padded = B, T, _round_up(T, block)

    def __call__(self, x):
        x = jnp.pad(x, ((0, 0), (0, self.padded - self.T), (0, 0)))
        return x.reshape(self.B * self.padded, x.shape[-1])

    def back(self, x):
        return x.reshape(self.B, self.padded, x.shape[-1])[:, : self.T]


class _Documents:
    """[1, T, X] to [T', X] and back: every packed document begins a block."""

    def __init__(self, source, slot):
        self.source, self.slot = source, slot

    def __call__(self, x):
        return jnp.take(x[0], self.source, axis=0, mode="fill", fill_value=0)

    def back(self, x):
        return jnp.take(x, self.slot, axis=0, mode="fill", fill_value=0)[None]


def _layout(B: int, T: int, block: int, cu_seqlens):
    """Where tokens lie, and the document of each block."""
    if cu_seqlens is None:
        place = _Rows(B, T, block)
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
    return _Documents(source, slot), owner.astype(jnp.int32)


# q, k, v, g [tokens, H X]; rows [H / heads, chunks, R, 64]: beta of each head, then, if masked, which
# tokens are real and how many documents have begun in the chunk; gate [2, H K]: slope and bias of
# the gate's exponent; memory [N, H, V, K]; owner [blocks]: the document of each block.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(plan: Plan, q, k, v, g, rows, gate, memory, owner):
    out = _forward(plan, q, k, v, g, rows, gate, memory, owner)
    return out["o"], out["final"], out.get("states")


def _fused_forward(plan, q, k, v, g, rows, gate, memory, owner):
    out = _forward(dataclasses.replace(plan, save=True), q, k, v, g, rows, gate, memory, owner)
    kept = (out["states"], out["saved_reads"], out.get("saved_inverse"))
    states = out["states"] if plan.snapshots else None
    return (out["o"], out["final"], states), (q, k, v, g, rows, gate, owner, memory.shape, kept)


def _fused_backward(plan, residuals, cotangents):
    q, k, v, g, rows, gate, owner, shape, (states, reads, inverse) = residuals
    d_o, d_final, _ = cotangents
    d = _backward(plan, q, k, v, g, rows, gate, owner, states, reads, inverse, d_o, d_final)
    d_rows = jnp.zeros_like(rows).at[:, :, : plan.heads].set(d["d_beta"])
    visited = jnp.zeros(shape[0], bool).at[owner].set(True)[:, None, None, None]
    d_memory = jnp.where(visited, d["d_state"], 0.0)
    d_gate = d["d_gate"].sum(0)
    return d["dq"], d["dk"], d["dv"], d["dg"], d_rows, d_gate, d_memory, None


_fused.defvjp(_fused_forward, _fused_backward)


def _call(kernel, name, plan, grid, scalars, inputs: Inputs, outputs: Outputs, scratch):
    """One kernel over (head groups, blocks); everything by name, as the kernel sees it."""
    names = (*scalars, *inputs, *outputs, *scratch)
    out = pl.pallas_call(
        functools.partial(kernel, dataclasses.replace(plan, names=names)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch.values()],
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name=name,
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    return dict(zip(outputs, out, strict=True))


class _Blocks:
    """Block specs of a plan; `at` gives the block of tokens that a grid step works on."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def tokens(self, width, at):
        shape = (self.plan.tokens, self.plan.heads * width)
        return pl.BlockSpec(shape, lambda h, t, *_: (at(t), h))

    def rows(self, count, at):
        shape = (1, self.plan.chunks, count, CHUNK)
        return pl.BlockSpec(shape, lambda h, t, *_: (h, at(t), 0, 0))

    def chunks(self, shape, at):
        shape = (self.plan.chunks, self.plan.heads, *shape)
        return pl.BlockSpec(shape, lambda h, t, *_: (at(t), h, 0, 0))

    def memory(self, at):
        shape = (1, self.plan.heads, self.plan.V, self.plan.K)
        return pl.BlockSpec(shape, lambda h, t, owner, _: (owner[at(t)], h, 0, 0))

    def gate(self):
        return pl.BlockSpec((2, self.plan.heads * self.plan.K), lambda h, t, *_: (0, h))


def _operands(plan: Plan):
    """Scratch of both kernels: what `_Step` makes of the inputs of every chain."""
    N, K, op = len(plan.chains), plan.K, jnp.dtype(plan.dtype)
    return {
        "sums": ((N, CHUNK, K), jnp.float32),
        "q_unit": ((N, CHUNK, K), op),
        "k_unit": ((N, CHUNK, K), op),
        "near_rows": ((N, 2 * CHUNK, K), op),
        "near_columns": ((N, CHUNK, K), op),
        "between_columns": ((N, 6 * TILE, K), op),
        "far_rows": ((N, 2 * CHUNK, K), op),
        "far_columns": ((N, CHUNK, K), op),
        "through": ((N, 1, K), jnp.float32),
    }


def _forward(plan: Plan, q, k, v, g, rows, gate, memory, owner):
    N, blocks = len(plan.chains), q.shape[0] // plan.tokens
    H, op, of = q.shape[1] // plan.K, jnp.dtype(plan.dtype), _Blocks(plan)

    def now(t):
        return jnp.minimum(t, blocks - 1)

    def late(t):  # the block that meets the memory
        return jnp.maximum(t - 1, 0)

    first = jnp.concatenate([jnp.ones(1, bool), owner[1:] != owner[:-1]]).astype(jnp.int32)
    inputs = {
        "q": (q, of.tokens(plan.K, now)),
        "k": (k, of.tokens(plan.K, now)),
        "v": (v, of.tokens(plan.V, late)),
        "g": (g, of.tokens(plan.K, now)),
        "rows": (rows, of.rows(rows.shape[2], now)),
        "late_rows": (rows, of.rows(rows.shape[2], late)),
        "gate": (gate, of.gate()),
        "state": (memory, of.memory(late)),
    }
    outputs = {
        "o": (jax.ShapeDtypeStruct(v.shape, v.dtype), of.tokens(plan.V, late)),
        "final": (jax.ShapeDtypeStruct(memory.shape, jnp.float32), of.memory(late)),
    }
    chunks = blocks * plan.chunks
    if plan.save or plan.snapshots:
        shape = jax.ShapeDtypeStruct(
            (chunks, H, plan.V, plan.K), jnp.float32 if plan.snapshots else op
        )
        outputs["states"] = (shape, of.chunks((plan.V, plan.K), late))
    if plan.save:
        square = (
            jax.ShapeDtypeStruct((chunks, H, CHUNK, CHUNK), op),
            of.chunks((CHUNK, CHUNK), late),
        )
        outputs["saved_reads"] = square
        if plan.erase:
            outputs["saved_inverse"] = square
    scratch = {"memory": ((plan.heads, plan.V, plan.K), jnp.float32), **_operands(plan)}
    scratch["reads"] = ((N, CHUNK, CHUNK), op)
    if plan.erase:
        scratch["L"] = ((N, CHUNK, CHUNK), jnp.float32)
        scratch["inverse"] = ((N, CHUNK, CHUNK), op)
    grid = (H // plan.heads, blocks + 1)
    scalars = {"owner": owner, "first": first}
    return _call(forward_kernel, "kda_forward", plan, grid, scalars, inputs, outputs, scratch)


def _backward(plan: Plan, q, k, v, g, rows, gate, owner, states, reads, inverse, d_o, d_final):
    blocks = q.shape[0] // plan.tokens
    N, H, op, of = len(plan.chains), q.shape[1] // plan.K, jnp.dtype(plan.dtype), _Blocks(plan)

    def at(t):
        return blocks - 1 - t

    last = jnp.concatenate([owner[1:] != owner[:-1], jnp.ones(1, bool)]).astype(jnp.int32)
    keys, values = of.tokens(plan.K, at), of.tokens(plan.V, at)
    square = of.chunks((CHUNK, CHUNK), at)
    inputs = {
        "q": (q, keys),
        "k": (k, keys),
        "v": (v, values),
        "g": (g, keys),
        "rows": (rows, of.rows(rows.shape[2], at)),
        "gate": (gate, of.gate()),
        "states": (states, of.chunks((plan.V, plan.K), at)),
        "reads": (reads, square),
        "d_o": (d_o, values),
        "d_final": (d_final, of.memory(at)),
    }
    if plan.erase:
        inputs["inverse"] = (inverse, square)

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    groups = H // plan.heads
    beta = jax.ShapeDtypeStruct((groups, rows.shape[1], plan.heads, CHUNK), jnp.float32)
    sums = jax.ShapeDtypeStruct((blocks, *gate.shape), jnp.float32)
    outputs = {
        "dq": (like(q), keys),
        "dk": (like(k), keys),
        "dv": (like(v), values),
        "dg": (like(g), keys),
        "d_beta": (beta, of.rows(plan.heads, at)),
        "d_gate": (
            sums,
            pl.BlockSpec((1, 2, plan.heads * plan.K), lambda h, t, *_: (at(t), 0, h)),
        ),
        "d_state": (like(d_final), of.memory(at)),
    }
    scratch = {
        "d_memory": ((plan.heads, plan.V, plan.K), jnp.float32),
        **_operands(plan),
        "d_sums": ((N, CHUNK, plan.K), jnp.float32),
        "d_leaves": ((N, CHUNK, plan.K), jnp.float32),
        "errors": ((N, CHUNK, plan.V), op),
        "d_rows_v": ((N, 2 * CHUNK, plan.V), op),
        "d_leaving": ((N, plan.V, plan.K), op),
    }
    if plan.gate:
        scratch["decay"] = ((N, CHUNK, plan.K), jnp.float32)
    if plan.q_scale is not None:
        scratch |= dict.fromkeys(("q_norm", "k_norm"), ((N, CHUNK, 1), jnp.float32))
    scalars = {"owner": owner, "last": last}
    grid = (groups, blocks)
    return _call(backward_kernel, "kda_backward", plan, grid, scalars, inputs, outputs, scratch)
