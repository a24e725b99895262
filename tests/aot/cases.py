"""KDA calls that the TPU compiler must accept, as factories for `tpu_cost`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.pallas_kernels.kda import kda, kda_from_logits

DOCUMENTS = 3  # with cu_seqlens


def passes(
    dtype: str = "bfloat16",
    *,
    B: int = 1,
    T: int = 600,
    H: int = 2,
    K: int = 128,
    V: int = 128,
    inference: bool = False,
    logits: bool = False,
    packing: str | None = None,
    state: bool = False,
    **options: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a function of the op's results and all gradients; its inputs).

    With `inference` also of the results by themselves: a forward pass that keeps nothing.
    """
    x, wide = (jax.ShapeDtypeStruct((B, T, H, n), dtype) for n in (K, V))
    decay = jax.ShapeDtypeStruct((B, T, H, K), dtype if logits else jnp.float32)
    arrays = {"q": x, "k": x, "v": wide, "z" if logits else "g": decay}
    arrays["beta"] = jax.ShapeDtypeStruct((B, T, H), dtype)
    if logits:
        arrays["A_log"] = jax.ShapeDtypeStruct((H,), jnp.float32)
        arrays["dt_bias"] = jax.ShapeDtypeStruct((H, K), jnp.float32)
    rows, layout = B, {}
    if packing == "segment_ids":
        layout[packing] = jax.ShapeDtypeStruct((B, T), jnp.int32)
    elif packing == "cu_seqlens":
        rows = DOCUMENTS
        layout[packing] = jax.ShapeDtypeStruct((rows + 1,), jnp.int32)
    if state:
        arrays["state"] = jax.ShapeDtypeStruct((rows, H, K, V), jnp.float32)
    op = kda_from_logits if logits else kda

    def run(arrays, layout):
        return op(**arrays, **layout, **options, g_min=-5.0, backend="pallas_tpu")

    def call(arrays, layout, cotangents):
        results, pull = jax.vjp(lambda arrays: run(arrays, layout), arrays)
        return results, pull(cotangents), run(arrays, layout) if inference else None

    return call, (arrays, layout, jax.eval_shape(run, arrays, layout))
