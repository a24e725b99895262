"""The training step on one GPU: tokens per second, MFU, memory, compile time, and where the time goes.

    python -m benchmarks.gpu.train_step mini --seq-len 8192 --batch-size 32
    python -m benchmarks.gpu.train_step mini --xla --profile               # without this GPU's kernels
    python -m benchmarks.gpu.train_step mini --xla kda experts             # two ops without them

The step, its state and its batches are those of `k3jax train CONFIG` with the same flags: real text,
all micro-batches and the optimizer. MFU counts three forward passes (`k3jax/flops.py`) at the data
sheet's dense bf16 peak (`PEAK_FLOPS`: H200 989 TFLOP/s); what is recomputed does not count. One JSON
line, and with `--profile` a table of kernel time by part of the model.
"""

import argparse
import collections
import functools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import gate
from k3jax import train, train_step
from k3jax.configs import preset
from k3jax.display import Display, show_logs
from k3jax.flags import overridden
from k3jax.flops import peak_flops
from k3jax.initial_state import initial_state
from k3jax.layers import experts, kda, latent_moe, mla
from k3jax.pallas_kernels import dispatch
from k3jax.sharding.mesh import batch_sharding

WARM = 2  # steps before the timed ones
# Functions that get a scope of their own, so that the profile tells them from what is around them.
OPS = (
    (kda, "kda_from_logits", "KDA"),
    (kda, "short_conv_streams", "short convolution"),
    (kda, "gated_rms_norm", "output norm and gate"),
    (mla, "mla_attention", "MLA attention"),
    (experts, "experts", "expert matmuls"),
    (experts, "experts_forward", "expert matmuls"),
    (experts, "experts_backward", "expert matmuls"),
    (latent_moe, "collect_stats", "routing"),
    (train_step, "cross_entropy", "head and loss"),
)
SCOPES = {  # the model's own scopes; the innermost one decides
    "kda": "KDA's projections", "mla": "MLA's projections", "attn_res": "AttnRes",
    "route": "routing", "collect_stats": "routing", "routed_experts": "sorting, latent projections",
    "shared_experts": "shared experts",
}  # fmt: skip


class Kernel(NamedTuple):
    """Of one step."""

    ms: float
    launches: int
    part: str  # of the model
    name: str
    scopes: str  # path of scopes; empty where unknown


def without_kernels(ops: list[str]) -> None:
    """From now on these ops, or all if none is named, run in the form that any device can run."""
    choose = dispatch.choose

    def chosen(op, backends, requested, *args):
        if not ops or op in ops:
            backends = {name: b for name, b in backends.items() if name not in dispatch.NATIVE}
        return choose(op, backends, requested, *args)

    dispatch.choose = chosen


def name_ops() -> None:
    """Gives the functions of `OPS` their scopes."""

    def scoped(function, name):
        @functools.wraps(function)
        def call(*args, **kwargs):
            with jax.named_scope(name.replace(" ", "_")):
                return function(*args, **kwargs)

        return call

    for module, function, name in OPS:
        setattr(module, function, scoped(getattr(module, function), name))
        SCOPES[name.replace(" ", "_")] = name


