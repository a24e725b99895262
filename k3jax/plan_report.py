"""A plan as tables in the terminal and as one HTML file that needs nothing else."""

import html as escape
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from k3jax.plan_cost import ASSUMPTIONS, Layout, Topology, mfu, work
from k3jax.plan_search import Candidate
from k3jax.sharding.mesh import AXES

if TYPE_CHECKING:
    from k3jax.plan import Plan

COLORS = {
    "parameters": "#4269d0",
    "optimizer": "#6cc5b0",
    "buffers": "#9c6b4e",
    "batch": "#9498a0",
    "gradients": "#efb118",
    "activations": "#ff725c",
    "workspace": "#a463f2",
    "temporaries": "#ff725c",
    "code": "#97bbf5",
    "compute": "#4269d0",
    "hbm": "#6cc5b0",
    "exposed collectives": "#ff725c",
    "hidden collectives": "#efb118",
}
NOTE_EVERY = 60  # seconds between lines where there is no terminal


class Waiting:
    """What goes on while the compiler works: a line that moves, or now and then a line."""

    def __init__(self, console: Console, prefix: str = ""):
        self._console, self._prefix = console, prefix
        self._status = console.status("") if console.is_terminal else None
        self._said, self._stage = 0.0, ""

    def __enter__(self):
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, stage: str, seconds: float) -> None:
        """`stage` has gone on, all in all for `seconds`."""
        text = f"{self._prefix}{stage} ({int(seconds) // 60}:{int(seconds) % 60:02})"
        if self._status is not None:
            self._status.update(text)
        elif stage != self._stage or time.monotonic() - self._said > NOTE_EVERY:
            print(text, file=sys.stderr, flush=True)
            self._said, self._stage = time.monotonic(), stage


def gib(n: float) -> str:
    """Bytes as GiB, what HBM is counted in."""
    return f"{n / 2**30:,.2f}" if n >= 2**30 / 200 or n == 0 else f"{n / 2**30:.1e}"


def seconds(t: float) -> str:
    """A time with a unit that suits it."""
    return f"{t:,.2f} s" if t >= 1 else f"{t * 1e3:,.2f} ms"


def mesh_text(sizes: dict[str, int]) -> str:
    """The axes that split something."""
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one device"


def verdict(plan: "Plan") -> str:
    """Whether it fits, in one sentence."""
    memory = plan.memory
    how = "by formula, " if plan.compiled is None else ""
    if memory.fits:
        return f"fits: {how}{gib(memory.margin)} of {gib(memory.limit)} GiB to spare on each device"
    return f"does not fit: {how}{gib(-memory.margin)} GiB above the {gib(memory.limit)} GiB of a device"


def memory_rows(plan: "Plan") -> list[tuple[str, float, bool]]:
    """(category, bytes, whether it is a part of the one above)."""
    memory = plan.memory
    rows: list[tuple[str, float, bool]] = []
    for name, size in memory.parts.items():
        rows.append((name, size, False))
        if name == "temporaries":
            rows.append(("gradients, by formula", memory.gradients, True))
            rows.append(("activations, by formula", memory.activations, True))
    return rows


def time_rows(plan: "Plan") -> list[tuple[str, float, str]]:
    """(floor, seconds, how it comes about)."""
    t, chip, work = plan.times, plan.topology.chip, plan.work
    source = "formula" if plan.by_formula else "compiled program"
    return [
        (
            "compute",
            t.compute,
            f"{work.useful:.3g} useful + {work.recomputed:.3g} repeated FLOP; of the peak "
            f"{chip.peak / 1e12:,.0f} TFLOP/s assumed {chip.layers:.0%}, attention {chip.attention:.0%}",
        ),
        ("optimizer", t.optimizer, f"Newton-Schulz {work.newton_schulz:.3g} FLOP, or its memory"),
        ("hbm", t.hbm, f"{plan.traffic.hbm / 1e9:,.0f} GB, {chip.hbm_bandwidth / 1e9:,.0f} GB/s")
        if not plan.by_formula
        else ("hbm", 0.0, "not known without a compiled program"),
        ("interconnect, exposed", t.exposed, f"nothing runs beside them in the {source}"),
        ("interconnect, hidden", t.hidden, f"beside compute in the {source}"),
    ]


