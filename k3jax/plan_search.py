"""Meshes and remat policies to choose from, ranked by formulas: which few are worth compiling."""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax.configs.experiment import ExperimentConfig
from k3jax.layers.recompute import KEPT
from k3jax.model import K3Config
from k3jax.optim.build import OptimConfig
from k3jax.plan_cost import (
    Collective,
    Layout,
    Times,
    Topology,
    collective_seconds,
    sent_bytes,
    times,
    work,
)
from k3jax.sharding.expert_parallel import visits
from k3jax.sharding.mesh import AXES, ROWS, MeshConfig
from k3jax.sharding.rules import logical_axes, spec_axes, split_axes, state_specs
from k3jax.train_state import abstract_model, init_state, merge

REMAT = ("none", "dots", "outputs", "routed", "full", "offload")  # policies, fastest first
MOST_TENSOR = 16  # ways: beyond, the pieces of a head's work are too small


class Leaf(NamedTuple):
    """Arrays of the training state that are alike."""

    category: str  # field of the state
    name: str  # parameter that one of them belongs to, or path
    shape: tuple[int, ...]
    itemsize: int


@functools.cache
def _leaves(model: K3Config, optim: OptimConfig) -> tuple[dict[Leaf, int], dict[str, Any]]:
    """How many arrays of each kind the training state has; the logical axes of parameters by path.

    A model has a thousand arrays of forty kinds: a search looks at kinds.
    """
    state = jax.eval_shape(lambda: init_state(model, optim, jax.random.key(0)))
    axes = logical_axes(merge(*abstract_model(model)))
    first: dict[Any, Leaf] = {}
    counts: dict[Leaf, int] = {}
    for path, x in jax.tree.leaves_with_path(state):
        category, *keys = (str(getattr(k, "name", getattr(k, "key", k))) for k in path)
        ends = ("/".join(keys[start:]) for start in range(len(keys)))
        name = next((e for e in ends if len(axes.get(e, ())) == len(x.shape) > 0), "/".join(keys))
        kind = (category, axes.get(name), "embed_tokens" in name, x.shape, x.dtype)
        leaf = first.setdefault(kind, Leaf(category, name, x.shape, x.dtype.itemsize))
        counts[leaf] = counts.get(leaf, 0) + 1
    return counts, axes


