"""The released config.json (its text part) to a `K3Config` and back; a key that defines the function has no default."""

import logging
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from k3jax.errors import UserError
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.layers.feed_forward import ActivationConfig
from k3jax.layers.kda import KDAConfig
from k3jax.layers.latent_moe import LatentMoEConfig
from k3jax.layers.mla import MLAConfig
from k3jax.model import K3Config
from k3jax.stacks import Attention

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
MAX_LAYERS = 10_000
K3_LINEAR_KEYS = ("gate_lower_bound", "use_full_rank_gate")  # inside linear_attn_config

# How the release stores its routed experts (checkpoint format, section 5).
MXFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "group_size": 32,
    "strategy": "group",
    "symmetric": True,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": "torch.uint8",
    "zp_dtype": None,
}
MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": MXFP4_WEIGHTS,
            "input_activations": None,
            "output_activations": None,
            "format": "mxfp4-pack-quantized",
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
}


COUNTS = ("_size", "_dim", "_rank", "_group", "_replace")  # ends of keys, besides "num_..."
SWITCHES = (
    "latent_moe_use_norm",
    "mla_use_nope",
    "mla_use_output_gate",
    "moe_renormalize",
    "tie_word_embeddings",
    "use_full_rank_gate",
)
WORDS = ("hidden_act", "moe_router_activation_func")
LISTS = ("kda_layers", "full_attn_layers", "linear_attn_config")
MAY_BE_NULL = (
    *K3_KEYS,
    *K3_LINEAR_KEYS,
    "q_lora_rank",
    "short_conv_kernel_size",
    "num_experts",
)


class _Required(Mapping):
    """A view of a config: a missing key, or one whose value is of the wrong type, is an error that names it."""

    def __init__(self, values: Mapping[str, Any], where: str = ""):
        self.values_, self.where = values, where

    def __getitem__(self, key: str) -> Any:
        if key not in self.values_:
            raise ValueError(f"config lacks {self.where}{key}, which defines the model: add it")
        value = self.values_[key]
        if key in LISTS:
            return value
        if key.startswith("num_") or key.endswith(COUNTS):
            good, what = type(value) is int, "an integer"
        elif key in WORDS:
            good, what = type(value) is str, "a word"
        elif key in SWITCHES:
            good, what = type(value) is bool, "true or false"
        else:
            good, what = type(value) in (int, float), "a number"
        if not good and not (value is None and key in MAY_BE_NULL):
            raise ValueError(f"{self.where}{key}={value!r} must be {what}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self.values_ else default

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
    for key in ("kda_layers", "full_attn_layers"):
        if type(linear[key]) is not list or any(type(i) is not int for i in linear[key]):
            raise ValueError(f"linear_attn_config.{key} must be a list of layer numbers")
    kda, mla = set(linear["kda_layers"]), set(linear["full_attn_layers"])
    if n > MAX_LAYERS:  # before anything is as long as a number in a file says
        raise ValueError(f"num_hidden_layers={n} is more than {MAX_LAYERS}")
    both = len(linear["kda_layers"]) + len(linear["full_attn_layers"])
    if both != n or kda | mla != set(range(1, n + 1)):
        missing = sorted(set(range(1, n + 1)) - kda - mla)
        outside = sorted(i for i in kda | mla if not 1 <= i <= n)
        raise ValueError(
            f"kda_layers and full_attn_layers must cover layers 1..{n} once each: "
            f"in both {sorted(kda & mla)}, in neither {missing}, outside {outside}"
        )
    return tuple("mla" if i in mla else "kda" for i in range(1, n + 1))


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
    if not isinstance(config, Mapping):
        raise ValueError(f"text_config must be an object, not {config!r}")
    if not isinstance(config.get("linear_attn_config", {}), Mapping):
        raise ValueError(
            f"linear_attn_config must be an object, not {config['linear_attn_config']!r}"
        )
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
    block_size = c.get("attn_res_block_size")
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
            out_gate=bool(c.get("mla_use_output_gate")),
            latent_norm_eps=1e-6,  # the reference builds both norms without passing rms_norm_eps
            rope_theta=None if c["mla_use_nope"] else float(c["rope_theta"]),
        ),
        moe=None
        if c["num_experts"] is None
        else LatentMoEConfig(
            num_experts=c["num_experts"],
            num_active=c["num_experts_per_token"],
            ffn_dim=c["moe_intermediate_size"],
            latent_dim=c.get("routed_expert_hidden_size"),
            latent_norm=bool(c.get("latent_moe_use_norm")),
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
        init_std=c.get("initializer_range", 0.02),
        tie_embeddings=c["tie_word_embeddings"],
        dtype=dtype,
        param_dtype=param_dtype,
        remat="none",
        scan_layers=True,
    )


# -- back


def function_of(cfg: K3Config) -> K3Config:
    """The config with everything that an official config does not state as `config_from_official` sets it.

    That is how a model is computed, trained and stored, as opposed to the function it computes.
    """
    moe = cfg.moe and replace(
        cfg.moe,
        balancing="quantile_histogram" if _has_k3_parts(cfg) else "none",
        num_bins=1000,
        weights="plain",
    )
    pattern, closing = fold_schedule(tuple(attention for attention, _ in cfg.layers))
    return replace(
        cfg,
        kda=replace(cfg.kda, chunk_size=64, backend=None),
        moe=moe,
        pattern=pattern,
        closing=closing,
        dtype="bfloat16",
        param_dtype="bfloat16",
        remat="none",
        scan_layers=True,
    )


