"""The optimizer as one table: what updates each parameter, in which blocks, with decay or not."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3jax.optim.muon import Blocks, path_name, scale_by_per_head_muon


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Muon for matrices, AdamW for the rest; the values are Kimi K2's where K3 discloses none."""

    peak_lr: float = 2e-4  # learning rate after the warm-up
    final_lr: float = 2e-5  # learning rate at the end of the cosine
    warmup_fraction: float = 0.01  # of all steps
    weight_decay: float = 0.1  # decoupled: times the learning rate, not the update scale
    momentum: float = 0.95  # Muon's mu
    nesterov: bool = True  # orthogonalise mu M + G, not M
    per_head: bool = True  # Q, K and V projections head by head; False: as whole matrices
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # products inside Newton-Schulz
    adam_b1: float = 0.9  # decay of AdamW's first moment
    adam_b2: float = 0.95  # decay of AdamW's second moment
    adam_eps: float = 1e-8  # added to the root of the second moment
    clip_norm: float | None = 1.0  # largest norm of the whole gradient; None: no clipping
    qk_clip: float | None = 100.0  # largest attention logit that MLA may keep; None: no QK-Clip
    router_optimizer: Literal["muon", "adamw"] = "muon"  # of the router matrix [D, E]
    max_skipped_steps: int = 10  # steps in a row without finite gradients before the run stops

    def __post_init__(self):
        for name in ("peak_lr", "adam_eps"):
            _require(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "above 0")
        for name in ("clip_norm", "qk_clip"):
            value = getattr(self, name)
            _require(name, value, value is None or 0 < value < math.inf, "above 0, or None")
        _require("final_lr", self.final_lr, 0 <= self.final_lr <= self.peak_lr, "from 0 to peak_lr")
        _require("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "0 or more")
        for name in ("warmup_fraction", "momentum", "adam_b1", "adam_b2"):
            value = getattr(self, name)
            _require(name, value, 0 <= value < 1, "at least 0 and below 1")
        for name, known in (
            ("ns_dtype", ("bfloat16", "float32")),
            ("router_optimizer", ("muon", "adamw")),
        ):
            value = getattr(self, name)
            _require(name, repr(value), value in known, " or ".join(known))
        _require("max_skipped_steps", self.max_skipped_steps, self.max_skipped_steps >= 1, ">= 1")


def _require(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise ValueError(f"optim.{name} is {value}; it must be {wanted}")


class Rule(NamedTuple):
    """One row of the table; `blocks` is None for AdamW."""

    pattern: str  # matches the whole path
    blocks: Blocks | None
    decay: bool


class Row(NamedTuple):
    """What the table says about one parameter."""

    path: str
    shape: tuple[int, ...]
    optimizer: Literal["muon", "adamw"]
    blocks: list[tuple[int, int, int]]  # (number of matrices, A, B) per part; empty for AdamW
    decay: bool


LAYER = r"layers_\d+_to_\d+/layer_\d+"
NORM = r"input_layernorm|post_attention_layernorm|(self_attention|mlp)_res/norm"
ATTENTION_NORM = r"o_norm|q_a_layernorm|kv_a_layernorm"

# Axes of a layer's weight; a stack of layers has one more in front, which negative axes ignore.
MATRIX = Blocks((-2,), (-1,))  # [A, B], and [E, A, B] expert by expert
PER_HEAD = Blocks((-3,), (-1,))  # [A, H, B] head by head
INTO_HEADS = Blocks((-3,), (-2, -1))  # [A, H K] as one matrix
OUT_OF_HEADS = Blocks((-3, -2), (-1,))  # [H V, B] as one matrix


def rules(cfg: OptimConfig, qk_nope_dim: int) -> tuple[Rule, ...]:
    """The table (training.md §2.4, §2.5). Exactly one rule must match each parameter.

    No decay for what has no scale to lose: norms, AttnRes queries, and the gate's A_log and
    dt_bias, which decay would pull towards other half-lives. Convolution filters do decay: they are
    weights, and K3 reports 0.1 throughout.

    Args:
        cfg: optimizer settings.
        qk_nope_dim: key channels at the front of each head of kv_b_proj; the rest are values.
    """
    head = PER_HEAD if cfg.per_head else INTO_HEADS
    keys_and_values = PER_HEAD._replace(cuts=(qk_nope_dim,)) if cfg.per_head else INTO_HEADS
    return (
        Rule(r"embed_tokens/embedding|lm_head/kernel", None, True),
        Rule(r"(norm|output_attn_res/norm)/weight", None, False),
        Rule(rf"{LAYER}/({NORM})/weight", None, False),
        Rule(rf"{LAYER}/self_attn/({ATTENTION_NORM})/weight", None, False),
        Rule(rf"{LAYER}/block_sparse_moe/routed_expert_norm/weight", None, False),
        Rule(rf"output_attn_res/proj|{LAYER}/(self_attention|mlp)_res/proj", None, False),
        Rule(rf"{LAYER}/self_attn/(A_log|dt_bias)", None, False),
        Rule(rf"{LAYER}/self_attn/[qkv]_conv1d/kernel", None, True),
        Rule(rf"{LAYER}/self_attn/([qkv]|q_b)_proj/kernel", head, True),
        Rule(rf"{LAYER}/self_attn/kv_b_proj/kernel", keys_and_values, True),
        Rule(rf"{LAYER}/self_attn/(f|f_b|g|g_b)_proj/kernel", INTO_HEADS, True),
        Rule(rf"{LAYER}/self_attn/o_proj/kernel", OUT_OF_HEADS, True),
        Rule(rf"{LAYER}/self_attn/(q_a|f_a|g_a|b)_proj/kernel", MATRIX, True),
        Rule(rf"{LAYER}/self_attn/kv_a_proj_with_mqa/kernel", MATRIX, True),
        Rule(rf"{LAYER}/mlp/(gate|up|down)_proj/kernel", MATRIX, True),
        Rule(rf"{LAYER}/block_sparse_moe/experts/w[123]", MATRIX, True),
        Rule(rf"{LAYER}/block_sparse_moe/shared_experts/(gate|up|down)_proj/kernel", MATRIX, True),
        Rule(rf"{LAYER}/block_sparse_moe/routed_expert_(down|up)_proj/kernel", MATRIX, True),
        Rule(
            rf"{LAYER}/block_sparse_moe/gate/kernel",
            MATRIX if cfg.router_optimizer == "muon" else None,
            True,
        ),
    )


def match_rule(table: tuple[Rule, ...], path: str, shape: tuple[int, ...]) -> Rule:
    """The one rule for a parameter.

    Raises:
        ValueError: if no rule or more than one matches, or if the rank is not the rule's. The
            rank tells a layout the rule was not written for, such as heads fused into one axis.
    """
    found = [rule for rule in table if re.fullmatch(rule.pattern, path)]
    if len(found) != 1:
        what = "no rule" if not found else f"{len(found)} rules"
        raise ValueError(
            f"optimizer: {what} for parameter {path} {list(shape)}; name it in exactly one rule "
            "of k3jax/optim/build.py"
        )
    (rule,) = found
    if rule.blocks is not None:
        axes = -min(rule.blocks.inputs + rule.blocks.outputs)
        rank = axes + 1 + ("/experts/" in path)  # 1: the axis of the stack
        if len(shape) != rank:
            raise ValueError(
                f"optimizer: parameter {path} has shape {list(shape)}; its rule needs {rank} axes"
            )
    return rule


def optimizer_table(params: Any, cfg: OptimConfig, *, qk_nope_dim: int) -> list[Row]:
    """One row per parameter, in tree order; raises ValueError as `match_rule` does.

    Args:
        params: nested dict of arrays or of their shapes.
        cfg: optimizer settings.
        qk_nope_dim: key channels per head of kv_b_proj.
    """
    table = rules(cfg, qk_nope_dim)
    rows = []
    for key_path, leaf in jax.tree.leaves_with_path(params):
        path = path_name(key_path)
        rule = match_rule(table, path, leaf.shape)
        parts = [] if rule.blocks is None else rule.blocks.shapes(leaf.shape)
        rows.append(Row(path, leaf.shape, "muon" if parts else "adamw", parts, rule.decay))
    return rows


def format_table(rows: list[Row]) -> str:
    """The table as text, one parameter per line."""
    width = max(len(row.path) for row in rows)
    lines = []
    for row in rows:
        blocks = " + ".join(f"{n} x [{a}, {b}]" for n, a, b in row.blocks)
        decay = "decay" if row.decay else "no decay"
        line = f"{row.path:<{width}}  {row.shape!s:<24}  {row.optimizer:<5}  {decay:<8}  {blocks}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def build_optimizer(
    cfg: OptimConfig, params: Any, *, qk_nope_dim: int
) -> optax.GradientTransformation:
    """The whole update but for the learning rate, which the training step multiplies with:

        W <- W - eta (u + lambda W)      u: Muon's or Adam's direction          (training.md §2.1)

    A step counter inside the optimizer would stand still on skipped steps while the run goes on;
    with eta outside there is one counter. Moments are float32 for any storage type.

    Args:
        cfg: optimizer settings.
        params: nested dict of arrays or of their shapes; only paths and shapes are read.
        qk_nope_dim: key channels per head of kv_b_proj.

    Returns: a transformation of float32 gradients; `update` needs the parameters.
    Raises:
        ValueError: for a parameter that is not matched by exactly one rule.
    """
    table = rules(cfg, qk_nope_dim)
    matched = jax.tree.map_with_path(
        lambda path, leaf: match_rule(table, path_name(path), leaf.shape), params
    )
    is_rule = {"is_leaf": lambda x: isinstance(x, Rule)}
    blocks = {path_name(p): r.blocks for p, r in jax.tree.leaves_with_path(matched, **is_rule)}
    muon = scale_by_per_head_muon(
        blocks, momentum=cfg.momentum, nesterov=cfg.nesterov, ns_dtype=cfg.ns_dtype
    )
    adam = optax.scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps)
    labels = jax.tree.map(lambda r: "muon" if r.blocks else "adamw", matched, **is_rule)
    decays = jax.tree.map(lambda r: r.decay, matched, **is_rule)
    chain = optax.chain(
        optax.identity() if cfg.clip_norm is None else optax.clip_by_global_norm(cfg.clip_norm),
        optax.partition({"muon": muon, "adamw": adam}, labels),
        optax.add_decayed_weights(cfg.weight_decay, decays),
    )

    def init(params):
        return chain.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))

    return optax.GradientTransformation(init, chain.update)
