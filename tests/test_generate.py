"""The engine: equal to the full forward, and to itself however requests meet; prompts, snapshots, stops, seeds, sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax import decode_loop
from k3jax.data.tokenizer import ByteTokenizer
from k3jax.decode_state import init_decode_state
from k3jax.errors import UserError
from k3jax.generate import Engine, compute_weights, padded_length
from k3jax.paged_cache import PagePool, PrefixCache
from k3jax.request import Request, TextStream
from k3jax.sample import SamplingConfig
from tests.golden_io import cases, check, load
from tests.model_helpers import build, golden_model, split, tiny_config

CFG = tiny_config(vocab_size=272)
TOKENIZER = ByteTokenizer()
GREEDY, WARM = SamplingConfig(temperature=0.0), SamplingConfig(temperature=1.0)
SIZES = {"slots": 3, "max_len": 160, "chunk": 32, "page_tokens": 16}


@pytest.fixture(scope="module")
def model():
    return build(CFG)


@pytest.fixture(scope="module")
def weights(model):
    return split(model)[1:]


def make(weights, **changes):
    return Engine(CFG, *weights, TOKENIZER, **(SIZES | changes))


def short_of_pages(engine, count):
    """The engine with so few pages to give; the arrays keep their shapes, so nothing is compiled."""
    engine._pages = PagePool(count)
    engine._prefixes = PrefixCache(engine._prefixes.capacity, engine.chunk, engine._pages)
    return engine


def prompt(length, seed=0):
    return np.random.default_rng((seed, length)).integers(0, 256, length).tolist()


def request(length, seed=0, **settings):
    return Request(
        prompt=prompt(length, seed), **({"sampling": GREEDY, "max_tokens": 20} | settings)
    )


MIXED = [
    request(1),
    request(31, max_tokens=3),
    request(32, sampling=WARM, seed=7, max_tokens=33),
    request(33, max_tokens=16),
    request(100, max_tokens=40),
    request(64, sampling=SamplingConfig(temperature=0.9, top_p=0.8, top_k=40), seed=1),
    request(7, max_tokens=1),
    request(20, sampling=SamplingConfig(temperature=0.0, repetition_penalty=1.5), max_tokens=30),
]


@pytest.fixture(scope="module")
def alone(weights):
    """Each request of MIXED in an engine that has served nothing."""
    return [make(weights).generate([r])[0] for r in MIXED]


def same(got, want, tolerance=1e-5):
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert [(r.text, r.finish_reason) for r in got] == [(r.text, r.finish_reason) for r in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=tolerance)


# -- equal to the full forward


def test_greedy_equals_the_full_forward(model, alone):
    """Every generated token is the likeliest allowed one of the full forward pass over all before it, with its
    log-probability; prompts of one token up to four chunks."""
    forward = jax.jit(lambda tokens, ids: model(tokens, segment_ids=ids))
    for asked, result in zip(MIXED, alone, strict=True):
        if asked.sampling != GREEDY:
            continue
        row, start = [*asked.prompt, *result.tokens], len(asked.prompt)
        tokens, ids = np.zeros((2, 1, 160), np.int32)
        tokens[0, : len(row)], ids[0, : len(row)] = row, 1
        logits = np.array(forward(tokens, ids))[0, start - 1 : len(row) - 1]
        logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(logits)), result.tokens]
        np.testing.assert_allclose(result.logprobs, logprobs, rtol=0, atol=1e-5)
        logits[:, [TOKENIZER.bos_id, TOKENIZER.pad_id]] = -np.inf
        logits[:, TOKENIZER.size :] = -np.inf
        assert result.tokens == logits.argmax(-1).tolist()
        assert len(result.tokens) == asked.max_tokens or result.tokens[-1] == TOKENIZER.eos_id


FOLDERS = sorted(case.rsplit("/", 1)[0] for case in cases("text_weights"))


def golden(folder, spare_slots):
    """(engine, its requests, fixture) of a golden text model."""
    cfg, params, buffers = golden_model(folder)
    meta, tensors = load(f"{folder}/io")
    rows, size = tensors["decode.tokens"].shape
    engine = Engine(
        cfg, params, buffers, None, slots=rows + spare_slots, max_len=64, chunk=64, page_tokens=16
    )
    requests = [
        Request(prompt=row.tolist(), max_tokens=size, sampling=GREEDY)
        for row in tensors["prompt_ids"]
    ]
    return engine, requests, meta, tensors


@pytest.mark.golden
@pytest.mark.parametrize("folder", FOLDERS)
def test_greedy_continuation_of_the_golden_models(folder):
    """The tokens exactly, and their log-probabilities within the tolerance of the logits."""
    engine, requests, meta, tensors = golden(folder, spare_slots=1)
    results = engine.generate(requests)
    check("decode.tokens", np.array([r.tokens for r in results]), meta)
    logits = tensors["decode.step_logits"].astype(np.float64)
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logprobs, tensors["decode.tokens"][..., None].astype(int), -1)
    tolerance = meta["tolerance"]["decode.step_logits"]["suggested"]
    np.testing.assert_allclose([r.logprobs for r in results], chosen[..., 0], **tolerance)


@pytest.mark.golden
@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_of_every_step_of_the_golden_models(folder, monkeypatch):
    """One token per block, so that what the slots hold can be seen between."""
    monkeypatch.setattr(decode_loop, "BLOCK", 1)
    engine, requests, meta, _ = golden(
        folder, spare_slots=2
    )  # other shapes: traced with that BLOCK
    for index, asked in enumerate(requests):
        assert engine._admit(index, asked)
    steps = []
    while engine._running:
        steps.append(np.array(engine._slots.logits)[: len(requests)])
        list(engine._block())
    check("decode.step_logits", np.stack(steps, 1), meta)


# -- results do not depend on company, slot, history or padding


def test_together_equals_alone(weights, alone):
    """Eight requests of all kinds in three slots, twice in one engine, in two orders (KF-031, KF-032)."""
    engine = make(weights)
    same(engine.generate(MIXED), alone)
    same(engine.generate(MIXED[::-1]), alone[::-1])
    assert len(engine._slot_pool._free) == 3
    assert engine._pages.free == engine._pages.size


def poisoned(engine):
    """The engine with NaN wherever floats lie, as if every slot and page had gone wrong."""

    def poison(x):
        return jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    slots = engine._slots
    caches = jax.tree.map(poison, slots.state.caches)
    state = slots.state._replace(caches=caches)
    engine._slots = slots._replace(state=state, logits=poison(slots.logits))
    return engine


def test_kf_032_nothing_is_read_that_was_not_written(weights, alone):
    """All of KDA's state, all pages, all logits are NaN: fresh slots read as zeros, idle ones touch nobody."""
    engine = poisoned(make(weights))
    same(engine.generate(MIXED), alone)
    same(engine.generate(MIXED[:2]), alone[:2])


