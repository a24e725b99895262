"""The device mesh: how many ways each axis splits the work."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from k3jax.sharding.mesh_config import MeshConfig

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")  # axes that split the rows of a batch
PLACED = ("tensor", "expert", "context", "fsdp", "data")  # on a torus, the most local first


def mesh_sizes(cfg: MeshConfig, num_devices: int) -> dict[str, int]:
    """Size of each axis over so many devices.

    Raises: ValueError if the sizes do not multiply to their number.
    """
    sizes = dataclasses.asdict(cfg)
    fixed = math.prod(n for n in sizes.values() if n > 0)
    sizes = {axis: num_devices // fixed if n == -1 else n for axis, n in sizes.items()}
    if math.prod(sizes.values()) != num_devices:
        asked = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
        raise ValueError(
            f"mesh {asked} needs {math.prod(sizes.values())} devices, {num_devices} are here: "
            "change --mesh.data, or another axis"
        )
    return sizes


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with the five axes over `devices` (default: all); one device is a mesh of ones.

    Axes are Explicit: an array's type says how it is split, and a mistake is an error at once.

    Raises: ValueError if the axis sizes do not multiply to the number of devices.
    """
    devices = list(devices if devices is not None else jax.devices())
    placed = place(mesh_sizes(cfg, len(devices)), devices)
    return Mesh(placed, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def mesh_of_several(cfg: MeshConfig) -> Mesh | None:
    """`make_mesh`, or None where every axis has size 1: one device, the first of this process.

    Raises: ValueError as `make_mesh`; also for one device where several processes have some.
    """
    if dataclasses.astuple(cfg) != (1,) * len(AXES):
        return make_mesh(cfg)
    if jax.process_count() > 1:
        raise ValueError(
            f"{jax.process_count()} processes have {jax.device_count()} devices and the mesh is of "
            "one: say how they share the model, for example --mesh.fsdp -1 --mesh.data 1"
        )
    return None


def place(sizes: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Devices in the shape of the mesh, [data fsdp expert context tensor].

    On a torus of TPUs an axis becomes a block that is as compact as can be, the inner axes first: an
    exchange among experts is bound by the longest side of its block, of e chips e / 4 (a ring e / 8)
    times what each sends, while the gathers of fsdp, the last but one, use every dimension. JAX's own
    placement gives whole dimensions to the inner axes: experts in a ring of 16 instead of a cube. It
    serves other devices, and sizes that have primes which the torus lacks.
    """
    shape = tuple(sizes[axis] for axis in AXES)
    torus = _torus(devices)
    if torus is not None:
        left, factors = list(torus.shape), [[] for _ in torus.shape]  # innermost first
        for axis in PLACED:
            extent = [1] * torus.ndim
            for prime in _primes(sizes[axis]):
                fitting = [dim for dim in range(torus.ndim) if left[dim] % prime == 0]
                if not fitting:
                    break
                chip = torus.ndim - 1  # its devices are closest to each other
                dim = min(fitting, key=lambda dim: (dim != chip, extent[dim], -left[dim]))
                left[dim] //= prime
                extent[dim] *= prime
                factors[dim].append((axis, prime))
        parts = [part for dim in factors for part in reversed(dim)]
        if all(n == 1 for n in left):
            order = [i for axis in AXES for i, (name, _) in enumerate(parts) if name == axis]
            return torus.reshape([n for _, n in parts]).transpose(order).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _torus(devices: Sequence[Any]) -> np.ndarray | None:
    """TPUs by their place, [x y z device of the chip]; None for others, and where some are missing."""
    if any(device.platform != "tpu" for device in devices):
        return None
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    places -= places.min(0)
    torus = np.empty(places.max(0) + 1, object)
    for device, at in zip(devices, places, strict=True):
        torus[tuple(at)] = device
    return torus if torus.size == len(devices) else None


def _primes(n: int) -> list[int]:
    """Prime factors, largest first."""
    found, prime = [], 2
    while n > 1:
        while n % prime == 0:
            found.append(prime)
            n //= prime
        prime += 1
    return found[::-1]


def check_batch(sizes: Mapping[str, int], *, rows: int, tokens: int) -> None:
    """Raises ValueError, naming the numbers, if a batch [rows, tokens] does not divide over a mesh."""
    ways = math.prod(sizes[axis] for axis in ROWS)
    if rows % ways:
        raise ValueError(
            f"{rows} rows per pass do not divide over data x fsdp x expert = "
            f"{' x '.join(str(sizes[axis]) for axis in ROWS)} = {ways}: choose --batch-size "
            "and --accumulation so that each gets as many"
        )
    if tokens % sizes["context"]:
        raise ValueError(
            f"rows of seq_len={tokens} tokens do not divide over mesh.context="
            f"{sizes['context']}: choose a multiple of it"
        )


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Placement of a batch [rows, tokens]."""
    return NamedSharding(mesh, PartitionSpec(ROWS, "context"))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Placement of a batch [accumulation, rows, tokens]."""
    return NamedSharding(mesh, PartitionSpec(None, ROWS, "context"))
