"""The tables of `k3jax configs`: what a named experiment is, counted on its real parameter tree."""

from collections import Counter
from collections.abc import Iterable

import jax
from rich.console import Group
from rich.table import Table

from k3jax.configs import PRESETS, preset
from k3jax.configs.experiment import ExperimentConfig
from k3jax.flops import flops_per_token, forward_flops_per_token, parameter_counts, state_tree_bytes
from k3jax.train_state import init_state


def layer_kinds(layers: Iterable[tuple[str, str]]) -> str:
    """(attention, mixer) of layers by type, for example "1 KDA + dense, 8 KDA + MoE, 4 MLA + MoE"."""
    counts = Counter(layers)
    names = {"dense": "dense", "moe": "MoE"}
    return ", ".join(
        f"{n} {attention.upper()} + {names[mixer]}" for (attention, mixer), n in counts.items()
    )


def training_state_bytes(cfg: ExperimentConfig) -> int:
    """Bytes of parameters, buffers and optimizer state, from the abstract state of the first step."""
    return state_tree_bytes(
        jax.eval_shape(lambda: init_state(cfg.model, cfg.optim, jax.random.key(0)))
    )


def human_bytes(n: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.2f} TB"


def config_table(cfg: ExperimentConfig) -> Group:
    """Everything that `k3jax configs NAME` prints."""
    counts = parameter_counts(cfg.model)
    components = Table("component", "parameters", "share")
    for column in components.columns[1:]:
        column.justify = "right"
    for name, size in sorted(counts.components.items(), key=lambda item: -item[1]):
        components.add_row(name, f"{size:,}", f"{size / counts.total:.2%}")
    components.add_section()
    components.add_row("total", f"{counts.total:,}", "")
    components.add_row(
        "active per token", f"{counts.active:,}", f"{counts.active / counts.total:.2%}"
    )

    facts = Table(show_header=False)
    res = cfg.model.attn_res
    mixes = {
        "none": "none",
        "full": "every sub-layer",
        "block": f"blocks of {res.block_size} layers",
    }[res.kind]
    flops = flops_per_token(cfg.model, cfg.seq_len, counts.matmul)
    forward = forward_flops_per_token(cfg.model, cfg.seq_len, counts.matmul)
    for name, value in (
        ("layers", f"{cfg.model.num_layers}: {layer_kinds(cfg.model.layers)}"),
        ("attention residuals", mixes),
        ("width, vocabulary", f"{cfg.model.width:,}, {cfg.model.vocab_size:,}"),
        ("training state", human_bytes(training_state_bytes(cfg))),
        (
            "FLOPs per token",
            f"{forward:.4g} forward, {flops:.4g} training, at {cfg.seq_len:,} tokens",
        ),
        ("batch", f"{cfg.batch_size:,} rows of {cfg.seq_len:,} tokens, {cfg.steps:,} steps"),
    ):
        facts.add_row(name, value)
    return Group(f"[bold]{cfg.name}[/bold]", facts, components)


def presets_table() -> Table:
    """One line per named experiment."""
    table = Table("config", "layers", "parameters", "active", "what it is")
    for column in table.columns[:4]:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for name in PRESETS:
        make = preset(name)
        cfg = make()
        counts = parameter_counts(cfg.model)
        about = (make.__doc__ or "").split("\n")[0].rstrip(".")
        table.add_row(
            name, str(cfg.model.num_layers), f"{counts.total:,}", f"{counts.active:,}", about
        )
    return table