def test_kf_033_few_pages_only_make_requests_wait(weights, alone):
    """Nine pages: at most two of the longer requests at once."""
    engine = short_of_pages(make(weights), 9)
    most = 0
    found = {}
    for event in engine.run(MIXED):
        most = max(most, len(engine._running))
        if event.result:
            found[event.index] = event.result
    same([found[n] for n in range(len(MIXED))], alone)
    assert 1 <= most <= 3
    assert engine._pages.free == 9


def test_kf_040_kf_031_chunk_size_changes_nothing(weights, alone):
    """Prompts read in chunks of 16, 64 or 128 tokens: rounding only."""
    for chunk in (16, 64, 128):
        same(make(weights, chunk=chunk).generate(MIXED), alone)


def test_kf_036_two_interleaved_requests_over_100_steps(weights):
    """The donated state raises when it is used again; the requests, one joining late, equal those alone."""
    engine = make(weights)
    old = engine._slots
    long, late = request(40, max_tokens=110), request(5, max_tokens=100, seed=3)
    want = [make(weights).generate([r])[0] for r in (long, late)]
    same(engine.generate([long, late]), want)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.logits)


def test_kf_037_each_slot_gets_its_own(weights, alone):
    """One program serves slots 0 to 2; each request lands where the host put it."""
    engine = make(weights)
    sizes = decode_loop.read_chunk._cache_size(), decode_loop.admit._cache_size()
    for index, asked in enumerate(MIXED[:3]):
        assert engine._admit(index, asked)
    assert not engine._admit(3, MIXED[3])
    assert list(engine._running) == [0, 1, 2]
    lengths = [len(r.prompt) for r in MIXED[:3]]
    np.testing.assert_array_equal(engine._slots.state.length, lengths)
    seen = np.asarray(engine._slots.seen)
    for row, asked in zip(seen, MIXED, strict=False):
        assert set(np.flatnonzero(row)) == set(asked.prompt)
    grown = decode_loop.read_chunk._cache_size(), decode_loop.admit._cache_size()
    assert grown[0] - sizes[0] <= len(engine.buckets)
    assert grown[1] - sizes[1] <= 1


