"""Documents of a file, folder or glob, found once, split once, read by index.

    files → readers (formats.py) → units → train | validation

A unit is what falls on one side of the split: a whole file if there are twenty or more, otherwise a
run of consecutive documents of a file (of pieces, for plain text). Each unit has a key, a hash of
its path relative to the data and of its place in the file; keys in the lowest 5 % are held out, at
least one and at most a tenth of all units. So the split depends neither on the seed nor on where
the data lies, and with enough files each keeps its side when others are added.

Documents that must stay whole for long contexts belong into .jsonl, .parquet or .array_record.
"""

import glob
import hashlib
import logging
import os
import stat
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int, UInt64

from k3jax.data.formats import SUFFIXES, Document, Reader, Unreadable, open_reader
from k3jax.errors import UserError

HELD_OUT = 0.05  # fraction of units
MIN_FILES = 20  # from here on a file is never in both splits
PIECE_BYTES = 1024 * 1024  # longer plain text is read in pieces, to bound memory
MIN_PIECES = 4096  # of all plain text, as far as pieces of 1 KiB allow: pieces are what is shuffled
MAX_UNITS = 2**20  # documents are held out in runs, so that the index of any corpus fits 24 MiB
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_SUPPORTED = " ".join(SUFFIXES)

logger = logging.getLogger("k3jax")


class Split:
    """The documents of one side of the split, by index (a grain `RandomAccessDataSource`).

    A document that is empty or unreadable reads as None; what was unreadable is logged once per
    file and counted in `unreadable`. Documents lie in the order of their unit's key: mixed, but
    the same in every run.
    """

    def __init__(self, corpus: "Corpus", name: str, units: Int[np.ndarray, " units"]):
        self.corpus = corpus
        self.name = name
        self.unreadable: dict[str, int] = {}  # by file
        self._file, self._start = corpus.unit_file[units], corpus.unit_start[units]
        self._ends = np.cumsum(corpus.unit_size[units])
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Document | None:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        unit = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[unit - 1]) if unit else 0
        file = int(self._file[unit])
        try:
            return self.corpus.readers[file][int(self._start[unit]) + index - before]
        except Unreadable as reason:
            self._skip(self.corpus.files[file], str(reason))
        except OSError as error:
            raise UserError(
                f"data file {self.corpus.files[file]!r} of {self.corpus.name!r} cannot be read any"
                f" more ({error.strerror}); restore it and start again to resume"
            ) from error
        return None

    def _skip(self, file: str, reason: str) -> None:
        with self._lock:
            self.unreadable[file] = self.unreadable.get(file, 0) + 1
            first = self.unreadable[file] == 1
        if first:
            logger.warning("data: skipping documents of %s (%s)", file, reason)


