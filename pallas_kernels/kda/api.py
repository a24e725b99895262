"""The KDA op: one entry point, checked arguments, several backends behind it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.kda import chunked, reference

BACKENDS = {
    "chunked": (chunked.chunked, dispatch.always),
    "reference": (reference.recurrent, dispatch.always),
}


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    state: Float[Array, "N HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " offsets"] | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    validate: bool = False,
    beta_max: float = 1.0,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    """Kimi Delta Attention: delta-rule memory with one decay per key channel.

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        o_t = S_t^T q_t                                        (K3 report, Eq. 1)

    Args:
        q: queries, L2-normalised and already multiplied by K**-0.5.
        k: keys, L2-normalised. Value head j reads key head j // (HV // H).
        v: values.
        g: log-decay, nats per token, in (-inf, 0]; any size is exact.
        beta: write strength, in [0, 1] ([0, 2] for negative eigenvalues).
        state: memory entering the first token; zeros if omitted. One per row (N = B), or one per
            document with `cu_seqlens`. With `segment_ids` it enters the row's first document, and
            every later document starts from zero.
        segment_ids: document of each token, contiguous in a row; 0 is padding, which leaves the
            memory as it is and gives output 0. Any content is allowed at padding.
        cu_seqlens: offsets 0 = c_0 <= c_1 <= ... <= c_N = T of documents packed into one row
            (B = 1); empty documents are allowed and return their `state`.
        chunk_size: tokens per chunk, 16, 32, 64, 128 or 256; only speed and memory depend on it.
        backend: `chunked` or `reference` (token by token, slow); None takes the first that can run.
        validate: also check values (not only shapes). Inside jit the error surfaces when it runs.
        beta_max: largest write strength that `validate` accepts.

    Returns: outputs in v's dtype, and the memory after the last real token in float32.
    Raises: ValueError, naming the argument and its value, for shapes or values outside the above.
    Numerics: g, its sums, the triangular solve and S are float32; with bfloat16 q, the operands of
        the other matmuls are bfloat16 and accumulate in float32.
    Cost: O(T (C (K + V) + K V)) per head; one [K V] state per chunk is kept for the backward pass.
    """
    _check_shapes(q, k, v, g, beta, state, segment_ids, cu_seqlens, chunk_size)
    if validate:
        traced = any(isinstance(x, jax.core.Tracer) for x in (q, k, v, g, beta))
        call = jax.debug.callback if traced else (lambda f, *args: f(*args))
        call(_Validate(beta_max), q, k, v, g, beta, segment_ids, cu_seqlens)

    group = v.shape[2] // q.shape[2]
    if group > 1:
        q, k = jnp.repeat(q, group, axis=2), jnp.repeat(k, group, axis=2)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    if state is None:
        # Zeros with the shape and, on a mesh, the layout of a write (compiled, no product is left).
        state = jnp.zeros_like(jnp.einsum("bthk,bthv->bhkv", k, v), wide)
        if cu_seqlens is not None:
            state = jnp.repeat(state, cu_seqlens.shape[0] - 1, axis=0)
    starts = None
    if segment_ids is not None:
        real, starts = segment_ids > 0, document_starts(segment_ids)
        # Padding becomes the identity: no decay, no write, a read of nothing. A select, because
        # the content there may be anything, NaN included.
        q, k, v, g = (jnp.where(real[..., None, None], x, 0) for x in (q, k, v, g))
        beta = jnp.where(real[..., None], beta, 0)
    if q.shape[1] == 0 or state.size == 0:
        return jnp.zeros(v.shape, v.dtype), state.astype(wide)
    run = dispatch.choose("kda", BACKENDS, backend)
    g, beta, state = (x.astype(wide) for x in (g, beta, state))
    o, state = run(q, k, v, g, beta, state, starts, cu_seqlens, chunk_size)
    return o.astype(v.dtype), state


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV K"],
    beta: Float[Array, "B HV"],
    state: Float[Array, "B HV K V"],
) -> tuple[Float[Array, "B HV V"], Float[Array, "B HV K V"]]:
    """`kda` for one token per row, as used in decoding: (output in v's dtype, float32 memory)."""
    group = v.shape[1] // q.shape[1]
    q, k = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (q, k))
    wide = jnp.promote_types(q.dtype, jnp.float32)
    o, state = reference.step(*(x.astype(wide) for x in (q, k, v, g, beta, state)))
    return o.astype(v.dtype), state


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


def _check_shapes(q, k, v, g, beta, state, segment_ids, cu_seqlens, chunk_size) -> None:
    if g is None:
        raise ValueError("g is None; pass zeros for a memory without decay")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if HV % H:
        raise ValueError(f"v has {HV} heads, which is not a multiple of the {H} heads of q and k")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("give segment_ids or cu_seqlens, not both")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, but q has {B} rows")
    if cu_seqlens is not None and cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens is empty; it starts with offset 0")
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = {
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, HV, V)),
        "g": (g, (B, T, HV, K)),
        "beta": (beta, (B, T, HV)),
        "state": (state, (rows, HV, K, V)),
        "segment_ids": (segment_ids, (B, T)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape} with q {q.shape}")
    if chunk_size not in (16, 32, 64, 128, 256):
        raise ValueError(f"chunk_size is {chunk_size}; choose 16, 32, 64, 128 or 256")


class _Validate:
    """Host-side value checks; padding may hold anything, so only real tokens are looked at."""

    def __init__(self, beta_max: float):
        self.beta_max = beta_max

    def __call__(self, q, k, v, g, beta, segment_ids, cu_seqlens) -> None:
        q, k, v, g, beta = (np.asarray(x, np.float32) for x in (q, k, v, g, beta))
        if cu_seqlens is not None:
            offsets = np.asarray(cu_seqlens)
            if offsets[0] != 0 or offsets[-1] != q.shape[1] or (np.diff(offsets) < 0).any():
                raise ValueError(
                    f"cu_seqlens must rise from 0 to T = {q.shape[1]}, got {offsets.tolist()}"
                )
        if segment_ids is not None:
            ids = np.asarray(segment_ids)
            if (ids < 0).any():
                raise ValueError(f"segment_ids must be >= 0 (0 is padding), got {ids.min()}")
            for row, real in enumerate(ids > 0):
                runs = ids[row][real]
                runs = runs[np.diff(runs, prepend=0) != 0]
                if len(set(runs.tolist())) < len(runs):
                    raise ValueError(
                        f"segment_ids of row {row} are not contiguous: documents {runs.tolist()}"
                    )
            q, k, v, g, beta = (x[ids > 0] for x in (q, k, v, g, beta))
        for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
            if not np.isfinite(x).all():
                raise ValueError(f"{name} must be finite, found {x[~np.isfinite(x)][0]}")
        if g.size and g.max() > 0:
            raise ValueError(
                f"g must be a natural-log decay <= 0 (nats per token), the largest is {g.max():.6g}"
            )
        if beta.size and not (beta.min() >= 0 and beta.max() <= self.beta_max):
            raise ValueError(
                f"beta must lie in [0, {self.beta_max}], found {beta.min():.6g} to {beta.max():.6g}"
            )
        if k.size and (longest := np.sqrt((k * k).sum(-1)).max()) > 1.02:
            raise ValueError(f"k must be L2-normalised, the longest key has norm {longest:.6g}")
