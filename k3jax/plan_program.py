"""The training step compiled for TPUs that are not there, and what its program says.

    python -m k3jax.plan_program SPEC

is the process that compiles: libtpu reads its flags once, and the compiler's memory goes back to the
machine when it ends. SPEC is a JSON file: `config`, `topology`, and `out`, the folder for `stage` (one
word, what it is doing), `hlo.txt` and `info.json`.
"""

import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3jax.configs.experiment import ExperimentConfig
from k3jax.errors import UserError
from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.tpu_cost import environment
from k3jax.pallas_kernels.tpu_cost.program import FREE, SIZES, Computation, Instruction, Program
from k3jax.plan_cost import Collective, Layout, collective_seconds, sent_bytes
from k3jax.run_dir import from_json, to_json
from k3jax.sharding.mesh import AXES

CLOCK = (
    1.75e9  # Hz, of the cycles that fusions are estimated at: within a fifth for every generation
)
POLL = 0.5  # seconds between looks at the compiler
# Gathers are compiled for the TensorCore alone: for the SparseCores too, a step of many layers takes
# a third more time.
FLAGS = ("--xla_tpu_offload_gather_to_sparsecore=false",)
KINDS = (
    *("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all", "all-to-all"),
    "collective-permute",
)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Of one device. `arguments` are bytes by category; `needed` is known of a program too large."""

    arguments: dict[str, float]
    memory: dict[str, float] | None  # allocated, peak of it in use, code; None: it does not fit
    needed: float  # bytes
    program: str  # path of the HLO text, "" where there is none
    seconds: float  # to trace and compile
    cpu_seconds: float  # of all cores, for the same
    resident: float  # bytes of the compiling process at its peak
    versions: dict[str, str]
    backends: dict[str, list[str]]  # of each op


def compile_step(
    cfg: ExperimentConfig,
    topology: str,
    folder: Path,
    progress: Callable[[str, float], None] = lambda stage, seconds: None,
) -> Compiled:
    """Compiles the training step of `cfg` for a topology in a child process.

    Args:
        cfg: the run; its mesh has no -1.
        topology: name of a slice, as libtpu knows it.
        folder: for the program's text.
        progress: called a few times a second with what is going on and since when.

    Raises: UserError where libtpu is absent or refuses the topology, or a shape does not divide.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"libtpu, the TPU compiler, is not installed in {sys.prefix}: "
            'pip install "k3jax[aot]" (no TPU needed)'
        )
    spec = {"config": to_json(cfg), "topology": topology, "out": str(folder)}
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "k3jax.plan_program", str(folder / "spec.json")]
    begin = time.monotonic()
    with (folder / "log.txt").open("w+", errors="replace") as log:
        # glibc gives every thread of the compiler an arena, and what one frees no other uses.
        env = {**environment(FLAGS), "MALLOC_ARENA_MAX": "2"}
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            while child.poll() is None:
                stage = folder / "stage"
                progress(
                    stage.read_text() if stage.exists() else "starting", time.monotonic() - begin
                )
                time.sleep(POLL)
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        text = log.read()
    info_file = folder / "info.json"
    if not info_file.exists():
        last = [line for line in text.splitlines() if line.strip()][-30:]
        raise RuntimeError(
            f"the compiling process ended with status {child.returncode}:\n" + "\n".join(last)
        )
    info = json.loads(info_file.read_text())
    if "refused" in info:
        raise UserError(info["refused"])
    return Compiled(**info)


