"""Official checkpoint names and layouts to the parameter tree and back (checkpoint format, sections 2, 4 and 6).

One table, `layer_entries` and `model_entries`, says for every official tensor where it lives, how it is laid out and what
type it has; reading, writing and auditing all walk that table.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax.layers.kda import KDAConfig
from k3jax.layers.latent_moe import LatentMoEConfig
from k3jax.layers.mla import MLAConfig
from k3jax.model import K3Config
from k3jax.pallas_kernels.mxfp4 import GROUP
from k3jax.stacks import locate
from k3jax.train_state import abstract_model

Tree = dict  # nested dict of arrays


class Entry(NamedTuple):
    """One official tensor.

    name: official name inside its module, for example "self_attn.q_proj.weight".
    path: leaf in the layer's (or the model's) parameter tree.
    shape: official shape.
    load, save: official array -> our layout, and back.
    dtype: float32 whatever the checkpoint, uint8, or "plain": the one type of all its other tensors.
    expert: position on the leaf's expert axis, if the leaf stacks experts.
    buffer: the leaf is a buffer, not a parameter.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]
    dtype: Literal["plain", "float32", "uint8"] = "plain"
    expert: int | None = None
    buffer: bool = False


def _same(
    name: str,
    path: str,
    *shape: int,
    official: tuple[int, ...] | None = None,
    dtype: Literal["plain", "float32", "uint8"] = "plain",
    buffer: bool = False,
) -> Entry:
    """The same values in the same order, under another shape if `official` is given."""
    official = official or shape
    return Entry(
        name,
        tuple(path.split("/")),
        official,
        lambda x: x.reshape(shape),
        lambda x: x.reshape(official),
        dtype,
        buffer=buffer,
    )


def _linear(name: str, path: str, ins: tuple[int, ...], outs: tuple[int, ...]) -> Entry:
    """Official [out, in] to [*in, *out]: transposed, with heads split off (head-major rows and columns)."""
    rows, cols = int(np.prod(outs)), int(np.prod(ins))
    return Entry(
        name,
        tuple(path.split("/")),
        (rows, cols),
        lambda x: np.ascontiguousarray(x.T).reshape(*ins, *outs),
        lambda x: np.ascontiguousarray(x.reshape(cols, rows).T),
    )


def _kernel(module: str, ins: tuple[int, ...], outs: tuple[int, ...]) -> Entry:
    return _linear(f"{module}.weight", f"{module.replace('.', '/')}/kernel", ins, outs)


def _a_log(cfg: KDAConfig, padded: bool) -> Entry:
    """One value per head; the release pads the vector to `head_dim` with exact zeros."""
    heads = cfg.num_heads
    size = max(cfg.head_dim, heads) if padded else heads

    def load(x):
        if x.shape[0] > heads and np.any(x[heads:] != 0):
            raise ValueError(
                f"A_log has {x.shape[0]} entries for {heads} heads and its tail is not zero: not a padded per-head vector"
            )
        return x[:heads]

    return Entry(
        "self_attn.A_log",
        ("self_attn", "A_log"),
        (size,),
        load,
        lambda x: np.pad(x, (0, size - heads)),
        "float32",
    )


def _kda_entries(cfg: KDAConfig, d: int, padded_a_log: bool) -> Iterator[Entry]:
    h, k = cfg.num_heads, cfg.head_dim
    for stream in "qkv":
        yield _kernel(f"self_attn.{stream}_proj", (d,), (h, k))
        if cfg.conv_size is not None:
            w = cfg.conv_size
            yield Entry(
                f"self_attn.{stream}_conv1d.weight",
                ("self_attn", f"{stream}_conv1d", "kernel"),
                (h * k, 1, w),
                lambda x, w=w: np.ascontiguousarray(x.reshape(h, k, w).transpose(2, 0, 1)),
                lambda x, w=w: np.ascontiguousarray(x.transpose(1, 2, 0)).reshape(h * k, 1, w),
                "float32",
            )
    if cfg.gate_rank is None:
        yield _kernel("self_attn.f_proj", (d,), (h, k))
    else:
        yield _kernel("self_attn.f_a_proj", (d,), (cfg.gate_rank,))
        yield _kernel("self_attn.f_b_proj", (cfg.gate_rank,), (h, k))
    yield _kernel("self_attn.b_proj", (d,), (h,))
    yield _a_log(cfg, padded_a_log)
    yield _same("self_attn.dt_bias", "self_attn/dt_bias", h, k, official=(h * k,), dtype="float32")
    if cfg.out_gate_rank is None:
        yield _kernel("self_attn.g_proj", (d,), (h, k))
    else:
        yield _kernel("self_attn.g_a_proj", (d,), (cfg.out_gate_rank,))
        yield _kernel("self_attn.g_b_proj", (cfg.out_gate_rank,), (h, k))
    yield _same("self_attn.o_norm.weight", "self_attn/o_norm/weight", k, dtype="float32")
    yield _kernel("self_attn.o_proj", (h, k), (d,))


