"""Folders of safetensors files: headers read with distrust, tensors by ranged reads, files written as a stream.

A file is 8 bytes with the header's length, the header (a JSON object: tensor -> dtype, shape,
data_offsets), then the tensors' bytes without gaps, little endian. A model is one such file, or
several and `model.safetensors.index.json`, which says where each tensor lies. Nothing in a file is
executed, and no size that a file claims is allocated before it is compared with the file's own.
"""

import contextlib
import json
import math
import os
import posixpath
import struct
from collections.abc import Buffer, Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import fsspec
import ml_dtypes
import numpy as np

from k3jax.errors import UserError, disk_errors

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
MAX_JSON = 500_000_000  # bytes; the index of the release has 60 million
MAX_RANK = 32

_DTYPES = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
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


class TensorInfo(NamedTuple):
    """Where a tensor lies: bytes [begin, end) of `file`, counted from the file's start."""

    dtype: str  # safetensors name: F32, BF16, F16, U8 ...
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


class SafetensorsFolder:
    """The headers of a model's safetensors files, and its config.json; tensors are read on demand.

    Args:
        path: a folder, local or any URL that fsspec can read.
        payload: whether the files must hold the tensors' bytes; without, they may end after the header.

    Attributes:
        config: parsed config.json.
        tensors: name -> place, file by file in the order of their bytes.
        files: the safetensors files by name, sorted.
        metadata: file -> its `__metadata__` (empty if it has none).
        others: further files of the folder (tokenizer, licence); empty where a server lists none.
        total_bytes: of all tensors.

    Raises: UserError that names file and value, for anything that is not a whole, consistent model.
    """

    def __init__(self, path: str, *, payload: bool = True):
        self.path = path
        self._open(path)
        listing = self._list()
        self.others = sorted(n for n in listing or () if not n.endswith(SUFFIX) and n != INDEX)
        self.config = self._json(CONFIG)
        weight_map, total_size = self._index(listing)
        self.files = sorted(set(weight_map.values())) if weight_map else [self._only_file(listing)]
        if weight_map and (surplus := sorted(_shards(listing or ()) - set(self.files))):
            raise UserError(
                f"{self._url(surplus[0])} is not in {INDEX}: remove it, or add its tensors there"
            )
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        for file in self.files:
            if weight_map and listing is not None and file not in listing:
                raise UserError(f"{self._url(file)} is named in {INDEX} but absent: fetch it")
            self.metadata[file], found = self._header(file, payload)
            for name, info in found.items():
                if name in self.tensors:
                    raise UserError(
                        f"{name!r} is both in {self._url(self.tensors[name].file)} and in {file}: "
                        "a tensor lies in one file"
                    )
                self.tensors[name] = info
        if not self.tensors:
            raise UserError(f"{path} holds no tensors in {', '.join(self.files)}")
        self.total_bytes = sum(info.end - info.begin for info in self.tensors.values())
        if weight_map:
            self._check_index(weight_map, total_size)

    def read(self, name: str) -> np.ndarray:
        """The tensor, by one ranged read; a read-only array."""
        info = self.tensors[name]
        data = self.read_bytes(name, 0, info.end - info.begin)
        return np.frombuffer(data, dtype_of(info.dtype)).reshape(info.shape)

    def read_bytes(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a tensor, counted from its first."""
        info = self.tensors[name]
        if not 0 <= begin <= end <= info.end - info.begin:
            raise ValueError(f"bytes {begin}:{end} of {name!r}, which has {info.end - info.begin}")
        return self._range(info.file, info.begin + begin, info.begin + end)

    def copy_small(self, name: str, local_path: str | os.PathLike) -> None:
        """Copies another file of the folder, such as the tokenizer."""
        local = os.fspath(local_path)
        with disk_errors(f"{self._url(name)} not copied"):
            self.fs.get_file(self._inside(name), local + ".part")
            os.replace(local + ".part", local)

    # -- files

    def _open(self, path: str) -> None:
        try:
            self.fs, self.root = fsspec.core.url_to_fs(path)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"{path} cannot be opened: {error}") from error
        self._local = "file" in _protocols(self.fs)
        if not self._local:
            return
        if not os.path.exists(self.root):
            raise UserError(f"{path} does not exist: give the folder of a model")
        if not os.path.isdir(self.root):
            if path.endswith(PICKLES):
                raise UserError(f"{path} is a pickle, which may run code: give a safetensors model")
            raise UserError(f"{path} is a file: give the folder that holds it and {CONFIG}")
        self.root = os.path.realpath(self.root)

    def _list(self) -> set[str] | None:
        """Names in the folder; None where there is no listing (HTTP): then the index alone says."""
        if {"http", "https"} & _protocols(self.fs):
            return None
        try:
            return {posixpath.basename(p.rstrip("/")) for p in self.fs.ls(self.root, detail=False)}
        except OSError as error:
            raise UserError(f"{self.path} cannot be listed: {error}") from error

    def _url(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def _inside(self, name: str) -> str:
        """The file system's path of a name; a local link may not lead out of the folder."""
        path = f"{self.root.rstrip('/')}/{name}"
        if self._local:
            # The cache of huggingface_hub links its snapshots to <repository>/blobs.
            above, parent = os.path.split(os.path.dirname(self.root))
            roots = [self.root] + ([os.path.join(above, "blobs")] if parent == "snapshots" else [])
            real = os.path.realpath(path)
            if not any(os.path.commonpath([real, root]) == root for root in roots):
                raise UserError(
                    f"{self._url(name)} is a link to {real}, outside the folder: copy it"
                )
        return path

    def _size(self, name: str) -> int:
        try:
            size = self.fs.size(self._inside(name))
        except OSError as error:
            why = (
                "is absent" if isinstance(error, FileNotFoundError) else f"is unreadable ({error})"
            )
            raise UserError(f"{self._url(name)} {why}: fetch it") from error
        if size is None:
            raise UserError(f"{self._url(name)}: the server does not tell its size; download it")
        return size

    def _range(self, name: str, begin: int, end: int) -> bytes:
        try:
            data = self.fs.cat_file(self._inside(name), begin, end) if end > begin else b""
        except OSError as error:
            raise UserError(f"{self._url(name)} is unreadable: {error}") from error
        if len(data) != end - begin:
            raise UserError(
                f"{self._url(name)} gave {len(data)} bytes at {begin} of {end - begin}: fetch it again"
            )
        return data

    def _json(self, name: str) -> dict[str, Any]:
        size = self._size(name)
        if size > MAX_JSON:
            raise UserError(f"{self._url(name)} has {size:,} bytes, more than {MAX_JSON:,}")
        return _parse(self._range(name, 0, size), self._url(name))

    # -- index and headers

    def _index(self, listing: set[str] | None) -> tuple[dict[str, str], int]:
        """(tensor -> file, total_size) of the index; ({}, 0) if there is none."""
        if INDEX not in listing if listing is not None else not self.fs.exists(self._inside(INDEX)):
            return {}, 0
        where, index = self._url(INDEX), self._json(INDEX)
        weight_map, metadata = index.get("weight_map"), index.get("metadata")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{where} has no weight_map, which names the file of each tensor")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, float) and total.is_integer():
            total = int(total)
        if type(total) is not int or total < 0:
            raise UserError(f"{where}: metadata.total_size is {total!r}, not a number of bytes")
        for file in set(map(str, weight_map.values())):
            if any(c in file for c in "/\\:\0") or file in (".", ".."):
                raise UserError(
                    f"{where} names {file!r}, outside the folder: use names of its files"
                )
            if not file.endswith(SUFFIX):
                raise UserError(f"{where} names {file!r}, which is no safetensors file")
        return weight_map, total

    def _only_file(self, listing: set[str] | None) -> str:
        shards = sorted(_shards(listing or {"model" + SUFFIX}))
        if len(shards) == 1:
            return shards[0]
        if shards:
            raise UserError(
                f"{self.path} has {len(shards)} safetensors files but no {INDEX}: add it"
            )
        if pickles := sorted(n for n in listing or () if n.endswith(PICKLES)):
            raise UserError(
                f"{self._url(pickles[0])} is a pickle, which may run code: convert to safetensors"
            )
        raise UserError(f"{self.path} has no *{SUFFIX} file: give the folder of a model")

    def _header(self, file: str, payload: bool) -> tuple[dict[str, str], dict[str, TensorInfo]]:
        where, size = self._url(file), self._size(file)
        if size < 8:
            raise UserError(f"{where} has {size} bytes: truncated, fetch it again")
        (length,) = struct.unpack("<Q", self._range(file, 0, 8))
        if length > min(MAX_HEADER, size - 8):
            raise UserError(
                f"{where} claims a header of {length:,} bytes; the file has {size:,} and the limit "
                f"is {MAX_HEADER:,}: truncated, or no safetensors file"
            )
        header = _parse(self._range(file, 8, 8 + length), f"header of {where}")
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
            raise UserError(f"header of {where}: __metadata__ must map strings to strings")
        found = dict(sorted(_infos(header, where, file, 8 + length), key=lambda item: item[1][3:]))
        position = 8 + length
        for name, info in found.items():
            if info.begin != position:
                what = "overlaps the tensor before it" if info.begin < position else "leaves a gap"
                raise UserError(
                    f"{where}: {name!r} begins at {info.begin - 8 - length}, not at "
                    f"{position - 8 - length}: it {what}"
                )
            position = info.end
        if payload and position != size:
            what = "truncated, fetch it again" if position > size else "surplus bytes at its end"
            raise UserError(
                f"{where} has {size:,} bytes, its header describes {position:,}: {what}"
            )
        return metadata, found

    def _check_index(self, weight_map: dict[str, str], total_size: int) -> None:
        where = self._url(INDEX)
        for name, file in weight_map.items():
            info = self.tensors.get(name)
            if info is None:
                raise UserError(f"{where} places {name!r} in {file}, which lacks it")
            if info.file != file:
                raise UserError(f"{where} places {name!r} in {file}; it lies in {info.file}")
        if surplus := next((n for n in self.tensors if n not in weight_map), None):
            raise UserError(f"{self.tensors[surplus].file} has {surplus!r}, which {where} lacks")
        if self.total_bytes != total_size:
            raise UserError(
                f"{where}: total_size is {total_size:,}, the tensors have {self.total_bytes:,} bytes"
            )


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _shards(names: Any) -> set[str]:
    return {n for n in names if n.endswith(SUFFIX)}


def _parse(data: bytes, where: str) -> dict[str, Any]:
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


def _infos(
    header: Mapping[str, Any], where: str, file: str, start: int
) -> Iterator[tuple[str, TensorInfo]]:
    """The entries of a header, each checked by itself."""
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple for equal shapes
    for name, entry in header.items():
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
        if math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
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


# -- writing


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """Length and header of a file with these tensors (name -> dtype, shape), in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * _DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # as the safetensors library aligns the first tensor
    return struct.pack("<Q", len(text)) + text


def write_file(
    path: str | os.PathLike,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Writes a safetensors file as a stream, and whole or not at all: to `path`.part, renamed at the end.

    Args:
        path: of the local file.
        tensors: name -> (safetensors dtype, shape), in the order of the file.
        arrays: gives a tensor when its turn comes; one is held at a time.
        metadata: the file's `__metadata__`.
        on_bytes: told the bytes of each tensor once they are written.

    Raises: UserError if the disk refuses; ValueError if an array is not what `tensors` says.
    """
    with _whole(os.fspath(path)) as write:
        write(header_of(tensors, metadata))
        for name, (dtype, shape) in tensors.items():
            array = arrays(name)
            if array.dtype != dtype_of(dtype) or array.shape != tuple(shape):
                raise ValueError(f"{name!r} is {array.dtype} {array.shape}, not {dtype} {shape}")
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            write(data)
            if on_bytes is not None:
                on_bytes(len(data))


def write_index(path: str | os.PathLike, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes `model.safetensors.index.json` (tensor -> file, bytes of all tensors) to `path`."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    with _whole(os.fspath(path)) as write:
        write((json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())


@contextlib.contextmanager
def _whole(path: str) -> Generator[Callable[[Buffer], None]]:
    """Gives a function that appends to `path`.part, which gets its name, durably, if all went well."""
    part = path + ".part"
    with disk_errors(
        f"{path} not written"
    ):  # not around the yield: there errors are not the disk's
        out = open(part, "wb")  # noqa: SIM115

    def write(data: Buffer) -> None:
        with disk_errors(f"{path} not written"):
            out.write(data)

    try:
        yield write
        with disk_errors(f"{path} not written"):
            out.flush()
            os.fsync(out.fileno())
            out.close()
            os.replace(part, path)
            folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):  # of the same disk: the first error is the one to tell
            out.close()
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
