"""Quantile Balancing: the worked example, degenerate statistics, pooling, and what it achieves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers import quantile_balancing as qb

EXAMPLE = np.array(
    [[0.71, 0.37, 0.59], [0.97, 0.33, 0.16], [0.93, 0.50, 0.57],
     [0.73, 0.53, 0.15], [0.45, 0.74, 0.18], [0.59, 0.79, 0.42]], np.float32
)  # fmt: skip


@functools.partial(jax.jit, static_argnames=("num_active", "balancing", "num_bins"))
def statistics(
    scores, bias, mask=None, *, num_active, balancing="quantile_histogram", num_bins=1000
):
    """Stats of tokens routed by plain top-k, as the expert layer routes them."""
    best, ids = jax.lax.top_k(scores + bias, min(num_active + 1, scores.shape[1]))
    return qb.collect_stats(
        scores, best[:, -1], ids[:, :num_active], bias, mask, balancing=balancing, num_bins=num_bins
    )


@functools.partial(jax.jit, static_argnames=("num_active", "balancing"))
def update(bias, stats, *, num_active, balancing="quantile_histogram"):
    return qb.update_bias(bias, stats, num_active=num_active, balancing=balancing)


def step(scores, bias, mask=None, *, num_active, balancing="quantile_histogram", num_bins=1000):
    stats = statistics(
        scores, bias, mask, num_active=num_active, balancing=balancing, num_bins=num_bins
    )
    return update(bias, stats, num_active=num_active, balancing=balancing)


def uniform(seed, tokens, experts):
    return jax.random.uniform(jax.random.key(seed), (tokens, experts))


def required_bias(scores, bias, num_active):
    """r in float64, and the rank ceil(q), from the definition."""
    biased = scores.astype(np.float64) + bias
    r = np.sort(biased, axis=1)[:, -num_active - 1, None] - scores
    return np.sort(r, axis=0), -(-scores.shape[0] * num_active // scores.shape[1])


# ---------------------------------------------------------------- worked example (architecture 9.3)


@pytest.mark.parametrize(
    ("balancing", "num_bins", "expected"),
    [
        ("quantile_exact", 1, [-0.19, 0.01, 0.18]),
        ("quantile_histogram", 80, [-0.18333, -0.00833, 0.19167]),
    ],
)
def test_worked_example(balancing, num_bins, expected):
    zero = jnp.zeros(3)
    stats = statistics(EXAMPLE, zero, num_active=1, balancing=balancing, num_bins=num_bins)
    np.testing.assert_array_equal(stats.load, [4, 2, 0])
    bias = update(zero, stats, num_active=1, balancing=balancing)
    np.testing.assert_allclose(bias, expected, atol=1e-5)
    np.testing.assert_array_equal(statistics(EXAMPLE, bias, num_active=1).load, [2, 2, 2])


@pytest.mark.parametrize(("experts", "active"), [(16, 4), (7, 3), (12, 1)])
def test_exact_update_lets_q_margins_exceed_the_quantile(experts, active):
    scores, bias = uniform(0, 70, experts), jnp.linspace(-0.2, 0.2, experts)
    r, _ = required_bias(np.asarray(scores), np.asarray(bias), active)
    want = r[70 * active // experts]  # floor(q) entries are smaller
    got = step(scores, bias, num_active=active, balancing="quantile_exact")
    np.testing.assert_allclose(got, want - want.mean(), atol=1e-6)


# ------------------------------------------------------------------------- histogram edge cases


@pytest.mark.parametrize(
    ("tokens", "experts", "active"), [(1, 8, 3), (70, 16, 4), (71, 7, 3), (500, 12, 11)]
)
def test_kf_057_estimate_lies_within_one_bin_of_the_exact_quantile(tokens, experts, active):
    """KF-057: a single token, integer and fractional ranks; the last expert is never chosen."""
    scores = np.array(uniform(1, tokens, experts))
    scores[:, -1] *= 1e-3
    bias = np.linspace(-0.3, 0.3, experts, dtype=np.float32)[::-1].copy()
    r, rank = required_bias(scores, bias, active)
    for num_bins in (50, 1000):
        width = (np.ptp(bias) + 2) / num_bins
        stats = statistics(scores, bias, num_active=active, num_bins=num_bins)
        got = qb.histogram_quantile(stats.statistics, stats.count, jnp.asarray(bias), active)
        assert np.abs(got - r[rank - 1]).max() <= width * 1.001
        new = update(bias, stats, num_active=active)
        assert np.isfinite(new).all()
        assert abs(float(new.mean())) < 1e-6
        assert new[-1] == new.max()  # never selected, so it moves towards selection
        assert stats.load[-1] == 0


def test_kf_057_equal_residuals():
    """KF-057: every r is the same number, all counts share one bin."""
    scores, bias = jnp.full((9, 6), 0.5), jnp.zeros(6)
    stats = statistics(scores, bias, num_active=2, num_bins=10)
    np.testing.assert_array_equal(stats.statistics, 9 * (np.arange(10) == 5)[None].repeat(6, 0))
    np.testing.assert_array_equal(update(bias, stats, num_active=2), np.zeros(6))


def test_kf_057_residuals_on_the_edges():
    """KF-057: r on an inner edge opens that bin; r = max b + 1 belongs to the last bin."""
    scores = jnp.array([[1.0, 1.0, 0.0]])  # alpha = 1, so r = 0, 0, 1 in [-1, 1]
    counts = statistics(scores, jnp.zeros(3), num_active=1, num_bins=4).statistics
    np.testing.assert_array_equal(counts, [[0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    scores = jnp.array([[1.0, 0.0, 0.0]])  # alpha = 0: r = -1 is the lower edge
    counts = statistics(scores, jnp.zeros(3), num_active=1, num_bins=4).statistics
    np.testing.assert_array_equal(counts, [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]])


@pytest.mark.parametrize("balancing", ["quantile_histogram", "quantile_exact"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_kf_057_a_score_that_is_not_finite_costs_one_token(balancing, bad):
    """KF-057: one NaN score; the bias is what the other tokens give."""
    scores = np.array(uniform(2, 40, 8))
    want = step(np.delete(scores, 13, axis=0), jnp.zeros(8), num_active=2, balancing=balancing)
    scores[13, 5] = bad
    got = step(scores, jnp.zeros(8), num_active=2, balancing=balancing)
    np.testing.assert_array_equal(got, want)
    assert statistics(scores, jnp.zeros(8), num_active=2, balancing=balancing).count == 39


def test_kf_057_an_expert_without_mass_keeps_its_bias():
    """KF-057: a column of zeros has no quantile; it must not look like a quantile in bin 0."""
    bias = jnp.array([0.3, -0.1, 0.0, -0.2])
    stats = statistics(uniform(3, 64, 4), bias, num_active=1)
    counts = stats.statistics.at[2].set(0)
    got = qb.histogram_quantile(counts, stats.count, bias, 1)
    want = qb.histogram_quantile(stats.statistics, stats.count, bias, 1)
    np.testing.assert_array_equal(got, want.at[2].set(0.0))


@pytest.mark.parametrize("balancing", ["quantile_histogram", "quantile_exact", "none"])
def test_kf_057_biases_stay_where_nothing_can_be_balanced(balancing):
    """KF-057: k = n, and a step that counted no token."""
    bias = jnp.array([0.3, -0.1, 0.0, -0.2])
    scores = uniform(4, 10, 4)
    np.testing.assert_array_equal(step(scores, bias, num_active=4, balancing=balancing), bias)
    nobody = jnp.zeros(10, bool)
    stats = statistics(scores, bias, nobody, num_active=2, balancing=balancing)
    assert stats.count == 0
    assert not stats.load.any()
    np.testing.assert_array_equal(update(bias, stats, num_active=2, balancing=balancing), bias)
    nan = jnp.full_like(scores, jnp.nan)
    np.testing.assert_array_equal(step(nan, bias, num_active=2, balancing=balancing), bias)


# ------------------------------------------------------------------------- counts and pooling


@pytest.mark.parametrize("balancing", ["quantile_histogram", "quantile_exact", "none"])
def test_kf_052_and_058_update_does_not_depend_on_the_split(balancing):
    """KF-052: counts are integers, bitwise equal for 1, 2 and 8 parts of unequal length.

    KF-058: the parts have very different score distributions and give one pooled quantile, not the
    mean of the quantiles of the parts.
    """
    normal = jax.random.normal(jax.random.key(5), (200, 6)) * jnp.linspace(0.5, 1.5, 6)
    scores = jax.nn.sigmoid(normal.at[100:].add(3))  # N(0, 1) and N(3, 1)
    bias = jnp.linspace(-0.1, 0.1, 6)
    collect = functools.partial(statistics, bias=bias, num_active=2, balancing=balancing)
    whole = collect(scores)
    pooled_bias = update(bias, whole, num_active=2, balancing=balancing)
    for cuts in ([100], [1, 3, 40, 90, 100, 150, 199]):
        parts = [collect(part) for part in jnp.split(scores, cuts)]
        pooled = qb.pool_stats(*parts)
        for field in ("statistics", "count", "load"):
            np.testing.assert_array_equal(getattr(pooled, field), getattr(whole, field))
        assert pooled.count.dtype == pooled.load.dtype == jnp.int32
        got = update(bias, pooled, num_active=2, balancing=balancing)
        np.testing.assert_array_equal(got, pooled_bias)
    if balancing != "none":
        halves = [
            update(bias, collect(part), num_active=2, balancing=balancing)
            for part in jnp.split(scores, 2)
        ]
        assert np.abs((halves[0] + halves[1]) / 2 - pooled_bias).max() > 0.01


def test_kf_052_large_counts():
    """KF-052: 300, 40,840 and 16,777,217 tokens in one bin: floats stop counting before that."""
    bias, big = jnp.zeros(2), 2**24 + 1
    for tokens in (300, 40_840, big):
        # r of expert 0 is in bin 2, of expert 1 in bin 6; one token each lies one bin lower
        counts = np.zeros((2, 8), np.int32)
        counts[0, 1:3] = counts[1, 5:7] = [1, tokens - 1]
        half = qb.RouterStats(
            jnp.asarray(counts), jnp.int32(tokens), jnp.zeros(2, jnp.int32), jnp.array(False)
        )
        twice = qb.pool_stats(half, half)
        assert twice.count.dtype == twice.statistics.dtype == jnp.int32
        assert int(twice.count) == 2 * tokens
        assert int(twice.statistics[0, 2]) == 2 * tokens - 2
        got = qb.histogram_quantile(twice.statistics, twice.count, bias, 1)
        part = (tokens - 2) / (2 * tokens - 2)
        np.testing.assert_allclose(got, -1 + 0.25 * (np.array([2, 6]) + part), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 13, 896 * 5 + 3, 2**24 + 1, 2**31 - 1])
def test_kf_052_fair_share_is_exact_without_overflow(count):
    """KF-052: q = m k / n, although m k exceeds an int32."""
    rank, rest = jax.jit(qb.fair_share, static_argnums=(1, 2))(jnp.int32(count), 16, 896)
    assert int(rank) == count * 16 // 896
    assert float(rest) == pytest.approx(count * 16 % 896 / 896)


def test_kf_056_padding_is_not_counted():
    """KF-056: 2 x 8 tokens of which 9 are real, against the 9 alone; the padding likes one expert."""
    scores = np.array(uniform(6, 16, 5))
    mask = np.array([1] * 5 + [0] * 3 + [1] * 4 + [0] * 4, bool)
    scores[~mask, 2] = 0.99
    for balancing in ("quantile_histogram", "quantile_exact"):
        collect = functools.partial(
            statistics, bias=jnp.zeros(5), num_active=2, balancing=balancing
        )
        padded, packed = collect(scores, mask=mask), collect(scores[mask])
        assert padded.count == packed.count == 9
        np.testing.assert_array_equal(padded.load, packed.load)
        assert padded.load.sum() == 18
        for stats in (padded, packed):
            got = update(jnp.zeros(5), stats, num_active=2, balancing=balancing)
            np.testing.assert_array_equal(
                got, step(scores[mask], jnp.zeros(5), num_active=2, balancing=balancing)
            )


def test_kf_054_all_tied_is_reported():
    """KF-054: every token prefers no expert, so all go to the lowest indices."""
    flat = jnp.full((6, 8), 0.5)
    stats = statistics(flat, jnp.zeros(8), num_active=2)
    assert stats.all_tied
    np.testing.assert_array_equal(stats.load, [6, 6, 0, 0, 0, 0, 0, 0])
    one_differs = flat.at[3, 7].set(0.6)
    assert not statistics(one_differs, jnp.zeros(8), num_active=2).all_tied
    assert statistics(one_differs, jnp.zeros(8), jnp.arange(6) != 3, num_active=2).all_tied
    assert not statistics(flat, jnp.arange(8.0), num_active=2).all_tied
    tied, mixed = stats, statistics(one_differs, jnp.zeros(8), num_active=2)
    assert qb.pool_stats(tied, tied).all_tied
    assert not qb.pool_stats(tied, mixed).all_tied


@pytest.mark.parametrize(("tokens", "num_bins"), [(1, 1), (255, 31), (256, 1000), (700, 33)])
def test_both_ways_of_counting_give_the_same_integers(tokens, num_bins):
    bins = jax.random.randint(jax.random.key(7), (tokens, 5), -1, num_bins)
    want = np.stack([np.bincount(col[col >= 0], minlength=num_bins) for col in np.asarray(bins).T])
    np.testing.assert_array_equal(qb._count_by_scatter(bins, num_bins), want)
    np.testing.assert_array_equal(qb._count_by_matmul(bins, num_bins), want)
    np.testing.assert_array_equal(jax.jit(qb.histogram, static_argnums=1)(bins, num_bins), want)


def test_layers_are_independent_under_vmap():
    scores, bias = (
        uniform(8, 60, 6).reshape(2, 30, 6),
        jnp.stack([jnp.zeros(6), jnp.linspace(-1, 1, 6)]),
    )
    for balancing in ("quantile_histogram", "quantile_exact"):
        one = functools.partial(step, num_active=2, balancing=balancing)
        got = jax.vmap(one)(scores, bias)
        np.testing.assert_array_equal(
            got, np.stack([one(s, b) for s, b in zip(scores, bias, strict=True)])
        )


# ---------------------------------------------------------------- what it achieves (architecture 9.4)


@pytest.mark.parametrize("balancing", ["quantile_histogram", "quantile_exact"])
def test_balancing_flattens_a_skewed_router(balancing):
    """Fresh batches every step; sampling noise alone gives a max/mean of about 1.15 here."""
    experts, active, tokens = 32, 4, 4096
    skew = jnp.where(jnp.arange(experts) < 4, 3.0, 0.0) + jnp.linspace(-1, 1, experts)
    bias, loads = jnp.zeros(experts), []
    for seed in range(4):
        scores = jax.nn.sigmoid(jax.random.normal(jax.random.key(seed), (tokens, experts)) + skew)
        stats = statistics(scores, bias, num_active=active, balancing=balancing)
        loads.append(float(stats.load.max() / stats.load.mean()))
        bias = update(bias, stats, num_active=active, balancing=balancing)
    assert loads[0] > 5
    assert loads[1] < 1.8
    assert loads[3] < 1.3
