"""Gated Multi-head Latent Attention: full softmax attention over a low-rank key-value latent."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.layers.feed_forward import Linear
from k3jax.layers.mla_context import context_attention
from k3jax.layers.norms import RMSNorm
from k3jax.pallas_kernels.mla_attention import mla_attention, mla_decode, mla_prefill, write_pages
from k3jax.sharding import context_balance
from k3jax.sharding.annotate import axis_size, gathered


class MLACache(NamedTuple):
    """Pages of S tokens: the normalised latent c, then the shared key, one row for all heads.

    A page table says which pages are whose; without one, row b has page b and no other.
    """

    latent: Float[Array, "P S C"]  # compute dtype, C = kv_rank + qk_shared_dim


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """One gated MLA layer."""

    num_heads: int  # query heads; they share one latent of keys and values
    q_rank: int | None  # rank of the queries; None: one full matrix
    kv_rank: int  # rank of keys and values: width of the cached latent
    qk_nope_dim: int  # query and key channels per head
    qk_shared_dim: int  # further query channels, whose key is shared by all heads
    v_dim: int  # value channels per head
    out_gate: bool  # sigmoid gate on the attention output
    latent_norm_eps: float  # epsilon of the two latent norms (1e-6 in the reference model)
    rope_theta: float | None  # None: no positions (K3); else the shared channels are rotated

    def __post_init__(self):
        for name in ("num_heads", "kv_rank", "qk_nope_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"mla.{name}={getattr(self, name)} must be at least 1")
        if self.q_rank is not None and self.q_rank < 1:
            raise ValueError(f"mla.q_rank={self.q_rank} must be at least 1, or None")
        if self.qk_shared_dim < 0:
            raise ValueError(f"mla.qk_shared_dim={self.qk_shared_dim} must be at least 0")
        if not 0 < self.latent_norm_eps < math.inf:
            raise ValueError(
                f"mla.latent_norm_eps={self.latent_norm_eps} must be a finite number above 0"
            )
        if self.rope_theta is None:
            return
        if not 1 < self.rope_theta < math.inf:
            raise ValueError(
                f"mla.rope_theta={self.rope_theta} must be a finite number above 1, or None"
            )
        if self.qk_shared_dim < 2 or self.qk_shared_dim % 2:
            raise ValueError(
                f"mla.qk_shared_dim={self.qk_shared_dim} must be even and at least 2 when "
                f"rope_theta is set ({self.rope_theta}): rotations turn pairs of channels"
            )

    def build(self, width: int, *, rngs: nnx.Rngs, param_dtype: str, init_std: float) -> "GatedMLA":
        """The layer for activations of this width, freshly initialised (training 6)."""
        return GatedMLA(self, width, rngs=rngs, param_dtype=param_dtype, init_std=init_std)

    def init_cache(self, batch: int, max_len: int, dtype: str) -> MLACache:
        """Empty pages, one for each row of up to `max_len` tokens; `dtype` is the compute dtype."""
        return MLACache(jnp.zeros((batch, max_len, self.kv_rank + self.qk_shared_dim), dtype))


def rotate(
    x: Float[Array, "B T *heads S"], position: Int[Array, "B T"], theta: float
) -> Float[Array, "B T *heads S"]:
    """Rotary embedding: channels i and i + S/2 turn by position * theta^(-2i/S), float32 inside."""
    half = x.shape[-1] // 2
    angle = position[..., None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = angle.reshape(*position.shape, *(1,) * (x.ndim - 3), half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def document_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token inside its document: 0, 1, ... from every change of segment id."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    first = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


class GatedMLA(nnx.Module):
    """Gated MLA sub-layer (K3 report 2.1.2, architecture 6).

    q      = W_qb rms_norm(W_qa x)                          per head [q_n | q_r]
    c, k_r = rms_norm(W_c x), W_r x                         cached; k_r is shared by all heads
    k, v   = [W_K c | k_r], W_V c                           per head
    y      = W_o (attention(q, k, v) * sigmoid(W_g x))      (Eq. 7)
    """

    def __init__(
        self, cfg: MLAConfig, width: int, *, rngs: nnx.Rngs, param_dtype: str, init_std: float
    ):
        heads, rank, shared = cfg.num_heads, cfg.kv_rank, cfg.qk_shared_dim

        def linear(in_shape, out_shape, axes):
            return Linear(
                in_shape, out_shape, axes, rngs=rngs, init_std=init_std, param_dtype=param_dtype
            )

        def norm(dim):
            return RMSNorm(
                dim, eps=cfg.latent_norm_eps, rngs=rngs, param_dtype=param_dtype, axis="rank"
            )

        self.cfg = cfg
        q_shape = (heads, cfg.qk_nope_dim + shared)
        if cfg.q_rank is None:
            self.q_proj = linear((width,), q_shape, ("embed", "heads", "key"))
        else:
            self.q_a_proj = linear((width,), (cfg.q_rank,), ("embed", "rank"))
            self.q_a_layernorm = norm(cfg.q_rank)
            self.q_b_proj = linear((cfg.q_rank,), q_shape, ("rank", "heads", "key"))
        self.kv_a_proj_with_mqa = linear((width,), (rank + shared,), ("embed", "rank"))
        self.kv_a_layernorm = norm(rank)
        kv_shape = (heads, cfg.qk_nope_dim + cfg.v_dim)
        self.kv_b_proj = linear((rank,), kv_shape, ("rank", "heads", "value"))
        if cfg.out_gate:
            self.g_proj = linear((width,), (heads, cfg.v_dim), ("embed", "heads", "value"))
        self.o_proj = linear((heads, cfg.v_dim), (width,), ("heads", "value", "embed"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T_row"] | None = None,
        cache: MLACache | None = None,
        length: Int[Array, " B"] | None = None,
        page_table: Int[Array, "B M"] | None = None,
    ) -> tuple[Float[Array, "B T D"], MLACache | None, Float[Array, " H"] | None]:
        """Apply the layer.

        Args:
            x: normalised activations.
            segment_ids: document of each token, 1, 2, ... in runs, 0 for padding; None: one
                document per row. With `cache`: 1 for real tokens, then 0 for padding on the right.
                Where the mesh axis `context` splits the tokens, x is this rank's window of the row
                and these are of the whole row.
            cache: latents of the tokens before x; token t of row b becomes the row's token
                length[b] + t.
            length: tokens already in the cache, per row. The caller sees to it that
                length + T fits the row's pages: what does not fit is dropped.
            page_table: pages of each row in order; None: row b has page b alone.

        Returns: the outputs (0 at padding), the cache with x's tokens (None if none was given),
        and the largest attention logit of each head, float32, without gradient (None with a cache).
        Numerics: matmuls in x's dtype, float32 from the logits to the gated output.
        Cost: with N tokens in the longest row O(T N); one cached token at a time costs
        O(N (kv_rank + qk_shared_dim)) per head, as keys and values are not expanded.
        """
        if (cache is None) != (length is None):
            raise ValueError("mla: cache and length go together, one of them is None")
        if axis_size("context") > 1:
            if cache is not None:
                raise ValueError(
                    "mla: no decoding with a cache where mesh.context splits the tokens"
                )
            with jax.named_scope("mla"):
                return self._across_ranks(x, segment_ids)
        with jax.named_scope("mla"):
            documents = segment_ids
            if segment_ids is None:
                segment_ids = jnp.ones(x.shape[:2], jnp.int32)
            index = jnp.broadcast_to(jnp.arange(x.shape[1]), segment_ids.shape)
            q_position = index if length is None else length[:, None] + index
            position = document_positions(segment_ids) if cache is None else q_position
            q, latent = self._project(x, position)

            if cache is None or length is None:
                k_n, k_r, v = self._expand(latent)
                o, top = mla_attention(q, k_n, k_r, v, scale=self._scale, segment_ids=documents)
            else:
                if page_table is None:
                    page_table = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
                real, top = segment_ids > 0, None
                pages = write_pages(cache.latent, page_table, q_position, latent, real)
                cache, filled = MLACache(pages), length + real.sum(1, dtype=length.dtype)
                if x.shape[1] == 1:
                    o = self._absorbed(q[:, 0], pages, page_table, jnp.where(real[:, 0], filled, 0))
                    o = o[:, None]
                else:
                    o = mla_prefill(
                        q, pages, page_table, q_position, real, filled,
                        gathered(self.kv_b_proj.kernel, q.dtype), scale=self._scale,
                    )  # fmt: skip
            return self._output(x, o), cache, top

    def _across_ranks(self, x, segment_ids):
        """The layer for a row whose tokens are split over `context`, in windows."""
        ranks, (B, T, _) = axis_size("context"), x.shape
        if segment_ids is None:
            segment_ids = jnp.ones((B, ranks * T), jnp.int32)
        segments = context_balance.to_chunks(segment_ids, ranks)
        positions = context_balance.to_chunks(document_positions(segment_ids), ranks)
        x = context_balance.exchange(jnp.pad(x, ((0, 0), (0, T % 2), (0, 0))))
        q, latent = self._project(x, context_balance.held(positions))
        # Padding may hold anything, and 0 * NaN would be NaN.
        real = context_balance.held(segments) > 0
        q = jnp.where(real[..., None, None], q, 0)
        latent = jnp.where(real[..., None], latent, 0)
        kernel = gathered(self.kv_b_proj.kernel, q.dtype)
        o, top = context_attention(q, latent, kernel, segments, scale=self._scale)
        return context_balance.exchange(self._output(x, o))[:, :T], None, top

    def _output(self, x, o):
        """The gated output projection, o and the gate in float32."""
        if self.cfg.out_gate:
            o = o * jax.nn.sigmoid(self.g_proj(x).astype(jnp.float32))
        return self.o_proj(o.astype(x.dtype))

    def _project(self, x, position):
        """Queries [q_n | q_r] and cache rows [c | k_r], the r parts rotated if rope_theta."""
        cfg = self.cfg
        if cfg.q_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        c, k_r = jnp.split(self.kv_a_proj_with_mqa(x), [cfg.kv_rank], axis=-1)
        if cfg.rope_theta is not None:
            q_n, q_r = jnp.split(q, [cfg.qk_nope_dim], axis=-1)
            q = jnp.concatenate([q_n, rotate(q_r, position, cfg.rope_theta)], axis=-1)
            k_r = rotate(k_r, position, cfg.rope_theta)
        return q, jnp.concatenate([self.kv_a_layernorm(c), k_r], axis=-1)

    @property
    def _scale(self) -> float:
        return (self.cfg.qk_nope_dim + self.cfg.qk_shared_dim) ** -0.5

    def _expand(self, latent):
        """Keys of each head, the key that heads share, and values."""
        c, k_r = jnp.split(latent, [self.cfg.kv_rank], axis=-1)
        k_n, v = jnp.split(self.kv_b_proj(c), [self.cfg.qk_nope_dim], axis=-1)
        return k_n, k_r, v

    def _absorbed(self, q, pages, page_table, lengths):
        """Attention of one query per row with W_K moved onto it, and W_V onto the output
        (architecture 6.2).

            q . [W_K c | k_r]  = [W_K^T q_n | q_r] . [c | k_r]
            sum_s p_s W_V c_s  = W_V sum_s p_s c_s

        All heads then share the latent as their one key and value. Float32, so that the second
        rounding of the absorbed query costs nothing (KF-043).
        """
        cfg = self.cfg
        kernel = gathered(self.kv_b_proj.kernel, q.dtype)  # the weights the expanded form sees
        q, kernel = q.astype(jnp.float32), kernel.astype(jnp.float32)
        w_k, w_v = jnp.split(kernel, [cfg.qk_nope_dim], axis=-1)  # C H N, C H V
        q_n, q_r = jnp.split(q, [cfg.qk_nope_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bhn,chn->bhc", q_n, w_k), q_r], axis=-1)
        o = mla_decode(q, pages, page_table, lengths, scale=self._scale, kv_rank=cfg.kv_rank)
        return jnp.einsum("bhc,chv->bhv", o, w_v)
