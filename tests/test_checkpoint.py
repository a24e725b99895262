"""Checkpoints on toy states: exact, strict, atomic, and loud when a disk fails."""

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import checkpoint
from k3jax.checkpoint import CheckpointWriter, restore
from k3jax.errors import UserError
from k3jax.optim.build import OptimConfig
from k3jax.sharding.mesh import MeshConfig, make_mesh
from k3jax.train_state import abstract_state, init_state
from tests.model_helpers import tiny_config


class Momentum(NamedTuple):
    mu: jax.Array
    empty: tuple = ()


def toy_state(seed: int = 0) -> dict:
    key = jax.random.key(seed)
    return {
        "step": jnp.int32(seed),
        "params": {"layer_0": {"kernel": jax.random.normal(key, (3, 4))}, "layer_1": jnp.ones(5)},
        "buffers": {"bias": jnp.arange(6, dtype=jnp.bfloat16)},
        "opt_state": (Momentum(jnp.full((3, 4), 0.5)), None),
        "key": key,
    }


def position(count: int = 0) -> grain.DatasetIterator:
    """A data iterator after `count` batches."""
    numbers = iter(grain.MapDataset.range(100).to_iter_dataset())
    for _ in range(count):
        next(numbers)
    return numbers


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def assert_equal(a, b):
    def words(x):
        prng = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if prng else x)

    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(words(x), words(y))


def write(directory: Path, *steps: int, **options) -> None:
    with CheckpointWriter(directory, **{"keep_last": 9, **options}) as writer:
        for step in steps:
            writer.save(step, toy_state(step), position(step), {"name": "toy", "steps": 9})


def test_round_trip_of_every_part(tmp_path):
    write(tmp_path, 1, 2)
    found = restore(tmp_path, abstract(toy_state()))
    assert (found.step, found.config["name"]) == (2, "toy")
    data = position()
    (saved,) = found.data
    data.set_state(saved)
    assert next(data) == 2
    assert_equal(found.state, toy_state(2))
    assert_equal(restore(tmp_path, toy_state(), step=1).state, toy_state(1))
    meta = checkpoint.read_meta(tmp_path / "2")
    assert meta["format"] == checkpoint.FORMAT
    assert meta["versions"]["jax"] == jax.__version__


def test_numpy_restore_needs_no_target(tmp_path):
    write(tmp_path, 3)
    arrays = checkpoint.restore_numpy(tmp_path)
    kernel = arrays["params"]["layer_0"]["kernel"]
    assert isinstance(kernel, np.ndarray)
    np.testing.assert_array_equal(kernel, toy_state(3)["params"]["layer_0"]["kernel"])


def test_keeps_the_newest_and_every_multiple(tmp_path):
    write(tmp_path, *range(1, 9), keep_last=2, keep_every=3)
    assert checkpoint.steps(tmp_path)[0] == [3, 6, 7, 8]


# ---- strictness


def changed(name: str):
    """A target that differs from the saved toy state in one way."""
    state = toy_state()
    params = state["params"]
    if name == "missing":
        params["layer_2"] = jnp.ones(2)
    elif name == "unexpected":
        del params["layer_1"]
    elif name == "renamed":
        params["layer_9"] = params.pop("layer_1")
    elif name == "shape":
        params["layer_1"] = jnp.ones(6)
    elif name == "dtype":
        params["layer_1"] = jnp.ones(5, jnp.bfloat16)
    return state


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", ["not in the checkpoint: params/layer_2"]),
        ("unexpected", ["not in the model: params/layer_1"]),
        ("renamed", ["not in the checkpoint: params/layer_9", "not in the model: params/layer_1"]),
        ("shape", ["params/layer_1 (saved (5,) float32, here (6,) float32)"]),
        ("dtype", ["params/layer_1 (saved (5,) float32, here (5,) bfloat16)"]),
    ],
)
def test_kf_105_a_partial_restore_is_an_error_naming_both_sides(tmp_path, name, words):
    write(tmp_path, 1)
    with pytest.raises(UserError) as error:
        restore(tmp_path, abstract(changed(name)))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing", "unexpected", "renamed", "shape", "dtype"])
def test_kf_105_a_partial_restore_on_request_says_what_it_left(tmp_path, name, caplog):
    write(tmp_path, 1)
    target = changed(name)
    kept = {"missing": "layer_2", "renamed": "layer_9"}.get(name, "layer_1")
    with caplog.at_level(logging.WARNING, "k3jax"):
        found = restore(tmp_path, target, partial=True).state
    assert f"params/{kept}" in caplog.text
    if name != "unexpected":
        assert_equal(found["params"][kept], target["params"][kept])
    assert_equal(found["params"]["layer_0"], toy_state(1)["params"]["layer_0"])
    if name != "unexpected":
        with pytest.raises(UserError, match=f"no values for params/{kept}"):
            restore(tmp_path, abstract(target), partial=True)


def test_kf_100_change_of_optimizer_is_an_error(tmp_path):
    write(tmp_path, 1)
    target = toy_state() | {"opt_state": ({"nu": jnp.ones((3, 4))},)}
    with pytest.raises(UserError, match=r"opt_state/0/nu.*opt_state/0/mu"):
        restore(tmp_path, target)


