"""Hand-worked cases of the recurrence and the gates, and everything the entry point refuses."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.kda import (
    bounded_log_decay,
    kda,
    kda_from_logits,
    kda_step,
    l2_normalize,
    softplus_log_decay,
)
from k3jax.pallas_kernels.kda.api import document_starts
from tests.pallas_kernels.kda_cases import (
    NAMES,
    each_backend,
    interpreted,
    jit,
    make_inputs,
    options,
    run,
)


@each_backend
@pytest.mark.parametrize("channels", [1, 16])
def test_kf_022_the_error_is_taken_after_the_decay(backend, channels):
    """S = 1 after (k, v) = (1, 1); a decay of 1/2 and the error 0 - 1/2 leave S = 0, o = 0.

    With more channels the others stay zero.
    """
    if backend == "pallas_tpu" and channels == 1:
        pytest.skip("the kernel starts at 16 channels")

    def first_of(*values):
        x = jnp.array(values).reshape(1, 2, 1, 1)
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, channels - 1)))

    k, v, g = first_of(1.0, 1.0), first_of(1.0, 0.0), jnp.log(jnp.array([1.0, 0.5]))
    g = jnp.broadcast_to(g[:, None, None], k.shape)
    with interpreted(backend):
        o, state = kda(k, k, v, g, jnp.ones((1, 2, 1)), **options(backend))
    np.testing.assert_allclose(o[0, :, 0, 0], [1.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(state, jnp.zeros((1, 1, channels, channels)), atol=1e-7)


def test_step_by_hand():
    """K = 2, V = 1: S = (4, 2), decays (1/2, 1), k = (0, 1), beta = 1/2, v = 6."""
    q, k = jnp.array([[[3.0, 10.0]]]), jnp.array([[[0.0, 1.0]]])
    g = jnp.log(jnp.array([[[0.5, 1.0]]]))
    state = jnp.array([4.0, 2.0]).reshape(1, 1, 2, 1)
    o, state = kda_step(q, k, jnp.full((1, 1, 1), 6.0), g, jnp.full((1, 1), 0.5), state)
    # decayed (2, 2); error 6 - 2 = 4; second row + 1/2 * 4; read 3 * 2 + 10 * 4
    np.testing.assert_allclose(state.ravel(), [2.0, 4.0])
    np.testing.assert_allclose(o.ravel(), [46.0])


def test_kf_019_bounded_gate_is_a_scaled_sigmoid():
    z = jnp.ones((1, 1, 2, 3))
    g = bounded_log_decay(z, jnp.array([0.0, np.log(2.0)]), -5.0)
    np.testing.assert_allclose(g[0, 0, 0], -3.6552929, rtol=1e-6)
    np.testing.assert_allclose(g[0, 0, 1], -5 / (1 + np.exp(-2.0)), rtol=1e-6)
    # One slope per head: 96 different ones act on whole heads.
    A_log = jnp.linspace(-1, 1, 96)
    g = bounded_log_decay(jnp.ones((96, 4)), A_log, -5.0)
    want = -5 / (1 + np.exp(-np.exp(A_log)))
    np.testing.assert_allclose(g, np.repeat(want[:, None], 4, 1), rtol=1e-6)


def test_gates_at_extreme_logits():
    z = jnp.array([-1e4, -90.0, 0.0, 90.0, 1e4]).reshape(5, 1, 1)
    bounded = bounded_log_decay(z, jnp.zeros(1), -5.0)
    soft = softplus_log_decay(z, jnp.zeros(1))
    np.testing.assert_allclose(bounded.ravel(), [0, 0, -2.5, -5, -5], atol=1e-30)
    np.testing.assert_allclose(soft.ravel(), [0, 0, -np.log(2), -90, -1e4], rtol=1e-6, atol=1e-30)
    for gate in (lambda z: bounded_log_decay(z, jnp.zeros(1), -5.0), softplus_log_decay):
        args = (z,) if gate is not softplus_log_decay else (z, jnp.zeros(1))
        grads = jit(jax.grad(lambda *a, gate=gate: gate(*a).sum(), range(len(args))))(*args)
        assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("g_min", [0.0, 5.0, float("nan")])
def test_kf_020_a_bound_is_negative(g_min):
    with pytest.raises(ValueError, match="g_min must be negative"):
        bounded_log_decay(jnp.ones((1, 1)), jnp.zeros(1), g_min)


def test_l2_normalize():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(l2_normalize(x), [[0.6, 0.8], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(l2_normalize(x, eps=75.0)[0], [0.3, 0.4], rtol=1e-6)
    assert np.isfinite(jit(jax.jacobian(l2_normalize))(x)).all()
    assert l2_normalize(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def arguments(T=4, B=1):
    inputs = make_inputs(T, ("mild",) * B)
    return {name: jnp.asarray(inputs[name]) for name in NAMES[:5]}


@each_backend
def test_kf_012_no_decay_may_be_left_out(backend):
    """g = None and g = 0 give the same values and gradients, to the last bit."""
    inputs = make_inputs(65, ("open", "open_identical_keys"))
    want = run(inputs, backend=backend)
    got = run({name: x for name, x in inputs.items() if name != "g"}, backend=backend)
    assert want.pop("grad_g").shape == inputs["g"].shape
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_without_a_state_the_memory_starts_empty():
    args = arguments(T=2)
    zeros = jnp.zeros((1, 2, args["k"].shape[3], args["v"].shape[3]))
    for got, want in zip(jit(kda)(**args), jit(kda)(**args, state=zeros), strict=True):
        np.testing.assert_array_equal(got, want)


def test_kf_013_contradictory_batching():
    two = arguments(B=2)
    offsets = jnp.array([0, 2, 4])
    with pytest.raises(ValueError, match="q has 2 rows"):
        kda(**two, cu_seqlens=offsets)
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="not both"):
        kda(**arguments(), cu_seqlens=offsets, segment_ids=ids)
    for bad in ([[1, 2, 1, 1]], [[2, 0, 1, 2]]):
        with pytest.raises(ValueError, match="row 0 are not contiguous"):
            kda(**arguments(), segment_ids=jnp.array(bad), validate=True)
    with pytest.raises(ValueError, match=">= 0"):
        kda(**arguments(), segment_ids=jnp.array([[1, 1, 2, -3]]), validate=True)
    for bad in ([1, 4], [0, 3], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 4"):
            kda(**arguments(), cu_seqlens=jnp.array(bad), validate=True)


def test_shapes_that_do_not_fit():
    """Shape annotations, where they are checked, speak before the op does."""
    three = make_inputs(4, ("mild",), heads=3)
    with pytest.raises(ValueError, match="3 heads, which is not a multiple of the 2"):
        kda(**(arguments() | {name: jnp.asarray(three[name]) for name in ("v", "g", "beta")}))
    args = arguments()
    for name, bad in {
        "k": args["k"][..., :3],
        "g": args["g"][:, :2],
        "beta": args["beta"][..., :1],
    }.items():
        with pytest.raises((ValueError, TypeError), match=rf"{name} has shape|parameter"):
            kda(**(args | {name: bad}))
    with pytest.raises((ValueError, TypeError), match=r"state has shape|parameter"):
        kda(**args, state=jnp.zeros((2, 2, 20, 12)))
    with pytest.raises((ValueError, TypeError), match=r"segment_ids has shape|parameter"):
        kda(**args, segment_ids=jnp.ones((1, 3), jnp.int32))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every is 0; keep one memory in 1 or more"),
        ({"snapshot_every": 0}, "snapshot_every is 0; choose a multiple of 16"),
        ({"snapshot_every": 40}, "snapshot_every is 40; choose a multiple of 16"),
        ({"g_min": 0.0}, "g_min must be negative and finite, got 0.0"),
        ({"g_min": -np.inf}, "g_min must be negative and finite, got -inf"),
    ],
)
def test_settings_that_mean_nothing(settings, words):
    with pytest.raises(ValueError) as error:
        kda(**arguments(), **settings)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_snapshots_belong_to_rows():
    with pytest.raises(ValueError, match="snapshot_every=16 counts the tokens of rows"):
        kda(**arguments(), snapshot_every=16, cu_seqlens=jnp.array([0, 4]))


@pytest.mark.parametrize("chunk_size", [0, 1, 8, 48, 512])
def test_kf_005_other_chunk_sizes_are_refused(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size is {chunk_size}"):
        kda(**arguments(), chunk_size=chunk_size)


BAD_VALUES = {
    "positive g": ("g", 0.1, "largest is 0.1"),
    "NaN g": ("g", np.nan, "g must be finite, found nan"),
    "infinite g": ("g", -np.inf, "g must be finite, found -inf"),
    "NaN q": ("q", np.nan, "q must be finite"),
    "infinite v": ("v", np.inf, "v must be finite"),
    "large beta": ("beta", 1.5, r"beta must lie in \[0, 1.0\]"),
    "negative beta": ("beta", -0.1, r"beta must lie in \[0, 1.0\]"),
    "long k": ("k", 3.0, "k must be L2-normalised"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_kf_004_validation_names_the_bad_value(case):
    name, value, message = BAD_VALUES[case]
    args, checks = arguments(), {"validate": True, "backend": "reference"}
    args[name] = args[name].at[0, 2].set(value)
    with pytest.raises(ValueError, match=message):
        kda(**args, validate=True)
    # The same value at padding is nobody's business.
    kda(**args, segment_ids=jnp.array([[1, 1, 0, 2]]), **checks)


def test_a_broken_promise_about_the_decay_is_found():
    args = arguments()
    args["g"] = jnp.full_like(args["g"], -0.3)
    kda(**args, validate=True, g_min=-0.3, backend="reference")
    args["g"] = args["g"].at[0, 2].set(-5.5)
    with pytest.raises(ValueError, match=r"g_min=-5.0 promises g >= g_min, the smallest is -5.5"):
        kda(**args, validate=True, g_min=-5.0)


def test_kf_004_raw_projections_are_validated():
    args = arguments()
    raw = {"z": args.pop("g"), "A_log": jnp.zeros(2), "dt_bias": jnp.zeros((2, 20)), "g_min": -5.0}
    args["q"] = 7 * args["q"]  # of any length
    kda_from_logits(**args, **raw, validate=True, backend="reference")
    with pytest.raises(ValueError, match="z must be finite, found inf"):
        kda_from_logits(**args, **raw | {"z": raw["z"].at[0, 1].set(jnp.inf)}, validate=True)
    with pytest.raises((ValueError, TypeError), match=r"A_log has shape|parameter"):
        kda_from_logits(**args, **raw | {"A_log": jnp.zeros(3)})


def test_kf_004_a_decay_factor_is_not_a_log_decay():
    args = arguments()
    with pytest.raises(ValueError, match="natural-log decay"):
        kda(**(args | {"g": jnp.exp(args["g"])}), validate=True)


def test_kf_029_beta_above_one_needs_the_option():
    args = arguments()
    args["beta"] = jnp.full_like(args["beta"], 1.5)
    with pytest.raises(ValueError, match=r"found 1.5 to 1.5"):
        kda(**args, validate=True)
    kda(**args, validate=True, beta_max=2.0, backend="reference")


def test_validation_inside_jit():
    args = arguments()
    checked = jit(lambda args: kda(**args, validate=True, backend="reference"))
    jax.block_until_ready(checked(args))
    args["g"] = args["g"].at[0, 1].set(0.25)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"the largest is 0\.25"):
        jax.block_until_ready(checked(args))


def test_document_starts():
    ids = jnp.array([[0, 0, 4, 4, 0, 2, 2, 3], [1, 1, 0, 1, 1, 2, 0, 0], [0] * 8])
    want = np.zeros((3, 8), bool)
    want[0, [5, 7]] = want[1, 5] = True
    np.testing.assert_array_equal(document_starts(ids), want)


def test_unknown_backend():
    with pytest.raises(ValueError, match="kda: unknown backend 'triton'; choose one of"):
        kda(**arguments(), backend="triton")


def test_kf_024_the_choice_is_logged_once_and_can_be_required(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_used", {})
    backends = {
        "fast": (lambda: "fast", lambda size: f"size {size} is odd" if size % 2 else None),
        "floor": (lambda: "floor", dispatch.always),
        "reference": (lambda: "reference", dispatch.always),
    }
    assert dispatch.used("op") == ()
    with caplog.at_level(logging.INFO, "k3jax"):
        for _ in range(2):
            assert dispatch.choose("op", backends, None, 3)() == "floor"
    assert caplog.messages == ["op runs on backend floor (not fast: size 3 is odd)"]
    assert dispatch.choose("op", backends, None, 4)() == "fast"
    assert dispatch.choose("op", backends, "reference", 4)() == "reference"
    assert dispatch.used("op") == ("floor", "fast", "reference")
    with pytest.raises(ValueError, match="size 3 is odd"):
        dispatch.choose("op", backends, "fast", 3)
    del backends["floor"]
    with pytest.raises(ValueError, match="no backend can run this call"):  # never the reference
        dispatch.choose("op", backends, None, 3)


def test_kf_024_a_kernel_is_taken_unasked_on_its_own_platform_only(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_used", {})
    backends = {
        "pallas_tpu": (lambda: "kernel", dispatch.always),
        "chunked": (lambda: "floor", dispatch.always),
    }
    assert dispatch.choose("op", backends, "pallas_tpu")() == "kernel"
    with caplog.at_level(logging.INFO, "k3jax"):
        monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
        assert dispatch.choose("op", backends, None)() == "floor"
    assert caplog.messages == ["op runs on backend chunked (not pallas_tpu: this is a cpu)"]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # of several, see test_dispatch.py
    assert dispatch.choose("op", backends, None)() == "kernel"


def test_kf_024_the_op_says_what_it_ran_on(monkeypatch):
    monkeypatch.setattr(dispatch, "_used", {})
    kda(**arguments(), backend="reference")
    assert dispatch.used("kda") == ("reference",)
