"""What a training step costs on a slice of TPUs, by formula: chips, their torus, collectives, floors.

Everything here is an estimate from published figures; ASSUMPTIONS says what it leaves out.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from k3jax.errors import UserError
from k3jax.flops import forward_flops_per_token, parameter_counts, peak_flops
from k3jax.layers.recompute import KEPT
from k3jax.model import K3Config
from k3jax.optim.build import OptimConfig, optimizer_table
from k3jax.pallas_kernels.tpu_cost import CHIPS as CORES
from k3jax.sharding.mesh import AXES, place
from k3jax.train_state import abstract_model

LINK_SHARE = 0.9  # of a link's documented bandwidth that collectives reach (scaling book, "TPUs")
HOP_SECONDS = 1e-6  # a message needs per link (scaling book, "TPUs")
CORE_LINKS = 6  # ICI links that the connection of the two devices of a TPU7x chip is worth [7x]
MATMUL_SHARE = 0.55  # of the peak that Newton-Schulz reaches, as the layers of TPU7x do

ASSUMPTIONS = (
    "compute: useful matmul FLOPs / (peak x the share that one layer group of kimi_k3 reaches, "
    "recomputation included; benchmarks/layer_group.jsonl, itself an estimate of libtpu's code)",
    f"interconnect: {LINK_SHARE:.0%} of the documented bandwidth of each link, {HOP_SECONDS * 1e6:.0f} us "
    "per hop; gathers use all dimensions of the torus that their group spans, both ways around a ring",
    "exchanges (all-to-all): balanced experts; bound by the bisection of the group's part of the torus",
    "hbm: operands and results of every op of the compiled program once",
    "SparseCores: not compiled for; gathers run on the TensorCore of the compiled program",
    "not in it: host input, stragglers, launch gaps, collectives that slow compute down beside them",
)


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU; a JAX device is one of `devices` parts of a chip."""

    kind: str  # as JAX names it
    devices: int  # JAX devices per chip
    hbm: float  # bytes of a device that the compiler lets a program use
    rank: int  # dimensions of the torus; a chip has two links in each
    link: float  # bytes per second through one link, one way
    ring: int  # a dimension closes to a ring where it is a multiple of this (3-D: all of them)
    example: str  # a topology
    layers: float  # share of the matmul peak in layers but for attention, recomputation included
    attention: float  # and in the attention kernels

    @property
    def peak(self) -> float:
        """bf16 FLOP/s of a device."""
        found = peak_flops(self.kind)
        assert found is not None
        return found

    @property
    def clock(self) -> float:
        """Hz."""
        return CORES[self.kind].clock

    @property
    def hbm_bandwidth(self) -> float:
        """Bytes per second of a device."""
        return CORES[self.kind].hbm


