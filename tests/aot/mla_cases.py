"""Calls of MLA's attention that the TPU compiler must accept, as factories for `tpu_cost`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.mla_attention import mla_attention, mla_decode, tpu_grid


def passes(
    dtype: str = "bfloat16",
    *,
    B: int = 1,
    T: int = 600,
    H: int = 2,
    V: int = 128,
    segments: bool = False,
    backward: bool = True,
    largest_block: int = 2048,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a function of the op's results and, with `backward`, all gradients; its inputs)."""
    tpu_grid.LARGEST_BLOCK = largest_block  # short code compiles faster
    widths = ((B, T, H, 192), (B, T, H, 128), (B, T, 64), (B, T, H, V))
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in widths)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32) if segments else None
    d_o = jax.ShapeDtypeStruct((B, T, H, V), jnp.float32)

    def run(*arrays, ids):
        return mla_attention(*arrays, scale=192**-0.5, segment_ids=ids, backend="pallas_tpu")

    def call(arrays, ids, d_o):
        results, pull = jax.vjp(lambda *x: run(*x, ids=ids), *arrays)
        return results, pull((d_o, jnp.zeros_like(results[1])))

    if backward:
        return call, (arrays, ids, d_o)
    return (lambda arrays, ids: run(*arrays, ids=ids)), (arrays, ids)


def decode(
    dtype: str = "bfloat16",
    q_dtype: str | None = None,
    *,
    B: int = 4,
    H: int = 96,
    page: int = 64,
    tokens: int = 8192,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a decoding step of K3's widths, its inputs)."""
    q = jax.ShapeDtypeStruct((B, H, 576), q_dtype or dtype)
    pages = jax.ShapeDtypeStruct((B * tokens // page, page, 576), dtype)
    table = jax.ShapeDtypeStruct((B, tokens // page), jnp.int32)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)

    def step(*args):
        return mla_decode(*args, scale=192**-0.5, kv_rank=512, backend="pallas_tpu")

    return step, (q, pages, table, lengths)
