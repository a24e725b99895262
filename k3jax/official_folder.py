"""What an imported model keeps of its source beside the weights, so that it can be exported as it came.

official/manifest.json   names, order and placement of the source's tensors
official/tensors/        tensors that the text model does not use, and 4-bit pairs that encoding
                         the weights again would not reproduce (`carried` and `kept`)
official/…               config.json, index and tokenizer of the source, byte by byte
"""

import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k3jax.errors import UserError, disk_errors
from k3jax.official_audit import PLAIN
from k3jax.run_dir import write_whole
from k3jax.safetensors_files import (
    CONFIG,
    INDEX,
    PICKLES,
    SafetensorsFolder,
    check_file_name,
    write_file,
    write_index,
)

FOLDER, MANIFEST, TENSORS = "official", "manifest.json", "tensors"
CARRIED, KEPT = "carried.safetensors", "kept.safetensors"
FORMAT = 1
UNFINISHED = (".part", ".tmp")  # what a kill leaves of a file that was being written
SMALL = 64 * 2**20  # bytes; larger files beside the weights stay behind
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
UNLISTED = (*TOKENIZERS, "tokenizer_config.json", "generation_config.json")  # asked of web servers

log = logging.getLogger("k3jax")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """How a folder of safetensors files is laid out."""

    prefix: str  # in front of every name of the text model
    padded_a_log: bool  # A_log as the release stores it
    plain: str  # safetensors dtype of all tensors that are neither float32 by rule nor bytes
    packed: bool  # routed experts in MXFP4
    indexed: bool  # with an index file, even if one file holds all
    files: dict[str, list[str]]  # file -> its tensors, in the order of their bytes
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)  # file -> `__metadata__`
    carried: list[str] = field(default_factory=list)  # tensors that are not the text model's
    source: str = ""  # digest of the source's headers and config
    format: int = FORMAT


def read_begun(file: Path) -> str | None:
    """The digest in the note of what was begun; None if there is none in it."""
    try:
        return json.loads(file.read_bytes())["digest"]
    except (ValueError, KeyError, TypeError):  # damaged: of nothing that can be continued
        return None


def write_manifest(official: Path, manifest: Manifest) -> None:
    """Writes the manifest, whole or not at all."""
    write_whole(official / MANIFEST, json.dumps(asdict(manifest)).encode())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a model or run folder; None if it came from no release.

    Raises: UserError if it cannot be read.
    """
    path = folder / FOLDER / MANIFEST
    if not path.exists():
        return None
    with disk_errors(f"{path} not readable"):
        text = path.read_bytes()
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise UserError(
                f"{path} has format {values['format']}, this k3jax reads {FORMAT}: import again"
            )
        manifest = Manifest(**values)
        _check_manifest(manifest)
        return manifest
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): import the model again") from error


def _check_manifest(manifest: Manifest) -> None:
    """Raises ValueError or TypeError for values that no import writes; files keep to their folder."""
    for name in ("prefix", "plain", "source"):
        if type(getattr(manifest, name)) is not str:
            raise ValueError(f"{name} is {getattr(manifest, name)!r}")
    if manifest.plain not in PLAIN:
        raise ValueError(f"plain is {manifest.plain!r}")
    lists = [manifest.carried, *manifest.files.values()]
    if any(type(x) is not list or any(type(name) is not str for name in x) for x in lists):
        raise ValueError("tensors are not listed by name")
    for file in manifest.files:
        check_file_name(file)
    for values in manifest.metadata.values():
        if any(type(value) is not str for value in values.values()):
            raise ValueError(f"metadata is {values!r}")


def copy_small_files(source: SafetensorsFolder, official: Path) -> str | None:
    """Copies what lies beside the weights; returns the name of the tokenizer's file, if there is one."""
    listed = source.others or [CONFIG]
    names = listed if source.others else [*listed, *UNLISTED]
    copied = []
    for name in [*names, INDEX]:
        path = f"{source.root}/{name}"
        if name.endswith(PICKLES) or not source.fs.isfile(path):
            continue
        if name in (MANIFEST, TENSORS) or name.endswith(UNFINISHED):
            log.warning("%s has a name that is used here: not kept for export", name)
            continue
        if name != INDEX and source.fs.size(path) > SMALL:
            log.warning("%s is larger than %d MB: not kept for export", name, SMALL // 2**20)
            continue
        source.copy_small(name, official / name)
        copied.append(name)
    return next((name for name in TOKENIZERS if name in copied), None)


def small_files(official: Path) -> Iterable[Path]:
    """The copied files."""
    return sorted(
        path
        for path in official.iterdir()
        if path.is_file() and path.name != MANIFEST and not path.name.endswith(UNFINISHED)
    )


def write_tensors(
    source: SafetensorsFolder, official: Path, carried: list[str], kept: list[str], on_bytes: Any
) -> None:
    """Writes official/tensors: the carried tensors and the 4-bit pairs of the `kept` weights."""
    folder = official / TENSORS
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [f"{name}{part}" for name in kept for part in ("_packed", "_scale")]
    weight_map, total = {}, 0
    for file, names in ((CARRIED, carried), (KEPT, pairs)):
        if not names:
            continue
        infos = {name: source.tensors[name] for name in names}
        tensors = {name: (info.dtype, info.shape) for name, info in infos.items()}
        write_file(folder / file, tensors, source.read, None, on_bytes=on_bytes)
        weight_map |= dict.fromkeys(names, file)
        total += sum(info.end - info.begin for info in infos.values())
    write_whole(folder / CONFIG, b"{}\n")
    if weight_map:
        write_index(folder / INDEX, weight_map, total)


def open_tensors(folder: Path) -> SafetensorsFolder | None:
    """The carried and kept tensors of a model or run folder."""
    tensors = folder / FOLDER / TENSORS
    return SafetensorsFolder(str(tensors)) if (tensors / INDEX).exists() else None


def pass_on(model: Path, run: Path) -> None:
    """Gives a run that starts from a model folder what it needs to be exported like it.

    The kept 4-bit pairs stay behind: training changes the weights that they stand for.
    """
    if read_manifest(model) is None:
        return
    source, target = model / FOLDER, run / FOLDER
    with disk_errors(f"{target} not written"):
        (target / TENSORS).mkdir(parents=True, exist_ok=True)
        for path in small_files(source):
            _link(path, target / path.name)
        found = open_tensors(model)
        if found is not None:
            carried = [name for name, info in found.tensors.items() if info.file == CARRIED]
            if carried:
                _link(source / TENSORS / CARRIED, target / TENSORS / CARRIED)
                total = sum(found.tensors[n].end - found.tensors[n].begin for n in carried)
                write_index(target / TENSORS / INDEX, dict.fromkeys(carried, CARRIED), total)
        write_whole(target / TENSORS / CONFIG, b"{}\n")
        write_whole(target / MANIFEST, (source / MANIFEST).read_bytes())


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system cannot."""
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:  # another disk
        shutil.copyfile(source, part)
    part.replace(target)