GIB = 2**30
# hbm: "available HBM" in libtpu 0.0.50's message for a program that is too large.
# link: bidirectional ICI bandwidth per chip / links / 2, docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x} [7x]:
# 400, 1200, 800, 1200 GB/s with 4, 6, 4, 6 links.
# ring: the same pages: slices of whole 4x4x4 cubes have all wrap-around links; in 2-D a side of 16 has.
# layers, attention: group of 3 KDA + 1 MLA layers at 8,192 tokens, benchmarks/layer_group.jsonl. TPU7x: 195.5 ms at
# the peak, of it 5.36 for attention; 355.0 and 15.18 estimated. v6e: 245.8 and 6.73; 537.4 and 17.56. v5e and
# v5p were not estimated there: they get v6e's shares.
CHIPS = {
    "v5e": Chip(
        kind="TPU v5 lite", devices=1, hbm=15.75 * GIB, rank=2, link=50e9, ring=16,
        example="v5e:4x4", layers=0.460, attention=0.383,
    ),
    "v5p": Chip(
        kind="TPU v5", devices=1, hbm=95.73 * GIB, rank=3, link=100e9, ring=4,
        example="v5p:16x16x16", layers=0.460, attention=0.383,
    ),
    "v6e": Chip(
        kind="TPU v6 lite", devices=1, hbm=31.24 * GIB, rank=2, link=100e9, ring=16,
        example="v6e:16x16", layers=0.460, attention=0.383,
    ),
    "tpu7x": Chip(
        kind="TPU7x", devices=2, hbm=94.74 * GIB, rank=3, link=100e9, ring=4,
        example="tpu7x:8x16x16", layers=0.560, attention=0.353,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """A slice, for example "tpu7x:8x16x16"."""

    name: str
    chip: Chip
    shape: tuple[int, ...]  # chips in each dimension

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices

    def is_ring(self, dim: int) -> bool:
        """Whether the last chip of a dimension is a neighbour of the first."""
        sizes = self.shape if self.chip.rank == 3 else (self.shape[dim],)
        return all(size % self.chip.ring == 0 for size in sizes)


def parse_topology(name: str | None) -> Topology:
    """Raises UserError that says what a topology looks like."""
    examples = ", ".join(chip.example for chip in CHIPS.values())
    if name is None:
        raise UserError(f"which TPUs? give --topology NAME, for example {examples}")
    family, _, sizes = name.partition(":")
    if family not in CHIPS:
        raise UserError(
            f"topology {name!r}: unknown TPU {family!r}; use one of {', '.join(CHIPS)} and a shape, "
            f"for example {examples}"
        )
    chip = CHIPS[family]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != chip.rank:
        raise UserError(
            f"topology {name!r}: the shape of {family} has {chip.rank} dimensions in chips, "
            f"for example {chip.example}"
        )
    return Topology(name, chip, tuple(map(int, sizes.split("x"))))


class Span(NamedTuple):
    """What a group of devices has of one dimension of the torus."""

    extent: int  # positions
    stride: int  # links from one to the next; as many groups share them
    ring: bool

    @property
    def links(self) -> float:
        """Links that the group has to itself, ways around counted apart."""
        return 0 if self.extent == 1 else (2 if self.ring else 1) / self.stride


@dataclass(frozen=True, kw_only=True)
class Box:
    """The part of the torus that one group of devices spans."""

    spans: tuple[Span, ...]
    cores: int  # devices of one chip in the group
    sharers: int  # groups that share the chip's links

    @property
    def chips(self) -> int:
        return math.prod(span.extent for span in self.spans)

    @property
    def size(self) -> int:
        return self.chips * self.cores


class _StandIn:
    """As much of a device as `place` reads."""

    platform = "tpu"

    def __init__(self, kind: str, coords: tuple[int, ...], core: int):
        self.device_kind, self.coords, self.core_on_chip = kind, coords, core
        self.process_index = 0


class Layout:
    """Where the axes of a mesh lie on the torus: as `make_mesh` places them."""

    def __init__(self, topology: Topology, sizes: Mapping[str, int]):
        self.topology, self.sizes = topology, dict(sizes)
        shape = (*topology.shape, 1)[:3]
        chip = topology.chip
        devices = [
            _StandIn(chip.kind, (x, y, z), core)
            for z in range(shape[2])
            for y in range(shape[1])
            for x in range(shape[0])
            for core in range(chip.devices)
        ]
        mesh = place(sizes, devices)
        coords = [(*d.coords[: len(topology.shape)], d.core_on_chip) for d in mesh.flat]
        self._coords = np.array(coords).reshape(*mesh.shape, -1)
        self.box = functools.cache(self._box)

    def _box(self, axes: tuple[str, ...]) -> Box:
        """The part of the torus that a group over `axes` spans."""
        index = tuple(slice(None) if axis in axes else 0 for axis in AXES)
        *dims, cores = self._coords[index].reshape(-1, self._coords.shape[-1]).T
        spans = []
        for dim, positions in enumerate(dims):
            places = sorted(set(positions.tolist()))
            stride = max(np.diff(places).tolist(), default=1)
            full = self.topology.shape[dim]
            ring = len(places) * stride == full > 2 and self.topology.is_ring(dim)
            spans.append(Span(len(places), stride, ring))
        count, here = len(cores), len(set(cores.tolist()))
        if math.prod(span.extent for span in spans) * here != count:  # no box: a line, to be safe
            spans = [Span(-(-count // here), 1, False)]
        return Box(spans=tuple(spans), cores=here, sharers=self.topology.chip.devices // here)

    def describe(self, axis: str) -> str:
        """For example "x 8 (ring), y 4 of 16, 2 devices of a chip"."""
        box = self.box((axis,))
        parts = []
        for name, span, full in zip("xyz", box.spans, self.topology.shape, strict=False):
            if span.extent > 1:
                part = "" if span.extent == full else f" of {full}"
                stride = f", {span.stride} apart" if span.stride > 1 else ""
                parts.append(f"{name} {span.extent}{part}{stride}{' (ring)' if span.ring else ''}")
        if box.cores > 1:
            parts.append(f"{box.cores} devices of a chip")
        return ", ".join(parts) or "-"


def sent_bytes(kind: str, operand: float, size: int) -> float:
    """Bytes that one device of a group of `size` sends at least, of a collective with this operand."""
    share = (size - 1) / size
    return {
        "all-gather": operand * (size - 1),
        "reduce-scatter": operand * share,
        "all-reduce": 2 * operand * share,
        "all-to-all": operand * share,
        "ragged-all-to-all": operand * share,
        "collective-permute": operand,
    }[kind]


def collective_seconds(kind: str, operand: float, box: Box, chip: Chip) -> float:
    """Time of one collective.

        gather, scatter   V (c - 1) / c x sharers / (links x bandwidth); V: gathered bytes, c: chips
        all-reduce        both
        all-to-all        max over dimensions of  devices x e x stride x B / (4 x ways x bandwidth)
        permute           B x sharers x stride / bandwidth

    An exchange in a ring of e chips, each with `devices` that send B bytes: half of them send half of
    theirs across the middle, over two links; the formula divides the two.

    Args:
        kind: HLO opcode.
        operand: bytes of the operand on one device.
        box: the group's part of the torus.
        chip: the generation.
    """
    bandwidth = chip.link * LINK_SHARE
    used = [span for span in box.spans if span.extent > 1]
    hops = sum(span.stride * (span.extent // 2 if span.ring else span.extent - 1) for span in used)
    if kind == "collective-permute":
        hops = max((span.stride for span in used), default=0)
    latency = HOP_SECONDS * max(hops, 1)
    if not used:
        return latency + sent_bytes(kind, operand, box.size) / (CORE_LINKS * bandwidth)
    if kind in ("all-to-all", "ragged-all-to-all"):
        ways = [span.extent * span.stride / (2 if span.ring else 1) for span in used]
        return latency + chip.devices * operand * max(ways) / 4 / bandwidth
    if kind == "collective-permute":
        return latency + operand * box.sharers * max(span.stride for span in used) / bandwidth
    moved = operand * (box.size if kind == "all-gather" else 1) * (2 if kind == "all-reduce" else 1)
    links = sum(span.links for span in used)
    share = (box.chips - 1) / box.chips
    return latency + moved * share * box.sharers / (links * bandwidth)


class Collective(NamedTuple):
    """Collectives of one kind over the same axes, of one device in one step."""

    kind: str
    axes: tuple[str, ...]
    runs: int
    sent: float  # bytes, all runs
    seconds: float  # all runs
    hidden: float  # of the seconds those beside compute


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of one step on one device."""

    useful: float  # three forward passes
    attention: float  # of them the scores and values of MLA
    recomputed: float  # the backward pass repeats
    newton_schulz: float


def repeated_flops(cfg: K3Config, forward: float, matmul: float) -> float:
    """FLOPs per token of the forward pass that the backward pass repeats, by remat policy.

    What is kept of a layer spares the last product that makes it: w2 of the experts, o_proj.
    """
    if cfg.remat == "none":
        return 0.0
    if cfg.remat == "dots":  # products with weights are kept
        return forward - 2 * matmul
    spared = 0.0
    for attention, mixer in cfg.layers:
        if "routed" in KEPT[cfg.remat] and mixer == "moe" and (moe := cfg.moe) is not None:
            spared += 2 * moe.num_active * moe.ffn_dim * (moe.latent_dim or cfg.width)
        if "attention" in KEPT[cfg.remat]:
            kda, mla = cfg.kda, cfg.mla
            width = (
                kda.num_heads * kda.head_dim if attention == "kda" else mla.num_heads * mla.v_dim
            )
            spared += 2 * width * cfg.width
    return forward - spared


@functools.cache
def work(cfg: K3Config, optim: OptimConfig, *, tokens: int, seq_len: int, devices: int) -> Work:
    """FLOPs of a step of `tokens` tokens, divided evenly.

    Newton-Schulz takes 5 (4 r^2 s + 2 r^3) FLOPs for a matrix with sides r <= s   (training.md 2.2)
    """
    matmul = parameter_counts(cfg).matmul
    forward = forward_flops_per_token(cfg, seq_len, matmul)
    kinds = [attention for attention, _ in cfg.layers]
    m = cfg.mla
    width = m.num_heads * (m.qk_nope_dim + m.qk_shared_dim + m.v_dim)
    attention = kinds.count("mla") * width * seq_len
    newton = 0.0
    _, params, _ = abstract_model(cfg)
    for row in optimizer_table(params, optim, qk_nope_dim=m.qk_nope_dim):
        for count, a, b in row.blocks:
            r, s = min(a, b), max(a, b)
            newton += count * 5 * (4 * r**2 * s + 2 * r**3)
    each = tokens / devices
    return Work(
        useful=3 * forward * each,
        attention=3 * attention * each,
        recomputed=repeated_flops(cfg, forward, matmul) * each,
        newton_schulz=newton / devices,
    )


class Times(NamedTuple):
    """Seconds of one step on one device, and what follows."""

    compute: float  # layers, head and loss
    optimizer: float  # Newton-Schulz, or the memory traffic of the update
    hbm: float  # all of the compiled program; 0 where it was not compiled
    exposed: float  # collectives that the schedule does not hide
    hidden: float  # and those that run beside compute

    @property
    def serial(self) -> float:
        """The step if nothing overlaps."""
        return max(self.compute + self.optimizer, self.hbm) + self.exposed + self.hidden

    @property
    def scheduled(self) -> float:
        """The step if what the schedule makes asynchronous hides as far as there is compute."""
        core = max(self.compute + self.optimizer, self.hbm)
        return max(core, self.hidden) + self.exposed

    @property
    def overlapped(self) -> float:
        """The step if everything overlaps."""
        return max(self.compute + self.optimizer, self.hbm, self.exposed + self.hidden)

    @property
    def bound(self) -> str:
        """What the largest of the floors is."""
        floors = {
            "compute": self.compute + self.optimizer,
            "hbm": self.hbm,
            "interconnect": self.exposed + self.hidden,
        }
        return max(floors, key=lambda name: floors[name])


def times(
    chip: Chip,
    done: Work,
    collectives: tuple[Collective, ...],
    *,
    parameters: float,
    hbm_bytes: float,
) -> Times:
    """Estimated times.

    Args:
        chip: the generation.
        done: FLOPs of a device.
        collectives: of a device.
        parameters: bytes of float32 master weights on a device: the update reads weight, momentum
            and gradient and writes two of them.
        hbm_bytes: that the compiled program moves on a device.
    """
    measured = 4 / 3  # the shares were measured with every forward pass repeated
    share = (done.useful + done.recomputed) / done.useful / measured
    layers = (done.useful - done.attention) / chip.layers + done.attention / chip.attention
    return Times(
        compute=layers * share / chip.peak,
        optimizer=max(
            done.newton_schulz / (chip.peak * MATMUL_SHARE), 5 * parameters / chip.hbm_bandwidth
        ),
        hbm=hbm_bytes / chip.hbm_bandwidth,
        exposed=sum(c.seconds - c.hidden for c in collectives),
        hidden=sum(c.hidden for c in collectives),
    )


def mfu(chip: Chip, done: Work, seconds: float) -> float:
    """Useful matmul FLOPs over what the device could do in that time."""
    return done.useful / (chip.peak * seconds)