def _mla_entries(cfg: MLAConfig, d: int) -> Iterator[Entry]:
    h, qk, v = cfg.num_heads, cfg.qk_nope_dim + cfg.qk_shared_dim, cfg.v_dim
    if cfg.q_rank is None:
        yield _kernel("self_attn.q_proj", (d,), (h, qk))
    else:
        yield _kernel("self_attn.q_a_proj", (d,), (cfg.q_rank,))
        yield _same("self_attn.q_a_layernorm.weight", "self_attn/q_a_layernorm/weight", cfg.q_rank)
        yield _kernel("self_attn.q_b_proj", (cfg.q_rank,), (h, qk))
    yield _kernel("self_attn.kv_a_proj_with_mqa", (d,), (cfg.kv_rank + cfg.qk_shared_dim,))
    yield _same("self_attn.kv_a_layernorm.weight", "self_attn/kv_a_layernorm/weight", cfg.kv_rank)
    yield _kernel("self_attn.kv_b_proj", (cfg.kv_rank,), (h, cfg.qk_nope_dim + v))
    if cfg.out_gate:
        yield _kernel("self_attn.g_proj", (d,), (h, v))
    yield _kernel("self_attn.o_proj", (h, v), (d,))


def _feed_forward_entries(module: str, d: int, f: int) -> Iterator[Entry]:
    yield _kernel(f"{module}.gate_proj", (d,), (f,))
    yield _kernel(f"{module}.up_proj", (d,), (f,))
    yield _kernel(f"{module}.down_proj", (f,), (d,))


