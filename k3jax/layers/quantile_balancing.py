"""Quantile Balancing: router biases that give every expert the same load, without a loss term.

Token i is routed to expert j while s_ij + b_j exceeds its cutoff alpha_i, the (k+1)-th largest
biased score. So r_ij = alpha_i - s_ij is the bias with which expert j wins token i, and the k/n
quantile of column j of r is the bias with which it wins its fair share, q = m k / n of m tokens.
A forward pass only collects statistics of r (`collect_stats`); after the last micro-batch of a step
they are pooled (`pool_stats`) and turned into the bias of the *next* step (`update_bias`).
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.sharding.annotate import concatenated, pmin, psum
from k3jax.sharding.mesh import AXES

Balancing = Literal["quantile_histogram", "quantile_exact", "none"]


class RouterStats(NamedTuple):
    """What one router saw. Padding, and tokens with a score that is not finite, are not counted."""

    # histogram of r per expert; for "quantile_exact" the margins s - alpha, -inf if not counted
    statistics: Int[Array, "*layers E bins"] | Float[Array, "*layers tokens E"]
    count: Int[Array, "*layers"]  # counted tokens m
    load: Int[Array, "*layers E"]  # counted tokens that chose each expert
    all_tied: Bool[Array, "*layers"]  # all counted tokens found all experts equal (or count is 0)


def collect_stats(
    scores: Float[Array, "tokens E"],
    cutoff: Float[Array, " tokens"],
    ids: Int[Array, "tokens A"],
    bias: Float[Array, " E"],
    mask: Bool[Array, " tokens"] | None = None,
    *,
    balancing: Balancing,
    num_bins: int,
) -> RouterStats:
    """Statistics of one batch of routed tokens.

    Args:
        scores: unbiased router scores in [0, 1].
        cutoff: alpha, the largest biased score that lost.
        ids: chosen experts, distinct per token.
        bias: the bias that was used; it fixes the range of the histogram for the whole step.
        mask: False for padding; None if all tokens are real.
        balancing: which statistics `update_bias` will want; with "none" only the loads are counted.
        num_bins: bins of the histogram.

    Numerics: counts are int32, so sums over micro-batches and devices do not depend on the split.
    Cost: one scatter-add per token and expert (on a TPU, matrix products); the exact form keeps
    [tokens, E] floats until the end of the step and is meant for small models and for tests.
    """
    scores, cutoff, bias = jax.lax.stop_gradient((scores, cutoff, bias))
    num_experts = scores.shape[-1]
    counted = jnp.isfinite(scores).all(-1)
    if mask is not None:
        counted &= mask
    if balancing == "quantile_exact":
        statistics = jnp.where(counted[:, None], scores - cutoff[:, None], -jnp.inf)
    elif balancing == "quantile_histogram":
        lo, span = residual_range(bias)
        # times bins per unit, not divided by the bin width, so that r = 0 at b = 0 is on its edge
        bins = jnp.floor((cutoff[:, None] - scores - lo) * (num_bins / span))
        bins = jnp.clip(bins, 0, num_bins - 1)
        statistics = histogram(jnp.where(counted[:, None], bins, -1).astype(jnp.int32), num_bins)
    else:
        statistics = jnp.zeros((num_experts, 0), jnp.int32)
    biased = scores + bias
    tied = biased.max(-1) == biased.min(-1)
    return RouterStats(
        statistics,
        counted.sum(dtype=jnp.int32),
        jnp.zeros(num_experts, jnp.int32).at[ids].add(counted[:, None].astype(jnp.int32)),
        (tied | ~counted).all(),
    )


def pool_stats(*parts: RouterStats) -> RouterStats:
    """The statistics of several micro-batches of one step, as though they had been one batch."""
    statistics, counts, loads, all_tied = zip(*parts, strict=True)
    exact = jnp.issubdtype(statistics[0].dtype, jnp.floating)
    return RouterStats(
        jnp.concatenate(statistics, axis=-2) if exact else functools.reduce(jnp.add, statistics),
        functools.reduce(jnp.add, counts),
        functools.reduce(jnp.add, loads),
        functools.reduce(jnp.logical_and, all_tied),
    )


def pool_over_devices(stats: RouterStats) -> RouterStats:
    """The statistics of all tokens of a mesh from those of each device's, as though it were alone."""
    statistics, count, load, all_tied = stats
    exact = jnp.issubdtype(statistics.dtype, jnp.floating)
    return RouterStats(
        concatenated(statistics, -2, *AXES) if exact else psum(statistics, *AXES),
        psum(count, *AXES),
        psum(load, *AXES),
        pmin(all_tied.astype(jnp.int32), *AXES) > 0,
    )