class Step:
    """A compiled training step with its state and its batches.

    Args:
        cfg: the run.
        display: what was found out before the first step is shown there.
    """

    def __init__(self, cfg: Any, display: Display):
        self.cfg, self.setup = cfg, train.prepare(cfg, display)
        step, _ = train.compiled_steps(self.setup)
        with jax.set_mesh(self.setup.mesh):
            begin = time.perf_counter()
            lowered = step.lower(self.setup.abstract, self._batch())
            self.trace_seconds = time.perf_counter() - begin
            with ThreadPoolExecutor(1) as pool:  # the state needs its own, small programs
                state = pool.submit(initial_state, cfg, self.setup.mesh, self.setup.abstract)
                begin = time.perf_counter()
                self.program = lowered.compile()
                self.compile_seconds = time.perf_counter() - begin
                self._state = state.result()

    def _batch(self) -> dict[str, jax.Array]:
        shape = (self.cfg.accumulation, -1, self.cfg.seq_len)
        rows = {name: x.reshape(shape) for name, x in next(self.setup.data).items()}
        return jax.device_put(rows, batch_sharding(self.setup.mesh))

    def run(self) -> tuple[float, float]:
        """One step: (seconds, loss)."""
        batch = jax.block_until_ready(self._batch())
        begin = time.perf_counter()
        self._state, metrics = self.program(self._state, batch)
        loss = float(metrics["loss"])
        return time.perf_counter() - begin, loss

    def measure(self, steps: int) -> dict[str, Any]:
        """Figures of `steps` steps after the warm-up."""
        for _ in range(WARM):
            self.run()
        seconds, losses = zip(*(self.run() for _ in range(steps)), strict=True)
        median, device = statistics.median(seconds), self.setup.mesh.devices.flat[0]
        tokens = self.cfg.batch_size * self.cfg.seq_len
        peak = peak_flops(device.device_kind)
        rate = tokens / median
        figures = {
            "config": self.cfg.name,
            "device": device.device_kind,
            "jax": jax.__version__,
            "seq_len": self.cfg.seq_len,
            "batch_size": self.cfg.batch_size,
            "accumulation": self.cfg.accumulation,
            "remat": self.cfg.model.remat,
            "backends": dispatch.all_used(),
            "losses": losses,
            "seconds": median,
            "spread": max(seconds) - min(seconds),
            "tokens_per_second": round(rate),
            "mfu": peak and round(rate * self.setup.flops_per_token / peak, 4),
            "trace_seconds": round(self.trace_seconds, 1),
            "compile_seconds": round(self.compile_seconds, 1),
        }
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            figures["peak_gib"] = round(stats["peak_bytes_in_use"] / 2**30, 1)
        return figures

    def profile(self) -> list["Kernel"]:
        """Device time of one step by kernel and by where the program calls it, longest first."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run()
            (path,) = Path(folder).rglob("*.xplane.pb")
            events = list(kernels(path))
        scopes = scopes_of(self.program.as_text())
        # Launched by a CUDA graph, a kernel has lost its instruction; XLA names its own kernels after it.
        scopes |= {re.sub(r"[.\-]", "_", op): path for op, path in scopes.items()}
        found: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        for name, op, ms in events:
            found[name, scopes.get(op) or scopes.get(name, "")].append(ms)
        rows = (
            Kernel(sum(ms), len(ms), part_of(name, path), name, path)
            for (name, path), ms in found.items()
        )
        return sorted(rows, reverse=True)

    def close(self) -> None:
        self.setup.data.close()


def kernels(path: Path) -> Iterator[tuple[str, str, float]]:
    """(kernel, instruction of the program, milliseconds) of all that a profile saw on its GPU."""
    data = jax.profiler.ProfileData.from_file(str(path))
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    stats = dict(event.stats)
                    yield event.name, str(stats.get("hlo_op", "")), event.duration_ns / 1e6


def scopes_of(program: str) -> dict[str, str]:
    """Instruction -> path of scopes, from a compiled program's text."""
    found = re.finditer(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.M)
    return {match[1]: match[2] for match in found}


def part_of(kernel: str, scopes: str) -> str:
    """What a kernel counts as."""
    names = re.split(r"[/()]", scopes)
    known = [name for name in names if name in SCOPES]
    if known:
        return SCOPES[known[-1]]
    if not scopes and kernel.startswith(("nvjet", "cutlass", "sm90_")):
        return "cuBLAS products in CUDA graphs"  # projections, shared experts, Newton-Schulz
    if not scopes:
        return "copies" if "mem" in kernel.lower() else "unknown"
    if {"jvp", "rematted_computation"} & set(names):
        return "the rest of the layers"
    return "optimizer"


def show(rows: list[Kernel], seconds: float, longest: int = 25) -> None:
    """Tables of parts and of the longest kernels."""
    console, total = Console(width=120), sum(row.ms for row in rows)
    parts: dict[str, float] = collections.defaultdict(float)
    single: dict[tuple[str, str], list[Kernel]] = collections.defaultdict(list)
    for row in rows:
        parts[row.part] += row.ms
        single[row.part, row.name].append(row)
    table = Table("part", "ms", "share", title=f"{total:.1f} ms of kernels, step {seconds:.3f} s")
    for part, ms in sorted(parts.items(), key=lambda kv: -kv[1]):
        table.add_row(part, f"{ms:.1f}", f"{ms / total:.1%}")
    console.print(table)
    table = Table("ms", "launches", "part", "kernel")
    sums = {key: sum(row.ms for row in found) for key, found in single.items()}
    for key, ms in sorted(sums.items(), key=lambda kv: -kv[1])[:longest]:
        launches = sum(row.launches for row in single[key])
        table.add_row(f"{ms:.2f}", str(launches), key[0], key[1][:70])
    console.print(table)


def parsed(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own arguments, and the flags of the configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config", nargs="?", default="mini")
    parser.add_argument("--timed", type=int, default=5, help="steps whose median counts")
    parser.add_argument(
        "--xla", nargs="*", metavar="OP", help="without the GPU's kernels, or those of OPs"
    )
    parser.add_argument("--profile", action="store_true")
    return parser.parse_known_args(args)


def main(args: list[str]) -> None:
    show_logs()
    own, flags = parsed(args)
    cfg = overridden(preset(own.config)(), flags, "benchmarks.gpu.train_step")
    if own.xla is not None:
        without_kernels(own.xla)
    name_ops()
    step = Step(cfg, Display(start=0, total=cfg.steps, every=1))
    gate.wait()
    try:
        figures = step.measure(own.timed)
        print(json.dumps({"xla": own.xla, **figures}), flush=True)
        if own.profile:
            show(step.profile(), figures["seconds"])
    finally:
        step.close()


if __name__ == "__main__":
    main(sys.argv[1:])
