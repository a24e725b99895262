"""Parameter and FLOP counts, from the real parameter tree and the formulas of the report (architecture 12-13)."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.model import K3Config
from k3jax.sharding.annotate import Buffer
from k3jax.stacks import plan_stacks
from k3jax.train_state import abstract_model, merge

# Dense bf16 matmul peak of one JAX device, FLOP/s, by a part of its device_kind (vendors' data sheets). The first match counts.
PEAK_FLOPS = {
    "TPU7x": 1.154e15,  # one of the two cores of a chip
    "TPU v6": 9.18e14,
    "TPU v5p": 4.59e14,
    "TPU v5 lite": 1.97e14,
    "TPU v5e": 1.97e14,
    "TPU v5": 4.59e14,
    "TPU v4": 2.75e14,
    "TPU v3": 6.15e13,
    "TPU v2": 2.3e13,
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40": 1.81e14,
    "L4": 1.21e14,
    "A10": 1.25e14,
    "V100": 1.25e14,
    "T4": 6.5e13,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of one device, None where it is unknown (CPUs, devices not in the table)."""
    return next(
        (peak for part, peak in PEAK_FLOPS.items() if part.lower() in device_kind.lower()), None
    )


class ParameterCounts(NamedTuple):
    """components: entries by component; total, active: entries in all, and touched by one text token.

    `active` includes the head and excludes the embedding table. `matmul` are the entries of `active` that take part
    in matrix products. Router biases count as parameters, as in the report.
    """

    components: dict[str, int]
    total: int
    active: int
    matmul: int


def _leaves(cfg: K3Config) -> Iterator[tuple[str, int]]:
    """(path, entries) of every parameter and buffer, from an abstract model."""
    model = merge(*abstract_model(cfg))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, Buffer))):
        yield "/".join(map(str, path)), math.prod(variable.shape)


def _component(cfg: K3Config, path: str) -> str:
    """Row of the parameter table that a path belongs to."""
    if "/self_attn/" in path:
        stack, layer = path.split("/")[:2]
        plan = next(plan for plan in plan_stacks(cfg) if plan.name == stack)
        index = plan.first + int(layer.removeprefix("layer_"))
        return "KDA" if cfg.layers[index][0] == "kda" else "MLA"
    for part, name in (
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
        ("/experts/", "routed experts"),
        ("/shared_experts/", "shared experts"),
        ("/gate/", "routers"),
        ("/router_bias", "routers"),
        ("routed_expert_", "latent projections"),
        ("/mlp/", "dense feed-forward"),
    ):
        if part in path:
            return name
    return "norms and AttnRes"


def parameter_counts(cfg: K3Config) -> ParameterCounts:
    """Counts of the model that `cfg` builds, without allocating it."""
    components: dict[str, int] = {}
    total = active = matmul = 0
    for path, size in _leaves(cfg):
        name = _component(cfg, path)
        components[name] = components.get(name, 0) + size
        total += size
        touched = size
        if name == "routed experts":
            assert cfg.moe is not None
            touched = size // cfg.moe.num_experts * cfg.moe.num_active
        if name == "embedding":
            touched = size if cfg.tie_embeddings else 0
        active += touched
        if (path.endswith("/kernel") and "conv1d" not in path) or name in (
            "routed experts",
            "embedding",
        ):
            matmul += touched
    return ParameterCounts(components, total, active, matmul)


def attn_res_rows(cfg: K3Config) -> int:
    """Source rows that all AttnRes sites read for one token (1002 for Kimi K3)."""
    res, n = cfg.attn_res, cfg.num_layers
    if res.kind == "none":
        return 0
    attention = sum(int(res.before_attention(i)[0]) + 1 for i in range(1, n))  # layer 0 has no mix
    mixer = sum(int(res.before_mixer(i)[0]) + 1 for i in range(n))
    return attention + mixer + res.num_rows(n) + 1


def forward_flops_per_token(cfg: K3Config, seq_len: int, matmul: int | None = None) -> float:
    """FLOPs of one forward pass per token of a causal sequence of `seq_len` tokens (1 multiply-add = 2).

    2 N + KDA core + causal MLA + AttnRes                   (architecture 13)
    """
    n = parameter_counts(cfg).matmul if matmul is None else matmul
    kinds = [attention for attention, _ in cfg.layers]
    k, c, m = cfg.kda.head_dim, cfg.kda.chunk_size, cfg.mla
    kda = cfg.kda.num_heads * (c * 10 * k + 2 / 3 * c * c + 6 * k * k)
    mla = m.num_heads * (m.qk_nope_dim + m.qk_shared_dim + m.v_dim) * seq_len
    return (
        2 * n
        + kinds.count("kda") * kda
        + kinds.count("mla") * mla
        + 6 * cfg.width * attn_res_rows(cfg)
    )


def flops_per_token(cfg: K3Config, seq_len: int, matmul: int | None = None) -> float:
    """Training FLOPs per token, forward and backward without recomputation: three forward passes."""
    return 3 * forward_flops_per_token(cfg, seq_len, matmul)


def state_tree_bytes(tree) -> int:
    """Bytes of a tree of arrays, real or abstract."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
