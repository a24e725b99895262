"""Transition and zero-start state of a segment: composition, splitting, documents, gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.kda import kda, kda_summary
from tests.pallas_kernels.kda_cases import (
    NAMES,
    K,
    V,
    compare,
    each_backend,
    fast_backend,
    inputs_for,
    interpreted,
    jit,
    make_inputs,
    options,
)

TOKENS = NAMES[1:5]  # k, v, g, beta


@functools.partial(jit, static_argnames=("backend", "erase"))
def summary(inputs, segment_ids=None, *, backend="chunked", erase=True):
    args = [inputs[n] for n in TOKENS]
    return kda_summary(*args, segment_ids=segment_ids, erase=erase, **options(backend))


def exact(inputs, segment_ids=None, **settings):
    """The summary by the recurrence in float64."""
    with jax.enable_x64(True):
        wide = {n: jnp.asarray(inputs[n], jnp.float64) for n in TOKENS}
        return jax.device_get(summary(wide, segment_ids, backend="reference", **settings))


def exact_state(inputs, segment_ids=None):
    """The memory that leaves the row, by the recurrence in float64."""
    with jax.enable_x64(True):
        args = [jnp.asarray(inputs[n], jnp.float64) for n in NAMES]
        run = jit(functools.partial(kda, backend="reference", segment_ids=segment_ids))
        return jax.device_get(run(*args[:5], state=args[5])[1])


def compose(later, earlier):
    """(M2, E2) after (M1, E1)  (kcp.md, Eq. 2)."""
    return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]


def part(inputs, start, stop):
    return {n: inputs[n][:, start:stop] for n in TOKENS}


def test_by_hand():
    """One channel, scalar segments: (1/2, 2), (1/4, 1), (4/5, 3) from 0 give 2, 3/2, 4.2."""
    k = jnp.ones((1, 3, 1, 1))
    decay = jnp.array([1.0, 1.0, 1.0])
    keep = jnp.array([0.5, 0.25, 0.8])  # M = (1 - beta) decay, E = beta v
    beta, write = 1 - keep, jnp.array([2.0, 1.0, 3.0])
    shape = (1, 3, 1, 1)
    args = k, (write / beta).reshape(shape), jnp.log(decay).reshape(shape), beta.reshape(1, 3, 1)
    M, E = kda_summary(*args, backend="reference")
    np.testing.assert_allclose(M.ravel(), [0.5 * 0.25 * 0.8], rtol=1e-6)
    np.testing.assert_allclose(E.ravel(), [4.2], rtol=1e-6)
    M, E = kda_summary(*(a[:, 1:] for a in args), backend="reference")
    np.testing.assert_allclose([M.item(), E.item()], [0.2, 3.8], rtol=1e-6)


@each_backend
@pytest.mark.parametrize("erase", [True, False])
def test_it_is_what_the_recurrence_does_to_any_memory(backend, erase):
    inputs = inputs_for(backend, 70)
    with interpreted(backend):
        M, E = summary(inputs, backend=backend, erase=erase)
    assert M.shape == (*inputs["state"].shape[:2], K, K)
    assert M.dtype == E.dtype == jnp.float32
    want = exact(inputs, erase=erase)
    compare({"M": M, "E": E}, dict(zip("ME", want, strict=True)))


def test_joined_parts_equal_the_unsplit_recurrence():
    """In float64 to 1e-12, for any cut, whichever way the parts are bracketed."""
    inputs = make_inputs(70)
    cuts = [0, 1, 17, 40, 70]
    parts = [exact(part(inputs, a, b)) for a, b in itertools.pairwise(cuts)]
    left = functools.reduce(lambda earlier, later: compose(later, earlier), parts)
    right = functools.reduce(lambda later, earlier: compose(later, earlier), reversed(parts))
    whole = exact(inputs)
    state = exact_state(inputs)
    for M, E in (left, right):
        np.testing.assert_allclose(M, whole[0], atol=1e-12)
        np.testing.assert_allclose(E, whole[1], atol=1e-12)
        np.testing.assert_allclose(M @ inputs["state"].astype(np.float64) + E, state, atol=1e-12)
    swapped = compose(parts[1], parts[2])
    assert np.abs(swapped[1] - compose(parts[2], parts[1])[1]).max() > 1e-2  # the order matters


@fast_backend
def test_kf_015_a_chain_of_segments_does_not_drift(backend):
    """Slow decay, 8 x 256 tokens: chained memories stay within 1e-4 of float64, bfloat16 keys and
    values or float32, and 8 segments are no worse than twice 2. So does the first segment's dk."""
    size = 256
    inputs = inputs_for(backend, 8 * size, ("slow_correlated_keys",), seed=1)
    inputs["g"] = np.full_like(inputs["g"], -1e-3)
    for n in ("k", "v"):  # numbers that both types hold
        inputs[n] = np.asarray(jnp.asarray(inputs[n], jnp.bfloat16), np.float32)
    inputs = {n: inputs[n] for n in NAMES} | {"d_state": inputs["d_state"]}

    @functools.partial(jit, static_argnames=("parts", "dtype", "backend"))
    def chained(inputs, parts, dtype, backend):
        def run(head):
            whole = inputs | {"k": jnp.concatenate([head, inputs["k"][:, size:]], axis=1)}
            whole |= {n: whole[n].astype(dtype) for n in ("k", "v")}
            if parts == 1:
                return kda(
                    *(whole[n] for n in NAMES[:5]), state=whole["state"], **options(backend)
                )[1]
            rows = [whole[n].reshape(parts, -1, *whole[n].shape[2:]) for n in TOKENS]
            state = whole["state"]
            for M, E in zip(
                *kda_summary(*rows, **options(backend)), strict=True
            ):  # segments as rows
                state = jnp.einsum("hij,bhjv->bhiv", M, state, precision="highest") + E
            return state

        if dtype == jnp.bfloat16:
            return {"state": run(inputs["k"][:, :size])}
        state, pull = jax.vjp(run, inputs["k"][:, :size])
        return {"state": state, "dk": pull(inputs["d_state"])[0]}

    with jax.enable_x64(True):
        wide = {n: jnp.asarray(x, jnp.float64) for n, x in inputs.items()}
        want = jax.device_get(chained(wide, 1, jnp.float64, "reference"))

    def error(parts, dtype, name):
        with interpreted(backend):
            got = np.asarray(chained(inputs, parts, dtype, backend)[name], np.float64)
        return np.abs(got - want[name]).max() / np.abs(want[name]).max()

    assert error(8, jnp.bfloat16, "state") <= 1e-4
    for name in ("state", "dk"):
        two, eight = (error(parts, jnp.float32, name) for parts in (2, 8))
        assert eight <= 1e-4, name
        assert eight <= max(2 * two, 1e-6), name


