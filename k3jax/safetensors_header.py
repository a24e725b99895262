"""The header of a safetensors file: bytes to entries, each read with distrust, and back.

A file is 8 bytes with the header's length, the header (a JSON object: tensor -> dtype, shape,
data_offsets), then the tensors' bytes without gaps, little endian. Nothing in a file is executed, and
no size that a file claims is allocated before it is compared with the file's own.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.errors import UserError

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_NAME = 1000  # characters
MAX_RANK = 32

_DTYPES = {
    "BOOL": np.dtype("bool"),
    **{f"{k}{8 * n}": np.dtype(f"<{k.lower()}{n}") for n in (1, 2, 4, 8) for k in "UI"},
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> np.dtype:
    """NumPy's dtype for a safetensors dtype such as "BF16"."""
    return _DTYPES[name]


def name_of(dtype: np.dtype) -> str:
    """The safetensors name of a dtype; the inverse of `dtype_of`."""
    return _NAMES[np.dtype(dtype)]


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * _DTYPES[dtype].itemsize


class TensorInfo(NamedTuple):
    """Where a tensor lies: bytes [begin, end) of `file`, counted from the file's start."""

    dtype: str  # safetensors name: F32, BF16, F16, U8 ...
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object, in which no name comes twice and no number is NaN or infinite."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise UserError(f"{where} has {twice!r} twice")
        return values

    def constant(word: str) -> None:
        raise UserError(f"{where} has the number {word}, which is no JSON")

    try:
        parsed = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=constant)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{where} is no JSON object but {str(parsed)[:40]!r}")
    return parsed


def parse_header(
    data: bytes, where: str, file: str
) -> tuple[dict[str, str], dict[str, TensorInfo], int]:
    """The header's metadata, its tensors in the order of their bytes, and the file size they add up to.

    Args:
        data: the header, without the 8 bytes before it.
        where: what messages call the file.
        file: its name.

    Raises: UserError for entries that are malformed, of unknown dtype, or do not follow each other.
    """
    header = parse_json(data, f"header of {where}")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise UserError(f"header of {where}: __metadata__ must map strings to strings")
    start = position = 8 + len(data)
    infos = _infos(header, where, file, start)
    found = dict(sorted(infos, key=lambda item: (item[1].begin, item[1].end)))
    for name, info in found.items():
        if info.begin != position:
            what = "overlaps the tensor before it" if info.begin < position else "leaves a gap"
            raise UserError(
                f"{where}: {name!r} begins at {info.begin - start}, not at {position - start}: it {what}"
            )
        position = info.end
    return metadata, found, position


def _infos(
    header: Mapping[str, Any], where: str, file: str, start: int
) -> Iterator[tuple[str, TensorInfo]]:
    """The entries of a header, each checked by itself."""
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple for equal shapes
    for name, entry in header.items():
        if len(name) > MAX_NAME:
            raise UserError(f"{where}: {name[:80]!r}... is a name of {len(name):,} characters")
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise UserError(
                f"{where}: {name!r} needs dtype, shape and two data_offsets, not {str(entry)[:80]}"
            ) from None
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise UserError(
                f"{where}: {name!r} has dtype {dtype!r}; known are {', '.join(_DTYPES)}"
            )
        if not _sizes(shape) or len(shape) > MAX_RANK:
            raise UserError(f"{where}: {name!r} has shape {str(shape)[:80]}: not a list of sizes")
        if not _sizes([begin, end]) or begin > end:
            raise UserError(f"{where}: {name!r} has data_offsets {str([begin, end])[:80]}")
        if size_of(dtype, shape) != end - begin:
            raise UserError(
                f"{where}: {name!r} has {end - begin} bytes, which is not {dtype} of shape {shape}"
            )
        shape = tuple(shape)
        yield (
            name,
            TensorInfo(dtype, shapes.setdefault(shape, shape), file, start + begin, start + end),
        )


def _sizes(values: Any) -> bool:
    return type(values) is list and all(type(v) is int and 0 <= v < 2**63 for v in values)


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """Length and header of a file with these tensors (name -> dtype, shape), in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # as the safetensors library aligns the first tensor
    return struct.pack("<Q", len(text)) + text
