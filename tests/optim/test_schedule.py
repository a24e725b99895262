"""Learning rate: end points and middle of the formula of training.md §1."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.optim.schedule import learning_rate


def rate(step, num_steps=1000, warmup_fraction=0.01):
    return learning_rate(
        jnp.asarray(step), num_steps=num_steps, peak=1.0, final=0.1, warmup_fraction=warmup_fraction
    )


@pytest.mark.parametrize(
    "step, wanted",
    [
        (0, 0.1),  # (0 + 1) / 10
        (9, 1.0),
        (10, 1.0),  # the cosine starts at its maximum
        (505, 0.55),  # half-way: the mean of both ends
        (1000, 0.1),
        (5000, 0.1),  # beyond the end
    ],
)
def test_schedule(step, wanted):
    np.testing.assert_allclose(rate(step), wanted, rtol=1e-6)


def test_warm_up_is_rounded_up_and_not_by_binary_fractions():
    assert rate(0, num_steps=101) == 0.5  # ceil(1.01) = 2
    assert rate(0, num_steps=7, warmup_fraction=0) == 1.0
    np.testing.assert_allclose(rate(0, num_steps=100, warmup_fraction=0.07), 1 / 7, rtol=1e-6)
    assert rate(0, num_steps=1) == 1.0
