"""The chunked form against the recurrence in float64: forward, final memory, all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.pallas_kernels.kda import bounded_log_decay, chunked, kda, kda_step
from tests.pallas_kernels.kda_cases import (
    NAMES,
    REGIMES,
    K,
    V,
    compare,
    jit,
    make_inputs,
    oracle,
    run,
)

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 130]
LONGEST = 130


@pytest.mark.parametrize("T", [0, 1, 2, 16, 17, 64, 65, 130])
def test_matches_the_recurrence(T):
    """KF-002, KF-003, KF-028: every regime of decay, key correlation and write strength."""
    inputs = make_inputs(T)
    got = jax.block_until_ready(run(inputs))
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, oracle(inputs))


def test_kf_002_gradients_at_the_gate_bound():
    """g = -5 throughout one chunk of 64, the gradient of sum(o)."""
    inputs = make_inputs(64, ("floor",) * len(REGIMES))
    inputs |= {
        "beta": np.full_like(inputs["beta"], 0.5),
        "state": np.zeros_like(inputs["state"]),
        "d_o": np.ones_like(inputs["d_o"]),
        "d_state": np.zeros_like(inputs["d_state"]),
    }
    got = run(inputs)
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, oracle(inputs))


@pytest.mark.parametrize("chunk_size", [16, 32, 128, 256])
def test_kf_005_chunk_size_changes_no_value(chunk_size):
    """64 is the default of all other tests."""
    inputs = make_inputs(LONGEST, ("mild", "one_steep_channel", "mixed"))
    compare(run(inputs, chunk_size=chunk_size), oracle(inputs))


def test_kf_011_every_length_with_poison_behind_it():
    """One row per length; what follows the row's end is NaN and must not be read."""
    inputs = make_inputs(LONGEST, ("mixed",) * len(LENGTHS), seed=1)
    segments = (np.arange(LONGEST) < np.array(LENGTHS)[:, None]).astype(np.int32)
    want = oracle(inputs, segments)
    poisoned = dict(inputs)
    for name in NAMES[:5]:
        real = segments.reshape(*segments.shape, *[1] * (inputs[name].ndim - 2)) > 0
        poisoned[name] = np.where(real, inputs[name], np.nan)
    got = run(poisoned, segments)
    compare(got, want)
    assert not np.asarray(got["o"])[segments == 0].any()
    for name in NAMES[:5]:
        assert not np.asarray(got[f"grad_{name}"])[segments == 0].any(), name


@pytest.mark.parametrize("size", [16, 64])
def test_kf_027_correlated_keys_score_the_strictly_lower_part(size):
    """What token i reads of token j < i, for pairwise cosines 0.5, 0.9 and 1.

    The last row, the longest chain of corrections, is scored by itself. With identical keys,
    beta = 1 and no decay a memory recalls the last value alone: o = v, the identity matrix.
    """
    rng = np.random.default_rng(3)
    cosine = np.array([0.5, 0.9, 1.0])[:, None, None, None]
    common, own = np.eye(65)[0], np.eye(65)[None, 1 : size + 1, None]
    k = np.sqrt(cosine) * common + np.sqrt(1 - cosine) * own  # rows, tokens, one head, 65 channels
    q = rng.normal(size=k.shape)
    q[2] = k[2]
    v = np.broadcast_to(np.eye(size)[:, None], (3, size, 1, size))
    beta = np.full(k.shape[:3], 0.99)
    beta[2] = 1
    args = [jnp.asarray(x, jnp.float32) for x in (q, k, v, 0 * k, beta)]
    got, want = (
        np.asarray(jit(functools.partial(kda, backend=name, chunk_size=size))(*args)[0][:, :, 0])
        for name in ("chunked", "reference")
    )
    np.testing.assert_allclose(got[2], np.eye(size), atol=1e-6)
    for row in range(2):
        for part in (np.tril(np.ones((size, size)), -1) > 0, np.arange(size)[:, None] == size - 1):
            part = np.broadcast_to(part, got[row].shape)
            error = np.abs(got[row] - want[row])[part].max()
            assert error <= 2e-5 * np.abs(want[row][part]).max()


def test_kf_028_an_identity_inverse_is_noticed(monkeypatch):
    """Mutation check: without the triangular solve each regime with memory must fail."""
    inputs = make_inputs(18)
    monkeypatch.setattr(chunked, "_solve", lambda L, x: x)
    # Under a new name, or JAX would find the unmutated function traced before.
    monkeypatch.setattr(chunked, "_chunk", lambda *args, chunk=chunked._chunk: chunk(*args))
    got = {"o": jit(lambda x: kda(*(x[n] for n in NAMES[:5]), state=x["state"])[0])(inputs)}
    want = {"o": oracle(inputs)["o"]}
    for row, name in enumerate(REGIMES):
        if name in ("floor", "steep", "steepest"):
            continue  # their memory is gone before the next token
        with pytest.raises(AssertionError):
            compare(*({"o": x["o"][row : row + 1]} for x in (got, want)), rtol=1e-3)