def update_bias(
    bias: Float[Array, " E"], stats: RouterStats, *, num_active: int, balancing: Balancing
) -> Float[Array, " E"]:
    """The bias for the next step, from the statistics of the whole global batch of this step.

        b_j <- b^_j - mean(b^),   b^_j = quantile_{k/n} of r_:j         (K3 report, Eq. 13-14)

    Args:
        bias: the bias this step was routed with; leading axes go through `jax.vmap`.
        stats: pooled statistics.
        num_active: k, chosen experts per token.
        balancing: as given to `collect_stats`.

    Returns: float32 with mean 0; the old bias where there is nothing to balance (no token counted,
    every expert always chosen, balancing "none").
    """
    num_experts = bias.shape[-1]
    if balancing == "none" or num_active == num_experts:
        return bias
    if balancing == "quantile_exact":
        required = exact_quantile(stats.statistics, stats.count, num_active)
    else:
        required = histogram_quantile(stats.statistics, stats.count, bias, num_active)
    return jnp.where(stats.count > 0, required - required.mean(), bias)


def exact_quantile(
    margins: Float[Array, "tokens E"], count: Int[Array, ""], num_active: int
) -> Float[Array, " E"]:
    """b^_j: minus the (floor(q) + 1)-th largest margin of column j, so that q margins exceed it."""
    rank, _ = fair_share(count, num_active, margins.shape[-1])
    return jnp.sort(-margins, axis=0)[rank]


def histogram_quantile(
    counts: Int[Array, "E bins"], count: Int[Array, ""], bias: Float[Array, " E"], num_active: int
) -> Float[Array, " E"]:
    """b^_j interpolated in the bin that holds the ceil(q)-th smallest r (architecture 9.2).

        b^_j = lo + (bin + clip((q - c) / h, 0, 1)) w,   c counts below the bin, h counts in it

    w is the bin width; the error is at most w. An expert without any counts keeps its bias.
    """
    lo, span = residual_range(bias)
    rank, rest = fair_share(count, num_active, counts.shape[0])
    cumulative = jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
    reached = cumulative >= rank + (rest > 0)
    index = jnp.argmax(reached, axis=-1)  # the first bin that reaches ceil(q)
    inside = jnp.take_along_axis(counts, index[:, None], axis=-1)[:, 0]
    below = jnp.take_along_axis(cumulative, index[:, None], axis=-1)[:, 0] - inside
    part = ((rank - below).astype(jnp.float32) + rest) / jnp.maximum(inside, 1).astype(jnp.float32)
    position = index.astype(jnp.float32) + jnp.clip(part, 0, 1)
    required = lo + position * (span / counts.shape[-1])
    return jnp.where(reached.any(-1), required, bias)


def fair_share(
    count: Int[Array, ""], num_active: int, num_experts: int
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """q = count * k / n as (floor, fraction); int32 without ever forming count * k."""
    whole, left = count // num_experts, count % num_experts
    rank = whole * num_active + left * num_active // num_experts
    return rank, (left * num_active % num_experts).astype(jnp.float32) / num_experts


def residual_range(bias: Float[Array, " E"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower end, length) of the range of r, [min b - 1, max b + 1]; scores lie in [0, 1]."""
    return bias.min() - 1, bias.max() - bias.min() + 2


def histogram(bins: Int[Array, "tokens E"], num_bins: int) -> Int[Array, "E bins"]:
    """How often each bin index occurs in each column; -1 is not counted."""
    count_by_matmul = functools.partial(_count_by_matmul, num_bins=num_bins)
    count_by_scatter = functools.partial(_count_by_scatter, num_bins=num_bins)
    return jax.lax.platform_dependent(bins, tpu=count_by_matmul, default=count_by_scatter)


def _count_by_scatter(bins, num_bins):
    num_experts = bins.shape[1]
    cells = num_experts * num_bins
    flat = bins + num_bins * jnp.arange(num_experts, dtype=jnp.int32)
    flat = jnp.where(bins < 0, cells, flat).reshape(-1)
    counts = jnp.zeros(cells, jnp.int32).at[flat].add(1, mode="drop")
    return counts.reshape(num_experts, num_bins)


def _count_by_matmul(bins, num_bins, chunk=256, base=32):
    """One-hot vectors of the two digits of each bin index, contracted over the tokens of a chunk.

    A TPU runs scatter-adds one by one but has a matrix unit. Partial counts stay below 2^24, so
    they are exact in float32; -1 has no digits and adds nothing.
    """
    tokens, num_experts = bins.shape
    num_high = -(-num_bins // base)
    bins = jnp.pad(bins, ((0, -tokens % chunk), (0, 0)), constant_values=-1)

    def add_chunk(counts, part):
        high = (part[..., None] // base == jnp.arange(num_high)).astype(jnp.bfloat16)
        low = (part[..., None] % base == jnp.arange(base)).astype(jnp.bfloat16)
        new = jnp.einsum("teh,tel->ehl", high, low, preferred_element_type=jnp.float32)
        return counts + new.astype(jnp.int32), None

    counts = jnp.zeros((num_experts, num_high, base), jnp.int32)
    counts, _ = jax.lax.scan(add_chunk, counts, bins.reshape(-1, chunk, num_experts))
    return counts.reshape(num_experts, num_high * base)[:, :num_bins]
