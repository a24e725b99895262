"""Checkpoints: one committed folder per step holds everything that is needed to continue.

    DIR/<step>/state   every array of the training state (orbax; any mesh can read it)
    DIR/<step>/data    position in the data: one JSON file per process, each with streams of its own
    DIR/<step>/meta    format, step, full configuration, library versions, word sums (JSON)

Writing is asynchronous: orbax copies the arrays to the host before `save` returns (the next step
may donate them), writes `<step>.orbax-checkpoint-tmp…` in the background and renames it, which is
the commit. Old checkpoints are deleted only after that. A folder that lacks a part was never committed;
readers pass over it. Any number of processes, on any mesh, reads what any other wrote. The word sums
find arrays that changed on disk, which the file format alone does not.
"""

import contextlib
import functools
import importlib.metadata
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from grain.checkpoint import CheckpointSave
from jax.experimental import multihost_utils

from k3jax import hosts
from k3jax.errors import UserError, disk_errors

FORMAT = 2  # raised when a reader of the previous format would misread the files
CHUNK = 32 * 2**20  # bytes of an array that lie together, and are read together, at most
UNFINISHED = ".orbax-checkpoint-tmp"
PARTS = ("_CHECKPOINT_METADATA", "state/_METADATA", "data", "meta/metadata")
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

log = logging.getLogger("k3jax")
_warned: set[Path] = set()


class Restored(NamedTuple):
    """One checkpoint: the state in the target's structure, data position, configuration."""

    step: int
    state: Any
    data: list[dict[str, Any]]  # what each process saved of the position
    config: dict[str, Any]


def steps(directory: Path) -> tuple[list[int], list[Path]]:
    """Steps with a complete checkpoint, ascending, and the step folders that lack a part."""
    complete, incomplete = [], []
    for folder in sorted(directory.glob("[0-9]*")) if directory.is_dir() else []:
        if folder.name.isdecimal():
            whole = all((folder / part).exists() for part in PARTS)
            (complete if whole else incomplete).append(folder)
    return sorted(int(folder.name) for folder in complete), incomplete


def latest_step(directory: Path) -> int | None:
    """Newest complete checkpoint, or None; a warning names each incomplete folder passed over."""
    complete, incomplete = steps(directory)
    for folder in incomplete:
        if folder not in _warned:
            _warned.add(folder)
            log.warning("checkpoint %s is incomplete (its save never finished): skipped", folder)
    return complete[-1] if complete else None