def test_leaving_early_frees_everything(weights, alone):
    engine = make(weights)
    for _ in engine.run(MIXED):
        break
    assert not engine._running
    assert engine._pages.free == engine._pages.size
    same(engine.generate(MIXED[:1]), alone[:1])


def test_one_iteration_at_a_time(weights):
    engine = make(weights)
    first = engine.run(MIXED)
    next(first)
    with pytest.raises(ValueError, match="serving requests already"):
        next(engine.run(MIXED))
    first.close()


# -- snapshots of prefixes


def test_kf_035_restored_equals_recomputed_to_the_last_bit(weights):
    """130 tokens, then 128 of them and others, then 127: hits at whole chunks, same tokens and log-probabilities."""
    first = request(130)
    shares = [
        dataclasses.replace(first, prompt=[*first.prompt[:n], *prompt(9, seed=5)])
        for n in (128, 127, 97, 31)
    ]
    engine = make(weights, snapshots=8)
    cold = [make(weights).generate([r])[0] for r in [first, *shares, first]]
    warm, restored = [], []
    for asked in [first, *shares, first]:
        warm += engine.generate([asked])
        restored.append(engine.stats.restored)
    assert np.diff([0, *restored]).tolist() == [0, 128, 96, 96, 0, 128]
    same(warm, cold, tolerance=0)
    assert engine.stats.prompt == sum(len(r.prompt) for r in [first, *shares, first]) - restored[-1]


def test_a_prompt_of_whole_chunks_reads_its_last_again(weights):
    """A snapshot has no logits: 64 tokens restore 32."""
    engine = make(weights, snapshots=8)
    want = engine.generate([request(64)])
    same(engine.generate([request(64)]), want, tolerance=0)
    assert engine.stats.restored == 32


def test_a_snapshot_is_of_its_prefix_alone(weights):
    """Its user goes on, ends, and its slot and own pages are used by others: the copy stays what it was."""
    engine = make(weights, snapshots=1)
    want = engine.generate([request(40)])
    engine.generate([request(33, seed=4, max_tokens=60)])  # takes the one snapshot's place
    engine.generate([request(40)])
    engine.generate([request(20, seed=4, max_tokens=60)])  # no whole chunk: leaves it there
    poisoned_pages = engine._pages.free
    same(engine.generate([request(40)]), want, tolerance=0)
    assert engine.stats.restored == 32
    assert poisoned_pages == engine._pages.size - 2


def test_snapshots_give_way_to_requests(weights, alone):
    """Where pages are short the oldest go, never one that is being used."""
    engine = short_of_pages(make(weights, snapshots=8), 12)
    same(engine.generate([*MIXED, *MIXED]), [*alone, *alone])
    while engine._prefixes.drop():
        pass
    assert engine._pages.free == 12


# -- ends and text


def test_stop_ids_end_and_are_part_of_the_tokens(weights, alone):
    whole = alone[4].tokens
    at = next(n for n in range(3, len(whole)) if whole[n] not in whole[:n])
    asked = dataclasses.replace(MIXED[4], stop_ids=(whole[at], 255))
    (result,) = make(weights).generate([asked])
    assert (result.tokens, result.finish_reason) == (whole[: at + 1], "stop")
    assert result.text == TOKENIZER.decode(whole[:at])


def test_stop_strings_cut_the_text(weights, alone):
    """Over tokens, over blocks, at the beginning; neighbours go on; tokens end with those that it spans."""
    engine = make(weights)
    for n, begin, size in ((4, 0, 1), (4, 14, 4), (3, 5, 2)):
        text = TOKENIZER.decode(t for t in alone[n].tokens if t < 256)
        stop = text[begin : begin + size]
        cut = text.index(stop)
        asked = [
            *MIXED[:n],
            dataclasses.replace(MIXED[n], stop=("never there", stop)),
            *MIXED[n + 1 :],
        ]
        results = engine.generate(asked)
        assert (results[n].text, results[n].finish_reason) == (text[:cut], "stop")
        assert results[n].tokens == alone[n].tokens[: len(results[n].tokens)]
        assert len(results[n].logprobs) == len(results[n].tokens)
        others = [r for i, r in enumerate(results) if i != n]
        same(others, [r for i, r in enumerate(alone) if i != n])


