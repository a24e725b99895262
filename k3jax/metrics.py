"""What a run measured: metrics.jsonl (one line per step), TensorBoard events, and loss.png."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.errors import disk_errors
from k3jax.run_dir import RunDir, write_whole


class MetricsLog:
    """Writes each step's record to all three places. A record is a dict of numbers and lists.

    metrics.jsonl is cut back to the step that the run resumes from, so no step is in it twice;
    numbers that are not finite become null there. Each line reaches the operating system before
    `write` returns: a killed run loses none.
    """

    def __init__(self, run: RunDir, *, resume_step: int = 0):
        self._run = run
        self._losses: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._bits_per_nat: list[float] = []  # bits per byte over nats per token, of some steps
        with disk_errors(f"{run.metrics_file} not written"):
            lines = _kept_lines(run.metrics_file, resume_step)
            write_whole(run.metrics_file, b"".join(lines))
            self._file = run.metrics_file.open("ab", buffering=0)
            self._events = _Events(run.tensorboard, resume_step)
        for line in lines:
            self._remember(json.loads(line))

    def write(self, record: dict[str, Any]) -> None:
        """Adds the record of `record["step"]`; its step must be the next one."""
        line = json.dumps({name: _json_ready(value) for name, value in record.items()})
        with disk_errors(f"{self._run.metrics_file} not written"):
            self._file.write(line.encode() + b"\n")
            self._events.write(record)
        self._remember(record)

    def _remember(self, record: dict[str, Any]) -> None:
        loss = record.get("loss")
        if loss is not None and math.isfinite(loss):
            self._losses.append((record["step"], loss))
            if loss and record.get("bits_per_byte"):
                self._bits_per_nat = [*self._bits_per_nat[-99:], record["bits_per_byte"] / loss]
        if record.get("val_loss") is not None:
            self._validation.append((record["step"], record["val_loss"]))

    def plot(self) -> None:
        """Draws loss.png: training and validation loss, with bits per byte on the right."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
        if self._losses:
            axes.plot(*zip(*self._losses, strict=True), lw=1, label="training")
        if self._validation:
            axes.plot(*zip(*self._validation, strict=True), "o-", label="validation")
        if self._bits_per_nat:
            ratio = sum(self._bits_per_nat) / len(self._bits_per_nat)
            scale = (lambda y: np.multiply(y, ratio), lambda y: np.divide(y, ratio))
            right = axes.secondary_yaxis("right", scale)
            right.set_ylabel("bits per byte")
        if self._losses or self._validation:
            axes.legend()
        axes.grid(alpha=0.3)
        FigureCanvasAgg(figure)
        with disk_errors(f"{self._run.plot_file} not written"):
            temporary = self._run.plot_file.with_suffix(".tmp.png")
            figure.savefig(temporary, dpi=120)
            temporary.replace(self._run.plot_file)

    def close(self) -> None:
        with disk_errors(f"{self._run.metrics_file} not written"):
            self._file.close()
            self._events.close()


class _Events:
    """TensorBoard scalars, written by this thread: an error of the disk is raised, not printed."""

    def __init__(self, folder: Path, resume_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import (
            Event,  # pyrefly: ignore[missing-module-attribute]
            SessionLog,  # pyrefly: ignore[missing-module-attribute]
        )

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        start = SessionLog(status=SessionLog.START)  # hides what an earlier start wrote after this
        self._writer.write_event(Event(session_log=start, step=resume_step + 1))

    def write(self, record: dict[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]
        from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

        scalars = []
        for name, value in record.items():
            if isinstance(value, list) and value:
                scalars.append(Summary.Value(tag=f"{name}/max", simple_value=max(value)))
            elif isinstance(value, int | float) and name != "step":
                scalars.append(Summary.Value(tag=name, simple_value=value))
        event = Event(wall_time=time.time(), step=record["step"], summary=Summary(value=scalars))
        self._writer.write_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _kept_lines(path: Path, resume_step: int) -> list[bytes]:
    """Lines up to `resume_step`; a line that a killed run left unfinished is dropped."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= resume_step and line.endswith(b"\n"):
            kept.append(line)
    return kept


def _json_ready(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
