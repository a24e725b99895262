"""Depthwise causal convolution of a few taps, followed by SiLU."""

from k3jax.pallas_kernels.short_conv.api import short_conv, short_conv_streams

__all__ = ["short_conv", "short_conv_streams"]
