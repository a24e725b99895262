"""What an import does, as the headers of the source decide it: pieces, chunks, values of one tensor.

A piece is part of a leaf that is made and written at once: one repetition of a stack, of experts a few.
"""

import hashlib
import json
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from k3jax import leaf_files
from k3jax.convert_hf import Placed, all_entries, leaf_name, leaf_shapes, to_leaf
from k3jax.errors import UserError
from k3jax.model import K3Config
from k3jax.official_audit import Audit, audit
from k3jax.pallas_kernels.mxfp4 import dequantize_mxfp4
from k3jax.pallas_kernels.mxfp4.codec import NAN_SCALE
from k3jax.safetensors_files import SafetensorsFolder
from k3jax.sharding.rules import RULES, logical_axes
from k3jax.train_state import abstract_model, merge

Experts = Literal["mxfp4", "bf16"]

LAYOUT = 1  # raised when pieces or chunks change: an import begun before cannot be continued
LARGEST = 1e3  # of a decoded weight; scales read as numbers give millions (KF-073)
SAFE_SCALE = 134  # 6 · 2^(134 - 127) is below LARGEST

_BYTE = np.arange(256)  # two codes, each a sign and three bits
_LARGE = (_BYTE & 7 >= 6) | (_BYTE >> 4 & 7 >= 6)


class Piece(NamedTuple):
    """Part of a leaf that is made and written at once: one repetition, of experts a few."""

    leaf: str
    index: tuple[Any, ...]  # where it lies in the leaf: numbers, at last perhaps a slice of experts
    placed: tuple[Placed, ...]  # its tensors, one per expert

    @property
    def key(self) -> str:
        return f"{self.leaf}@{','.join(map(str, self.placed[0].index))}"


class Plan(NamedTuple):
    """Everything about an import that the headers decide."""

    source: SafetensorsFolder
    audit: Audit
    model: K3Config
    leaves: dict[str, Any]  # leaf -> shape and dtype
    chunks: dict[str, tuple[int, ...]]
    pieces: list[Piece]
    digest: str  # of headers, config and choices


def make_plan(source: SafetensorsFolder, experts: Experts | None) -> Plan:
    """The pieces of an import, in the order in which the source's files are read.

    Raises: UserError if the audit finds something, or `experts` does not fit the source.
    """
    found = audit(source)
    model, placed = found.cfg, found.text
    packed = model.moe is not None and model.moe.weights == "mxfp4"
    if experts is not None and not packed:
        raise UserError(f"the experts of {source.path} are not in 4 bits: leave --experts out")
    if model.moe is not None and experts == "bf16":
        model = replace(model, moe=replace(model.moe, weights="plain"))
        placed = list(all_entries(model, prefix=found.prefix, padded_a_log=found.padded_a_log))
    leaves, axes = leaf_shapes(model), logical_axes(merge(*abstract_model(model)))
    chunks, groups = {}, {}
    for p in placed:
        groups.setdefault(leaf_name(p), []).append(p)
    for leaf, members in groups.items():
        shape, dtype = leaves[leaf].shape, leaves[leaf].dtype
        chunks[leaf] = leaf_files.chunk_shape(
            shape, dtype.itemsize, stacked=len(members[0].index), split=_split(leaf, axes)
        )
    pieces = [p for leaf, members in groups.items() for p in _pieces(leaf, members, chunks[leaf])]
    pieces.sort(key=lambda piece: _place(source, piece.placed[0].name))
    return Plan(source, found, model, leaves, chunks, pieces, _digest(source, experts))


def _split(leaf: str, axes: dict[str, tuple[str | None, ...]]) -> int | None:
    """The dimension of a leaf that meshes split for storage: there every host reads its chunks only."""
    names = axes.get(leaf.partition("/")[2], ())
    stored = [i for i, name in enumerate(names) if name is not None and RULES[name].storage]
    return stored[0] if stored else None


def _pieces(leaf: str, members: list[Placed], chunks: tuple[int, ...]) -> list[Piece]:
    """The pieces of one leaf."""
    if len(members[0].index) < 2:
        return [Piece(leaf, p.index, (p,)) for p in members]
    pieces, together = [], chunks[1]
    members = sorted(members, key=lambda p: p.index)
    for start in range(0, len(members), together):
        part = tuple(members[start : start + together])
        repetition, expert = part[0].index
        pieces.append(Piece(leaf, (repetition, slice(expert, expert + together)), part))
    return pieces


