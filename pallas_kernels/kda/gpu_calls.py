"""The calls of the GPU kernels of KDA: grids, the split of long sequences, the derivative rule."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.kda.gates import LOG2E
from k3jax.pallas_kernels.triton_call import triton_call

CHUNK = 32
# A sequence is split inside the device until this many programs carry a memory, one for each
# multiprocessor of an H200, but not into parts of fewer chunks than that.
PROGRAMS, PART = 132, 16
# Chosen on an H200 (benchmarks/gpu/RESULTS.md): ms at B, T, H = 1, 8192, 96.
PREPARE_WARPS = 2  # 0.73, with `invert`; 4 warps take 0.85, 8 take 1.76
STAGES = 3  # of loads ahead: as fast as 2 with many heads, 1.4 times as fast backward with few


@dataclass(frozen=True)
class Plan:
    """What is known when a call is compiled."""

    K: int
    V: int  # both powers of two, at least 16
    g_min: float
    q_scale: float | None  # None: q, k and g are given ready; else they are normalised and gated
    erase: bool
    masked: bool  # there are marks
    exact: bool  # in float32

    @property
    def block(self) -> int:
        """Value channels whose memory one program carries: few, for more programs."""
        return min(self.V, self.K, 64)

    def block_back(self, sequences: int, H: int) -> int:
        """The same backward, where 128 at once read less: 0.56 ms instead of 0.75."""
        crowded = sequences * H * (self.V // self.block) > PROGRAMS
        return 128 if crowded and self.V >= 128 and not self.exact else self.block

    def parts(self, sequences: int, H: int, chunks: int) -> int:
        """Parts that run side by side, of sequences of at most so many chunks."""
        programs = sequences * H * (self.V // self.block)
        return max(1, min(PROGRAMS // programs, chunks // PART))

    @property
    def constants(self) -> dict:
        """Of the kernels that see q, k and the decay."""
        return {
            "K": self.K,
            "q_scale": self.q_scale or 1.0,
            "G_MIN2": self.g_min * LOG2E,
            "GATED": self.q_scale is not None,
            "MASKED": self.masked,
            "ERASE": self.erase,
        }


class Prepared(NamedTuple):
    """What chunks do without the memory."""

    rows_q: Float[Array, "chunks H 32 K"]  # queries, decayed from the start of the chunk
    rows_k: Float[Array, "chunks H 32 K"]  # keys, likewise
    columns: Float[Array, "chunks H 32 K"]  # beta k, decayed to the end
    attention: Float[Array, "chunks H 32 32"]  # A
    inverses: Float[Array, "chunks H 32 32"]  # (I + L)^-1
    decay: Float[Array, "chunks H K"]  # of the whole chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(
    plan: Plan,
    q: Float[Array, "tokens H K"],
    k: Float[Array, "tokens H K"],
    v: Float[Array, "tokens H V"],
    z: Float[Array, "tokens H K"],
    beta: Float[Array, "tokens H"],
    gate: Float[Array, "2 H K"],
    memory: Float[Array, "N H V K"],
    marks: Int[Array, "chunks 32"],
    first: Int[Array, " N"],
    count: Int[Array, " N"],
) -> tuple[Float[Array, "tokens H V"], Float[Array, "N H V K"]]:
    """Outputs and leaving memories; N sequences of `count` chunks, the first of which is `first`.

    A mark is the number of documents that begin in the chunk up to the token, n, or -1 - n at
    padding.
    """
    return _forward(plan, q, k, v, z, beta, gate, memory, marks, first, count, keep=False)[0]


def _forward(plan, q, k, v, z, beta, gate, memory, marks, first, count, *, keep):
    prepared = _prepare(plan, q, k, z, beta, gate, marks)
    (N, H), parts = memory.shape[:2], plan.parts(first.shape[0], q.shape[1], q.shape[0] // CHUNK)
    if parts == 1:
        o, leaving, *kept = _carry(plan, v, marks, prepared, memory, first, count, keep=keep)
        return (o, leaving), (prepared, *kept, None)
    table = _split(first, count, parts)
    summaries = _carry(plan, v, marks, prepared, memory, *table, summary=True)[1]
    summaries = summaries.reshape(N, parts, H, -1, plan.K)
    entering = _chain(plan, memory, summaries, summaries, back=False)
    entering = entering.reshape(N * parts, H, plan.V, plan.K)
    o, leaving, *kept = _carry(plan, v, marks, prepared, entering, *table, keep=keep)
    leaving = leaving.reshape(N, parts, H, plan.V, plan.K)[:, -1]
    return (o, leaving), (prepared, *kept, summaries[:, :, :, plan.V :] if keep else None)


def _fused_forward(plan, q, k, v, z, beta, gate, memory, marks, first, count):
    arrays = q, k, v, z, beta, gate, memory, marks, first, count
    out, kept = _forward(plan, *arrays, keep=True)
    return out, (q, k, v, z, beta, gate, marks, first, count, out[0], *kept)


def _fused_backward(plan, residuals, cotangents):
    q, k, v, z, beta, gate, marks, first, count, o, prepared, *kept = residuals
    states, errors, transitions = kept
    d_o, d_leaving = cotangents
    if plan.masked:
        d_o = jnp.where((marks >= 0).reshape(-1, 1, 1), d_o, 0)
    if transitions is None:
        d_v, d_memory, d_states = _carry_back(plan, d_o, prepared, d_leaving, first, count)
    else:
        N, parts, H = transitions.shape[:3]
        table = _split(first, count, parts)
        nothing = jnp.zeros((N * parts, H, plan.V, plan.K), jnp.float32)
        own = _carry_back(plan, d_o, prepared, nothing, *table, summary=True)[1]
        own = own.reshape(N, parts, H, plan.V, plan.K)
        leaving = _chain(plan, d_leaving, own, transitions, back=True).reshape(nothing.shape)
        d_v, d_memory, d_states = _carry_back(plan, d_o, prepared, leaving, *table)
        d_memory = d_memory.reshape(own.shape)[:, 0]
    d_q, d_k, d_z, d_beta, d_gate = _gradients(
        plan, q, k, v, z, beta, gate, marks, errors, states, o, d_o, d_v, d_states
    )
    return d_q, d_k, d_v, d_z, d_beta, d_gate, d_memory, None, None, None


fused.defvjp(_fused_forward, _fused_backward)


def _prepare(plan: Plan, q, k, z, beta, gate, marks) -> Prepared:
    from k3jax.pallas_kernels.kda.gpu_forward import invert, prepare

    (_, H, K), c = q.shape, q.shape[0] // CHUNK
    rows = jax.ShapeDtypeStruct((c, H, CHUNK, K), q.dtype)
    pairs = jax.ShapeDtypeStruct((c, H, CHUNK, CHUNK), q.dtype)
    lower = jax.ShapeDtypeStruct(pairs.shape if plan.erase else (1,), jnp.float32)
    decay = jax.ShapeDtypeStruct((c, H, K), jnp.float32)
    row_q, row_k, column, A, lower, through = triton_call(
        prepare, q, k, z, beta, gate, marks, H,
        out_shape=[rows, rows, rows, pairs, lower, decay], grid=(c * H,),
        num_warps=4 if plan.exact else PREPARE_WARPS, **plan.constants,
    )  # fmt: skip
    inverses = jnp.zeros((1,), q.dtype)
    if plan.erase:
        (inverses,) = triton_call(invert, lower, out_shape=[pairs], grid=(c * H,), num_warps=1)
    return Prepared(row_q, row_k, column, A, inverses, through)


def _carry(
    plan: Plan,
    v: Float[Array, "tokens H V"],
    marks: Int[Array, "chunks 32"],
    prepared: Prepared,
    entering: Float[Array, "N H V K"],
    first: Int[Array, " N"],
    count: Int[Array, " N"],
    *,
    keep: bool = False,
    summary: bool = False,
) -> list[Array]:
    """Outputs, memories after all chunks; with `keep` those that enter each chunk, and E."""
    from k3jax.pallas_kernels.kda.gpu_forward import carry

    (tokens, H, V), N, block = v.shape, first.shape[0], plan.block
    dtype = prepared.rows_q.dtype
    width = V + plan.K if summary else V
    out_shape = [
        jax.ShapeDtypeStruct((1,) if summary else v.shape, v.dtype),
        jax.ShapeDtypeStruct((N, H, width, plan.K), jnp.float32),
        jax.ShapeDtypeStruct((tokens // CHUNK, H, V, plan.K) if keep else (1,), dtype),
        jax.ShapeDtypeStruct(v.shape if keep else (1,), dtype),
    ]
    return triton_call(
        carry, v, marks, *prepared, entering, first, count, H,
        out_shape=out_shape, grid=(N * H, width // block), num_warps=max(block // 16, 1),
        K=plan.K, V=V, BV=block, STAGES=STAGES, MASKED=plan.masked, ERASE=plan.erase,
        SUMMARY=summary, KEEP=keep,
    )  # fmt: skip


def _carry_back(
    plan: Plan, d_o, prepared, d_leaving, first, count, *, summary: bool = False
) -> list[Array]:
    """The gradients of values and entering memories, and of the memories that leave each chunk."""
    from k3jax.pallas_kernels.kda.gpu_backward import carry_back

    (tokens, H, V), N = d_o.shape, first.shape[0]
    block = plan.block_back(N, H)
    states = (1,) if summary else (tokens // CHUNK, H, V, plan.K)
    out_shape = [
        jax.ShapeDtypeStruct((1,) if summary else d_o.shape, d_o.dtype),
        jax.ShapeDtypeStruct((N, H, V, plan.K), jnp.float32),
        jax.ShapeDtypeStruct(states, prepared.rows_q.dtype),
    ]
    return triton_call(
        carry_back, d_o, *prepared, d_leaving, first, count, H,
        out_shape=out_shape, grid=(N * H, V // block), num_warps=max(block // 16, 1),
        K=plan.K, V=V, BV=block, STAGES=STAGES, ERASE=plan.erase, OUTPUT=not summary,
    )  # fmt: skip


def _split(first, count, parts: int):
    """First chunk and number of chunks of every part, [N parts]."""
    size = -(-count // parts)
    offset = jnp.minimum(jnp.arange(parts, dtype=jnp.int32) * size[:, None], count[:, None])
    sizes = jnp.minimum(count[:, None] - offset, size[:, None])
    return (first[:, None] + offset).reshape(-1), sizes.reshape(-1)


def _chain(
    plan: Plan,
    memory: Float[Array, "N H V K"],
    summaries: Float[Array, "N parts H X K"],
    transitions: Float[Array, "N parts H Y K"],
    *,
    back: bool,
) -> Float[Array, "N parts H V K"]:
    """The memory entering each part, or with `back` the gradient of the memory leaving each."""
    from k3jax.pallas_kernels.kda.gpu_forward import chain

    N, parts, H = summaries.shape[:3]
    (out,) = triton_call(
        chain, memory, summaries, transitions, H, parts,
        out_shape=[jax.ShapeDtypeStruct((N, parts, H, plan.V, plan.K), jnp.float32)],
        grid=(N * H, plan.V // plan.block), num_warps=4, K=plan.K, V=plan.V,
        X=summaries.shape[3], Y=transitions.shape[3], BV=plan.block, BACK=back, EXACT=plan.exact,
    )  # fmt: skip
    return out


def _gradients(plan: Plan, q, k, v, z, beta, gate, marks, errors, states, o, d_o, d_v, d_states):
    """Of q, k, z, beta and the gate."""
    from k3jax.pallas_kernels.kda.gpu_backward import gradients

    H, c = q.shape[1], q.shape[0] // CHUNK
    channels = min(plan.K, 64)  # of one program: with all 128 registers do not suffice
    split = plan.K // channels
    out_shape = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(k.shape, k.dtype),
        jax.ShapeDtypeStruct(z.shape, z.dtype),
        jax.ShapeDtypeStruct((split, *beta.shape), jnp.float32),
        jax.ShapeDtypeStruct((c, H, 2, plan.K), jnp.float32),
    ]
    *d, d_beta, d_gate = triton_call(
        gradients, q, k, v, z, beta, gate, marks, errors, states, o, d_o, d_v, d_states, H,
        out_shape=out_shape, grid=(c * H * split,), num_warps=4, KB=channels, V=plan.V,
        **plan.constants,
    )  # fmt: skip
    d_gate = jnp.zeros_like(gate) if plan.q_scale is None else d_gate.sum(0).swapaxes(0, 1)
    return *d, d_beta.sum(0), d_gate
