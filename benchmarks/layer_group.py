"""Estimated time of one layer group of Kimi K3 on one TPU device, with the share of each op.

    uv run --extra aot python benchmarks/layer_group.py v6e tpu7x

Three KDA layers and one gated MLA layer, each with its experts, at the widths of `kimi_k3`, on 8,192
tokens a device; of the 896 experts the device holds 14 (64 devices), and it gets as many rows as its
own tokens make: 131,072. The exchange between devices is not part of it. A training step runs the
forward pass, and later the backward pass, which recomputes it: both are work, only 3 forward passes'
matmuls are useful. Instructions are counted, without latencies (`simulate=False`). The gathers that bring latents into
the order of experts and back run on SparseCores, which the compiler's counts leave out: they are
charged the time that their bytes take, as if nothing ran beside them.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.configs.k3 import kimi_k3_model
from k3jax.layers.experts import Experts
from k3jax.model import Layer
from k3jax.pallas_kernels import tpu_cost

TOKENS, DEVICES, SOURCES = 8192, 64, 5  # sources: of the mixes, the mean over the depth
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
LAYERS = {"kda": 3, "mla": 1}
# Useful matmul flops of one token in the forward pass (architecture 13).
FLOPS = {
    "kda": 2 * (443_580_416 + 718_405_632) + 17.56e6,
    "mla": 2 * (232_194_048 + 718_405_632) + 30_720 * TOKENS,
}
SCOPES = {  # what a scope's ops count as; the innermost one decides
    "short_conv": "short convolution", "kda_kernel": "KDA", "attention": "attention",
    "attn_res": "AttnRes", "route": "routing", "collect_stats": "routing",
    "routed_experts": "experts", "shared_experts": "shared experts",
    "kda": "KDA's projections", "mla": "MLA's projections",
}  # fmt: skip
KERNELS = {  # and its kernels, by a part of their names
    "kda": "KDA recurrence", "experts": "expert matmuls", "ragged": "expert matmuls",
    "mla": "attention", "attention_residuals": "AttnRes", "short_conv": "short convolution",
}  # fmt: skip


class LocalExperts(Experts):
    """A device's experts under rows that chose among all."""

    def __call__(self, z, ids, *args, **kwargs):
        return super().__call__(z, ids % self.w1.shape[0], *args, **kwargs)


def layer(kind: str = "kda", backward: bool = False, tokens: int = TOKENS, native: bool = True):
    """(function, shapes) of one layer; with `backward` its recomputation and all gradients."""
    if native:
        jax.default_backend = lambda: "tpu"  # the choice of kernels, which is by platform
    cfg = dataclasses.replace(kimi_k3_model(), param_dtype="bfloat16")
    assert cfg.moe is not None

    def build():
        rngs = nnx.Rngs(0)
        module = Layer(cfg, kind, "moe", rngs=rngs)
        moe = module.block_sparse_moe
        moe.experts = LocalExperts(
            cfg.moe.num_experts // DEVICES, cfg.moe.latent_dim, cfg.moe.ffn_dim, "latent",
            activation=cfg.activation, rngs=rngs, param_dtype="bfloat16", init_std=0.02,
        )  # fmt: skip
        return nnx.split(module, nnx.Param, ...)

    graphdef, params, rest = jax.eval_shape(build)
    x = jax.ShapeDtypeStruct((1, tokens, cfg.width), jnp.bfloat16)
    bank = jax.ShapeDtypeStruct((SOURCES - 1, 1, tokens, cfg.width), jnp.bfloat16)

    def forward(params, bank, x, rest):
        index = 12 * (SOURCES - 2) + (3 if kind == "mla" else 1)
        module = nnx.merge(graphdef, params, rest)
        bank, x, _, stats, _ = module(bank, x, index, None, collect=True)
        return (bank, x), stats

    def both(params, bank, x, rest, d):
        out, pull, _ = jax.vjp(lambda *a: forward(*a, rest), params, bank, x, has_aux=True)
        return pull(d)

    args = (params, bank, x, rest)
    return (both, (*args, (bank, x))) if backward else (forward, args)


def estimate(chip: str, kind: str, backward: bool, python: str = sys.executable) -> dict[str, Any]:
    """The report of `tpu_cost` for one layer."""
    return tpu_cost.estimate(
        "benchmarks.layer_group:layer", tpu_cost.TOPOLOGIES[chip],
        {"kind": kind, "backward": backward}, python=python, simulate=False,
    )  # fmt: skip


