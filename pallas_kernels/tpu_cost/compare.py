"""Ours and its peers on several chips: one record per estimate, as a line of JSON and in a table."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from k3jax.pallas_kernels.tpu_cost.estimate import CHIPS, TOPOLOGIES, Chip, estimate


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation of one problem."""

    op: str
    impl: str  # "k3jax pallas_tpu", "jax ragged_dot"
    problem: Mapping[str, Any]  # what is computed, "pass" included; equal for ours and the peers
    target: str  # "module:factory"
    kwargs: Mapping[str, Any]  # of the factory
    flops: float  # of the matmuls that the problem asks for: none that is masked or recomputed
    moved: float  # bytes: every input read once, every output written once
    repeats: float = 1.0  # calls of the factory's function that make up the problem
    flags: Mapping[str, Any] = field(default_factory=dict)  # XLA compiler options


def floors(chip: Chip, flops: float, moved: float) -> dict[str, float]:
    """Microseconds that the matrix units and the memory of a device need at least."""
    return {
        "mxu": round(flops / (chip.clock * chip.flops * chip.cores) * 1e6, 1),
        "hbm": round(moved / chip.hbm * 1e6, 1),
    }


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a record keeps of a report of `estimate`."""
    ops = report["ops"]
    times: dict[str, float] = {}
    for op in ops:
        times[_bound(op)] = times.get(_bound(op), 0) + op["us"] * op["runs"]
    profiled = sum(op["us"] * op["runs"] for op in ops if op.get("sim_cycles"))
    kernels = [op for op in ops if op["op"] == "pallas"]
    return {
        "device": f"{report['device_kind']}, estimated",
        "versions": report["versions"],
        "us": round(report["seconds"] * 1e6, 1),
        "pallas_us": round(report["pallas_seconds"] * 1e6, 1),
        "bound": max(times, key=lambda bound: times[bound]),
        "hbm_us": round(report["hbm_seconds"] * 1e6, 1),  # of the bytes that the program moves
        "mxu_us": round(report["mxu_seconds"] * 1e6, 1),  # of the flops that it has
        "profiled": round(profiled / sum(times.values()), 2),  # the rest has no latencies
        "spills": sum(op.get("spills", 0) for op in kernels),
        "memory": report["memory"],
        "compile_s": report["compile_seconds"],
        "kernels": [
            {
                "name": op["name"],
                "us": round(op["us"], 1),
                "runs": op["runs"],
                "bound": _bound(op),
                "spills": op.get("spills", 0),
            }
            for op in kernels
        ],
    }


def _bound(op: Mapping[str, Any]) -> str:
    """hbm, mxu, or of the core: `issue`, its slots are full; `wait`, latencies that nothing hides."""
    if op["bound"] != "core":
        return op["bound"]
    waits = (op.get("sim_cycles") or 0) > 1.25 * (op.get("bundle_cycles") or math.inf)
    return "wait" if waits else "issue"


def compare(
    cases: Iterable[Case],
    chips: Iterable[str] = tuple(TOPOLOGIES),
    *,
    python: str = sys.executable,
    simulate: bool = True,
    emit: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Estimates every case on every chip, and prints a line of JSON for each, then a table.

    Args:
        cases: ours and the peers'; those of one problem stand beside each other in the table.
        chips: names from TOPOLOGIES.
        python: interpreter to compile with; it needs jax, libtpu and the peers.
        simulate: False counts instructions without latencies.
        emit: called with each record; None prints it.

    Returns: the records. `floor_us` is that of the problem, `of_floor` floor / estimate; a failed
    case has `error` instead.
    """
    records = []
    for case in cases:
        for name in chips:
            begin = time.perf_counter()
            report = estimate(
                case.target, TOPOLOGIES[name], case.kwargs,
                python=python, simulate=simulate, flags=case.flags,
            )  # fmt: skip
            record = {"op": case.op, "impl": case.impl, "chip": name, **case.problem}
            if "error" in report:
                print(f"{record}: {report['error']}", file=sys.stderr)
                record["error"] = report["error"][:300]
            else:
                chip, found = CHIPS[report["device_kind"]], summary(report)
                for key in ("us", "pallas_us", "hbm_us", "mxu_us"):
                    found[key] = round(found[key] * case.repeats, 1)
                found["repeats"] = case.repeats  # of the kernels listed
                floor = floors(chip, case.flops, case.moved)
                record |= found | {"floor_us": floor}
                record["of_floor"] = round(max(floor.values()) / found["us"], 3)
            record["estimate_s"] = round(time.perf_counter() - begin, 1)
            (emit or _print)(record)
            records.append(record)
    show(records)
    return records


def _print(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def rows(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per problem and implementation, a column per chip: "microseconds (share of the floor)"."""
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    measured = ("chip", "device", "versions", "memory", "kernels", "floor_us", "of_floor", "error")
    for record in records:
        names = list(record)
        last = names.index("device") if "device" in record else names.index("error")
        key = {name: record[name] for name in names[:last] if name not in measured}
        row = table.setdefault(tuple(key.items()), dict(key))
        row[record["chip"]] = (
            "failed" if "error" in record else f"{record['us']:,.0f} ({record['of_floor']:.0%})"
        )
    return list(table.values())


def show(records: Iterable[Mapping[str, Any]]) -> None:
    """The table, on stderr."""
    found = rows(records)
    table = Table(title="microseconds, estimated (share of the larger floor)")
    names = list(dict.fromkeys(name for row in found for name in row))
    for name in names:
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(*(str(row.get(name, "")) for name in names))
    Console(stderr=True, width=200).print(table)
