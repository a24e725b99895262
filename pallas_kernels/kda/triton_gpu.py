"""KDA on an NVIDIA GPU: what the Triton kernels take, and the layout of their operands.

The kernels see tokens as rows, [tokens, H, K], in chunks of 32; a sequence (a row of the batch, or
a packed document) fills whole chunks. gpu_calls.py calls them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import triton_call
from k3jax.pallas_kernels.kda.blocks import cut_segments, join_segments, layout
from k3jax.pallas_kernels.kda.config import Config
from k3jax.pallas_kernels.kda.gates import bounded_gate
from k3jax.pallas_kernels.kda.gpu_calls import CHUNK, Plan, fused

LOWEST_G = -5.0  # nats per token whose sum over half a chunk stays inside float32
WIDEST = 128  # channels that fit


def unsupported(q, k, v, cu_seqlens, cfg: Config) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if (reason := triton_call.unavailable()) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k {k.dtype}; needs bfloat16 or float32 for both"
    if v.dtype not in (jnp.bfloat16, jnp.float32):
        return f"v is {v.dtype}; needs bfloat16 or float32"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"K = {q.shape[-1]} and V = {v.shape[-1]}; at most {WIDEST} fit"
    if cfg.g_min is None or cfg.g_min < LOWEST_G:
        return f"g_min = {cfg.g_min}; needs the promise that g >= {LOWEST_G}"
    if cfg.plain_autodiff:
        return "plain_autodiff; a kernel has no derivative but its own"
    if cfg.checkpoint_every > 1:
        return f"checkpoint_every = {cfg.checkpoint_every}; keeps every memory"
    return None


def triton_gpu(
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
    Cost: three intermediates of k's size between the kernels; for the backward pass the memory
        entering each chunk in q's dtype and two [32, 32] matrices per chunk are kept.
    """
    gate = jnp.zeros((2, *q.shape[2:]), jnp.float32)
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
    """`triton_gpu` of raw q, k and decay logits: L2 norms and the bounded gate in the kernels."""
    gate = bounded_gate(A_log, dt_bias)
    return _run(q, k, v, z, beta, gate, state, (real, starts), cu_seqlens, cfg, q.shape[-1] ** -0.5)


def _with_snapshots(q, k, v, z, beta, gate, state, marks, cfg, q_scale):
    """One call after the other, for each snapshot one: the kernels keep memories in q's dtype."""
    every = cfg.snapshot_every
    whole, cfg = q.shape[1] // every * every, dataclasses.replace(cfg, snapshot_every=None)
    tokens = (q, k, v, z, beta), marks

    def body(state, tokens):
        (q, k, v, z, beta), marks = tokens
        o, state, _ = _run(q, k, v, z, beta, gate, state, marks, None, cfg, q_scale)
        return state, (o, state)

    state, (o, snapshots) = jax.lax.scan(
        body, state, jax.tree.map(lambda x: cut_segments(x, every), tokens)
    )
    o = join_segments(o)
    if whole < q.shape[1]:
        state, (rest, _) = body(state, jax.tree.map(lambda x: x[:, whole:], tokens))
        o = jnp.concatenate([o, rest], 1)
    return o, state, jnp.moveaxis(snapshots, 0, 1)


def _run(q, k, v, z, beta, gate, state, marks, cu_seqlens, cfg, q_scale):
    if cfg.snapshot_every is not None:
        return _with_snapshots(q, k, v, z, beta, gate, state, marks, cfg, q_scale)
    (B, T, H, K), V = q.shape, v.shape[-1]
    real, starts = marks
    plan = Plan(
        K=triton_call.power_of_two(K, 16),
        V=triton_call.power_of_two(V, 16),
        g_min=cfg.g_min,
        q_scale=q_scale,
        erase=cfg.erase,
        masked=real is not None or cu_seqlens is not None or T % CHUNK != 0,
        exact=q.dtype == jnp.float32,
    )
    place, owner = layout(B, T, CHUNK, cu_seqlens)

    def tokens(x, width):
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
        return place(x.reshape(B, T, -1)).reshape(-1, H, width)

    marks = jnp.zeros((1, CHUNK), jnp.int32)
    if plan.masked:
        begins = jnp.zeros((B, T), jnp.int32) if starts is None else starts.astype(jnp.int32)
        live = jnp.ones((B, T), bool) if real is None else real
        # Places of no token are 0, tokens 1 more than they mean.
        code = place((live * (1 + begins))[..., None]).reshape(-1, CHUNK)
        begun = jnp.cumsum(code == 2, 1, dtype=jnp.int32)
        marks = jnp.where(code > 0, begun, -1 - begun)
    memory = jnp.pad(
        jnp.swapaxes(state.astype(jnp.float32), 2, 3),
        [(0, 0), (0, 0), (0, plan.V - V), (0, plan.K - K)],
    )
    count = jnp.zeros(state.shape[0], jnp.int32).at[owner].add(1)
    beta = beta.astype(jnp.float32)
    o, final = fused(
        plan, tokens(q, plan.K), tokens(k, plan.K), tokens(v, plan.V), tokens(z, plan.K),
        place(beta), jnp.pad(gate, [(0, 0), (0, 0), (0, plan.K - K)]), memory, marks,
        jnp.cumsum(count, dtype=jnp.int32) - count, count,
    )  # fmt: skip
    o = place.back(o.reshape(-1, H * plan.V)).reshape(B, T, H, plan.V)[..., :V]
    return o, jnp.swapaxes(final[:, :, :V, :K], 2, 3), None