def test_kf_010_gradients_through_the_gate_over_a_long_row():
    """Logits +20, -20 and alternating over 4096 tokens; the last 128 against the oracle."""
    T, crop = 4096, 128
    inputs = make_inputs(T, ("floor",) * 3, heads=1)
    z = np.full((3, T, 1, K), 20.0, np.float32)
    z[1], z[2, ::2] = -20.0, -20.0
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}

    def loss(args, A_log, dt_bias):
        g = bounded_log_decay(z + dt_bias, A_log, -5.0)
        o, state = kda(args["q"], args["k"], args["v"], g, args["beta"], state=args["state"])
        return (o * inputs["d_o"])[:, -crop:].sum() + (state * inputs["d_state"]).sum()

    args = {name: inputs[name] for name in ("q", "k", "v", "beta", "state")}
    grads, *gates = jit(jax.grad(loss, argnums=(0, 1, 2)))(args, jnp.zeros(1), jnp.zeros((1, K)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, gates)))

    inputs["g"] = bounded_log_decay(z, jnp.zeros(1), -5.0)
    start = {n: inputs[n][:, :-crop] for n in NAMES[:5]} | {"state": inputs["state"]}
    _, state = jit(lambda x: kda(**{n: x[n] for n in NAMES[:5]}, state=x["state"]))(start)
    tail = {n: x if "state" in n else x[:, -crop:] for n, x in inputs.items()} | {"state": state}
    want = oracle(tail)
    for name in ("q", "k", "v", "beta"):
        compare({name: grads[name][:, -crop:]}, {name: want[f"grad_{name}"]})


def test_causal_to_the_last_bit():
    """Changing anything at token t leaves every output before t as it was, bit for bit."""
    inputs = make_inputs(LONGEST, ("mild", "floor", "mixed"))
    outputs = jax.jit(lambda x: kda(**{n: x[n] for n in NAMES[:5]}, state=x["state"])[0])
    before = np.asarray(outputs(inputs))
    for t in (1, 15, 16, 17, 40, 63, 64, 65, 100, 129):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name, value in {"q": 9.0, "k": 0.3, "v": 1e6, "g": -33.0, "beta": 0.7}.items():
            changed[name][:, t] = value
        after = np.asarray(outputs(changed))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


def test_kf_025_splitting_anywhere_hands_over_the_state():
    """Two calls joined by the state equal one call, for cuts around tiles and chunks."""
    cuts = np.array([1, 15, 16, 17, 33, 63, 64, 65, 100, 127, 129])
    inputs = make_inputs(LONGEST, ("mild",) * len(cuts), seed=2)
    first = (np.arange(LONGEST) < cuts[:, None]).astype(np.int32)

    def halves(x):
        args = {name: x[name] for name in NAMES[:5]}
        o1, state = kda(**args, state=x["state"], segment_ids=first)
        o2, state = kda(**args, state=state, segment_ids=1 - first)
        return o1 + o2, state

    (o, state), pull = jit(lambda x: jax.vjp(halves, x))({n: inputs[n] for n in NAMES})
    (grads,) = pull((inputs["d_o"], inputs["d_state"]))
    got = {"o": o, "final_state": state} | {f"grad_{n}": grads[n] for n in NAMES}
    compare(got, oracle(inputs))


def test_kf_025_prefill_then_decode():
    """The memory after a prompt of any length continues token by token."""
    inputs = make_inputs(LONGEST, ("mild",) * 3, seed=4)
    lengths = np.array([33, 65, 127])
    prompt = (np.arange(LONGEST) < lengths[:, None]).astype(np.int32)
    args = {n: jnp.asarray(inputs[n]) for n in NAMES[:5]}
    _, state = jit(kda)(**args, state=inputs["state"], segment_ids=prompt)
    want = oracle(inputs)["o"]
    step = jit(kda_step)
    for i in range(3):
        at = lengths + i
        o, state = step(*(x[np.arange(3), at] for x in args.values()), state)
        compare({"o": o}, {"o": want[np.arange(3), at]})


DOCUMENTS = [1, 15, 17, 16, 33, 48]


