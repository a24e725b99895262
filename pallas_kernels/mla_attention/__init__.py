"""Attention of gated MLA: `mla_attention` for whole rows, `attention` also against a cache, and
`mla_decode` for one token against a paged cache."""

from k3jax.pallas_kernels.mla_attention.api import mla_attention
from k3jax.pallas_kernels.mla_attention.chunked import attention
from k3jax.pallas_kernels.mla_attention.decode import mla_decode

__all__ = ["attention", "mla_attention", "mla_decode"]
