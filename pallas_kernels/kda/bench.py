"""Measures the KDA op: `python -m k3jax.pallas_kernels.kda.bench {tpu,packed,cpu,gpu,memory,decode}`.

Correctness first: every command compares a small case with the recurrence in float64 and stops if
ours is wrong. Then a line of JSON per measurement on stdout, and a table on stderr. TPU figures are
estimates from the compiled program (`tpu_cost`), not timings. The peer is measured in the same
run where it can be imported: `uv run --extra aot --with tokamax==0.0.17 python -m ...`.
"""

import dataclasses
import importlib.metadata
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from k3jax.pallas_kernels import tpu_cost
from k3jax.pallas_kernels.kda import bench_cases as cases
from k3jax.pallas_kernels.kda import bench_tables as tables
from k3jax.pallas_kernels.kda.bench_cases import HEAD_DIM, PASSES, Problem
from k3jax.pallas_kernels.tpu_cost import compare

ALL_CHIPS = tuple(tpu_cost.TOPOLOGIES)

_records: list[dict[str, Any]] = []


def tpu(
    chips: tuple[str, ...] = ALL_CHIPS,
    shapes: tuple[tuple[int, int], ...] = ((4, 2048), (4, 8192), (12, 2048), (12, 8192)),
    backend: str = "pallas_tpu",
    peer_python: str | None = None,
    simulate: bool = True,
) -> None:
    """Estimates forward, and forward + backward, beside tokamax's mosaic kernel.

    Args:
        chips: v5e, v5p, v6e, tpu7x.
        shapes: heads and tokens, any number of pairs.
        backend: ours.
        peer_python: an interpreter with jax, libtpu and tokamax; both sides are compiled there.
            None: this one.
        simulate: False counts instructions without latencies: faster, and only for comparisons.
    """
    _check(backend, "float32", "bfloat16")
    python = peer_python or sys.executable
    impls = {f"k3jax {backend}": backend}
    if peer := _peer(python):
        impls[f"{peer} mosaic"] = "mosaic"
    for H, T in shapes:
        for chip in chips:
            for direction in PASSES:
                for name, impl in impls.items():
                    problem = Problem(T=T, H=H)
                    measured = _estimate(impl, chip, problem, direction, python, simulate)
                    _emit(bench="tpu", impl=name, **measured)
    _show("tpu")


def packed(chips: tuple[str, ...] = ALL_CHIPS, host: bool = True, simulate: bool = True) -> None:
    """Packed rows beside the unpacked one, and many short documents beside padded ones (KF-030).

    With segment_ids the layout is data: one program, hence one estimate, for all of them.

    Args:
        chips: to estimate `pallas_tpu` for.
        host: also time `chunked` on this machine, with fewer documents and heads.
        simulate: as for `tpu`.
    """
    even, uneven = (1024,) * 8, _uneven(25, 8192)
    if host:
        _check("chunked", "float32")
        small = {"H": 4, "dtype": "float32"}
        rows = {
            "one document": Problem(T=8192, **small),
            "segment_ids, 8 x 1024": Problem(T=8192, documents=even, **small),
            "segment_ids, 25 uneven": Problem(T=8192, documents=uneven, **small),
            "cu_seqlens, 25 uneven": Problem(T=8192, documents=uneven, offsets=True, **small),
        }
        groups = {"row of 8192": rows}
        groups |= {f"64 documents of {n}": _short(64, n, **small) for n in (32, 63)}
        for group, layouts in groups.items():
            for direction in PASSES:
                runs = {x: (cases.ours(p, "chunked"), p.values()) for x, p in layouts.items()}
                for layout, took in _time(runs, PASSES[direction], rounds=5).items():
                    fields = layouts[layout].fields() | {"group": group, "layout": layout}
                    fields |= {"impl": "k3jax chunked", "pass": direction}
                    _emit(bench="packed", us=round(took["ms"] * 1e3), **fields, **took)
    if chips:
        _check("pallas_tpu", "bfloat16")
    for chip in chips:
        rows = {
            "one document": Problem(T=8192, H=12),
            "segment_ids, any layout": Problem(T=8192, H=12, documents=uneven),
            "cu_seqlens, 8 x 1024": Problem(T=8192, H=12, documents=even, offsets=True),
            "cu_seqlens, 25 uneven": Problem(T=8192, H=12, documents=uneven, offsets=True),
        }
        groups = {"row of 8192": rows}
        groups |= {f"4096 documents of {n}": _short(4096, n, H=12) for n in (32, 63)}
        for group, layouts in groups.items():
            for direction in PASSES:
                for layout, problem in layouts.items():
                    fields = {"impl": "k3jax pallas_tpu", "group": group, "layout": layout}
                    measured = _estimate(
                        "pallas_tpu", chip, problem, direction, sys.executable, simulate
                    )
                    _emit(bench="packed", **fields, **measured)
    _show("packed")


