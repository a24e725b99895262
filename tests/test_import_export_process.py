"""Import and export as processes: killed anywhere, out of disk, short of memory, several at once."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3jax import checkpoint
from k3jax.run_dir import load_trained
from tests.official_helpers import (
    assert_same_files,
    random_checkpoint,
    sized_config,
    trainable_config,
)
from tests.test_hosts import Group, script, succeeded

PATIENCE = 300  # seconds for one command, on a busy machine
ENV = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "K3JAX_CACHE_DIR": ""}


def command(*args) -> list[str]:
    return [sys.executable, "-m", "k3jax.cli", *map(str, args)]


def finish(*args) -> None:
    done = subprocess.run(command(*args), capture_output=True, text=True, env=ENV, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> dict[str, Path]:
    """A source of some 1,900 small tensors, and what uninterrupted commands make of it."""
    base = tmp_path_factory.mktemp("many")
    model = trainable_config(num_layers=13)
    packed = replace(model.moe, num_experts=24, ffn_dim=32, latent_dim=32, weights="mxfp4")
    random_checkpoint(replace(model, moe=packed), base / "source")
    for experts in ("mxfp4", "bf16"):
        finish("import", base / "source", base / experts / "model", "--experts", experts)
    finish("export", base / "bf16/model", base / "out")
    assert_same_files(base / "out", base / "source")
    return {name: base / name for name in ("source", "mxfp4", "bf16", "out")}


def kill_often(
    args: list, work: Path, rng: random.Random, kills: int, finished: Callable[[], bool]
) -> int:
    """Starts a command again and again and kills it at random moments, mostly after its first write.

    Returns: how often it was killed with something finished and something left.
    """
    inside, seen = 0, -1
    for _ in range(kills):
        process = subprocess.Popen(
            command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV
        )
        try:
            begun = size(work)
            deadline = time.time() + PATIENCE
            while rng.random() > 1e-4 and time.time() < deadline:  # else while it starts
                if process.poll() is not None or size(work) != begun:
                    break
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.04))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if finished():
            break
        inside += size(work) not in (0, seen)
        seen = size(work)
    return inside


def size(work: Path) -> int:
    """Bytes of the records of what is finished."""
    return sum(record.stat().st_size for record in work.glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_twenty_kills_of_an_import(many, tmp_path, experts):
    """KF-107: the same files in the end, and never a checkpoint before."""
    rng, kills, inside, number = random.Random(experts), 0, 0, 0
    while kills < 20:
        target = tmp_path / str(number) / "model"
        number += 1
        args = ["import", many["source"], target, "--experts", experts]
        complete = lambda target=target: checkpoint.latest_step(target / "checkpoints") == 0  # noqa: E731
        inside += kill_often(args, target / "importing", rng, 20 - kills, complete)
        kills += 20 - kills if not complete() else 1
        finish(*args)
        assert_same_files(target, many[experts] / "model")
    assert inside >= 5, "too few kills fell inside the import"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kills_of_an_export(many, tmp_path):
    rng, target = random.Random(2), tmp_path / "out"
    args = ["export", many["bf16"] / "model", target]
    index = target / "model.safetensors.index.json"
    inside = kill_often(args, target / ".k3jax-export", rng, 20, index.exists)
    finish(*args) if (target / ".k3jax-export").exists() else None
    assert_same_files(target, many["source"])
    assert inside >= 5, "too few kills fell inside the export"


LIMITED = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1))
    from k3jax import cli
    sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_next_start_goes_on(many, tmp_path):
    """Files may not grow beyond a limit, as with a quota: what is finished stays."""
    for args, limit in (
        (["import", many["source"], tmp_path / "model"], 9_000),
        (["export", many["mxfp4"] / "model", tmp_path / "out"], 60_000),
    ):
        program = [sys.executable, *script(LIMITED, limit, *args)]
        done = subprocess.run(program, capture_output=True, text=True, env=ENV, timeout=PATIENCE)
        assert done.returncode == 2, done.stderr[-3000:]
        (line,) = done.stderr.strip().splitlines()
        assert "not written" in line
        assert "free some space" in line
        finish(*args)
    assert_same_files(tmp_path / "out", many["source"])


MEASURED = """
    import sys, threading, time
    from k3jax import import_official
    from k3jax.import_plan import make_plan
    from k3jax.safetensors_files import SafetensorsFolder

    def resident():
        return 4096 * int(open("/proc/self/statm").read().split()[1])

    source, target = sys.argv[1:]
    import_official.WORKERS = 2
    make_plan(SafetensorsFolder(source), None)  # libraries and the model's shapes
    base, peak, done = resident(), 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    import_official.import_model(source, target, import_official.ImportArgs())
    seconds = time.perf_counter() - began
    done = True
    thread.join()
    print(f"peak {peak - base} seconds {seconds}")
"""


@pytest.mark.slow
def test_kf_082_memory_does_not_grow_with_the_model(tmp_path):
    """Eight shards of 256 MB: at most two of them in memory, whatever their number."""
    cfg = sized_config(layers=8, experts=80, latent=512, ffn=1024)
    source = random_checkpoint(cfg, tmp_path / "source")
    shards = sorted(source.glob("*.safetensors"))
    shard = shards[0].stat().st_size
    assert 240e6 < shard < 280e6
    program = [sys.executable, *script(MEASURED, source, tmp_path / "model")]
    done = subprocess.run(program, capture_output=True, text=True, env=ENV, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    _, peak, _, seconds = done.stdout.split()[-4:]
    print(f"{sum(s.stat().st_size for s in shards) / float(seconds) / 1e6:.0f} MB/s, {peak} bytes")
    assert int(peak) <= 2 * shard


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kf_083_two_processes_share_the_work(many, tmp_path):
    """Each makes the experts of its devices and its turns of the rest; the folder is the same, but for
    the mesh that it remembers. Export shares the files."""
    mesh = ["--mesh.data", "1", "--mesh.expert", "4"]
    target = tmp_path / "model"
    args = command("import", many["source"], target, *mesh)[1:]
    keep = "import k3jax.import_official as i; i.shutil.rmtree = lambda *_, **__: None"
    program = f"{keep}; from k3jax import cli; import sys; sys.exit(cli.main(sys.argv[1:]))"
    succeeded(Group([["-c", program, *args[2:]]] * 2, devices=2).wait())
    journals = [target / f"importing/journal.{process}.jsonl" for process in range(2)]
    lines = [len(journal.read_text().split("\n")) for journal in journals]
    assert min(lines) > 0.3 * sum(lines)
    shutil.rmtree(target / "importing")
    assert load_trained(target).cfg.mesh.expert == 4
    for name in ("state", "data"):
        ours, whole = (m / "checkpoints/0" / name for m in (target, many["mxfp4"] / "model"))
        assert_same_files(ours, whole)
    succeeded(Group([command("export", target, tmp_path / "out")[1:]] * 2, devices=2).wait())
    assert_same_files(tmp_path / "out", many["source"])
