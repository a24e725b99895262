"""Calls of MLA's attention that the TPU compiler must accept, as factories for `tpu_cost`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.mla_attention import mla_attention, mla_decode, pairs, tpu_grid


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


def pairs_of_chunks(
    dtype: str = "bfloat16", *, B: int = 1, T: int = 600, H: int = 1, largest_block: int = 512
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(forward and backward of a chunk of `T` queries and the chunks of a row up to it, its inputs)."""
    tpu_grid.LARGEST_BLOCK = largest_block
    chunks = 4
    widths = ((1, B, T, H, 192), (1, B, T, H, 128), (1, B, H, T), (1, B, H, T))
    dtypes = (dtype, dtype, "float32", "float32")
    queries = tuple(map(jax.ShapeDtypeStruct, widths, dtypes))
    widths = ((B, T, H, 128), (B, T, 64), (B, T, H, 128))
    keys = tuple(jax.ShapeDtypeStruct((chunks, *x), dtype) for x in widths)
    ids = jax.ShapeDtypeStruct((chunks, B, T), jnp.int32)
    at = jax.ShapeDtypeStruct((), jnp.int32)

    def call(queries, keys, ids, chunk):
        way = pairs.choose(queries[0][0], *(x[0] for x in keys), backend="pallas_tpu")
        none = jnp.zeros(chunks, jnp.int32)
        visits = (none[0], chunk + 1, none, none + 1)
        row = pairs.Row(lambda j: tuple(x[j] for x in keys), 192**-0.5, ids, chunk, visits)

        def add(carry, j, *grads):
            return tuple(x.at[j].add(g) for x, g in zip(carry, grads, strict=True))

        carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys)
        return way.forward(queries[0], row), way.backward(*queries, row, add, carry)

    return call, (queries, keys, ids, at)