def cpu(rounds: int = 7) -> None:
    """Times `chunked` and `reference` on this machine's CPU beside tokamax's xla_chunked, float32.

    Args:
        rounds: calls of each function; they take turns.
    """
    _check("chunked", "float32")
    problem = Problem(T=2048, H=4, dtype="float32")
    _side_by_side("cpu", problem, ("chunked", "reference"), rounds)
    _show("cpu")


def gpu(rounds: int = 20) -> None:
    """Times `chunked` on a GPU beside tokamax's xla_chunked, bfloat16.

    Args:
        rounds: calls of each function; they take turns.
    """
    if jax.default_backend() != "gpu":
        sys.exit(f"no GPU: this process runs on a {jax.default_backend()}")
    _check("chunked", "bfloat16")
    for B, T, H in ((1, 8192, 16), (8, 2048, 16), (1, 32768, 16), (1, 8192, 96)):
        _side_by_side("gpu", Problem(B=B, T=T, H=H), ("chunked",), rounds)
    _show("gpu")


def memory(
    tokens: tuple[int, ...] = (8192, 65536, 1048576), chips: tuple[str, ...] = ("v5e",)
) -> None:
    """Memory of the compiled forward + backward over the length, one head; nothing runs.

    Args:
        tokens: lengths.
        chips: to compile `pallas_tpu` for, beside `chunked` for this machine; v5e has 16 GiB.
    """
    _check("chunked", "float32")
    problems = [Problem(T=T, H=1, checkpoint_every=n) for n in (1, 8) for T in tokens]
    for problem in problems:
        function, args = cases.case("chunked", dataclasses.asdict(problem), True)
        compiled, seconds = _compile(function, args)
        device = jax.devices()[0].device_kind
        report = {"memory": _memory(compiled), "compile_s": seconds, "versions": _versions()}
        _emit(impl="k3jax chunked", device=device, **report, **_kept(problem, report["memory"]))
    for chip in chips:
        compiled = tpu_cost.compile_all(
            [_request("pallas_tpu", chip, problem, backward=True) for problem in problems]
        )
        for problem, report in zip(problems, compiled, strict=True):
            fields = {"impl": "k3jax pallas_tpu", "chip": chip}
            if "error" in report:
                _failed(report["error"], bench="memory", **fields, **problem.fields())
                continue
            kept = _kept(problem, report["memory"])
            fields |= {"device": report["device_kind"], "versions": report["versions"]}
            fields |= {"memory": report["memory"], "compile_s": report["compile_seconds"]}
            _emit(**fields, **kept)
    _show("memory")


