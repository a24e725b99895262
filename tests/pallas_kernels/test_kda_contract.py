"""Every backend against the recurrence in float64: what the op promises, one property per test."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.pallas_kernels.kda import kda, kda_step
from tests.pallas_kernels.kda_cases import (
    BACKENDS,
    INTERPRETED,
    NAMES,
    REGIMES,
    K,
    V,
    compare,
    every_backend,
    fast_backend,
    inputs_for,
    interpreted,
    jit,
    make_inputs,
    options,
    oracle,
    rows,
    run,
)

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127]
LONGEST = 130
ROWS = len(REGIMES)
# Most tests call one compiled program: 11 rows of 130 tokens with segment ids. These fill a row.
WHOLE = np.ones((ROWS, LONGEST), np.int32)


def first(counts) -> np.ndarray:
    """Segment ids of rows with so many real tokens, padded on the right."""
    return (np.arange(LONGEST) < np.asarray(counts)[:, None]).astype(np.int32)


def pad(inputs) -> dict:
    """Shorter rows as rows of LONGEST tokens: the oracle's one program serves all lengths."""

    def fill(x):
        return np.pad(x, [(0, 0), (0, LONGEST - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return {name: x if "state" in name else fill(x) for name, x in inputs.items()}


# ------------------------------------------------------------------------------- the recurrence


@every_backend
def test_matches_the_recurrence(backend):
    """KF-002, KF-003, KF-028: every regime of decay, key correlation and write strength."""
    inputs = inputs_for(backend, LONGEST)
    whole = WHOLE[rows(backend)]
    got = jax.block_until_ready(run(inputs, whole, backend=backend))
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, oracle(inputs, whole))


@fast_backend
@pytest.mark.parametrize("T", [0, 1, 2, 16, 17, 64, 65, 130])
def test_rows_of_any_length(backend, T):
    """The array itself has T tokens, and nothing says that they are one document."""
    inputs = inputs_for(backend, T)
    got = jax.block_until_ready(run(inputs, backend=backend))
    assert all(np.isfinite(x).all() for x in got.values())
    want = oracle(pad(inputs), first([T] * ROWS)[rows(backend)])
    cut = {n: x if x.ndim < 3 or "state" in n else x[:, :T] for n, x in want.items()}
    compare(got, cut)


@every_backend
def test_kf_002_gradients_at_the_gate_bound(backend):
    """g = -5 throughout one chunk of 64, the gradient of sum(o)."""
    inputs = inputs_for(backend, 64, ("floor",) * ROWS)
    inputs |= {
        "beta": np.full_like(inputs["beta"], 0.5),
        "state": np.zeros_like(inputs["state"]),
        "d_o": np.ones_like(inputs["d_o"]),
        "d_state": np.zeros_like(inputs["d_state"]),
    }
    inputs, segments = pad(inputs), first([64] * ROWS)[rows(backend)]
    got = run(inputs, segments, backend=backend)
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, oracle(inputs, segments))


@every_backend
@pytest.mark.parametrize("size", [16, 64])
def test_kf_027_correlated_keys_score_the_strictly_lower_part(backend, size):
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
    with interpreted(backend):
        got, want = (
            np.asarray(jit(functools.partial(kda, **options(name), chunk_size=size))(*args)[0])[
                :, :, 0
            ]
            for name in (backend, "reference")
        )
    np.testing.assert_allclose(got[2], np.eye(size), atol=1e-6)
    for row in range(2):
        for part in (np.tril(np.ones((size, size)), -1) > 0, np.arange(size)[:, None] == size - 1):
            part = np.broadcast_to(part, got[row].shape)
            error = np.abs(got[row] - want[row])[part].max()
            assert error <= 2e-5 * np.abs(want[row][part]).max()


# ------------------------------------------------------------- causality, determinism, splitting


@every_backend
def test_causal_to_the_last_bit(backend):
    """Changing anything at token t leaves every output before t as it was, bit for bit."""
    inputs, whole = inputs_for(backend, LONGEST), WHOLE[rows(backend)]
    before = np.asarray(run(inputs, whole, backend=backend)["o"])
    places = (1, 15, 16, 17, 40, 63, 64, 65, 100, 129)
    for t in places if whole.shape == WHOLE.shape else (17, 65):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name, value in {"q": 9.0, "k": 0.3, "v": 1e6, "g": -4.0, "beta": 0.7}.items():
            changed[name][:, t] = value
        after = np.asarray(run(changed, whole, backend=backend)["o"])
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


@every_backend
def test_same_inputs_same_bits(backend):
    inputs = inputs_for(backend, LONGEST)
    one, two = (run(inputs, WHOLE[rows(backend)], backend=backend) for _ in range(2))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


@every_backend
def test_kf_025_splitting_anywhere_hands_over_the_state(backend):
    """Two calls joined by the state equal one call, for cuts around tiles and chunks.

    Backwards they are joined by the state's gradient.
    """
    cuts = [1, 15, 16, 17, 33, 63, 64, 65, 100, 127, 129]
    inputs = inputs_for(backend, LONGEST, ("mild",) * ROWS, seed=2)
    head = first(cuts)[rows(backend)]
    tail = 1 - head
    middle = run(inputs, head, backend=backend)["final_state"]
    second = run(inputs | {"state": middle}, tail, backend=backend)
    d_middle = second["grad_state"]
    one = run(inputs | {"d_state": d_middle}, head, backend=backend)
    got = {n: one[n] + second[n] for n in ("o", *(f"grad_{n}" for n in NAMES[:5]))}
    got |= {"final_state": second["final_state"], "grad_state": one["grad_state"]}
    compare(got, oracle(inputs, WHOLE[rows(backend)]))


@every_backend
def test_kf_025_prefill_then_decode(backend):
    """The memory after a prompt of any length continues token by token."""
    inputs = inputs_for(backend, LONGEST, ("mild",) * ROWS, seed=4)
    lengths = np.array([127, 65, 33] + [64] * (ROWS - 4) + [65])[rows(backend)]
    segments = (np.arange(LONGEST) < lengths[:, None]).astype(np.int32)
    state = run(inputs, segments, backend=backend)["final_state"]
    want = oracle(inputs, WHOLE[rows(backend)])["o"]
    row, step = np.arange(len(lengths)), jit(kda_step)
    for i in range(3):
        o, state = step(*(inputs[n][row, lengths + i] for n in NAMES[:5]), state)
        compare({"o": o}, {"o": want[row, lengths + i]})


# --------------------------------------------------------------------------- documents, padding


@every_backend
def test_kf_011_every_length_with_poison_behind_it(backend):
    """One row per length; what follows the row's end is NaN and must not be read."""
    inputs = inputs_for(backend, LONGEST, ("mixed",) * ROWS, seed=1)
    segments = first(LENGTHS)[rows(backend)]
    want = oracle(inputs, segments)
    poisoned = dict(inputs)
    for name in NAMES[:5]:
        real = segments.reshape(*segments.shape, *[1] * (inputs[name].ndim - 2)) > 0
        poisoned[name] = np.where(real, inputs[name], np.nan)
    got = run(poisoned, segments, backend=backend)
    compare(got, want)
    assert not np.asarray(got["o"])[segments == 0].any()
    for name in NAMES[:5]:
        assert not np.asarray(got[f"grad_{name}"])[segments == 0].any(), name


DOCUMENTS = [1, 15, 17, 16, 33, 48]


def separate(inputs, states):
    """Every document of DOCUMENTS as a row, with its own states: the oracle, tokens summed up."""
    ends = np.cumsum(DOCUMENTS)
    token = np.arange(LONGEST)
    mine = (ends[:, None] - np.array(DOCUMENTS)[:, None] <= token) & (token < ends[:, None])
    alone = {n: np.repeat(inputs[n], len(DOCUMENTS), 0) for n in (*NAMES[:5], "d_o")}
    want = oracle(alone | states, mine.astype(np.int32))
    for name in ("o", *(f"grad_{n}" for n in NAMES[:5])):
        want[name] = want[name].sum(0, keepdims=True)
    return want


@every_backend
def test_packed_documents_equal_separate_rows(backend):
    """With offsets, every document has its own memory before and after."""
    assert sum(DOCUMENTS) == LONGEST
    inputs = inputs_for(backend, LONGEST, ("mixed",), seed=5)
    states = inputs_for(backend, 0, ("mild",) * len(DOCUMENTS), seed=6)
    states = {n: states[n] for n in ("state", "d_state")}
    offsets = np.append(0, np.cumsum(DOCUMENTS)).astype(np.int32)
    got = run(inputs | states, cu_seqlens=offsets, backend=backend)
    compare(got, separate(inputs, states))


@every_backend
def test_segments_equal_separate_rows(backend):
    """With ids, the memory enters the first document and the last one's memory comes out."""
    inputs = inputs_for(backend, LONGEST, ("mixed",), seed=5)
    states = inputs_for(backend, 0, ("mild",) * len(DOCUMENTS), seed=6)
    document = np.arange(len(DOCUMENTS))[:, None, None, None]
    own = {"state": states["state"] * (document == 0), "d_state": states["d_state"]}
    own["d_state"] = own["d_state"] * (document == len(DOCUMENTS) - 1)
    want = separate(inputs, own)
    want["grad_state"], want["final_state"] = want["grad_state"][:1], want["final_state"][-1:]
    row = inputs | {"state": states["state"][:1], "d_state": states["d_state"][-1:]}
    ids = np.repeat([7, 3, 4, 5, 6, 2], DOCUMENTS)[None].astype(np.int32)
    copies = ROWS if backend not in INTERPRETED else 1  # the one program of most tests
    many = {n: np.repeat(x, copies, 0) for n, x in row.items()}
    got = run(many, np.repeat(ids, copies, 0), backend=backend)
    compare({n: x[:1] for n, x in got.items()}, want)


@every_backend
def test_kf_048_documents_are_isolated(backend):
    """Another first document changes no bit of the others' outputs, memory and gradients."""
    inputs = inputs_for(backend, LONGEST)
    other = inputs_for(backend, LONGEST, tuple(reversed(REGIMES)), seed=1)
    ids = np.repeat([1, 2, 3], [21, 60, 49]).astype(np.int32)
    ids = np.broadcast_to(ids, WHOLE[rows(backend)].shape)
    mine = (ids == 1)[..., None]
    changed = inputs | {"state": other["state"]}
    for n in NAMES[:5]:
        inside = mine[..., None] if inputs[n].ndim == 4 else mine
        changed[n] = np.where(inside, other[n], inputs[n])
    quiet = {"d_o": np.where(mine[..., None], 0, inputs["d_o"])}
    one, two = (run(x | quiet, ids, backend=backend) for x in (inputs, changed))
    assert (np.asarray(one["o"]) != np.asarray(two["o"]))[:, :21].any()
    for n in ("o", *(f"grad_{n}" for n in NAMES[:5])):
        np.testing.assert_array_equal(one[n][:, 21:], two[n][:, 21:], err_msg=n)
        if n != "o":
            assert not np.asarray(one[n])[:, :21].any(), n
    np.testing.assert_array_equal(one["final_state"], two["final_state"])
    assert not np.asarray(one["grad_state"]).any()


@st.composite
def layouts(draw):
    """Documents and padding in any order over a row."""
    ids, document = [], 0
    while len(ids) < LONGEST:
        padding = draw(st.booleans())
        document += not padding
        ids += [0 if padding else document] * draw(st.integers(1, 40))
    return ids[:LONGEST]


@every_backend
def test_any_layout_of_documents(backend):
    """In every regime at once."""

    @settings(max_examples=10 if backend not in INTERPRETED else 2, deadline=None, derandomize=True)
    @given(layouts(), st.integers(0, 2**16))
    def check(ids, seed):
        inputs = inputs_for(backend, LONGEST, seed=seed)
        segments = np.broadcast_to(np.array(ids, np.int32), WHOLE[rows(backend)].shape)
        compare(run(inputs, segments, backend=backend), oracle(inputs, segments))

    check()


@every_backend
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 0, 64, 64, 64, 130, 130],
        [0, 1, 2, 3, 4, 5, 130],
        [0] * 7,
        [0, 130, 130, 130, 130, 130, 130],
        [3, 20, 20, 31, 40, 40, 99],  # tokens outside the offsets are padding
    ],
)
def test_kf_009_empty_documents(backend, offsets):
    """They give no output, return the state they were given and leave the others alone."""
    inputs = inputs_for(backend, LONGEST, ("mild",), seed=7)
    states = inputs_for(backend, 0, ("mild",) * 6, seed=8)
    inputs |= {n: states[n] for n in ("state", "d_state")}
    offsets = np.array(offsets, np.int32)
    got = run(inputs, cu_seqlens=offsets, backend=backend)
    compare(got, oracle(inputs, cu_seqlens=offsets))
    empty = np.diff(offsets) == 0
    np.testing.assert_array_equal(np.asarray(got["final_state"])[empty], inputs["state"][empty])