def state_bytes(cfg: ExperimentConfig, sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes on one device by category, from the shapes and the sharding rules.

    `gradients` are float32 in the layout of the parameters; they lie among the temporaries.

    Raises: ValueError for a dimension that does not divide.
    """
    counts, axes = _leaves(_plain(cfg.model), cfg.optim)
    names = {"params": "parameters", "opt_state": "optimizer", "buffers": "buffers"}
    held = dict.fromkeys((*names.values(), "batch", "gradients"), 0.0)
    for leaf, count in counts.items():
        spec = state_specs({leaf.name: jax.ShapeDtypeStruct(leaf.shape, np.float32)}, axes, sizes)[
            leaf.name
        ]
        ways = math.prod(sizes[axis] for axis in sum(spec_axes(spec), ()))
        entries = count * math.prod(leaf.shape) / ways
        held[names.get(leaf.category, "buffers")] += entries * leaf.itemsize
        held["gradients"] += entries * 4 if leaf.category == "params" else 0
    tokens = cfg.batch_size * cfg.seq_len / math.prod(sizes[a] for a in (*ROWS, "context"))
    held["batch"] = 2 * 4 * tokens
    return held


def _plain(model: K3Config) -> K3Config:
    """The same parameters: one entry of a cache for all remat policies."""
    return replace(model, remat="none")


def activation_bytes(cfg: ExperimentConfig, sizes: Mapping[str, int]) -> float:
    """Bytes of one pass on one device: what depth keeps, and the working set of one layer.

    The layer's parameters are gathered, and their gradients whole in float32. Kept are the bank with
    its cotangent and the prefix that enters each layer. The working set are the intermediates of the
    layer's backward pass: 30 bytes per channel of KDA's heads, and per routed row 12 times the latent
    and 10 times the hidden values, which is what fits the compiled step of kimi_k3 on tpu7x:8x16x16
    (fsdp 256 x expert 16, two rows of 8,192 tokens a device: 79.5 GiB; this gives 80.8).
    """
    model = cfg.model
    tokens = cfg.batch_size // cfg.accumulation * cfg.seq_len
    tokens /= math.prod(sizes[axis] for axis in (*ROWS, "context"))
    itemsize = jax.numpy.dtype(model.dtype).itemsize
    tensor = sizes["tensor"]
    layer = 30 * model.kda.num_heads * model.kda.head_dim / tensor + 6 * itemsize * model.width
    if model.moe is not None:
        moe = model.moe
        latent = moe.latent_dim or model.width
        layer += moe.num_active * (12 * latent + 10 * moe.ffn_dim) * itemsize
        layer += 3 * moe.num_shared * moe.ffn_dim / tensor * itemsize
    rows = model.attn_res.num_rows(model.num_layers)
    names, on_host = KEPT.get(model.remat, ()), model.remat == "offload"
    kept = 2 * rows * model.width
    if not on_host:
        kept += model.num_layers * model.width
        if "attention" in names:
            kept += model.num_layers * model.width
        if "routed" in names and model.moe is not None:
            kept += (model.num_layers - model.num_dense_layers) * (
                model.moe.latent_dim or model.width
            )
    alive = {"none": model.num_layers, "dots": model.num_layers / 2}.get(model.remat, 1)
    gathered = _layer_entries(cfg, sizes) * (itemsize + 4)
    return tokens * (kept * itemsize + alive * layer) + gathered


def _layer_entries(cfg: ExperimentConfig, sizes: Mapping[str, int]) -> float:
    """Entries of the parameters of a layer, the mean, that a device computes with."""
    counts, axes = _leaves(_plain(cfg.model), cfg.optim)
    total = 0.0
    for leaf, count in counts.items():
        if leaf.category == "params" and axes[leaf.name][0] == "layers":
            splits = split_axes(axes[leaf.name], leaf.shape, sizes)
            ways = math.prod(sizes[axis] for compute, _ in splits for axis in compute)
            total += count * math.prod(leaf.shape) / ways
    return total / cfg.model.num_layers


def expected_collectives(cfg: ExperimentConfig, layout: Layout) -> tuple[Collective, ...]:
    """The collectives of one step, from the design of the layers; the compiled program has the truth.

    Parameters are gathered for each pass, forward and recomputed, in the compute dtype, and their
    gradients scattered in float32; copies add up gradients once a step; Newton-Schulz takes whole
    matrices to owners and back. Latents go once to each rank with chosen experts and back: 2 exchanges
    forward, 3 backward; where their result is not kept, 2 more to repeat it. Context: latents and states once a pass; tensor: sums of sub-layers.
    """
    model, sizes, chip = cfg.model, layout.sizes, layout.topology.chip
    itemsize = jax.numpy.dtype(model.dtype).itemsize
    counts, axes = _leaves(_plain(model), cfg.optim)
    passes, again = cfg.accumulation, model.remat != "none"
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def add(kind: str, over: tuple[str, ...], operand: float, runs: int, hidden: bool = False):
        over = tuple(axis for axis in AXES if axis in over and sizes[axis] > 1)
        if not over or not runs:
            return
        box = layout.box(over)
        total = totals.setdefault((kind, over), [0, 0.0, 0.0, 0.0])
        taken = runs * collective_seconds(kind, operand, box, chip)
        more = (runs, runs * sent_bytes(kind, operand, box.size), taken, taken * hidden)
        totals[kind, over] = [a + b for a, b in zip(total, more, strict=True)]

    for leaf, copies in counts.items():
        if leaf.category != "params":
            continue
        splits = split_axes(axes[leaf.name], leaf.shape, sizes)
        storage = tuple(axis for _, stored in splits for axis in stored)
        named = {axis for pair in splits for part in pair for axis in part}
        depth = leaf.shape[0] if axes[leaf.name][0] == "layers" else 1
        local = math.prod(leaf.shape) / math.prod(sizes[axis] for axis in named)
        ways = math.prod(sizes[axis] for axis in storage)
        if "embed_tokens" not in leaf.name:  # its rows travel, not the table
            one, runs = local / depth, copies * depth * passes
            add("all-gather", storage, one * itemsize, runs * (1 + again), True)
            add("reduce-scatter", storage, one * ways * 4, runs, True)
        add("all-reduce", tuple(axis for axis in AXES if axis not in named), local * 4, copies)
        add("all-to-all", storage, local * 4, copies)
        add("all-to-all", storage, local * 2, copies)

    tokens = cfg.batch_size // passes * cfg.seq_len
    tokens /= math.prod(sizes[axis] for axis in (*ROWS, "context"))
    kinds = [attention for attention, _ in model.layers]
    if model.moe is not None:
        layers = sum(mixer == "moe" for _, mixer in model.layers)
        latent = model.moe.latent_dim or model.width
        active, ranks = model.moe.num_active, sizes["expert"]
        sent = (
            tokens * ranks * visits(active, model.moe.num_experts, model.moe.num_experts // ranks)
        )
        trips = 5 if "routed" in KEPT.get(model.remat, ()) else 5 + 2 * again
        add("ragged-all-to-all", ("expert",), sent * latent * itemsize, layers * passes * trips)
        choices = layers * passes * (2 + again)
        add("all-gather", ("expert",), tokens * active * 8, choices)
        add("reduce-scatter", ("expert",), tokens * ranks * active * 4, layers * passes)
    latents = tokens * (model.mla.kv_rank + model.mla.qk_shared_dim) * itemsize
    mla = kinds.count("mla") * passes
    add("all-gather", ("context",), latents, mla * (1 + again))
    add("reduce-scatter", ("context",), latents * sizes["context"] * 2, mla)
    rows_here = cfg.batch_size // passes / math.prod(sizes[axis] for axis in ROWS)
    heads = model.kda.num_heads / sizes["tensor"]
    memories = rows_here * heads * 2 * model.kda.head_dim**2 * 4
    add("all-gather", ("context",), memories, kinds.count("kda") * passes * (2 + again))
    sums = model.num_layers * passes * 2 * (2 + again)
    add("all-reduce", ("tensor",), tokens * model.width * itemsize, sums)
    return tuple(Collective(*key, int(runs), *rest) for key, (runs, *rest) in totals.items())


@dataclass(frozen=True)
class Candidate:
    """A mesh and a remat policy with what the formulas expect of them."""

    cfg: ExperimentConfig
    sizes: dict[str, int]
    memory: float  # bytes of a device
    times: Times


def expected(cfg: ExperimentConfig, topology: Topology, sizes: Mapping[str, int]) -> Candidate:
    """By formula. Raises: ValueError for a dimension that does not divide."""
    held = state_bytes(cfg, sizes)
    tokens = cfg.batch_size * cfg.seq_len
    done = work(
        cfg.model, cfg.optim, tokens=tokens, seq_len=cfg.seq_len, devices=topology.num_devices
    )
    found = times(
        topology.chip,
        done,
        expected_collectives(cfg, Layout(topology, sizes)),
        parameters=held["parameters"],
        hbm_bytes=0,
    )
    return Candidate(cfg, dict(sizes), sum(held.values()) + activation_bytes(cfg, sizes), found)


def search(
    cfg: ExperimentConfig, topology: Topology, *, best: int
) -> tuple[list[Candidate], int, int]:
    """The fastest candidates that should fit.

    Args:
        cfg: the run; mesh axes above 1 stay as they are.
        topology: the devices.
        best: how many.

    Returns: those candidates, fastest first; how many meshes fit; how many combinations there were.
        If none fits, the smallest ones.
    """
    sized, within = [], []
    for sizes in _meshes(cfg, topology.num_devices):
        try:
            held = sum(state_bytes(cfg, sizes).values())
        except ValueError:  # a dimension that does not divide
            continue
        fits = False
        for remat in REMAT:
            model = replace(cfg.model, remat=remat)
            tried = replace(cfg, mesh=MeshConfig(**sizes), model=model)
            item = (held + activation_bytes(tried, sizes), tried, sizes)
            sized.append(item)
            if not fits and item[0] <= topology.chip.hbm:  # policies that repeat more are no faster
                fits = True
                within.append(item)
    nearest = heapq.nsmallest(best, sized, key=lambda item: item[0])
    found = [expected(tried, topology, sizes) for _, tried, sizes in within or nearest]
    if within:
        found.sort(key=lambda c: c.times.scheduled)
    return found[:best], len(within), len(sized)


def _meshes(cfg: ExperimentConfig, devices: int) -> Iterator[dict[str, int]]:
    """Sizes of the axes that divide experts, heads, rows and tokens."""
    given = dataclasses.asdict(cfg.mesh)
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    model, rows = cfg.model, cfg.batch_size // cfg.accumulation
    heads = math.gcd(model.kda.num_heads, model.mla.num_heads)
    allowed = {
        "expert": lambda n: (model.moe is not None and model.moe.num_experts % n == 0) or n == 1,
        "context": lambda n: cfg.seq_len % n == 0,
        "tensor": lambda n: heads % n == 0 and n <= MOST_TENSOR,
        "data": lambda n: True,
    }
    choices = [
        [n for n in divisors if allows(n) and (given[axis] <= 1 or n == given[axis])]
        for axis, allows in allowed.items()
    ]
    for chosen in itertools.product(*choices):
        fsdp, rest = divmod(devices, math.prod(chosen))
        sizes = dict(zip(allowed, chosen, strict=True)) | {"fsdp": fsdp}
        if rest or (given["fsdp"] > 1 and fsdp != given["fsdp"]):
            continue
        if rows % math.prod(sizes[axis] for axis in ROWS) == 0:
            yield {axis: sizes[axis] for axis in AXES}
