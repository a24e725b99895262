"""Quantile Balancing: the worked example, degenerate statistics, pooling, and what it achieves.

Most tests share one shape, [TOKENS, EXPERTS], and mask what they do not need: compiling is what
takes the time here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers import quantile_balancing as qb

TOKENS, EXPERTS, ACTIVE, BINS = 64, 8, 3, 1000
ALL = np.ones(TOKENS, bool)
ZERO = np.zeros(EXPERTS, np.float32)
ESTIMATORS = ("quantile_histogram", "quantile_exact")


@functools.partial(jax.jit, static_argnames=("num_active", "balancing", "num_bins"))
def statistics(
    scores, bias, mask, *, num_active=ACTIVE, balancing="quantile_histogram", num_bins=BINS
):
    """Stats of tokens routed by plain top-k, as the expert layer routes them."""
    best, ids = jax.lax.top_k(scores + bias, num_active + 1)
    cutoff, ids = best[:, -1], ids[:, :num_active]
    return qb.collect_stats(scores, cutoff, ids, bias, mask, balancing=balancing, num_bins=num_bins)


@functools.partial(jax.jit, static_argnames=("num_active", "balancing"))
def update(bias, stats, *, num_active=ACTIVE, balancing="quantile_histogram"):
    return qb.update_bias(bias, stats, num_active=num_active, balancing=balancing)


def step(scores, bias, mask, *, balancing):
    return update(bias, statistics(scores, bias, mask, balancing=balancing), balancing=balancing)


def uniform(seed, tokens=TOKENS, experts=EXPERTS):
    return np.random.default_rng(seed).random((tokens, experts), np.float32)


def spread(width):
    return np.linspace(-width, width, EXPERTS, dtype=np.float32)


def sorted_residuals(scores, bias, num_active):
    """Columns of r in ascending order, float64, from the definition."""
    biased = np.sort(scores.astype(np.float64) + bias, axis=1)
    return np.sort(biased[:, -num_active - 1, None] - scores, axis=0)


# --------------------------------------------------------------- worked example (architecture 9.3)

EXAMPLE = np.array(
    [[71, 37, 59], [97, 33, 16], [93, 50, 57], [73, 53, 15], [45, 74, 18], [59, 79, 42]]
)


def test_worked_example():
    scores, zero, mask = np.float32(EXAMPLE / 100), np.zeros(3, np.float32), np.ones(6, bool)
    stats = statistics(scores, zero, mask, num_active=1, balancing="quantile_exact")
    np.testing.assert_array_equal(stats.load, [4, 2, 0])
    exact = update(zero, stats, num_active=1, balancing="quantile_exact")
    np.testing.assert_allclose(exact, [-0.19, 0.01, 0.18], atol=1e-6)

    # w = 2 / 80 = 0.025, bins from exact hundredths: some r lie on edges, where float32 rounds
    r = np.sort(EXAMPLE, axis=1)[:, 1:2] - EXAMPLE
    counts = qb.histogram(jnp.asarray((r + 100) * 2 // 5, jnp.int32), 80)
    stats = stats._replace(statistics=counts)
    histogram = update(zero, stats, num_active=1)
    np.testing.assert_allclose(histogram, [-0.18333, -0.00833, 0.19167], atol=1e-5)

    for bias in (exact, histogram):
        after = statistics(scores, bias, mask, num_active=1, balancing="quantile_exact")
        np.testing.assert_array_equal(after.load, [2, 2, 2])


@pytest.mark.parametrize("tokens", [1, 13, 64])
def test_exact_update_lets_q_margins_exceed_the_quantile(tokens):
    scores, bias = uniform(0), spread(0.2)
    r = sorted_residuals(scores[:tokens], bias, ACTIVE)
    want = r[tokens * ACTIVE // EXPERTS]  # floor(q) entries are smaller
    got = step(scores, bias, np.arange(TOKENS) < tokens, balancing="quantile_exact")
    np.testing.assert_allclose(got, want - want.mean(), atol=1e-6)


# ------------------------------------------------------------------------- histogram edge cases


@pytest.mark.parametrize("tokens", [1, 13, 64])
def test_kf_057_estimate_lies_within_one_bin_of_the_exact_quantile(tokens):
    """KF-057: one token, a fractional rank, an integer rank; the last expert is never chosen."""
    scores, bias = uniform(1), spread(0.3)[::-1].copy()
    scores[:, -1] *= 1e-3
    mask = np.arange(TOKENS) < tokens
    rank = -(-tokens * ACTIVE // EXPERTS)
    exact = sorted_residuals(scores[mask], bias, ACTIVE)[rank - 1]
    stats = statistics(scores, bias, mask)
    got = qb.histogram_quantile(stats.statistics, stats.count, jnp.asarray(bias), ACTIVE)
    assert np.abs(got - exact).max() <= 2.6 / BINS * 1.001
    new = np.asarray(update(bias, stats))
    assert np.isfinite(new).all()
    assert abs(new.mean()) < 1e-6
    assert stats.load[-1] == 0
    assert new[-1] == new.max() > bias[-1]  # never selected, so it moves towards selection


def test_kf_057_equal_residuals():
    """KF-057: every r is the same number, all counts share one bin."""
    stats = statistics(np.full_like(uniform(0), 0.5), ZERO, ALL)
    np.testing.assert_array_equal(stats.statistics[:, BINS // 2], np.full(EXPERTS, TOKENS))
    np.testing.assert_allclose(update(ZERO, stats), ZERO, atol=1e-6)


def test_kf_057_residuals_on_the_edges():
    """KF-057: r on an inner edge opens that bin; r = max b + 1 belongs to the last bin."""
    scores = np.zeros((TOKENS, EXPERTS), np.float32)
    scores[:2, : ACTIVE + 1] = 1  # alpha = 1, so r = 0 for the first four experts, 1 for the others
    scores[2, 0] = 1  # alpha = 0, so r = -1 for expert 0 and 0 for the others
    counts = np.asarray(statistics(scores, ZERO, np.arange(TOKENS) < 3).statistics)
    want = np.zeros((EXPERTS, BINS), int)
    want[: ACTIVE + 1, BINS // 2] += 2
    want[ACTIVE + 1 :, BINS - 1] += 2
    want[0, 0] += 1
    want[1:, BINS // 2] += 1
    np.testing.assert_array_equal(counts, want)


@pytest.mark.parametrize("balancing", ESTIMATORS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_kf_057_a_score_that_is_not_finite_costs_one_token(balancing, bad):
    """KF-057: one NaN score; the bias is what the other tokens give."""
    scores = uniform(2)
    want = step(scores, ZERO, np.arange(TOKENS) != 13, balancing=balancing)
    scores[13, 5] = bad
    np.testing.assert_array_equal(step(scores, ZERO, ALL, balancing=balancing), want)
    assert statistics(scores, ZERO, ALL, balancing=balancing).count == TOKENS - 1


def test_kf_057_an_expert_without_mass_keeps_its_bias():
    """KF-057: a column of zeros has no quantile; it must not look like a quantile in bin 0."""
    bias = jnp.asarray(spread(0.2))
    stats = statistics(uniform(3), bias, ALL)
    quantile = functools.partial(qb.histogram_quantile, bias=bias, num_active=ACTIVE)
    want = np.array(quantile(stats.statistics, stats.count))
    want[2] = bias[2]
    np.testing.assert_array_equal(quantile(stats.statistics.at[2].set(0), stats.count), want)


@pytest.mark.parametrize("balancing", [*ESTIMATORS, "none"])
def test_kf_057_biases_stay_where_nothing_can_be_balanced(balancing):
    """KF-057: k = n; a step that counted no token; a step whose scores are all NaN."""
    bias, scores = spread(0.3), uniform(4)
    stats = statistics(scores, bias, ALL, balancing=balancing)
    every = qb.update_bias(jnp.asarray(bias), stats, num_active=EXPERTS, balancing=balancing)
    np.testing.assert_array_equal(every, bias)
    for empty in (
        statistics(scores, bias, ~ALL, balancing=balancing),
        statistics(scores * np.nan, bias, ALL, balancing=balancing),
    ):
        assert empty.count == 0
        assert not empty.load.any()
        np.testing.assert_array_equal(update(bias, empty, balancing=balancing), bias)


# ------------------------------------------------------------------------- counts and pooling


@pytest.mark.parametrize("balancing", [*ESTIMATORS, "none"])
def test_kf_052_and_058_update_does_not_depend_on_the_split(balancing):
    """KF-052: counts are integers; the update is bitwise equal for any split, also an unequal one.

    KF-058: the two halves have very different score distributions and give one pooled quantile,
    not the mean of the quantiles of the halves.
    """
    logits = np.random.default_rng(5).normal(size=(TOKENS, EXPERTS)) * np.linspace(
        0.5, 1.5, EXPERTS
    )
    logits[TOKENS // 2 :] += 3  # N(0, 1) and N(3, 1)
    scores, bias = np.float32(1 / (1 + np.exp(-logits))), spread(0.1)
    collect = functools.partial(statistics, balancing=balancing)
    whole = collect(scores, bias, ALL)
    new = update(bias, whole, balancing=balancing)
    owner = np.minimum(np.arange(TOKENS) // 5, 2)  # 5, 5 and 54 tokens
    parts = [collect(scores, bias, owner == i) for i in range(3)]
    halves = [collect(half, bias, ALL[:32]) for half in np.split(scores, 2)]
    for pooled in (qb.pool_stats(*parts), qb.pool_stats(*halves)):
        assert pooled.count == TOKENS
        assert pooled.count.dtype == pooled.load.dtype == jnp.int32
        np.testing.assert_array_equal(pooled.load, whole.load)
        np.testing.assert_array_equal(update(bias, pooled, balancing=balancing), new)
    if balancing != "none":
        averaged = sum(update(bias, half, balancing=balancing) for half in halves) / 2
        assert np.abs(averaged - new).max() > 0.01


def test_kf_052_large_counts():
    """KF-052: 300, 40,840 and 16,777,217 tokens, where float32 stops counting."""
    for tokens in (300, 40_840, 2**24 + 1):
        counts = np.zeros((2, 8), np.int32)
        counts[0, 1:3] = counts[1, 5:7] = [1, tokens - 1]  # the quantile lies in bins 2 and 6
        half = qb.RouterStats(
            jnp.asarray(counts), jnp.int32(tokens), jnp.zeros(2, jnp.int32), jnp.array(False)
        )
        twice = qb.pool_stats(half, half)
        assert twice.count.dtype == twice.statistics.dtype == jnp.int32
        assert int(twice.count) == 2 * tokens
        assert int(twice.statistics[0, 2]) == 2 * tokens - 2
        got = qb.histogram_quantile(twice.statistics, twice.count, jnp.zeros(2), 1)
        part = (tokens - 2) / (2 * tokens - 2)
        np.testing.assert_allclose(got, -1 + 0.25 * (np.array([2, 6]) + part), rtol=1e-6)

    # q = 2^25 + 4, and the second bin is one count short of it: rounded to a float it would do
    counts = jnp.array([[0, 2**25 + 3, 0, 2**25 + 5]] * 2)
    got = qb.histogram_quantile(counts, jnp.int32(2**26 + 8), jnp.zeros(2), 1)
    np.testing.assert_allclose(got, [0.5, 0.5], rtol=1e-6)  # the lower edge of the last bin


@pytest.mark.parametrize("count", [1, 13, 896 * 5 + 3, 2**24 + 1, 2**31 - 1])
def test_kf_052_fair_share_is_exact_without_overflow(count):
    """KF-052: q = m k / n, although m k exceeds an int32."""
    rank, rest = qb.fair_share(jnp.int32(count), 16, 896)
    assert int(rank) == count * 16 // 896
    assert float(rest) == pytest.approx(count * 16 % 896 / 896)


@pytest.mark.parametrize("balancing", ESTIMATORS)
def test_kf_056_padding_is_not_counted(balancing):
    """KF-056: 2 x 8 tokens of which 9 are real, against the 9 alone; padding likes expert 2."""
    real = np.zeros(TOKENS, bool)
    real[[0, 1, 2, 3, 4, 8, 9, 10, 11]] = True
    scores, packed = uniform(6), uniform(7)
    packed[:9] = scores[real]
    scores[~real, 2] = 0.99
    got = statistics(scores, ZERO, real, balancing=balancing)
    want = statistics(packed, ZERO, np.arange(TOKENS) < 9, balancing=balancing)
    assert got.count == want.count == 9
    np.testing.assert_array_equal(got.load, want.load)
    assert got.load.sum() == 9 * ACTIVE
    new = update(ZERO, got, balancing=balancing)
    np.testing.assert_array_equal(new, update(ZERO, want, balancing=balancing))


def test_kf_054_all_tied_is_reported():
    """KF-054: no token prefers any expert, so all go to the lowest indices."""
    flat = np.full((TOKENS, EXPERTS), 0.5, np.float32)
    stats = statistics(flat, ZERO, ALL)
    assert stats.all_tied
    np.testing.assert_array_equal(stats.load, [TOKENS] * ACTIVE + [0] * (EXPERTS - ACTIVE))
    assert not statistics(flat, spread(0.1), ALL).all_tied
    flat[5, 7] = 0.6
    one_differs = statistics(flat, ZERO, ALL)
    assert not one_differs.all_tied
    assert statistics(flat, ZERO, np.arange(TOKENS) != 5).all_tied
    assert qb.pool_stats(stats, stats).all_tied
    assert not qb.pool_stats(stats, one_differs).all_tied


@pytest.mark.parametrize(("tokens", "num_bins"), [(1, 1), (256, 1000), (700, 33)])
def test_both_ways_of_counting_give_the_same_integers(tokens, num_bins):
    bins = np.random.default_rng(8).integers(-1, num_bins, (tokens, 5), np.int32)
    want = np.stack([np.bincount(col[col >= 0], minlength=num_bins) for col in bins.T])
    count = jax.jit(lambda b: (qb.histogram(b, num_bins), qb._count_by_matmul(b, num_bins)))
    for got in count(bins):
        np.testing.assert_array_equal(got, want)


def test_layers_are_independent_under_vmap():
    biases = np.stack([spread(0.1), spread(1.0)])
    stats = [statistics(uniform(9 + i), biases[i], ALL) for i in range(2)]
    got = jax.vmap(update)(biases, jax.tree.map(lambda *x: jnp.stack(x), *stats))
    for i in range(2):
        np.testing.assert_array_equal(got[i], update(biases[i], stats[i]))


# -------------------------------------------------------------- what it achieves (architecture 9.4)


@pytest.mark.parametrize("balancing", ESTIMATORS)
def test_balancing_flattens_a_skewed_router(balancing):
    """Fresh batches every step; sampling noise alone gives a max/mean of about 1.1 here."""
    experts, active, tokens = 64, 4, 4096
    skew = np.where(np.arange(experts) < 4, 4.0, 0.0) + np.linspace(-1, 1, experts)
    bias, loads = np.zeros(experts, np.float32), []
    for seed in range(4):
        logits = np.random.default_rng(seed).normal(size=(tokens, experts)) + skew
        scores, mask = np.float32(1 / (1 + np.exp(-logits))), np.ones(tokens, bool)
        stats = statistics(scores, bias, mask, num_active=active, balancing=balancing)
        loads.append(float(stats.load.max() / stats.load.mean()))
        bias = update(bias, stats, num_active=active, balancing=balancing)
    assert loads[0] > 10
    assert loads[1] < 1.8
    assert loads[3] < 1.3