@each_backend
def test_kf_014_any_partition_of_any_documents(backend):
    """130 tokens on 4 ranks (33, 33, 32, 32), documents across, inside and at the ranks' edges.

    A document that begins at a rank's first token is the caller's: it sets M to zero.
    """
    inputs = inputs_for(backend, 130, ("mild",) * 4, seed=2)
    lengths = ([130], [65, 65], [33, 33, 64], [10, 5, 100, 15])
    ids = np.stack([np.repeat(np.arange(1, len(n) + 1), n) for n in lengths]).astype(np.int32)
    want = exact_state(inputs, ids)
    state, edges = inputs["state"], [0, 33, 66, 98, 130]
    for start, stop in itertools.pairwise(edges):
        with interpreted(backend):
            M, E = summary(part(inputs, start, stop), ids[:, start:stop], backend=backend)
        M = np.asarray(M)
        inside = (ids[:, start:stop] != ids[:, start : start + 1]).any(1)
        assert not M[inside].any()  # exactly zero: what enters cannot matter
        begins = np.zeros(4, bool) if start == 0 else ids[:, start] != ids[:, start - 1]
        M = np.where(begins[:, None, None, None], 0, M)
        state = M @ np.asarray(state) + np.asarray(E)
    compare({"state": state}, {"state": want})


@each_backend
def test_at_the_gate_bound_the_transition_underflows(backend):
    """All gates -5: M reaches 0 without NaN, values and gradients; padding alone is the identity."""
    inputs = inputs_for(backend, 200, ("floor", "floor"))
    inputs["g"] = np.full_like(inputs["g"], -5.0)
    ids = np.ones((2, 200), np.int32)
    ids[1] = 0
    for n in TOKENS:
        inputs[n][1] = np.nan

    def total(args):
        M, E = kda_summary(*args, segment_ids=ids, **options(backend))
        return (M * 1e3).sum() + E.sum(), (M, E)

    with interpreted(backend):
        grads, (M, E) = jit(jax.grad(total, has_aux=True))([inputs[n] for n in TOKENS])
    assert not np.asarray(M[0]).any()
    np.testing.assert_array_equal(M[1], np.broadcast_to(np.eye(K), M[1].shape))
    assert not np.asarray(E[1]).any()
    assert all(np.isfinite(x).all() for x in (E, *grads))


@each_backend
def test_gradients_of_both_outputs(backend):
    """Against autodiff of the recurrence in float64, through M and through E."""
    inputs = inputs_for(backend, 40)
    ids = np.ones((len(inputs["k"]), 40), np.int32)
    ids[::3, 25:], ids[1::3, 33:] = 2, 0
    rng = np.random.default_rng(0)
    d_M = rng.normal(size=(*inputs["state"].shape[:2], K, K)).astype(np.float32)
    d_E = rng.normal(size=(*inputs["state"].shape[:2], K, V)).astype(np.float32)

    def gradients(args, d_M, d_E, backend):
        _, pull = jax.vjp(lambda a: kda_summary(*a, segment_ids=ids, **options(backend)), args)
        return dict(zip(TOKENS, pull((d_M, d_E))[0], strict=True))

    args = [inputs[n] for n in TOKENS]
    run = jit(gradients, static_argnames="backend")
    with interpreted(backend):
        got = run(args, d_M, d_E, backend)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (args, d_M, d_E))
        want = jax.device_get(run(*wide, "reference"))
    compare(got, want)


@each_backend
def test_grouped_heads_have_a_transition_each(backend):
    """H = 2, HV = 6: value head j is summarised with the keys of head j // 3."""
    wide = inputs_for(backend, 20, ("mild",), heads=6)
    narrow = make_inputs(20, ("mild",), heads=2)["k"]
    with interpreted(backend):
        got = summary(wide | {"k": narrow}, backend=backend)
    want = exact(wide | {"k": narrow[:, :, [0, 0, 0, 1, 1, 1]]})
    compare(dict(zip("ME", got, strict=True)), dict(zip("ME", want, strict=True)))
