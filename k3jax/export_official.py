"""`k3jax export`: a model in the official layout, as a stream of files, each written whole or not at all.

What was imported goes out as it came: the same files with the same bytes, where training changed nothing.
Other models get one file per layer (checkpoint format, section 1). A start after a kill keeps the files
that are finished, and the index comes last.

    DST/.k3jax-export/   what is being exported; finished.<process>.jsonl: finished files
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from k3jax import checkpoint, hosts, official_folder
from k3jax.configs.experiment import ExperimentConfig
from k3jax.convert_hf import Placed, all_entries, leaf_name, leaf_shapes
from k3jax.data.tokenizer import tokenizer_file
from k3jax.display import Transfer
from k3jax.errors import UserError, disk_errors
from k3jax.leaf_files import LeafFiles
from k3jax.model import K3Config
from k3jax.official_audit import OUTER_PREFIX
from k3jax.official_config import config_from_official, config_to_official, function_of
from k3jax.official_folder import Manifest
from k3jax.pallas_kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from k3jax.run_dir import RunDir, load_config, write_whole
from k3jax.safetensors_files import (
    CONFIG,
    INDEX,
    dtype_of,
    parse_json,
    write_file,
    write_index,
)

Made = tuple[dict[str, np.ndarray], int]  # tensors by name, word sum of the leaf's part

WORK = ".k3jax-export"
WORKERS = min(16, max(2, os.cpu_count() or 1))  # tensors made at once
ROLES = "tokenizer_config.json"  # of the tokens in tokenizer.json
TYPES = {"float32": "F32", "uint8": "U8"}  # of an entry; "plain" is the manifest's


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    step: int | None = None  # checkpoint to use; None: the newest
    platform: str | None = None  # cpu, cuda or tpu: insist on it; None: what JAX finds


def export_model(path: str, target: str, step: int | None = None) -> int:
    """Writes a model as an official checkpoint; continues what an earlier call began.

    Args:
        path: an imported model's folder, or a run's.
        target: local folder, new or begun before.
        step: of the run's checkpoint; the newest if omitted.

    Returns: exit code 0.
    Raises: UserError, one line, for a model that no official config can state, a folder of something
        else, a damaged checkpoint, a disk that refuses.
    Numerics: plain tensors are rounded to the manifest's type, bfloat16 without one; experts that came
        in 4 bits are encoded by the compressed-tensors rule unless they are still what they were.
    Memory: a few tensors per worker and `leaf_files.CACHE`.
    """
    if "://" in target:
        raise UserError(f"{target} is no local folder: export to one, and copy it there")
    run = RunDir(path)
    if not os.path.isdir(run.path):
        raise UserError(f"{path!r} is no folder: give a model folder or the folder of a run")
    folder = checkpoint.checkpoint_folder(run.checkpoints, step)
    meta = checkpoint.read_meta(folder)
    cfg = load_config(path, step=step)
    job = Export(run.path, folder, cfg, meta, Path(target).expanduser())
    hosts.same("the model", job.digest)
    lock = RunDir(job.target / WORK)
    try:
        with disk_errors(f"{target} not written"):
            job.run(lock)
    finally:
        lock.close()
    return 0


class Export:
    """One call on this process."""

    def __init__(
        self, path: Path, folder: Path, cfg: ExperimentConfig, meta: dict[str, Any], target: Path
    ):
        model = cfg.model
        self.path, self.cfg, self.meta, self.target = path, cfg, meta, target
        self.folder, self.leaves = folder, LeafFiles(folder / "state")
        self.shapes = leaf_shapes(model)
        self.official = path / official_folder.FOLDER
        manifest = official_folder.read_manifest(path)
        self.config = official_config(self.official, manifest, model)
        self.manifest = manifest or default_manifest(model, "text_config" in self.config)
        self.others = official_folder.open_tensors(path)
        self.carried = set(self.manifest.carried)
        layout = {"prefix": self.manifest.prefix, "padded_a_log": self.manifest.padded_a_log}
        self.own = {p.name: p for p in all_entries(model, **layout)}
        self.tensors = {
            p.name: (TYPES.get(p.entry.dtype, self.manifest.plain), p.entry.shape)
            for p in all_entries(_exported(model, self.manifest.packed), **layout)
        }
        if missing := set(self.tensors) ^ set(chain(*self.manifest.files.values())) - self.carried:
            raise UserError(
                f"the model of {path} is no longer the one that was imported: {min(missing)} differs"
            )
        for name in self.manifest.carried:
            if self.others is None or name not in self.others.tensors:
                raise UserError(f"{self.official} lacks {name}: import the model again")
            self.tensors[name] = self.others.tensors[name][:2]
        self.sums: dict[str, int] = {}  # of what was read for the file in work
        text = json.dumps([meta["step"], meta["config"], meta["word_sums"], self.config])
        self.digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def run(self, lock: RunDir) -> None:
        first = hosts.index() == 0
        hosts.together(lambda: self._start(lock) if first else None)
        done = read_finished(self.target / WORK)
        done = {file: sums for file, sums in done.items() if (self.target / file).exists()}
        left = [file for file in self.manifest.files if file not in done]
        mine = left[hosts.index() :: hosts.count()]
        hosts.together(lambda: None)  # all have read what is finished before it grows
        self._write_files(mine, skipped=list(done) if hosts.count() == 1 else [])
        hosts.together(self._finish if first else lambda: None)

    def _start(self, lock: RunDir) -> None:
        work = self.target / WORK
        begun = work / "source.json"
        if begun.exists():
            if official_folder.read_begun(begun) != self.digest:
                raise UserError(
                    f"{self.target} holds an unfinished export of another model: choose another folder"
                )
        elif self.target.exists():
            foreign = sorted(p for p in self.target.iterdir() if p != work)
            if foreign:
                raise UserError(
                    f"{self.target} is not empty (it has {foreign[0].name}): choose another folder"
                )
        lock.lock()
        write_whole(begun, json.dumps({"digest": self.digest}).encode())

    def _write_files(self, files: list[str], skipped: list[str]) -> None:
        size = {file: sum(map(self._size, names)) for file, names in self.manifest.files.items()}
        before = sum(size[file] for file in skipped)
        total = before + sum(size[file] for file in files)
        console = None if hosts.index() == 0 else Console(quiet=True)
        record = self.target / WORK / f"finished.{hosts.index()}.jsonl"
        most = -(-len(self.manifest.files) // hosts.count())
        with (
            Transfer("export", total=total, done=before, console=console) as shown,
            record.open("ab") as out,
        ):
            out.write(b"\n")  # ends a line that a kill cut
            for number in range(most):  # of each process as many, so that all hear of an error
                part = files[number : number + 1]
                hosts.together(lambda part=part: [self._write(file, out, shown) for file in part])

    def _size(self, name: str) -> int:
        dtype, shape = self.tensors[name]
        return int(np.prod(shape, dtype=np.int64)) * dtype_of(dtype).itemsize

    def _write(self, file: str, out: Any, shown: Transfer) -> None:
        self.sums = {}
        tensors = {name: self.tensors[name] for name in self.manifest.files[file]}
        arrays, metadata = self.tensors_of(file), self.manifest.metadata.get(file)
        with contextlib.closing(arrays):
            write_file(
                self.target / file, tensors, lambda _: next(arrays), metadata, on_bytes=shown.add
            )
        out.write(json.dumps([file, self.sums]).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())

    # -- values

    def tensors_of(self, file: str) -> Generator[np.ndarray]:
        """The tensors of a file in its order; some are made ahead, and their word sums added up."""
        coming: deque[tuple[str, Future[Made]]] = deque()
        pool = ThreadPoolExecutor(WORKERS)
        try:
            last = None
            for name in self.manifest.files[file]:
                unit = self._unit(name)
                if last is None or unit != last[0]:  # the two parts of a pair follow each other
                    last = (unit, pool.submit(self.make, unit))
                coming.append((name, last[1]))
                if len(coming) > 2 * WORKERS:
                    yield self._taken(*coming.popleft())
            while coming:
                yield self._taken(*coming.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _unit(self, name: str) -> str:
        """What a tensor is made from: itself, or the weight that x.weight_packed and _scale encode."""
        return name if name in self.own or name in self.carried else name.rpartition("_")[0]

    def _taken(self, name: str, made: "Future[Made]") -> np.ndarray:
        tensors, word_sum = made.result()
        unit = self._unit(name)
        if unit in self.own and name in (unit, f"{unit}_packed"):
            leaf = leaf_name(self.own[unit])
            self.sums[leaf] = (self.sums.get(leaf, 0) + word_sum) % 2**32
        return tensors[name]

    def make(self, unit: str) -> Made:
        """The tensor or pair of a `_unit`, and the word sum of what the checkpoint has of it."""
        if unit in self.carried:
            assert self.others is not None
            return {unit: self.others.read(unit)}, 0
        placed = self.own[unit]
        leaf = self._read(placed)
        official = placed.entry.save(leaf)
        if unit in self.tensors:
            made = {unit: official.astype(dtype_of(self.tensors[unit][0]), copy=False)}
        else:
            packed, scale = self._encoded(unit, official)
            made = {f"{unit}_packed": packed, f"{unit}_scale": scale}
        return made, checkpoint.word_sum(leaf)

    def _read(self, placed: Placed) -> np.ndarray:
        """What the checkpoint has of a tensor, in the leaf's layout."""
        leaf, shape = leaf_name(placed), self.shapes[leaf_name(placed)].shape
        with checkpoint.damage(self.folder):
            if self.leaves[leaf].shape != shape:
                raise ValueError(f"{leaf} has shape {self.leaves[leaf].shape}, expected {shape}")
            return self.leaves.read(leaf, placed.index)

    def _encoded(self, weight: str, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The 4-bit pair of a weight [out, in]: the source's if that still says the same."""
        names = (f"{weight}_packed", f"{weight}_scale")
        if self.others is not None and names[0] in self.others.tensors:
            packed, scale = map(self.others.read, names)
            same = dequantize_mxfp4(packed, scale, array.dtype)
            if same.tobytes() == np.ascontiguousarray(array).tobytes():
                return packed, scale
        try:
            return quantize_mxfp4(array)
        except ValueError as error:
            raise UserError(f"{weight} of {self.folder}: {error}") from error

    # -- end

    def _finish(self) -> None:
        """Compares what was read with what was saved, then writes the other files, the index last."""
        done = read_finished(self.target / WORK)
        totals: dict[str, int] = {}
        if missing := [file for file in self.manifest.files if file not in done]:
            raise UserError(
                f"{self.target} lacks {missing[0]}, which another process wrote: give a folder that all see"
            )
        for file in self.manifest.files:
            for leaf, word_sum in done[file].items():
                totals[leaf] = (totals.get(leaf, 0) + word_sum) % 2**32
        saved = self.meta["word_sums"]
        changed = [leaf for leaf in totals if totals[leaf] != saved.get(leaf)]
        if changed:
            raise checkpoint.damaged(self.folder, f"not what was saved: {changed[0]}")
        for name, path in self._beside().items():
            write_whole(self.target / name, path.read_bytes())
        if official_folder.read_manifest(self.path) is None or self._changed_config():
            write_whole(self.target / CONFIG, (json.dumps(self.config, indent=2) + "\n").encode())
        copied = self.official / INDEX
        if copied.exists():
            write_whole(self.target / INDEX, copied.read_bytes())
        elif self.manifest.indexed:
            weight_map = {n: file for file, names in self.manifest.files.items() for n in names}
            write_index(self.target / INDEX, weight_map, sum(map(self._size, weight_map)))
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.target / WORK)
        print(f"{self.path}: step {self.meta['step']} exported to {self.target}")

    def _changed_config(self) -> bool:
        return json.loads((self.official / CONFIG).read_bytes()) != self.config

    def _beside(self) -> dict[str, Path]:
        """Files to copy: those of the source, else the run's tokenizer, by the names they get."""
        found: dict[str, Path] = {}
        if self.official.is_dir():
            files = official_folder.small_files(self.official)
            found = {path.name: path for path in files if path.name != INDEX}
        path = tokenizer_file(self.cfg.tokenizer)
        if not path.is_file():
            return found
        own = {"tiktoken.model": path}  # the name by which an import finds it
        if path.suffix == ".json":
            roles = path.with_name(ROLES)
            own = {"tokenizer.json": path} | ({ROLES: roles} if roles.is_file() else {})
        theirs = [found[name] for name in official_folder.TOKENIZERS if name in found]
        if any(_same_bytes(other, path) for other in theirs):
            return found
        for name in (*official_folder.TOKENIZERS, ROLES):
            found.pop(name, None)
        return found | own