def test_events_add_up_to_the_results(weights, alone):
    texts, tokens = {}, {}
    for event in make(weights).run(MIXED):
        texts[event.index] = texts.get(event.index, "") + event.text
        tokens.setdefault(event.index, []).extend(event.tokens)
        assert len(event.tokens) == len(event.logprobs) <= decode_loop.BLOCK
        if event.result:
            assert texts[event.index] == event.result.text
            assert tokens[event.index] == event.result.tokens
    assert len(texts) == len(MIXED)


class Pieces:
    """A decoder whose tokens are pieces of text, the characters' bytes split anywhere."""

    def __init__(self, pieces):
        self.tokenizer = ByteTokenizer()
        self.decoder, self.pieces = self.tokenizer.stream(), pieces

    def push(self, token):
        return "".join(self.decoder.push(byte) for byte in self.pieces[token])

    def flush(self):
        return self.decoder.flush()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("abc</s>def", ["</s>"], "abc"),
        ("ab<</s>", ["</s>"], "ab<"),
        ("aab", ["aab", "ab"], ""),
        ("aaaab", ["aaab"], "a"),
        ("one two", ["two", "one t"], ""),
        ("grün€x", ["€"], "grün"),
        ("日本語。END", ["語。E"], "日本"),
        ("</s", ["</s>"], "</s"),
        ("plain", ["absent"], "plain"),
    ],
)
def test_stop_strings_in_any_split(text, stop, want, size):
    """Split into pieces of bytes: no part of a stop string is ever shown, everything before it is."""
    data = text.encode()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    stream, shown = TextStream(Pieces(pieces), stop), ""
    for token in range(len(pieces)):
        stream.push(token)
        shown += stream.take()
        assert want.startswith(shown)
    stream.flush()
    shown += stream.take(last=True)
    assert shown == stream.text == want
    assert stream.stopped == (want != text)


def test_text_streams_in_whole_characters(weights):
    engine = make(weights)
    text = "".join(engine.stream_text("é", max_tokens=12, sampling=GREEDY))
    asked = Request(
        prompt=[TOKENIZER.bos_id, *TOKENIZER.encode("é")], max_tokens=12, sampling=GREEDY
    )
    (result,) = engine.generate([asked])
    assert text == result.text


def test_seeds_decide(weights):
    ask = [request(2, sampling=WARM, seed=s) for s in (1, 1, 2)]
    a, b, c = make(weights).generate(ask)
    assert a == b
    assert a.tokens != c.tokens
    assert not {TOKENIZER.bos_id, TOKENIZER.pad_id} & {*a.tokens, *c.tokens}
    assert max(a.tokens) < TOKENIZER.size


# -- sizes, programs, weights


def test_kf_117_programs_do_not_depend_on_the_requests():
    """Prompts of 1 to 200 tokens, outputs of 1 to 40, all settings: four chunk buckets at most and one block."""
    cfg = tiny_config(vocab_size=272, num_layers=3)
    engine = Engine(
        cfg, *split(build(cfg))[1:], TOKENIZER, **(SIZES | dict(chunk=128, max_len=256))
    )
    assert engine.buckets == [16, 32, 64, 128]
    programs = (decode_loop.read_chunk, decode_loop.generate_block, decode_loop.admit)
    before = [p._cache_size() for p in programs]
    engine.generate([request(n, max_tokens=1 + n % 40) for n in range(1, 201, 7)])
    engine.generate(MIXED)
    grown = [p._cache_size() - n for p, n in zip(programs, before, strict=True)]
    assert grown[0] <= 4
    assert grown[1:] == [1, 1]
    engine.generate([request(n, seed=9) for n in (3, 77, 140)])
    assert [p._cache_size() - n for p, n in zip(programs, before, strict=True)] == grown


