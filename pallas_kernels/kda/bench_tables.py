"""The tables of `bench`: rows made from its records, for the terminal and for benchmarks/kda."""

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Rows = list[dict[str, Any]]


def tpu_rows(records: Sequence[Record]) -> Rows:
    """Ours beside the peer, and what cannot be undercut."""
    pairs: dict[tuple, dict[str, Record]] = {}
    for r in records:
        side = "ours" if r["impl"].startswith("k3jax") else "peer"
        pairs.setdefault((r["chip"], r["H"], r["T"], r["pass"]), {})[side] = r
    rows = []
    for (chip, H, T, direction), pair in pairs.items():
        ours, peer = pair.get("ours", {}), pair.get("peer", {})
        rows.append(
            {
                "chip": chip,
                "H, T": f"{H}, {T}",
                "pass": direction,
                "ours us": ours.get("us", "-"),
                "peer us": peer.get("us", "-"),
                "ours / peer": f"{ours['us'] / peer['us']:.2f}" if ours and peer else "-",
                "ns/token/head": f"{ours['us'] * 1e3 / T / H:.2f}" if ours else "-",
                "bound": ours.get("bound", "-"),
                "floors: vector, mxu, hbm": ", ".join(
                    map(str, (ours or peer)["floor_us"].values())
                ),
                "bytes moved, us: ours, peer": f"{ours.get('hbm_us', '-')}, {peer.get('hbm_us', '-')}",
                "spills: ours, peer": f"{ours.get('spills', '-')}, {peer.get('spills', '-')}",
                "temp MiB: ours, peer": f"{_temp(ours)}, {_temp(peer)}",
            }
        )
    return rows


def packed_rows(records: Sequence[Record]) -> Rows:
    """Every layout beside the first of its group."""
    base: dict[tuple, float] = {}
    for r in records:
        base.setdefault((r["device"], r["group"], r["pass"]), r["us"])
    kept = ("device", "H", "group", "pass", "layout", "T", "us")
    return [
        {key: r[key] for key in kept}
        | {"ratio": f"{r['us'] / base[r['device'], r['group'], r['pass']]:.2f}"}
        for r in records
    ]


def timed_rows(records: Sequence[Record]) -> Rows:
    """Every implementation beside the first of its problem, which is ours."""
    problem = ("device", "B", "T", "H", "dtype", "pass")
    base: dict[tuple, float] = {}
    for r in records:
        base.setdefault(tuple(r[key] for key in problem), r["ms"])
    return [
        {key: r[key] for key in (*problem, "impl", "ms", "ms_min", "ms_max")}
        | {"over ours": f"{r['ms'] / base[tuple(r[key] for key in problem)]:.2f}"}
        | {"temp MiB": _temp(r), "compile s": r["compile_s"]}
        for r in records
    ]


def memory_rows(records: Sequence[Record]) -> Rows:
    """What a gradient keeps: arguments and results, one memory per kept chunk, and the rest."""
    rows = []
    for r in records:
        used, states = r["memory"], r["states_bytes"]
        rows.append(
            {key: r[key] for key in ("device", "impl", "T", "checkpoint_every")}
            | {
                "arguments, results MiB": (used["argument"] + used["output"]) >> 20,
                "temporaries MiB": used["temp"] >> 20,
                "of them memories MiB": states >> 20,
                "rest, bytes per token": round((used["temp"] - states) / r["T"]),
                "peak GiB": f"{r['peak_bytes'] / 2**30:.2f}",
            }
        )
    return rows


def decode_rows(records: Sequence[Record]) -> Rows:
    """Bytes moved beside those of the states, read and written once."""
    return [
        {key: r[key] for key in ("chip", "op", "requests", "H", "window")}
        | {
            "states, twice, MiB": f"{r['state_bytes_twice'] / 2**20:.1f}",
            "moved MiB": f"{r['moved_bytes'] / 2**20:.1f}",
            "ratio": f"{r['moved_bytes'] / r['state_bytes_twice']:.2f}",
            "bytes moved, us": r["hbm_us"],
            "us": r["us"],
        }
        for r in records
    ]


def _temp(record: Record) -> str:
    return f"{record['memory']['temp'] / 2**20:.0f}" if record else "-"


TABLES = {
    "tpu": tpu_rows,
    "packed": packed_rows,
    "cpu": timed_rows,
    "gpu": timed_rows,
    "memory": memory_rows,
    "decode": decode_rows,
}


def rows(bench: str, records: Sequence[Record]) -> Rows:
    """The table of one command; failed measurements are left out."""
    return TABLES[bench]([r for r in records if r["bench"] == bench and "error" not in r])