def main(spec: Mapping[str, Any]) -> None:
    """In the child process."""
    import resource
    from importlib import metadata

    import jax
    from jax.experimental import topologies

    from k3jax.sharding.mesh import batch_sharding, make_mesh
    from k3jax.train_state import abstract_state
    from k3jax.train_step import make_train_step

    out, begin = Path(spec["out"]), time.monotonic()

    def finish(info: dict[str, Any]) -> None:
        (out / "info.json").write_text(json.dumps(info))

    def stage(name: str) -> None:
        (out / "stage").write_text(name)

    cfg = from_json(ExperimentConfig, spec["config"])
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=spec["topology"]
        ).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        return finish({"refused": f"topology {spec['topology']!r}: libtpu says {reason}"})
    stage("laying out the state")
    try:
        mesh = make_mesh(cfg.mesh, devices)
        state = abstract_state(cfg.model, cfg.optim, mesh)
    except ValueError as error:  # sizes that do not divide
        return finish({"refused": str(error)})
    rows = (cfg.accumulation, cfg.batch_size // cfg.accumulation, cfg.seq_len)
    one = jax.ShapeDtypeStruct(rows, np.int32, sharding=batch_sharding(mesh))
    batch = {"tokens": one, "segment_ids": one}

    def held(tree: Any) -> float:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )

    arguments = {
        "parameters": held(state.params),
        "optimizer": held(state.opt_state),
        "batch": held(batch),
    }
    arguments["buffers"] = held(state) - arguments["parameters"] - arguments["optimizer"]
    with jax.set_mesh(mesh):
        stage("tracing")
        step = jax.jit(  # as the training loop does
            make_train_step(cfg, mesh=mesh),
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
        )
        traced = step.trace(state, batch)
        stage("lowering")
        lowered = traced.lower(lowering_platforms=("tpu",))
        del traced
        stage("compiling")
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            found = too_large(str(error))
            if found is None:
                raise
            compiled, needed = None, found[0] + found[1] * sum(arguments.values())
        else:
            needed = 0.0
    memory, program = None, ""
    if compiled is not None:
        stage("reading the program")
        found, text = compiled.memory_analysis(), compiled.as_text()
        assert found is not None
        assert text is not None
        # `temp_size_in_bytes` is something else: it may be above what the device has.
        memory = {
            "allocated": found.total_allocation_bytes,
            "peak": found.peak_memory_in_bytes,
            "code": found.generated_code_size_in_bytes,
        }
        needed = memory["allocated"] + memory["code"]
        program = str(out / "hlo.txt")
        Path(program).write_text(text)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    finish(
        {
            "arguments": arguments,
            "memory": memory,
            "needed": needed,
            "program": program,
            "seconds": round(time.monotonic() - begin, 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "resident": usage.ru_maxrss * 1024,
            "backends": dispatch.all_used(),
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        }
    )


def too_large(message: str) -> tuple[float, bool] | None:
    """(bytes, whether of the temporaries alone) that a program needs, from libtpu's message.

    None for another message.
    """
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    for pattern in (r"[Uu]sed ([\d.]+)([KMGT]?) of", r"\(([\d.]+)([KMGT]?)\) exceeds"):
        if found := re.search(pattern, message):
            return float(found[1]) * units[found[2]], "temporaries" in message
    raise RuntimeError(f"libtpu reports a program too large in another form: {message[:300]}")


# ------------------------------------------------------------------------------ reading the program


@dataclass(frozen=True)
class Traffic:
    """What the compiled program moves in one step, of one device."""

    collectives: tuple[Collective, ...]
    hbm: float  # bytes
    data_loops: int  # loops whose length the data decides; they count as not entered


def read_program(text: str, layout: Layout) -> Traffic:
    """Collectives by mesh axis with their bytes and times, and the bytes in memory.

    Loops count as often as they turn. One whose length is not in the program (further rounds of an
    exchange between unbalanced experts) counts as not entered.
    """
    program, chip = Program(text), layout.topology.chip
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    hbm, loops = 0.0, 0
    for ins, computation, at in _walk(program, program.entry, Visit("main", 1, chip.clock)):
        kind = ins.op.removesuffix("-start")
        if ins.op == "while":
            loops += 1
        elif kind in KINDS:
            beside = at.beside if at.beside is not None else at.intervals.get(ins.name, 0.0)
            if "chain_id=" in ins.attrs:  # one of the fusions that share a collective with compute
                if not any("AsyncCollectiveStart" in i.attrs for i in computation.values()):
                    continue
                beside = math.inf
            if kind == "all-reduce" and at.computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            axes = group_axes(ins.attrs, layout.sizes)
            if not axes:
                continue
            box = layout.box(axes)
            operands = [_bytes(computation[a].shape) for a in ins.args if a in computation]
            # Ragged: input and output buffer; what is sent is no more than either holds.
            size = min(operands[:2]) if kind == "ragged-all-to-all" else sum(operands)
            taken = collective_seconds(kind, size, box, chip)
            each = (1, sent_bytes(kind, size, box.size), taken, min(taken, beside))
            total = totals.setdefault((kind, axes), [0, 0.0, 0.0, 0.0])
            totals[kind, axes] = [a + at.times * b for a, b in zip(total, each, strict=True)]
        elif not at.fused and at.beside is None:
            hbm += at.times * program.hbm_bytes(ins, computation)
    found = [Collective(*key, int(runs), *rest) for key, (runs, *rest) in totals.items()]
    found.sort(key=lambda c: -c.seconds)
    return Traffic(tuple(found), hbm, loops)


class Visit(NamedTuple):
    """Where an instruction runs."""

    computation: str
    times: int
    clock: float  # Hz
    fused: bool = False  # inside a fusion
    beside: float | None = None  # inside something asynchronous: seconds of compute beside it
    intervals: Mapping[str, float] = {}  # the same by the start of what is asynchronous here


def _walk(
    program: Program, computation: Computation, at: Visit
) -> Iterator[tuple[Instruction, Computation, Visit]]:
    """The instructions as they run, fusions and what is in them; `while` only where it is not entered."""
    at = at._replace(intervals=_intervals(computation, at.clock))
    for ins in computation.values():
        attrs = ins.attrs.split("metadata=")[0]
        if ins.op == "while" and (trips := _trips(program, attrs)) is not None:
            (body,) = re.findall(r"body=%?([\w.\-]+)", attrs)
            inner = at._replace(computation=body, times=at.times * trips)
            yield from _walk(program, program.computations[body], inner)
            continue
        calls = ins.op in ("call", "conditional", "async-start", "call-start")
        if not calls and ins.op not in FREE and not ins.op.endswith(("-done", "-update")):
            yield ins, computation, at
        if calls or ins.op == "fusion":
            inner = at._replace(fused=at.fused or ins.op == "fusion")
            if ins.op.endswith("-start"):
                inner = inner._replace(beside=at.intervals.get(ins.name, 0.0))
            for name in re.findall(r"%([\w.\-]+)", attrs):
                if name in program.computations:
                    yield from _walk(
                        program, program.computations[name], inner._replace(computation=name)
                    )


def _intervals(computation: Computation, clock: float) -> dict[str, float]:
    """Seconds of compute between begin and end of what is asynchronous, by its start.

    The program is in the order of its schedule. A start without operands begins where the update
    gives it some. Fusions say how long they take; a kernel or a loop does not, and hides anything.
    """
    found: dict[str, float] = {}
    begun: dict[str, str] = {}  # start, update -> start
    running: dict[str, float] = {}  # by start
    for ins in computation.values():
        if ins.op.endswith("-start"):
            begun[ins.name] = ins.name
            running[ins.name] = 0.0
        elif ins.op.endswith(("-update", "-done")):
            start = next((begun[a] for a in ins.args if a in begun), None)
            if start is None:
                continue
            if ins.op.endswith("-update"):
                begun[ins.name] = start
                running[start] = 0.0
            else:
                found[start] = running.pop(start, 0.0)
        elif running:
            took = math.inf if ins.is_kernel or ins.op == "while" else 0.0
            if cycles := re.search(r'"estimated_cycles":"(\d+)"', ins.attrs):
                took = int(cycles[1]) / clock
            for start in running:
                running[start] += took
    return found


def _trips(program: Program, attrs: str) -> int | None:
    """How often a loop turns, if the program says so."""
    if known := re.search(r"known_trip_count\D*(\d+)", attrs):
        return int(known[1])
    (condition,) = re.findall(r"condition=%?([\w.\-]+)", attrs)
    inside = program.computations.get(condition, {}).values()
    constants = [ins.raw for ins in inside if ins.op == "constant"]
    return int(constants[0]) if len(constants) == 1 and constants[0].isdigit() else None


def _bytes(shape: str) -> float:
    """Bytes of an HLO shape without padding."""
    return sum(
        math.prod(int(d) for d in dims.split(",") if d) * SIZES[dtype]
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
        if dtype in SIZES
    )


def group_axes(attrs: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that a collective runs over, in the order of the mesh; those of size 1 left out.

    Groups come as names of axes, as a reshaped and transposed range, as lists of devices, or as pairs
    of sender and receiver; device numbers are positions in the mesh.
    """
    if named := re.search(r"replica_groups=mesh\[[^\]]*\] \{([^}]*)\}", attrs):
        names = re.findall(r"'(\w+)'", named[1])
        return tuple(axis for axis in AXES if axis in names and sizes[axis] > 1)
    shape = [sizes[axis] for axis in AXES]
    if found := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", attrs):
        pairs = np.array(
            [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d, ]+)\}", found[1])]
        )
        ends = np.array(np.unravel_index(pairs, shape))  # axis, pair, end
        differ = (ends[..., 0] != ends[..., 1]).any(-1)
        return tuple(axis for axis, moved in zip(AXES, differ, strict=True) if moved)
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attrs):
        groups, dims = ([int(n) for n in found[i].split(",")] for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found[3]:
            ids = ids.transpose([int(n) for n in found[3].split(",")])
        members = ids.reshape(groups)[0]
    elif found := re.search(r"replica_groups=\{\{([\d, ]+)\}", attrs):
        members = np.array([int(n) for n in found[1].split(",")])
    else:  # {}: everyone
        members = np.arange(math.prod(shape))
    places = np.unravel_index(members, shape)
    return tuple(
        axis for axis, place in zip(AXES, places, strict=True) if len(np.unique(place)) > 1
    )


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for `compile_step`."""
    return tempfile.TemporaryDirectory(prefix="k3jax_plan_")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