@pytest.mark.parametrize("offsets", [[0, 0, 64], [0, 64, 64, 64, 130], [0, 0], [0, 10, 10], [0]])
def test_kf_009_rows_that_the_documents_fill(offsets):
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


@every_backend
def test_kf_009_a_row_of_padding_keeps_its_state(backend):
    inputs = inputs_for(backend, LONGEST)
    segments = first([17, 0] + [17] * (ROWS - 2))[rows(backend)]
    got = run(inputs, segments, backend=backend)
    for row, real in enumerate(segments.any(1)):
        assert np.asarray(got["o"][row]).any() == real
        if not real:
            np.testing.assert_array_equal(got["final_state"][row], inputs["state"][row])


# ---------------------------------------------------------------------------------- heads, types


@fast_backend
def test_kf_023_value_heads_read_the_keys_of_their_group(backend):
    """H = 2, HV = 6: value head j reads key head j // 3; dq and dk sum over the group."""
    wide = inputs_for(backend, 33, ("mild",), heads=6)
    narrow = make_inputs(33, ("mild",), heads=2)
    inputs = wide | {name: narrow[name] for name in ("q", "k")}
    got = run(inputs, backend=backend)
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


@pytest.mark.parametrize(
    ("backend", "chunk_size"),
    [("chunked", 16), *((name, 64) for name in BACKENDS if name != "reference")],
)
def test_bfloat16_operands(backend, chunk_size):
    """bf16 q, k, v against the oracle on the same values, 1e-2 in norm, 500 tokens."""
    names = ("open", "slow_correlated_keys", "mild", "one", "floor", "mixed")
    inputs = {n: jnp.asarray(x) for n, x in inputs_for(backend, 500, names, seed=9).items()}
    inputs |= {n: inputs[n].astype(jnp.bfloat16) for n in ("q", "k", "v")}
    got = run(inputs, backend=backend, chunk_size=chunk_size)
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
