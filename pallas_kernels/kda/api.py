"""The KDA op: one entry point, checked arguments, several backends behind it."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.kda import chunked, pallas_tpu, reference, triton_gpu
from k3jax.pallas_kernels.kda.checks import check_shapes, make_config, validate_values
from k3jax.pallas_kernels.kda.gates import l2_normalize, log_decay, normalize_query

# A decay logit that stands for no decay: both gates give exactly 0 for it, and no gradient.
OPEN = -1e30


def _neutral_padding(run, no_decay):
    """A backend that may see anything at padding, of one that takes every token for real.

    Padding becomes the identity: no decay, no write, a read of nothing. A select, because the
    content there may be anything, NaN included.
    """

    def masked(q, k, v, decay, beta, *others):
        *gate_and_state, real, starts, cu_seqlens, cfg = others
        if real is not None:
            q, k, v = (jnp.where(real[..., None, None], x, 0) for x in (q, k, v))
            decay = jnp.where(real[..., None, None], decay, no_decay)
            beta = jnp.where(real[..., None], beta, 0)
        return run(q, k, v, decay, beta, *gate_and_state, starts, cu_seqlens, cfg)

    return masked


def _gates_first(run):
    """A backend of `kda` as one of `kda_from_logits`."""

    def from_logits(q, k, v, z, beta, A_log, dt_bias, state, starts, cu_seqlens, cfg):
        g = log_decay(z.astype(state.dtype) + dt_bias, A_log, cfg.g_min)
        q, k = normalize_query(q), l2_normalize(k)
        return run(q, k, v, g, beta, state, starts, cu_seqlens, cfg)

    return from_logits


def _promised(backend: dispatch.Backend) -> dispatch.Backend:
    """A backend that wants a bound of g, where g is 0 throughout and keeps any."""
    run, unsupported = backend

    def bounded(arguments):
        *arrays, cfg = arguments
        return *arrays, dataclasses.replace(cfg, g_min=-1.0)

    return lambda *args: run(*bounded(args)), lambda *args: unsupported(*bounded(args))


BACKENDS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.pallas_tpu, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.triton_gpu, triton_gpu.unsupported),
    "chunked": (_neutral_padding(chunked.chunked, 0.0), dispatch.always),
    "reference": (_neutral_padding(reference.recurrent, 0.0), dispatch.always),
}
FROM_LOGITS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.from_logits, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.from_logits, triton_gpu.unsupported),
    "chunked": (_neutral_padding(_gates_first(chunked.chunked), OPEN), dispatch.always),
    "reference": (_neutral_padding(_gates_first(reference.recurrent), OPEN), dispatch.always),
}


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"] | Float[Array, "B T HV"] | None,
    beta: Float[Array, "B T HV"],
    *,
    state: Float[Array, "N HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " offsets"] | None = None,
    erase: bool = True,
    g_min: float | None = None,
    chunk_size: int = 64,
    checkpoint_every: int = 1,
    snapshot_every: int | None = None,
    plain_autodiff: bool = False,
    backend: str | None = None,
    validate: bool = False,
    beta_max: float = 1.0,
) -> tuple[Float[Array, "..."], ...]:
    """Kimi Delta Attention: delta-rule memory with one decay per key channel.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        o_t = S_t^T q_t                                        (K3 report, Eq. 1)

    Args:
        q: queries, L2-normalised and already multiplied by K**-0.5.
        k: keys, L2-normalised. Value head j reads key head j // (HV // H).
        v: values.
        g: log-decay, nats per token, in (-inf, 0]; any size is exact. One per key channel, or one
            per head (Gated DeltaNet), or None for a memory that never decays (DeltaNet).
        beta: write strength, in [0, 1] ([0, 2] for negative eigenvalues).
        state: memory entering the first token; zeros if omitted. One per row (N = B), or one per
            document with `cu_seqlens`. With `segment_ids` it enters the row's first document, and
            every later document starts from zero.
        segment_ids: document of each token, contiguous in a row; 0 is padding, which leaves the
            memory as it is and gives output 0. Any content is allowed at padding.
        cu_seqlens: offsets 0 = c_0 <= c_1 <= ... <= c_N = T of documents packed into one row
            (B = 1); empty documents are allowed and return their `state`.
        erase: False leaves out the factor I - beta_t k_t k_t^T: gated linear attention.
        g_min: promise that g >= g_min, nats per token (K3: -5), which lets a kernel save work; a
            smaller g then gives wrong results. None promises nothing.
        chunk_size: tokens per chunk, 16, 32, 64, 128 or 256; only speed and memory depend on it.
        checkpoint_every: chunks from one memory kept for the backward pass to the next.
        snapshot_every: also return the memory after every so many tokens of a row, a multiple of
            16; chunks then have the largest size up to `chunk_size` that divides it.
        plain_autodiff: without the custom derivative rule: slower and larger, but forward mode
            (jvp, Hessian-vector products) works.
        backend: `pallas_tpu`, `triton_gpu`, `chunked` or `reference` (token by token, slow) must
            run; None takes the first that can, which is never the reference. `dispatch.used("kda")` tells which ran.
        validate: also check values (not only shapes). Inside jit the error surfaces when it runs.
        beta_max: largest write strength that `validate` accepts.

    Returns: outputs [B, T, HV, V] in v's dtype; the memory after the last real token
        [N, HV, K, V] in float32 (float64 for float64 inputs); with `snapshot_every` also
        [B, T // snapshot_every, HV, K, V].
    Raises: ValueError, naming the argument and its value, for shapes or values outside the above.
    Numerics: g, its sums, the triangular solve and S are float32; with bfloat16 q, most operands of
        the other matmuls are bfloat16 and accumulate in float32.
    Cost: O(T (C (K + V) + K V)) per head; one [K V] state per `checkpoint_every` chunks is kept for
        the backward pass; on a TPU also two [C C] matrices in q's dtype.
    """
    cfg = make_config(chunk_size, checkpoint_every, snapshot_every, erase, g_min, plain_autodiff)
    per_head = g is not None and g.ndim == 3
    B, T, HV = v.shape[:3]
    extra = {"g": (g, (B, T, HV) if per_head else (B, T, HV, q.shape[3]))}
    check_shapes(q, k, v, beta, state, segment_ids, cu_seqlens, snapshot_every, extra)
    if validate:
        values = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        validate_values(values, segment_ids, cu_seqlens, beta_max=beta_max, g_min=g_min)

    q, k = _per_value_head(q, v), _per_value_head(k, v)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    backends = BACKENDS
    if g is None:
        g = jnp.zeros_like(k, wide)
        fused = ("pallas_tpu", "triton_gpu")
        backends = BACKENDS | {name: _promised(BACKENDS[name]) for name in fused}
    elif per_head:
        g = jnp.broadcast_to(g[..., None], k.shape)
    arrays = q, k, v, g.astype(wide), beta
    return _run(backends, backend, arrays, (), state, segment_ids, cu_seqlens, cfg)


def kda_from_logits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    z: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    g_min: float | None,
    state: Float[Array, "N HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " offsets"] | None = None,
    erase: bool = True,
    chunk_size: int = 64,
    checkpoint_every: int = 1,
    snapshot_every: int | None = None,
    plain_autodiff: bool = False,
    backend: str | None = None,
    validate: bool = False,
    beta_max: float = 1.0,
) -> tuple[Float[Array, "..."], ...]:
    """`kda` of raw projections: a backend may normalise and gate inside its kernel.

        kda(K**-0.5 q / |q|, k / |k|, v, g, beta),
        g = g_min sigmoid(exp(A_log) (z + dt_bias))            (K3 report, Eq. 5)
        g = -exp(A_log) softplus(z + dt_bias)                  with g_min None (Kimi Linear)

    Args:
        q, k: queries and keys of any length, not scaled.
        z: decay logits in any float dtype.
        A_log: log of the gate's slope, one per head.
        dt_bias: bias of the decay logits.
        g_min: lower bound of the gate, nats per token, below 0; None for the softplus gate.
        v, beta, and the rest: as in `kda`.

    Numerics: norm and gate in float32; the normalised q and k return to their dtype, or stay
        float32 inside a kernel.
    """
    cfg = make_config(chunk_size, checkpoint_every, snapshot_every, erase, g_min, plain_autodiff)
    B, T, HV = v.shape[:3]
    K = q.shape[3]
    extra = {"z": (z, (B, T, HV, K)), "A_log": (A_log, (HV,)), "dt_bias": (dt_bias, (HV, K))}
    check_shapes(q, k, v, beta, state, segment_ids, cu_seqlens, snapshot_every, extra)
    if validate:
        values = {"q": q, "k": k, "v": v, "z": z, "beta": beta}
        validate_values(values, segment_ids, cu_seqlens, beta_max=beta_max)

    q, k = _per_value_head(q, v), _per_value_head(k, v)
    if z.dtype == jnp.float16:
        z = z.astype(jnp.float32)  # has no number as large as OPEN
    arrays, gate = (q, k, v, z, beta), (A_log, dt_bias)
    return _run(FROM_LOGITS, backend, arrays, gate, state, segment_ids, cu_seqlens, cfg)


def kda_summary(
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"] | Float[Array, "B T HV"] | None,
    beta: Float[Array, "B T HV"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    erase: bool = True,
    g_min: float | None = None,
    chunk_size: int = 64,
    checkpoint_every: int = 1,
    plain_autodiff: bool = False,
    backend: str | None = None,
) -> tuple[Float[Array, "B HV K K"], Float[Array, "B HV K V"]]:
    """What a segment does to any memory that enters it: S_out = M S_in + E  (kcp.md, Eq. 1).

    Segment 1 and then segment 2 do (M_2 M_1, M_2 E_1 + E_2): associative, so the memories between
    the parts of a long row follow from a scan over their summaries.

    Args:
        k, v, g, beta, and the rest: as in `kda`. A document that begins after the segment's first
            real token makes M zero; whether one begins *at* that token is for the caller to know,
            who then sets M to zero.

    Returns: transition M and zero-start state E, float32, differentiable.
    Numerics: float32 operands whatever the inputs are: rounded ones would add up along the chain
        of segments.
    Cost: `kda` with K + V value channels.
    """
    # One run on widened values: columns that enter as the identity and write zeros leave as M, the
    # others enter as zeros and leave as E.
    check_shapes(k, k, v, beta, None, segment_ids, None, None, {})
    wide = jnp.promote_types(k.dtype, jnp.float32)
    k, v = _per_value_head(k.astype(wide), v), v.astype(wide)
    K, V = k.shape[3], v.shape[3]
    values = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (K, 0)))
    entering = _empty_memory(k, values) + jnp.eye(K, K + V, dtype=wide)
    _, leaving = kda(
        jnp.zeros_like(k), k, values, g, beta, state=entering, segment_ids=segment_ids,
        erase=erase, g_min=g_min, chunk_size=chunk_size, checkpoint_every=checkpoint_every,
        plain_autodiff=plain_autodiff, backend=backend,
    )  # fmt: skip
    return leaving[..., :K], leaving[..., K:]


def document_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where a token's document differs from that of the last real token before it.

    The first real token of a row is not a start: what enters the row belongs to its document.
    """
    real = segment_ids > 0
    token = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    last_real = jax.lax.cummax(jnp.where(real, token, -1), axis=1)
    before = jnp.pad(last_real, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    return real & (before >= 0) & (previous != segment_ids)


def _run(backends, backend, arrays, gate, state, segment_ids, cu_seqlens, cfg):
    """A state for every document, the backend; q and k have v's heads here."""
    q, k, v, decay, beta = arrays
    wide = jnp.promote_types(q.dtype, jnp.float32)
    if state is None:
        state = _empty_memory(k, v)
        if cu_seqlens is not None:
            state = jnp.repeat(state, cu_seqlens.shape[0] - 1, axis=0)
    real = starts = None
    if segment_ids is not None:
        real, starts = segment_ids > 0, document_starts(segment_ids)
    beta, state = beta.astype(wide), state.astype(wide)
    if q.shape[1] == 0 or state.size == 0:
        o, snapshots = jnp.zeros(v.shape, v.dtype), None
        if cfg.snapshot_every is not None:
            B, T, HV, K = q.shape
            snapshots = jnp.zeros((B, T // cfg.snapshot_every, HV, K, v.shape[3]), wide)
    else:
        run = dispatch.choose("kda", backends, backend, q, k, v, cu_seqlens, cfg)
        o, state, snapshots = run(q, k, v, decay, beta, *gate, state, real, starts, cu_seqlens, cfg)
    return (o.astype(v.dtype), state) + (() if snapshots is None else (snapshots,))


def _per_value_head(x, v):
    """Queries or keys, repeated so that every value head has its own."""
    group = v.shape[2] // x.shape[2]
    return jnp.repeat(x, group, axis=2) if group > 1 else x


def _empty_memory(k, v):
    # Zeros with the shape and, on a mesh, the layout of a write (compiled, no product is left).
    wide = jnp.promote_types(k.dtype, jnp.float32)
    return jnp.zeros_like(jnp.einsum("bthk,bthv->bhkv", k, v), wide)
