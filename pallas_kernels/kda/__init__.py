"""Kimi Delta Attention: `kda` and its forms for training, decoding and long rows, and the gates."""

from k3jax.pallas_kernels.kda.api import kda, kda_from_logits, kda_summary
from k3jax.pallas_kernels.kda.decode import kda_step, kda_verify
from k3jax.pallas_kernels.kda.gates import bounded_log_decay, l2_normalize, softplus_log_decay

__all__ = [
    "bounded_log_decay",
    "kda",
    "kda_from_logits",
    "kda_step",
    "kda_summary",
    "kda_verify",
    "l2_normalize",
    "softplus_log_decay",
]
