"""Attention of gated MLA: `mla_attention` for whole rows; against a paged cache `mla_prefill` for a
chunk of tokens and `mla_decode` for one."""

from k3jax.pallas_kernels.mla_attention.api import mla_attention
from k3jax.pallas_kernels.mla_attention.chunked import attention
from k3jax.pallas_kernels.mla_attention.decode import mla_decode
from k3jax.pallas_kernels.mla_attention.pages import write_pages
from k3jax.pallas_kernels.mla_attention.prefill import mla_prefill

__all__ = ["attention", "mla_attention", "mla_decode", "mla_prefill", "write_pages"]
