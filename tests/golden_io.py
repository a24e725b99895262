"""Reads golden fixtures: numbers a correct implementation must reproduce, as data on disk.

A fixture NAME is NAME.json (kind, config, tolerances) and NAME.safetensors (the tensors). The
folder is tests/golden, or the one named by the environment variable K3JAX_GOLDEN.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Meta = dict[str, Any]


def golden_dir() -> Path:
    """The folder with the fixtures."""
    folder = Path(os.environ.get("K3JAX_GOLDEN") or Path(__file__).parent / "golden")
    if not folder.is_dir():
        raise FileNotFoundError(f"golden folder {folder} does not exist; check K3JAX_GOLDEN")
    return folder


@functools.cache
def _kinds() -> dict[str, str]:
    """Fixture name -> kind, for every JSON file in the folder that describes a fixture."""
    folder, kinds = golden_dir(), {}
    for path in sorted(folder.rglob("*.json")):
        meta = json.loads(path.read_text())
        if isinstance(meta, dict) and "kind" in meta and "tensors" in meta:
            kinds[path.relative_to(folder).with_suffix("").as_posix()] = meta["kind"]
    if not kinds:
        raise FileNotFoundError(f"golden folder {folder} holds no fixture")
    return kinds


def cases(kind: str) -> list[str]:
    """Names of all fixtures of one kind, for `pytest.mark.parametrize`.

    A foreign folder may lack a kind (its tests are then skipped); the default folder may not.
    """
    names = [name for name, found in _kinds().items() if found == kind]
    if not names and not os.environ.get("K3JAX_GOLDEN"):
        raise FileNotFoundError(f"no golden fixture of kind {kind!r} in {golden_dir()}")
    return names


@functools.lru_cache(maxsize=8)
def load(case: str) -> tuple[Meta, dict[str, np.ndarray]]:
    """(JSON, tensors) of the fixture called `case`; do not modify either."""
    path = golden_dir() / case
    meta = json.loads(path.with_name(path.name + ".json").read_text())
    return meta | {"case": case}, load_file(path.with_name(path.name + ".safetensors"))


def check(name: str, got: Any, meta: Meta) -> None:
    """Asserts that `got` reproduces the expected tensor `name` of the fixture `meta` came from.

    Exact entries must be equal; the rest obey |got - want| <= atol + rtol |want|, where NaN fails.
    """
    want, tolerance = load(meta["case"])[1][name], meta["tolerance"][name]
    got, where = np.asarray(got), f"{meta['case']}: {name}"
    assert got.shape == want.shape, f"{where}: shape {got.shape}, expected {want.shape}"
    if tolerance.get("exact"):
        np.testing.assert_array_equal(got, want, err_msg=where)
        return
    rtol, atol = tolerance["suggested"]["rtol"], tolerance["suggested"]["atol"]
    got, want = got.astype(np.float64), want.astype(np.float64)
    excess = np.abs(got - want) / (atol + rtol * np.abs(want))
    if not (excess <= 1).all():
        at = np.unravel_index(np.argmax(np.nan_to_num(excess, nan=np.inf)), got.shape)
        raise AssertionError(
            f"{where}: at {tuple(map(int, at))} got {got[at]:.8g}, expected {want[at]:.8g}, "
            f"{excess[at]:.3g} x the allowance (rtol {rtol}, atol {atol}); "
            f"{int((~(excess <= 1)).sum())} of {got.size} entries are outside"
        )
