"""From a step's device metrics to its record: figures in named units, speed, skipped steps."""

import math
import time
from typing import Any

import jax


class Diverged(RuntimeError):
    """Too many steps in a row without finite loss and gradient."""


class Meter:
    """Turns a step's device metrics into its record, with speed and the count of skipped steps."""

    def __init__(
        self, *, tokens: int, flops: float, peak: float | None, max_skipped: int, skipped: int = 0
    ):
        """
        Args:
            tokens: per step, padding included.
            flops: of the model per step.
            peak: FLOP/s of all devices; None where it is unknown: no MFU then.
            max_skipped: steps in a row without finite gradients that are too many.
            skipped: so many lie behind the first step.
        """
        self._tokens, self._flops, self._peak = tokens, flops, peak
        self._limit, self._skipped = max_skipped, skipped
        self._mark: float | None = None  # None: the time since then is not only this step's

    def pause(self) -> None:
        """The time until the next record includes other work: no speed for it."""
        self._mark = None

    def record(self, step: int, metrics: dict[str, jax.Array]) -> dict[str, Any]:
        """The record of a step, in the units of their names; waits until the step is done."""
        values = jax.device_get(metrics)
        now, seconds = time.monotonic(), None
        if self._mark is not None:
            seconds = now - self._mark
        self._mark = now
        self._skipped = self._skipped + 1 if values["skipped"] else 0
        record: dict[str, Any] = {"step": step, "loss": float(values["loss"])}
        if values["bytes"] > 0:
            nats, num_bytes = float(values["nats"]), float(values["bytes"])
            record["bits_per_byte"] = nats / (math.log(2) * num_bytes)
        for name in ("lr", "grad_norm"):
            record[name] = float(values[name])
        for name in ("tokens", "skipped", "tied_routers"):
            record[name] = int(values[name])
        for name in ("expert_load", "max_logit"):
            record[name] = [float(value) for value in values[name]]
        if seconds:
            record["seconds"] = seconds
            record["tokens_per_second"] = self._tokens / seconds
            record["flops_per_second"] = self._flops / seconds
            if self._peak:
                record["mfu"] = self._flops / seconds / self._peak
        return record

    def check(self, step: int) -> None:
        """Raises Diverged after too many skipped steps in a row."""
        if self._skipped >= self._limit:
            raise Diverged(
                f"loss or gradient was not finite in {self._skipped} steps in a row, up to step "
                f"{step}; lower --optim.peak-lr or look at the data, then start again"
            )
