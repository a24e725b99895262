"""Depthwise causal convolution of a few taps, followed by SiLU."""