def _same_bytes(a: Path, b: Path) -> bool:
    return a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()


def read_finished(work: Path) -> dict[str, dict[str, int]]:
    """The finished files of all processes with the word sums of what they hold of each leaf."""
    done = {}
    for record in sorted(work.glob("finished.*.jsonl")):
        for line in record.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):  # cut by a kill
                file, sums = json.loads(line)
                done[file] = sums
    return done


def _exported(model: K3Config, packed: bool) -> K3Config:
    """The model with its experts as the files have them."""
    if model.moe is None:
        return model
    return replace(model, moe=replace(model.moe, weights="mxfp4" if packed else "plain"))


def official_config(official: Path, manifest: Manifest | None, model: K3Config) -> dict[str, Any]:
    """config.json of an export: the source's, as it was if the model still does what it says.

    Raises: UserError naming the field that no official config can state.
    """
    if manifest is None:
        return config_to_official(model)
    path = official / CONFIG
    try:
        with disk_errors(f"{path} not readable"):
            base = parse_json(path.read_bytes(), str(path))
        described = function_of(config_from_official(base))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): import the model again") from error
    target = _exported(model, manifest.packed)
    if described == function_of(model):
        return base
    dtype = {"BF16": "bfloat16", "F32": "float32"}[manifest.plain]
    return config_to_official(target, base, dtype=dtype)


def default_manifest(model: K3Config, outer: bool) -> Manifest:
    """One file per layer, then one with what lies outside them; wide types first, then by name."""
    prefix = OUTER_PREFIX if outer else ""
    packed = model.moe is not None and model.moe.weights == "mxfp4"
    groups: list[list[Placed]] = [[] for _ in range(model.num_layers + 1)]
    for placed in all_entries(model, prefix=prefix):
        inner = placed.name.removeprefix(f"{prefix}model.layers.")
        groups[int(inner.partition(".")[0]) if inner != placed.name else -1].append(placed)
    widths = {"float32": 0, "plain": 1, "uint8": 2}
    names = [
        [p.name for p in sorted(group, key=lambda p: (widths[p.entry.dtype], p.name))]
        for group in groups
    ]
    count = len(names)
    files = {
        f"model-{i:05}-of-{count:06}.safetensors": group for i, group in enumerate(names, start=1)
    }
    return Manifest(
        prefix=prefix,
        padded_a_log=outer and model.kda.num_heads < model.kda.head_dim,
        plain="BF16",
        packed=packed,
        indexed=True,
        files=files,
        metadata={file: {"format": "pt"} for file in files},
    )
