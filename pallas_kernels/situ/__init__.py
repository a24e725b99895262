"""SiTU-GLU, the activation between the matmuls of a feed-forward layer."""

from k3jax.pallas_kernels.situ.api import situ

__all__ = ["situ"]