def test_kf_080_state_bytes_are_what_the_formula_says(weights):
    """Memories and conv inputs per slot, latents per page, tables; within 5 % of what is allocated."""
    engine = make(weights, slots=5, pages=40)
    kda, mla = CFG.kda, CFG.mla
    layers = [a for a, _ in CFG.layers]
    inputs = 3 * kda.num_heads * kda.head_dim
    per_slot = (kda.head_dim * inputs // 3 + (kda.conv_size - 1) * inputs) * 4
    per_token = (mla.kv_rank + mla.qk_shared_dim) * 4
    want = 5 * layers.count("kda") * per_slot + 40 * 16 * layers.count("mla") * per_token
    held = sum(x.nbytes for x in jax.tree.leaves(engine._slots.state))
    assert held == engine.state_bytes
    assert abs(want - held) <= 0.05 * held
    predicted = jax.eval_shape(lambda: init_decode_state(CFG, 5, 160, pages=40, page_tokens=16))
    assert held == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(predicted))


def test_matrices_are_cast_once_and_numbers_stay():
    """A bfloat16 model keeps no float32 matrix but the router's and the convolutions'; logits to the last bit."""
    cfg = tiny_config(num_layers=3, dtype="bfloat16")
    _, params, buffers = split(build(cfg))
    cast = compute_weights(cfg, params)
    wide = {
        "/".join(k.key for k in path[-2:])
        for path, x in jax.tree_util.tree_leaves_with_path(cast)
        if x.dtype == jnp.float32 and path[-1].key in ("kernel", "w1", "w2", "w3", "embedding")
    }
    assert wide == {"gate/kernel", "q_conv1d/kernel", "k_conv1d/kernel", "v_conv1d/kernel"}
    graphdef = split(build(cfg))[0]

    @jax.jit
    def run(params):
        return nnx.merge(graphdef, params, buffers)(jnp.arange(20)[None])

    np.testing.assert_array_equal(run(params), run(cast))


def test_padded_length():
    assert [padded_length(n) for n in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(prompt=[]), "at least one token"),
        (dict(prompt=[1, 999]), "prompt holds token 999"),
        (dict(prompt=[-1]), "prompt holds token -1"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(max_tokens=160), "max_len is 160"),
        (dict(seed=-1), "seed is -1"),
        (dict(seed=2**32), "seed is 4294967296"),
        (dict(stop=("",)), "at least one character"),
        (dict(stop_ids=tuple(range(9))), "9 stop_ids are too many"),
        (dict(sampling=SamplingConfig(top_p=2.0)), "top_p is 2.0"),
    ],
)
def test_bad_requests_are_refused(weights, changes, words):
    engine = make(weights)
    with pytest.raises(ValueError, match=words):
        engine.generate([dataclasses.replace(request(4), **changes)])
    assert not engine._running


def test_a_request_that_can_never_fit_is_refused(weights):
    with pytest.raises(ValueError, match="needs 5 pages of 16"):
        make(weights, pages=4).generate([request(40, max_tokens=40)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(slots=0), "slots is 0"),
        (dict(max_len=0), "max_len is 0"),
        (dict(max_len=2**31), "max_len is 2147483648; it must be below"),
        (dict(max_len=10**30), "max_len is 1000000000000000000000000000000; it must be below"),
        (dict(pages=2**70), "pages is 1180591620717411303424; it must be below"),
        (dict(max_len=2**30, slots=2**20), "pages is .*; it must be below"),
        (dict(max_len=2**30, slots=20), "slots=20 and max_len=1073741824 need .* bytes for"),
        (dict(slots=2**30, pages=1), "slots=1073741824 and max_len=160 need .* bytes for 1 pages"),
        (dict(chunk=40), "chunk is 40; it must be a multiple of page_tokens=16"),
        (dict(chunk=8, page_tokens=8), "kda.chunk_size=16"),
    ],
)
def test_bad_sizes_are_refused(weights, changes, words):
    with pytest.raises(ValueError, match=words):
        make(weights, **changes)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_told(weights, value):
    """No token is made of them, and no NaN comes out as a log-probability; the engine is free again."""
    params, buffers = weights
    broken = {**params, "norm": {"weight": params["norm"]["weight"].at[0].set(value)}}
    engine = make((broken, buffers))
    with pytest.raises(UserError, match=r"after 0 tokens of request 1 .* not finite.*--step"):
        engine.generate([request(5)])
    assert not engine._running
    assert engine._pages.free == engine._pages.size


def test_a_tokenizer_of_another_model_is_refused(weights):
    with pytest.raises(ValueError, match=r"tokenizer has 259 ids, model\.vocab_size is 64"):
        Engine(dataclasses.replace(CFG, vocab_size=64), *weights, TOKENIZER, **SIZES)
