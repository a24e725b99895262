"""Next-token cross-entropy that never holds float32 logits of all tokens at once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Tokens whose float32 logits exist at once. Each chunk reads and writes the gradient of the kernel, which
# binds a TPU at 1024 tokens of K3 (benchmarks/loss.md); from 2048 on the matrix products do.
LOSS_CHUNK = 2048


class Loss(NamedTuple):
    """Sums, not means: micro-batches and hosts are added before anything is divided."""

    nats: Float[Array, ""]  # sum of the losses of all supervised tokens
    count: Float[Array, ""]  # supervised tokens
    nll: Float[Array, " N"]  # loss of each token, 0 where it is not supervised


def next_token_targets(
    tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], shift: int = 1
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """What each position has to predict, and whether it counts.

    Args:
        tokens: token ids.
        segment_ids: document of each token, in runs; 0 is padding.
        shift: distance to the predicted token, 1 or more.

    Returns: targets (0 where there is none), and weights: 1 where the target lies in the same
        document, else 0. The ids themselves are never weights.
    """
    ahead = ((0, 0), (0, shift))
    targets = jnp.pad(tokens, ahead)[:, shift:]
    weights = (segment_ids > 0) & (segment_ids == jnp.pad(segment_ids, ahead)[:, shift:])
    return jnp.where(weights, targets, 0), weights.astype(jnp.float32)


def cross_entropy(
    h: Float[Array, "N D"],
    kernel: Float[Array, "D X"],
    targets: Int[Array, " N"],
    weights: Float[Array, " N"],
    *,
    chunk: int = LOSS_CHUNK,
) -> Loss:
    """Cross-entropy of the head's softmax, in chunks of tokens.

        nll_i = w_i (log sum_x exp(l_ix) - l_iy),   l_i = h_i W,  y the target      (training.md §5)

    Args:
        h: final activations; their dtype is that of the matrix products.
        kernel: head W in its storage dtype, float32 in training.
        targets: class of each token.
        weights: 1 if the token counts, else 0.
        chunk: tokens per step.

    Returns: see `Loss`. `nats` is differentiable in h, kernel and weights, in reverse mode; `nll`
        is for reading and has no gradient.
    Numerics: logits, log-sum-exp and the sums are float32; so is the gradient of the kernel, in
        whatever dtype h is, because it is a sum over all tokens of the batch.
    Cost: O(N D X); O(chunk X) memory beside the gradient of the kernel. Under differentiation the
        gradients are made while a chunk's logits exist, so that these are computed once.
    """
    size = min(chunk, max(h.shape[0], 1))
    nats, nll = _nats(size, h, kernel, targets, weights)
    return Loss(nats, weights.sum(), jax.lax.stop_gradient(nll))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nats(chunk, h, kernel, targets, weights):
    w = kernel.astype(h.dtype)

    def step(_, xs):
        h, targets, weights = xs
        return None, _nll(_logits(h, w), targets)[0]

    _, nll = jax.lax.scan(step, None, _chunks(chunk, h, targets, weights))
    nll = _join(nll, len(h))
    return (weights * nll).sum(), weights * nll


def _nats_fwd(chunk, h, kernel, targets, weights):
    w = kernel.astype(h.dtype)

    def step(d_kernel, xs):
        h, targets, weights = xs
        logits = _logits(h, w)
        nll, lse = _nll(logits, targets)
        hit = jnp.arange(logits.shape[-1]) == targets[:, None]
        d_logits = ((jnp.exp(logits - lse[:, None]) - hit) * weights[:, None]).astype(h.dtype)
        # Both products read it: without the barrier a TPU computes it once for each, tile by tile.
        d_logits = jax.lax.optimization_barrier(d_logits)
        d_kernel += jnp.einsum("nd,nx->dx", h, d_logits, preferred_element_type=jnp.float32)
        return d_kernel, (nll, jnp.einsum("nx,dx->nd", d_logits, w))

    xs = _chunks(chunk, h, targets, weights)
    d_kernel, parts = jax.lax.scan(step, jnp.zeros(kernel.shape, jnp.float32), xs)
    nll, d_h = (_join(part, len(h)) for part in parts)
    out = (weights * nll).sum(), weights * nll
    return out, (d_h, d_kernel, nll, jnp.zeros((), kernel.dtype))


def _nats_bwd(chunk, saved, cotangents):
    d_h, d_kernel, nll, like = saved
    d_nats, _ = cotangents
    d_kernel = (d_nats * d_kernel).astype(like.dtype)
    return (d_nats * d_h).astype(d_h.dtype), d_kernel, None, d_nats * nll


_nats.defvjp(_nats_fwd, _nats_bwd)


def _logits(h, w):
    return jnp.einsum("nd,dx->nx", h, w, preferred_element_type=jnp.float32)


def _nll(logits, targets):
    """Loss and log-sum-exp of each token."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return lse - picked, lse


def _chunks(size, *arrays):
    """[N ...] -> [steps size ...] each; the added rows are zero, and with them their weights."""

    def split(x):
        x = jnp.pad(x, ((0, -len(x) % size),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    return tuple(split(x) for x in arrays)


def _join(x, length):
    return x.reshape(-1, *x.shape[2:])[:length]
