"""The sampling distribution: penalty, temperature, truncation; rows that draw for themselves; what is computed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.sample import LARGEST, SMALLEST, SamplingConfig, sample_tokens, sampling_rows

LOGITS = np.log([0.5, 0.3, 0.15, 0.05]).astype(np.float32)
DRAWS = 400


@jax.jit
def sample(logits, seeds, counts, how, allowed, seen):
    return sample_tokens(logits, seeds, counts, how, allowed=allowed, seen=seen)


def draw(*configs, logits=LOGITS, seeds=None, counts=None, allowed=None, seen=None):
    """(tokens, log-probabilities) of one row per config."""
    rows, size = len(configs), len(logits)
    return jax.device_get(
        sample(
            np.tile(np.asarray(logits, np.float32), (rows, 1)),
            np.arange(rows, dtype=np.uint32) if seeds is None else np.asarray(seeds, np.uint32),
            np.zeros(rows, np.int32) if counts is None else np.asarray(counts, np.int32),
            sampling_rows(configs),
            np.ones(size, bool) if allowed is None else np.asarray(allowed),
            np.zeros((rows, size), bool) if seen is None else np.tile(seen, (rows, 1)),
        )
    )


def many(logits=LOGITS, seen=None, **settings):
    config = SamplingConfig(**({"temperature": 1.0} | settings))
    return draw(*[config] * DRAWS, logits=logits, seen=seen)[0]


def share(tokens, token=0):
    return (tokens == token).mean()


def test_truncation():
    assert set(many(temperature=0.0)) == {0}
    assert set(many(top_k=2)) == {0, 1}
    assert set(many(top_p=0.6)) == {0, 1}
    assert set(many(top_p=0.45)) == {0}
    assert set(many(min_p=0.25)) == {0, 1, 2}
    assert set(many(min_p=1.0)) == {0}
    assert set(many(top_k=3, top_p=0.84)) == {0, 1}  # of the three that are left
    assert set(many()) == {0, 1, 2, 3}


def test_frequencies_follow_the_tempered_distribution():
    assert abs(share(many()) - 0.5) < 0.1
    squared = np.exp(2 * LOGITS) / np.exp(2 * LOGITS).sum()
    assert abs(share(many(temperature=0.5)) - squared[0]) < 0.1
    truncated = many(top_k=2, min_p=0.1)
    assert abs(share(truncated) - 0.625) < 0.1


def test_equal_logits_take_the_lowest_ids():
    """Exactly top_k tokens stay, whatever is equal; greedy takes the first."""
    flat = np.zeros(6)
    assert set(many(flat, temperature=0.0)) == {0}
    assert set(many(flat, top_k=2)) == {0, 1}
    assert set(many(flat, top_p=0.5)) == {0, 1, 2}


def test_repetition_penalty_lowers_what_is_there():
    """Positive logits are divided, negative ones multiplied; other tokens keep theirs."""
    logits, seen = np.array([2.0, 1.5, -1.0, -1.2]), np.array([True, False, True, False])
    assert set(many(logits, seen, temperature=0.0, repetition_penalty=1.0)) == {0}
    assert set(many(logits, seen, temperature=0.0, repetition_penalty=1.4)) == {1}
    assert set(many(logits, seen, temperature=0.0, repetition_penalty=0.5)) == {0}
    wide = np.array([-1.0, -1.2])
    assert set(many(wide, seen[:2], temperature=0.0, repetition_penalty=1.3)) == {1}


def test_ids_that_are_not_allowed_are_never_chosen():
    allowed = [False, True, True, False]
    hot = [SamplingConfig(temperature=50.0)] * DRAWS
    assert set(draw(*hot, allowed=allowed)[0]) == {1, 2}
    assert draw(SamplingConfig(temperature=0.0), allowed=allowed)[0][0] == 1


def test_logprobs_are_the_models_own():
    """Whatever is done to the distribution to draw from it."""
    for config in (
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=3.0, top_k=2),
        SamplingConfig(temperature=1.0, top_p=0.4, repetition_penalty=5.0),
    ):
        tokens, logprobs = draw(*[config] * 20, seen=np.array([True] * 4))
        np.testing.assert_allclose(logprobs, LOGITS[tokens], rtol=1e-5)


def test_a_draw_depends_on_its_own_seed_and_count():
    """Not on the other rows: neither on what they are nor on whether they need a sorted vocabulary."""
    logits, hot = np.linspace(0, 1, 50), SamplingConfig(temperature=1.0)
    alone = [draw(hot, logits=logits, seeds=[s], counts=[c])[0][0] for s in (3, 4) for c in (0, 9)]
    assert len(set(alone)) > 1
    neighbours = (
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=1.0, top_p=0.5, top_k=7, min_p=0.2, repetition_penalty=2.0),
    )
    for other in neighbours:
        rows, seeds, counts = [hot, other] * 4, [3, 0, 3, 1, 4, 2, 4, 3], [0, 0, 9, 0, 0, 1, 9, 1]
        together = draw(*rows, logits=logits, seeds=seeds, counts=counts, seen=np.ones(50, bool))
        assert together[0][::2].tolist() == alone


def test_greedy_rows_sort_and_draw_nothing():
    """The whole vocabulary is only sorted under a condition, and only there is noise made."""
    rows = sampling_rows([SamplingConfig()] * 2)
    program = jax.make_jaxpr(sample)(
        jnp.zeros((2, 9)), jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32), rows,
        jnp.ones(9, bool), jnp.zeros((2, 9), bool),
    )  # fmt: skip

    def outside_of_conditions(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "cond":
                yield "cond"
                continue
            yield eqn.primitive.name
            for inner in eqn.params.values():
                if hasattr(inner, "jaxpr"):
                    yield from outside_of_conditions(inner.jaxpr)

    names = set(outside_of_conditions(program.jaxpr))
    assert {"cond", "argmax"} <= names
    assert not {n for n in names if "sort" in n or "random" in n or "threefry" in n or "top_k" in n}


@pytest.mark.parametrize("size", [1.0, 1e20])
@pytest.mark.parametrize("temperature", [0.0, SMALLEST, 1.0, LARGEST])
@pytest.mark.parametrize("penalty", [SMALLEST, 1.0, LARGEST])
@pytest.mark.parametrize("top_p", [SMALLEST, 1.0])
def test_settings_at_their_limits_keep_the_order(size, temperature, penalty, top_p):
    """Never an id that is not allowed, even if it was seen; the likeliest where only that is left."""
    logits, allowed = size * np.array([3.0, -1, 0, 2, 2.5, -5, 1, 9]), np.arange(8) < 7
    seen = np.array([1, 1, 1, 0, 0, 1, 0, 1], bool)
    how = SamplingConfig(temperature=temperature, repetition_penalty=penalty, top_p=top_p)
    how.check()
    tokens, logprobs = draw(*[how] * 16, logits=logits, allowed=allowed, seen=seen)
    assert np.isfinite(logprobs).all()
    assert allowed[tokens].all()
    if temperature == 0 or top_p < 1:
        scores = logits * np.where(seen, np.where(logits > 0, 1 / penalty, penalty), 1)
        np.testing.assert_array_equal(tokens, scores[:7].argmax())


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-1.0),
        dict(temperature=float("nan")),
        dict(top_k=-1),
        dict(top_k=2**31),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(min_p=-0.1),
        dict(min_p=1.1),
        dict(repetition_penalty=0.0),
        dict(repetition_penalty=float("inf")),
        dict(temperature=float("inf")),
        dict(temperature=1e39),  # not finite as float32
        dict(temperature=1e-46),  # zero as float32
        dict(top_p=1e-50),
        dict(repetition_penalty=1e39),
        dict(repetition_penalty=1e-39),
    ],
)
def test_bad_values_are_named(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value}")):
        SamplingConfig(**bad).check()
