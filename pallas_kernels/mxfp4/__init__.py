"""MXFP4 weights: the format, and products with matrices that stay in it."""

from k3jax.pallas_kernels.mxfp4.codec import GROUP, dequantize_mxfp4, quantize_mxfp4
from k3jax.pallas_kernels.mxfp4.grouped import grouped_matmul_mxfp4

__all__ = ["GROUP", "dequantize_mxfp4", "grouped_matmul_mxfp4", "quantize_mxfp4"]
