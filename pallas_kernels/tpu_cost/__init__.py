"""What a JAX function costs on a TPU, without a TPU: libtpu compiles for named topologies anywhere."""

from k3jax.pallas_kernels.tpu_cost.estimate import (
    CHIPS,
    TOPOLOGIES,
    Chip,
    compile_all,
    environment,
    estimate,
)

__all__ = ["CHIPS", "TOPOLOGIES", "Chip", "compile_all", "environment", "estimate"]