class Corpus:
    """All usable files of one data argument.

    Attributes:
        name: the argument, for messages.
        files: paths relative to the data's folder, sorted.
        readers: one per file.
        sizes: bytes of each file.
        skipped: (path, reason) of the files that could not be used.
        fingerprint: changes with the list of files or their sizes.
        unit_file, unit_start, unit_size: the units, described at the top of this file.
    """

    def __init__(self, name: str, found: "_Found", readers: dict[str, Reader]):
        self.name = name
        self.by_file = found.many
        self.files = tuple(readers)
        self.readers = tuple(readers.values())
        self.sizes = tuple(found.files[file].stat().st_size for file in self.files)
        self.skipped = tuple(found.skipped)
        listing = repr((self.by_file, *zip(self.files, self.sizes, strict=True)))
        self.fingerprint = hashlib.blake2b(listing.encode(), digest_size=16).hexdigest()
        self._make_units()

    def _make_units(self) -> None:
        lengths = [len(reader) for reader in self.readers]
        run = -(-sum(lengths) // MAX_UNITS)
        starts = [np.arange(0, n, n if self.by_file else run, dtype=np.int64) for n in lengths]
        self.unit_file = np.repeat(np.arange(len(starts)), [len(s) for s in starts])
        self.unit_start = np.concatenate(starts)
        left = np.array(lengths)[self.unit_file] - self.unit_start
        self.unit_size = left if self.by_file else np.minimum(left, run)
        seeds = np.array([_hash64(file) for file in self.files], np.uint64)
        keys = _mix64(seeds[self.unit_file] + self.unit_start.astype(np.uint64))
        self._order = np.argsort(keys, kind="stable")
        wanted = int(np.count_nonzero(keys < np.uint64(HELD_OUT * 2.0**64)))
        self._num_held_out = min(max(wanted, 1), -(-len(keys) // 10), len(keys) - 1)

    def split(self, name: Literal["train", "validation", "all"]) -> Split:
        """One side of the split, or everything.

        Raises: UserError if the validation split is empty because the data is a single unit.
        """
        if name == "validation" and not self._num_held_out:
            raise UserError(
                f"data {self.name!r} is a single document, so none can be held out for validation;"
                " add documents, or set --eval-every 0"
            )
        cut = self._num_held_out
        units = {"train": self._order[cut:], "validation": self._order[:cut], "all": self._order}
        return Split(self, name, units[name])

    def describe(self) -> str:
        """One line: how much there is, how it is split, and what was left out."""
        held_out = self._order[: self._num_held_out]
        total, held = int(self.unit_size.sum()), int(self.unit_size[held_out].sum())
        kind = "by file" if self.by_file else "by document"
        line = (
            f"data {self.name}: {len(self.files)} files, {sum(self.sizes) / 1e6:.1f} MB,"
            f" {total} documents or pieces, {held} held out {kind}"
        )
        if self.skipped:
            path, reason = self.skipped[0]
            line += f"; skipped {len(self.skipped)} unreadable, first {path} ({reason})"
        return line


def load_corpus(data: str | None = None, *, strict: bool = False) -> Corpus:
    """Finds and opens the files of `data`; reads plain text and JSON lines through once.

    Args:
        data: a file, a folder (searched recursively, without hidden names) or a glob of .txt .md
            .py .jsonl .parquet .array_record; None for the running Python's standard library,
            without its tests.
        strict: an unreadable file or record is an error here instead of being skipped; reads every
            document once.

    Raises: UserError naming the path: missing, of unknown kind, empty, or nothing readable.
    Cost: about 1 s per GB of text or JSON lines; parquet and array_record only read their footers.
    """
    found = _find_library() if data is None else _find(data)
    name = "Python standard library" if data is None else data
    readers: dict[str, Reader] = {}
    empty = 0
    for file, path in found.files.items():
        try:
            readers[file] = reader = open_reader(path, found.piece_bytes)
            if strict:
                for index in range(len(reader)):
                    reader[index]
        except (Unreadable, OSError) as error:
            readers.pop(file, None)
            found.skip(file, error)
            continue
        if not len(reader):
            empty += 1
            del readers[file]
    if strict and found.skipped:
        file, reason = found.skipped[0]
        raise UserError(
            f"data file {file!r} of {name!r} is unreadable: {reason}; repair it, or drop --strict"
            " to skip it"
        )
    if not readers:
        _raise_nothing(name, found, empty)
    for file, reason in found.skipped[:10]:
        logger.warning("data: skipping %s (%s)", file, reason)
    return Corpus(name, found, readers)


class _Found:
    """Files with a known suffix, by path relative to the data's folder; other files are counted."""

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[str, Path] = {}
        self.skipped: list[tuple[str, str]] = []
        self.others = 0
        self._seen: set[tuple[int, int]] = set()  # device and inode

    @property
    def many(self) -> bool:
        """Whether files, not documents, are the units of the split."""
        return len(self.files) >= MIN_FILES

    @property
    def piece_bytes(self) -> int:
        """Size of pieces of plain text. Rows follow each other in the order of the pieces, so small
        data in large pieces would make whole batches, one after the other, of a single file.
        """
        total = sum(path.stat().st_size for path in self.files.values())
        return min(max(total // MIN_PIECES, 1024), PIECE_BYTES)

    def add(self, path: Path) -> None:
        file = Path(os.path.relpath(path, self.root)).as_posix()
        if path.suffix.lower() not in SUFFIXES:
            self.others += 1
            return
        try:
            info = path.stat()
        except OSError as error:
            return self.skip(file, error)
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            self.skipped.append((file, "not a regular file"))
        elif self._is_new(info):
            self.files[file] = path

    def walk(self, folder: Path, leave_out: frozenset[str] = frozenset()) -> None:
        """Adds everything below `folder`, following links; each folder once, for links can loop."""

        def unlistable(error: OSError) -> None:
            self.skip(os.path.relpath(error.filename, self.root), error)

        for here, folders, files in os.walk(folder, followlinks=True, onerror=unlistable):
            if not self._is_new(os.stat(here)):
                folders.clear()
                continue
            folders[:] = sorted(f for f in folders if f[0] != "." and f not in leave_out)
            for file in sorted(files):
                if file[0] != ".":
                    self.add(Path(here, file))

    def _is_new(self, info: os.stat_result) -> bool:
        """Whether this file or folder was not met before, under another name."""
        inode = (info.st_dev, info.st_ino)
        new = inode not in self._seen or not info.st_ino
        self._seen.add(inode)
        return new

    def skip(self, file: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.skipped.append((file, reason))


def _find(data: str) -> _Found:
    if not data.strip():
        raise UserError(f"data {data!r} is no path; give a file, folder or glob of {_SUPPORTED}")
    path = Path(data).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, also answers for a name that is too long
        found = _Found(path)
        found.walk(path)
    elif os.path.exists(path):
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(
                f"data {data!r} has suffix {path.suffix!r}; supported are {_SUPPORTED}: rename or"
                " convert it"
            )
        found = _Found(path.parent)
        found.add(path)
    else:
        matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(data) else []
        if not matches:
            raise UserError(
                f"data {data!r} {'matches no file' if glob.has_magic(data) else 'does not exist'};"
                f" give --data a file, folder or glob of {_SUPPORTED}"
            )
        fixed = path
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        found = _Found(fixed)
        for match in map(Path, matches):
            found.walk(match) if match.is_dir() else found.add(match)
    found.files = dict(sorted(found.files.items()))
    return found


def _find_library() -> _Found:
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = _Found(folder)
    found.walk(folder, _NOT_LIBRARY)
    found.files = {f: p for f, p in sorted(found.files.items()) if p.suffix == ".py"}
    if not found.files:
        raise UserError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} has no library sources in"
            f" {str(folder)!r}; give --data a file, folder or glob of {_SUPPORTED}"
        )
    return found


def _raise_nothing(name: str, found: _Found, empty: int) -> None:
    if found.skipped:
        file, reason = found.skipped[0]
        raise UserError(
            f"data {name!r} has no readable file: {len(found.skipped)} skipped, first {file!r}"
            f" ({reason}); convert it to UTF-8 text or repair it"
        )
    if empty:
        raise UserError(f"data {name!r} is empty: {empty} files, no document; add text")
    raise UserError(
        f"data {name!r} has no file of a supported kind ({found.others} others); supported are"
        f" {_SUPPORTED}"
    )


def _hash64(file: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(file), digest_size=8).digest(), "little")


def _mix64(x: UInt64[np.ndarray, " units"]) -> UInt64[np.ndarray, " units"]:
    """Splitmix64: neighbouring integers to independent-looking ones."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
