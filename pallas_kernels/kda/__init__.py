"""Kimi Delta Attention: `kda`, `kda_step` and the gates that prepare their inputs."""

from k3jax.pallas_kernels.kda.api import kda, kda_step
from k3jax.pallas_kernels.kda.gates import bounded_log_decay, l2_normalize, softplus_log_decay

__all__ = ["bounded_log_decay", "kda", "kda_step", "l2_normalize", "softplus_log_decay"]
