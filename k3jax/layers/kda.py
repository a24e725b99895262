"""Kimi Delta Attention: projections, convolution, decay gate, delta-rule memory, output gate."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.layers import kda_context
from k3jax.layers.feed_forward import Linear
from k3jax.layers.norms import RMSNorm, gated_rms_norm
from k3jax.pallas_kernels.kda.api import kda, kda_from_logits
from k3jax.pallas_kernels.kda.decode import kda_step
from k3jax.pallas_kernels.kda.gates import l2_normalize, log_decay, normalize_query
from k3jax.pallas_kernels.short_conv.api import short_conv_streams
from k3jax.sharding.annotate import param


class KDACache(NamedTuple):
    """What a KDA layer carries from one call to the next; all zeros before the first token."""

    conv: Float[Array, "B W 3 H K"]  # last conv_size - 1 q, k, v projections, compute dtype
    state: Float[Array, "B H K V"]  # memory S, float32


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """One KDA layer. A variant subclasses this, adds its fields and overrides `build`."""

    num_heads: int  # heads of q, k and v
    head_dim: int  # width of q, k and v per head, channels
    conv_size: int | None  # taps of the short convolution, tokens; None leaves SiLU alone
    gate: Literal["bounded", "softplus"]  # decay: g_min * sigmoid (K3) or -softplus (Kimi Linear)
    g_min: float | None  # lowest log-decay, nats per token, < 0; None for the softplus gate
    gate_rank: int | None  # rank of the decay logits; None: one full matrix
    out_gate_rank: int | None  # rank of the output gate logits; None: one full matrix
    beta_max: float  # upper end of the write strength, 1.0 or 2.0 (negative eigenvalues)
    norm_eps: float  # epsilon of the norm over each head's read-out
    chunk_size: int  # tokens per chunk of the chunkwise form
    backend: str | None  # implementation of the recurrence; None takes the first that fits

    def __post_init__(self):
        for name in ("num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"kda.{name}={getattr(self, name)} must be at least 1")
        for name in ("conv_size", "gate_rank", "out_gate_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"kda.{name}={value} must be at least 1, or None")
        if self.gate not in ("bounded", "softplus"):
            raise ValueError(f"kda.gate={self.gate!r} is unknown: use 'bounded' or 'softplus'")
        if self.gate == "softplus" and self.g_min is not None:
            raise ValueError(
                f"kda.g_min={self.g_min}: gate='softplus' has no bound; set g_min=None, or "
                "gate='bounded'"
            )
        if self.gate == "bounded" and not (self.g_min is not None and -math.inf < self.g_min < 0):
            raise ValueError(
                f"kda.g_min={self.g_min}: gate='bounded' needs a finite number below 0 (K3 uses "
                "-5.0); the unbounded gate is gate='softplus'"
            )
        if self.beta_max not in (1.0, 2.0):
            raise ValueError(f"kda.beta_max={self.beta_max}: use 1.0, or 2.0 for beta in (0, 2)")
        if self.chunk_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"kda.chunk_size={self.chunk_size}: use 16, 32, 64, 128 or 256")
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"kda.norm_eps={self.norm_eps} must be a finite number above 0")

    @property
    def decay_dim(self) -> int:
        """Decays per head: one for each key channel."""
        return self.head_dim

    def build(
        self, width: int, *, rngs: nnx.Rngs, param_dtype: str, init_std: float
    ) -> "KimiDeltaAttention":
        """The layer for activations of this width, freshly initialised (training 6)."""
        return KimiDeltaAttention(
            self, width, rngs=rngs, param_dtype=param_dtype, init_std=init_std
        )

    def init_cache(self, batch: int, max_len: int, dtype: str) -> KDACache:
        """The cache before the first token, for rows of any length: `max_len` changes nothing.

        `dtype` is the compute dtype; the memory is float32 whatever it says.
        """
        heads, dim = self.num_heads, self.head_dim
        return KDACache(
            jnp.zeros((batch, (self.conv_size or 1) - 1, 3, heads, dim), dtype),
            jnp.zeros((batch, heads, dim, dim), jnp.float32),
        )


def init_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Inverse softplus of dt, log-uniform in [1e-3, 0.1]: decays spread from slow to fast.

    With A_log = 0 and zero logits the bounded gate starts at g_min (1 - exp(-dt)): between -0.005
    and -0.476 nats per token for g_min = -5 (training 6).
    """
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))


