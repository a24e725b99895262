"""The short convolution in front of the KDA recurrence (architecture 5.2)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels import slots as pools
from k3jax.pallas_kernels.short_conv import chunked, pallas_tpu, triton_gpu

BACKENDS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.pallas_tpu, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.triton_gpu, triton_gpu.unsupported),
    "chunked": (chunked.chunked, dispatch.always),
}


def short_conv(
    x: Float[Array, "B T H K"],
    kernel: Float[Array, "W H K"],
    *,
    cache: Float[Array, "N W1 H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    slots: Int[Array, " B"] | None = None,
    has_state: Bool[Array, " B"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "N W1 H K"]]:
    """Depthwise causal convolution and SiLU, with what a later call needs to go on.

        y_t = SiLU(sum_j w_j x_{t-W+1+j}),   j = 0 .. W-1      (architecture 5.2)

    Args:
        x: inputs, before the activation.
        kernel: taps, oldest first; the last one meets the current token.
        cache: the W - 1 inputs before x, oldest first; zeros if omitted. They belong to the row's
            first document; with a cache, padding lies on the right.
        segment_ids: document of each token, in runs; 0 is padding, which gives 0 and is never read.
            Taps that reach into another document are zero.
        lengths: tokens of each row, counted from the left, after which the returned cache is taken
            (rows padded on the right, a window of which only the first tokens are kept, a snapshot
            inside a prompt); if omitted, up to the last real token.
        slots, has_state: as in `kda_step`; with slots `cache` is a pool, and so is what returns.
        backend: `pallas_tpu` or `chunked` must run; None takes the first that can.

    Returns: outputs in x's dtype, and the cache after those tokens, zero where it would reach into
        another document, in the cache's dtype or x's.
    Numerics: float32 inside.
    """
    B, T = x.shape[:2]
    W = kernel.shape[0]
    if slots is not None:
        if cache is None:
            raise ValueError("slots are rows of a pool of caches, but cache is None; pass the pool")
        pools.check_slots(slots, cache.shape[0])
        rows = pools.read(cache, slots, has_state)
        y, rows = short_conv(
            x, kernel, cache=rows, segment_ids=segment_ids, lengths=lengths, backend=backend
        )
        return y, pools.write(cache, slots, rows)
    if cache is None:
        past = jnp.zeros((B, W - 1, *x.shape[2:]), x.dtype)
    else:
        past = pools.read(cache, None, has_state)
    if T == 0 or W == 1:
        y = x.astype(jnp.float32)
        if segment_ids is not None:
            y = jnp.where((segment_ids > 0)[..., None, None], y, 0)
        return jax.nn.silu(y * kernel[W - 1].astype(jnp.float32)).astype(x.dtype), past
    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)  # B W-1+T H K
    real = document = jnp.ones((), bool)  # replaced where there are documents
    reach = None
    if segment_ids is not None:
        real = segment_ids > 0
        # The row's first document is that of its first real token; the cache belongs to it too.
        first = jnp.take_along_axis(segment_ids, jnp.argmax(real, axis=1)[:, None], axis=1)
        document = jnp.concatenate([jnp.repeat(first, W - 1, axis=1), segment_ids], axis=1)
        reach = jnp.zeros((B, T), jnp.int32)
        for d in range(W):
            same = real & (document[:, W - 1 - d : W - 1 - d + T] == segment_ids)
            reach |= same.astype(jnp.int32) << d
    run = dispatch.choose("short_conv", BACKENDS, backend, x, kernel)
    y = run(x, kernel, past, reach)
    if lengths is None and segment_ids is not None:
        lengths = jnp.max(jnp.where(real, jnp.arange(1, T + 1), 0), axis=1)
    if lengths is None:
        new_cache = inputs[:, T:]
    else:
        window = lengths[:, None] + jnp.arange(W - 1, dtype=lengths.dtype)
        new_cache = jnp.take_along_axis(inputs, window[..., None, None], axis=1)
        if segment_ids is not None:
            owner = jnp.take_along_axis(document, window, axis=1)
            new_cache = jnp.where((owner == owner[:, -1:])[..., None, None], new_cache, 0)
    return y, new_cache.astype(past.dtype)


def short_conv_streams(
    xs: tuple[Float[Array, "B T H K"], ...],
    kernels: tuple[Float[Array, "W H K"], ...],
    *,
    cache: Float[Array, "B W1 S H K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    backend: str | None = None,
) -> tuple[tuple[Float[Array, "B T H K"], ...], Float[Array, "B W1 S H K"]]:
    """`short_conv` of several streams with a kernel each, in the way that suits the backend.

    A kernel takes them one by one: side by side they would be copied, there and back. XLA has them
    side by side as heads, one program in place of S.
    """
    run = dispatch.choose("short_conv", BACKENDS, backend, xs[0], kernels[0])
    options = {"segment_ids": segment_ids, "backend": backend}
    if run is not chunked.chunked:
        pasts = [None if cache is None else cache[:, :, n] for n in range(len(xs))]
        each = [
            short_conv(x, kernel, cache=past, **options)
            for x, kernel, past in zip(xs, kernels, pasts, strict=True)
        ]
        return tuple(y for y, _ in each), jnp.stack([new for _, new in each], axis=2)
    heads, dim = xs[0].shape[2:]
    past = None if cache is None else cache.reshape(*cache.shape[:2], -1, dim)
    y, new = short_conv(
        jnp.concatenate(xs, axis=2), jnp.concatenate(kernels, axis=1), cache=past, **options
    )
    return tuple(jnp.split(y, len(xs), axis=2)), new.reshape(*new.shape[:2], -1, heads, dim)
