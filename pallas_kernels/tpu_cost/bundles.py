"""The compiler's dumps of the final VLIW code: cycles, matmuls, spills and loops of every op."""

import collections
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GUARD = r"(\(!?%p\w+\), )?"  # predicate of an instruction
FUNCTION_DUMP = r"\d+-(.+)-\d+-final_(bundles|hlo-static-per-bundle-utilization)\.txt$"
DELAY_SLOTS = 4  # bundles behind a branch that still run


@dataclass
class Loop:
    start: int  # its bundles, first and last
    end: int
    depth: int
    region: str | None  # target of the branch back
    trips: int | None  # without `extra`
    extra: int  # iterations that only fill and drain the pipeline of a grid
    doubtful: bool  # libtpu's profiler may miscount it
    bundles: int = 0  # of its own, without inner loops


def _loops(bundles: list[str], marks: list[str | None], text: str) -> list[Loop]:
    branches = {}  # region -> (predicate of the branch back to it, bundle)
    for i, bundle in enumerate(bundles):
        for predicate, region in re.findall(
            r"sbr\.rel \(!%(p\w+)\) target = \$region(\d+)", bundle
        ):
            branches[region] = (predicate, i)

    def constant(value: str) -> int | None:
        if value.isdigit():
            return int(value)
        found = re.search(f"{value} = smov.u32 {GUARD}(%?\\w+)", text)
        return constant(found[2]) if found else None

    loops = []
    for i in (i for i, mark in enumerate(marks) if mark == "LB"):
        regions = re.findall(r"Start region (\d+)", bundles[i])
        region = next((r for r in regions if r in branches), None)
        test = step = entry = None  # counter < bound; counter = previous + step; previous at first
        if region:
            predicate = branches[region][0]
            test = re.search(f"%{predicate} = scmp[\\w.]* {GUARD}%(s\\w+), (%?\\w+)", text)
        if test:
            step = re.search(f"%{test[2]} = sadd.s32 {GUARD}(\\d+), %(s\\w+)", text)
        if step:
            entry = re.search(f"%{step[3]} = sphi (%s\\w+), ", text)
        bound = constant(test[3]) if test else None
        start = (constant(entry[1]) if entry else None) or 0
        trips = None
        if bound is not None:
            trips = max(1, -(-(bound - start) // int(step[2] if step else 1)))
        extra = 2 * ("iteration index, stage" in bundles[i] and (trips or 0) > 2)
        depth = re.match(">*", bundles[i])
        loops.append(
            Loop(
                start=i,
                end=branches[region][1] + DELAY_SLOTS if region else i,
                depth=len(depth[0]) if depth else 0,
                region=region,
                trips=trips and trips - extra,
                extra=extra,
                doubtful=bool(test and test[1]) or not trips,  # the exit test is predicated
            )
        )
    return loops


def _spills(table: str) -> int:
    """Spill and fill instructions, from the table of the issue slots that each bundle uses."""
    head, _, body = table.partition("UTILIZATION:")
    names = re.findall(r"\w+(?::\w+)?", head.partition("\n")[2].partition("\n")[0])
    columns = [i for i, name in enumerate(names) if name.endswith((":FILL", ":SPILL"))]
    rows = [row.split() for row in body.split("\n")]
    return sum(int(row[i]) for row in rows if len(row) == len(names) for i in columns)


def _analyse(text: str) -> dict[str, Any]:
    """Weighs every bundle by the trip counts of the loops around it."""
    parts = re.split(r"(?m)^ *(?:0x[0-9a-f]+|0) +(LB|LH|LE|PB|PF|CT)? *: ", text)
    bundles = parts[2::2]
    loops = _loops(bundles, parts[1::2], text)
    around = [[lp for lp in loops if lp.start <= i <= lp.end] for i in range(len(bundles))]
    for loop in loops:
        loop.bundles = sum(bool(lps) and lps[-1] is loop for lps in around)
    times = [math.prod(lp.trips or 1 for lp in lps) for lps in around]

    def count(pattern: str) -> int:
        return sum(n * len(re.findall(pattern, b)) for n, b in zip(times, bundles, strict=True))

    return {
        "bundle_cycles": sum(times),
        # A matmul of float32 takes 8 rows, of bfloat16 16.
        "matmuls": count(r"= vmatmul\.") - count(r"= vmatmul\.[\w.]*f32") / 2,
        "loops": loops,
    }


def _miscount(loops: list[Loop], trace: str) -> float:
    """Bundles that the loops should execute / those that the profiler's trace shows."""
    taken = collections.Counter(re.findall(r"sbr\.rel target = \$region(\d+)", trace))
    ran, due, seen, wanted = {0: 1.0}, {0: 1.0}, 1.0, 1.0  # by depth; in bundles
    for loop in loops:  # each ran once for each branch back and each time that it was entered
        entered = ran.get(loop.depth - 1, 1.0)
        ran[loop.depth] = taken[loop.region or ""] + entered * (1 - loop.extra)
        trips = loop.trips or ran[loop.depth] / max(1, entered)
        due[loop.depth] = due.get(loop.depth - 1, 1.0) * trips
        seen += loop.bundles * ran[loop.depth]
        wanted += loop.bundles * due[loop.depth]
    return wanted / seen


def read(code: Path, profile: Path) -> dict[str, dict[str, Any]]:
    """Figures of each op by name: bundle_cycles, matmuls, loops, spills and, if simulated, sim_cycles.

    Args:
        code: folder of the bundles and utilization tables.
        profile: folder of the static profiler's results and traces; may be empty.
    """
    dumps: dict[str, dict[str, str]] = {}
    for file in code.glob("*.txt"):
        match = re.match(FUNCTION_DUMP, file.name)
        if match and not match[1].startswith(("TLP", "<")):
            dumps.setdefault(match[1], {})[match[2]] = file.read_text(errors="replace")
    ops = {}
    for name, files in dumps.items():
        table = files.get("hlo-static-per-bundle-utilization", "")
        ops[name] = _analyse(files.get("bundles", "")) | {"spills": _spills(table)}
    for file in profile.glob("*.textproto"):
        text = file.read_text()
        found = re.search(r'hlo_op_name: "(.*)"\s+estimated_cycles: (\d+)', text)
        assert found, f"{file} has no estimate: {text[:200]}"
        name, cycles = found[1], int(found[2])
        if not cycles:  # some versions give up on an op like this, others abort
            continue
        trace, op = profile / f"{name}_bundles.txt", ops.setdefault(name, {})
        if trace.exists() and op.get("loops"):
            cycles = round(cycles * _miscount(op["loops"], trace.read_text(errors="replace")))
        op["sim_cycles"] = cycles
    return ops
