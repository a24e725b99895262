"""What the terminal shows: a progress bar with the figures, or plain lines where there is none."""

import itertools
import logging
import statistics
import sys
import threading
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SMOOTHING = 20  # steps whose median duration gives the remaining time


class Bar:
    """A progress bar with notes above it, on a terminal; elsewhere the notes alone. A context manager.

    Args:
        columns: of the bar.
        total, completed: of what it counts.
        console: where to; the terminal if omitted.
        fields: what `{task.fields[...]}` of the columns says at first.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        total: int,
        completed: int,
        console: Console | None = None,
        **fields: Any,
    ):
        self._console = console or Console()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=completed, **fields)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def moved(self, completed: int, **fields: Any) -> bool:
        """Whether there is a bar, which then shows this."""
        if self._bar is None:
            return False
        self._bar.update(self._task, completed=completed, **fields)
        return True


def left(seconds: float) -> str:
    """The time left as the end of a line."""
    minutes, rest = divmod(round(seconds), 60)
    return f"  left {minutes // 60}:{minutes % 60:02}:{rest:02}"


class Display(Bar):
    """A run: `step` once per training step."""

    def __init__(self, *, start: int, total: int, every: int, console: Console | None = None):
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            total=total,
            completed=start,
            console=console,
            figures="compiling",
        )
        self._every, self._total = every, total
        self._times: list[float] = []

    def step(self, record: dict[str, Any]) -> None:
        """Shows the figures of one step; plain lines come every `every` steps and at the end."""
        self._times = [*self._times[-SMOOTHING:], time.monotonic()]
        number = record["step"]
        if self.moved(number, figures=figures(record)):
            return
        if number % self._every == 0 or number == self._total:
            self.note(f"step {number}/{self._total}  {figures(record)}{self._left(number)}")

    def _left(self, number: int) -> str:
        if len(self._times) < 2 or number >= self._total:
            return ""
        durations = [b - a for a, b in itertools.pairwise(self._times)]
        pace = statistics.median(durations)  # not the mean: some include a validation
        return left(pace * (self._total - number))


def figures(record: dict[str, Any]) -> str:
    """The figures of a step in one line; what was not measured is left out."""
    shown = (
        ("loss {:.4f}", "loss"),
        ("{:.3f} bits/byte", "bits_per_byte"),
        ("validation {:.4f}", "val_loss"),
        ("{:.3f} bits/byte", "val_bits_per_byte"),
        ("lr {:.2e}", "lr"),
        ("grad {:.2f}", "grad_norm"),
        ("{:,.0f} tok/s", "tokens_per_second"),
        ("MFU {:.1%}", "mfu"),
    )
    parts = [text.format(record[name]) for text, name in shown if record.get(name) is not None]
    if record.get("skipped"):
        parts.append("SKIPPED (not finite)")
    return "  ".join(parts)


LINES = 10.0  # seconds between plain lines where there is no terminal


class Transfer(Bar):
    """Bytes with their rate and the time left; any thread may `add`.

    Args:
        what: the first word of the line.
        total: bytes in all.
        done: bytes of an earlier start.
        console: where to; the terminal if omitted.
    """

    def __init__(self, what: str, *, total: int, done: int = 0, console: Console | None = None):
        super().__init__(
            TextColumn(what),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            total=total,
            completed=done,
            console=console,
        )
        self._what, self._total, self._done, self._first = what, total, done, done
        self._began = self._last = time.monotonic()
        self._lock = threading.Lock()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._bar is None and error[0] is None:
            self._line()

    def add(self, size: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += size
            if not self.moved(self._done) and time.monotonic() - self._last > LINES:
                self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        rate = (self._done - self._first) / max(self._last - self._began, 1e-9)
        text = f"{self._what} {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
        if rate:
            text += f"  {rate / 1e6:,.0f} MB/s{left((self._total - self._done) / rate)}"
        self.note(text)


class Served(Bar):
    """Requests with the tokens per second of all, and the time left.

    Args:
        total: requests in all.
        done: those of an earlier start.
        console: where to; standard error if omitted.
    """

    def __init__(self, *, total: int, done: int, console: Console | None = None):
        super().__init__(
            TextColumn("requests"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            total=total,
            completed=done,
            console=console or Console(stderr=True),
            rate="compiling",
        )
        self._total, self._done, self._first = total, done, done
        self._began = self._last = time.monotonic()

    def update(self, finished: int, tokens: int) -> None:
        """So many requests more are done; `tokens` have been generated so far."""
        self._done += finished
        now = time.monotonic()
        seconds, served = now - self._began, self._done - self._first
        rate = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
        if self.moved(self._done, rate=rate):
            return
        if now - self._last > LINES or self._done == self._total:
            self._last = now
            end = left(seconds * (self._total - self._done) / served) if served else ""
            self.note(f"requests {self._done}/{self._total}  {rate}{end}")


class _StderrLines(logging.Handler):
    """Log records as single lines on whatever stderr is now: a live display redirects it."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        print(f"{level}{record.getMessage()}", file=sys.stderr)


def show_logs() -> None:
    """Sends k3jax's log to the terminal, and only real failures of the libraries below it."""
    logger = logging.getLogger("k3jax")
    if not any(isinstance(handler, _StderrLines) for handler in logger.handlers):
        logger.addHandler(_StderrLines())
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl gives the root logger a handler of its own
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # its errors also come as exceptions
