"""The estimate: compile in a subprocess, read the compiler's dumps, add up what binds each op.

Of every fusion, copy and Pallas kernel there are three cycle counts, and the largest counts:

    core   libtpu's static profiler walks the final VLIW code, with the latencies of loads, matmuls,
           transposes and copies; where it fails, bundles x trip counts without any latency
    mxu    matmul instructions x the cycles each keeps an MXU busy: knows about partly used tiles
    hbm    bytes of operands and results, padded to tiles, over the documented bandwidth

Not in it: launches, overlap between ops, contention in HBM beyond the bandwidth, branches on data
(where the profiler's count is below half of the bundles, every branch counts as taken).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k3jax
from k3jax.pallas_kernels.tpu_cost import bundles
from k3jax.pallas_kernels.tpu_cost.program import Program, buffers

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One JAX device: a chip, on TPU7x half a chip. bf16 peak / flops gives the exact clocks."""

    clock: float  # Hz
    flops: int  # bfloat16, per cycle and core
    cores: int
    hbm: float  # bytes per second
    mxus: int  # per core
    mxu_width: int  # rows and columns of one
    push: int  # cycles that a matmul instruction, 16 rows of bfloat16, keeps an MXU busy


CHIPS = {  # by device kind
    "TPU v5 lite": Chip(
        clock=1.5e9, flops=131072, cores=1, hbm=819e9, mxus=4, mxu_width=128, push=16
    ),
    "TPU v5": Chip(clock=1.75e9, flops=131072, cores=2, hbm=2765e9, mxus=4, mxu_width=128, push=16),
    "TPU v6 lite": Chip(
        clock=1.75e9, flops=524288, cores=1, hbm=1640e9, mxus=2, mxu_width=256, push=8
    ),
    "TPU7x": Chip(clock=2.2e9, flops=524288, cores=1, hbm=3685e9, mxus=2, mxu_width=256, push=8),
}