def tensor_names(source: SafetensorsFolder, name: str) -> list[str]:
    """The tensors of the source that make one of the model: itself, or a 4-bit pair."""
    return [name] if name in source.tensors else [f"{name}_packed", f"{name}_scale"]


def _place(source: SafetensorsFolder, name: str) -> tuple[str, int]:
    info = source.tensors[tensor_names(source, name)[0]]
    return info.file, info.begin


def size_of(source: SafetensorsFolder, piece: Piece) -> int:
    infos = [source.tensors[n] for p in piece.placed for n in tensor_names(source, p.name)]
    return sum(info.end - info.begin for info in infos)


def _digest(source: SafetensorsFolder, experts: Experts | None) -> str:
    """Of config, headers and the values of one small tensor, which tells apart two of equal shapes."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(json.dumps([LAYOUT, experts or "mxfp4", source.config], sort_keys=True).encode())
    for name, info in source.tensors.items():
        digest.update(repr((name, *info)).encode())
    norm = next(name for name in source.tensors if name.endswith("model.norm.weight"))
    digest.update(source.read(norm).tobytes())
    return digest.hexdigest()


def make_piece(plan: Plan, piece: Piece) -> tuple[np.ndarray, list[str]]:
    """The array of a piece, and the names of its weights that encoding again would not reproduce.

    Raises: UserError naming the tensor whose values are refused.
    """
    dtype, made, kept = plan.leaves[piece.leaf].dtype, None, []
    for i, placed in enumerate(piece.placed):
        tensor, same = read_tensor(plan.source, placed.name, dtype)
        try:
            value = to_leaf(placed, tensor, dtype)
        except ValueError as error:
            raise UserError(f"{plan.source.path}: {error}") from error
        kept += [] if same else [placed.name]
        if len(placed.index) < 2:
            return value, kept
        if made is None:
            made = np.empty((len(piece.placed), *value.shape), dtype)
        made[i] = value
    assert made is not None
    return made, kept


def read_tensor(source: SafetensorsFolder, name: str, dtype: Any) -> tuple[np.ndarray, bool]:
    """A tensor of the model from the source, decoded if there it is a 4-bit pair.

    Args:
        source: the folder.
        name: official name in the model.
        dtype: to decode to.

    Returns: the array, and whether encoding it again would give the same bytes.
    Raises: UserError for scales that are no numbers, and weights that cannot be weights (KF-073).
    """
    if name in source.tensors:
        array = source.read(name)
        if name.endswith("_scale") and array.size and array.max() > SAFE_SCALE:
            _check_range(source, name, source.read(name.replace("_scale", "_packed")), array)
        return array, True
    packed, scale = (source.read(n) for n in tensor_names(source, name))
    _check_range(source, f"{name}_scale", packed, scale)
    return dequantize_mxfp4(packed, scale, dtype), reproducible(packed, scale)


def reproducible(packed: np.ndarray, scale: np.ndarray) -> bool:
    """Whether `quantize_mxfp4` gives a 4-bit pair back from the weights that it stands for.

    It makes the largest code of a group 4 or 6, unless the scale would be below its least; the sign of
    a zero stays.
    """
    full = _LARGE[packed.reshape(*scale.shape, -1)].any(-1)
    return bool((full | (scale == 0)).all())


def _check_range(
    source: SafetensorsFolder, name: str, packed: np.ndarray, scale: np.ndarray
) -> None:
    if not scale.size or scale.max() <= SAFE_SCALE:
        return
    if scale.max() == NAN_SCALE:
        raise UserError(f"{source.path}: {name} has a scale of {NAN_SCALE}, which is no number")
    largest = np.abs(dequantize_mxfp4(packed, scale, np.float32)).max()
    if largest > LARGEST:
        raise UserError(
            f"{source.path}: {name} decodes to weights up to {largest:.1e}, more than "
            f"{LARGEST:.0e}: the scales are not what the format says"
        )