# ---- values at call time, failures


def test_kf_106_saved_values_are_those_at_call_time(tmp_path):
    """The state is donated to the next step as soon as `save` returns."""
    advance = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.arange(1 << 20, dtype=jnp.float32)
    expected = {}
    with CheckpointWriter(tmp_path, keep_last=9) as writer:
        for step in range(4):
            expected[step] = np.array(x)
            writer.save(step, {"x": x}, position(), {})
            for _ in range(3):
                x = advance(x)
    for step, value in expected.items():
        found = checkpoint.restore_numpy(tmp_path, step=step)
        np.testing.assert_array_equal(found["x"], value)


DISK_FAILURE = """
    import resource, sys, time
    from pathlib import Path
    import grain
    import numpy as np
    from k3jax.checkpoint import CheckpointWriter
    from k3jax.errors import UserError

    directory, limit = Path(sys.argv[1]), int(sys.argv[2])
    noise = np.random.default_rng(0).normal(size=300_000)  # 2.4 MB that do not compress
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    for when in sys.argv[3:]:
        writer = CheckpointWriter(directory / when, keep_last=1)
        writer.save(1, {"x": noise[:1000]}, data, {})
        writer.wait()
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        try:
            writer.save(2, {"x": noise}, data, {})
            deadline = time.time() + 60
            while when == "step" and time.time() < deadline:
                writer.check()
                time.sleep(0.01)
            if when == "save":
                writer.save(3, {"x": noise}, data, {})
            writer.close()
        except UserError as error:
            print(when, "UserError:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""


def fail_on_disk(directory: Path, limit: int, *moments: str) -> None:
    program = [sys.executable, "-c", textwrap.dedent(DISK_FAILURE), directory, limit, *moments]
    done = subprocess.run(list(map(str, program)), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(moments)
    for when, line in zip(moments, lines, strict=True):
        assert line.startswith(f"{when} UserError: checkpoint not saved in {directory}/{when}")
        assert "free some space" in line
        left = sorted(path.name for path in (directory / when).iterdir())
        assert left == ["1"], "half-written files are still there"
        x = checkpoint.restore_numpy(directory / when)["x"]
        np.testing.assert_array_equal(x, np.random.default_rng(0).normal(size=300_000)[:1000])


def test_kf_106_a_failed_save_raises_by_the_next_step_save_or_exit(tmp_path):
    """A limit on file sizes stands for a full disk: it needs no privileges."""
    fail_on_disk(tmp_path, 1_000_000, "step", "save", "exit")


def test_kf_106_disk_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        fail_on_disk(disk, 0, "step")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_kf_106_folder_that_stops_being_writable(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints", keep_last=1)
    writer.save(1, toy_state(), position(), {})
    writer.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").write_text("a file where the folder was")
    with pytest.raises(UserError, match="earlier ones are intact: Not a directory"):
        writer.save(2, toy_state(), position(), {})
    assert checkpoint.steps(tmp_path / "moved")[0] == [1]


# ---- what a kill leaves behind


def test_kf_107_incomplete_folders_are_skipped_with_a_warning(tmp_path, caplog):
    write(tmp_path, 1, 2)
    (tmp_path / "7").mkdir()
    shutil.copytree(tmp_path / "2", tmp_path / "8")
    (tmp_path / "8/state/_METADATA").unlink()
    shutil.copytree(tmp_path / "2", tmp_path / "9.orbax-checkpoint-tmp")
    with caplog.at_level(logging.WARNING, "k3jax"):
        assert restore(tmp_path, toy_state()).step == 2
    assert f"{tmp_path}/7 is incomplete" in caplog.text
    assert f"{tmp_path}/8 is incomplete" in caplog.text


def test_kf_107_a_new_writer_passes_incomplete_folders(tmp_path):
    """They count neither as the newest nor as one to keep, and block no later save."""
    write(tmp_path, 1)
    (tmp_path / "3").mkdir()
    (tmp_path / "9").mkdir()
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    write(tmp_path, 3, keep_last=1)
    assert checkpoint.steps(tmp_path) == ([3], [])
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["3", "3.incomplete", "9.incomplete"]
    assert_equal(restore(tmp_path, toy_state()).state, toy_state(3))


def largest_array_file(folder: Path) -> Path:
    return max((folder / "state").rglob("d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("harm", ["truncated", "empty", "gone", "flipped", "meta", "data"])
def test_kf_107_a_damaged_checkpoint_is_named_with_the_way_on(tmp_path, harm):
    write(tmp_path, 1, 2)
    victims = [path for path in (tmp_path / "2/state").rglob("d/*") if path.is_file()]
    if harm == "flipped":
        data = max(victims, key=lambda path: path.stat().st_size)
        words = bytearray(data.read_bytes())
        words[len(words) // 2] ^= 16
        data.write_bytes(words)
    elif harm in ("meta", "data"):
        file = {"meta": "meta/metadata", "data": "data/process_0-of-1.json"}[harm]
        (tmp_path / "2" / file).write_text("{")
    else:
        for victim in victims:
            os.truncate(victim, {"truncated": victim.stat().st_size // 2}.get(harm, 0))
            if harm == "gone":
                victim.unlink()
    with pytest.raises(UserError) as error:
        restore(tmp_path, toy_state())
    assert f"{tmp_path}/2 is damaged" in str(error.value)
    assert "delete that folder to continue from step 1" in str(error.value)
    shutil.rmtree(tmp_path / "2")
    assert_equal(restore(tmp_path, toy_state()).state, toy_state(1))


def test_kf_107_any_changed_byte_of_the_arrays_is_found(tmp_path):
    state = {"x": jax.random.normal(jax.random.key(0), (500,))}
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.save(1, state, position(), {})
    data = max((tmp_path / "1/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    good = data.read_bytes()
    found = unharmed = 0
    for place in range(0, len(good), len(good) // 12):
        data.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            assert_equal(restore(tmp_path, state).state, state)  # a byte that holds no value
            unharmed += 1
        except UserError:
            found += 1
    assert found > unharmed


def test_kf_107_old_checkpoints_go_only_after_the_commit(tmp_path, monkeypatch):
    """keep_last=1: while step 2 is being written, step 1 is still whole."""
    seen = []
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.save(1, toy_state(1), position(), {})
        writer.wait()
        rename = os.rename

        def spy(source, target, *rest, **kwargs):
            seen.append(checkpoint.steps(tmp_path)[0])
            return rename(source, target, *rest, **kwargs)

        monkeypatch.setattr(os, "rename", spy)
        writer.save(2, toy_state(2), position(), {})
        writer.wait()
    assert seen
    assert all(1 in steps for steps in seen)
    assert checkpoint.steps(tmp_path)[0] == [2]


def test_another_format_is_refused(tmp_path):
    write(tmp_path, 1)
    meta = json.loads((tmp_path / "1/meta/metadata").read_text())
    (tmp_path / "1/meta/metadata").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(UserError, match="format 99, this k3jax reads format 2"):
        restore(tmp_path, toy_state())


def test_no_checkpoint_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"no complete checkpoint in .*train first"):
        restore(tmp_path / "nowhere", toy_state())
    write(tmp_path, 4)
    with pytest.raises(UserError, match=r"no complete checkpoint of step 5 in .*it has \[4\]"):
        restore(tmp_path, toy_state(), step=5)


def test_kf_111_single_process_without_preemption_service(tmp_path):
    assert not jax.distributed.is_initialized()
    write(tmp_path, 1, 2, keep_last=1)
    assert checkpoint.steps(tmp_path)[0] == [2]


# ---- another mesh


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 4), (1, 8)])
def test_kf_109_restore_on_another_mesh(tmp_path, shape):
    """Saved on 4 x 2 devices; the target's placement decides, the values stay."""
    x = jax.random.normal(jax.random.key(0), (8, 16))

    def placed(mesh_shape):
        devices = jax.devices()[: mesh_shape[0] * mesh_shape[1]]
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh(mesh_shape, ("data", "fsdp"), devices=devices, axis_types=auto)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "fsdp"))

    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.save(1, {"x": jax.device_put(x, placed((4, 2)))}, position(), {})
    target = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed(shape))}
    found = restore(tmp_path, target).state["x"]
    assert found.sharding == placed(shape)
    np.testing.assert_array_equal(found, x)
    np.testing.assert_array_equal(checkpoint.restore_numpy(tmp_path)["x"], x)


