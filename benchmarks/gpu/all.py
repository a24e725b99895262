"""All measurements of this folder in one go on a GPU, with the tests that belong on it.

    python -m benchmarks.gpu.all --seconds 570 --out results
    python -m benchmarks.gpu.all --only kda_k3jax kda_fla --out results

Compilation and tuning take cores and time, measuring takes the GPU: so a few jobs compile at once, in
the order below, and wait when they are ready (`gate.py`); then all others are halted, and one after
the other measures. Jobs of other benchmarks have no such point and run alone at the end. A job writes
to its own file, which also keeps what it had printed when its time was over. All that are ready hold
GPU memory: JAX is told not to take it in advance.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import gate

KERNELS = "tests/pallas_kernels/"
PYTEST = ("pytest", "-p", "no:benchmark", "-n", "8", "--dist", "worksteal", "-v", "--tb=short")
STEP = ("benchmarks.gpu.train_step", "mini", "--seq-len", "8192", "--batch-size")
BRIEF = ("--eval-every", "0", "--checkpoint-every", "100000")
MODULES = {
    # timed behind the gate, the slowest to be ready first
    "kda_fla": ("benchmarks.gpu.kda", "fla"),
    "torch_peer": ("benchmarks.gpu.torch_peer", "--batch-size", "32", "--rows", "2", "--timed", "3"),
    "mini": (*STEP, "32", "--timed", "3", "--profile"),
    "kda_k3jax": ("benchmarks.gpu.kda", "k3jax"),
    "mini_xla": (*STEP, "8", "--accumulation", "1", "--timed", "2", "--profile", "--xla"),
    # not timed
    "tests_kernels": (*PYTEST, "-k", "triton_gpu", KERNELS),
    "tests_golden": (*PYTEST, "-m", "golden", "-k", "not chunked and not reference", "tests"),
    "nano": ("k3jax.cli", "train", "nano", "--steps", "30", *BRIEF),
    "colab": ("k3jax.cli", "train", "colab", "--steps", "30", *BRIEF),
    # alone
    "memory_bound": ("benchmarks.gpu.memory_bound",),
    "grouped_matmul": ("benchmarks.gpu.grouped_matmul",),
    "mla_attention": ("benchmarks.gpu.mla_attention",),
}  # fmt: skip
TIMED = ("kda_fla", "torch_peer", "mini", "kda_k3jax", "mini_xla")
ALONE = ("memory_bound", "grouped_matmul", "mla_attention")


@dataclass
class Job:
    """One process and its children."""

    name: str
    folder: Path  # of the gate
    log: Path
    process: subprocess.Popen | None = None

    def start(self) -> None:
        env = {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self.name in TIMED:
            env |= {gate.FOLDER: str(self.folder), gate.NAME: self.name}
        command = [sys.executable, "-m", *MODULES[self.name]]
        if MODULES[self.name][0] == "k3jax.cli":
            command += ["--run-dir", str(self.log.with_suffix(""))]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | env, start_new_session=True,
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def ready(self) -> bool:
        return (self.folder / f"{self.name}.ready").exists()

    @property
    def busy(self) -> bool:
        return self.running and not self.ready

    def send(self, number: int) -> None:
        """To the process and its children."""
        if self.process is not None and self.running:
            os.killpg(self.process.pid, number)

    def finish(self, until: float) -> None:
        """Waits for the end, and brings it about at `until`."""
        while self.running and time.monotonic() < until:
            time.sleep(0.1)
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def measure(self, until: float) -> None:
        (self.folder / f"{self.name}.go").touch()
        self.finish(until)


def measure_ready(jobs: list[Job], until: float, most: float) -> None:
    """One after the other, all others halted; `most` seconds each."""
    others = [job for job in jobs if job.busy]
    for job in others:
        job.send(signal.SIGSTOP)
    for job in jobs:
        if job.running and job.ready and time.monotonic() < until:
            job.measure(min(until, time.monotonic() + most))
    for job in others:
        job.send(signal.SIGCONT)


def run(jobs: list[Job], seconds: float, at_once: int) -> None:
    """All jobs; the time of those that run alone is kept free at the end."""
    begin = time.monotonic()
    alone = [job for job in jobs if job.name in ALONE]
    rest = [job for job in jobs if job.name not in ALONE]
    end, each = begin + seconds, min(60.0, seconds / 10)
    compiling_until = end - each * len(alone) - each * sum(job.name in TIMED for job in rest) / 2
    waiting = list(rest)
    while (waiting or any(job.busy for job in rest)) and time.monotonic() < compiling_until:
        if waiting and sum(job.busy for job in rest) < at_once:
            waiting.pop(0).start()
        time.sleep(0.2)
    measure_ready(rest, end - each * len(alone), each)
    while any(job.busy for job in rest) and time.monotonic() < end - each * len(alone):
        time.sleep(0.2)
    measure_ready(rest, end - each * len(alone), each)
    for job in rest:
        job.finish(time.monotonic())
    for job in alone:
        if time.monotonic() < end:
            job.start()
            job.finish(min(end, time.monotonic() + each))


def report(job: Job) -> None:
    """What a job found: its records, or the end of what it printed; of tests the counts."""
    state = "not started" if job.process is None else f"exit code {job.process.returncode}"
    print(f"== {job.name}: {state}")
    if job.process is None:
        return
    text = job.log.read_text(errors="replace")
    lines = text.splitlines()
    if job.name.startswith("tests"):
        words = ("PASSED", "FAILED", "SKIPPED", "ERROR")
        print({word: len(re.findall(rf"\] {word} ", text)) for word in words})
        lines = [line for line in lines if re.search(r"\] (FAILED|ERROR) |^E  ", line)]
    records = [line for line in lines if line.startswith("{") or "runs on" in line]
    print("\n".join(line[:1000] for line in records or lines[-12:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    args = parser.parse_args()
    folder = args.out / "gate"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    jobs = [Job(name, folder, args.out / f"{name}.log") for name in args.only]
    run(jobs, args.seconds, args.at_once)
    for job in jobs:
        report(job)


if __name__ == "__main__":
    main()
