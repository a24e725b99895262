"""Folders of safetensors files: headers read with distrust, tensors by ranged reads, files written as a stream.

A model is one file, or several and `model.safetensors.index.json`, which says where each tensor lies.
"""

import contextlib
import json
import os
import posixpath
import struct
from collections.abc import Buffer, Callable, Generator, Mapping
from typing import Any

import fsspec
import numpy as np

from k3jax.errors import UserError, disk_errors
from k3jax.safetensors_header import (
    MAX_HEADER,
    TensorInfo,
    dtype_of,
    header_of,
    name_of,
    parse_header,
    parse_json,
)

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_JSON = 500_000_000  # bytes; the index of the release has 60 million


class SafetensorsFolder:
    """The headers of a model's safetensors files, and its config.json; tensors are read on demand.

    Args:
        path: a folder, local or any URL that fsspec can read.
        payload: whether the files must hold the tensors' bytes; without, they may end after the header.
        on_file: told (headers read, files in all) after each header.

    Attributes:
        config: parsed config.json.
        tensors: name -> place, file by file in the order of their bytes.
        files: the safetensors files by name, sorted.
        metadata: file -> its `__metadata__` (empty if it has none).
        others: further files of the folder (tokenizer, licence); empty where a server lists none.
        total_bytes: of all tensors.

    Raises: UserError that names file and value, for anything that is not a whole, consistent model.
    """

    def __init__(
        self,
        path: str,
        *,
        payload: bool = True,
        on_file: Callable[[int, int], None] | None = None,
    ):
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
        for number, file in enumerate(self.files, start=1):
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
            if on_file is not None:
                on_file(number, len(self.files))
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
        data = self._range(name, 0, self._size(name))
        with _whole(os.fspath(local_path)) as write:
            write(data)

    # -- files

    def _open(self, path: str) -> None:
        try:
            self.fs, self.root = fsspec.core.url_to_fs(path)
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"{path} cannot be opened: {error}") from error
        kinds = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        self._local, self._listed = "file" in kinds, not kinds & {"http", "https"}
        self._paths: dict[str, str] = {}
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
        """Files of the folder; None where there is no listing (HTTP): then the index alone says."""
        if not self._listed:
            return None
        with self._source(""):
            found = self.fs.ls(self.root, detail=True)
        return {posixpath.basename(f["name"]) for f in found if f["type"] != "directory"}

    def _url(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    def _inside(self, name: str) -> str:
        """The file system's path of a name; a local link may not lead out of the folder."""
        if name in self._paths:
            return self._paths[name]
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
        self._paths[name] = path
        return path

    @contextlib.contextmanager
    def _source(self, name: str) -> Generator[None]:
        """Failures of the file system inside the block are the source's, in one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if self._local and not isinstance(error, OSError):
                raise  # a defect; remote file systems have exceptions of their own
            absent = isinstance(error, FileNotFoundError)
            why = "is absent" if absent else f"is unreadable ({error})"
            raise UserError(
                f"{self._url(name)} {why}: fetch it, or name the folder of a checkpoint"
            ) from error

    def _size(self, name: str) -> int:
        with self._source(name):
            size = self.fs.size(self._inside(name))
        if size is None:
            raise UserError(f"{self._url(name)}: the server does not tell its size; download it")
        return size

    def _range(self, name: str, begin: int, end: int) -> bytes:
        with self._source(name):
            data = self.fs.cat_file(self._inside(name), begin, end) if end > begin else b""
        if len(data) != end - begin:
            raise UserError(
                f"{self._url(name)} gave {len(data)} bytes at {begin} of {end - begin}: fetch it again"
            )
        return data

    def _json(self, name: str) -> dict[str, Any]:
        size = self._size(name)
        if size > MAX_JSON:
            raise UserError(f"{self._url(name)} has {size:,} bytes, more than {MAX_JSON:,}")
        return parse_json(self._range(name, 0, size), self._url(name))

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
        try:
            for file in set(map(str, weight_map.values())):
                check_file_name(file)
        except ValueError as error:
            raise UserError(f"{where} names {error}") from error
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
        metadata, found, position = parse_header(self._range(file, 8, 8 + length), where, file)
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


def check_file_name(file: str) -> None:
    """Raises ValueError for a name of a safetensors file that leads out of its folder, or is of no such file."""
    if any(c in file for c in "/\\:\0") or file in (".", ".."):
        raise ValueError(f"{file!r}, outside the folder: use names of its files")
    if not file.endswith(SUFFIX):
        raise ValueError(f"{file!r}, which is no safetensors file")


def _shards(names: Any) -> set[str]:
    return {n for n in names if n.endswith(SUFFIX)}


# -- writing


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
            if name_of(array.dtype) != dtype or array.shape != tuple(shape):
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
