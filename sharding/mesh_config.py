"""The numbers of a mesh; needs no JAX."""

import dataclasses
from dataclasses import dataclass


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