def test_packed_documents_equal_separate_rows():
    """Segments inside chunks, through both ways to pack, against one row per document."""
    assert sum(DOCUMENTS) == LONGEST
    inputs = make_inputs(LONGEST, ("mixed",), seed=5)
    ends = np.cumsum(DOCUMENTS)
    begins = ends - DOCUMENTS
    token = np.arange(LONGEST)
    mine = (begins[:, None] <= token) & (token < ends[:, None])
    states = make_inputs(0, ("mild",) * len(DOCUMENTS), seed=6)

    alone = {n: np.repeat(inputs[n], len(DOCUMENTS), 0) for n in (*NAMES[:5], "d_o")}
    alone |= {"state": states["state"], "d_state": states["d_state"]}
    want = oracle(alone, mine.astype(np.int32))
    for name in ("o", *(f"grad_{n}" for n in NAMES[:5])):
        want[name] = want[name].sum(0, keepdims=True)
    packed = inputs | {"state": states["state"], "d_state": states["d_state"]}
    offsets = np.append(0, ends).astype(np.int32)
    compare(run(packed, cu_seqlens=offsets), want)
    compare(run(packed, cu_seqlens=offsets, backend="reference"), want)

    # As segments, the state enters the first document and the last one's memory comes out.
    ids = np.repeat([7, 3, 4, 5, 6, 2], DOCUMENTS)[None].astype(np.int32)
    rows = {"state": states["state"] * (np.arange(6) == 0)[:, None, None, None]}
    rows |= {"d_state": states["d_state"] * (np.arange(6) == 5)[:, None, None, None]}
    want = oracle(alone | rows, mine.astype(np.int32))
    for name in ("o", *(f"grad_{n}" for n in NAMES[:5])):
        want[name] = want[name].sum(0, keepdims=True)
    want["grad_state"], want["final_state"] = want["grad_state"][:1], want["final_state"][5:]
    row = inputs | {"state": states["state"][:1], "d_state": states["d_state"][5:]}
    compare(run(row, ids), want)
    compare(run(row, ids, backend="reference"), want)


@pytest.mark.parametrize("offsets", [[0, 0, 64], [0, 64, 64, 64, 130], [0, 0], [0, 10, 10], [0]])
def test_kf_009_empty_documents(offsets):
    """They give no output, return the state they were given and leave the others alone."""
    T, N = offsets[-1], len(offsets) - 1
    inputs = make_inputs(T, ("mild",), seed=7)
    states = make_inputs(0, ("mild",) * 4, seed=8)
    inputs |= {n: states[n][:N] for n in ("state", "d_state")}
    offsets = np.array(offsets, np.int32)
    got = run(inputs, cu_seqlens=offsets)
    compare(got, oracle(inputs, cu_seqlens=offsets))
    empty = np.diff(offsets) == 0
    np.testing.assert_array_equal(np.asarray(got["final_state"])[empty], inputs["state"][empty])


def test_kf_009_empty_documents_without_a_state_return_zeros():
    args = {n: x for n, x in make_inputs(3, ("mild",), seed=7).items() if n in NAMES[:5]}
    _, state = jit(kda)(**args, cu_seqlens=np.array([0, 0, 3, 3], np.int32))
    assert [bool(x.any()) for x in np.asarray(state)] == [False, True, False]


def test_kf_009_empty_batches():
    inputs = {n: x[:0] for n, x in make_inputs(3, ("mild",)).items()}
    o, state = kda(**{n: inputs[n] for n in NAMES[:5]})
    assert o.shape == (0, 3, 2, V)
    assert state.shape == (0, 2, K, V)
    o, state = kda_step(*(inputs[n][:, 0] for n in NAMES[:5]), inputs["state"])
    assert o.shape == (0, 2, V)
    inputs = make_inputs(0, ("mild",))
    o, state = kda(**{n: inputs[n] for n in NAMES[:5]}, state=inputs["state"])
    assert o.shape == (1, 0, 2, V)
    np.testing.assert_array_equal(state, inputs["state"])


def test_kf_009_a_row_of_padding_keeps_its_state():
    inputs = make_inputs(17, ("mixed",) * 2)
    o, state = jit(kda)(
        **{n: inputs[n] for n in NAMES[:5]},
        state=inputs["state"],
        segment_ids=np.array([[0] * 17, [1] * 17], np.int32),
    )
    assert not np.asarray(o[0]).any()
    np.testing.assert_array_equal(state[0], inputs["state"][0])
    assert np.asarray(o[1]).any()


def test_tokens_outside_the_offsets_are_padding():
    inputs = make_inputs(40, ("mild",))
    offsets = np.array([3, 20, 31], np.int32)
    inputs |= {n: np.repeat(inputs[n], 2, 0) for n in ("state", "d_state")}
    compare(run(inputs, cu_seqlens=offsets), oracle(inputs, cu_seqlens=offsets))


