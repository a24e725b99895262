"""The training loop: what a run leaves, and how it stops, resumes and refuses."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import k3jax.train as loop
from k3jax import checkpoint
from k3jax.display import Display
from k3jax.errors import UserError
from k3jax.run_dir import RunDir, to_json
from tests.tiny_run import listing, records, text_folder, tiny

compiled_steps = loop.compiled_steps


class Recorder(Display):
    """Keeps the notes; calls `at[step]` once the record of that step is out."""

    def __init__(self, **at):
        super().__init__(start=0, total=6, every=1)
        self.notes, self.at = [], at

    def note(self, text):
        self.notes.append(text)

    def step(self, record):
        self.at.get(f"step_{record['step']}", lambda: None)()


class Steps:
    """The loop's compiled steps, made once for all tests; `before_...` may intervene in a call."""

    def __init__(self):
        self.compiled = {}
        self.before_train = self.before_eval = None

    def __call__(self, setup):
        optim = dataclasses.replace(setup.cfg.optim, max_skipped_steps=1)  # the loop's affair
        key = (setup.cfg.model, optim, setup.cfg.steps)
        if key not in self.compiled:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax, "jit", functools.partial(_quick, jax.jit))
                self.compiled[key] = compiled_steps(setup)
        train_step, eval_step = self.compiled[key]
        return (
            lambda *args: (self.before_train or _just)(train_step, *args),
            lambda *args: (self.before_eval or _just)(eval_step, *args),
        )


def _quick(jit, function, **options):
    """A few tiny steps are not worth optimising for; XLA takes options on the outermost only."""
    if "out_shardings" in options:
        options["compiler_options"] = {"xla_backend_optimization_level": 0}
    return jit(function, **options)


def _just(function, *args):
    return function(*args)


@pytest.fixture(scope="module")
def compiled():
    return Steps()


@pytest.fixture
def steps(compiled, monkeypatch):
    monkeypatch.setattr(loop, "compiled_steps", compiled)
    monkeypatch.setattr(loop, "_sample", lambda *_: None)
    monkeypatch.setenv("K3JAX_CACHE_DIR", "")
    compiled.before_train = compiled.before_eval = None
    return compiled


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text_folder(tmp_path_factory.mktemp("text") / "library")


def train(cfg, display=None):
    display = display or Recorder()
    code = loop.train(cfg, display=display, on=jax.devices()[:1])
    return code, display.notes


