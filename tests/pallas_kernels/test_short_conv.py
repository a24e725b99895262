"""The short convolution against its definition: documents, padding, caches, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.short_conv import reference, short_conv
from tests.pallas_kernels.kda_cases import jit

H, K = 2, 3
ROWS = {  # document of each token; the cache belongs to a row's first document
    "one document": [1] * 9,
    "two": [1] * 4 + [2] * 5,
    "short ones": [4, 4, 7, 1, 1, 2, 2, 2, 9],
    "right padding": [1] * 5 + [0] * 4,
    "one token": [1] + [0] * 8,
    "padding between": [1, 1, 0, 0, 2, 2, 2, 0, 0],
    "empty": [0] * 9,
}
SEGMENTS = np.array(list(ROWS.values()), np.int32)
convolve = jit(short_conv)


def make(rows, T, W=4, seed=0):
    rng = np.random.default_rng([seed, T])
    x = rng.normal(size=(rows, T, H, K)).astype(np.float32)
    kernel = rng.normal(size=(W, H, K)).astype(np.float32)
    return x, kernel, rng.normal(size=(rows, W - 1, H, K)).astype(np.float32)


def test_documents_padding_and_cache():
    x, kernel, cache = make(len(ROWS), 9)
    got = convolve(x, kernel, cache=cache, segment_ids=SEGMENTS)
    for a, b in zip(got, reference.short_conv(x, kernel, cache, SEGMENTS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_kf_011_padding_is_never_read():
    """NaN in padding and in the cache's neighbours changes nothing and gets no gradient."""
    x, kernel, cache = make(len(ROWS), 9)
    poisoned = np.where((SEGMENTS > 0)[..., None, None], x, np.nan)

    @jit
    def outputs(x, kernel):
        def forward(x, kernel):
            return short_conv(x, kernel, cache=cache, segment_ids=SEGMENTS)

        out, pull = jax.vjp(forward, x, kernel)
        return out, pull(jax.tree.map(jnp.cos, out))

    (clean, grads), (got, poisoned_grads) = outputs(x, kernel), outputs(poisoned, kernel)
    for a, b in zip((*clean, *grads), (*got, *poisoned_grads), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(grads[0])[SEGMENTS == 0].any()


@pytest.mark.parametrize("W", [1, 2, 4])
def test_any_split_and_token_by_token(W):
    """Pieces joined by the cache equal one call; `lengths` cuts right-padded pieces."""
    x, kernel, cache = make(3, 9, W)
    whole, last = convolve(x, kernel, cache=cache)
    ones = np.ones((3, 9), np.int32)
    want, want_last = reference.short_conv(x, kernel, cache, ones)
    np.testing.assert_allclose(whole, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last, want_last.astype(np.float32))
    cuts = np.array([1, 2, 7])
    first = (np.arange(9) < cuts[:, None]).astype(np.int32)
    head, middle = convolve(x, kernel, cache=cache, segment_ids=first, lengths=cuts)
    inferred = convolve(x, kernel, cache=cache, segment_ids=first)[1]
    np.testing.assert_array_equal(middle, inferred)
    for row, cut in enumerate(cuts):
        np.testing.assert_allclose(head[row, :cut], want[row, :cut], rtol=1e-5, atol=1e-6)
    step = middle
    for t in range(2):
        y, step = convolve(x[np.arange(3), cuts + t][:, None], kernel, cache=step)
        np.testing.assert_allclose(y[:, 0], want[np.arange(3), cuts + t], rtol=1e-5, atol=1e-6)


def test_gradients_reach_the_cache():
    """Against finite differences of the definition, through outputs and the new cache."""
    x, kernel, cache = make(2, 5)
    segments = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]], np.int32)
    weights = [np.cos(np.arange(a.size)).reshape(a.shape) for a in (x, cache)]

    def loss(x, kernel, cache):
        out = short_conv(x, kernel, cache=cache, segment_ids=segments)
        return sum((a * w).sum() for a, w in zip(out, weights, strict=True))

    def exact(args):
        out = reference.short_conv(*args, segments)
        return sum((a * w).sum() for a, w in zip(out, weights, strict=True))

    args = [a.astype(np.float64) for a in (x, kernel, cache)]
    for n, grad in enumerate(jit(jax.grad(loss, argnums=(0, 1, 2)))(x, kernel, cache)):
        numeric = np.zeros(grad.shape)
        for at in np.ndindex(grad.shape):
            values = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in args]
                moved[n][at] += step
                values.append(exact(moved))
            numeric[at] = (values[0] - values[1]) / 2e-5
        np.testing.assert_allclose(grad, numeric, rtol=1e-4, atol=1e-5)


def test_dtypes_and_empty_rows():
    x, kernel, cache = (jnp.asarray(a, jnp.bfloat16) for a in make(2, 9))
    y, new_cache = convolve(x, kernel.astype(jnp.float32), cache=cache)
    assert y.dtype == new_cache.dtype == jnp.bfloat16
    want, _ = reference.short_conv(x, kernel, cache, np.ones((2, 9), np.int32))
    np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=1e-2, atol=1e-2)
    for rows, T in ((2, 0), (0, 9)):
        y, new_cache = convolve(x[:rows, :T], kernel, cache=cache[:rows])
        assert y.shape == (rows, T, H, K)
        np.testing.assert_array_equal(new_cache, cache[:rows])
        ids = np.ones((rows, T), np.int32)
        assert convolve(x[:rows, :T], kernel, segment_ids=ids)[0].shape == (rows, T, H, K)


def test_causal_to_the_last_bit():
    x, kernel, cache = make(1, 9)
    before, _ = convolve(x, kernel, cache=cache)
    for t in range(9):
        changed = x.copy()
        changed[:, t] = 1e6
        after, _ = convolve(changed, kernel, cache=cache)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


def test_kf_034_the_cache_after_the_accepted_tokens_of_a_window():
    """Outputs of all 5 tokens; the cache as if only the first `lengths` had been there."""
    x, kernel, cache = make(6, 5)
    lengths = np.arange(6)
    y, new_cache = convolve(x, kernel, cache=cache, lengths=lengths)
    np.testing.assert_array_equal(y, convolve(x, kernel, cache=cache)[0])
    for row, count in enumerate(lengths):
        want = np.concatenate([cache[row], x[row, :count]])[-3:]
        np.testing.assert_array_equal(new_cache[row], want)


@pytest.mark.parametrize("W", [1, 4])
def test_slots_of_a_pool(W):
    """Each request reads and writes its row; one without history reads zeros, NaN or not."""
    x, kernel, cache = make(3, 5, W)
    pool = np.full((7, *cache.shape[1:]), np.nan, np.float32)
    slots, has_state = np.array([6, 0, 3]), np.array([True, False, True])
    pool[slots[[0, 2]]] = cache[[0, 2]]
    fresh = np.where(has_state[:, None, None, None], cache, 0)
    want, want_cache = convolve(x, kernel, cache=fresh)
    y, new_pool = convolve(x, kernel, cache=pool, slots=slots, has_state=has_state)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(new_pool[slots], want_cache)
    assert np.isnan(np.delete(new_pool, slots, axis=0)).all()
    y, new_cache = convolve(
        x, kernel, cache=np.full_like(cache, np.nan), has_state=np.zeros(3, bool)
    )
    np.testing.assert_array_equal(y, convolve(x, kernel)[0])
    assert np.isfinite(new_cache).all()
