"""Checkpoints in the official layout for tests: the golden ones, made ones, and changes to their bytes."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from k3jax.convert_hf import all_entries
from k3jax.export_official import default_manifest
from k3jax.model import K3Config
from k3jax.official_config import config_to_official
from k3jax.pallas_kernels.mxfp4 import quantize_mxfp4
from k3jax.safetensors_files import SafetensorsFolder, dtype_of, write_file, write_index
from tests.golden_io import golden_dir, load
from tests.model_helpers import tiny_config

TYPES = {"plain": "BF16", "float32": "F32", "uint8": "U8"}


def multimodal() -> Path:
    """Two files in the release's layout: 4-bit experts, padded A_log, vision tower."""
    return golden_dir() / "multimodal/checkpoint"


def text_checkpoint(case: str, folder: Path) -> Path:
    """The weights of a golden text model, float32, as one file without an index."""
    folder.mkdir()
    save_file(load(f"{case}/weights")[1], folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(load(f"{case}/io")[0]["config"]))
    return folder


def random_checkpoint(cfg: K3Config, folder: Path, seed: int = 0) -> Path:
    """Normal weights for a model, a file per layer; `cfg.moe.weights` says whether experts are packed."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    layout = default_manifest(cfg, "text_config" in config_to_official(cfg))
    entries = all_entries(cfg, prefix=layout.prefix, padded_a_log=layout.padded_a_log)
    infos = {p.name: (TYPES[p.entry.dtype], p.entry.shape) for p in entries}
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def array(name: str) -> np.ndarray:
        dtype, shape = infos[name]
        weight, _, part = name.rpartition("_")
        if dtype == "U8":
            if weight not in pairs:
                rows, half = infos[f"{weight}_packed"][1]
                values = rng.standard_normal((rows, 2 * half), np.float32) * 0.02
                pairs.clear()
                pairs[weight] = quantize_mxfp4(values.astype(ml_dtypes.bfloat16))
            return pairs[weight][part == "scale"]
        values = rng.standard_normal(shape, np.float32) * 0.02
        if name.endswith(".A_log"):
            values[cfg.kda.num_heads :] = 0
        return values.astype(dtype_of(dtype))

    for file, names in layout.files.items():
        write_file(folder / file, {name: infos[name] for name in names}, array, {"format": "pt"})
    weight_map = {name: file for file, names in layout.files.items() for name in names}
    total = sum(
        int(np.prod(shape)) * dtype_of(dtype).itemsize
        for dtype, shape in map(infos.get, weight_map)
    )
    write_index(folder / "model.safetensors.index.json", weight_map, total)
    (folder / "config.json").write_text(json.dumps(config_to_official(cfg)))
    return folder


def trainable_config(**changes) -> K3Config:
    """A tiny K3 that holds the tokens of bytes, in the release's types."""
    return tiny_config(vocab_size=272, dtype="bfloat16", param_dtype="bfloat16", **changes)


def sized_config(*, layers: int, experts: int, latent: int, ffn: int) -> K3Config:
    """Layers of equal size that consist of experts for the most part."""
    cfg = trainable_config(num_layers=layers, pattern=("kda",), closing=(), num_dense_layers=0)
    assert cfg.moe is not None
    return replace(cfg, moe=replace(cfg.moe, num_experts=experts, latent_dim=latent, ffn_dim=ffn))


def patch(folder: Path, name: str, values: np.ndarray, at: int = 0) -> None:
    """Writes other values over a tensor's, from element `at` on."""
    info = SafetensorsFolder(str(folder)).tensors[name]
    with (folder / info.file).open("r+b") as file:
        file.seek(info.begin + at * values.itemsize)
        file.write(values.tobytes())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name; without what has a time or a process in it."""
    names = (
        p
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (".lock", "_CHECKPOINT_METADATA")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


def assert_same_files(a: Path, b: Path) -> None:
    """The same names with the same bytes."""
    left, right = contents(a), contents(b)
    assert left.keys() == right.keys()
    differ = [name for name in left if left[name] != right[name]]
    assert not differ