def estimates(plan: "Plan") -> list[tuple[str, float, float]]:
    """(how, seconds of a step, MFU)."""
    t = plan.times
    named = (
        ("nothing overlaps", t.serial),
        ("as scheduled: the hidden collectives overlap", t.scheduled),
        ("everything overlaps", t.overlapped),
    )
    return [(name, s, plan.mfu(s)) for name, s in named]


def header(plan: "Plan") -> list[tuple[str, str]]:
    """What was planned."""
    cfg, chip = plan.cfg, plan.topology.chip
    facts = [
        ("topology", f"{plan.topology.name}: {plan.topology.num_devices:,} devices {chip.kind}"),
        ("mesh", mesh_text(plan.sizes)),
        (
            "batch",
            f"{plan.tokens:,} tokens: {cfg.batch_size:,} rows of {cfg.seq_len:,}, "
            f"{cfg.accumulation} pass{'es' if cfg.accumulation > 1 else ''}",
        ),
        ("remat", cfg.model.remat),
    ]
    if (made := plan.compiled) is not None:
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        facts.append(
            (
                "compiled",
                f"in {made.seconds:.0f} s ({made.cpu_seconds:.0f} s of CPU), {made.resident / 2**30:.1f} GiB; {versions}",
            )
        )
        chosen = (f"{op} {' and '.join(names)}" for op, names in made.backends.items())
        facts.append(("backends", ", ".join(chosen)))
    return facts


def axis_rows(plan: "Plan") -> list[tuple[str, str]]:
    """(axis, where it lies on the torus)."""
    layout = Layout(plan.topology, plan.sizes)
    return [(axis, layout.describe(axis)) for axis in AXES if plan.sizes[axis] > 1]


def notes(plan: "Plan") -> list[str]:
    """Reservations about the figures."""
    found = list(ASSUMPTIONS)
    if plan.by_formula:
        found.insert(
            0,
            "nothing compiled that fits: collectives are formulas, and the parts of the temporaries",
        )
    if loops := plan.traffic.data_loops:
        found.append(
            f"{loops} loops turn as the data wants (further rounds between unbalanced experts): counted 0 times"
        )
    return found


def show(console: Console, plan: "Plan", advice: Sequence[str]) -> None:
    """Prints the plan."""
    console.rule(f"[bold]{plan.cfg.name}[/bold] on {plan.topology.name}")
    facts = Table(show_header=False, box=None)
    for row in header(plan):
        facts.add_row(*row)
    console.print(facts)

    memory = Table("memory of a device", "GiB", "share", title=None)
    for column in memory.columns[1:]:
        column.justify = "right"
    for name, size, part in memory_rows(plan):
        style = "dim" if part else None
        share = "" if part else f"{size / plan.memory.limit:.1%}"
        memory.add_row(("  of it " if part else "") + name, gib(size), share, style=style)
    memory.add_section()
    memory.add_row("total", gib(plan.memory.total), f"{plan.memory.total / plan.memory.limit:.1%}")
    console.print(memory)
    color = "green" if plan.memory.fits else "red"
    console.print(f"[bold {color}]{verdict(plan)}[/]")

    sent = Table("collective", "axes", "runs", "GB sent", "time", "hidden")
    for column in sent.columns[2:]:
        column.justify = "right"
    for c in plan.traffic.collectives:
        sent.add_row(
            c.kind, " + ".join(c.axes), f"{c.runs:,}", f"{c.sent / 1e9:,.2f}",
            seconds(c.seconds), seconds(c.hidden),
        )  # fmt: skip
    if plan.traffic.collectives:
        console.print(sent)
        for axis, where in axis_rows(plan):
            console.print(f"  {axis} lies on {where}", markup=False, highlight=False)

    floors = Table("floor", "time", "from")
    floors.columns[1].justify = "right"
    for name, t, how in time_rows(plan):
        floors.add_row(name, seconds(t), how)
    console.print(floors)
    steps = Table("estimate of a step", "time", "tokens/s", "MFU")
    for column in steps.columns[1:]:
        column.justify = "right"
    for name, s, share in estimates(plan):
        steps.add_row(name, seconds(s), f"{plan.tokens / s:,.0f}", f"{share:.1%}")
    console.print(steps)
    console.print(f"bound by: {plan.times.bound}", highlight=False)
    console.print("[bold]what to change[/bold]")
    for line in advice:
        console.print(f"  - {line}", markup=False, highlight=False)
    console.print("[bold]assumed[/bold]")
    for line in notes(plan):
        console.print(f"  - {line}", markup=False, highlight=False, style="dim")


