"""Parameters that know their logical axes, and the region in which a device computes with its part.

On a mesh the whole forward and backward pass is one `shard_map` over all axes, the *region*: layers
see the local part of everything, and each collective of the program is written in this package. The
functions here are the identity without a mesh, and for axes of size 1.

Inside the region autodiff holds *partial* cotangents: of a value that is replicated over an axis
every device has a share, and their sum is the cotangent. So a device differentiates its own share of
the loss, and what a parameter gets is summed over all devices that hold it (`sum_over_replicas`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from k3jax.sharding.mesh import AXES
from k3jax.sharding.rules import RULES, spec_axes, split_axes

Initializer = Callable[..., jax.Array]


class Buffer(nnx.Variable):
    """Model state that is saved and restored but never differentiated (router biases)."""


def param(
    rngs: nnx.Rngs,
    init: Initializer,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: str = "float32",
) -> nnx.Param:
    """A parameter with one logical axis name per dimension.

    Args:
        rngs: source of the initialisation key (stream `params`).
        init: `init(key, shape, dtype)`, for example `nnx.initializers.normal(0.02)`; independent
            elements of one distribution, as training draws many weights at once.
        shape: array shape.
        axes: one logical name per dimension (see `rules.py`), None for a dimension never sharded.
        dtype: storage type; float32 master weights by default.

    Returns: an `nnx.Param` whose metadata has `logical_axes`, the whole shape (`global_shape`) and
    the initialiser (`init`). Stacking layers in front adds an axis to the value only; readers
    prepend "layers" when the rank exceeds `len(axes)`.
    """
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} name {len(axes)} dimensions, shape {shape} has {len(shape)}")
    value = init(rngs.params(), shape, jnp.dtype(dtype))
    return nnx.Param(value, logical_axes=axes, global_shape=shape, init=init)


def region(fn: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`fn` on every device with its part of the arguments: all axes are manual inside.

    Raises: ValueError for a mesh that `make_mesh` did not make: its axes must be Explicit (KF-118).
    """
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Explicit}:
        raise ValueError(
            f"the mesh has axes {mesh.axis_names} of types {mesh.axis_types}; make it with "
            "k3jax.sharding.mesh.make_mesh, whose axes are Explicit"
        )
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axis_sizes() -> dict[str, int]:
    """Size of each mesh axis inside the region; 1 outside."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = not mesh.empty and mesh.are_all_axes_manual
    return {axis: mesh.shape.get(axis, 1) if inside else 1 for axis in AXES}


def axis_size(name: str) -> int:
    """Size of one mesh axis inside the region; 1 outside."""
    return axis_sizes()[name]


def axis_index(name: str) -> int | Int[Array, ""]:
    """This device's position on a mesh axis; 0 outside the region."""
    return jax.lax.axis_index(name) if axis_size(name) > 1 else 0


def wide_axes(names: tuple[str, ...] = AXES) -> tuple[str, ...]:
    """Those of the axes that are split here."""
    sizes = axis_sizes()
    return tuple(name for name in names if sizes[name] > 1)


def psum(x: Any, *names: str) -> Any:
    """Sum over mesh axes of every leaf."""
    axes = wide_axes(names)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: Any, *names: str) -> Any:
    """Largest value over mesh axes of every leaf, without gradient."""
    axes = wide_axes(names)
    return jax.lax.pmax(x, axes) if axes else x


def pmin(x: Any, *names: str) -> Any:
    """Smallest value over mesh axes of every leaf, without gradient."""
    axes = wide_axes(names)
    return jax.lax.pmin(x, axes) if axes else x


def concatenated(x: Array, dim: int, *names: str) -> Array:
    """The parts of all devices of some mesh axes, one behind the other."""
    axes = wide_axes(names)
    return jax.lax.all_gather(x, axes, axis=dim % x.ndim, tiled=True) if axes else x


def gathered(variable: nnx.Variable, dtype: Any = None) -> Array:
    """A parameter as its layer computes with it: in `dtype`, whole but for its compute axes.

    Cast before it travels. The gradient comes back as a sum over the devices, in float32, of which
    each keeps the part that it stores.
    """
    value = variable[...]
    dtype = jnp.dtype(dtype or value.dtype)
    dims = _storage(variable, value.ndim)
    return _gather(value, dims, dtype) if dims else value.astype(dtype)


def _storage(variable: nnx.Variable, rank: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """(dimension, mesh axes) of each dimension that is split for storage."""
    meta = variable.get_metadata()
    axes, shape, sizes = meta["logical_axes"], meta["global_shape"], axis_sizes()
    stacked = rank - len(axes)
    splits = split_axes(axes, shape, sizes)
    return tuple((stacked + i, storage) for i, (_, storage) in enumerate(splits) if storage)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x, dims, dtype):
    x = x.astype(dtype)
    for dim, axes in dims:
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _gather_bwd(dims, dtype, like, d):
    d = d.astype(jnp.promote_types(d.dtype, jnp.float32))
    for dim, axes in reversed(dims):
        d = jax.lax.psum_scatter(d, axes, scatter_dimension=dim, tiled=True)
    return (d.astype(like.dtype),)


_gather.defvjp(lambda x, dims, dtype: (_gather(x, dims, dtype), x[:0]), _gather_bwd)


def contracted(variable: nnx.Variable, num_in: int) -> tuple[str, ...]:
    """Mesh axes over which a product with the first `num_in` dimensions must be summed."""
    names = variable.get_metadata()["logical_axes"][:num_in]
    compute = (RULES[name].compute for name in names if name is not None)
    return wide_axes(tuple(name for name in compute if name is not None))


def lookup(table: nnx.Param, ids: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Rows of a table [X, D]; it is split over D and stays where it is.

    Every device reads its columns for the tokens of all, and sends each the columns of its own:
    the table, far larger than the rows that are asked for, does not travel, and its gradient is
    added up in its storage dtype.
    """
    value = table[...]
    dims = _storage(table, value.ndim)
    if not dims:
        return value[ids].astype(dtype)
    ((_, axes),) = dims  # the rows X are never split
    everyones = jax.lax.all_gather(ids.reshape(-1), axes, axis=0, tiled=True)
    columns = value[everyones].astype(dtype)
    rows = jax.lax.all_to_all(columns, axes, split_axis=0, concat_axis=1, tiled=True)
    return rows.reshape(*ids.shape, -1)


def split_tokens(x: Float[Array, "N ..."], axis: str = "tensor") -> Float[Array, "n ..."]:
    """This device's equal share of N rows that all devices of a mesh axis have; zeros fill the last."""
    ways = axis_size(axis)
    if ways == 1:
        return x
    share = -(-x.shape[0] // ways)
    x = jnp.pad(x, ((0, share * ways - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
    return jax.lax.dynamic_slice_in_dim(x, axis_index(axis) * share, share)


def join_tokens(
    x: Float[Array, "n ..."], length: int, axis: str = "tensor"
) -> Float[Array, "N ..."]:
    """The inverse of `split_tokens`: the rows of all devices of a mesh axis, of which `length` are real."""
    return concatenated(x, 0, axis)[:length]


def sum_over_replicas(tree: Any, specs: Any) -> Any:
    """Sum of every leaf over the mesh axes that its spec does not name: over all that hold it."""

    def total(x, spec: PartitionSpec):
        named = sum(spec_axes(spec), ())
        return psum(x, *(axis for axis in AXES if axis not in named))

    return jax.tree.map(total, tree, specs)