def decode(requests: int = 32, heads: int = 12, chips: tuple[str, ...] = ALL_CHIPS) -> None:
    """Bytes that a decoding step moves, beside its states read and written once.

    Args:
        requests: in the batch; their states lie in a pool of twice as many.
        heads: of each.
        chips: to compile for.
    """
    _check("reference", "float32")
    for chip in chips:
        for op, window in (("step", 1), ("verify", 9)):
            arguments = {"op": op, "requests": requests, "H": heads, "window": window}
            report = tpu_cost.estimate(
                f"{cases.MODULE}:decode_case", tpu_cost.TOPOLOGIES[chip], arguments
            )
            fields = {"bench": "decode", "impl": "k3jax", "chip": chip, **arguments}
            if "error" in report:
                _failed(report["error"], **fields)
                continue
            hbm = tpu_cost.CHIPS[report["device_kind"]].hbm
            _emit(
                **fields,
                device=f"{report['device_kind']}, estimated",
                versions=report["versions"],
                us=round(report["seconds"] * 1e6, 1),
                hbm_us=round(report["hbm_seconds"] * 1e6, 1),
                moved_bytes=round(report["hbm_seconds"] * hbm),
                state_bytes_twice=2 * 4 * requests * heads * HEAD_DIM**2,
                memory=report["memory"],
                compile_s=report["compile_seconds"],
            )
    _show("decode")


# Estimates


def summary(report: Mapping[str, Any], problem: Problem, backward: bool) -> dict[str, Any]:
    """What a record keeps of a report of `tpu_cost.estimate`."""
    chip = tpu_cost.CHIPS[report["device_kind"]]
    return compare.summary(report) | {"floor_us": cases.paper_floors(chip, problem, backward)}


def _estimate(
    impl: str, chip: str, problem: Problem, direction: str, python: str, simulate: bool
) -> dict[str, Any]:
    """The fields of a record: one pass on one chip."""
    backward, begin = PASSES[direction], time.perf_counter()
    request = _request(impl, chip, problem, backward)
    report = tpu_cost.estimate(**request, python=python, simulate=simulate)
    fields = {"chip": chip, "pass": direction, **problem.fields()}
    if "error" in report:
        print(f"{impl}, {fields}: {report['error']}", file=sys.stderr)
        return fields | {"error": report["error"][:300]}
    took = round(time.perf_counter() - begin, 1)
    return fields | summary(report, problem, backward) | {"estimate_s": took}


def _request(impl: str, chip: str, problem: Problem, backward: bool) -> dict[str, Any]:
    arguments = {"impl": impl, "problem": dataclasses.asdict(problem), "backward": backward}
    return {
        "target": f"{cases.MODULE}:case",
        "topology": tpu_cost.TOPOLOGIES[chip],
        "kwargs": arguments,
    }


def _uneven(count: int, tokens: int) -> tuple[int, ...]:
    """Lengths of documents that fill a row."""
    cuts = np.random.default_rng(0).choice(np.arange(1, tokens), count - 1, replace=False)
    return tuple(int(n) for n in np.diff([0, *sorted(cuts), tokens]))


def _short(count: int, length: int, **shape: Any) -> dict[str, Problem]:
    """Short documents: each padded to 64 tokens, which is the base, and packed without padding."""
    documents = (length,) * count
    return {
        "padded to 64": Problem(T=count * 64, documents=documents, padded_to=64, **shape),
        "segment_ids": Problem(T=count * length, documents=documents, **shape),
        "cu_seqlens": Problem(T=count * length, documents=documents, offsets=True, **shape),
    }


