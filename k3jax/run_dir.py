"""The folder of one run: its files, its configuration, and the lock that keeps a second run out.

config.json · metrics.jsonl · loss.png · tensorboard/ · checkpoints/<step>/
"""

import contextlib
import dataclasses
import fcntl
import importlib
import json
import logging
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from k3jax import checkpoint
from k3jax.configs.experiment import ExperimentConfig
from k3jax.errors import UserError, disk_errors

# What a resumed run may have otherwise than the run before: it changes neither the model nor the
# order of the data (whose content the data position checks), nor more than rounding.
MAY_CHANGE = {
    "steps",  # upwards only, see `RunDir.check`
    "data",
    "tokenizer",
    "run_dir",
    "init_from",  # read before the first step only
    "checkpoint_every",
    "keep_last",
    "keep_every",
    "eval_every",
    "eval_batches",
    "log_every",
    "strict",
    "platform",
    "accumulation",
    "mesh",
    "model.remat",
    "model.kda.backend",
    "model.kda.chunk_size",
    "optim.max_skipped_steps",
}
log = logging.getLogger("k3jax")

CLASS = "class"  # key that names a dataclass where it is not the annotated one


class RunDir:
    """Paths of a run and what an earlier start left there; creates nothing until `create`."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        if "://" in str(path):
            raise UserError(f"run folder {str(path)!r} is no local path: mount it, or choose one")
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.plot_file = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self._lock_file = self.path / ".lock"
        self._lock: Any = None

    def open(self) -> None:
        """Takes the lock if an earlier start left its file: the folder must not change now."""
        if self._lock_file.exists():
            self.lock()

    def lock(self) -> None:
        """Makes the folder and takes its lock."""
        with disk_errors(f"run folder {self.path} cannot be used"):
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._take_lock()

    def latest_step(self) -> int | None:
        return checkpoint.latest_step(self.checkpoints)

    def saved_config(self) -> dict[str, Any] | None:
        """Configuration of the newest checkpoint, else of the last start, else None."""
        step = self.latest_step()
        if step is not None:
            return checkpoint.read_meta(self.checkpoints / str(step))["config"]
        if not self.config_file.exists():
            return None
        with disk_errors(f"{self.config_file} not readable"):
            text = self.config_file.read_text()
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.config_file} is not JSON ({error}): delete it, or choose another --run-dir"
            ) from error

    def check(self, cfg: ExperimentConfig) -> None:
        """Raises UserError if the run that lives here differs from `cfg` where it matters."""
        saved = self.saved_config()
        if saved is None:
            return
        old, new = _flat(saved), _flat(to_json(cfg))
        names = [*old, *(name for name in new if name not in old)]
        differ = [
            f"{name}={old.get(name)!r} (now {new.get(name)!r})"
            for name in names
            if old.get(name) != new.get(name) and not _may_change(name)
        ]
        if differ:
            more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
            raise UserError(
                f"run folder {self.path} belongs to a run with {', '.join(differ[:4])}{more}: "
                "give the same values, or choose another --run-dir"
            )
        last = self.latest_step() or 0
        if last < cfg.steps < saved["steps"]:
            raise UserError(
                f"run folder {self.path} belongs to a run with steps={saved['steps']} (now "
                f"{cfg.steps}), which its learning rates follow: --steps may only grow"
            )

    def create(self, cfg: ExperimentConfig) -> None:
        """Makes the folder, takes its lock if `open` did not, and writes config.json."""
        self.lock()
        with disk_errors(f"run folder {self.path} cannot be used"):
            text = json.dumps(to_json(cfg), indent=2)
            write_whole(self.config_file, text.encode())

    def _take_lock(self) -> None:
        """A lock of the operating system: it goes with the process, however that ends."""
        lock = self._lock_file.open("a+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise UserError(
                f"run folder {self.path} is in use by process {holder}: wait for it, stop it, or "
                "choose another --run-dir"
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning(
                "run folder %s cannot be locked (%s): start no second run", self.path, error
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Trained(NamedTuple):
    """A model as a run left it: what sampling and evaluation need."""

    cfg: ExperimentConfig
    step: int
    params: dict[str, Any]
    buffers: dict[str, Any]


def load_config(path: str | Path, *, step: int | None = None) -> ExperimentConfig:
    """The configuration of a run or model folder, as its checkpoint has it.

    Args:
        path: the folder. A tokenizer that lies in it is found wherever the folder is moved.
        step: of the checkpoint; the newest if omitted.

    Raises: UserError if there is no such folder or checkpoint, or it cannot be read.
    """
    run = RunDir(path)
    if not os.path.isdir(run.path):  # unlike Path.is_dir, also for too long a name
        raise UserError(f"run folder {str(path)!r} is no folder; train first, or name another")
    meta = checkpoint.read_meta(checkpoint.checkpoint_folder(run.checkpoints, step))
    cfg = from_json(ExperimentConfig, meta["config"])
    beside = run.path.absolute() / cfg.tokenizer
    return dataclasses.replace(cfg, tokenizer=str(beside)) if beside.is_file() else cfg


def load_trained(path: str | Path, *, step: int | None = None, mesh: Mesh | None = None) -> Trained:
    """The model of a run folder; optimizer state and data position are not read.

    Args:
        path: run folder.
        step: of the checkpoint; the newest if omitted.
        mesh: devices that share the model, each process reading what its own hold; one device if
            omitted.

    Raises: UserError if there is no such folder or checkpoint, or it cannot be read; ValueError for
        a mesh over which the model does not divide.
    """
    from k3jax.train_state import abstract_weights

    run, cfg = RunDir(path), load_config(path, step=step)
    target = abstract_weights(cfg.model, mesh)
    found = checkpoint.restore(run.checkpoints, target, step=step, parts=tuple(target))
    return Trained(cfg, found.step, **found.state)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that readers see the old content or the new, never a part, whatever stops."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the name: else a power cut may leave the name alone
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def to_json(cfg: Any) -> Any:
    """A configuration as JSON-ready values; a subclass of the annotated dataclass is named."""
    if not dataclasses.is_dataclass(cfg):
        return [to_json(item) for item in cfg] if isinstance(cfg, tuple | list) else cfg
    hints = typing.get_type_hints(type(cfg))
    values = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        values[field.name] = to_json(value)
        if dataclasses.is_dataclass(value) and type(value) not in _options(hints[field.name]):
            values[field.name][CLASS] = f"{type(value).__module__}:{type(value).__qualname__}"
    return values


def from_json(kind: Any, value: Any, name: str = "") -> Any:
    """The inverse of `to_json` for a value of the annotated type `kind`.

    Raises: UserError naming the field if this version of k3jax knows other fields.
    """
    if isinstance(value, list):
        return tuple(from_json(None, item) for item in value)
    classes = [option for option in _options(kind) if dataclasses.is_dataclass(option)]
    if not classes or not isinstance(value, dict):
        return value
    (cls,) = classes
    if CLASS in value:
        cls = _named_class(value[CLASS], cls, name)
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls)}
    given = set(value) - {CLASS}
    if given != fields:
        where = ", ".join(sorted(f"{name}.{field}".lstrip(".") for field in given ^ fields))
        raise UserError(f"the run was made by another version of k3jax: fields differ: {where}")
    parts = {f: from_json(hints[f], value[f], f"{name}.{f}".lstrip(".")) for f in fields}
    try:
        return cls(**parts)
    except ValueError as error:
        raise UserError(f"the saved configuration is not valid here: {error}") from error


def _named_class(text: Any, base: type, name: str) -> type:
    """The class "module:qualname", below `base`; importing is running, so only what k3jax has is imported."""
    module, _, qualname = str(text).partition(":")
    if module not in sys.modules and module.startswith("k3jax."):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    if module not in sys.modules:
        raise UserError(
            f"{name} was a {text}, whose module is not loaded: a program of yours that imports it can use "
            "this folder"
        )
    found = getattr(sys.modules[module], qualname, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{name} was a {text}, which is no {base.__name__} here")
    return found


def _options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of `A | None`; of anything else, itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat


def _may_change(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in MAY_CHANGE for i in range(len(parts)))
