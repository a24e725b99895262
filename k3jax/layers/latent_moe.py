"""Stable LatentMoE: many small experts that work in a narrow latent, shared experts beside them."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from k3jax.layers.experts import Experts, PackedExperts
from k3jax.layers.feed_forward import ActivationConfig, FeedForward, Linear
from k3jax.layers.norms import RMSNorm
from k3jax.layers.quantile_balancing import Balancing, RouterStats, collect_stats
from k3jax.pallas_kernels.mxfp4 import GROUP
from k3jax.sharding.annotate import (
    Buffer,
    axis_size,
    gathered,
    join_tokens,
    split_tokens,
)


@dataclass(frozen=True, kw_only=True)
class LatentMoEConfig:
    """One layer of routed and shared experts."""

    num_experts: int  # n, routed experts
    num_active: int  # k, routed experts per token
    ffn_dim: int  # hidden width of one expert, routed or shared
    latent_dim: int | None  # width in which routed experts read and write; None: the model's width
    latent_norm: bool  # RMS norm of the weighted sum of experts, before it is projected up
    num_shared: int  # experts every token uses, fused into one of width num_shared * ffn_dim
    router: Literal["sigmoid", "softmax"]  # scores from logits
    renormalize: bool  # divide the chosen scores by their sum
    routed_scale: float  # factor on the combine weights
    num_groups: int  # neighbouring experts form groups that compete first; 1: no groups
    num_active_groups: int  # groups whose experts may be chosen
    balancing: Balancing  # how the selection biases follow the load
    num_bins: int  # bins of the quantile histogram
    # The routed experts' matrices: parameters, or the release's 4-bit codes, which stay in memory as
    # they are, are decoded in the product, and cannot be trained.
    weights: Literal["plain", "mxfp4"]

    def __post_init__(self):
        for name in ("num_experts", "num_active", "ffn_dim", "num_groups", "num_active_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"moe.{name}={getattr(self, name)} must be at least 1")
        if self.num_active > self.num_experts:
            raise ValueError(
                f"moe.num_active={self.num_active} exceeds num_experts={self.num_experts}: a token "
                f"chooses distinct experts, use at most {self.num_experts}"
            )
        if self.latent_dim is not None and self.latent_dim < 1:
            raise ValueError(f"moe.latent_dim={self.latent_dim} must be at least 1, or None")
        if self.latent_norm and self.latent_dim is None:
            raise ValueError("moe.latent_norm=True needs latent_dim: set it, or latent_norm=False")
        if self.num_shared < 0:
            raise ValueError(f"moe.num_shared={self.num_shared} must be at least 0")
        if self.router not in ("sigmoid", "softmax"):
            raise ValueError(f"moe.router={self.router!r} is unknown: use 'sigmoid' or 'softmax'")
        if not 0 < self.routed_scale < math.inf:
            raise ValueError(
                f"moe.routed_scale={self.routed_scale} must be a finite number above 0"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"moe.num_groups={self.num_groups} does not divide num_experts={self.num_experts}"
            )
        if self.num_active_groups > self.num_groups:
            raise ValueError(
                f"moe.num_active_groups={self.num_active_groups} exceeds "
                f"num_groups={self.num_groups}"
            )
        if self.balancing not in ("quantile_histogram", "quantile_exact", "none"):
            raise ValueError(
                f"moe.balancing={self.balancing!r} is unknown: use 'quantile_histogram', "
                "'quantile_exact' or 'none'"
            )
        if self.balancing == "quantile_histogram" and self.num_bins < 1:
            raise ValueError(f"moe.num_bins={self.num_bins} must be at least 1")
        if self.weights not in ("plain", "mxfp4"):
            raise ValueError(f"moe.weights={self.weights!r} is unknown: use 'plain' or 'mxfp4'")
        for name in ("ffn_dim", "latent_dim"):
            width = getattr(self, name)
            if self.weights == "mxfp4" and width is not None and width % GROUP:
                raise ValueError(
                    f"moe.{name}={width} is no multiple of {GROUP}, the group of weights='mxfp4'"
                )
        rivals = self.num_experts // self.num_groups * self.num_active_groups
        balanced = self.balancing != "none" and self.num_active < self.num_experts
        if rivals < self.num_active + balanced:  # balancing compares with the best that lost
            raise ValueError(
                f"moe.num_active_groups={self.num_active_groups} leaves {rivals} experts for "
                f"num_active={self.num_active} with balancing={self.balancing!r}: "
                f"at least {self.num_active + balanced} are needed"
            )

    def build(
        self,
        width: int,
        *,
        activation: ActivationConfig,
        norm_eps: float,
        rngs: nnx.Rngs,
        param_dtype: str,
        init_std: float,
    ) -> "LatentMoE":
        return LatentMoE(
            self,
            width,
            activation=activation,
            norm_eps=norm_eps,
            rngs=rngs,
            param_dtype=param_dtype,
            init_std=init_std,
        )


class Routing(NamedTuple):
    """Where each token goes."""

    ids: Int[Array, "*batch A"]  # chosen experts, distinct, best first
    weights: Float[Array, "*batch A"]  # combine weights
    scores: Float[Array, "*batch E"]  # unbiased
    cutoff: Float[Array, "*batch"]  # alpha: the best biased score that lost, without gradient


def route(
    x: Float[Array, "*batch D"],
    w: Float[Array, "D E"],
    bias: Float[Array, " E"],
    cfg: LatentMoEConfig,
) -> Routing:
    """Choose experts by biased scores, weight them by unbiased ones.

        s = sigmoid(W x),  T = top_k(s + b),  p_j = scale s_j / (sum_T s + 1e-20)
                                                                (architecture 8, steps 1-3)

    Args:
        x: activations.
        w: router matrix.
        bias: selection bias; no gradient reaches it.
        cfg: the layer.

    Numerics: float32 throughout, with full-precision products on every platform: logits 1e-4 apart
    must not trade places. Equal biased scores: the lowest expert index wins.
    """
    logits = jnp.einsum(
        "...d,de->...e",
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    scores = jax.nn.sigmoid(logits) if cfg.router == "sigmoid" else jax.nn.softmax(logits)
    biased = _competing(jax.lax.stop_gradient(scores + bias), cfg)
    best, ids = jax.lax.top_k(biased, min(cfg.num_active + 1, cfg.num_experts))
    ids = ids[..., : cfg.num_active]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if cfg.renormalize and cfg.num_active > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(ids, weights * cfg.routed_scale, scores, best[..., -1])


def _competing(biased: Float[Array, "*batch E"], cfg: LatentMoEConfig) -> Float[Array, "*batch E"]:
    """-inf for experts outside the best groups; a group counts as the sum of its two best."""
    if cfg.num_groups == 1:
        return biased
    size = cfg.num_experts // cfg.num_groups
    grouped = biased.reshape(*biased.shape[:-1], cfg.num_groups, size)
    group_scores = jax.lax.top_k(grouped, min(2, size))[0].sum(-1)
    _, chosen = jax.lax.top_k(group_scores, cfg.num_active_groups)
    allowed = (chosen[..., None] == jnp.arange(cfg.num_groups)).any(-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)


class LatentMoE(nnx.Module):
    """Routed experts in a latent, their sum normalised and projected up, plus shared experts.

        y = W_up rms(sum_j p_j E_j(W_down x)) + E_shared(x)     (K3 report, Eq. 11)

    Router and shared experts read x in full width.

    On a mesh the routed part works on this device's share of the tokens that a `tensor` group has in
    common, so that none travels twice to its experts (`sharding/expert_parallel.py`). The shared
    experts are split over `tensor` and see all tokens. They depend on x alone: nothing makes them
    wait for the exchange, and the compiler may compute them while it is under way.
    """

    def __init__(
        self,
        cfg: LatentMoEConfig,
        width: int,
        *,
        activation: ActivationConfig,
        norm_eps: float,
        rngs: nnx.Rngs,
        param_dtype: str,
        init_std: float,
    ):
        common = {"rngs": rngs, "param_dtype": param_dtype, "init_std": init_std}
        self.cfg = cfg
        self.gate = Linear((width,), (cfg.num_experts,), ("embed", "scores"), **common)
        self.router_bias = Buffer(jnp.zeros(cfg.num_experts, jnp.float32))
        dim, axis = width, "embed"
        if cfg.latent_dim is not None:
            dim, axis = cfg.latent_dim, "latent"
            self.routed_expert_down_proj = Linear((width,), (dim,), ("embed", "latent"), **common)
            self.routed_expert_up_proj = Linear((dim,), (width,), ("latent", "embed"), **common)
        if cfg.latent_norm:
            self.routed_expert_norm = RMSNorm(
                dim, eps=norm_eps, rngs=rngs, param_dtype=param_dtype, axis=axis
            )
        if cfg.weights == "mxfp4":
            self.experts = PackedExperts(cfg.num_experts, dim, cfg.ffn_dim, activation=activation)
        else:
            self.experts = Experts(
                cfg.num_experts, dim, cfg.ffn_dim, axis, activation=activation, **common
            )
        if cfg.num_shared:
            self.shared_experts = FeedForward(
                width, cfg.num_shared * cfg.ffn_dim, activation=activation, **common
            )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Bool[Array, "B T"] | None = None,
        collect: bool = False,
    ) -> tuple[Float[Array, "B T D"], RouterStats | None]:
        """Apply the layer.

        Args:
            x: activations; their dtype is the compute dtype.
            mask: False for padding, which reaches no routed expert and no statistics.
            collect: also return what Quantile Balancing needs.

        Returns: the outputs in x's dtype, and the statistics of this device's share or None.
        """
        u, stats = self.routed(x, mask, collect)
        return self.finish(x, u), stats

    def routed(
        self,
        x: Float[Array, "B T D"],
        mask: Bool[Array, "B T"] | None,
        collect: bool = False,
        keep_rows: bool = False,
    ) -> tuple[Float[Array, "tokens L"], RouterStats | None]:
        """Each token's weighted sum of experts in the latent, of this device's share of the tokens.

        `keep_rows`: the backward pass follows at once, so that rows need not travel for it again.
        """
        cfg, every = self.cfg, x.reshape(-1, x.shape[-1])
        mask = None if mask is None else mask.reshape(-1)
        if mask is None and every.shape[0] % axis_size("tensor"):
            mask = jnp.ones(every.shape[0], bool)  # the shares are filled with padding
        tokens, mask = split_tokens(every), None if mask is None else split_tokens(mask)
        bias = self.router_bias[...]
        with jax.named_scope("route"):
            routing = route(tokens, gathered(self.gate.kernel), bias, cfg)
        with jax.named_scope("routed_experts"):
            z = tokens if cfg.latent_dim is None else self.routed_expert_down_proj(tokens)
            u = self.experts(
                z, routing.ids, routing.weights, mask, keep_rows, decoding=x.shape[1] == 1
            ).astype(x.dtype)
        if not collect:
            return u, None
        with jax.named_scope("collect_stats"):
            return u, collect_stats(
                routing.scores,
                routing.cutoff,
                routing.ids,
                bias,
                mask,
                balancing=cfg.balancing,
                num_bins=cfg.num_bins,
            )

    def finish(
        self, x: Float[Array, "B T D"], u: Float[Array, "tokens L"]
    ) -> Float[Array, "B T D"]:
        """The layer's output from its input and what `routed` gave."""
        cfg, every = self.cfg, x.reshape(-1, x.shape[-1])
        with jax.named_scope("routed_experts"):
            u = self.routed_expert_norm(u) if cfg.latent_norm else u
            y = u if cfg.latent_dim is None else self.routed_expert_up_proj(u)
            y = join_tokens(y, every.shape[0])
        if cfg.num_shared:
            with jax.named_scope("shared_experts"):
                y = y + self.shared_experts(every)
        return y.reshape(x.shape)
