"""The released config.json (its text part) to a `K3Config`; a key that defines the function has no default."""

import logging
from collections.abc import Mapping
from typing import Any

from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.layers.feed_forward import ActivationConfig
from k3jax.layers.kda import KDAConfig
from k3jax.layers.latent_moe import LatentMoEConfig
from k3jax.layers.mla import MLAConfig
from k3jax.model import Attention, K3Config

log = logging.getLogger("k3jax")

# Keys that Kimi K3 adds to Kimi Linear. One that is set makes the config a K3, which must then have them all.
K3_KEYS = (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
)
K3_LINEAR_KEYS = ("gate_lower_bound", "use_full_rank_gate")  # inside linear_attn_config


class _Required(Mapping):
    """A view of a config whose missing keys are errors that name the key."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values_, self.where = values, where

    def __getitem__(self, key: str) -> Any:
        if key not in self.values_:
            raise ValueError(f"config lacks {self.where}{key}, which defines the model: add it")
        return self.values_[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values_.get(key, default)

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)


def is_k3(config: Mapping[str, Any]) -> bool:
    """Whether a text config belongs to Kimi K3; otherwise it is a Kimi Linear."""
    linear = config.get("linear_attn_config") or {}
    return (
        config.get("hidden_act") == "situ"
        or any(config.get(key) for key in K3_KEYS)
        or any(linear.get(key) for key in K3_LINEAR_KEYS)
    )


def attention_schedule(config: Mapping[str, Any]) -> tuple[Attention, ...]:
    """ "kda" or "mla" of each layer, index 0 first, from the released lists, which count from 1.

    Raises: ValueError if the lists overlap, leave a layer out or name one that does not exist.
    """
    n, linear = (
        config["num_hidden_layers"],
        _Required(config["linear_attn_config"], "linear_attn_config."),
    )
    kda, mla = linear["kda_layers"], linear["full_attn_layers"]
    if sorted([*kda, *mla]) != list(range(1, n + 1)):
        twice = sorted(set(kda) & set(mla))
        missing = sorted(set(range(1, n + 1)) - set(kda) - set(mla))
        outside = sorted(i for i in {*kda, *mla} if not 1 <= i <= n)
        raise ValueError(
            f"kda_layers and full_attn_layers must cover layers 1..{n} once each: "
            f"in both {twice}, in neither {missing}, outside {outside}"
        )
    return tuple("mla" if i in set(mla) else "kda" for i in range(1, n + 1))


def fold_schedule(
    layers: tuple[Attention, ...],
) -> tuple[tuple[Attention, ...], tuple[Attention, ...]]:
    """(pattern, closing) of the shortest description of a schedule as pattern * n + closing."""
    best = (layers, ())
    for size in range(1, len(layers) + 1):
        pattern, n = layers[:size], 1
        while layers[n * size : (n + 1) * size] == pattern:
            n += 1
        if size + len(layers) - n * size < len(best[0]) + len(best[1]):
            best = (pattern, layers[n * size :])
    return best


def config_from_official(
    config: Mapping[str, Any], *, dtype: str = "bfloat16", param_dtype: str = "bfloat16"
) -> K3Config:
    """The model that a released config describes.

    Args:
        config: parsed config.json, or its `text_config`.
        dtype: compute dtype.
        param_dtype: storage dtype.

    Raises: ValueError naming the key, if one that defines the function is absent or has a value outside its domain.
    """
    config = config.get("text_config", config)
    k3 = is_k3(config)
    c = _Required(config)
    linear = _Required(c["linear_attn_config"], "linear_attn_config.")
    if k3:
        for key in K3_KEYS:
            c[key]
        for key in K3_LINEAR_KEYS:
            linear[key]
    g_min = linear.get("gate_lower_bound")
    if g_min is None:
        log.info("gate_lower_bound is null or absent: KDA uses the unbounded softplus gate")
    if c["num_key_value_heads"] != c["num_attention_heads"]:
        raise ValueError(
            f"num_key_value_heads={c['num_key_value_heads']} must equal num_attention_heads={c['num_attention_heads']}"
        )
    if c["moe_layer_freq"] != 1:
        raise ValueError(
            f"moe_layer_freq={c['moe_layer_freq']} is not supported; every layer must be an expert layer (1)"
        )
    if c["hidden_act"] not in ("situ", "silu"):
        raise ValueError(f"hidden_act={c['hidden_act']!r} is unknown; situ and silu are supported")
    situ = c["hidden_act"] == "situ"
    if situ and not c["activation_situ_beta"]:
        raise ValueError(
            f"activation_situ_beta={c['activation_situ_beta']} must be positive with hidden_act=situ"
        )
    head_dim = linear["head_dim"]
    pattern, closing = fold_schedule(attention_schedule(c))
    block_size = config.get("attn_res_block_size")
    return K3Config(
        vocab_size=c["vocab_size"],
        width=c["hidden_size"],
        num_layers=c["num_hidden_layers"],
        pattern=pattern,
        closing=closing,
        num_dense_layers=c["first_k_dense_replace"],
        dense_ffn_dim=c["intermediate_size"],
        kda=KDAConfig(
            num_heads=linear["num_heads"],
            head_dim=head_dim,
            conv_size=linear["short_conv_kernel_size"],
            gate="softplus" if g_min is None else "bounded",
            g_min=g_min,
            gate_rank=head_dim,
            out_gate_rank=None if linear.get("use_full_rank_gate") else head_dim,
            beta_max=1.0,
            norm_eps=c["rms_norm_eps"],
            chunk_size=64,
            backend=None,
        ),
        mla=MLAConfig(
            num_heads=c["num_attention_heads"],
            q_rank=c["q_lora_rank"],
            kv_rank=c["kv_lora_rank"],
            qk_nope_dim=c["qk_nope_head_dim"],
            qk_shared_dim=c["qk_rope_head_dim"],
            v_dim=c["v_head_dim"],
            out_gate=bool(config.get("mla_use_output_gate")),
            latent_norm_eps=1e-6,  # the reference builds both norms without passing rms_norm_eps
            rope_theta=None if c["mla_use_nope"] else float(c["rope_theta"]),
        ),
        moe=LatentMoEConfig(
            num_experts=c["num_experts"],
            num_active=c["num_experts_per_token"],
            ffn_dim=c["moe_intermediate_size"],
            latent_dim=config.get("routed_expert_hidden_size"),
            latent_norm=bool(config.get("latent_moe_use_norm")),
            num_shared=c["num_shared_experts"],
            router=c["moe_router_activation_func"],
            renormalize=c["moe_renormalize"],
            routed_scale=c["routed_scaling_factor"],
            num_groups=c["num_expert_group"],
            num_active_groups=c["topk_group"],
            balancing="quantile_histogram" if k3 else "none",
            num_bins=1000,
            weights="plain",  # the tensors decide, not the config (see the audit)
        ),
        activation=ActivationConfig(
            kind="situ" if situ else "swiglu",
            gate_cap=c["activation_situ_beta"] if situ else None,
            up_cap=c["activation_situ_linear_beta"] if situ else None,
        ),
        attn_res=AttnResConfig(
            kind="none" if block_size is None else "block", block_size=block_size
        ),
        norm_eps=c["rms_norm_eps"],
        init_std=config.get("initializer_range", 0.02),
        tie_embeddings=c["tie_word_embeddings"],
        dtype=dtype,
        param_dtype=param_dtype,
        remat="none",
    )