def _expert_entries(weights: str, module: str, latent: int, f: int) -> Iterator[Entry]:
    """Tensors of one routed expert, whose number is missing in the names."""
    for leaf, ins, outs in (("w1", latent, f), ("w3", latent, f), ("w2", f, latent)):
        name, path = f"{module}.experts.{{}}.{leaf}", f"{module}/experts/{leaf}"
        if weights == "plain":
            yield _linear(f"{name}.weight", path, (ins,), (outs,))
            continue
        for part, size in (("packed", ins // 2), ("scale", ins // GROUP)):
            yield _same(
                f"{name}.weight_{part}", f"{path}/{part}", outs, size, dtype="uint8", buffer=True
            )


def moe_entries(cfg: LatentMoEConfig, d: int, module: str = "block_sparse_moe") -> Iterator[Entry]:
    """Official tensors of one expert layer."""
    e, f, latent = cfg.num_experts, cfg.ffn_dim, cfg.latent_dim or d
    yield _kernel(f"{module}.gate", (d,), (e,))
    bias = f"{module}.gate.e_score_correction_bias"
    yield _same(bias, f"{module}/router_bias", e, dtype="float32", buffer=True)
    if cfg.latent_dim is not None:
        yield _kernel(f"{module}.routed_expert_down_proj", (d,), (latent,))
        yield _kernel(f"{module}.routed_expert_up_proj", (latent,), (d,))
    if cfg.latent_norm:
        yield _same(
            f"{module}.routed_expert_norm.weight", f"{module}/routed_expert_norm/weight", latent
        )
    for entry in _expert_entries(cfg.weights, module, latent, f):
        # "experts.{}.w1.weight": the layout is one for all experts
        yield from (entry._replace(name=entry.name.format(j), expert=j) for j in range(e))
    if cfg.num_shared:
        yield from _feed_forward_entries(f"{module}.shared_experts", d, f * cfg.num_shared)


def layer_entries(cfg: K3Config, index: int, *, padded_a_log: bool) -> Iterator[Entry]:
    """Official tensors of one decoder layer, names relative to the layer."""
    attention, mixer = cfg.layers[index]
    d = cfg.width
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _same(f"{norm}.weight", f"{norm}/weight", d)
    if cfg.attn_res.kind != "none":
        for site in ("self_attention_res", "mlp_res"):
            yield _same(f"{site}_norm.weight", f"{site}/norm/weight", d)
            yield _same(f"{site}_proj.weight", f"{site}/proj", d, official=(1, d))
    yield from (
        _kda_entries(cfg.kda, d, padded_a_log) if attention == "kda" else _mla_entries(cfg.mla, d)
    )
    if mixer == "dense":
        yield from _feed_forward_entries("mlp", d, cfg.dense_ffn_dim)
    else:
        assert cfg.moe is not None
        yield from moe_entries(cfg.moe, d)


def model_entries(cfg: K3Config) -> Iterator[Entry]:
    """Official tensors outside the layers."""
    d, x = cfg.width, cfg.vocab_size
    yield _same("model.embed_tokens.weight", "embed_tokens/embedding", x, d)
    yield _same("model.norm.weight", "norm/weight", d)
    if cfg.attn_res.kind != "none":
        yield _same("model.output_attn_res_norm.weight", "output_attn_res/norm/weight", d)
        yield _same("model.output_attn_res_proj.weight", "output_attn_res/proj", d, official=(1, d))
    if not cfg.tie_embeddings:
        yield _linear("lm_head.weight", "lm_head/kernel", (d,), (x,))


class Placed(NamedTuple):
    """An entry with its full official name and its place in the tree; `index` selects on stacked leading axes."""

    entry: Entry
    name: str
    path: tuple[str, ...]
    index: tuple[int, ...]


def all_entries(cfg: K3Config, *, prefix: str = "", padded_a_log: bool = False) -> Iterator[Placed]:
    """Every official tensor of the text model, with where it lives.

    Args:
        cfg: the model.
        prefix: in front of every name; the release has "language_model.".
        padded_a_log: A_log as the release stores it (see `_a_log`).
    """
    for entry in model_entries(cfg):
        yield Placed(entry, prefix + entry.name, entry.path, ())
    for i in range(cfg.num_layers):
        stack, layer, repetition = locate(cfg, i)
        for entry in layer_entries(cfg, i, padded_a_log=padded_a_log):
            expert = () if entry.expert is None else (entry.expert,)
            name = f"{prefix}model.layers.{i}.{entry.name}"
            yield Placed(entry, name, (stack, layer, *entry.path), (repetition, *expert))


def leaf_name(placed: Placed) -> str:
    """Path of the leaf in a training state, for example "params/norm/weight"."""
    return "/".join(("buffers" if placed.entry.buffer else "params", *placed.path))


def leaf_shapes(cfg: K3Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every leaf of a model by `leaf_name`, with its stacked axes."""
    _, params, buffers = abstract_model(cfg)
    found: dict[str, Any] = flatten_dict({"params": params, "buffers": buffers}, sep="/")
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in found.items()}


def to_leaf(placed: Placed, tensor: np.ndarray, dtype: Any) -> np.ndarray:
    """A tensor as its leaf keeps it: our layout, in the leaf's own dtype.

    Raises: ValueError naming the tensor, if its values are not what the layout promises.
    """
    try:
        return placed.entry.load(tensor).astype(dtype, copy=False)
    except ValueError as error:
        raise ValueError(f"{placed.name}: {error}") from None


def from_official(
    cfg: K3Config, tensors: Mapping[str, np.ndarray], *, prefix: str = ""
) -> tuple[Tree, Tree]:
    """Parameters and buffers from official tensors.

    Args:
        cfg: model that the tensors belong to (see `official_config.config_from_official`).
        tensors: name -> array; A_log may be per head or padded with zeros to `head_dim`.
        prefix: in front of every name.

    Returns: (params, buffers), nested dicts of NumPy arrays, each in the dtype that the model keeps it in.
    Raises: ValueError that lists every missing, unexpected and misshapen tensor; nothing is loaded in part.
    """
    placed = list(all_entries(cfg, prefix=prefix))
    a_log_sizes = {cfg.kda.num_heads, max(cfg.kda.head_dim, cfg.kda.num_heads)}
    problems = [f"missing {p.name}" for p in placed if p.name not in tensors]
    problems += [f"unexpected {name}" for name in sorted(set(tensors) - {p.name for p in placed})]
    for p in placed:
        if p.name not in tensors:
            continue
        shape = tuple(tensors[p.name].shape)
        if p.name.endswith(".A_log"):
            if len(shape) != 1 or shape[0] not in a_log_sizes:
                problems.append(
                    f"{p.name} has shape {shape}, expected one of {sorted(a_log_sizes)} entries"
                )
        elif shape != p.entry.shape:
            problems.append(f"{p.name} has shape {shape}, expected {p.entry.shape}")
    if problems:
        raise ValueError("checkpoint does not fit the model: " + "; ".join(problems))

    leaves = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in leaf_shapes(cfg).items()}
    if unnamed := sorted(set(leaves) - set(map(leaf_name, placed))):
        raise ValueError(f"the model has parts without official names: {', '.join(unnamed)}")
    for p in placed:
        leaf = leaves[leaf_name(p)]
        leaf[p.index] = to_leaf(p, np.asarray(tensors[p.name]), leaf.dtype)
    tree = unflatten_dict(leaves, sep="/")
    return tree["params"], tree.get("buffers", {})


def to_official(
    cfg: K3Config, params: Tree, buffers: Tree, *, prefix: str = "", padded_a_log: bool = False
) -> dict[str, np.ndarray]:
    """Official tensors of a model; the inverse of `from_official`."""
    flat = flatten_dict({"params": params, "buffers": buffers}, sep="/")
    leaves = {name: np.asarray(leaf) for name, leaf in flat.items()}
    return {
        p.name: p.entry.save(leaves[leaf_name(p)][p.index])
        for p in all_entries(cfg, prefix=prefix, padded_a_log=padded_a_log)
    }