def test_kf_023_value_heads_read_the_keys_of_their_group():
    """H = 2, HV = 6: value head j reads key head j // 3; dq and dk sum over the group."""
    wide = make_inputs(33, ("mild",), heads=6)
    narrow = make_inputs(33, ("mild",), heads=2)
    inputs = wide | {name: narrow[name] for name in ("q", "k")}
    got = run(inputs)
    want = oracle(wide | {name: narrow[name][:, :, [0, 0, 0, 1, 1, 1]] for name in ("q", "k")})
    for name in ("grad_q", "grad_k"):
        want[name] = np.stack([want[name][:, :, :3].sum(2), want[name][:, :, 3:].sum(2)], 2)
    compare(got, want)
    one = [jnp.asarray(inputs[n][:, 0]) for n in NAMES[:5]]
    o, _ = kda_step(*one, jnp.asarray(inputs["state"]))
    compare({"o": o}, {"o": want["o"][:, 0]})


def test_kf_021_state_is_float32_whatever_the_activations():
    inputs = make_inputs(17, ("open",))
    inputs["state"] = np.full_like(inputs["state"], 70_000.0)
    args = {n: jnp.asarray(inputs[n], jnp.float16) for n in ("q", "k", "v")}
    args |= {n: jnp.zeros_like(inputs[n]) for n in ("g", "beta")}
    o, state = kda(**args, state=inputs["state"])
    assert o.dtype == jnp.float16
    assert state.dtype == jnp.float32
    np.testing.assert_array_equal(state, inputs["state"])
    _, state = kda_step(*(x[:, 0] for x in args.values()), jnp.asarray(inputs["state"]))
    np.testing.assert_array_equal(state, inputs["state"])


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_bfloat16_operands(chunk_size):
    """bf16 q, k, v against the oracle on the same values, 1e-2 in norm, 500 tokens."""
    names = ("open", "slow_correlated_keys", "mild", "one", "floor", "mixed")
    inputs = {n: jnp.asarray(x) for n, x in make_inputs(500, names, seed=9).items()}
    inputs |= {n: inputs[n].astype(jnp.bfloat16) for n in ("q", "k", "v")}
    got = run(inputs, chunk_size=chunk_size)
    assert got["o"].dtype == jnp.bfloat16
    assert got["final_state"].dtype == jnp.float32
    want = oracle(inputs)
    for name in want:
        a, b = (np.asarray(x[name], np.float64).reshape(len(names), -1) for x in (got, want))
        norm = np.maximum(np.linalg.norm(b, axis=1), 1e-3 * np.linalg.norm(b) + 1e-30)
        assert (np.linalg.norm(a - b, axis=1) <= 1e-2 * norm).all(), name


def test_kf_029_negative_eigenvalues_carry_the_factor_once():
    """beta = 2 sigmoid(3) = 1.905: values, and the gradient of the logit."""
    inputs = make_inputs(33, ("mild_negative_eigenvalues",))
    logit = np.full_like(inputs["beta"], 3.0)

    def loss(logit):
        beta = 2.0 * jax.nn.sigmoid(logit)
        args = {n: inputs[n] for n in ("q", "k", "v", "g")}
        o, state = kda(**args, beta=beta, state=inputs["state"])
        return (o * inputs["d_o"]).sum() + (state * inputs["d_state"]).sum()

    got = jit(jax.grad(loss))(jnp.asarray(logit))
    inputs["beta"] = np.float32(2 / (1 + np.exp(-logit)))
    sigmoid = inputs["beta"] / 2
    want = oracle(inputs)["grad_beta"] * 2 * sigmoid * (1 - sigmoid)
    compare({"logit": got}, {"logit": want})


def test_memory_of_the_backward_pass_is_one_state_per_chunk():
    """Eight times the tokens keep at most eight times the chunks, far below one state per token."""

    def temporary(T):
        inputs = make_inputs(T, ("mild",))
        compiled = run.lower(inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(128), temporary(1024)
    states_per_token = (1024 - 128) * 2 * K * V * 4
    assert long - short < states_per_token


@st.composite
def layouts(draw):
    """Documents and padding in any order over 48 tokens."""
    ids, document = [], 0
    while len(ids) < 48:
        padding = draw(st.booleans())
        document += not padding
        ids += [0 if padding else document] * draw(st.integers(1, 20))
    return ids[:48]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(layouts(), st.sampled_from(sorted(REGIMES)), st.integers(0, 2**16))
def test_any_layout_of_documents(ids, regime, seed):
    inputs = make_inputs(48, (regime,), seed=seed)
    segments = np.array([ids], np.int32)
    compare(run(inputs, segments), oracle(inputs, segments))


def test_a_document_start_is_exact_forgetting():
    """What packs documents: exp of a sum that holds FORGET is 0, and the sum stays finite."""
    for dtype in (np.float32, np.float64):
        total = np.full(256, chunked.FORGET, dtype).sum()
        assert np.isfinite(total)
        assert np.exp(dtype(chunked.FORGET)) == 0
