"""Decoding: single steps, pools of slots, windows of drafts with rollback, prefix snapshots."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.paged_cache import SlotPool
from k3jax.pallas_kernels.kda import kda, kda_step, kda_verify
from k3jax.pallas_kernels.short_conv import short_conv
from tests.pallas_kernels.kda_cases import (
    NAMES,
    H,
    K,
    V,
    compare,
    each_backend,
    inputs_for,
    interpreted,
    jit,
    make_inputs,
    options,
    oracle,
)

ROWS = ("mild", "mixed", "steep", "slow_correlated_keys")
SLOTS = 8
TAPS = 4


@functools.partial(jit, static_argnames="erase")
def step(token, state, slots=None, has_state=None, erase=True):
    return kda_step(*token, state, slots=slots, has_state=has_state, erase=erase)


@functools.partial(jit, static_argnames="erase")
def verify(window, state, commit, slots=None, has_state=None, erase=True):
    return kda_verify(*window, state, commit, slots=slots, has_state=has_state, erase=erase)


def row_of_tokens(T, seed=0, regimes=ROWS):
    """(q, k, v, g, beta) of some requests, and a pool of memories full of other numbers."""
    inputs = make_inputs(T, regimes, seed=seed)
    pool = np.random.default_rng(seed).normal(size=(SLOTS, H, K, V)).astype(np.float32)
    return [inputs[n] for n in NAMES[:5]], inputs["state"], pool


def at(tokens, t):
    return [x[:, t] for x in tokens]


# ----------------------------------------------------------------------------------- single steps


@pytest.mark.parametrize("erase", [True, False])
def test_steps_equal_the_recurrence(erase):
    inputs = make_inputs(20)
    want = oracle(inputs, erase=erase)
    state, outputs = inputs["state"], []
    for t in range(20):
        o, state = step([inputs[n][:, t] for n in NAMES[:5]], state, erase=erase)
        outputs.append(o)
    got = {"o": np.stack(outputs, 1), "final_state": state}
    compare(got, {name: want[name] for name in got})


def test_steps_in_any_slots_equal_steps_without_a_pool():
    """And the other slots keep every bit."""
    tokens, state, pool = row_of_tokens(3)
    slots = np.array([5, 0, 7, 2])
    pool[slots] = state
    others = np.setdiff1d(np.arange(SLOTS), slots)
    got = jnp.asarray(pool)
    for t in range(3):
        want, state = step(at(tokens, t), state)
        o, got = step(at(tokens, t), got, slots)
        compare({"o": o, "state": got[slots]}, {"o": want, "state": state})
    np.testing.assert_array_equal(got[others], pool[others])


def test_relatives_decode_too():
    """A decay per head and no decay are the channel-wise ones that they abbreviate."""
    (q, k, v, g, beta), state, _ = row_of_tokens(1)
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    head = g[..., 0]
    for short, long in (
        (head, np.broadcast_to(head[..., None], k.shape)),
        (None, np.zeros_like(k)),
    ):
        got, want = (step((q, k, v, x, beta), state) for x in (short, long))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_kf_037_the_slot_is_an_argument():
    """One program updates slot 0, then slot 3."""
    tokens, _, pool = row_of_tokens(1, regimes=("mild",))
    compiled = []

    @jax.jit
    def run(token, pool, slots):
        compiled.append(None)
        return kda_step(*token, pool, slots=slots)

    for slot in (0, 3):
        _, new = run(at(tokens, 0), pool, np.array([slot]))
        changed = (np.asarray(new) != pool).any((1, 2, 3))
        assert np.flatnonzero(changed).tolist() == [slot]
    assert len(compiled) == 1


def test_kf_033_bad_slots_raise_before_the_launch():
    tokens, _, pool = row_of_tokens(1, regimes=ROWS[:2])
    token = [jnp.asarray(x) for x in at(tokens, 0)]
    for slots, words in (
        ([7, 8], "slots: id 8 is outside the pool, which has slots 0 to 7"),
        ([-1, 3], "slots: id -1 is outside the pool"),
        ([3, 3], "slots: [3, 3] names a slot twice"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            kda_step(*token, jnp.asarray(pool), slots=jnp.array(slots))
        with pytest.raises(ValueError, match=re.escape(words)):
            short_conv(
                jnp.zeros((2, 1, H, K)), jnp.zeros((TAPS, H, K)),
                cache=jnp.zeros((SLOTS, TAPS - 1, H, K)), slots=jnp.array(slots),
            )  # fmt: skip
    with pytest.raises(ValueError, match="cache is None; pass the pool"):
        short_conv(jnp.zeros((2, 1, H, K)), jnp.zeros((TAPS, H, K)), slots=jnp.array([0, 1]))


@pytest.mark.parametrize("idle", [SLOTS, -1, 2**31 - 1])
def test_kf_033_inside_jit_an_idle_row_touches_no_slot(idle):
    """It reads an empty memory and writes nothing; no id is clipped, none wraps around."""
    tokens, _, pool = row_of_tokens(1, regimes=ROWS[:2])
    slots = np.array([idle, 3], np.int32)
    o, new = step(at(tokens, 0), pool, slots)
    changed = (np.asarray(new) != pool).any((1, 2, 3))
    assert np.flatnonzero(changed).tolist() == [3]
    want, _ = step(at(tokens, 0), np.zeros((2, H, K, V), np.float32))
    np.testing.assert_allclose(o[0], want[0], rtol=1e-6)

    window = [x[:, :1] for x in tokens]
    _, new = verify(window, pool, np.array([1, 1]), slots)
    assert np.flatnonzero((np.asarray(new) != pool).any((1, 2, 3))).tolist() == [3]
    caches = np.ones((SLOTS, TAPS - 1, H, K), np.float32)
    x = np.full((2, 1, H, K), 2, np.float32)
    _, new = jit(short_conv)(x, np.ones((TAPS, H, K), np.float32), cache=caches, slots=slots)
    assert np.flatnonzero((np.asarray(new) != caches).any((1, 2, 3))).tolist() == [3]


def test_kf_033_an_exhausted_pool_says_so():
    pool = SlotPool(2)
    assert [pool.allocate() for _ in range(3)] == [0, 1, None]
    pool.release(0)
    assert pool.allocate() == 0
    assert pool.allocate() is None
    pool.release(1)
    for slot in (1, 2, -1):  # given back twice; never there
        with pytest.raises(ValueError, match=f"slot {slot} is not in use"):
            pool.release(slot)


def test_kf_032_a_recycled_slot_reads_as_empty():
    """Memory and convolution of request B do not depend on A, or NaN, in the slot before it."""
    tokens, _, _ = row_of_tokens(4, regimes=("mild",))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 4, H, K)).astype(np.float32)
    kernel = rng.normal(size=(TAPS, H, K)).astype(np.float32)
    convolve = jit(short_conv)

    def serve(memory, cache, slot):
        outputs = []
        for t in range(4):
            has_state = np.array([t > 0])  # that is: tokens computed so far > 0
            o, memory = step(at(tokens, t), memory, slot, has_state)
            y, cache = convolve(
                x[:, t : t + 1], kernel, cache=cache, slots=slot, has_state=has_state
            )
            outputs += [o, y]
        return outputs, memory[slot[0]], cache[slot[0]]

    pool = SlotPool(2)
    a = pool.allocate()
    slot = np.array([a])
    empty = np.zeros((2, H, K, V), np.float32), np.zeros((2, TAPS - 1, H, K), np.float32)
    want = serve(*empty, slot)
    pool.release(a)
    assert pool.allocate() == a
    for poison in (3.0, np.nan):
        used = (np.where(np.arange(2)[:, None, None, None] == a, poison, p) for p in empty)
        got = serve(*(p.astype(np.float32) for p in used), slot)
        for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("window", [1, 5])
def test_kf_036_donation_updates_the_pool_in_place(window):
    """Bitwise the same with and without it over 100 interleaved steps; no copy of the pool; and the
    old handle raises."""
    tokens, _, pool = row_of_tokens(window, regimes=("mild",))

    def decode(window, pool, slots):
        if window[0].shape[1] == 1:
            return kda_step(*at(window, 0), pool, slots=slots)
        return kda_verify(*window, pool, jnp.array([3]), slots=slots)

    donating, keeping = jax.jit(decode, donate_argnums=1), jax.jit(decode)
    one = two = jnp.asarray(pool)
    one = one + 0
    for i in range(100):
        slots = np.array([(2, 5)[i % 2]])
        old = one
        o, one = donating(tokens, one, slots)
        want, two = keeping(tokens, two, slots)
        np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(one, two)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old)

    large = jax.ShapeDtypeStruct((64, H, K, V), jnp.float32)
    memory = donating.lower(tokens, large, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= large.size * 4
    assert memory.temp_size_in_bytes < large.size * 4 / 4


def test_a_batch_in_a_donated_pool_holds_no_second_batch():
    """Sixteen memories are updated beside working memory for a few."""
    tokens, _, _ = row_of_tokens(1, regimes=("mild",) * 16)
    pool = jax.ShapeDtypeStruct((16, H, K, V), jnp.float32)
    lowered = jax.jit(lambda token, pool, slots: kda_step(*token, pool, slots=slots),
                      donate_argnums=1).lower(at(tokens, 0), pool, np.arange(16))  # fmt: skip
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.size * 4
    assert memory.temp_size_in_bytes < pool.size * 4 / 2


def test_kf_021_a_pool_keeps_float32():
    tokens, _, pool = row_of_tokens(1, regimes=("mild",))
    with pytest.raises(ValueError, match="pool of bfloat16; the memories must be float32"):
        step(at(tokens, 0), pool.astype(jnp.bfloat16), np.array([0]))


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "state", "slots", "has_state"])
def test_shapes_that_do_not_fit(name):
    (q, k, v, g, beta), _, pool = row_of_tokens(1, regimes=ROWS[:2])
    args = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    args = {n: jnp.asarray(x[:, 0]) for n, x in args.items()} | {"state": jnp.asarray(pool)}
    args |= {"slots": jnp.arange(2), "has_state": jnp.ones(2, bool)}
    kda_step(**args)
    with pytest.raises((ValueError, TypeError), match=rf"{name} has shape|parameter"):
        kda_step(**args | {name: args[name][..., :-1] if name != "v" else args["v"][:1]})


# ------------------------------------------------------------------------------ windows of drafts


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("in_pool", [True, False])
def test_a_window_equals_the_recurrence_and_keeps_what_is_committed(erase, in_pool):
    """17 tokens, extreme decays, correlated keys; commit from nothing to everything."""
    inputs = make_inputs(17)
    commit = np.array([0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 17])
    kept = (np.arange(17) < commit[:, None]).astype(np.int32)
    want = {"o": oracle(inputs, erase=erase)["o"]}
    want["state"] = oracle(inputs, kept, erase=erase)["final_state"]
    window, rows = [inputs[n] for n in NAMES[:5]], len(commit)
    if in_pool:
        slots = np.random.default_rng(0).permutation(rows + 3)[:rows]
        pool = np.full((rows + 3, H, K, V), np.nan, np.float32)
        pool[slots] = inputs["state"]
        o, pool = verify(window, pool, commit, slots, erase=erase)
        got = {"o": o, "state": pool[slots]}
        assert np.isnan(np.delete(pool, slots, axis=0)).all()
    else:
        o, state = verify(window, inputs["state"], commit, erase=erase)
        got = {"o": o, "state": state}
    compare(got, want)
    np.testing.assert_array_equal(got["state"][0], inputs["state"][0])  # nothing committed


def test_rejected_tokens_leave_no_trace():
    """NaN behind the committed tokens reaches neither the memory nor an earlier output."""
    tokens, state, _ = row_of_tokens(9)
    commit = np.full(len(ROWS), 4)
    want = verify(tokens, state, commit)
    poisoned = [x.copy() for x in tokens]
    for x in poisoned:
        x[:, 4:] = np.nan
    got = verify(poisoned, state, commit)
    np.testing.assert_array_equal(got[0][:, :4], want[0][:, :4])
    np.testing.assert_array_equal(got[1], want[1])


def test_kf_039_a_window_has_a_largest_size():
    tokens, state, _ = row_of_tokens(18, regimes=("mild",))
    with pytest.raises(ValueError, match="the window has 18 tokens, 1 to 17 fit"):
        verify(tokens, state, np.array([1]))
    with pytest.raises(ValueError, match="the window has 0 tokens"):
        verify([x[:, :0] for x in tokens], state, np.array([0]))
    window, args = [jnp.asarray(x[:, :3]) for x in tokens], jnp.asarray(state)
    for commit in ([4], [-1]):
        with pytest.raises(ValueError, match=r"commit must lie in 0 to 3"):
            kda_verify(*window, args, jnp.array(commit))
    with pytest.raises((ValueError, TypeError), match=r"commit has shape|parameter"):
        kda_verify(*window, args, jnp.array([1, 1]))


def test_kf_039_no_drafts_is_plain_decoding():
    """A window of the bonus token alone equals a step."""
    tokens, state, _ = row_of_tokens(1)
    o, new = verify(tokens, state, np.ones(len(ROWS), int))
    want, want_new = step(at(tokens, 0), state)
    compare({"o": o[:, 0], "state": new}, {"o": want, "state": want_new}, rtol=1e-6)


class ToyModel:
    """A conv, a KDA head and a readout over 16 tokens: greedy decoding that one bad state derails."""

    def __init__(self):
        rng = np.random.default_rng(5)
        self.embed = rng.normal(size=(16, 3, H, K)).astype(np.float32)  # q, k, v before the conv
        self.kernel = rng.normal(size=(TAPS, 3 * H, K)).astype(np.float32)
        self.decay = rng.uniform(-0.5, 0, size=(16, H, K)).astype(np.float32)
        self.beta = rng.uniform(0.2, 1, size=(16, H)).astype(np.float32)
        self.readout = rng.normal(size=(H, K, 16)).astype(np.float32)

    def empty(self):
        return np.zeros((1, H, K, K), np.float32), np.zeros((1, TAPS - 1, 3 * H, K), np.float32)

    @functools.partial(jit, static_argnums=0)
    def window(self, ids, memory, cache, commit):
        """(next token after each of ids, memory and conv inputs after `commit` of them)."""
        x = jnp.asarray(self.embed)[ids].reshape(1, -1, 3 * H, K)
        y, cache = short_conv(x, jnp.asarray(self.kernel), cache=cache, lengths=commit)
        q, k, v = jnp.split(y, 3, axis=2)
        q, k = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
        g, beta = (jnp.asarray(a)[ids][None] for a in (self.decay, self.beta))
        o, memory = kda_verify(q, k, v, g, beta, memory, commit)
        return jnp.argmax(jnp.einsum("bwhv,hvx->bwx", o, self.readout), -1)[0], memory, cache


@pytest.mark.parametrize(
    "wrong",
    [{1, 3, 4}, {1, 2, 3, 4}, set()],
    ids=["1, 3 and 4 of each block", "all rejected", "all accepted"],
)
def test_kf_034_speculation_with_rollback_equals_plain_greedy(wrong):
    """64 tokens in blocks of 4, drafts wrong on purpose at some places of each; memory and conv too.

    A window holds the a drafts accepted last time, the bonus token and 4 drafts; a + 1 are kept.
    """
    model, one = ToyModel(), np.array([1])
    memory, cache = model.empty()
    plain, states = [3], []
    for _ in range(80):
        ids, memory, cache = model.window(np.array(plain[-1:]), memory, cache, one)
        plain.append(int(ids[0]))
        states.append((memory, cache))  # after all tokens but the last

    (memory, cache), text, replay = model.empty(), [3], []
    while len(text) <= 64:
        bonus, truth = text[-1], plain[len(text) :]
        bad = [(len(text) + i) % 4 + 1 in wrong for i in range(4)]
        drafts = [(truth[i] + bad[i]) % 16 for i in range(4)]
        window = [*replay, bonus, *drafts]
        ids = np.array(window + [0] * (9 - len(window)))
        guesses, memory, cache = model.window(ids, memory, cache, np.array([len(replay) + 1]))
        committed = len(text)  # the window's kept tokens end with the bonus token
        compare(
            {"memory": memory, "cache": cache},
            dict(zip(("memory", "cache"), states[committed - 1], strict=True)),
        )
        guesses = np.asarray(guesses)[len(replay) : len(window)].tolist()
        accepted = 0
        while accepted < 4 and drafts[accepted] == guesses[accepted]:
            accepted += 1
        assert accepted == [*bad, True].index(True)
        replay = drafts[:accepted]
        text += [*replay, guesses[accepted]]
        assert text == plain[: len(text)]
    assert len(set(text)) > 3  # the text is not one token for ever


# ----------------------------------------------------------------------------- prefix snapshots


@each_backend
def test_kf_035_a_snapshot_is_the_state_at_its_boundary(backend):
    """130 tokens, one memory per 64. A prompt that shares 128 of them goes on from the second, one
    that shares 127 from the first; both equal a cold run."""
    T, rows = 130, 3
    inputs = inputs_for(backend, T, ("mild",) * rows, seed=3, heads=H)
    args, entering = [inputs[n] for n in NAMES[:5]], inputs["state"]
    with interpreted(backend):
        run = jit(functools.partial(kda, snapshot_every=64, **options(backend)))
        o, state, snapshots = run(*args, state=entering)
    assert snapshots.shape == (rows, 2, H, K, V)
    assert snapshots.dtype == jnp.float32
    want = oracle(inputs)
    compare({"o": o, "state": state}, {"o": want["o"], "state": want["final_state"]})

    @jit
    def tokens(args, state, count):
        """The first `count` tokens."""
        ids = jnp.broadcast_to((jnp.arange(T) < count).astype(jnp.int32), (rows, T))
        return kda(*args, state=state, segment_ids=ids, **options(backend))

    for shared in (128, 127):
        boundary = shared // 64 * 64
        snapshot = snapshots[:, boundary // 64 - 1]
        other = make_inputs(T, ("mild",) * rows, seed=4)
        prompt = [np.concatenate([a[:, :shared], other[n][:, shared:]], axis=1)
                  for n, a in zip(NAMES[:5], args, strict=True)]  # fmt: skip
        rest = [np.roll(a, -boundary, axis=1) for a in prompt]
        with interpreted(backend):
            compare({"state": snapshot}, {"state": tokens(args, entering, boundary)[1]})
            cold_o, cold_state = tokens(prompt, entering, T)
            o, state = tokens(rest, snapshot, T - boundary)
        want_o = np.pad(cold_o[:, boundary:], ((0, 0), (0, boundary), (0, 0), (0, 0)))
        compare({"o": o, "state": state}, {"o": want_o, "state": cold_state})


def test_kf_035_the_convolution_has_its_window_at_the_boundary():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 130, H, K)).astype(np.float32)
    kernel = rng.normal(size=(TAPS, H, K)).astype(np.float32)
    convolve = jit(short_conv)
    want, _ = convolve(x, kernel)
    for boundary in (64, 128):
        y, window = convolve(x, kernel, lengths=np.full(3, boundary))
        np.testing.assert_array_equal(y, want)  # of all tokens
        np.testing.assert_array_equal(window, x[:, boundary - TAPS + 1 : boundary])
        y, _ = convolve(x[:, boundary:], kernel, cache=window)
        np.testing.assert_allclose(y, want[:, boundary:], rtol=1e-6, atol=1e-7)


@each_backend
@pytest.mark.parametrize("every", [16, 48, 64])
def test_snapshots_of_rows_with_documents_and_padding(backend, every):
    """The memory after each boundary, whichever document is open there; none in a short row."""
    inputs = inputs_for(backend, 130, ("mild", "mixed"), seed=6, heads=H)
    ids = np.repeat([1, 0, 2, 3, 0], [20, 10, 40, 50, 10])
    ids = np.stack([ids, np.ones_like(ids)]).astype(np.int32)

    def snapshots(backend, dtype):
        args = [jnp.asarray(inputs[n], dtype) for n in (*NAMES[:5], "state")]
        f = jit(functools.partial(kda, snapshot_every=every, **options(backend)))
        with interpreted(backend):
            return f(*args[:5], state=args[5], segment_ids=ids)[2]

    got = snapshots(backend, jnp.float32)
    assert got.shape == (2, 130 // every, H, K, V)
    with jax.enable_x64(True):
        want = snapshots("reference", jnp.float64)
    compare({"snapshots": got}, {"snapshots": want})
    short = [jnp.asarray(inputs[n][:, : every - 1]) for n in NAMES[:5]]
    with interpreted(backend):
        none = jit(functools.partial(kda, snapshot_every=every, **options(backend)))(*short)[2]
    assert none.shape == (2, 0, H, K, V)