class ShortConv(nnx.Module):
    """Taps of a depthwise causal convolution; U(-1/sqrt(W), 1/sqrt(W)) at start."""

    def __init__(self, size: int, heads: int, dim: int, axis: str, *, rngs: nnx.Rngs):
        def init(key, shape, dtype):
            return jax.random.uniform(key, shape, dtype, -(size**-0.5), size**-0.5)

        self.kernel = param(rngs, init, (size, heads, dim), (None, "heads", axis), "float32")


class KimiDeltaAttention(nnx.Module):
    """KDA sub-layer (K3 report 2.1.1, architecture 5.1).

        q, k, v = silu(conv(W x)),  q and k L2-normalised, q scaled by K^-1/2
        g       = log_decay(F x + dt_bias),  beta = beta_max sigmoid(W_b x)
        o       = mix(q, k, v, g, beta)                         (Eq. 1)
        y       = W_o (rms_norm(o) * sigmoid(W_g x))

    Override `log_decay` for another gate, `mix` for another recurrence. While neither is overridden
    the op gets raw q, k and decay logits, as its kernel may normalise and gate by itself.
    """

    def __init__(
        self, cfg: KDAConfig, width: int, *, rngs: nnx.Rngs, param_dtype: str, init_std: float
    ):
        heads, dim = cfg.num_heads, cfg.head_dim

        def linear(in_shape, out_shape, axes):
            return Linear(
                in_shape, out_shape, axes, rngs=rngs, init_std=init_std, param_dtype=param_dtype
            )

        self.cfg = cfg
        self.q_proj = linear((width,), (heads, dim), ("embed", "heads", "key"))
        self.k_proj = linear((width,), (heads, dim), ("embed", "heads", "key"))
        self.v_proj = linear((width,), (heads, dim), ("embed", "heads", "value"))
        if cfg.conv_size is not None:
            self.q_conv1d = ShortConv(cfg.conv_size, heads, dim, "key", rngs=rngs)
            self.k_conv1d = ShortConv(cfg.conv_size, heads, dim, "key", rngs=rngs)
            self.v_conv1d = ShortConv(cfg.conv_size, heads, dim, "value", rngs=rngs)

        decays, rank = (heads, cfg.decay_dim), cfg.gate_rank
        if rank is None:
            self.f_proj = linear((width,), decays, ("embed", "heads", "key"))
        else:
            self.f_a_proj = linear((width,), (rank,), ("embed", "rank"))
            self.f_b_proj = linear((rank,), decays, ("rank", "heads", "key"))
        # float32 whatever param_dtype says: in bfloat16 the slow decays round to no decay (KF-018)
        zeros = nnx.initializers.zeros
        self.A_log = param(rngs, zeros, (heads,), ("heads",), "float32")
        self.dt_bias = param(rngs, init_dt_bias, decays, ("heads", "key"), "float32")
        self.b_proj = linear((width,), (heads,), ("embed", "heads"))

        rank = cfg.out_gate_rank
        if rank is None:
            self.g_proj = linear((width,), (heads, dim), ("embed", "heads", "value"))
        else:
            self.g_a_proj = linear((width,), (rank,), ("embed", "rank"))
            self.g_b_proj = linear((rank,), (heads, dim), ("rank", "heads", "value"))
        self.o_norm = RMSNorm(dim, eps=cfg.norm_eps, rngs=rngs, axis="value")  # float32, [V]
        self.o_proj = linear((heads, dim), (width,), ("heads", "value", "embed"))

    def log_decay(self, z: Float[Array, "*lead H K"]) -> Float[Array, "*lead H K"]:
        """Log-decay g <= 0, nats per token, float32, of the biased decay logits z (Eq. 5)."""
        return log_decay(z, self.A_log[...], self.cfg.g_min)

    def mix(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T H K"],
        v: Float[Array, "B T H V"],
        g: Float[Array, "B T H G"] | Float[Array, "B T H"],
        beta: Float[Array, "B T H"],
        state: Float[Array, "B H K V"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
        """The recurrence: read-out of every token, and the memory after the last real one.

        Inputs are activated (q, k normalised, g <= 0, 0 < beta < beta_max). `state` is given when
        decoding; padding (segment 0) changes nothing and reads 0. The op is promised g >= cfg.g_min
        if KDA's own gate made g, so an override that lowers g calls the op itself.
        """
        if state is None or q.shape[1] != 1:
            own_gate = type(self).log_decay is _OWN_GATE
            o, new = kda(
                q, k, v, g, beta, state=state, segment_ids=segment_ids,
                g_min=self.cfg.g_min if own_gate else None,
                chunk_size=self.cfg.chunk_size, backend=self.cfg.backend,
            )  # fmt: skip
            return o, new
        o, new = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        if segment_ids is not None:
            real = (segment_ids > 0)[:, :, None, None]
            o, new = jnp.where(real[:, 0], o, 0), jnp.where(real, new, state)
        return o[:, None], new

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: Int[Array, "B T"] | None = None,
        cache: KDACache | None = None,
    ) -> tuple[Float[Array, "B T D"], KDACache | None]:
        """Apply the layer.

        Args:
            x: normalised activations.
            segment_ids: document of each token, 1, 2, ... in runs, 0 for padding; None: one
                document per row. With `cache`: 1 for real tokens, then 0 for padding on the right.
                Where `context` ranks share rows, x is a window of them and this the whole rows.
            cache: conv inputs and memory of the tokens before x (before the row, where ranks share
                it); None starts afresh.

        Returns: the outputs (0 at padding), and the cache after the last real token (None if none
        was given).
        Numerics: matmuls in x's dtype; convolution, gates, norms and memory in float32.
        Cost: O(T) in time; the cache does not grow.
        """
        cfg = self.cfg
        with jax.named_scope("kda"):
            q, k, v, conv = self._project(x, segment_ids, cache)
            z = self.f_proj(x) if cfg.gate_rank is None else self.f_b_proj(self.f_a_proj(x))
            beta = cfg.beta_max * jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
            state = None if cache is None else cache.state
            windows = kda_context.ranks() > 1  # x is a part of its rows
            decoding = cache is not None and x.shape[1] == 1 and not windows
            if (type(self).log_decay, type(self).mix) == (_OWN_GATE, _OWN_MIX) and not decoding:
                run = kda_context.kda_from_logits if windows else kda_from_logits
                o, state = run(
                    q, k, v, z, beta, self.A_log[...], self.dt_bias[...], g_min=cfg.g_min,
                    state=state, segment_ids=segment_ids,
                    chunk_size=cfg.chunk_size, backend=cfg.backend,
                )  # fmt: skip
            else:
                g = self.log_decay(z.astype(jnp.float32) + self.dt_bias[...])
                q, k = normalize_query(q), l2_normalize(k)
                if not windows:
                    o, state = self.mix(q, k, v, g, beta, state, segment_ids)
                elif type(self).mix is _OWN_MIX:  # only the gate is another one
                    o, state = kda_context.kda(
                        q, k, v, g, beta, g_min=None, state=state, segment_ids=segment_ids,
                        chunk_size=cfg.chunk_size, backend=cfg.backend,
                    )  # fmt: skip
                else:
                    o, state = kda_context.gathered(self.mix, q, k, v, g, beta, state, segment_ids)
            gate = self.g_proj(x) if cfg.out_gate_rank is None else self.g_b_proj(self.g_a_proj(x))
            y = self.o_proj(gated_rms_norm(o, self.o_norm.weight[...], gate, cfg.norm_eps))
            return y, None if conv is None or state is None else KDACache(conv, state)

    def _project(self, x, segment_ids, cache):
        """q, k, v after convolution and SiLU, and the new conv cache (None without a cache)."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = None if cache is None else cache.conv  # B W-1 3 H K
        if self.cfg.conv_size is None:
            return *(jax.nn.silu(a.astype(jnp.float32)).astype(x.dtype) for a in (q, k, v)), conv
        kernels = tuple(m.kernel[...] for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        past, tokens, size = conv, x.shape[1], self.cfg.conv_size - 1
        windows = kda_context.ranks() > 1
        if windows and size > 0:
            past = kda_context.conv_past((q, k, v), size, conv, segment_ids)
        ids = kda_context.own(segment_ids, tokens)
        mixed, new = short_conv_streams((q, k, v), kernels, cache=past, segment_ids=ids)
        if windows and conv is not None:
            new = kda_context.conv_cache(new, segment_ids, tokens).astype(conv.dtype)
        return *mixed, None if conv is None else new


_OWN_GATE, _OWN_MIX = KimiDeltaAttention.log_decay, KimiDeltaAttention.mix
