"""kill -9 at any moment: the next start continues from the last commit, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax import checkpoint
from tests.tiny_run import TINY, records, text_folder

STEPS = 40
EVERY = 3  # steps between checkpoints
pytestmark = pytest.mark.slow  # each start costs half a minute of compilation
PATIENCE = 900  # seconds for one run, on a busy machine


class Machine:
    """Starts the command on one folder after another; all share data and compilation cache."""

    def __init__(self, base: Path):
        self.base, self.data = base, text_folder(base / "data")
        self.env = os.environ | {
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # few steps: compile quickly
            "K3JAX_CACHE_DIR": str(base / "cache"),
        }

    def start(self, run: Path) -> subprocess.Popen:
        flags = [*TINY, "--steps", STEPS, "--checkpoint-every", EVERY, "--keep-last", 1]
        flags += ["--eval-every", 10, "--data", self.data, "--run-dir", run]
        program = [sys.executable, "-m", "k3jax.cli", "train", "nano", *map(str, flags)]
        with (self.base / "log").open("ab") as log:
            return subprocess.Popen(program, stdout=log, stderr=log, env=self.env)

    def run(self, *args) -> str:
        """Output of another command."""
        program = [sys.executable, "-m", "k3jax.cli", *map(str, args)]
        done = subprocess.run(
            program, capture_output=True, text=True, env=self.env, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def finish(self, run: Path) -> None:
        with self.start(run) as process:
            try:
                process.wait(PATIENCE)
            finally:
                process.kill()
        assert process.returncode == 0, (self.base / "log").read_text()[-3000:]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def reference(machine):
    run = machine.base / "reference"
    machine.finish(run)
    return run


def progress(run: Path) -> int:
    """Lines of metrics.jsonl."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def unfinished(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(f"*{checkpoint.UNFINISHED}*"))


def wait_until(condition, process) -> bool:
    """Polls until the condition holds; False if the process ended before."""
    deadline = time.time() + PATIENCE
    while process.poll() is None and time.time() < deadline:
        if condition():
            return True
        time.sleep(0.001)
    return False


def kill_at_a_random_moment(machine: Machine, run: Path, rng: random.Random) -> tuple[bool, bool]:
    """Starts the run, lets it train for some steps, kills it; every other time inside a save.

    Returns: whether it was killed before its end, and whether a save was in progress.
    """
    process, before = machine.start(run), progress(run)
    target = min(before + rng.randrange(1, 2 * EVERY), STEPS - 1)
    try:
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0, 5))  # while it starts
        elif wait_until(lambda: progress(run) > target, process) and rng.random() < 0.7:
            wait_until(lambda: unfinished(run), process)
            time.sleep(rng.uniform(0, 0.05))
        killed = process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return killed, bool(unfinished(run))


def assert_continues(run: Path, committed: int | None) -> None:
    """Nothing is lost beyond the steps since the last commit, which may be one save behind."""
    assert progress(run) - (committed or 0) <= 2 * EVERY


def kill_many(machine, reference, run, kills: int, rng: random.Random) -> int:
    inside, done = 0, 0
    while done < kills:
        killed, in_save = kill_at_a_random_moment(machine, run, rng)
        if not killed:  # it had reached its end: begin another run
            assert_equals(run, reference)
            run = run.with_name(run.name + "x")
            continue
        done += 1
        inside += in_save
        assert_continues(run, checkpoint.latest_step(run / "checkpoints"))
    machine.finish(run)
    assert_equals(run, reference)
    return inside


def assert_equals(run: Path, reference: Path) -> None:
    """Same figures in every line, each step once, same final state to the last bit."""
    a, b = records(run), records(reference)
    assert [record["step"] for record in a] == list(range(1, STEPS + 1))
    assert a == b
    states = [
        checkpoint.restore_numpy(path / "checkpoints", step=STEPS) for path in (run, reference)
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert not unfinished(run)


@pytest.mark.timeout(3000)
def test_kf_107_twenty_kills(machine, reference, tmp_path):
    inside = kill_many(machine, reference, tmp_path / "run", 20, random.Random(1))
    assert inside >= 3, "too few kills fell inside a save"


def test_kf_116_a_second_run_compiles_nothing_new(machine, reference, tmp_path):
    """Same program, same shapes: whatever took long to compile comes from the cache."""
    before = {path.name for path in (machine.base / "cache").iterdir()}
    assert any("train_step" in name for name in before)
    machine.finish(tmp_path / "run")
    after = {path.name for path in (machine.base / "cache").iterdir()}
    assert {name for name in after - before if name.endswith("-cache")} == set()


def test_sigterm_saves_and_exits_cleanly(machine, reference, tmp_path):
    """The step after the last checkpoint is not lost, and the code is 0."""
    run = tmp_path / "run"
    process = machine.start(run)
    assert wait_until(lambda: progress(run) >= EVERY + 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    step = checkpoint.latest_step(run / "checkpoints")
    assert step == progress(run)
    assert step >= EVERY + 2
    assert json.loads((run / "config.json").read_text())["steps"] == STEPS
    machine.finish(run)
    assert_equals(run, reference)


def test_evaluation_of_a_run_repeats_its_validation(machine, reference):
    """The same batches and weights: the figures of the run's last line."""
    last = records(reference)[-1]
    text = machine.run("eval", "--run-dir", reference, "--batches", 2)
    assert f"step {STEPS}: loss {last['val_loss']:.4f} nats per token" in text
    assert f"{last['val_bits_per_byte']:.4f} bits per byte" in text
    text = machine.run("eval", "--run-dir", reference, "--data", machine.data / "file_00.py")
    assert "file_00.py (all)" in text


def test_sampling_from_a_run(machine, reference):
    """Continues the prompt; the seed decides the text."""
    ask = ["generate", reference, "--prompt", "def f", "--max-tokens", 20, "--seed"]
    first, again, other = (machine.run(*ask, seed) for seed in (0, 0, 1))
    assert first.startswith("def f")
    assert len(first) > len("def f") + 1
    assert first == again
    assert first != other


def test_requests_of_a_killed_process_are_not_lost(machine, reference, tmp_path):
    """Killed while results are being written, again and again: the file in the end is that of one quiet run."""
    lines = [{"id": n, "prompt": f"def f{n}", "max_tokens": 30 + n % 50} for n in range(400)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ask = ["generate", reference, "--input", tmp_path / "in.jsonl", "--slots", 4, "--output"]
    quiet, killed = tmp_path / "quiet.jsonl", tmp_path / "killed.jsonl"
    machine.run(*ask, quiet)
    program = [sys.executable, "-m", "k3jax.cli", *map(str, [*ask, killed])]
    inside = 0
    for _ in range(3):
        done = killed.read_bytes().count(b"\n") if killed.exists() else 0
        process = subprocess.Popen(program, env=machine.env, stderr=subprocess.DEVNULL)
        try:
            wait_until(
                lambda: killed.exists() and killed.read_bytes().count(b"\n") > done + 20,  # noqa: B023
                process,
            )
            inside += process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        finished = killed.read_bytes().count(b"\n")
        assert finished > done
    assert inside, "no process was killed in the middle"
    machine.run(*ask, killed)
    assert killed.read_bytes() == quiet.read_bytes()