@pytest.mark.devices
def test_kf_109_a_training_state_goes_from_mesh_to_mesh(tmp_path):
    """All five axes, from eight devices to four, one and eight again; nothing is compiled."""
    model = tiny_config(num_layers=3, pattern=("kda",), closing=("mla",))
    optim = OptimConfig(peak_lr=1e-3, final_lr=1e-4)
    state = jax.tree.map(np.asarray, init_state(model, optim, jax.random.key(0)))
    split = set()
    sizes = [
        {"data": 2, "fsdp": 2, "expert": 2},
        {"data": 1, "context": 2, "tensor": 2},
        {"data": 1},
        {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
    ]
    before = None
    for step, axes in enumerate(sizes):
        mesh = make_mesh(MeshConfig(**axes), jax.devices()[: math.prod(axes.values())])
        target = abstract_state(model, optim, mesh)
        if before is None:
            placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), state, target)
        else:
            placed = restore(tmp_path, target).state
        for x, t, value in zip(*map(jax.tree.leaves, (placed, target, state)), strict=True):
            assert x.sharding == t.sharding
            np.testing.assert_array_equal(x, value)
            for dim in x.sharding.spec:
                split |= {dim} if isinstance(dim, str) else set(dim or ())
        with CheckpointWriter(tmp_path, keep_last=1) as writer:
            writer.save(step, placed, position(), {})
        before = placed
    assert split >= {"fsdp", "expert", "context", "tensor"}, "all kinds of placement were met"
    saved = checkpoint.restore_numpy(tmp_path)["params"]
    jax.tree.map(np.testing.assert_array_equal, saved, state.params)
