"""The calls of the TPU kernels of KDA: the size of a grid step, blocks, scratch, derivative rule."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from k3jax.pallas_kernels.kda.blocks import round_up
from k3jax.pallas_kernels.kda.tpu_backward import backward_kernel
from k3jax.pallas_kernels.kda.tpu_forward import forward_kernel
from k3jax.pallas_kernels.kda.tpu_step import CHUNK, TILE, TILES, Plan
from k3jax.pallas_kernels.tpu_chip import SPARE, VMEM_BYTES, cores

LANES = 128
MOST_CHAINS = 32  # a step: the compiler takes longer than in proportion
Inputs = dict[str, tuple[Array, pl.BlockSpec]]
Outputs = dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]


def sized(plan: Plan, H: int, count: int) -> Plan:
    """`plan` with as many chunks and heads a step as the backward kernel takes, for `count` chunks."""
    for heads in _divisors(H, 4):
        for most in (8, 4):
            # The number that pads a row least, and the largest of such.
            sizes = range(min(count, most), min(count, 4) - 1, -1)
            size = min(sizes, key=lambda size: round_up(count, size))
            sized = dataclasses.replace(plan, heads=heads, chunks=size)
            if _fits(sized):
                return sized
    return dataclasses.replace(plan, heads=1, chunks=min(count, 2))


def _forward_plan(plan: Plan, H: int) -> Plan:
    """More heads a step than backward, and fewer chunks: the pipeline fills and drains sooner."""
    chunks = 4 if plan.chunks == 8 else plan.chunks
    for heads in _divisors(H, 8):
        wider = dataclasses.replace(plan, heads=heads, chunks=chunks)
        if len(wider.chains) <= MOST_CHAINS and _fits(wider):
            return wider
    return dataclasses.replace(plan, chunks=chunks)


def _divisors(H: int, most: int) -> list[int]:
    """Of the number of heads, largest first; both cores of a v5p share the groups of heads."""
    return [n for n in range(most, 0, -1) if H % n == 0 and (H // n) % min(cores(), H) == 0] or [1]


def _fits(plan: Plan) -> bool:
    """Whether a step of the backward kernel, the larger one, has room: scratch, and blocks twice."""

    def size(shape, dtype):
        itemsize = jnp.dtype(dtype).itemsize
        *lead, rows, lanes = shape
        return math.prod(lead) * round_up(rows, 32 // itemsize) * round_up(lanes, LANES) * itemsize

    plan = dataclasses.replace(plan, masked=True)  # the size of a step may bring padding
    tokens = plan.tokens * plan.heads * (6 * plan.K + 3 * plan.V)
    squares = len(plan.chains) * 2 * CHUNK * LANES
    states = len(plan.chains) * plan.V * plan.K
    blocks = (tokens + squares) * jnp.dtype(plan.dtype).itemsize
    blocks += states * (8 if plan.snapshots else jnp.dtype(plan.dtype).itemsize)
    memories = 4 * plan.heads * plan.V * plan.K * 2
    scratch = sum(size(shape, dtype) for shape, dtype in _backward_scratch(plan).values())
    return scratch + 2 * (blocks + memories) <= VMEM_BYTES - SPARE


# q, k, v, g [tokens, H X]; beta [tokens, H]; marks [tokens, 2], if masked: which tokens are real, and
# how many documents have begun in the chunk; gate [2, H K]: slope and bias of
# the gate's exponent; memory [N, H, V, K]; owner [blocks]: the document of each block. q, k, v and g
# as they come, the rest float32.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(plan: Plan, q, k, v, g, beta, marks, gate, memory, owner):
    out = _forward(plan, q, k, v, g, beta, marks, gate, memory, owner)
    return out["o"], out["final"], out.get("states")


def visited(owner, documents: int):
    """[N, 1, 1, 1]: which documents have a block, so that a kernel has written their memory."""
    return jnp.zeros(documents, bool).at[owner].set(True)[:, None, None, None]


def _fused_forward(plan, q, k, v, g, beta, marks, gate, memory, owner):
    out = _forward(
        dataclasses.replace(plan, save=True), q, k, v, g, beta, marks, gate, memory, owner
    )
    kept = (out["states"], out["saved_reads"], out.get("saved_inverse"))
    states = out["states"] if plan.snapshots else None
    inputs = (q, k, v, g, beta, marks, gate, owner)
    return (out["o"], out["final"], states), (inputs, memory.shape, kept)


def _fused_backward(plan, residuals, cotangents):
    inputs, shape, kept = residuals
    beta, owner = inputs[4], inputs[-1]
    d = _backward(plan, *inputs, *kept, *cotangents)
    d_beta = d["d_beta"].transpose(1, 3, 0, 2).reshape(beta.shape)
    d_memory = jnp.where(visited(owner, shape[0]), d["d_state"], 0.0)
    d_gate = d["d_gate"].sum(0)
    return d["dq"], d["dk"], d["dv"], d["dg"], d_beta, None, d_gate, d_memory, None


fused.defvjp(_fused_forward, _fused_backward)


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


def _rows(plan: Plan, beta, marks):
    """[H / heads, chunks, R, 64], a token per lane: beta of each head, then the marks."""
    numbers = beta.reshape(-1, CHUNK, beta.shape[1] // plan.heads, plan.heads)
    if marks is not None:
        marks = jnp.broadcast_to(marks.reshape(-1, CHUNK, 1, 2), (*numbers.shape[:3], 2))
        numbers = jnp.concatenate([numbers, marks], -1)
    return numbers.transpose(2, 0, 3, 1)


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
    """Scratch of both kernels: what `Step` makes of the inputs of every chain."""
    N, K, op = len(plan.chains), plan.K, jnp.dtype(plan.dtype)
    scratch = {
        "sums": ((N, CHUNK, K), jnp.float32),
        "totals": ((N, 2 * TILES, K), jnp.float32),
        "q_unit": ((N, CHUNK, K), jnp.float32),
        "k_unit": ((N, CHUNK, K), jnp.float32),
        "near_rows": ((N, 2 * CHUNK, K), op),
        "near_columns": ((N, CHUNK, K), op),
        "between_columns": ((N, 6 * TILE, K), op),
        "far_rows": ((N, 2 * CHUNK, K), op),
        "far_columns": ((N, CHUNK, K), op),
        "through": ((N, 1, K), jnp.float32),
        # Numbers per token, copied along the lanes.
        "beta": ((N, CHUNK, K), jnp.float32),
    }
    if plan.masked:
        n, width = plan.chunks, max(K, plan.V)
        marks = dict.fromkeys(("live", "enters", "leaves"), ((n, CHUNK, width), jnp.float32))
        scratch |= marks | {
            "alike": ((n, CHUNK, CHUNK), jnp.float32),
            "passes": ((n, 1, width), jnp.float32),
        }
    return scratch


def _forward_scratch(plan: Plan):
    N, op = len(plan.chains), jnp.dtype(plan.dtype)
    scratch = {"memory": ((plan.heads, plan.V, plan.K), jnp.float32), **_operands(plan)}
    if plan.masked:
        scratch["late_live"] = scratch["live"]  # of the block that meets the memory
    scratch["reads"] = ((N, CHUNK, CHUNK), op)
    if plan.erase:
        scratch["L"] = ((N, CHUNK, CHUNK), jnp.float32)
        scratch["blocks"] = ((N, TILE, CHUNK), jnp.float32)
        scratch["inverse"] = ((N, CHUNK, CHUNK), op)
    return scratch


def _backward_scratch(plan: Plan):
    N, op = len(plan.chains), jnp.dtype(plan.dtype)
    scratch = {
        "d_memory": ((plan.heads, plan.V, plan.K), jnp.float32),
        **_operands(plan),
        "d_leaving": ((N, plan.V, plan.K), op),
        "d_rows_v": ((N, 2 * CHUNK, plan.V), op),
        "errors": ((N, CHUNK, plan.V), op),
        "d_scores": ((N, 2 * CHUNK, CHUNK), op),
        "d_near": ((N, 2 * CHUNK, plan.K), jnp.float32),
        "d_far": ((N, 2 * CHUNK, plan.K), jnp.float32),
        "d_near_columns": ((N, CHUNK, plan.K), jnp.float32),
        "d_between": ((N, 6 * TILE, plan.K), jnp.float32),
        "d_columns": ((N, CHUNK, plan.K), jnp.float32),
        "d_sums": ((N, CHUNK, plan.K), jnp.float32),
        "d_leaves": ((N, CHUNK, plan.K), jnp.float32),
        "written": ((N, CHUNK, plan.K), op),
        "passing": ((N, 1, plan.K), jnp.float32),
        "own": ((N, CHUNK, plan.K), jnp.float32),
    }
    if plan.gate:
        scratch["decay"] = ((N, CHUNK, plan.K), jnp.float32)
    if plan.q_scale is not None:
        scratch |= dict.fromkeys(("q_norm", "k_norm"), ((N, CHUNK, plan.K), jnp.float32))
    return scratch


def _forward(plan: Plan, q, k, v, g, beta, marks, gate, memory, owner):
    longer, plan = plan.chunks, _forward_plan(plan, beta.shape[1])
    owner, rows = jnp.repeat(owner, longer // plan.chunks), _rows(plan, beta, marks)
    blocks = q.shape[0] // plan.tokens
    H, op, of = beta.shape[1], jnp.dtype(plan.dtype), _Blocks(plan)

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
    scratch = _forward_scratch(plan)
    grid = (H // plan.heads, blocks + 1)
    scalars = {"owner": owner, "first": first}
    return _call(forward_kernel, "kda_forward", plan, grid, scalars, inputs, outputs, scratch)


def _backward(
    plan: Plan, q, k, v, g, beta, marks, gate, owner, states, reads, inverse, d_o, d_final, d_states
):
    blocks = q.shape[0] // plan.tokens
    H, of, rows = beta.shape[1], _Blocks(plan), _rows(plan, beta, marks)

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
    if plan.snapshots:
        inputs["d_states"] = (d_states, of.chunks((plan.V, plan.K), at))

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    groups = H // plan.heads
    d_beta = jax.ShapeDtypeStruct((groups, rows.shape[1], plan.heads, CHUNK), jnp.float32)
    sums = jax.ShapeDtypeStruct((blocks, *gate.shape), jnp.float32)
    outputs = {
        "dq": (like(q), keys),
        "dk": (like(k), keys),
        "dv": (like(v), values),
        "dg": (like(g), keys),
        "d_beta": (d_beta, of.rows(plan.heads, at)),
        "d_gate": (
            sums,
            pl.BlockSpec((1, 2, plan.heads * plan.K), lambda h, t, *_: (at(t), 0, h)),
        ),
        "d_state": (like(d_final), of.memory(at)),
    }
    scratch = _backward_scratch(plan)
    scalars = {"owner": owner, "last": last}
    grid = (groups, blocks)
    return _call(backward_kernel, "kda_backward", plan, grid, scalars, inputs, outputs, scratch)
