"""Generation: equal to the full forward, truncation of the distribution, buckets, one compilation per bucket."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.data.tokenizer import ByteTokenizer
from k3jax.sample import BLOCK, Generator, SamplingConfig, bucket, sample_token
from tests.model_helpers import build, split, tiny_config

CFG = tiny_config(vocab_size=272)
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def model():
    return build(CFG)


@pytest.fixture(scope="module")
def greedy(model):
    _, params, buffers = split(model)
    return Generator(CFG, params, buffers, TOKENIZER, SamplingConfig(temperature=0.0))


def test_greedy_equals_the_full_forward(model, greedy):
    """Every generated token is the likeliest one of the full forward pass over all tokens before it."""
    prompts = [TOKENIZER.encode("def f(x):"), TOKENIZER.encode("im")]
    rows = greedy.generate(prompts, 20)
    forward = jax.jit(lambda tokens, ids: model(tokens, segment_ids=ids))
    width = max(len(p) + len(r) for p, r in zip(prompts, rows, strict=True))
    tokens = np.zeros((2, width), np.int32)
    ids = np.zeros((2, width), np.int32)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[i, : len(prompt) + len(row)] = prompt + row
        ids[i, : len(prompt) + len(row)] = 1
    logits = np.array(forward(tokens, ids))
    logits[..., ~np.asarray(greedy.allowed)] = -np.inf
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        assert 0 < len(row) <= 20
        want = logits[i, len(prompt) - 1 : len(prompt) + len(row) - 1].argmax(-1)
        np.testing.assert_array_equal(row, want)


def test_rows_do_not_depend_on_their_neighbours(greedy):
    prompts = [TOKENIZER.encode(text) for text in ("class A", "x = 1\n")]
    together = greedy.generate(prompts, 10)
    assert together == [greedy.generate([p], 10)[0] for p in prompts]


def test_kf_117_one_compilation_per_bucket(greedy):
    """Prompts of 1 to 40 tokens share one prefill and one decode program."""
    greedy.generate([[65]], 2)
    prefills, decodes = greedy._prefill._cache_size(), greedy._decode._cache_size()
    for length in (1, 2, 17, 40):
        greedy.generate([[65] * length], 2 * BLOCK - 10)
    assert (greedy._prefill._cache_size(), greedy._decode._cache_size()) == (prefills, decodes)


def test_bucket_is_a_power_of_two():
    assert [bucket(n) for n in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]


def test_seed_decides(model):
    _, params, buffers = split(model)
    generator = Generator(CFG, params, buffers, TOKENIZER, SamplingConfig(temperature=1.0))
    a, b, c = (generator.generate([[65, 66]], 12, seed) for seed in (1, 1, 2))
    assert a == b
    assert a != c
    assert max(a[0]) < TOKENIZER.size
    assert not {TOKENIZER.bos_id, TOKENIZER.pad_id} & set(a[0])


def _draws(logits, **kwargs):
    args = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | kwargs
    keys = jax.random.split(jax.random.key(0), 400)
    draw = lambda key: sample_token(  # noqa: E731
        key,
        jnp.asarray([logits]),
        jnp.float32(args["temperature"]),
        args["top_k"],
        jnp.float32(args["top_p"]),
    )
    return np.asarray(jax.jit(jax.vmap(draw))(keys))[:, 0]


def test_truncation():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(_draws(logits, temperature=0.0)) == {0}
    assert set(_draws(logits, top_k=2)) == {0, 1}
    assert set(_draws(logits, top_p=0.6)) == {0, 1}
    assert set(_draws(logits, top_p=0.45)) == {0}
    assert set(_draws(logits)) == {0, 1, 2, 3}
    share = (_draws(logits) == 0).mean()
    assert abs(share - 0.5) < 0.1
    assert (_draws(logits, temperature=0.5) == 0).mean() > share


@pytest.mark.parametrize(
    "bad", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5)]
)
def test_bad_values_are_named(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        SamplingConfig(**bad).check()


def test_bad_prompts_are_refused(greedy):
    with pytest.raises(ValueError, match="at least one token"):
        greedy.generate([[]], 4)
    with pytest.raises(ValueError, match="prompt holds token 999"):
        greedy.generate([[999]], 4)


def test_text_streams_in_whole_characters(greedy):
    text = "".join(greedy.stream_text("é", 12))
    tokens = greedy.generate([[TOKENIZER.bos_id, *TOKENIZER.encode("é")]], 12)[0]
    assert text == TOKENIZER.decode([t for t in tokens if t != TOKENIZER.eos_id])
