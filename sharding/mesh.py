"""The device mesh: how many ways each axis splits the work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    # ways to split the batch with parameters replicated; -1: all devices that are left
    data: int = -1
    fsdp: int = 1  # ways to split the batch and, with it, parameters and optimizer state

    def __post_init__(self):
        sizes = (self.data, self.fsdp)
        if any(n == 0 or n < -1 for n in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh.data={self.data}, mesh.fsdp={self.fsdp}: use sizes of at least 1, and -1 at most once"
            )


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with axes `data` and `fsdp` over `devices` (default: all); one device is a 1 x 1 mesh.

    Raises: ValueError if the axis sizes do not multiply to the number of devices.
    """
    devices = list(devices if devices is not None else jax.devices())
    sizes = {"data": cfg.data, "fsdp": cfg.fsdp}
    fixed = math.prod(n for n in sizes.values() if n > 0)
    sizes = {axis: len(devices) // fixed if n == -1 else n for axis, n in sizes.items()}
    if math.prod(sizes.values()) != len(devices):
        asked = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
        raise ValueError(
            f"mesh {asked} needs {math.prod(sizes.values())} devices, {len(devices)} are here: "
            "change --mesh.data or --mesh.fsdp"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        devices=devices,
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Placement of a batch [accumulation, rows, tokens]: rows over both axes."""
    return NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"), None))