def show_search(
    console: Console,
    found: Sequence[Candidate],
    fitting: int,
    tried: int,
    topology: Topology,
) -> None:
    """Prints what a search chose by formula."""
    console.print(
        f"{tried:,} combinations of mesh and remat, {fitting:,} meshes should fit; the best by formula:",
        highlight=False,
    )
    table = Table("mesh", "remat", "GiB", "step", "MFU")
    for column in table.columns[2:]:
        column.justify = "right"
    for c in found:
        cfg = c.cfg
        done = work(
            cfg.model, cfg.optim, tokens=cfg.batch_size * cfg.seq_len, seq_len=cfg.seq_len,
            devices=topology.num_devices,
        )  # fmt: skip
        table.add_row(
            mesh_text(c.sizes), cfg.model.remat, gib(c.memory), seconds(c.times.scheduled),
            f"{mfu(topology.chip, done, c.times.scheduled):.1%}",
        )  # fmt: skip
    console.print(table)


# ------------------------------------------------------------------------------------------- HTML

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #bbb } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.part { color: #777 } .good { color: #1a7f37; font-weight: 600 } .bad { color: #c62828; font-weight: 600 }
.note { color: #666; font-size: .9em } svg text { font: 12px system-ui, sans-serif }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd } .part, .note { color: #999 }
  svg text { fill: #ddd } }
"""


def html(plans: Sequence["Plan"], advice: Sequence[Sequence[str]]) -> str:
    """One page with all plans, the best first."""
    first = plans[0]
    title = f"{first.cfg.name} on {first.topology.name}"
    body = "".join(_section(p, a) for p, a in zip(plans, advice, strict=True))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _section(plan: "Plan", advice: Sequence[str]) -> str:
    memory = plan.memory
    known = min(memory.gradients, max(memory.temporaries, 0))
    rest = max(memory.temporaries - known, 0)
    bar = {
        **{name: size for name, size in memory.parts.items() if name != "temporaries"},
        "gradients": known,
        "activations": min(memory.activations, rest),
        "workspace": max(rest - memory.activations, 0),
    }
    t = plan.times
    breakdown = {
        "compute": t.compute,
        "optimizer": t.optimizer,
        "hbm": max(t.hbm - t.compute - t.optimizer, 0),
        "exposed collectives": t.exposed,
        "hidden collectives": t.hidden,
    }
    limit = memory.limit
    tables = [
        _table(["memory of a device", "GiB", "share"], [
            [("of it " if part else "") + name, gib(size), f"{size / limit:.1%}"]
            for name, size, part in memory_rows(plan)
        ] + [["total", gib(memory.total), f"{memory.total / limit:.1%}"]]),
        _table(["floor", "time", "from"], [
            [name, seconds(s), how] for name, s, how in time_rows(plan)
        ], numbers=(1,)),
        _table(["estimate of a step", "time", "tokens/s", "MFU"], [
            [name, seconds(s), f"{plan.tokens / s:,.0f}", f"{share:.1%}"]
            for name, s, share in estimates(plan)
        ]),
        _table(["collective", "axes", "runs", "GB sent", "time", "hidden"], [
            [c.kind, " + ".join(c.axes), f"{c.runs:,}", f"{c.sent / 1e9:,.2f}", seconds(c.seconds),
             seconds(c.hidden)]
            for c in plan.traffic.collectives
        ], numbers=(2, 3, 4, 5)),
        _table(["axis", "where it lies on the torus"], axis_rows(plan), numbers=()),
    ]  # fmt: skip
    facts = _table(["", ""], header(plan), numbers=())
    klass = "good" if memory.fits else "bad"
    return (
        f"<h1>{_text(plan.cfg.name)} on {_text(plan.topology.name)}</h1>{facts}"
        f'<p class="{klass}">{_text(verdict(plan))}</p>'
        f"<h2>Memory</h2>{_bar(bar, limit, gib, 'GiB', limit)}{tables[0]}"
        f"<h2>Time of a step (estimate; bound by {_text(t.bound)})</h2>"
        f"{_bar(breakdown, t.serial, seconds, '', None)}{tables[2]}{tables[1]}"
        f"<h2>Collectives</h2>{tables[3]}{tables[4]}"
        f"<h2>What to change</h2><ul>{''.join(f'<li>{_text(line)}</li>' for line in advice)}</ul>"
        f'<h2>Assumed</h2><ul class="note">'
        f"{''.join(f'<li>{_text(line)}</li>' for line in notes(plan))}</ul>"
    )


def _bar(parts: dict[str, float], scale: float, show: Any, unit: str, limit: float | None) -> str:
    """A stacked bar as SVG, its legend below; a line where the limit is."""
    width, height = 880, 34
    total = sum(parts.values())
    per = width / max(scale, total, 1e-12) * 0.98
    x, pieces, legend = 0.0, [], []
    shown = [(name, size) for name, size in parts.items() if size * per >= 0.5]
    for number, (name, size) in enumerate(shown):
        color = COLORS.get(name, "#888")
        label = f"{name}: {show(size)} {unit}".strip()
        pieces.append(
            f'<rect x="{x:.1f}" y="4" width="{size * per:.1f}" height="{height - 8}" fill="{color}">'
            f"<title>{_text(label)}</title></rect>"
        )
        column, row = number % 3, number // 3
        at_x, at_y = column * 290, height + 18 + row * 20
        legend.append(
            f'<rect x="{at_x}" y="{at_y - 10}" width="12" height="12" fill="{color}"/>'
            f'<text x="{at_x + 18}" y="{at_y}">{_text(label)}</text>'
        )
        x += size * per
    if limit is not None:
        pieces.append(
            f'<line x1="{limit * per:.1f}" x2="{limit * per:.1f}" y1="0" y2="{height}" '
            f'stroke="#c62828" stroke-width="2"><title>limit {_text(show(limit))} {unit}</title></line>'
        )
    full = height + 10 + 20 * -(-len(shown) // 3) + 6
    return (
        f'<svg viewBox="0 0 {width} {full}" width="100%" role="img">{"".join(pieces)}'
        f"{''.join(legend)}</svg>"
    )


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] | None = None
) -> str:
    if not rows:
        return ""
    numeric = range(1, len(head)) if numbers is None else numbers

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numeric else ''}>{_text(value)}</{tag}>"
            for i, value in enumerate(row)
        )

    top = f"<tr>{cells('th', head)}</tr>" if any(head) else ""
    lines = "".join(
        f"<tr{' class=part' if row[0].startswith('of it ') else ''}>{cells('td', row)}</tr>"
        for row in rows
    )
    return f"<table>{top}{lines}</table>"


def _text(value: str) -> str:
    return escape.escape(value)
