"""Conformance kit: tiny checkpoints in the official layout, with what a correct implementation computes from them.

    DIR/README.md                     how to use it, for any implementation
    DIR/MODEL/                        a checkpoint as the release lays it out
    DIR/expected/MODEL.safetensors    inputs, activations, logits, greedy tokens, gradients
    DIR/expected/MODEL.json           tolerances, and what made the numbers

The numbers are this implementation's, in float32 with full-precision products; what it computes is itself held
to the official code by the golden tests.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.numpy import load_file

from k3jax.checkpoint import library_versions
from k3jax.configs.k3 import kimi_k3_model, kimi_linear_48b_model
from k3jax.convert_hf import from_official, to_official
from k3jax.errors import UserError, disk_errors
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.layers.latent_moe import LatentMoEConfig
from k3jax.model import K3, K3Config
from k3jax.official_audit import audit
from k3jax.official_config import config_to_official
from k3jax.pallas_kernels.mxfp4 import quantize_mxfp4
from k3jax.safetensors_files import INDEX, SafetensorsFolder, write_file, write_index
from k3jax.safetensors_header import name_of
from k3jax.testing import layer_by_layer, random_model
from k3jax.train_state import abstract_model, merge

FORMAT = 1
EXPECTED = "expected"
TOKENS, PROMPT, NEW = 70, 37, 12  # of a row, of a prompt, generated: no multiples of a chunk
ROWS = 2
WHOLE_GRADIENT = 2048  # entries; of larger tensors only the norm of the gradient is kept
INPUTS = ("input_ids", "prompt_ids")
# |got - want| <= rtol |want| + share of the largest |want|
TOLERANCES = {
    "activations": {"rtol": 1e-4, "share": 3e-5},
    "gradients": {"rtol": 1e-3, "share": 3e-4},
}
STEADY = 1e-3  # change of the logits, over their largest, that a perturbation of 1e-5 may cause

log = logging.getLogger("k3jax")


class Model(NamedTuple):
    """One checkpoint of the kit."""

    about: str
    cfg: K3Config


def _small(cfg: K3Config, **moe: Any) -> K3Config:
    """A released model at widths of 32 to 64."""
    assert cfg.moe is not None
    latent = None if cfg.moe.latent_dim is None else 32
    experts: LatentMoEConfig = replace(
        cfg.moe, num_experts=8, num_active=3, ffn_dim=32, latent_dim=latent, num_bins=64, **moe
    )
    mla = replace(
        cfg.mla, num_heads=2, kv_rank=24, qk_nope_dim=16, qk_shared_dim=8, v_dim=16,
        q_rank=None if cfg.mla.q_rank is None else 20,
    )  # fmt: skip
    kda = replace(
        cfg.kda, num_heads=2, head_dim=16, gate_rank=16,
        out_gate_rank=None if cfg.kda.out_gate_rank is None else 16,
    )  # fmt: skip
    blocks = cfg.attn_res.kind == "block"
    return replace(
        cfg,
        vocab_size=128,
        width=64,
        num_layers=5,
        closing=("mla",),
        dense_ffn_dim=96,
        kda=kda,
        mla=mla,
        moe=experts,
        attn_res=AttnResConfig(kind="block", block_size=2) if blocks else cfg.attn_res,
        dtype="float32",
        remat="none",
    )


def models() -> dict[str, Model]:
    """The checkpoints of the kit by folder name."""
    k3, linear = _small(kimi_k3_model()), _small(kimi_linear_48b_model())
    packed = replace(_small(kimi_k3_model(), weights="mxfp4"), param_dtype="bfloat16")
    return {
        "k3": Model("Kimi K3, text model, all tensors float32", k3),
        "kimi_linear": Model("Kimi Linear, all tensors float32", linear),
        "mxfp4": Model("Kimi K3 with experts in MXFP4, the others as released", packed),
    }


# -- what is expected


class Programs:
    """A model's compiled passes.

    Args:
        cfg: model; computes in `cfg.dtype`.
    """

    def __init__(self, cfg: K3Config):
        self.cfg = cfg
        self.graphdef, _, _ = abstract_model(cfg)
        self.gradients = jax.jit(jax.grad(self._loss, has_aux=True))
        self.greedy = jax.jit(self._greedy)

    def compute(self, params: Any, buffers: Any, inputs: Mapping[str, np.ndarray]) -> dict:
        """All that the kit compares, by name.

        Args:
            params, buffers: pure dicts.
            inputs: `input_ids` [2, T] and `prompt_ids` [2, P].

        Returns: `hidden.I` after layer I (the sum since the last block where there are Attention Residuals),
            `final` after the last norm, `logits`, `loss` (mean cross-entropy of each next token), `greedy_tokens`
            with the `greedy_logits` that chose them, and per parameter `grad.NAME` or `grad_norm.NAME` of the loss.
        """
        grads, found = self.forward(params, buffers, inputs["input_ids"], 0.0)
        with jax.default_matmul_precision("highest"):
            found |= self.greedy(params, buffers, jnp.asarray(inputs["prompt_ids"]))
        found: dict[str, np.ndarray] = {
            name: np.asarray(x, np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for name, x in found.items()
        }
        official = to_official(self.cfg, grads, jax.tree.map(jnp.zeros_like, buffers))
        for name, grad in official.items():
            if name.endswith((".e_score_correction_bias", ".weight_packed", ".weight_scale")):
                continue  # not parameters
            grad = np.asarray(grad, np.float32)
            if grad.size <= WHOLE_GRADIENT:
                found[f"grad.{name}"] = grad
            else:
                norm = np.linalg.norm(grad.astype(np.float64))
                found[f"grad_norm.{name}"] = np.asarray(norm, np.float32)
        return found

    def forward(self, params, buffers, ids, noise) -> tuple[dict, dict[str, Any]]:
        """Gradients of the loss, and every activation; `noise` is relative, on the embeddings."""
        noise = jnp.broadcast_to(jnp.float32(noise), (*ids.shape, self.cfg.width))
        with jax.default_matmul_precision("highest"):
            return self.gradients(params, buffers, jnp.asarray(ids), noise)

    def _loss(self, params, buffers, ids, noise):
        found = _forward(merge(self.graphdef, params, buffers), ids, noise)
        scores = jax.nn.log_softmax(found["logits"][:, :-1])
        loss = -jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean()
        return loss, {**found, "loss": loss}

    def _greedy(self, params, buffers, prompts):
        """The likeliest continuation, each token from a pass over all before it."""
        model, length = merge(self.graphdef, params, buffers), prompts.shape[1]
        ids = jnp.pad(prompts, ((0, 0), (0, NEW)))

        def step(ids, i):
            logits = model(ids)[:, length + i - 1]  # what lies behind is not looked at: causal
            token = jnp.argmax(logits, -1).astype(ids.dtype)
            return ids.at[:, length + i].set(token), logits

        ids, logits = jax.lax.scan(step, ids, jnp.arange(NEW))
        return {"greedy_tokens": ids[:, length:], "greedy_logits": logits.swapaxes(0, 1)}

    def steady(self, params, buffers, found: Mapping[str, np.ndarray], ids: np.ndarray) -> bool:
        """Whether no choice of an expert or token hangs on rounding."""
        logits, best = found["logits"], np.sort(found["greedy_logits"], -1)
        for seed in range(3):
            noise = 1e-5 * np.random.default_rng(seed).normal(size=(*ids.shape, self.cfg.width))
            moved = np.asarray(self.forward(params, buffers, ids, noise)[1]["logits"]) - logits
            if np.abs(moved).max() > STEADY * np.abs(logits).max():
                return False
        return bool((best[..., -1] - best[..., -2]).min() > STEADY)


def _forward(model: K3, ids, noise) -> dict[str, Any]:
    embeddings = model.embed_tokens(ids, model.cfg.dtype) * (1 + noise)
    final, _, prefixes, _ = layer_by_layer(model, embeddings.astype(model.cfg.dtype))
    found = {f"hidden.{i}": prefix for i, prefix in enumerate(prefixes)}
    return {**found, "final": final, "logits": model.logits(final)}


# -- making


def make(directory: str) -> None:
    """Writes the kit into a new or empty folder.

    Raises: UserError if the folder holds something, or cannot be written.
    """
    target = Path(directory).expanduser()
    with disk_errors(f"conformance kit in {directory} not written"):
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UserError(f"folder {directory} is not empty: name a new one for the kit")
    for name, model in models().items():
        log.info("conformance kit: %s (%s)", name, model.about)
        _make_model(target, name, model)
    text = resources.files("k3jax").joinpath("conformance.md").read_text()
    with disk_errors(f"conformance kit in {directory} not written"):
        (target / "README.md").write_text(text)


def _make_model(target: Path, name: str, model: Model) -> None:
    cfg, seed, programs = model.cfg, 0, Programs(model.cfg)
    rng = np.random.default_rng(20_260)
    inputs = {
        "input_ids": rng.integers(0, cfg.vocab_size, (ROWS, TOKENS), np.int32),
        "prompt_ids": rng.integers(0, cfg.vocab_size, (ROWS, PROMPT), np.int32),
    }
    while True:
        tensors = _draw(cfg, seed)
        params, buffers = jax.tree.map(jnp.asarray, from_official(cfg, tensors))
        found = programs.compute(params, buffers, inputs)
        if programs.steady(params, buffers, found, inputs["input_ids"]):
            break
        seed += 1
    about = {
        "format": FORMAT,
        "about": model.about,
        "seed": seed,
        "tolerances": TOLERANCES,
        "versions": library_versions(),
    }
    folder, expected = target / name, target / EXPECTED
    with disk_errors(f"conformance kit {folder} not written"):
        folder.mkdir()
        expected.mkdir(exist_ok=True)
        config = config_to_official(cfg, {"model_type": "kimi_linear"}, dtype=cfg.param_dtype)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (expected / f"{name}.json").write_text(json.dumps(about, indent=2) + "\n")
    half = len(tensors) // 2
    shards = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, shard)
    where = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
    write_index(folder / INDEX, where, sum(x.nbytes for x in tensors.values()))
    _write(expected / f"{name}.safetensors", {**inputs, **found})


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    kinds = {name: (name_of(x.dtype), x.shape) for name, x in tensors.items()}
    write_file(path, kinds, tensors.__getitem__, {"format": "pt"})


def _draw(cfg: K3Config, seed: int) -> dict[str, np.ndarray]:
    """Official tensors of a random model in which every mechanism matters."""
    assert cfg.moe is not None
    plain = replace(cfg, moe=replace(cfg.moe, weights="plain"))
    _, params, buffers = random_model(plain, seed)
    rng, tensors = np.random.default_rng(seed), {}
    released = cfg.moe.weights == "mxfp4"  # with A_log as the release pads it
    for name, x in to_official(plain, params, buffers, padded_a_log=released).items():
        if name.endswith(".e_score_correction_bias"):
            tensors[name] = rng.uniform(-0.1, 0.1, x.shape).astype(np.float32)
        elif ".experts." in name and released:
            packed, scale = quantize_mxfp4(x.astype(np.float32))
            tensors |= {f"{name}_packed": packed, f"{name}_scale": scale}
        else:
            tensors[name] = x
    return tensors


# -- checking


class Line(NamedTuple):
    """One comparison."""

    model: str
    what: str
    excess: float  # largest |got - want| over what is allowed; at most 1 passes
    exact: bool  # compared as integers

    @property
    def passed(self) -> bool:
        return self.excess <= 1


def check(directory: str, results: str | None = None) -> list[Line]:
    """Compares this implementation, or the results of another one, with a kit.

    Args:
        directory: of the kit.
        results: folder with a file MODEL.safetensors per model that was run, of any tensors that the kit expects.

    Returns: one line per tensor.
    Raises: UserError if the kit is damaged or of another format, or if `results` holds nothing to compare.
    """
    lines, kit = [], Path(directory).expanduser()
    for name in models():
        want, about = _read_expected(kit / EXPECTED, name)
        got = _ours(kit / name, want) if results is None else _theirs(Path(results), name, want)
        if results is None and (differ := set(got) ^ (set(want) - set(INPUTS))):
            raise UserError(
                f"{kit / EXPECTED / name}.safetensors is damaged: {min(differ)} is in one of kit and "
                "model only; make the kit again"
            )
        lines += [Line(name, *line) for line in _compare(got, want, about["tolerances"])]
    if not lines:
        raise UserError(f"{results} has none of {', '.join(models())} as NAME.safetensors")
    return lines


def show(lines: list[Line]) -> None:
    """A table by model and kind of tensor, then everything that differs."""
    table = Table("model", "tensors", "compared", "passed", "worst, of what is allowed")
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        kind = line.what.split(".")[0].split("_")[0]
        groups.setdefault((line.model, kind), []).append(line)
    for (model, kind), members in groups.items():
        passed = sum(line.passed for line in members)
        worst = max(line.excess for line in members)
        table.add_row(model, kind, str(len(members)), str(passed), f"{worst:.1%}")
    console = Console()
    console.print(table)
    wrong = [line for line in lines if not line.passed]
    for line in wrong:
        by = "differs" if line.exact else f"is {line.excess:.3g} times what is allowed away"
        console.print(f"{line.model}: {line.what} {by}", markup=False, highlight=False)
    console.print(f"{len(lines) - len(wrong)} of {len(lines)} tensors pass", highlight=False)


def _ours(folder: Path, want: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    source = SafetensorsFolder(str(folder))
    audited = audit(source)
    cfg = replace(audited.cfg, dtype="float32")
    tensors = {p.name: source.read(p.name) for p in audited.text}
    params, buffers = jax.tree.map(jnp.asarray, from_official(cfg, tensors, prefix=audited.prefix))
    return Programs(cfg).compute(params, buffers, {name: want[name] for name in INPUTS})


def _theirs(results: Path, name: str, want: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    path = results.expanduser() / f"{name}.safetensors"
    if not path.exists():
        return {}
    got = _read(path)
    unknown = [tensor for tensor in got if tensor not in want]
    if unknown:
        raise UserError(f"{path} has {unknown[0]!r}, which the kit does not expect: see its README")
    return got


def _read_expected(folder: Path, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    path = folder / f"{name}.json"
    if not os.path.exists(path):  # also of a name that is too long
        raise UserError(
            f"{path} is absent: is this a conformance kit? `k3jax conformance make` writes one"
        )
    with disk_errors(f"{path} not readable"):
        text = path.read_bytes()
    try:
        about = json.loads(text)
        written = about["format"]
        if written != FORMAT:
            raise UserError(
                f"{path} has format {written}, this k3jax reads {FORMAT}: make the kit again"
            )
        for kind, parts in TOLERANCES.items():
            for part in parts:
                float(about["tolerances"][kind][part])
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): make the kit again") from error
    want = _read(folder / f"{name}.safetensors")
    for given in INPUTS:
        ids = want.get(given)
        if ids is None or ids.ndim != 2 or not ids.size or ids.dtype != np.int32:
            raise UserError(
                f"{folder / name}.safetensors is damaged: no {given} [rows, tokens] of int32; make the "
                "kit again"
            )
    return want, about


def _read(path: Path) -> dict[str, np.ndarray]:
    with disk_errors(f"{path} not readable"):
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UserError(
                f"{path} is no whole safetensors file ({error}): write it again"
            ) from error


def _compare(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], tolerances: Mapping[str, Any]
) -> Iterator[tuple[str, float, bool]]:
    """(name, excess, exact) of every tensor that is there."""
    for name, expected in want.items():
        if name in INPUTS or name not in got:
            continue
        value = np.asarray(got[name])
        if value.shape != expected.shape:
            raise UserError(f"{name} has shape {value.shape}, the kit expects {expected.shape}")
        if expected.dtype.kind in "iu":
            yield name, 0.0 if np.array_equal(value, expected) else float("inf"), True
            continue
        allowed = tolerances["gradients" if name.startswith("grad") else "activations"]
        value, expected = value.astype(np.float64), expected.astype(np.float64)
        room = allowed["rtol"] * np.abs(expected) + allowed["share"] * np.abs(expected).max()
        excess = np.abs(value - expected) / np.maximum(room, np.finfo(np.float32).tiny)
        yield name, float(np.where(np.isfinite(value), excess, np.inf).max()), False
