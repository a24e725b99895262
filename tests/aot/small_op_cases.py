"""Calls of the small ops that the TPU compiler must accept, as factories for `tpu_cost`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.attention_residuals import attention_residuals
from k3jax.pallas_kernels.short_conv import short_conv

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def attn_res(
    rows: int = 2, B: int = 1, T: int = 256, D: int = 1024, *, traced: bool, normed: bool
) -> Case:
    """The op and all gradients, with as many valid rows as there are, or a traced number of them."""
    prefix = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    bank = jax.ShapeDtypeStruct((rows, B, T, D), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((D,), jnp.float32)

    def call(arrays, count, cotangents):
        def run(bank, prefix, query, norm, out_norm):
            return attention_residuals(
                bank, count if traced else rows, prefix, query, norm, eps=1e-5,
                out_norm=out_norm if normed else None, out_eps=1e-5 if normed else None,
                backend="pallas_tpu",
            )  # fmt: skip

        (x, _), pull = jax.vjp(run, *arrays)
        return x, pull(cotangents)

    arrays = (bank, prefix, weight, weight, weight)
    return call, (arrays, jax.ShapeDtypeStruct((), jnp.int32), (prefix, bank))


def conv(
    B: int = 1, T: int = 256, H: int = 16, *, W: int = 4, dtype: str = "bfloat16", packed: bool
) -> Case:
    """The op and all gradients, from a cache."""
    x = jax.ShapeDtypeStruct((B, T, H, 128), dtype)
    kernel = jax.ShapeDtypeStruct((W, H, 128), jnp.float32)
    cache = jax.ShapeDtypeStruct((B, W - 1, H, 128), dtype)
    segment_ids = jax.ShapeDtypeStruct((B, T), jnp.int32) if packed else None

    def call(x, kernel, cache, segment_ids, cotangents):
        def run(x, kernel, cache):
            return short_conv(x, kernel, cache=cache, segment_ids=segment_ids, backend="pallas_tpu")

        out, pull = jax.vjp(run, x, kernel, cache)
        return out, pull(cotangents)

    return call, (x, kernel, cache, segment_ids, (x, cache))
