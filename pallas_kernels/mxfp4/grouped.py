"""Grouped matmul with MXFP4 matrices: only the groups that have rows are decoded, a few at a time."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from k3jax.pallas_kernels.grouped_matmul.blocked import Blocks
from k3jax.pallas_kernels.mxfp4.codec import dequantize_mxfp4

DECODED_BYTES = 2**28  # decoded weights that may exist at once


def grouped_matmul_mxfp4(
    x: Float[Array, "M K"],
    packed: UInt8[Array, "E N half"],
    scale: UInt8[Array, "E N groups"],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "M N"]:
    """Multiply each row by the matrix of its group: `grouped_matmul` of the decoded matrices.

    Args:
        x: rows sorted by group.
        packed, scale: one matrix [out, in] per group, as `dequantize_mxfp4` reads it.
        group_sizes: rows of each group, in order, 0 allowed; rows beyond their sum give 0.

    Returns: products in x's dtype.
    Numerics: weights are decoded to x's dtype, exactly; float32 accumulation.
    Cost: reads the codes of groups with rows, once per block of their rows; not differentiated.
    """
    M, K = x.shape
    E, N, _ = packed.shape
    if packed.shape[2] * 2 != K or group_sizes.shape != (E,):
        raise ValueError(
            f"x {x.shape}, codes {packed.shape} and group sizes {group_sizes.shape} do not fit "
            "[M, K], [E, N, K / 2] and [E]"
        )
    if M == 0 or E == 0:
        return jnp.zeros((M, N), x.dtype)
    blocks = Blocks.of(M, group_sizes)

    def product(block):
        rows, group = block
        w = dequantize_mxfp4(packed[group], scale[group], x.dtype)
        return jnp.einsum("sk,nk->sn", rows, w, preferred_element_type=jnp.float32)

    rows = blocks.gather(x)
    at_once = max(DECODED_BYTES // (K * N * x.dtype.itemsize), 1)
    at_once = math.ceil(rows.shape[0] / math.ceil(rows.shape[0] / at_once))
    y = jax.lax.map(product, (rows, blocks.group), batch_size=at_once)
    return blocks.scatter(y.astype(x.dtype), M)