def expert_ms(chip: str, backward: bool, python: str = sys.executable) -> float:
    """Of the experts' kernels. How often their loops turn is data, hence from equal groups."""
    rows, groups = 4096, 1
    report = tpu_cost.estimate(
        "k3jax.pallas_kernels.grouped_matmul.bench:experts", tpu_cost.TOPOLOGIES[chip],
        {"rows": rows, "groups": groups, "backward": backward}, python=python, simulate=False,
    )  # fmt: skip
    return (
        report["pallas_seconds"] * 1e3 * TOKENS * kimi_k3_model().moe.num_active / (rows * groups)
    )


def attention_ms(chip: str, backward: bool) -> float:
    """Of the attention kernels, from their own records: the profiler cannot follow their grid."""
    wanted = {"op": "mla_attention", "impl": "k3jax pallas_tpu", "chip": chip, "T": TOKENS}
    wanted["pass"] = "fwd+bwd" if backward else "fwd"
    lines = (Path(__file__).parent / "mla_attention" / "tpu.jsonl").read_text().splitlines()
    *_, found = (r for r in map(json.loads, lines) if wanted.items() <= r.items())
    return found["pallas_us"] / 1e3 * kimi_k3_model().mla.num_heads / found["H"]


def gather_ms(chip: str, backward: bool) -> float:
    """Of the gathers of all rows, each read and written once: two forward, two more backward."""
    moe = kimi_k3_model().moe
    moved = 2 * TOKENS * moe.num_active * moe.latent_dim * 2
    return (4 if backward else 2) * moved / tpu_cost.CHIPS[KINDS[chip]].hbm * 1e3


def by_op(report: dict[str, Any], measured: dict[str, float]) -> dict[str, float]:
    """Milliseconds by op, costliest first; `measured` replaces what the program's count gets wrong."""
    ms: dict[str, float] = {}
    for op in report["ops"]:
        label = _label(op)
        ms[label] = ms.get(label, 0) + op["us"] * op["runs"] / 1e3
    ms |= {label: took for label, took in measured.items() if label in (*ms, "row gathers")}
    return dict(sorted(ms.items(), key=lambda kv: -kv[1]))


def _label(op: dict[str, Any]) -> str:
    if op["op"] == "pallas":
        return next((v for k, v in KERNELS.items() if k in op["name"]), op["name"])
    scopes = [x for x in re.split(r"[/()]", op["source"]) if x in SCOPES]
    return SCOPES[scopes[-1]] if scopes else "copies and the rest"


def group(chip: str, layers: dict[tuple[str, bool], dict[str, float]]) -> dict[str, Any]:
    """The whole group: three KDA layers and an MLA layer, forward, then recomputed and backward."""
    shares: dict[str, float] = {}
    for (kind, _), ms in layers.items():
        for op, took in ms.items():
            shares[op] = shares.get(op, 0) + LAYERS[kind] * took
    total = sum(shares.values())
    device = tpu_cost.CHIPS[KINDS[chip]]
    peak = device.clock * device.flops * device.cores
    floor = sum(3 * n * FLOPS[kind] * TOKENS / peak * 1e3 for kind, n in LAYERS.items())
    parts = sorted(shares.items(), key=lambda kv: -kv[1])
    return {
        "chip": chip, "group_ms": round(total, 1), "floor_ms": round(floor, 1),
        "of_floor": round(floor / total, 3),
        "ms": {op: round(ms, 1) for op, ms in parts},
        "shares": {op: f"{ms / total:.1%}" for op, ms in parts},
    }  # fmt: skip


def main(chips: list[str]) -> None:
    for chip in chips:
        experts = {backward: expert_ms(chip, backward) for backward in (False, True)}
        layers = {}
        for kind in LAYERS:
            for backward in (False, True):
                report = estimate(chip, kind, backward)
                if "error" in report:
                    sys.exit(f"{chip}, {kind}, backward={backward}: {report['error']}")
                measured = {"expert matmuls": experts[backward]}
                measured["attention"] = attention_ms(chip, backward)
                measured["row gathers"] = gather_ms(chip, backward)
                layers[kind, backward] = ms = by_op(report, measured)
                fields = {"chip": chip, "layer": kind, "backward": backward}
                fields |= {"ms": round(sum(ms.values()), 2), "by_op": ms}
                fields |= {"memory": report["memory"], "compile_s": report["compile_seconds"]}
                print(json.dumps(fields), flush=True)
        print(json.dumps(group(chip, layers)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["v6e", "tpu7x"])