class CheckpointWriter:
    """Saves in the background, keeps the newest `keep_last` and every multiple of `keep_every`.

    Failures of the background write (disk full, folder gone) raise `UserError` from the next
    `check`, `save` or `close`, whichever comes first. Use as a context manager.
    """

    def __init__(self, directory: Path, *, keep_last: int, keep_every: int | None = None):
        _quiet_abandoned_io()
        self.directory = directory.absolute()
        self.last_step = latest_step(self.directory)
        hosts.together(self._clean)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            keep_period=keep_every,
            # else a folder that cannot be made leaves `save` waiting ten minutes for its signal
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        with _saving(self.directory):
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def _clean(self) -> None:
        if hosts.index() == 0:
            _remove_unfinished(self.directory)
            for folder in steps(self.directory)[1]:  # training needs its name when it gets there
                folder.rename(_free_name(folder))

    def save(
        self, step: int, state: Any, data: grain.DatasetIterator, config: dict[str, Any]
    ) -> None:
        """Starts saving `state` as it is now; returns once its arrays may be donated.

        Args:
            step: number of updates `state` has seen; a step is saved at most once.
            state: pytree of arrays, PRNG keys included.
            data: the iterator whose next batch is the one of step + 1.
            config: JSON-ready configuration of the run.

        Cost: one copy of this process's arrays to the host, and one more read for the word sums.
        """
        leaves = _named(state)
        meta = {
            "format": FORMAT,
            "step": step,
            "config": config,
            "versions": library_versions(),
            "word_sums": _word_sums(leaves),
        }
        cut = nested({name: _cut(name, leaf) for name, leaf in leaves.items()})
        with _saving(self.directory):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(nested(leaves), save_args=cut),
                    data=CheckpointSave(data),
                    meta=ocp.args.JsonSave(meta),
                ),
                force=True,
            )
        self.last_step = step

    def check(self) -> None:
        """Raises if a background save has failed; costs nothing otherwise. Call it every step."""
        with _saving(self.directory):
            if not self._manager.is_saving_in_progress():
                self._manager.wait_until_finished()  # check_for_errors misses the commit thread

    def wait(self) -> None:
        """Blocks until the save in progress is committed; raises if it failed."""
        with _saving(self.directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then stops the background threads."""
        with _saving(self.directory):
            self._manager.close()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, hosts.LostHost):
            return  # a save in progress waits for all
        try:
            self.close()
        except UserError as failure:
            if error is None:
                raise
            log.error("%s", failure)  # the error on its way out is the first cause


def restore(
    directory: Path,
    target: Any,
    *,
    step: int | None = None,
    parts: tuple[str, ...] | None = None,
    partial: bool = False,
) -> Restored:
    """Reads one checkpoint into the structure, dtypes and shardings of `target`.

    Args:
        directory: the folder of all checkpoints.
        target: pytree of `jax.ShapeDtypeStruct` (with shardings, to restore onto a mesh: the mesh
            that saved does not matter) or of arrays.
        step: which one; the newest complete one if omitted.
        parts: the entries of the state that `target` has and that are read; all if omitted.
        partial: take the leaves that fit, keep `target`'s own arrays for the rest and log their
            names. Otherwise any difference of names, shapes or dtypes is an error.

    Raises: UserError if there is none, if it is damaged, or if it does not fit (names both ways).
    """
    path = checkpoint_folder(directory, step)
    meta = read_meta(path)
    wanted = _named(target)
    saved = _saved_leaves(path)
    if parts is not None:
        saved = {name: leaf for name, leaf in saved.items() if name.split("/")[0] in parts}
    fitting, complaints = _compare(saved, wanted)
    if complaints and not partial:
        raise UserError(
            f"checkpoint {path} does not fit this model: {'; '.join(complaints)}. "
            "Use the configuration it was saved with (its meta/metadata file) or another folder"
        )
    if complaints:
        log.warning("partial restore of %s, left as they were: %s", path, "; ".join(complaints))
        absent = [n for n in wanted if n not in fitting and not isinstance(wanted[n], jax.Array)]
        if absent:
            raise UserError(f"partial restore of {path} has no values for {_some(absent)}")
    item = nested({name: _abstract(wanted[name]) for name in fitting})
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=partial or parts is not None,
    )
    arrays = _read_arrays(path, arguments, meta)
    state = jax.tree.unflatten(jax.tree.structure(target), (wanted | arrays).values())
    return Restored(meta["step"], state, _read_data(path), meta["config"])


def restore_numpy(directory: Path, *, step: int | None = None) -> dict[str, Any]:
    """All arrays of one checkpoint as nested dicts of NumPy arrays: needs no mesh and no model."""
    path = checkpoint_folder(directory, step)
    meta = read_meta(path)
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in _saved_leaves(path)}
    arguments = ocp.args.PyTreeRestore(restore_args=nested(as_numpy))
    return nested(_read_arrays(path, arguments, meta))


def read_meta(path: Path) -> dict[str, Any]:
    """The meta part of the checkpoint folder `path`: format, step, config, versions, word sums."""
    with damage(path):
        meta = json.loads((path / "meta/metadata").read_text())
        written = meta["format"]
    if written != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {written}, this k3jax reads format {FORMAT}: "
            f"use the k3jax that wrote it"
        )
    return meta


def library_versions() -> dict[str, str]:
    """Versions of the libraries that shape the numbers, for the record in each checkpoint."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def checkpoint_folder(directory: Path, step: int | None = None) -> Path:
    """The folder of the newest complete checkpoint, or of the given step; UserError if absent."""
    complete, _ = steps(directory)
    newest = latest_step(directory) if step is None else step
    if newest is None or newest not in complete:
        which = "" if step is None else f" of step {step}"
        have = f"it has {complete}" if complete else "train first, or name another folder"
        raise UserError(f"no complete checkpoint{which} in {directory}: {have}")
    return directory.absolute() / str(newest)


def _saved_leaves(path: Path) -> dict[str, Any]:
    handler = ocp.PyTreeCheckpointHandler()
    return _named(_read(path, lambda: handler.metadata(epath.Path(path / "state")).tree))


def _read_arrays(path: Path, arguments: Any, meta: dict[str, Any]) -> dict[str, Any]:
    handler = ocp.PyTreeCheckpointHandler()
    read = functools.partial(handler.restore, epath.Path(path / "state"), args=arguments)
    leaves = _named(hosts.together(lambda: _read(path, read)))
    sums = _word_sums(leaves)
    changed = [name for name in sums if sums[name] != meta["word_sums"].get(name)]
    if changed:
        raise damaged(path, f"not what was saved: {_some(changed)}")
    return leaves


def _read(path: Path, function: Callable[[], Any]) -> Any:
    """Calls orbax; UserError if the files are damaged."""
    _quiet_abandoned_io()
    try:
        return function()
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise damaged(path, reason) from error


@functools.cache
def _quiet_abandoned_io() -> None:
    """Keeps what orbax's other reads and writes say, once one has failed, off the terminal.

    They are dropped with their event loop: each then complains, from a thread or when it is collected,
    that the loop is closed, that nobody asked for its error, or of the error itself (orbax-checkpoint
    0.12.8). The failure is raised where it belongs.
    """
    uncaught, unraisable = sys.excepthook, sys.unraisablehook

    def loop_is_closed(error: object) -> bool:
        return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"

    def excepthook(kind, error, trace) -> None:
        if not loop_is_closed(error):
            uncaught(kind, error, trace)

    def unraisablehook(what: Any) -> None:
        code = getattr(what.object, "cr_code", None)
        abandoned = code is not None and "orbax" in Path(code.co_filename).parts
        if not abandoned and not loop_is_closed(what.exc_value):
            unraisable(what)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    logging.getLogger("asyncio").addFilter(lambda r: "never retrieved" not in r.getMessage())
    warnings.filterwarnings("ignore", "coroutine '.*write_fragment' was never awaited")


def _read_data(path: Path) -> list[dict[str, Any]]:
    with damage(path):
        files = sorted((path / "data").glob("process_*-of-*.json"))
        wanted = int(files[0].stem.rpartition("-")[2]) if files else 1
        if len(files) != wanted:
            raise damaged(path, f"{len(files)} of {wanted} data positions are there")
        return [json.loads(file.read_text()) for file in files]


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by path, e.g. `params/norm/weight`; the same for dicts, dataclasses and tuples."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The tree of leaves by path."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _cut(name: str, leaf: Any) -> ocp.SaveArgs:
    """Chunks on the disk: large stacks are cut at layers and experts, which export reads singly."""
    stacked = 2 if "/experts/" in name else 1 if leaf.ndim > 2 else 0
    large = leaf.size * np.dtype(_stored(leaf)[1]).itemsize > CHUNK
    return ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=tuple(range(stacked if large else 0)))


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stored(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype on disk: PRNG keys are stored as their integer words."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tuple(leaf.shape), str(np.dtype(leaf.dtype))


def word_sum(array: Any) -> int:
    """Sum of an array's words modulo 2**32; those of an array's parts add up to it."""
    array = np.asarray(array)
    return int(array.view(f"u{array.dtype.itemsize}").sum(dtype=np.uint64)) % 2**32


def _word_sums(leaves: dict[str, Any]) -> dict[str, int]:
    """Sum of each array's words modulo 2**32: the same on every mesh, changed by any wrong bit."""

    sums = []
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array):
            leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
            parts = [shard.data for shard in leaf.addressable_shards if shard.replica_id == 0]
        else:
            parts = [leaf] if hosts.index() == 0 else []  # every process has it
        sums.append(sum(map(word_sum, parts)) % 2**32)
    if jax.process_count() > 1:
        by_process = multihost_utils.process_allgather(np.array(sums, np.uint32))
        sums = by_process.sum(axis=0, dtype=np.uint32).tolist()
    return dict(zip(leaves, sums, strict=True))


