"""The table of `k3jax inspect`: what a checkpoint in the official layout holds, by component, from headers alone."""

import contextlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from k3jax.convert_hf import Placed
from k3jax.official_audit import Audit, audit
from k3jax.official_config import is_k3
from k3jax.release import write_headers
from k3jax.safetensors_files import SafetensorsFolder
from k3jax.summary import human_bytes, layer_kinds

WIDE = 120  # columns for a table of the release in lines
LINES = 2.0  # seconds between plain lines where there is no terminal


@dataclass
class Part:
    """One row: tensors of one component that become the same kind of thing."""

    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)


def component(layers: tuple[tuple[str, str], ...], name: str) -> str:
    """The component of a tensor, by its name without the text model's prefix."""
    for start, found in (
        ("vision_tower.", "vision tower"),
        ("mm_projector.", "projector"),
        ("model.embed_tokens.", "embedding"),
        ("lm_head.", "head"),
    ):
        if name.startswith(start):
            return found
    if "_res_norm." in name or "_res_proj." in name:
        return "attention residuals"
    if ".self_attn." in name:
        attention, _ = layers[int(name.split(".", 3)[2])]
        return f"{attention.upper()} layers"
    for inside, found in (
        (".mlp.", "dense layers"),
        (".block_sparse_moe.gate.", "routers"),
        (".block_sparse_moe.routed_expert_", "latent projections"),
        (".block_sparse_moe.shared_experts.", "shared experts"),
        (".block_sparse_moe.experts.", "routed experts"),
    ):
        if inside in name:
            return found
    return "norms"


def parts(folder: SafetensorsFolder, found: Audit) -> dict[tuple[str, str], Part]:
    """(component, what it becomes) -> tensors, parameters and bytes, in the order of the model."""
    rows: dict[tuple[str, str], Part] = {}
    layers, skip = found.cfg.layers, len(found.prefix)
    plain = found.cfg.param_dtype
    becomes = {"plain": f"parameters, {plain}", "float32": "parameters, float32"}
    for placed in found.text:
        buffer = "4-bit weights" if placed.entry.dtype == "uint8" else "buffers, float32"
        kind = buffer if placed.entry.buffer else becomes[placed.entry.dtype]
        row = rows.setdefault((component(layers, placed.name[skip:]), kind), Part())
        _count(row, folder, placed.name, _parameters(placed, found))
    for name in found.carried:
        row = rows.setdefault((component(layers, name), "kept for the export"), Part())
        _count(row, folder, name, math.prod(folder.tensors[name].shape))
    return rows


def _count(row: Part, folder: SafetensorsFolder, name: str, parameters: int) -> None:
    info = folder.tensors[name]
    row.tensors += 1
    row.parameters += parameters
    row.bytes += info.end - info.begin
    row.dtypes.add(info.dtype)


def _parameters(placed: Placed, found: Audit) -> int:
    """Numbers that a tensor holds: two in each packed byte, none in scales and padding."""
    if placed.name.endswith(".weight_scale"):
        return 0
    if placed.name.endswith(".A_log"):
        return found.cfg.kda.num_heads
    return math.prod(placed.entry.shape) * (2 if placed.name.endswith(".weight_packed") else 1)


def table(folder: SafetensorsFolder, found: Audit, width: int) -> Group:
    """All that `k3jax inspect` prints, on so many columns: from 80 on, no word is cut."""
    rows = parts(folder, found)
    shown = Table("component", "tensors", "dtypes", "parameters", "bytes", "becomes")
    if width < WIDE:  # the release's numbers leave no room for lines
        shown.box, shown.show_edge, shown.pad_edge = box.SIMPLE_HEAD, False, False
        shown.collapse_padding = True
    for column in (shown.columns[0], shown.columns[5]):
        column.min_width = 11  # "projections", "parameters,"
    for column in (shown.columns[1], shown.columns[3], shown.columns[4]):
        column.justify, column.no_wrap = "right", True
    for (name, becomes), row in rows.items():
        dtypes = ", ".join(sorted(row.dtypes))
        shown.add_row(
            name, f"{row.tensors:,}", dtypes, f"{row.parameters:,}", f"{row.bytes:,}", becomes
        )
    shown.add_section()
    parameters = sum(row.parameters for row in rows.values())
    shown.add_row("total", f"{len(folder.tensors):,}", "", f"{parameters:,}", f"{folder.total_bytes:,}")  # fmt: skip

    cfg, text = found.cfg, folder.config.get("text_config", folder.config)
    family = "Kimi K3" if is_k3(text) else "Kimi Linear"
    experts = "no routed experts"
    if cfg.moe is not None:
        stored = {"mxfp4": "4 bits (MXFP4)", "plain": cfg.param_dtype}[cfg.moe.weights]
        experts = f"{cfg.moe.num_experts} routed experts per layer, stored in {stored}"
    facts = Table(show_header=False, box=None)
    for name, value in (
        ("model", f"{family}{', with a vision tower' if found.carried else ''}"),
        ("layers", f"{cfg.num_layers}: {layer_kinds(cfg.layers)}"),
        ("width, vocabulary", f"{cfg.width:,}, {cfg.vocab_size:,}"),
        ("experts", experts),
        ("A_log", f"padded with zeros to {cfg.kda.head_dim}" if found.padded_a_log else "per head"),
        ("files", f"{len(folder.files)}, {human_bytes(folder.total_bytes)}"),
    ):
        facts.add_row(name, value)
    return Group(f"[bold]{folder.path}[/bold]", facts, shown)


@contextlib.contextmanager
def counted(console: Console, what: str) -> Generator[Callable[[int, int], None]]:
    """Progress over files: gives a function of (files done, files in all)."""
    if console.is_terminal:
        columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    began = last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > LINES:
            last = now
            left = (now - began) / done * (total - done)
            console.print(f"{what} {done}/{total}  left {left:.0f} s", highlight=False)

    yield line


def inspect(source: str, console: Console) -> None:
    """Audits a checkpoint and prints its table; UserError if it does not fit its config."""
    with counted(console, "headers read") as on_file:
        folder = SafetensorsFolder(source, on_file=on_file)
    console.print(table(folder, audit(folder), console.width))


def inspect_release(destination: str, console: Console) -> None:
    """Writes the release without its weights, then audits and prints it as `inspect` does a whole one."""
    with counted(console, "headers written") as on_file:
        write_headers(destination, on_file=on_file)
    with counted(console, "headers read") as on_file:
        folder = SafetensorsFolder(destination, payload=False, on_file=on_file)
    console.print(table(folder, audit(folder), console.width))
