"""`k3jax import`: a checkpoint in the official layout becomes a model folder, as a stream.

The work is cut into pieces of a few tensors, each one chunk (or a few) of one leaf. A journal says which
are finished, so a start after a kill at any moment goes on and ends with the same files; processes on one
file system share the pieces. The checkpoint appears, by one rename, when all are there.

    DST/importing/source.json     what is being imported; journal.<process>.jsonl: finished pieces
    DST/checkpoints/0.importing/  the checkpoint that grows
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec
from rich.console import Console

from k3jax import checkpoint, hosts, leaf_files, official_folder
from k3jax.configs.experiment import ExperimentConfig
from k3jax.display import Transfer
from k3jax.errors import UserError, disk_errors
from k3jax.import_plan import Experts, Piece, Plan, make_piece, make_plan, size_of, tensor_names
from k3jax.official_folder import TOKENIZERS, Manifest
from k3jax.run_dir import RunDir, write_whole
from k3jax.safetensors_files import INDEX, SafetensorsFolder
from k3jax.sharding.mesh import MeshConfig, make_mesh
from k3jax.sharding.rules import logical_axes, partition_spec
from k3jax.train_state import abstract_model, merge

STEP = 0  # of the checkpoint
WORKERS = min(16, max(2, os.cpu_count() or 1))  # pieces in work at once
ROUND = 64  # pieces between two entries in the journal

log = logging.getLogger("k3jax")


class Finished(NamedTuple):
    """A line of the journal."""

    key: str
    word_sum: int
    kept: list[str]  # weights whose 4-bit pair encoding again would not reproduce


@dataclass(frozen=True, kw_only=True)
class ImportArgs:
    # How routed experts in 4 bits are kept: as they are, or decoded (for training); None: as they are
    experts: Experts | None = None
    # How later commands spread the model, and how several processes share the import
    mesh: MeshConfig = field(default_factory=MeshConfig)
    platform: str | None = None  # cpu, cuda or tpu: insist on it; None: what JAX finds


def import_model(source: str, target: str, asked: ImportArgs) -> int:
    """Imports a model; continues what an earlier call with the same source began.

    Args:
        source: folder of safetensors files, local or any URL that fsspec reads.
        target: the model folder, new or begun before.
        asked: how.

    Returns: exit code 0.
    Raises: UserError, one line, for a source that does not pass the audit, a folder of something
        else, a disk that refuses; what is finished stays for the next call.
    Memory: about four times a piece, that is `leaf_files.CHUNK` or one larger matrix, per worker.
    """
    folder = SafetensorsFolder(source)
    plan = make_plan(folder, asked.experts)
    hosts.same("the model", plan.digest)
    run = RunDir(target)
    try:
        return _Import(plan, run, asked.mesh).run()
    finally:
        run.close()


class _Import:
    """One call on this process."""

    def __init__(self, plan: Plan, run: RunDir, mesh: MeshConfig):
        self.plan, self.run_dir, self.mesh = plan, run, mesh
        self.work = run.path / "importing"
        self.grown = run.checkpoints / f"{STEP}.importing"
        self.arrays: dict[str, Any] = {}
        self.name = run.path.resolve().name

    def run(self) -> int:
        first = hosts.index() == 0
        with disk_errors(f"{self.run_dir.path} not written"):
            complete = bool(self._agreed(self._start if first else self._complete))
            if not complete:
                self._write_pieces()
                hosts.together(self._commit if first else lambda: None)
            if first:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self.work)
                state = "was imported before: nothing to do" if complete else "imported"
                print(f"{self.plan.source.path}: {state}; model folder {self.run_dir.path}")
                if not any((self.run_dir.path / name).is_file() for name in TOKENIZERS):
                    print(
                        f"no {' or '.join(TOKENIZERS)} came with it: give --tokenizer FILE to "
                        "generate, eval and train"
                    )
        return 0

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """Process 0 first, then the others: they read what it writes."""
        if hosts.index() == 0:
            return hosts.together(work)
        hosts.together(lambda: None)
        return work()

    # -- start

    def _complete(self) -> bool:
        return (self.run_dir.checkpoints / str(STEP)).exists()

    def _start(self) -> bool:
        """Makes the folder, or checks what an earlier start left; returns whether all is done."""
        path, source = self.run_dir.path, self.plan.source.path
        begun = self.work / "source.json"
        if self._complete():
            manifest = official_folder.read_manifest(path)
            if manifest is None or manifest.source != self.plan.digest:
                raise UserError(f"{path} holds another model: choose another folder for {source}")
            return True
        if begun.exists():
            if official_folder.read_begun(begun) != self.plan.digest:
                raise UserError(
                    f"{path} holds an unfinished import of another source or with other --experts: "
                    "give the same, or choose another folder"
                )
        elif foreign := _foreign(path, self.work):
            raise UserError(f"{path} is not empty (it has {foreign}): choose another folder")
        self.run_dir.lock()
        self.work.mkdir(parents=True, exist_ok=True)
        write_whole(begun, json.dumps({"digest": self.plan.digest, "source": source}).encode())
        (self.grown / "state").mkdir(parents=True, exist_ok=True)
        official = path / official_folder.FOLDER
        official.mkdir(exist_ok=True)
        tokenizer = official_folder.copy_small_files(self.plan.source, official)
        for name in () if tokenizer is None else (tokenizer, "tokenizer_config.json"):
            if (official / name).is_file():
                write_whole(path / name, (official / name).read_bytes())
        self.run_dir.create(self._config(tokenizer))
        return False

    def _config(self, tokenizer: str | None) -> ExperimentConfig:
        """The model with settings for its training, which flags change."""
        return ExperimentConfig(
            name=self.name,
            model=self.plan.model,
            mesh=self.mesh,
            tokenizer=tokenizer or "bytes",  # beside config.json, see `run_dir.load_config`
            steps=1000,
            batch_size=8,
            seq_len=4096,
            checkpoint_every=100,
            eval_every=100,
        )

    # -- pieces

    def _write_pieces(self) -> None:
        journal = self.work / f"journal.{hosts.index()}.jsonl"
        done = read_journal(self.work)
        owned = [[] for _ in range(hosts.count())]  # everybody knows how many rounds there are
        for piece, owner in zip(self.plan.pieces, self._owners(), strict=True):
            if piece.key not in done:
                owned[owner].append(piece)
        mine = owned[hosts.index()]
        sizes = {piece.key: size_of(self.plan.source, piece) for piece in self.plan.pieces}
        total = sum(sizes.values())
        missing = sum(sizes[piece.key] for pieces in owned for piece in pieces)
        own = sum(sizes[piece.key] for piece in mine)
        console = None if hosts.index() == 0 else Console(quiet=True)
        hosts.together(lambda: None)  # all have read the journals before one grows
        with (
            Transfer(
                "import",
                total=own + (total - missing) if hosts.count() == 1 else own,
                done=total - missing if hosts.count() == 1 else 0,
                console=console,
            ) as shown,
            journal.open("ab") as out,
        ):
            out.write(b"\n")  # ends a line that a kill cut
            for start in range(0, max(map(len, owned)), ROUND):
                part = mine[start : start + ROUND]
                hosts.together(lambda part=part: self._round(part, out, shown, sizes))

    def _round(self, pieces: list[Piece], out: Any, shown: Transfer, sizes: dict[str, int]) -> None:
        """Writes some pieces, then, once they are on the disk, their lines in the journal."""

        def one(piece: Piece) -> Finished:
            finished = self._write(piece)
            shown.add(sizes[piece.key])
            return finished

        pool = ThreadPoolExecutor(WORKERS)
        try:
            finished = list(pool.map(one, pieces))
        finally:
            pool.shutdown(cancel_futures=True)
        out.writelines(json.dumps(line).encode() + b"\n" for line in finished)
        out.flush()
        os.fsync(out.fileno())

    def _write(self, piece: Piece) -> Finished:
        leaf = self.plan.leaves[piece.leaf]
        made, kept = make_piece(self.plan, piece)
        if piece.leaf not in self.arrays:
            self.arrays[piece.leaf] = leaf_files.create(
                self.grown / "state",
                piece.leaf,
                leaf.shape,
                leaf.dtype,
                self.plan.chunks[piece.leaf],
            )
        self.arrays[piece.leaf][piece.index].write(
            made, can_reference_source_data_indefinitely=True
        ).result()
        return Finished(piece.key, checkpoint.word_sum(made), kept)

    def _owners(self) -> list[int]:
        """The process that makes each piece: one whose devices will hold it, in turns if several do."""
        if hosts.count() == 1:
            return [0] * len(self.plan.pieces)
        mesh = make_mesh(self.mesh)
        axes = logical_axes(merge(*abstract_model(self.plan.model)))
        holders = {}
        for leaf, abstract in self.plan.leaves.items():
            names = axes.get(leaf.partition("/")[2])
            spec = partition_spec(names, abstract.shape, mesh.shape) if names else PartitionSpec()
            holders[leaf] = _holders(mesh, spec, abstract.shape)
        owners = []
        for number, piece in enumerate(self.plan.pieces):
            begin = piece.placed[0].index
            having = sorted(
                {
                    process
                    for process, index in holders[piece.leaf]
                    if all(lo <= b < hi for b, (lo, hi) in zip(begin, index, strict=False))
                }
            )
            owners.append(having[number % len(having)])
        return owners

    # -- end

    def _commit(self) -> None:
        """Everything beside the arrays, then the rename."""
        plan, path = self.plan, self.run_dir.path
        done = read_journal(self.work)
        if missing := [piece.key for piece in plan.pieces if piece.key not in done]:
            raise UserError(
                f"{path} lacks {len(missing)} pieces that other processes made, such as {missing[0]}: "
                "give a folder that all see"
            )
        sums: dict[str, int] = dict.fromkeys(plan.leaves, 0)
        for piece in plan.pieces:
            sums[piece.leaf] = (sums[piece.leaf] + done[piece.key].word_sum) % 2**32
        kept = [name for piece in plan.pieces for name in done[piece.key].kept]
        names = [*plan.audit.carried, *(n for k in kept for n in tensor_names(plan.source, k))]
        infos = [plan.source.tensors[name] for name in names]
        official = path / official_folder.FOLDER
        if infos:
            total = sum(info.end - info.begin for info in infos)
            with Transfer("carried", total=total) as shown:
                official_folder.write_tensors(
                    plan.source, official, plan.audit.carried, kept, shown.add
                )
        official_folder.write_manifest(official, self._manifest())
        meta = {
            "format": checkpoint.FORMAT,
            "step": STEP,
            "config": json.loads(self.run_dir.config_file.read_text()),
            "versions": checkpoint.library_versions(),
            "word_sums": sums,
        }
        leaf_files.write_frame(self.work / "frame", self.grown, list(plan.leaves), meta)
        for lock in (self.grown / "state").glob("**/*.__lock"):
            lock.unlink()  # of writes that a kill cut
        self.grown.rename(self.run_dir.checkpoints / str(STEP))
        leaf_files.sync(self.run_dir.checkpoints)

    def _manifest(self) -> Manifest:
        source, found = self.plan.source, self.plan.audit
        files: dict[str, list[str]] = {file: [] for file in source.files}
        for name, info in source.tensors.items():
            files[info.file].append(name)
        return Manifest(
            prefix=found.prefix,
            padded_a_log=found.padded_a_log,
            plain=found.plain,
            packed=found.cfg.moe is not None and found.cfg.moe.weights == "mxfp4",
            indexed=source.fs.exists(f"{source.root}/{INDEX}"),
            files=files,
            metadata=source.metadata,
            carried=found.carried,
            source=self.plan.digest,
        )


def read_journal(work: Path) -> dict[str, Finished]:
    """The finished pieces of all processes by key; a line that a kill cut is of none."""
    done = {}
    for file in sorted(work.glob("journal.*.jsonl")):
        for line in file.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):
                finished = Finished(*json.loads(line))
                done[finished.key] = finished
    return done


def _holders(mesh: Any, spec: Any, shape: tuple[int, ...]) -> list[tuple[int, list]]:
    """(process, range of every dimension) of each device's part of an array."""
    from jax.sharding import NamedSharding

    parts = NamedSharding(mesh, spec).devices_indices_map(shape)
    return [
        (device.process_index, [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)])
        for device, index in parts.items()
    ]


def _foreign(path: Path, work: Path) -> str | None:
    """A file in the folder that no earlier start of an import left."""
    ours = {path / ".lock", *work.glob("source.json*")}
    files = (f for f in sorted(path.rglob("*")) if not f.is_dir()) if path.is_dir() else ()
    return next((str(f.relative_to(path)) for f in files if f not in ours), None)