def _compare(saved: dict[str, Any], wanted: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names that agree in shape and dtype, and complaints about all others, both ways."""
    both = [name for name in wanted if name in saved]
    fitting = [name for name in both if _stored(saved[name]) == _stored(wanted[name])]
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    different = [
        "{} (saved {} {}, here {} {})".format(n, *_stored(saved[n]), *_stored(wanted[n]))
        for n in both
        if n not in fitting
    ]
    named = {"not in the checkpoint": missing, "not in the model": unexpected, "other": different}
    return fitting, [f"{what}: {_some(names)}" for what, names in named.items() if names]


def _some(names: list[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _remove_unfinished(directory: Path) -> None:
    for folder in directory.glob(f"*{UNFINISHED}*") if directory.is_dir() else []:
        log.warning("checkpoint %s was never finished: removed", folder)
        shutil.rmtree(folder, ignore_errors=True)


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.incomplete{i or ''}") for i in range(10_000))
    return next(name for name in names if not name.exists())


@contextlib.contextmanager
def damage(path: Path) -> Generator[None]:
    """A committed checkpoint that cannot be read: say which, and how to go on without it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _reason(error) is None:
            raise
        raise damaged(path, _reason(error)) from error


def _reason(error: Exception) -> str | None:
    """What is wrong with the files, or None if the error is of another kind.

    orbax raises a bare Exception for an unreadable chunk, tensorstore ValueError with a status.
    """
    if type(error) is not Exception and not isinstance(error, (OSError, ValueError, KeyError)):
        return None
    return f"{error.__cause__ or error}".split("\n")[0][:200]


def damaged(path: Path, reason: str | None) -> UserError:
    """The error of a checkpoint whose files are wrong."""
    complete, _ = steps(path.parent)
    older = [step for step in complete if step < int(path.name)]
    then = f"continue from step {older[-1]}" if older else "start again (it is the only one)"
    return UserError(f"checkpoint {path} is damaged ({reason}): delete that folder to {then}")


@contextlib.contextmanager
def _saving(directory: Path) -> Generator[None]:
    try:
        with disk_errors(f"checkpoint not saved in {directory}, earlier ones are intact"):
            yield
    except UserError:
        if hosts.index() == 0:  # a half-written one holds space and is of no use
            _remove_unfinished(directory)
        raise
