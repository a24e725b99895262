"""One table from logical axes to mesh axes; layouts change here, equations never."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Rule(NamedTuple):
    """Where one dimension of a parameter is split.

    `compute` stays split while a layer computes. `storage` and `spare` split the parameter further
    where it rests, with gradient and optimizer state; `gathered` undoes that where the parameter is
    used. Compute and storage axes must divide the dimension, spare ones are taken where they do.
    """

    compute: str | None = None
    storage: str | None = None
    spare: tuple[str, ...] = ()


# Every logical axis of a parameter. A mesh axis goes to the first dimension that claims it.
RULES: Mapping[str, Rule] = {
    "layers": Rule(),
    "embed": Rule(storage="fsdp", spare=("context", "expert", "tensor")),
    "latent": Rule(storage="fsdp", spare=("context", "expert", "tensor")),
    "experts": Rule(compute="expert"),
    "heads": Rule(compute="tensor"),
    "ffn": Rule(compute="tensor"),
    "rank": Rule(spare=("fsdp", "context", "expert")),
    "expert_ffn": Rule(),
    "scores": Rule(),
    "vocab": Rule(),
    "key": Rule(),
    "value": Rule(),
}


def split_axes(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    rules: Mapping[str, Rule] = RULES,
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Per dimension of a parameter the mesh axes of its (compute, storage) split.

    Vectors are not split for storage: they are small, and each gather costs its latency. Nor are
    axes of size 1 named, so that a mesh of ones splits nothing.

    Args:
        axes: logical axis of each dimension; None is never split.
        shape: global sizes, in the same order.
        sizes: size of each mesh axis.

    Raises: ValueError for an unknown logical axis, and for a dimension that does not divide.
    """
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known are {', '.join(rules)}")
    chosen = [rules[axis] if axis is not None else Rule() for axis in axes]
    vector = len([axis for axis in axes if axis != "layers"]) < 2
    used = {rule.compute for rule in chosen}
    result = []
    for axis, size, rule in zip(axes, shape, chosen, strict=True):
        needed = [rule.compute] + ([] if vector else [rule.storage])
        splits, ways = ([], []), 1
        for name in (*needed, *(() if vector else rule.spare)):
            if name is None or sizes[name] == 1 or (name in used and name != rule.compute):
                continue
            if size % (ways * sizes[name]) == 0:
                splits[name != rule.compute].append(name)
                used.add(name)
                ways *= sizes[name]
            elif name in needed:
                raise _uneven(axis, size, name, sizes[name])
        result.append((tuple(splits[0]), tuple(splits[1])))
    return tuple(result)


def _uneven(axis: str | None, size: int, name: str, ways: int) -> ValueError:
    near = [n for n in range(1, size + 1) if size % n == 0]
    use = max((n for n in near if n <= ways), default=1)
    return ValueError(
        f"dimension {axis} of size {size} does not divide over mesh axis {name} of size {ways}: "
        f"use --mesh.{name} {use}, or another divisor of {size}"
    )


def partition_spec(
    axes: tuple[str | None, ...], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> PartitionSpec:
    """Placement of a parameter where it rests; arguments as in `split_axes`."""
    dims = (compute + storage for compute, storage in split_axes(axes, shape, sizes))
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in dims))


def spec_axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension that a PartitionSpec names; the inverse of writing one."""
    return [() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in spec]


def logical_axes(model: nnx.Module) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of every variable that has them, by path "a/b/c"; stacked ones get "layers" in front."""
    axes = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        names = variable.get_metadata().get("logical_axes")
        if names is None:  # a buffer that lies whole on every device
            continue
        stacked = len(variable.shape) - len(names)
        axes["/".join(map(str, path))] = ("layers",) * stacked + tuple(names)
    return axes


def state_specs(
    tree: Any, axes: Mapping[str, tuple[str | None, ...]], sizes: Mapping[str, int]
) -> Any:
    """PartitionSpec of every leaf of a training state: as its parameter, or replicated.

    A leaf belongs to a parameter if its path ends in the parameter's path and the ranks agree,
    which holds for parameters, gradients and optimizer moments alike.

    Raises: ValueError naming parameter, dimension and sizes if one does not divide.
    """

    def place(path, leaf):
        keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
        for start in range(len(keys)):
            name = "/".join(keys[start:])
            if name in axes and len(axes[name]) == len(leaf.shape):
                try:
                    return partition_spec(axes[name], leaf.shape, sizes)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(place, tree)


def state_shardings(tree: Any, axes: Mapping[str, tuple[str | None, ...]], mesh: Mesh) -> Any:
    """`state_specs` on a mesh."""
    specs = state_specs(tree, axes, mesh.shape)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
