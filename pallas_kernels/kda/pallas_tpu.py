"""KDA on a TPU: what the fused Pallas kernels take, and the layout of their operands.

Both kernels see tokens as rows and heads side by side, [tokens, H K], and a list of blocks: every
document (a row of the batch, or a packed one) fills whole blocks, and a block knows its document.
tpu_calls.py calls the kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.kda.blocks import cut_segments, join_segments, layout, round_up
from k3jax.pallas_kernels.kda.config import Config
from k3jax.pallas_kernels.kda.gates import bounded_gate
from k3jax.pallas_kernels.kda.tpu_calls import LANES, fused, sized, visited
from k3jax.pallas_kernels.kda.tpu_step import CHUNK, Plan

LOWEST_G = -5.0  # nats per token whose sum over a tile of 16 stays inside float32


def unsupported(q, k, v, cu_seqlens, cfg: Config) -> str | None:
    """Why the kernels cannot run a call, or None."""
    kept = cfg.checkpoint_every * CHUNK
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; needs bfloat16 or float32 for both"
    if v.dtype not in (jnp.bfloat16, jnp.float32):
        return f"v is {v.dtype}; needs bfloat16 or float32"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"K = {q.shape[-1]} and V = {v.shape[-1]}; at most 256 fit"
    if cfg.g_min is None or cfg.g_min < LOWEST_G:
        return f"g_min = {cfg.g_min}; needs the promise that g >= {LOWEST_G}"
    if cfg.chunk_size != CHUNK:
        return f"chunk_size = {cfg.chunk_size}; works in chunks of {CHUNK}"
    if cfg.plain_autodiff:
        return "plain_autodiff; a kernel has no derivative but its own"
    if cfg.checkpoint_every > 1 and cu_seqlens is not None:
        return (
            f"checkpoint_every = {cfg.checkpoint_every} with cu_seqlens; keeps every memory there"
        )
    if cfg.checkpoint_every > 1 and cfg.snapshot_every and kept % cfg.snapshot_every:
        return (
            f"snapshot_every = {cfg.snapshot_every} does not divide the {kept} tokens from one kept "
            "memory to the next"
        )
    return None


def pallas_tpu(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "N H K V"],
    real: Bool[Array, "B T"] | None,
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
    return _run(q, k, v, g, beta, gate, state, (real, starts), cu_seqlens, cfg, None)


def from_logits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    z: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    state: Float[Array, "N H K V"],
    real: Bool[Array, "B T"] | None,
    starts: Bool[Array, "B T"] | None,
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> tuple[Float[Array, "B T H V"], Float[Array, "N H K V"], Float[Array, "B S H K V"] | None]:
    """`pallas_tpu` of raw q, k and decay logits: the L2 norms and the bounded gate in the kernel."""
    gate = bounded_gate(A_log, dt_bias).reshape(2, -1)
    return _run(q, k, v, z, beta, gate, state, (real, starts), cu_seqlens, cfg, q.shape[-1] ** -0.5)


def _run(q, k, v, g, beta, gate, state, marks, cu_seqlens, cfg, q_scale):
    if 1 < cfg.checkpoint_every < -(-q.shape[1] // CHUNK):
        return _in_segments(q, k, v, g, beta, gate, state, marks, cfg, q_scale)
    B, T, H, K = q.shape
    V = v.shape[-1]
    real, starts = marks
    plan = Plan(
        chunks=1,  # a document begins a block of its own; packed ones are often short
        heads=1,
        K=round_up(K, LANES),
        V=round_up(V, LANES),
        dtype=str(q.dtype),
        gate=None if q_scale is None else "bounded",
        g_min=cfg.g_min,
        q_scale=q_scale,
        erase=cfg.erase,
        masked=real is not None or cu_seqlens is not None or T % CHUNK != 0,
        snapshots=cfg.snapshot_every is not None,
    )
    plan = sized(plan, H, 1 if cu_seqlens is not None else -(-T // CHUNK))
    if T % plan.tokens:
        plan = dataclasses.replace(plan, masked=True)
    place, owner = layout(B, T, plan.tokens, cu_seqlens)

    def wide(x, width):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    def tokens(x, width):
        return place(wide(x, width).reshape(B, T, -1))

    gate = wide(gate.reshape(2, H, K), plan.K).reshape(2, -1)
    beta = beta.astype(jnp.float32) if real is None else jnp.where(real[..., None], beta, 0.0)
    marks = None
    if plan.masked:
        live = jnp.ones((B, T), jnp.float32) if real is None else real.astype(jnp.float32)
        live = place(live[..., None])
        begins = jnp.zeros_like(live)
        if starts is not None:
            begins = jnp.cumsum(place(starts[..., None] * 1.0).reshape(-1, CHUNK), 1)
        marks = jnp.concatenate([live, begins.reshape(live.shape)], 1)
    memory = jnp.pad(
        jnp.swapaxes(state.astype(jnp.float32), 2, 3),
        [(0, 0), (0, 0), (0, plan.V - V), (0, plan.K - K)],
    )
    o, final, states = fused(
        plan, tokens(q, plan.K), tokens(k, plan.K), tokens(v, plan.V), tokens(g, plan.K),
        place(beta), marks, gate, memory, owner,
    )  # fmt: skip
    final = jnp.where(visited(owner, state.shape[0]), final, memory)
    o = place.back(o).reshape(B, T, H, plan.V)[..., :V]
    snapshots = None
    if cfg.snapshot_every:
        # The memory that enters a chunk; the last one of a row is the memory that leaves it.
        entering = states.reshape(B, -1, *states.shape[1:])
        after = cfg.snapshot_every // CHUNK * jnp.arange(1, T // cfg.snapshot_every + 1)
        memories = jnp.concatenate([entering, final[:, None]], 1)
        snapshots = jnp.swapaxes(memories[:, after, :, :V, :K], 3, 4)
    return o, jnp.swapaxes(final[:, :, :V, :K], 2, 3), snapshots


def _in_segments(q, k, v, g, beta, gate, state, marks, cfg, q_scale):
    """One segment after the other; the backward pass runs each again from the memory kept for it."""
    T, size = q.shape[1], cfg.checkpoint_every * CHUNK
    whole = T // size * size

    cut = functools.partial(cut_segments, size=size)
    static = (dataclasses.replace(cfg, checkpoint_every=1), q_scale)
    segments = [cut(x) for x in (q, k, v, g, beta)]
    o, state, snapshots = _scan_segments(static, segments, gate, state, jax.tree.map(cut, marks))
    o, snapshots = join_segments(o), None if snapshots is None else join_segments(snapshots)
    if whole < T:
        rest = [x[:, whole:] for x in (q, k, v, g, beta)]
        rest_marks = jax.tree.map(lambda x: x[:, whole:], marks)
        tail, state, more = _segment(static, rest, gate, state, rest_marks)
        o = jnp.concatenate([o, tail], 1)
        if snapshots is not None and more is not None:
            snapshots = jnp.concatenate([snapshots, more], 1)
    return o, state, snapshots


def _segment(static, arrays, gate, state, marks):
    cfg, q_scale = static
    q, k, v, g, beta = arrays
    return _run(q, k, v, g, beta, gate, state, marks, None, cfg, q_scale)


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
    d_o, d_state, d_snapshots = cotangents

    def body(carry, xs):
        arrays, state, marks, d_o, d_snapshots = xs

        def run(arrays, gate, state):
            return _segment(static, arrays, gate, state, marks)

        pull = jax.vjp(run, arrays, gate, state)[1]
        d_arrays, d_gate, d_state = pull((d_o, carry[1], d_snapshots))
        return (carry[0] + d_gate, d_state), d_arrays

    start = (jnp.zeros_like(gate), d_state)
    (d_gate, d_state), d_segments = jax.lax.scan(
        body, start, (segments, entering, marks, d_o, d_snapshots), reverse=True
    )
    return d_segments, d_gate, d_state, None


_scan_segments.defvjp(_scan_segments_forward, _scan_segments_backward)
