"""Products of rows with one weight matrix per group of rows, and the experts built on them."""

from k3jax.pallas_kernels.grouped_matmul.api import (
    experts,
    experts_backward,
    experts_forward,
    grouped_matmul,
)

__all__ = ["experts", "experts_backward", "experts_forward", "grouped_matmul"]
