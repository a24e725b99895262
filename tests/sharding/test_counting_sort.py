"""Counting sort and running sums against NumPy."""

import jax
import numpy as np
import pytest

from k3jax.sharding.counting_sort import BLOCK, MOST_KEYS, running_sum, stable_sort


@pytest.mark.parametrize("bound", [1, 2, 65, MOST_KEYS, MOST_KEYS + 1, 3_000_000])
@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3])
def test_stable_sort(n, bound):
    """Also with more keys than 31 bits hold together with an index."""
    rng = np.random.default_rng(n)
    for keys in (rng.integers(bound, size=n), np.full(n, bound - 1), np.arange(n)[::-1] % bound):
        order, inverse, sizes = jax.jit(lambda keys: stable_sort(keys, bound))(
            keys.astype(np.int32)
        )
        want = np.argsort(keys, kind="stable")
        np.testing.assert_array_equal(order, want)
        np.testing.assert_array_equal(np.asarray(inverse)[want], np.arange(n))
        np.testing.assert_array_equal(sizes, np.bincount(keys, minlength=bound))


@pytest.mark.parametrize("n", [1, BLOCK, 300 * BLOCK + 7])
def test_running_sum(n):
    x = np.random.default_rng(n).integers(17, size=n).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(running_sum)(x), np.cumsum(x))
    big = np.full(n, 2**24 // BLOCK, np.int32)
    if n <= BLOCK:
        np.testing.assert_array_equal(jax.jit(running_sum)(big), np.cumsum(big))