def config_to_official(
    cfg: K3Config, base: Mapping[str, Any] | None = None, *, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """The official config of a model; `config_from_official` gives `function_of(cfg)` back.

    Args:
        cfg: the model. With `moe.weights` "mxfp4" the config describes 4-bit experts.
        base: config.json that the model came from; keys that say nothing about the text model's
            function are kept (vision tower, token ids, names).
        dtype: of the unquantised tensors.

    Returns: for a K3 the outer config, whose text model is "text_config" (or the inner one, if `base`
        is an inner one); for a Kimi Linear the plain config.
    Raises: UserError naming the field, if it has a value that no official config can state.
    """
    own, own_linear = _function_keys(cfg)
    k3 = _has_k3_parts(cfg)
    if base is None:
        base = {"text_config": _TEXT_NAMES, **_OUTER_NAMES} if k3 else _TEXT_NAMES
    inner: dict[str, Any] = dict(base.get("text_config", base))
    linear = dict(inner.get("linear_attn_config") or {})
    if not k3:  # a Kimi Linear may lack the keys that K3 added, or have them switched off
        own = {key: v for key, v in own.items() if key not in K3_KEYS or key in inner}
        own_linear = {k: v for k, v in own_linear.items() if k not in K3_LINEAR_KEYS or k in linear}
    inner |= own | {"linear_attn_config": linear | own_linear, "dtype": dtype}
    official: dict[str, Any] = inner
    if "text_config" in base:
        official = {**base, "text_config": inner, "dtype": dtype}
        if "tie_word_embeddings" in base:
            official["tie_word_embeddings"] = cfg.tie_embeddings
    if cfg.moe is None or cfg.moe.weights == "plain":
        for part in (official, inner):
            part.pop("quantization_config", None)
    elif "quantization_config" not in official:
        inner.setdefault("quantization_config", MXFP4)
    _check_stated(function_of(cfg), config_from_official(official))
    return official


_OUTER_NAMES: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
}
_TEXT_NAMES: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
}


def _has_k3_parts(cfg: K3Config) -> bool:
    """Whether the model has one of the parts by which `is_k3` knows a K3."""
    keys, linear = _function_keys(cfg)
    return is_k3(keys | {"linear_attn_config": linear})


def _function_keys(cfg: K3Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys that define the function, and those of them inside linear_attn_config."""
    mla, kda, moe, situ = cfg.mla, cfg.kda, cfg.moe, cfg.activation.kind == "situ"
    layers = list(enumerate(cfg.layers, start=1))
    keys: dict[str, Any] = {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.dense_ffn_dim,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.qk_nope_dim,
        "qk_rope_head_dim": mla.qk_shared_dim,
        "v_head_dim": mla.v_dim,
        "mla_use_nope": mla.rope_theta is None,
        "mla_use_output_gate": mla.out_gate,
        "hidden_act": "situ" if situ else "silu",
        "activation_situ_beta": cfg.activation.gate_cap,
        "activation_situ_linear_beta": cfg.activation.up_cap,
        "attn_res_block_size": cfg.attn_res.block_size,
        "rms_norm_eps": cfg.norm_eps,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": cfg.tie_embeddings,
        "first_k_dense_replace": cfg.num_dense_layers,
        "moe_layer_freq": 1,
        "num_experts": None,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
    }
    if mla.rope_theta is not None:
        keys["rope_theta"] = mla.rope_theta
    if moe is not None:
        keys |= {
            "num_experts": moe.num_experts,
            "num_experts_per_token": moe.num_active,
            "moe_intermediate_size": moe.ffn_dim,
            "routed_expert_hidden_size": moe.latent_dim,
            "latent_moe_use_norm": moe.latent_norm,
            "num_shared_experts": moe.num_shared,
            "moe_router_activation_func": moe.router,
            "moe_renormalize": moe.renormalize,
            "routed_scaling_factor": moe.routed_scale,
            "num_expert_group": moe.num_groups,
            "topk_group": moe.num_active_groups,
        }
    linear = {
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_size,
        "gate_lower_bound": kda.g_min,
        "use_full_rank_gate": kda.out_gate_rank is None,
        "kda_layers": [i for i, (attention, _) in layers if attention == "kda"],
        "full_attn_layers": [i for i, (attention, _) in layers if attention == "mla"],
    }
    return keys, linear


def _check_stated(want: Any, got: Any, where: str = "model") -> None:
    """Raises UserError for the first field of `want` that the official config could not state."""
    if is_dataclass(want) and type(want) is type(got):
        for field in fields(want):
            name = field.name
            _check_stated(getattr(want, name), getattr(got, name), f"{where}.{name}")
    elif want != got:
        shown, means = (type(v).__name__ if is_dataclass(v) else repr(v) for v in (want, got))
        raise UserError(
            f"{where}={shown} cannot be stated in an official config: that means {means}"
        )
