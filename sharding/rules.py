"""One table from logical axes to mesh axes; layouts change here, equations never."""

from collections.abc import Mapping

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Every logical axis of a parameter. One mesh axis may serve one dimension of a parameter at most.
RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "latent": "fsdp",
    "vocab": None,
    "experts": None,
    "heads": None,
    "key": None,
    "value": None,
    "rank": None,
    "ffn": None,
}


def partition_spec(
    axes: tuple[str | None, ...], rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """Mesh axes of an array with the given logical axes; a mesh axis goes to its first claimant.

    Raises: ValueError for a logical axis that the table lacks.
    """
    used: set[str] = set()
    spec: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known are {', '.join(rules)}")
        mesh_axis = rules[axis] if axis is not None else None
        spec.append(mesh_axis if mesh_axis not in used else None)
        if mesh_axis is not None:
            used.add(mesh_axis)
    return PartitionSpec(*spec)


def logical_axes(model: nnx.Module) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of every parameter by path "a/b/c"; stacked parameters get "layers" in front."""
    axes = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = variable.get_metadata()["logical_axes"]
        stacked = len(variable.shape) - len(names)
        axes["/".join(map(str, path))] = ("layers",) * stacked + tuple(names)
    return axes


def state_shardings(tree, axes: Mapping[str, tuple[str | None, ...]], mesh: Mesh):
    """Placement of every leaf of a training state: as its parameter, or replicated.

    A leaf belongs to a parameter if its path ends in the parameter's path and the ranks agree, which holds for
    parameters, gradients and optimizer moments alike.

    Raises: ValueError naming parameter, dimension and sizes if a dimension does not divide over its mesh axis.
    """

    def place(path, leaf):
        keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
        for start in range(len(keys)):
            name = "/".join(keys[start:])
            if name in axes and len(axes[name]) == len(leaf.shape):
                spec = partition_spec(axes[name])
                for dim, (size, mesh_axis) in enumerate(zip(leaf.shape, spec, strict=True)):
                    if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                        raise ValueError(
                            f"{name}: dimension {dim} ({axes[name][dim]}, size {size}) does not divide over "
                            f"mesh axis {mesh_axis} of size {mesh.shape[mesh_axis]}"
                        )
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree)
