"""The sampling distribution: penalty, temperature, truncation, and one draw per row."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

SMALLEST, LARGEST = 1e-6, 1e6  # of divisors: beyond, quotients leave float32 and no order is left


class SamplingConfig(NamedTuple):
    """How one request's tokens are drawn, in the order of application."""

    repetition_penalty: float = 1.0  # logits of tokens already there: / it above 0, * it below
    temperature: float = 0.8  # divides the logits; 0: always the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens; 0: all
    top_p: float = 1.0  # and among the fewest whose probabilities reach this sum
    min_p: float = 0.0  # and among those with this share of the likeliest's probability

    def check(self) -> None:
        """Raises ValueError for values outside their range."""
        if not SMALLEST <= self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be from {SMALLEST} to "
                f"{LARGEST:.0f} (1: none)"
            )
        if self.temperature != 0 and not SMALLEST <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (always the likeliest token), or "
                f"from {SMALLEST} to {LARGEST:.0f}"
            )
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not SMALLEST <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be from {SMALLEST} to 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be at least 0 and at most 1")


class SamplingRows(NamedTuple):
    """`SamplingConfig` of each row of a batch."""

    repetition_penalty: Float[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


def sampling_rows(configs: Sequence[SamplingConfig]) -> SamplingRows:
    """The settings of several requests as arrays."""
    penalty, temperature, top_k, top_p, min_p = zip(*configs, strict=True)
    floats = (jnp.asarray(x, jnp.float32) for x in (penalty, temperature, top_p, min_p))
    penalty, temperature, top_p, min_p = floats
    return SamplingRows(penalty, temperature, jnp.asarray(top_k, jnp.int32), top_p, min_p)


def sample_tokens(
    logits: Float[Array, "B X"],
    seeds: UInt32[Array, " B"],
    counts: Int[Array, " B"],
    how: SamplingRows,
    *,
    allowed: Bool[Array, " X"],
    seen: Bool[Array, "B X"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token per row, and its log-probability.

    Args:
        logits: of the model, float32.
        seeds, counts: the draw depends on these two, and the logits, of its own row only.
        how: a row of temperature 0 takes the likeliest token, the lowest id among equals.
        allowed: False for ids that are never chosen.
        seen: tokens of the row's prompt and output, for the penalty.

    Returns: tokens, int32; log-probabilities in nats under softmax(logits), the model's own
        distribution: before penalty, temperature and truncation, and over all ids.
    Cost: nothing is drawn while all rows have temperature 0, and no vocabulary is sorted while no
        row that draws has top_k or top_p.
    """
    scores = jnp.where(allowed, logits, -jnp.inf)
    scores = jax.lax.cond(
        (how.repetition_penalty != 1).any(), _penalised, lambda x, *_: x,
        scores, seen, how.repetition_penalty,
    )  # fmt: skip
    likeliest = jnp.argmax(scores, -1).astype(jnp.int32)
    draws = how.temperature > 0
    tokens = jax.lax.cond(
        draws.any(),
        lambda: jnp.where(draws, _draw(scores, seeds, counts, how), likeliest),
        lambda: likeliest,
    )
    chosen = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(logits, -1)


def _penalised(scores, seen, penalty):
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)


def _draw(scores, seeds, counts, how):
    """The largest of score and Gumbel noise, in the order of ids: so that rows with and without a
    sorted vocabulary draw alike.
    """
    draws = how.temperature > 0
    scaled = scores / jnp.where(draws, how.temperature, 1)[:, None]
    cut = draws & ((how.top_k > 0) | (how.top_p < 1))
    scaled = jax.lax.cond(cut.any(), _truncated, lambda x, *_: x, scaled, how.top_k, how.top_p)
    least = scaled.max(-1, keepdims=True) + jnp.log(how.min_p)[:, None]
    scaled = jnp.where(scaled >= least, scaled, -jnp.inf)

    def noise(seed, count):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), scaled.shape[1:])

    return jnp.argmax(scaled + jax.vmap(noise)(seeds, counts), -1).astype(jnp.int32)


def _truncated(scaled, top_k, top_p):
    """-inf outside the `top_k` likeliest, and of these outside the shortest run of likeliest tokens
    whose probabilities sum to at least `top_p`.
    """
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, -1)
    size = scaled.shape[-1]
    kept = jnp.arange(size) < jnp.where(top_k > 0, top_k, size)[:, None]
    p = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), -1)
    before, top_p = jnp.cumsum(p, -1) - p, top_p[:, None]
    kept &= (before < top_p) | (top_p >= 1)  # the sums may round to more than 1
    rows = jnp.arange(scaled.shape[0])[:, None]
    return jnp.where(jnp.zeros_like(kept).at[rows, order].set(kept), scaled, -jnp.inf)
