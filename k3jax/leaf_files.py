"""The arrays of a checkpoint's state piece by piece, by tensorstore: no model is too large for the host.

A leaf is one zarr array. What is written here lies in files of its own, one per chunk and each whole or
absent; what training saved lies in orbax's database (OCDBT). Both are read alike, and by orbax.
"""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from k3jax import checkpoint, hosts
from k3jax.run_dir import write_whole

CHUNK = checkpoint.CHUNK
CACHE = 256 * 2**20  # bytes of decoded chunks kept while reading: neighbours share them


def chunk_shape(
    shape: tuple[int, ...], itemsize: int, *, stacked: int, split: int | None = None
) -> tuple[int, ...]:
    """Chunks of a leaf: one entry of a stacked axis each; of experts, as many as `CHUNK` holds.

    Args:
        shape: of the leaf.
        itemsize: bytes of an element.
        stacked: number of leading axes that count repetitions (1) and experts (2).
        split: the axis to cut where a single matrix is larger than a chunk; the longest if None.

    Returns: a shape that divides the experts evenly.
    """
    inner = list(shape[stacked:])

    def size() -> int:
        return math.prod(inner) * itemsize

    if stacked == 2:
        together = max(1, CHUNK // max(1, size()))
        experts = max(n for n in range(1, shape[1] + 1) if shape[1] % n == 0 and n <= together)
        lead = (1, experts)
    else:
        lead = (1,) * stacked
    axis = None if split is None else split - stacked
    while size() > CHUNK:
        longest = int(np.argmax(inner))
        cut = longest if axis is None or inner[axis] == 1 else axis
        inner[cut] = -(-inner[cut] // 2)
    return (*lead, *inner)


def create(state: Path, leaf: str, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]):
    """A leaf to be written with `[...].write(array).result()`; opened if it is there already.

    Args:
        state: the state's folder.
        leaf: its name, "params/norm/weight".
        shape: of the whole array.
        dtype: of the array.
        chunks: from `chunk_shape`; a write that covers whole chunks replaces their files at once.

    Raises: ValueError with the system's error number, or where an array of another kind is there.
    """
    metadata = {
        "shape": shape,
        "chunks": chunks,
        "dtype": _zarr_dtype(np.dtype(dtype)),
        "compressor": None,  # weights hardly shrink
    }
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{state / leaf.replace('/', '.')}/"},
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, open=True, create=True).result()


def _zarr_dtype(dtype: np.dtype) -> str:
    return "bfloat16" if dtype.name == "bfloat16" else dtype.str


def write_frame(work: Path, folder: Path, leaves: list[str], meta: dict[str, Any]) -> None:
    """What orbax expects of a checkpoint beside its arrays, made by orbax from arrays of one byte.

    Args:
        work: folder for it, made anew.
        folder: the checkpoint, with the arrays in `state`.
        leaves: names of the arrays.
        meta: the meta part.
    """
    shutil.rmtree(work, ignore_errors=True)
    tree = checkpoint.nested({leaf: np.zeros(1, np.uint8) for leaf in leaves})
    alone = ocp.options.MultiprocessingOptions(
        primary_host=hosts.index(),
        active_processes={hosts.index()},
        barrier_sync_key_prefix="frame",
    )
    handlers = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone),
        meta=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
    )
    with ocp.Checkpointer(handlers, multiprocessing_options=alone) as writer:
        state, described = ocp.args.PyTreeSave(tree), ocp.args.JsonSave(meta)
        writer.save(work.absolute(), args=ocp.args.Composite(state=state, meta=described))
    (folder / "data").mkdir(exist_ok=True)
    write_whole(folder / "data/process_0-of-1.json", b"{}\n")
    (folder / "meta").mkdir(exist_ok=True)
    for part in ("_CHECKPOINT_METADATA", "state/_METADATA", "meta/metadata"):
        write_whole(folder / part, (work / part).read_bytes())
    for inner in (folder / "state", folder / "meta", folder / "data", folder):
        sync(inner)


def sync(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class LeafFiles:
    """Reads parts of the leaves of one checkpoint's state.

    Args:
        state: the state's folder.
    """

    def __init__(self, state: Path):
        self.state = state.absolute()
        self.database = (state / "manifest.ocdbt").exists()
        self.context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE}})
        self.arrays: dict[str, Any] = {}

    def __getitem__(self, leaf: str):
        """The array of a leaf; nothing is read but its description."""
        if leaf not in self.arrays:
            name, base = f"{leaf.replace('/', '.')}/", {"driver": "file", "path": f"{self.state}/"}
            store = {"driver": "ocdbt", "base": base, "path": name}
            plain = {"driver": "file", "path": f"{self.state / name}/"}
            spec = {"driver": "zarr", "kvstore": store if self.database else plain}
            self.arrays[leaf] = ts.open(spec, open=True, read=True, context=self.context).result()
        return self.arrays[leaf]

    def read(self, leaf: str, index: tuple[int, ...]) -> np.ndarray:
        """leaf[index]: what lies at this place of the leading axes."""
        return self[leaf][index].read().result()
