"""Next-token cross-entropy that never holds float32 logits of all tokens at once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOSS_CHUNK = 1024  # tokens whose float32 logits exist at once


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

    Returns: see `Loss`; differentiable in h and kernel, in reverse mode.
    Numerics: logits, log-sum-exp and the sums are float32; so is the gradient of the kernel, in
        whatever dtype h is, because it is a sum over all tokens of the batch.
    Cost: O(N D X), of which the backward pass recomputes the logits; O(chunk X) memory beside the
        gradient of the kernel.
    """
    size = min(chunk, max(h.shape[0], 1))
    nll = weights * _negative_log_likelihood(size, h, kernel, targets)
    return Loss(nll.sum(), weights.sum(), nll)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _negative_log_likelihood(chunk, h, kernel, targets):
    return _nll_fwd(chunk, h, kernel, targets)[0]


def _nll_fwd(chunk, h, kernel, targets):
    w = kernel.astype(h.dtype)

    def step(_, xs):
        h, targets = xs
        logits = _logits(h, w)
        top = jax.nn.logsumexp(logits, axis=-1)
        return None, (top - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], top)

    _, parts = jax.lax.scan(step, None, (_split(h, chunk), _split(targets, chunk)))
    nll, lse = (_join(part, len(h)) for part in parts)
    return nll, (h, kernel, targets, lse)


def _nll_bwd(chunk, saved, d_nll):
    h, kernel, targets, lse = saved
    w = kernel.astype(h.dtype)

    def step(d_kernel, xs):
        h, targets, lse, d_nll = xs
        p = jnp.exp(_logits(h, w) - lse[:, None])
        hit = jnp.arange(p.shape[-1]) == targets[:, None]
        d_logits = ((p - hit) * d_nll[:, None]).astype(h.dtype)
        d_kernel += jnp.einsum("nd,nx->dx", h, d_logits, preferred_element_type=jnp.float32)
        return d_kernel, jnp.einsum("nx,dx->nd", d_logits, w)

    xs = tuple(_split(x, chunk) for x in (h, targets, lse, d_nll))
    d_kernel, d_h = jax.lax.scan(step, jnp.zeros(kernel.shape, jnp.float32), xs)
    return _join(d_h, len(h)), d_kernel.astype(kernel.dtype), None


_negative_log_likelihood.defvjp(_nll_fwd, _nll_bwd)


def _logits(h, w):
    return jnp.einsum("nd,dx->nx", h, w, preferred_element_type=jnp.float32)


def _split(x, chunk):
    """[N ...] -> [steps chunk ...]; the added rows are zero, and so are their cotangents."""
    x = jnp.pad(x, ((0, -len(x) % chunk),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])


def _join(x, length):
    return x.reshape(-1, *x.shape[2:])[:length]
