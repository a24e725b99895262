"""Loss: which tokens count, the value and gradient against plain JAX, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.losses import cross_entropy, next_token_targets

TOKENS, WIDTH, VOCAB = 37, 8, 50


def case(seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    h = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), dtype)
    kernel = jnp.asarray(rng.standard_normal((WIDTH, VOCAB)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, TOKENS), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, TOKENS), jnp.float32)
    return h, kernel, targets, weights


def plain_nats(h, kernel, targets, weights):
    """The same sum with all logits at once."""
    logits = jnp.einsum("nd,dx->nx", h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return -(weights * picked).sum()


def relative_error(actual, wanted):
    actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
    return np.abs(actual - wanted).max() / np.abs(wanted).max()


def test_kf_049_targets_stay_inside_documents_and_weights_are_0_or_1():
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    tokens = jnp.arange(10, 18)[None]
    targets, weights = next_token_targets(tokens, segments)
    np.testing.assert_array_equal(weights, [[1, 1, 0, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(targets, [[11, 12, 0, 14, 0, 0, 0, 0]])
    targets, weights = next_token_targets(tokens, segments, shift=2)
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(targets, [[12, 0, 0, 0, 0, 0, 0, 0]])
    assert not next_token_targets(tokens, segments, shift=9)[1].any()  # longer than the row


@pytest.mark.parametrize("chunk", [16, 1024])  # 16 leaves a ragged last chunk
def test_value_and_gradient_match_the_unchunked_loss(chunk):
    h, kernel, targets, weights = case()
    wanted, wanted_grads = jax.value_and_grad(plain_nats, (0, 1))(h, kernel, targets, weights)

    def nats(h, kernel):
        return cross_entropy(h, kernel, targets, weights, chunk=chunk).nats

    value, grads = jax.jit(jax.value_and_grad(nats, (0, 1)))(h, kernel)
    assert relative_error(value, wanted) < 1e-6
    for actual, expected in zip(grads, wanted_grads, strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_counts_and_per_token_losses():
    h, kernel, targets, weights = case()
    loss = cross_entropy(h, kernel, targets, weights, chunk=16)
    assert loss.count == weights.sum()
    for i in (0, 20, 36):
        alone = plain_nats(h[i : i + 1], kernel, targets[i : i + 1], weights[i : i + 1])
        np.testing.assert_allclose(loss.nll[i], alone, rtol=1e-5)


def test_kf_120_no_supervised_token_gives_loss_0_and_gradient_0():
    h, kernel, targets, weights = case()

    def nats(h, kernel):
        return cross_entropy(h, kernel, targets, weights * 0, chunk=16).nats

    value, grads = jax.value_and_grad(nats, (0, 1))(h, kernel)
    assert value == 0
    assert not any(g.any() for g in grads)


def test_bfloat16_activations_keep_the_kernel_gradient_in_float32():
    h, kernel, targets, _ = case(dtype="bfloat16")
    # The same token 4096 times: a bfloat16 sum would stop growing at 256 terms.
    h, targets = jnp.tile(h[:1], (4096, 1)), jnp.tile(targets[:1], 4096)

    def nats(h, kernel):
        return cross_entropy(h, kernel, targets, jnp.ones(len(h)), chunk=8).nats

    d_h, d_kernel = jax.jit(jax.grad(nats, (0, 1)))(h, kernel)
    assert d_h.dtype == jnp.bfloat16
    assert d_kernel.dtype == jnp.float32
    one = jax.grad(plain_nats, 1)(h[:1], kernel, targets[:1], jnp.ones(1))
    assert relative_error(d_kernel, 4096 * np.asarray(one, np.float64)) < 1e-2


def test_huge_logits_stay_finite():
    h, kernel, targets, weights = case()
    loss, grads = jax.value_and_grad(
        lambda h: cross_entropy(h, kernel * 1e4, targets, weights, chunk=16).nats
    )(h)
    assert np.isfinite(loss)
    assert np.isfinite(grads).all()


def test_no_buffer_of_all_logits_forward_or_backward():
    tokens, width, vocab, chunk = 2048, 16, 4096, 128
    h, kernel = jnp.zeros((tokens, width)), jnp.zeros((width, vocab))
    targets, weights = jnp.zeros(tokens, jnp.int32), jnp.ones(tokens)

    def temporary_bytes(loss):
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        return step.lower(h, kernel).compile().memory_analysis().temp_size_in_bytes

    logits = tokens * vocab * 4
    chunked = temporary_bytes(
        lambda h, kernel: cross_entropy(h, kernel, targets, weights, chunk=chunk).nats
    )
    assert chunked < logits / 4
    assert temporary_bytes(lambda h, k: plain_nats(h, k, targets, weights)) > logits / 2
