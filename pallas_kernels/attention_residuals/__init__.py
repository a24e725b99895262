"""Attention Residuals: a softmax mix over earlier depth."""

from k3jax.pallas_kernels.attention_residuals.api import (
    BankMix,
    attention_residuals,
    merge_prefix,
    mix_bank,
)

__all__ = ["BankMix", "attention_residuals", "merge_prefix", "mix_bank"]
