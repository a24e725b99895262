"""The device mesh: how many ways each axis splits the work."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")  # axes that split the rows of a batch


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    # ways to split the rows with parameters replicated; -1: all devices that are left
    data: int = -1
    fsdp: int = 1  # ways to split the rows and, with them, parameters and optimizer state
    expert: int = 1  # ways to split the rows and, with them, the routed experts
    context: int = 1  # ways to split the tokens of a row
    tensor: int = 1  # ways to split heads and feed-forward channels

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        if any(n == 0 or n < -1 for n in sizes.values()) or list(sizes.values()).count(-1) > 1:
            given = ", ".join(f"mesh.{axis}={n}" for axis, n in sizes.items())
            raise ValueError(f"{given}: use sizes of at least 1, and -1 at most once")


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

    Axes are Explicit: an array's type says how it is split, and a mistake is an error at once. On
    TPUs a mesh axis gets whole dimensions of the torus where the sizes allow it, and else a part of
    one, which `jax.make_mesh` refuses on pods.

    Raises: ValueError if the axis sizes do not multiply to the number of devices.
    """
    devices = list(devices if devices is not None else jax.devices())
    sizes = mesh_sizes(cfg, len(devices))
    placed = mesh_utils.create_device_mesh(
        tuple(sizes[axis] for axis in AXES), devices, allow_split_physical_axes=True
    )
    return Mesh(placed, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def check_batch(mesh: Mesh, *, rows: int, tokens: int) -> None:
    """Raises ValueError, naming the numbers, if a batch [rows, tokens] does not divide over `mesh`."""
    ways = math.prod(mesh.shape[axis] for axis in ROWS)
    if rows % ways:
        raise ValueError(
            f"{rows} rows per pass do not divide over data x fsdp x expert = "
            f"{' x '.join(str(mesh.shape[axis]) for axis in ROWS)} = {ways}: choose --batch-size "
            "and --accumulation so that each gets as many"
        )
    if tokens % mesh.shape["context"]:
        raise ValueError(
            f"rows of seq_len={tokens} tokens do not divide over mesh.context="
            f"{mesh.shape['context']}: choose a multiple of it"
        )


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Placement of a batch [rows, tokens]."""
    return NamedSharding(mesh, PartitionSpec(ROWS, "context"))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Placement of a batch [accumulation, rows, tokens]."""
    return NamedSharding(mesh, PartitionSpec(None, ROWS, "context"))
