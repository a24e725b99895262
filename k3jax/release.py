"""The released Kimi K3 without its weights: config, index and the headers of its 96 files.

All that is published about the release is enough to write them: names and places from its index,
shapes and types from its config (checkpoint format, sections 1 and 2). Reading them takes every step
of an import but the weights themselves.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3jax.configs.k3 import kimi_k3_model
from k3jax.convert_hf import all_entries
from k3jax.errors import UserError, disk_errors
from k3jax.model import K3Config
from k3jax.official_audit import OUTER_PREFIX, carried_shapes
from k3jax.official_config import config_to_official
from k3jax.safetensors_files import CONFIG, INDEX, write_index
from k3jax.safetensors_header import header_of, size_of

TOTAL_BYTES = 1_560_860_324_864  # total_size of the released index
TENSORS = 497_220

# [config.json], architecture section 1 and vision section 1
VISION = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "qkv_hidden_size": 1536,
    "activation_func": "gelu_pytorch_tanh",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 1024,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": 7168,
}
TOKENS = {"bos_token_id": 163_584, "eos_token_id": 163_586, "pad_token_id": 163_839}
TEXT = {
    "max_position_embeddings": 1_048_576,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}


def release_model() -> K3Config:
    """Kimi K3 as it is released: routed experts in 4 bits."""
    cfg = kimi_k3_model()
    assert cfg.moe is not None
    return replace(cfg, moe=replace(cfg.moe, weights="mxfp4"))


def release_config() -> dict[str, Any]:
    """The released config.json."""
    config = config_to_official(release_model())
    config["text_config"] |= TEXT | TOKENS
    outer = {"vision_config": VISION, "media_placeholder_token_id": 163_605, "ignore_index": -100}
    return config | outer | TOKENS | {"tie_word_embeddings": False}


def shard_of(name: str, num_layers: int) -> int:
    """The file that holds a tensor, counted from 1: one per layer, then the rest, projector, vision."""
    if layer := re.search(r"\bmodel\.layers\.(\d+)\.", name):
        return int(layer[1]) + 1
    for extra, module in enumerate(("mm_projector.", "vision_tower."), start=2):
        if name.startswith(module):
            return num_layers + extra
    return num_layers + 1


def write_headers(folder: str | os.PathLike, *, on_file: Callable[[int, int], None]) -> None:
    """Writes config, index and header-only files of the release into a new folder.

    Args:
        folder: absent or empty.
        on_file: told (files written, files in all) after each.
    """
    folder, cfg = Path(folder), release_model()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: name a new folder for the headers")
    types = {"plain": "BF16", "float32": "F32", "uint8": "U8"}
    count = cfg.num_layers + 3
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(count)]
    for placed in all_entries(cfg, prefix=OUTER_PREFIX, padded_a_log=True):
        shard = shards[shard_of(placed.name, cfg.num_layers) - 1]
        shard[placed.name] = (types[placed.entry.dtype], placed.entry.shape)
    for name, shape in carried_shapes(VISION).items():
        shards[shard_of(name, cfg.num_layers) - 1][name] = ("BF16", shape)

    weight_map, total = {}, 0
    with disk_errors(f"headers in {folder} not written"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(release_config(), indent=2) + "\n")
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05}-of-{count:06}.safetensors"
            (folder / file).write_bytes(header_of(shard, None))
            weight_map |= dict.fromkeys(shard, file)
            total += sum(size_of(*tensor) for tensor in shard.values())
            on_file(number, count)
    write_index(folder / INDEX, weight_map, total)
