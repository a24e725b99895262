"""One data file as a random-access list of documents, for each supported suffix.

Opening a file checks what a whole run depends on (UTF-8 of plain text, the column of a table);
a single bad record shows when it is read. Either raises `Unreadable` with the reason.
"""

import codecs
import collections
import json
import threading
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from k3jax.data.tokenizer import utf8

FIELD = "text"  # JSON field and table column that hold a document
SCAN_BYTES = 16 * 1024 * 1024
TABLE_CACHE_BYTES = 256 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class Unreadable(ValueError):
    """A file or record without usable text, and why; the caller skips it or stops."""


class Document(NamedTuple):
    """UTF-8 text, and whether a document begins and ends with it (pieces of a long one do not)."""

    data: bytes
    first: bool = True
    last: bool = True


@runtime_checkable
class Reader(Protocol):
    """Documents of one file by index; None for an empty one. Safe to call from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document | None: ...


class PlainText:
    """A text file is one document, read in pieces cut after a line end if it is long.

    Piece i starts after the first line end that follows byte `i * piece_bytes` (at the first byte
    of a character when there is none near), so any piece is found without an index. The last piece
    has up to twice the size. Line ends and NUL bytes stay; a byte order mark is dropped.
    """

    def __init__(self, path: Path, piece_bytes: int):
        self._path = path
        self._piece_bytes = piece_bytes
        self._size = _check_utf8(path)
        self._pieces = max(1, self._size // piece_bytes) if self._size else 0

    def __len__(self) -> int:
        return self._pieces

    def __getitem__(self, index: int) -> Document | None:
        with self._path.open("rb") as file:
            start, stop = self._cut(file, index), self._cut(file, index + 1)
            file.seek(start)
            data = file.read(stop - start)
        _require_utf8(data, f"at bytes {start}..{stop}")
        data = data.removeprefix(_BOM) if start == 0 else data
        return Document(data, index == 0, index + 1 == self._pieces) if data else None

    def _cut(self, file, index: int) -> int:
        if index in (0, self._pieces):
            return self._size if index else 0
        at = index * self._piece_bytes
        file.seek(at)
        window = file.read(min(4096, self._piece_bytes // 2))
        newline = window.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        return at + next((i for i, byte in enumerate(window) if byte & 0xC0 != 0x80), 0)


def _check_utf8(path: Path) -> int:
    """Size of the file, all of which is UTF-8; reads it once (about 1 s per GB)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    with path.open("rb") as file:
        try:
            while chunk := file.read(SCAN_BYTES):
                decoder.decode(chunk)
                size += len(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise Unreadable(f"not UTF-8 near byte {size + error.start}") from None
    return 0 if size == len(_BOM) and path.read_bytes() == _BOM else size


def _require_utf8(data: bytes, where: str) -> None:
    try:
        data.decode()
    except UnicodeDecodeError:
        raise Unreadable(f"not UTF-8 {where}") from None


class JsonLines:
    """One JSON object with a string field "text" per line; blank lines are no documents.

    The offsets of all lines are found once (about 1 s per GB) and take 16 bytes each.
    """

    def __init__(self, path: Path):
        self._path = path
        self._starts, self._ends = _lines(path)
        _require_one(self)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Document | None:
        start = int(self._starts[index])
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(int(self._ends[index]) - start)
        line = line.removeprefix(_BOM) if start == 0 else line
        if not line.strip():
            return None
        return _json_document(line, f"in the line at byte {start}")


def _lines(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the first byte and of the line end of every line that is not empty."""
    found, size = [], 0
    with path.open("rb") as file:
        while chunk := file.read(SCAN_BYTES):
            found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size)
            size += len(chunk)
    ends = np.concatenate([*found, [size]]).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    keep = ends > starts
    return starts[keep], ends[keep]


def _json_document(data: bytes, where: str) -> Document | None:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise Unreadable(f"no JSON {where}") from None
    return _field(record, where)


def _field(record: object, where: str) -> Document | None:
    text = record.get(FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise Unreadable(f'no string field "{FIELD}" {where}')
    return Document(utf8(text)) if text else None


class _TableCache:
    """Text columns of the row groups used last, up to a number of bytes over all files."""

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._columns: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, group: int):
        import pyarrow.parquet as pq

        key = (path, group)
        with self._lock:  # also keeps two threads from decoding the same group twice
            if key in self._columns:
                self._columns.move_to_end(key)
                return self._columns[key]
            table = pq.ParquetFile(path).read_row_group(group, columns=[FIELD])
            self._columns[key] = column = table.column(FIELD)
            self._used += column.nbytes
            while self._used > self._limit and len(self._columns) > 1:
                self._used -= self._columns.popitem(last=False)[1].nbytes
            return column


_table_cache = _TableCache(TABLE_CACHE_BYTES)


class Parquet:
    """The string column "text"; null rows are no documents.

    Reading a row decodes its row group, which stays in a cache: quick while the row groups in use
    fit into TABLE_CACHE_BYTES. Convert larger sets to array_record, or write small row groups.
    """

    def __init__(self, path: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise Unreadable(f"no parquet file ({str(error).splitlines()[0]})") from None
        schema = file.schema_arrow
        kind = schema.field(FIELD).type if FIELD in schema.names else None
        if kind is not None and pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
            raise Unreadable(f'no string column "{FIELD}" among {columns or "no columns"}')
        groups = range(file.metadata.num_row_groups)
        self._ends = np.cumsum(
            [file.metadata.row_group(g).num_rows for g in groups], dtype=np.int64
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Document | None:
        import pyarrow as pa

        group = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[group - 1]) if group else 0
        try:
            text = _table_cache.get(self._path, group)[index - start].as_py()
        except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
            raise Unreadable(f"damaged row {index} ({str(error).splitlines()[0]})") from None
        return Document(utf8(text)) if text else None


class ArrayRecord:
    """Records of UTF-8 text, or of a JSON object with a string field "text"."""

    def __init__(self, path: Path):
        import grain

        try:
            self._records = grain.sources.ArrayRecordDataSource([str(path)])
        except RuntimeError as error:
            raise Unreadable(f"no array_record file ({error or 'cut short'})") from None
        _require_one(self)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Document | None:
        try:
            data = self._records[index]
        except RuntimeError as error:
            raise Unreadable(f"damaged record {index} ({error})") from None
        if data.startswith(b"{"):
            try:
                return _field(json.loads(data), f"in record {index}")
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                pass  # text that merely begins with a brace
        _require_utf8(data, f"in record {index}")
        return Document(data) if data else None


def _require_one(reader: Reader) -> None:
    """Raises the first reason if none of the first hundred records is usable (a wrong format)."""
    reason = None
    for index in range(min(len(reader), 100)):
        try:
            if reader[index] is not None:
                return
        except Unreadable as error:
            reason = reason or error
    if reason is not None:
        raise reason


_PLAIN = (".txt", ".md", ".py")
_TABLES = {".jsonl": JsonLines, ".parquet": Parquet, ".array_record": ArrayRecord}
SUFFIXES = (*_PLAIN, *_TABLES)


def open_reader(path: Path, piece_bytes: int) -> Reader:
    """The documents of a file whose suffix is in SUFFIXES; plain text in pieces of that size."""
    suffix = path.suffix.lower()
    return PlainText(path, piece_bytes) if suffix in _PLAIN else _TABLES[suffix](path)