def _kept(problem: Problem, used: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a memory record; `states_bytes` is one memory per kept chunk."""
    kept = math.ceil(problem.T / cases.CHUNK / problem.checkpoint_every)
    return {
        "bench": "memory",
        "pass": "fwd+bwd",
        **problem.fields(),
        "checkpoint_every": problem.checkpoint_every,
        "states_bytes": 4 * problem.B * kept * problem.H * HEAD_DIM**2,
        "peak_bytes": used["argument"] + used["output"] + used["temp"] - used["alias"],
    }


# Timings


def _side_by_side(bench: str, problem: Problem, backends: Sequence[str], rounds: int) -> None:
    """Times ours and the peer in turn."""
    args = problem.values()
    runs = {f"k3jax {backend}": (cases.ours(problem, backend), args) for backend in backends}
    if peer := _peer(sys.executable):
        turned = cases.head_first(args, problem.H)
        runs[f"{peer} xla_chunked"] = (cases.tokamax("xla_chunked"), turned)
    for direction, backward in PASSES.items():
        for impl, took in _time(runs, backward, rounds).items():
            _emit(bench=bench, impl=impl, **{"pass": direction}, **problem.fields(), **took)


def _time(
    runs: Mapping[str, tuple[Callable[..., Any], cases.Args]], backward: bool, rounds: int
) -> dict[str, dict[str, Any]]:
    """Median, fastest and slowest call of each function; they take turns, after one warm-up."""
    calls, results = {}, {}
    for name, (run, args) in runs.items():
        function = cases.with_gradients(run) if backward else run
        if backward:
            d_o = jax.eval_shape(run, *args)
            args = (jnp.ones(d_o.shape, d_o.dtype), *args)
        compiled, seconds = _compile(function, args)
        jax.block_until_ready(compiled(*args))
        calls[name] = (compiled, args)
        results[name] = {
            "device": jax.devices()[0].device_kind,
            "versions": _versions(),
            "compile_s": seconds,
            "memory": _memory(compiled),
        }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (compiled, args) in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            times[name].append((time.perf_counter() - begin) * 1e3)
    for name, took in times.items():
        figures = {"ms": statistics.median(took), "ms_min": min(took), "ms_max": max(took)}
        results[name] |= {key: round(value, 2) for key, value in figures.items()}
    return results


def _compile(function: Callable[..., Any], args: cases.Args) -> tuple[Any, float]:
    """The compiled function and the seconds that took."""
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    return compiled, round(time.perf_counter() - begin, 2)


def _memory(compiled: Any) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    kinds = ("argument", "output", "temp", "alias")
    return {kind: getattr(analysis, f"{kind}_size_in_bytes") for kind in kinds}


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


# Around the measurements


def _peer(python: str) -> str | None:
    name = cases.tokamax_name(python)
    if name is None:
        print(f"{python} has no tokamax: ours is measured without the peer", file=sys.stderr)
    return name


def _check(backend: str, *dtypes: str) -> None:
    """Ends the program if ours is wrong."""
    for dtype in dtypes:
        for impl, found in cases.errors(backend, dtype).items():
            _emit(bench="check", impl=impl, dtype=dtype, errors=found)
            if impl.startswith("k3jax") and not max(found.values()) <= cases.LIMIT[dtype]:
                limit = cases.LIMIT[dtype]
                sys.exit(f"{impl} in {dtype} is wrong: {found}, allowed {limit}; nothing measured")


def _emit(**record: Any) -> None:
    """Prints a measurement and keeps it for the table."""
    print(json.dumps(record), flush=True)
    _records.append(record)


def _failed(error: str, **fields: Any) -> None:
    print(f"{fields}: {error}", file=sys.stderr)
    _emit(**fields, error=error[:300])


def _show(bench: str) -> None:
    rows = tables.rows(bench, _records)
    table = Table(title=f"kda: {bench}")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(stderr=True, width=200).print(table)


def main() -> int:
    """Runs one command; 1 if a measurement failed."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # the peer warns of missing tuning on a CPU
    if sys.argv[1:2] != ["gpu"]:
        jax.config.update("jax_platforms", "cpu")  # an installed libtpu looks for a TPU
    commands = {f.__name__: f for f in (tpu, packed, cpu, gpu, memory, decode)}
    tyro.extras.subcommand_cli_from_dict(commands, prog="python -m k3jax.pallas_kernels.kda.bench")
    return int(any("error" in record for record in _records))


if __name__ == "__main__":
    sys.exit(main())