@pytest.fixture(scope="module")
def reference(compiled, data, tmp_path_factory):
    """An uninterrupted run of six steps: folder and notes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "compiled_steps", compiled)
        patch.setattr(loop, "_sample", lambda *_: None)
        patch.setenv("K3JAX_CACHE_DIR", "")
        folder = tmp_path_factory.mktemp("runs") / "reference"
        code, notes = train(tiny(folder, data))
    assert code == 0
    return folder, notes


def assert_same_run(folder: Path, reference: Path) -> None:
    """Same figures of every step, same final state to the last bit."""
    assert records(folder) == records(reference)
    a, b = (checkpoint.restore_numpy(path / "checkpoints", step=6) for path in (folder, reference))
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---- a whole run


def test_a_run_leaves_everything_in_its_folder(reference, data):
    folder, notes = reference
    assert json.loads((folder / "config.json").read_text()) == to_json(tiny(folder, data))
    assert checkpoint.steps(folder / "checkpoints") == ([2, 4, 6], [])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert next((folder / "tensorboard").iterdir()).stat().st_size > 500
    found = records(folder)
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in found if "val_loss" in record] == [4, 6]
    for record in found:
        assert np.isfinite(record["loss"])
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / np.log(2), rel=0.2)
        assert len(record["expert_load"]) == 2
        assert len(record["max_logit"]) == 2
    assert "validation" in notes[-5]


def test_kf_124_the_backend_comes_first(reference):
    notes = reference[1]
    assert re.search(rf"jax {jax.__version__}.*backend cpu, 8 x cpu", notes[0])
    assert "computes in float32, keeps float32" in notes[1]


def test_kf_128_the_estimate_comes_before_the_first_step(reference):
    assert re.match(r"memory: about [\d.]+ GB of [\d.]+ GB per device", reference[1][2])


def test_kf_111_works_without_a_preemption_service_and_says_so(reference):
    assert "preemption service off" in reference[1][4]


def test_kf_117_one_compilation_for_all_steps_and_resumes(reference, steps, data, tmp_path):
    assert train(tiny(tmp_path, data), Recorder(step_1=kill_me))[0] == 0
    assert train(tiny(tmp_path, data))[0] == 0
    ((train_step, eval_step),) = steps.compiled.values()
    assert (train_step._cache_size(), eval_step._cache_size()) == (1, 1)


# ---- stop and resume


def kill_me(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_kf_100_stopped_and_resumed_equals_uninterrupted(reference, steps, data, tmp_path):
    code, notes = train(tiny(tmp_path, data), Recorder(step_1=kill_me))
    assert code == 0
    stopped = int(re.search(r"stopped by SIGTERM after step (\d)", notes[-1])[1])
    assert checkpoint.latest_step(tmp_path / "checkpoints") == stopped
    assert [record["step"] for record in records(tmp_path)] == list(range(1, stopped + 1))
    code, notes = train(tiny(tmp_path, data))
    assert code == 0
    assert f"continues after step {stopped}" in " ".join(notes)
    assert_same_run(tmp_path, reference[0])


def test_kf_100_the_learning_rate_goes_on(reference):
    """One cosine over the run: its first step is the peak, and no step repeats a rate."""
    rates = [record["lr"] for record in records(reference[0])]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert len(set(rates[1:])) == 5


@pytest.mark.parametrize("place", ["evaluation", "save", "before", "last_step"])
def test_kf_108_a_signal_is_seen_everywhere(reference, steps, data, tmp_path, monkeypatch, place):
    """The step at which the signal arrives is saved, and nothing else is begun."""
    calls = []

    def in_evaluation(function, *args):
        calls.append("eval")
        kill_me()
        return function(*args)

    saved_at = {"evaluation": 4, "save": 2, "before": None, "last_step": 6}[place]
    if place == "evaluation":
        steps.before_eval = in_evaluation
    elif place == "save":
        save = checkpoint.CheckpointWriter.save
        monkeypatch.setattr(
            loop.CheckpointWriter, "save", lambda *args: (kill_me(), save(*args))[1]
        )
    elif place == "before":
        prepare = loop.prepare
        monkeypatch.setattr(loop, "prepare", lambda *args: (prepare(*args), kill_me())[0])
    display = Recorder(step_6=kill_me) if place == "last_step" else Recorder()
    code, notes = train(tiny(tmp_path / "run", data), display)
    assert code == 0
    assert checkpoint.latest_step(tmp_path / "run/checkpoints") == saved_at
    if place == "evaluation":
        assert calls == ["eval"], "the second validation batch was not skipped"
    if place == "before":
        assert not (tmp_path / "run").exists()
    if place == "last_step":
        assert "finished step 6" in " ".join(notes)
    elif place != "before":
        assert "stopped by SIGTERM" in notes[-1]


def test_kf_108_a_signal_ends_the_sample(monkeypatch, data, tmp_path):
    from k3jax import generate

    blocks = []

    class Endless:
        def __init__(self, *_, **__):
            pass

        def stream_text(self, *_, **__):
            while True:
                blocks.append("a")
                kill_me()
                yield "a"

    monkeypatch.setattr(generate, "Engine", Endless)
    monkeypatch.setenv("K3JAX_CACHE_DIR", "")
    display = Recorder()
    with loop.StopSignal() as stop:
        setup = loop.prepare(tiny(tmp_path, data), display, jax.devices()[:1])
        loop._sample(setup, SimpleNamespace(params={}, buffers={}), stop, display)
        setup.data.close()
    assert len(blocks) == 1


def test_sigint_twice_aborts():
    with loop.StopSignal() as stop:
        kill_me(signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            kill_me(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- nothing left to do


@pytest.mark.parametrize("asked", ["6", "5", "1"])
def test_kf_110_at_or_beyond_the_last_step(reference, steps, data, asked):
    folder = reference[0]
    before = listing(folder)
    code, notes = train(tiny(folder, data, "--steps", asked))
    assert code == loop.NOTHING_LEFT
    assert f"is at step 6 and --steps is {asked}" in notes[-1]
    assert listing(folder) == before


def test_kf_110_no_steps_at_all(steps, data, tmp_path):
    code, notes = train(tiny(tmp_path / "run", data, "--steps", "0"))
    assert code == loop.NOTHING_LEFT
    assert "nothing to do" in notes[-1]
    assert not (tmp_path / "run").exists()


def test_fewer_steps_than_before_are_refused(steps, data, tmp_path):
    train(tiny(tmp_path, data), Recorder(step_1=kill_me))
    with pytest.raises(UserError, match=r"steps=6 \(now 5\)"):
        train(tiny(tmp_path, data, "--steps", "5"))


# ---- not finite

PATIENCE = ["--optim.max-skipped-steps", "2"]


def not_finite_from(first: int, until: int = 99):
    """The step as it answers a batch that is not finite: nothing changed, but counted."""
    counted = []

    def step(function, state, batch):
        counted.append(1)
        bad = first <= len(counted) <= until
        state, metrics = function(state, batch)
        return state, metrics | {"loss": np.nan, "skipped": 1} if bad else metrics

    return step


def test_kf_119_the_run_stops_before_a_bad_checkpoint(steps, data, tmp_path):
    steps.before_train = not_finite_from(3)
    code, notes = train(tiny(tmp_path, data, *PATIENCE))
    assert code == loop.DIVERGED
    assert "not finite in 2 steps in a row, up to step 4" in notes[-1]
    assert "last checkpoint: step 2" in notes[-1]
    assert checkpoint.latest_step(tmp_path / "checkpoints") == 2
    found = records(tmp_path)
    assert [record["loss"] for record in found[2:]] == [None, None]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_kf_119_one_bad_step_does_not_stop_the_run(steps, data, tmp_path):
    steps.before_train = not_finite_from(3, until=3)
    code, _ = train(tiny(tmp_path, data, *PATIENCE))
    assert code == 0
    assert [record["skipped"] for record in records(tmp_path)] == [0, 0, 1, 0, 0, 0]


def test_kf_128_out_of_memory_is_one_line_with_the_way_out(steps, data, tmp_path):
    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 GB")

    steps.before_train = no_memory
    with pytest.raises(UserError, match=r"out of device memory .*--accumulation"):
        train(tiny(tmp_path, data))


# ---- the run folder


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seq-len", "32"], "seq_len=64 (now 32)"),
        (["--seed", "1"], "seed=0 (now 1)"),
        (["--model.kda.g-min", "-4"], "model.kda.g_min=-5.0 (now -4.0)"),
        (["--model.moe.num-shared", "1"], "model.moe.num_shared=2 (now 1)"),
        (["--optim.peak-lr", "1e-2"], "optim.peak_lr="),
        (["--model.moe", "None", "--model.num-dense-layers", "3"], "model.moe"),
    ],
)
def test_another_configuration_is_refused_by_name(reference, steps, data, flags, named):
    before = listing(reference[0])
    with pytest.raises(UserError) as error:
        train(tiny(reference[0], data, *flags))
    assert named in str(error.value)
    assert "choose another --run-dir" in str(error.value)
    assert listing(reference[0]) == before


def test_what_does_not_matter_may_change(reference, data):
    flags = "--steps 9 --log-every 5 --checkpoint-every 3 --keep-last 1 --keep-every 4"
    flags += " --eval-every 3 --eval-batches 1 --model.remat full --accumulation 2"
    RunDir(reference[0]).check(tiny(reference[0], data, *flags.split()))


HOLD = """
    import sys, time
    from k3jax.run_dir import RunDir
    run = RunDir(sys.argv[1])
    run.open()
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_run_per_folder_and_a_killed_one_does_not_block(reference):
    folder = reference[0]
    program = [sys.executable, "-c", "\n".join(line[4:] for line in HOLD.splitlines()), str(folder)]
    holder = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
            RunDir(folder).open()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    run = RunDir(folder)
    run.open()
    run.close()
