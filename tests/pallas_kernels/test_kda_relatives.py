"""Relatives of KDA by argument, raw projections, and any mixture of everything (hypothesis)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.pallas_kernels.kda import (
    bounded_log_decay,
    kda,
    kda_from_logits,
    l2_normalize,
    softplus_log_decay,
)
from tests.pallas_kernels.kda_cases import (
    BACKENDS,
    INTERPRETED,
    NAMES,
    REGIMES,
    H,
    K,
    compare,
    each_backend,
    inputs_for,
    interpreted,
    jit,
    make_inputs,
    oracle,
    run,
    unit,
)

# ---------------------------------------------------------------------------------- by argument


def test_the_reference_without_erasing_is_gated_linear_attention():
    """S <- Diag(exp(g)) S + beta k v^T, written out in NumPy."""
    inputs = {n: x.astype(np.float64) for n, x in make_inputs(9, ("mild", "mixed")).items()}
    got = oracle(inputs, erase=False)
    S = inputs["state"]
    for t in range(9):
        q, k, v, g, beta = (inputs[n][:, t] for n in NAMES[:5])
        S = np.exp(g)[..., None] * S + np.einsum("bh,bhk,bhv->bhkv", beta, k, v)
        np.testing.assert_allclose(got["o"][:, t], np.einsum("bhk,bhkv->bhv", q, S), atol=1e-12)
    np.testing.assert_allclose(got["final_state"], S, atol=1e-12)


@each_backend
@pytest.mark.parametrize("decay", ["channel", "head", None])
def test_without_erasing(backend, decay):
    """Every regime, gradients too; and the settings are not ignored."""
    inputs = inputs_for(backend, 70)
    if decay == "head":
        inputs["g"] = inputs["g"][..., 0]
    if decay is None:
        del inputs["g"]
    got = run(inputs, backend=backend, erase=False)
    compare(got, oracle(inputs, erase=False))


@each_backend
def test_one_decay_per_head_is_gated_delta_net(backend):
    """The same as that decay on every channel; its gradient is the sum over them."""
    inputs = inputs_for(backend, 70)
    inputs["g"] = inputs["g"][..., 0]
    wide = inputs | {"g": np.repeat(inputs["g"][..., None], K, axis=-1)}
    want = oracle(wide)
    want["grad_g"] = want["grad_g"].sum(-1)
    compare(run(inputs, backend=backend), want)


# ------------------------------------------------------------------------------ raw projections


def raw_inputs(T, heads=H, rows=3, seed=0):
    """Arguments of `kda_from_logits`: keys of any length, logits from no decay to the bound."""
    rng = np.random.default_rng([seed, T])
    inputs = make_inputs(T, ("mild",) * rows, seed=seed, heads=heads)
    inputs["q"], inputs["k"] = (rng.normal(size=inputs["k"].shape) for _ in range(2))
    inputs["z"] = rng.normal(size=inputs.pop("g").shape) * [[[[1.0]]], [[[3.0]]], [[[12.0]]]]
    inputs |= {"A_log": rng.normal(size=heads), "dt_bias": rng.normal(size=(heads, K))}
    return {name: np.float32(x) for name, x in inputs.items()}


RAW = ("q", "k", "v", "z", "beta", "A_log", "dt_bias", "state")


@functools.partial(jit, static_argnames=("g_min", "backend", "composed"))
def run_raw(inputs, segment_ids, g_min, backend, composed=False):
    """As `run`, for raw projections; `composed` goes through the gates and `kda` instead."""

    def f(args):
        shared = {"state": args["state"], "segment_ids": segment_ids, "backend": backend}
        if not composed:
            return kda_from_logits(**{n: args[n] for n in RAW[:7]}, g_min=g_min, **shared)
        z = args["z"].astype(args["state"].dtype) + args["dt_bias"]
        if g_min is None:
            g = softplus_log_decay(z, args["A_log"])
        else:
            g = bounded_log_decay(z, args["A_log"], g_min)
        q = l2_normalize(args["q"].astype(z.dtype)) * args["q"].shape[-1] ** -0.5
        q, k = q.astype(args["q"].dtype), l2_normalize(args["k"])
        return kda(q, k, args["v"], g, args["beta"], g_min=g_min, **shared)

    (o, state), pull = jax.vjp(f, {name: inputs[name] for name in RAW})
    (grads,) = pull((inputs["d_o"].astype(o.dtype), inputs["d_state"]))
    return {"o": o, "final_state": state} | {f"grad_{name}": x for name, x in grads.items()}


def bounds():
    """Backends with the gates that they take."""
    return [
        (name, g_min)
        for name in BACKENDS
        if " " not in name
        for g_min in (-5.0, None)
        if g_min is not None or BACKENDS[name] is None
    ]


@pytest.mark.parametrize(("backend", "g_min"), bounds())
def test_raw_projections(backend, g_min):
    """Norm, gate and recurrence in float64, NaN at padding, a document inside the row."""
    inputs = raw_inputs(50)
    ids = np.repeat([[1, 2, 0], [0, 3, 0], [1, 1, 1]], [20, 25, 5], axis=1).astype(np.int32)
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()}
        want = jax.device_get(run_raw(wide, ids, g_min, "reference", composed=True))
    for name in RAW[:5]:
        real = (ids > 0).reshape(*ids.shape, *[1] * (inputs[name].ndim - 2))
        inputs[name] = np.where(real, inputs[name], np.nan)
    with interpreted(backend):
        got = run_raw(inputs, ids, g_min, backend)
    for name in ("A_log", "dt_bias"):  # sums over all rows and tokens: one scale for all heads
        for x in (got, want):
            x[f"grad_{name}"] = np.asarray(x[f"grad_{name}"])[None]
    compare(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_raw_projections_of_low_precision(dtype):
    """z in its own type, padding included, gives what its float32 copy gives: to the last bit."""
    inputs = raw_inputs(20)
    ids = np.repeat([[1, 0]], [15, 5], axis=1).repeat(3, 0).astype(np.int32)
    inputs |= {n: jnp.asarray(inputs[n], dtype) for n in ("q", "k", "v", "z")}
    run = jit(functools.partial(kda_from_logits, g_min=-5.0))
    args = {n: inputs[n] for n in RAW} | {"segment_ids": ids}
    got = run(**args)
    assert got[0].dtype == dtype
    want = run(**args | {"z": inputs["z"].astype(jnp.float32)})
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_raw_projections_are_the_composition_to_the_last_bit():
    """What the layer computed before it called `kda_from_logits`."""
    inputs = raw_inputs(20)
    inputs |= {n: jnp.asarray(inputs[n], jnp.bfloat16) for n in ("q", "k", "v", "z")}
    got, want = (run_raw(inputs, None, -5.0, "chunked", composed) for composed in (False, True))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# ------------------------------------------------------------------------------ all of it at once

# Every mixture is a program of its own, so these few cover pairs of choices; the rest is drawn.
MIXTURES = [  # key heads, value heads, K, V, decay, erase, chunk size
    (1, 1, 16, 16, "channel", True, 16),
    (2, 4, 20, 28, "head", True, 16),
    (1, 3, 33, 16, None, True, 32),
    (2, 2, 16, 40, "channel", False, 16),
]
TOKENS = 37


@st.composite
def problems(draw):
    """A mixture, and inputs: decays, keys, write strengths, states, documents and padding."""
    key_heads, heads, K, V, decay, erase, chunk_size = draw(st.sampled_from(MIXTURES))
    regimes = draw(st.lists(st.sampled_from(sorted(REGIMES)), min_size=2, max_size=2))
    seed = draw(st.integers(0, 2**16))
    inputs = make_inputs(TOKENS, regimes, seed, heads, K, V)
    keys = make_inputs(TOKENS, regimes, seed + 1, key_heads, K, V)
    inputs |= {"q": keys["q"], "k": keys["k"]}
    if draw(st.booleans()):  # half of the keys point the same way
        inputs["k"][:, ::2] = unit(inputs["k"][:, ::2] + 3 * inputs["k"][:, :1])
    inputs["g"] = inputs["g"] * np.float32(draw(st.sampled_from([0.0, 0.01, 1.0, 1.0])))
    if not draw(st.booleans()):
        inputs["state"] = np.zeros_like(inputs["state"])
    if decay == "head":
        inputs["g"] = inputs["g"][..., 0]
    if decay is None:
        del inputs["g"]
    segments = []
    for _ in regimes:
        ids, document = [], 0
        while len(ids) < TOKENS:
            padding = draw(st.integers(0, 3)) == 0
            document += not padding
            ids += [0 if padding else document] * draw(st.integers(1, 20))
        segments.append(ids[:TOKENS])
    return inputs, np.array(segments, np.int32), {"erase": erase, "chunk_size": chunk_size}


@each_backend
def test_any_mixture_equals_the_recurrence(backend):
    g_min = BACKENDS[backend]

    @settings(max_examples=25 if backend not in INTERPRETED else 5, deadline=None, derandomize=True)
    @given(problems())
    def check(problem):
        inputs, segments, chosen = problem
        if g_min is not None and "g" in inputs:
            inputs["g"] = np.maximum(inputs["g"], np.float32(g_min))
        got = run(inputs, segments, backend=backend, **chosen)
        compare(got, oracle(inputs, segments, erase=chosen["erase"]))

    check()
