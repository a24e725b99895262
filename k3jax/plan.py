"""`k3jax plan`: will a run fit a slice of TPUs, how long should a step take, what to change.

The real training step is compiled for the real topology, without a TPU (`plan_program`), and what the
program says is priced (`plan_cost`). A search ranks meshes by formulas first (`plan_search`).
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.configs import preset
from k3jax.configs.experiment import ExperimentConfig
from k3jax.errors import UserError, disk_errors
from k3jax.flags import overridden
from k3jax.plan_cost import (
    Layout,
    Times,
    Topology,
    Work,
    mfu,
    parse_topology,
    times,
    work,
)
from k3jax.plan_program import Compiled, Traffic, compile_step, read_program, scratch
from k3jax.plan_search import (
    Candidate,
    activation_bytes,
    expected_collectives,
    search,
    state_bytes,
)
from k3jax.sharding.mesh import AXES, ROWS, MeshConfig, mesh_sizes

Progress = Callable[[str, float], None]
EXPOSED = 0.25  # of the step: more time in collectives that nothing hides is worth advice
ROOMY = 0.35  # of the memory: more left over is worth advice


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ExperimentConfig):
    """A run, and where it might run."""

    topology: str | None = None  # slice of TPUs, for example tpu7x:8x16x16; sizes in chips
    batch_tokens: int | None = None  # tokens per optimizer step; None: batch_size * seq_len
    out: str | None = None  # report to write, an .html file
    save: str | None = None  # figures to write, a .json file
    hlo: str | None = None  # compiled program to write, a .txt file
    search: bool = False  # try mesh sizes (axes above 1 stay) and remat policies
    best: int = 3  # of a search: how many to compile
    compiled: bool = True  # compile; without, everything is by formula, in seconds

    def __post_init__(self):
        if self.batch_tokens is not None:
            rows, rest = divmod(self.batch_tokens, self.seq_len)
            if rest or rows < 1:
                near = max(round(self.batch_tokens / self.seq_len), 1) * self.seq_len
                raise ValueError(
                    f"batch_tokens={self.batch_tokens} is not a number of rows of seq_len="
                    f"{self.seq_len} tokens: use {near}"
                )
            object.__setattr__(self, "batch_size", rows)
        if self.best < 1:
            raise ValueError(f"best is {self.best}; it must be at least 1")
        for name, ending in (("out", ".html"), ("save", ".json"), ("hlo", ".txt")):
            path = getattr(self, name)
            if path is not None and not path.endswith(ending):
                raise ValueError(f"{name} is {path!r}; it must end in {ending}")
        super().__post_init__()

    @property
    def run(self) -> ExperimentConfig:
        """The run alone."""
        names = (field.name for field in dataclasses.fields(ExperimentConfig))
        return ExperimentConfig(**{name: getattr(self, name) for name in names})


def request(cfg: ExperimentConfig) -> PlanConfig:
    """The request to plan a run, all else at its default."""
    return PlanConfig(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device."""

    parameters: float
    optimizer: float
    buffers: float  # router biases and counters
    batch: float
    temporaries: float  # gradients, activations, workspace
    code: float
    limit: float  # what the compiler lets a program use
    gradients: float  # by formula, a part of the temporaries
    activations: float  # likewise: one pass

    @property
    def parts(self) -> dict[str, float]:
        """What adds up to the whole."""
        names = ("parameters", "optimizer", "buffers", "batch", "temporaries", "code")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def margin(self) -> float:
        """Bytes left over; below 0 the step does not fit."""
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        return self.margin >= 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    cfg: ExperimentConfig  # its mesh without -1
    topology: Topology
    sizes: dict[str, int]
    memory: Memory
    work: Work
    traffic: Traffic  # by formula where nothing was compiled
    times: Times
    compiled: Compiled | None

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.cfg.batch_size * self.cfg.seq_len

    @property
    def by_formula(self) -> bool:
        """Whether the collectives are those of formulas: nothing was compiled, or it did not fit."""
        return self.compiled is None or self.compiled.memory is None

    def mfu(self, seconds: float) -> float:
        return mfu(self.topology.chip, self.work, seconds)

    def axis_bytes(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by axes."""
        found: dict[str, float] = {}
        for c in self.traffic.collectives:
            name = " + ".join(c.axes)
            found[name] = found.get(name, 0) + c.sent
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def figures(self) -> dict[str, Any]:
        """For JSON; `test_plan.py` derives all but `program` again."""
        t, kept = self.times, ("parameters", "optimizer", "buffers", "batch", "gradients")
        return {
            "devices": self.topology.num_devices,
            "mesh": self.sizes,
            "tokens": self.tokens,
            "remat": self.cfg.model.remat,
            "state_bytes": {name: round(getattr(self.memory, name)) for name in kept},
            "work": {k: float(f"{v:.6g}") for k, v in dataclasses.asdict(self.work).items()},
            "floors": {"compute": round(t.compute, 4), "optimizer": round(t.optimizer, 4)},
            "program": None if self.by_formula else self._program(),
        }

    def _program(self) -> dict[str, Any]:
        assert self.compiled is not None
        t = self.times
        return {
            "memory": {k: round(v) for k, v in self.memory.parts.items()},
            "total_bytes": round(self.memory.total),
            "limit_bytes": round(self.memory.limit),
            "hbm_bytes": round(self.traffic.hbm),
            "sent_bytes": {k: round(v) for k, v in self.axis_bytes().items()},
            "collectives": [
                {
                    **c._asdict(),
                    "sent": round(c.sent),
                    "seconds": round(c.seconds, 5),
                    "hidden": round(c.hidden, 5),
                }
                for c in self.traffic.collectives
            ],
            "seconds": {
                "hbm": round(t.hbm, 4),
                "exposed": round(t.exposed, 4),
                "hidden": round(t.hidden, 4),
                **{how: round(getattr(t, how), 4) for how in ("serial", "scheduled", "overlapped")},
            },
            "mfu": {
                how: round(self.mfu(getattr(t, how)), 4)
                for how in ("serial", "scheduled", "overlapped")
            },
            "compile": {
                "seconds": self.compiled.seconds,
                "cpu_seconds": self.compiled.cpu_seconds,
                "resident_bytes": round(self.compiled.resident),
                **self.compiled.versions,
            },
        }


def plan(asked: PlanConfig) -> int:
    """Runs the command; returns the exit code, 0 also where nothing fits."""
    from rich.console import Console

    from k3jax.plan_report import Waiting, html, show, show_search

    console, begin = Console(), time.monotonic()
    topology = parse_topology(asked.topology)
    cfg = asked.run
    if not asked.search:
        with Waiting(console) as progress:
            made = [make_plan(cfg, topology, asked.compiled, progress, asked.hlo)]
    else:
        with Waiting(console) as progress:
            progress("searching", 0)
            found, fitting, tried = search(cfg, topology, best=asked.best)
            if not found:
                raise UserError(
                    f"no mesh of {topology.num_devices} devices divides {_rows(cfg)} rows per pass "
                    f"of {cfg.seq_len} tokens: change --batch-tokens or --accumulation"
                )
        show_search(console, found, fitting, tried, topology)
        made = []
        for number, candidate in enumerate(found if asked.compiled else found[:1], 1):
            with Waiting(console, f"{number} of {len(found)}: ") as progress:
                made.append(_made(candidate, topology, asked, progress))
        made.sort(key=lambda p: (not p.memory.fits, p.times.scheduled))
    for one in reversed(made):  # the best last: it stays on the screen
        show(console, one, advice(one))
    best = made[0]
    if asked.out:
        _write(asked.out, html(made, [advice(one) for one in made]))
        console.print(f"report: {asked.out}", markup=False, soft_wrap=True)
    if asked.save:
        record = {"command": command(asked, best), "figures": best.figures()}
        _write(asked.save, json.dumps(record, indent=1) + "\n")
        console.print(f"figures: {asked.save}", markup=False, soft_wrap=True)
    console.print(f"planned in {time.monotonic() - begin:.0f} s", markup=False)
    return 0


def _made(candidate: Candidate, topology: Topology, asked: PlanConfig, progress: Progress) -> Plan:
    return make_plan(candidate.cfg, topology, asked.compiled, progress, asked.hlo)


def _write(path: str, text: str) -> None:
    with disk_errors(f"{path} not written"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def make_plan(
    cfg: ExperimentConfig,
    topology: Topology,
    compiled: bool,
    progress: Progress = lambda stage, seconds: None,
    hlo: str | None = None,
) -> Plan:
    """The plan of one mesh.

    Args:
        cfg: the run.
        topology: where.
        compiled: whether to compile; without, by formula.
        progress: as for `compile_step`.
        hlo: file for the compiled program.

    Raises: UserError for what does not divide.
    """
    try:
        sizes = mesh_sizes(cfg.mesh, topology.num_devices)
        sizes = {axis: sizes[axis] for axis in AXES}
        held = state_bytes(cfg, sizes)
    except ValueError as error:
        raise UserError(str(error)) from error
    _check_batch(cfg, sizes)
    cfg = dataclasses.replace(cfg, mesh=MeshConfig(**sizes))
    layout = Layout(topology, sizes)
    activations, gradients = activation_bytes(cfg, sizes), held.pop("gradients")
    found, traffic = None, Traffic(expected_collectives(cfg, layout), 0.0, 0)
    temporaries, code = gradients + activations, 0.0
    if compiled:
        with scratch() as folder:
            found = compile_step(cfg, topology.name, Path(folder), progress)
            if found.memory is not None:
                if hlo is not None:
                    _write(hlo, Path(found.program).read_text())
                traffic = read_program(Path(found.program).read_text(), layout)
        held, code = dict(found.arguments), (found.memory or {}).get("code", 0.0)
        temporaries = found.needed - sum(held.values()) - code
    done = work(
        cfg.model,
        cfg.optim,
        tokens=cfg.batch_size * cfg.seq_len,
        seq_len=cfg.seq_len,
        devices=topology.num_devices,
    )
    return Plan(
        cfg=cfg,
        topology=topology,
        sizes=sizes,
        memory=Memory(
            **held,
            temporaries=temporaries,
            code=code,
            limit=topology.chip.hbm,
            gradients=gradients,
            activations=activations,
        ),
        work=done,
        traffic=traffic,
        times=times(
            topology.chip,
            done,
            traffic.collectives,
            parameters=held["parameters"],
            hbm_bytes=traffic.hbm,
        ),
        compiled=found,
    )


def _rows(cfg: ExperimentConfig) -> int:
    """Of one pass."""
    return cfg.batch_size // cfg.accumulation


def _check_batch(cfg: ExperimentConfig, sizes: Mapping[str, int]) -> None:
    ways = 1
    for axis in ROWS:
        ways *= sizes[axis]
    if _rows(cfg) % ways:
        near = max(round(_rows(cfg) / ways), 1) * ways * cfg.accumulation * cfg.seq_len
        raise UserError(
            f"{cfg.batch_size * cfg.seq_len} tokens in rows of {cfg.seq_len} and accumulation="
            f"{cfg.accumulation} make {_rows(cfg)} rows per pass, which do not divide over "
            f"{' x '.join(f'{axis} {sizes[axis]}' for axis in ROWS)} = {ways}: use --batch-tokens "
            f"{near}, or split tokens with --mesh.context"
        )
    if cfg.seq_len % sizes["context"]:
        raise UserError(
            f"seq_len={cfg.seq_len} does not divide over mesh.context={sizes['context']}: use a divisor"
        )


def command(asked: PlanConfig, made: Plan) -> list[str]:
    """Arguments that make this plan again: what differs from the named configuration."""
    default, cfg = preset(asked.name)(), made.cfg
    flags = [asked.name, "--topology", made.topology.name]
    flags += ["--batch-tokens", str(made.tokens), "--seq-len", str(cfg.seq_len)]
    cfg = dataclasses.replace(cfg, batch_size=default.batch_size, seq_len=default.seq_len)
    return flags + _differences(default, cfg, "--")


def _differences(old: Any, new: Any, prefix: str) -> list[str]:
    found = []
    for field in dataclasses.fields(new):
        a, b = getattr(old, field.name), getattr(new, field.name)
        flag = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(b) and type(a) is type(b):
            found += _differences(a, b, f"{flag}.")
        elif a != b:
            values = b if isinstance(b, tuple) else (b,)
            found += (
                [flag, *(str(v) for v in values)]
                if not isinstance(b, bool)
                else [flag if b else f"{prefix}no-{field.name.replace('_', '-')}"]
            )
    return found


def from_command(args: list[str]) -> PlanConfig:
    """The request that `args` describe, the configuration's name first."""
    return overridden(request(preset(args[0])()), args[1:], f"k3jax plan {args[0]}")


def advice(made: Plan) -> list[str]:
    """What to change, most important first."""
    memory, t, cfg, sizes = made.memory, made.times, made.cfg, made.sizes
    ways = made.topology.num_devices
    found = []
    rows_each = _rows(cfg) // (sizes["data"] * sizes["fsdp"] * sizes["expert"])
    if not memory.fits:
        short = f"{-memory.margin / 2**30:.1f} GiB too much"
        state = memory.parameters + memory.optimizer + memory.gradients
        if state > memory.limit / 2 and sizes["data"] > 1:
            found.append(f"{short}: the state is replicated {sizes['data']} times; --mesh.data 1 and "
                         f"--mesh.fsdp {sizes['fsdp'] * sizes['data']} shard it")  # fmt: skip
        elif state > memory.limit / 2:
            found.append(f"{short}: state and gradients alone take {state / 2**30:.1f} GiB; use more than "
                         f"{ways} devices, or a larger --mesh.fsdp")  # fmt: skip
        elif cfg.model.remat in ("none", "dots"):
            found.append(f"{short}: --model.remat outputs keeps less of each layer")
        elif rows_each > 1:
            found.append(f"{short}: --accumulation {cfg.accumulation * 2} halves the {rows_each} rows "
                         "that a device has at a time")  # fmt: skip
        else:
            found.append(f"{short} with one row at a time: --mesh.context {sizes['context'] * 2} halves "
                         "the tokens of a device, --mesh.tensor its heads")  # fmt: skip
            if cfg.model.remat != "offload":
                found.append(
                    "--model.remat offload keeps inputs and outputs of layers in host memory"
                )
    slow = [c for c in made.traffic.collectives if c.seconds > EXPOSED / 2 * t.scheduled]
    if t.bound == "interconnect" or t.exposed > EXPOSED * t.scheduled:
        for c in slow:
            over = " + ".join(c.axes)
            if c.kind.endswith("all-to-all") and "expert" in c.axes:
                text = (f"a smaller --mesh.expert (now {sizes['expert']}): the bisection of its part of "
                        "the torus bounds an exchange")  # fmt: skip
            elif (
                c.kind in ("all-gather", "reduce-scatter") and cfg.accumulation > 1 and memory.fits
            ):
                text = f"--accumulation below {cfg.accumulation}: parameters are gathered for each pass"
            elif c.kind in ("all-gather", "reduce-scatter") and "fsdp" in c.axes:
                text = ("a larger --batch-tokens, or a larger --mesh.expert: more tokens or fewer "
                        "parameters for each gather")  # fmt: skip
            elif "tensor" in c.axes:
                text = f"a smaller --mesh.tensor (now {sizes['tensor']})"
            else:
                continue
            found.append(f"{c.kind} over {over} takes {c.seconds:.2f} s: {text}")
    if memory.fits and memory.margin > ROOMY * memory.limit:
        free = f"{memory.margin / 2**30:.0f} GiB are free"
        if cfg.accumulation > 1:
            found.append(
                f"{free}: --accumulation {max(cfg.accumulation // 2, 1)} makes passes larger"
            )
        elif cfg.model.remat in ("full", "offload"):
            found.append(f"{free}: --model.remat routed repeats less, or use fewer devices")
    if t.bound == "hbm":
        found.append("memory traffic bounds the step: more tokens per device and pass amortise the "
                     "weights that each pass reads")  # fmt: skip
    return list(dict.fromkeys(found)) or [f"nothing stands out: the step is bound by {t.bound}"]
