"""The audit of a checkpoint in the official layout: its config against its tensors, from headers alone.

Nothing is guessed and nothing left over: each tensor is one the config asks for, of the shape and type
it asks for, or the checkpoint is refused with a list of all that differs (KF-088).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from k3jax.convert_hf import Placed, all_entries
from k3jax.errors import UserError
from k3jax.model import K3Config
from k3jax.official_config import MXFP4, MXFP4_WEIGHTS, config_from_official
from k3jax.safetensors_files import CONFIG, SafetensorsFolder

SHOWN = 5  # names of each kind of problem
OUTER_PREFIX = "language_model."
PLAIN = {"BF16": "bfloat16", "F32": "float32"}
PACKED = (".weight_packed", ".weight_scale")


class Audit(NamedTuple):
    """A checkpoint that fits its config."""

    cfg: K3Config  # `moe.weights` is "mxfp4" if the experts are packed
    prefix: str  # in front of the text model's names
    padded_a_log: bool  # A_log has head_dim entries, of which those after num_heads must be zero
    plain: str  # safetensors dtype of all tensors that are neither float32 by nature nor packed
    text: list[Placed]  # the text model's tensors
    carried: list[str]  # tensors of vision tower and projector, which the text model does not use


def audit(folder: SafetensorsFolder) -> Audit:
    """Compares every tensor of a checkpoint with what its config.json describes.

    Values are not read: A_log's tail and the scales are checked where they are.

    Raises: UserError naming the config's key, or listing missing, unexpected, misshapen and wrongly
        typed tensors.
    """
    where, config, tensors = f"{folder.path.rstrip('/')}/{CONFIG}", folder.config, folder.tensors
    text = config.get("text_config", config)
    prefix = OUTER_PREFIX if "text_config" in config else ""
    embedding = tensors.get(f"{prefix}model.embed_tokens.weight")
    plain = embedding.dtype if embedding else "BF16"
    if plain not in PLAIN:
        raise UserError(f"{folder.path}: the embedding is {plain}; use a checkpoint of BF16 or F32")
    packed = next((name for name in tensors if name.endswith(PACKED)), None)
    try:
        cfg = config_from_official(config, dtype=PLAIN[plain], param_dtype=PLAIN[plain])
        _check_quantization(config, text, packed)
        if packed and cfg.moe is not None:
            cfg = replace(cfg, moe=replace(cfg.moe, weights="mxfp4"))
        experts = cfg.moe.num_experts * (cfg.num_layers - cfg.num_dense_layers) if cfg.moe else 0
        _check_count("num_hidden_layers", cfg.num_layers, len(tensors))
        _check_count("num_experts, over all layers", experts, len(tensors))
        carried = {}
        if "vision_config" in config:
            carried = carried_shapes(config["vision_config"], most=len(tensors))
    except (ValueError, TypeError) as error:  # a value out of range; one of another type
        raise UserError(f"{where}: {error}") from error

    a_log = next((info.shape for name, info in tensors.items() if name.endswith(".A_log")), None)
    padded = a_log == (cfg.kda.head_dim,) and cfg.kda.num_heads < cfg.kda.head_dim
    entries = list(all_entries(cfg, prefix=prefix, padded_a_log=padded))
    types = {"plain": plain, "float32": "F32", "uint8": "U8"}
    expected = {p.name: (types[p.entry.dtype], p.entry.shape) for p in entries}
    expected |= {name: (plain, shape) for name, shape in carried.items()}
    _compare(folder, expected)
    return Audit(cfg, prefix, padded, plain, entries, list(carried))


def _check_count(key: str, n: int, most: int) -> None:
    """A number in a file may not decide how long the audit takes."""
    if n > most:
        raise ValueError(f"{key}={n}, but there are only {most} tensors")


def _compare(
    folder: SafetensorsFolder, expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """One UserError for all tensors that are not as expected."""
    tensors = folder.tensors
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "misshapen": [],
        "of another type": [],
    }
    for name, (dtype, shape) in expected.items():
        if (info := tensors.get(name)) is None:
            continue
        if info.shape != shape:
            problems["misshapen"].append(f"{name} {list(info.shape)} instead of {list(shape)}")
        if info.dtype != dtype:
            problems["of another type"].append(f"{name} {info.dtype} instead of {dtype}")
    found = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise UserError(f"{folder.path} does not fit its {CONFIG}: {'; '.join(found)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def carried_shapes(vision: Mapping[str, Any], *, most: int = 10_000) -> dict[str, tuple[int, ...]]:
    """The tensors of vision tower and projector (vision, section 5) with their shapes.

    Args:
        vision: the config's `vision_config`.
        most: tensors there can be.

    Raises: ValueError naming a missing key, or one with a value of which the names are not known.
    """
    if not isinstance(vision, Mapping):
        raise ValueError(f"vision_config must be an object, not {vision!r}")

    def value(key: str) -> Any:
        if key not in vision:
            raise ValueError(f"config lacks vision_config.{key}, which defines the model: add it")
        return vision[key]

    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        if vision.get(key):
            raise ValueError(f"vision_config.{key}={vision[key]!r} is not supported; false is")
    _check_count("vision_config.vt_num_hidden_layers", value("vt_num_hidden_layers"), most)
    width, qkv, ffn = (value(f"{k}_size") for k in ("vt_hidden", "qkv_hidden", "vt_intermediate"))
    patch, out = value("patch_size"), value("text_hidden_size")
    merged = value("mm_hidden_size") * math.prod(value("merge_kernel_size"))
    block = {
        "norm0.weight": (width,),
        "norm1.weight": (width,),
        "wqkv.weight": (3 * qkv, width),
        "wo.weight": (width, qkv),
        "mlp.fc0.weight": (ffn, width),
        "mlp.fc1.weight": (width, ffn),
    }
    positions = (value("init_pos_emb_height"), value("init_pos_emb_width"), width)
    return {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": positions,
        **{
            f"vision_tower.encoder.blocks.{i}.{name}": shape
            for i in range(value("vt_num_hidden_layers"))
            for name, shape in block.items()
        },
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (out, merged),
        "mm_projector.post_norm.weight": (out,),
    }


def _check_quantization(
    config: Mapping[str, Any], text: Mapping[str, Any], packed: str | None
) -> None:
    """Whether config and tensors agree on 4-bit experts, and in the one format that is known.

    Which tensors are packed is decided by their names: the config's list of exceptions omits some
    that are plain (checkpoint format, section 5).
    """
    found = text.get("quantization_config") or config.get("quantization_config")
    if packed and not found:
        raise ValueError(f"no quantization_config, but {packed} is packed: add it")
    if not found:
        return
    groups = _get(found, "config_groups", {})
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError(f"quantization_config: config_groups={groups!r}; one group is supported")
    (group,) = groups.values()
    (released,) = MXFP4["config_groups"].values()
    for part, values, needed, others in (
        (found, MXFP4, ("quant_method", "format"), ("quantization_status", "kv_cache_scheme")),
        (group, released, (), ("format", "input_activations", "output_activations")),
        (
            _get(group, "weights", {}),
            MXFP4_WEIGHTS,
            ("num_bits", "type", "group_size", "strategy", "symmetric"),
            ("dynamic", "actorder", "block_structure", "scale_dtype", "zp_dtype"),
        ),
    ):
        for key in (*needed, *others):
            default = None if key in needed else values[key]
            if (value := _get(part, key, default)) != values[key]:
                raise ValueError(
                    f"quantization_config: {key}={value!r} is not supported; "
                    f"the released format has {values[key]!r}"
                )
    if not packed:
        raise ValueError(
            "quantization_config, but no tensor is packed: remove it, or pack the experts"
        )


def _get(part: Any, key: str, default: Any) -> Any:
    if not isinstance(part, Mapping):
        raise ValueError(f"quantization_config: {part!r} where an object must be")
    return part.get(key, default)