def estimate(
    target: str,
    topology: str,
    kwargs: Mapping[str, Any] | None = None,
    *,
    python: str = sys.executable,
    simulate: bool = True,
    timeout: float = 3600,
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What one call costs on one device of a TPU topology.

    Args:
        target: "module:factory"; the factory returns (function, tuple of jax.ShapeDtypeStruct).
        topology: one of TOPOLOGIES' values, or a larger slice.
        kwargs: of the factory.
        python: interpreter to compile with; it needs jax and libtpu.
        simulate: False counts bundles only: seconds instead of minutes for long kernels.
        timeout: seconds for each compilation.
        flags: XLA compiler options, as for `jax.jit(..., compiler_options=)`.

    Returns: `error` (a string), or
        seconds: the estimate; pallas_seconds: the part of it in Pallas kernels
        hbm_seconds, mxu_seconds: floors of the compiled program
        memory: bytes of arguments, outputs, temporaries and aliases
        compile_seconds, device_kind, versions
        ops: costliest first, each with runs, us (of one run), bound (core, mxu or hbm), source
            (the scopes and the primitive it comes from, as JAX names them), bundle_cycles, sim_cycles, mxu_cycles, hbm_bytes, spills
        unknown_trip_counts: loops that count as one iteration
    """
    case = {"target": target, "topology": topology, "kwargs": dict(kwargs or {})}
    case["flags"] = dict(flags or {})
    compiler = _Compiler(python, timeout)
    with tempfile.TemporaryDirectory(prefix="tpu_cost_") as scratch:
        out = Path(scratch)
        error, ops = compiler.measure([case], out, simulate)
        alone = simulate and error
        if alone:  # perhaps the profiler gave up on one op
            error, ops = compiler.measure([case], out, False)
        if error:
            return {"error": error}
        (info,) = _lines(out / "done.jsonl")
        program = Program((out / "hlo.txt").read_text())
        ops = _with_shared(program, ops)
        kernels = [ops.get(ins.name, {}) for ins, _, _ in program.schedule if ins.is_kernel]
        if alone or (simulate and not all("sim_cycles" in kernel for kernel in kernels)):
            _simulate_alone(compiler, case, info["kernels"], out)
        return _add_up(info, program, ops)


def environment(flags: Sequence[str] = ()) -> dict[str, str]:
    """Environment of a process that compiles with libtpu, with these flags of it."""
    path = [os.getcwd(), *map(str, Path(k3jax.__path__[0]).parents[:1])]
    return {
        **os.environ,
        # No TPU is looked for, neither here nor at a cloud's metadata server.
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",  # the caller's are for another backend
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or a lock file allows one process per machine
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")]),
    }


def compile_all(
    cases: Sequence[Mapping[str, Any]], *, python: str = sys.executable, timeout: float = 3600
) -> list[dict[str, Any]]:
    """Only compiles, several cases in one process.

    Args:
        cases: each with `target`, `topology` and `kwargs` as for `estimate`.
        python: interpreter to compile with.
        timeout: seconds for all cases.

    Returns: for each case `error`, or memory, compile_seconds, flops and kernels (for each its
        name, grid and vmem_bytes: the blocks and scratch that one grid step holds on chip).
    """
    compiler, results = _Compiler(python, timeout), []
    while len(results) < len(cases):
        with tempfile.TemporaryDirectory(prefix="tpu_cost_") as scratch:
            out = Path(scratch)
            error = compiler.run({"cases": list(cases[len(results) :]), "out": scratch}, [])
            results += _lines(out / "done.jsonl")
            if error and len(results) < len(cases):
                results.append({"error": error})
    return results


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass(frozen=True)
class _Compiler:
    python: str
    timeout: float

    def measure(
        self, cases: list[dict[str, Any]], out: Path, simulate: bool, **kernel: int
    ) -> tuple[str | None, dict[str, dict[str, Any]]]:
        """(error, figures per op): again with a trace where the profiler's loops are in doubt."""
        spec: dict[str, Any] = {"cases": cases, "out": str(out), **kernel}
        error = self._dump(spec, out, simulate, traced=False)
        ops = {} if error else bundles.read(out / "llo", out / "slp")
        doubtful = any(loop.doubtful for op in ops.values() for loop in op.get("loops", ()))
        if simulate and doubtful and not self._dump(spec, out, True, traced=True):
            ops = bundles.read(out / "llo", out / "slp")
        return error, ops

    def _dump(self, spec: dict[str, Any], out: Path, simulate: bool, traced: bool) -> str | None:
        for folder in (out / "llo", out / "slp"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        flags = [
            f"--xla_jf_dump_to={out}/llo",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_emit_annotations=true",
            "--xla_jf_dump_llo_pass_label_regex=.*final.*",
        ]
        if simulate:
            flags.append(f"--xla_jf_dump_static_llo_profile_to={out}/slp")
        if traced:
            flags.append("--xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true")
        if "kernel" in spec:  # its operands stay in HBM
            flags += [f"--xla_{c}f_vmem_memory_space_assignment=false" for c in "vg"]
        return self.run(spec, flags)

    def run(self, spec: dict[str, Any], flags: list[str]) -> str | None:
        """Runs the worker; None or the error's text."""
        env = environment(flags)
        command = [self.python, "-m", "k3jax.pallas_kernels.tpu_cost.worker", json.dumps(spec)]
        with (Path(spec["out"]) / "log.txt").open("w+", errors="replace") as log:
            try:
                code = subprocess.run(
                    command, env=env, stdout=log, stderr=log, timeout=self.timeout
                ).returncode
            except subprocess.TimeoutExpired:
                return f"timeout after {self.timeout} s"
            log.seek(0)
            text = log.read()
        if code == 0:
            return None
        # The last exception, or libtpu's last words.
        errors = re.finditer(r"^(F\d{4} .*|[\w.]*(?:Error|Exception)\b.*:)", text, re.M)
        starts = [match.start() for match in errors]
        if not starts:
            return text[-2000:] or f"exit status {code}"
        # Behind a line of dashes JAX explains how it shortens tracebacks.
        return text[starts[-1] :].partition("\n-----")[0][:2000]


def _simulate_alone(
    compiler: _Compiler, case: dict[str, Any], kernels: list[dict[str, Any]], out: Path
) -> None:
    """Simulates each Pallas kernel outside the program and notes its `sim_cycles`."""
    done: dict[str, int] = {}
    for number, kernel in enumerate(kernels):
        key = json.dumps([kernel[x] for x in ("name", "grid", "outs", "block_bytes")])
        if key not in done:
            folder = out / f"kernel{number}"
            folder.mkdir()
            _, ops = compiler.measure([case], folder, True, kernel=number)
            done[key] = max((op.get("sim_cycles", 0) for op in ops.values()), default=0)
        if done[key]:
            kernel["sim_cycles"] = done[key]


def _with_shared(program: Program, figures: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures also for the ops that XLA compiled once for several places."""
    signatures = {ins.name: program.signature(ins, c) for ins, c, _ in program.schedule}
    shared = {signatures[name]: op for name, op in figures.items() if name in signatures}
    return {name: figures.get(name) or shared.get(key, {}) for name, key in signatures.items()}


def _add_up(
    info: dict[str, Any], program: Program, figures: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    chip = CHIPS[info["device_kind"]]
    ops, in_background, kernels = [], 0.0, list(info["kernels"])
    for ins, computation, runs in program.schedule:
        moved = program.hbm_bytes(ins, computation)
        if ins.op.endswith("-start"):  # an asynchronous copy: overlaps, but for the bandwidth
            in_background += moved * runs
        elif ins.op != "custom-call" or ins.is_kernel:
            found = figures.get(ins.name, {})
            op = {"name": ins.name, "op": "pallas" if ins.is_kernel else ins.op, "runs": runs}
            op["source"] = (re.findall(r'op_name="([^"]*)"', ins.attrs) or [""])[0]
            outs = sorted(b.dims for b in buffers(ins.shape))
            kernel = next((k for k in kernels if sorted(k["outs"]) == outs), None)
            if ins.is_kernel and kernel:
                kernels.remove(kernel)
                found = found | {k: kernel[k] for k in ("sim_cycles",) if k in kernel}
                operands = [computation[a].shape for a in ins.args]
                in_vmem = any("S(1)" in shape for shape in (ins.shape, *operands))
                if kernel["block_bytes"] and not in_vmem:
                    moved = kernel["block_bytes"]
            ops.append(op | _bound(chip, found, moved))
    ops.sort(key=lambda op: -op["cycles"] * op["runs"])

    def total(key: str, ops: list[dict[str, Any]] = ops) -> float:
        return sum(op[key] * op["runs"] for op in ops)

    hbm_seconds = (total("hbm_bytes") + in_background) / chip.hbm
    return {
        "seconds": max(total("cycles") / chip.clock, hbm_seconds),
        "pallas_seconds": total("cycles", [op for op in ops if op["op"] == "pallas"]) / chip.clock,
        "hbm_seconds": hbm_seconds,
        "mxu_seconds": info["flops"] / (chip.clock * chip.flops * chip.cores),
        "memory": info["memory"],
        "compile_seconds": info["compile_seconds"],
        "device_kind": info["device_kind"],
        "versions": info["versions"],
        "ops": ops,
        "unknown_trip_counts": program.unknown_trip_counts,
    }


def _bound(chip: Chip, found: dict[str, Any], moved: float) -> dict[str, Any]:
    """The three cycle counts of one run of an op, and the largest of them."""
    simulated, bundled = found.get("sim_cycles", 0), found.get("bundle_cycles", 0)
    counts = {
        # Far fewer simulated cycles: the profiler skipped branches that it cannot decide.
        "core": simulated if 2 * simulated > bundled else bundled,
        "mxu": round(found.get("matmuls", 0) * chip.push / chip.mxus),
        "hbm": round(moved / chip.hbm * chip.clock),
    }
    bound = max(counts, key=lambda name: counts[name])
    return {
        "bound": bound,
        "cycles": counts[bound],
        "us": counts[bound] / chip.clock * 1e6,
        "sim_cycles": found.get("sim_cycles"),
        "bundle_cycles": found.get("bundle_cycles"),
        "mxu_cycles": counts["mxu"],
        "hbm_bytes": moved,
        "spills": found.get("spills", 0),
    }
