"""Matrix product of rows with one weight matrix per group of rows."""

from k3jax.pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
