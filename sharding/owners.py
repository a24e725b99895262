"""Whole matrices on one owner each, for work on matrices whose dimensions are sharded."""

import itertools
import math
import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array, Float

from k3jax.sharding.rules import spec_axes


def on_explicit_mesh(x: Array) -> bool:
    """Whether x carries its sharding in its type, as arrays on a mesh with Explicit axes do."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def by_owner(
    fn: Callable[[Array], Array],
    x: Float[Array, "..."],
    axes: tuple[int, ...],
    dtype: str | None = None,
) -> Float[Array, "..."]:
    """fn on the matrices inside x, each of them whole on one device, in the sharding of x.

        N matrices on each of F devices in parts  <->  N / F whole matrices on each (all-to-all)

    Devices that hold parts of the same matrices share them out; axes of x that count matrices may
    be sharded too and stay where they are, and if they all are, nothing moves. Devices with copies
    of the same parts (replicated mesh axes) split the work as well where that leaves each of them
    fewer matrices, at the price of one all-gather of the result. Counts that do not divide are
    padded with zero matrices.

    Args:
        fn: works on every matrix by itself, without collectives, and keeps the shape; sees
            [n, *dims] with the dims of `axes` in order and whole, for some n of its own choosing
            per device.
        x: array on a mesh with Explicit axes; the type tells where its parts are.
        axes: axes of x that form a matrix, negative and increasing.
        dtype: what is sent to owners; x's own if omitted. Nothing is cast if nothing moves.

    Returns: the results in x's layout and sharding and in fn's dtype, which is what is sent back.
    Cost: two all-to-alls at most, each of one part of every matrix on a device, and memory for the
        owner's whole matrices, which are as many bytes again as the parts (up to the padding).
    """
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    names = spec_axes(spec)
    parts = [names[axis] for axis in axes]
    count = math.prod(
        size // _ways(mesh, names[i]) for i, size in enumerate(x.shape) if i - x.ndim not in axes
    )
    free = set(mesh.axis_names).difference(*names)
    copies = _useful_copies(
        count, _ways(mesh, sum(parts, ())), {a: mesh.shape[a] for a in mesh.axis_names if a in free}
    )
    local = partial(_on_device, fn, axes=axes, mesh=mesh, parts=parts, copies=copies, dtype=dtype)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _on_device(fn, x, *, axes, mesh: AbstractMesh, parts, copies, dtype):
    batch = [i for i in range(x.ndim) if i - x.ndim not in axes]
    order = (*batch, *(axis + x.ndim for axis in axes))
    moved = x.transpose(order)
    shape, dims = moved.shape, moved.shape[len(batch) :]
    matrices = moved.reshape(math.prod(shape[: len(batch)]), *dims)

    names, ways = sum(parts, ()), [_ways(mesh, p) for p in parts]
    split, shares = math.prod(ways), math.prod(mesh.shape[a] for a in copies)
    padding = -len(matrices) % (split * shares)
    matrices = jnp.pad(matrices, [(0, padding)] + [(0, 0)] * len(dims))
    share = len(matrices) // shares
    if shares > 1:
        start = jax.lax.axis_index(copies) * share
        matrices = jax.lax.dynamic_slice_in_dim(matrices, start, share)

    # [w0, w1, n, d0, d1] from the devices <-> [n, w0, d0, w1, d1], the whole matrices
    k, n = len(dims), share // split
    received = (*ways, n, *dims)
    to_whole = (k, *itertools.chain(*((i, k + 1 + i) for i in range(k))))
    if split > 1:
        matrices = matrices.astype(dtype or x.dtype).reshape(split, n, *dims)
        matrices = jax.lax.all_to_all(matrices, names, 0, 0).reshape(received).transpose(to_whole)
        matrices = matrices.reshape(n, *map(operator.mul, ways, dims))
    result = fn(matrices)
    if split > 1:
        to_parts = sorted(range(2 * k + 1), key=lambda i: to_whole[i])
        result = result.reshape([received[i] for i in to_whole]).transpose(to_parts)
        result = jax.lax.all_to_all(result.reshape(split, n, *dims), names, 0, 0)
        result = result.reshape(share, *dims)
    if shares > 1:
        result = jax.lax.all_gather(result, copies, axis=0, tiled=True)
    result = result[: len(result) - padding].reshape(shape)
    return result.transpose(sorted(range(x.ndim), key=lambda i: order[i]))


def _useful_copies(count: int, split: int, free: dict[str, int]) -> tuple[str, ...]:
    """Replicated mesh axes over which to split the matrices: those that leave a device fewer.

    Padding may at most double the matrices, so that few of them on many copies cost no memory.
    """
    chosen, ways = [], split
    for axis, size in free.items():
        more = ways * size
        if -(-count // more) < -(-count // ways) and more <= 2 * count:
            chosen.append(axis)
            ways = more
    return tuple(chosen)


def _ways(mesh: AbstractMesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)
