"""Which layer lies where: equal layers, and groups of layers that repeat, form a *stack*.

The parameters of a stack have a leading axis and its layers are scanned, so that the program does not grow with depth.
`plan_stacks` decides; nothing else knows.
"""

import functools
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Attention = Literal["kda", "mla"]
Mixer = Literal["dense", "moe"]


class Schedule(Protocol):
    """What `k3jax.model.K3Config` says of its layers."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_dense_layers(self) -> int: ...
    @property
    def pattern(self) -> tuple[Attention, ...]: ...
    @property
    def closing(self) -> tuple[Attention, ...]: ...
    @property
    def layers(self) -> tuple[tuple[Attention, Mixer], ...]: ...
    @property
    def scan_layers(self) -> bool: ...


class StackPlan(NamedTuple):
    """`repeats` repetitions of a unit of `size` layers, from absolute layer index `first` on."""

    first: int
    size: int
    repeats: int

    @property
    def name(self) -> str:
        """Key of the stack in parameter, cache and statistics trees, for example "layers_4_to_91"."""
        return f"layers_{self.first}_to_{self.first + self.size * self.repeats - 1}"


class Place(NamedTuple):
    """Where a layer lies: params[stack][layer], position `repetition` on the leading axis."""

    stack: str
    layer: str
    repetition: int


@functools.cache
def plan_stacks(cfg: Schedule) -> tuple[StackPlan, ...]:
    """The stacks of a model, in order.

    Whole groups without dense layers are one stack if there are at least two; outside them, runs of equal layers are
    stacks of one layer repeated. Without `scan_layers` every layer is a stack of its own.
    """
    if not cfg.scan_layers:
        return tuple(StackPlan(i, 1, 1) for i in range(cfg.num_layers))
    size, layers = len(cfg.pattern), cfg.layers
    whole = (cfg.num_layers - len(cfg.closing)) // size
    skipped = min(-(-cfg.num_dense_layers // size), whole)
    groups = range(skipped * size, whole * size) if whole - skipped >= 2 and size > 1 else range(0)
    stacks: list[StackPlan] = []
    i = 0
    while i < cfg.num_layers:
        if i in groups:
            stacks.append(StackPlan(i, size, len(groups) // size))
        else:
            stop = groups.start if i < groups.start else cfg.num_layers
            run = next((j for j in range(i, stop) if layers[j] != layers[i]), stop) - i
            stacks.append(StackPlan(i, 1, run))
        i += stacks[-1].size * stacks[-1].repeats
    return tuple(stacks)


def locate(cfg: Schedule, index: int) -> Place:
    """Place of the layer with this absolute index."""
    plan = next(p for p in reversed(plan_stacks(cfg)) if p.first <= index)
    repetition, position = divmod(index - plan.first, plan.size)
    return Place(plan.name, f"layer_{position}", repetition)


def restacked(tree: dict[str, Any], cfg: Schedule, other: Schedule) -> dict[str, Any]:
    """Parameters or buffers of the model `cfg`, as `other`, whose layers are stacked otherwise, has them."""
    stacks = {plan.name for plan in plan_stacks(cfg)}
    result = {name: leaf for name, leaf in tree.items() if name not in stacks}

    def layer(index: int) -> Any:
        stack, name, repetition = locate(cfg, index)
        return (
            jax.tree.map(lambda x: x[repetition], tree[stack].get(name)) if stack in tree else None
        )

    for plan in plan_stacks(other):
        for j in range(plan.size):
            repeated = [layer(plan.first + j + r * plan.size) for r in range(plan.repeats)]
            if repeated[0] is not None:  # buffers: some layers have none
                stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *repeated)
                result.setdefault(plan.name, {})[f"layer_{j}"] = stacked
    return result
