"""The NVIDIA kernels of the grouped matmul and the experts: interpreted on a CPU, compiled on a GPU."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.layers.feed_forward import ActivationConfig
from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.grouped_matmul import (
    api,
    experts,
    experts_backward,
    experts_forward,
    grouped_matmul,
    reference,
    triton_gpu,
)
from k3jax.pallas_kernels.grouped_matmul.visits import plan_tiles
from k3jax.testing import assert_close
from tests.pallas_kernels.kda_cases import jit
from tests.pallas_kernels.test_grouped_matmul import (
    FLOATS,
    by_hand,
    expert_inputs,
    experts_by_hand,
    run,
    situ,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed"
)
SITU = ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0)
SWIGLU = ActivationConfig(kind="swiglu", gate_cap=None, up_cap=None)
CASES = {  # rows, rows of each group, latent and hidden width, dtype
    "rows to spare, odd widths": (13, [1, 0, 4, 2], 5, 3, "float32"),
    "empty at both ends, wider than a tile": (80, [0, 7, 73, 0], 72, 130, "float32"),
    "no rows in use": (13, [0, 0], 5, 3, "float32"),
    "more groups than rows": (3, [0, 1, 0, 0, 0, 0, 2, 0, 0], 16, 16, "float32"),
    "small groups": (40, [20, 0, 16, 3], 64, 136, "bfloat16"),
    "large groups": (300, [129, 0, 150], 72, 264, "bfloat16"),
}


@functools.partial(jit, static_argnames=("activation", "backend"))
def run_experts(inputs, sizes, activation, backend="triton_gpu"):
    def call(*args):
        return experts(*args, sizes, activation, backend=backend)

    y, pull = jax.vjp(call, *(inputs[name] for name in FLOATS))
    return dict(zip(("y", *FLOATS), (y, *pull(inputs["dy"])), strict=True))


def spare_rows_are_zero(got, n, used):
    for name in ("w1", "w3", "w2"):
        assert not np.asarray(got[name])[n == 0].any()
    for name in ("y", "x", "p"):
        assert not np.asarray(got[name])[used:].any()


@pytest.mark.parametrize("case", CASES)
def test_over_nan(case):
    """KF-055, KF-064: memory, spare rows and their cotangents full of NaN; empty experts."""
    M, sizes, L, F, dtype = CASES[case]
    inputs = expert_inputs(M, sizes, L, F, dtype=dtype)
    n = np.array(sizes, np.int32)
    used = sum(sizes)
    d = np.random.default_rng(4).normal(size=(M, F))
    d[used:] = np.nan
    kind = "float32_grad" if dtype == "float32" else "bfloat16"
    plain = run(inputs["x"], inputs["w1"], n, jnp.asarray(d, dtype), "triton_gpu")
    x, w = (np.asarray(inputs[name], np.float32) for name in ("x", "w1"))
    assert_close(plain, by_hand(np.nan_to_num(x), w, sizes, np.nan_to_num(d)), kind)
    assert not np.asarray(plain[0])[used:].any()
    got = run_experts(inputs, n, SITU)
    assert_close(got, experts_by_hand(inputs, sizes), kind)
    spare_rows_are_zero(got, n, used)


def test_weights_of_empty_experts_are_not_read():
    inputs = expert_inputs(20, [9, 0, 11], 16, 24)
    n = np.array([9, 0, 11], np.int32)
    for name in ("w1", "w3", "w2"):
        inputs[name] = inputs[name].at[1].set(jnp.nan)
    got = run_experts(inputs, n, SITU)
    assert all(bool(jnp.isfinite(value).all()) for value in got.values())


@pytest.mark.parametrize(
    "activation", [SWIGLU, ActivationConfig(kind="situ", gate_cap=1.0, up_cap=None)]
)
def test_activations_of_the_configuration(activation):
    """Bounded or not, what the kernels compute is what the layers compute."""
    inputs, sizes = expert_inputs(24, [9, 0, 13], 16, 24), np.array([9, 0, 13], np.int32)
    got = run_experts(inputs, sizes, activation)
    clean = jax.tree.map(jnp.nan_to_num, inputs)
    assert_close(got, run_experts(clean, sizes, activation, "reference"), "float32_grad")


def test_an_activation_that_the_kernels_do_not_know():
    inputs, sizes = expert_inputs(24, [9, 0, 13], 16, 24), [9, 0, 13]
    assert triton_gpu.caps(situ) is None
    got = run_experts(inputs, np.array(sizes, np.int32), situ)
    assert_close(got, experts_by_hand(inputs, sizes), "float32_grad")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_activation_over_its_range(scale):
    """Where tanh is linear and where it is flat: one expert, the identity in front of it."""
    F, L = 16, 16
    rng = np.random.default_rng(0)
    x = jnp.asarray(scale * rng.normal(size=(32, L)), jnp.float32)
    w1 = jnp.eye(L, F)[None]
    w3 = w1[:, :, ::-1]
    p, dy = jnp.ones(32), jnp.asarray(rng.normal(size=(32, L)), jnp.float32)
    inputs = {"x": x, "w1": w1, "w3": w3, "w2": jnp.eye(F, L)[None], "p": p, "dy": dy}
    assert_close(
        run_experts(inputs, np.array([32], np.int32), SITU),
        experts_by_hand(inputs, [32]),
        "float32_grad",
    )


def test_two_steps_and_evaluation_see_the_same_outputs():
    """The forward pass alone keeps nothing, and rounds as the one that is differentiated."""
    sizes = [20, 0, 20]
    inputs = expert_inputs(40, sizes, 64, 72, dtype="bfloat16")
    n, args = jnp.array(sizes, jnp.int32), [inputs[name] for name in FLOATS]
    alone = experts(*args, n, SITU, backend="triton_gpu")
    y, saved = experts_forward(*args, n, SITU, backend="triton_gpu")
    gradients = experts_backward(saved, inputs["dy"], *args, n, SITU, backend="triton_gpu")
    np.testing.assert_array_equal(alone, y)
    want = run_experts(inputs, np.array(sizes, np.int32), SITU)
    for name, value in zip(("y", *FLOATS), (y, *gradients), strict=True):
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_tiles_cover_every_row_once(data):
    """In order, none with rows of two groups; what is left over has no rows."""
    E = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=E, max_size=E))
    rows = sum(sizes) + data.draw(st.integers(0, 40)) or 1
    tile = data.draw(st.sampled_from([1, 16, 48]))
    found = plan_tiles(jnp.array(sizes, jnp.int32), rows, tile)
    seen = [(r, g) for g, *ends in zip(*map(np.asarray, found), strict=True) for r in range(*ends)]
    owners = np.searchsorted(np.cumsum(sizes), np.arange(rows), side="right")
    assert seen == list(enumerate(owners))
    assert (found.last - found.first).max() <= tile


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((0, 5, 8, 8), "bfloat16", "no rows"),
        ((9, 0, 8, 8), "bfloat16", "no groups"),
        ((9, 5, 8, 8), "float16", "float16"),
        ((9, 2, 2**16, 2**15), "bfloat16", "65536 x 32768"),
        ((14_336, 896, 3584, 3072), "bfloat16", None),
    ],
)
def test_what_the_kernels_decline(shape, dtype, reason):
    M, E, K, N = shape
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), (E, K, N)))
    found = triton_gpu.unsupported(x, w)
    assert found is None if reason is None else reason in found


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 100, 300])
def test_large_on_the_card(rows):
    """K3's widths, uneven groups: against one dense product per group, in float32."""
    E, K, N = 16, 3584, 3072
    rng = np.random.default_rng(rows)
    sizes = rng.multinomial(rows * E, np.full(E, 1 / E)).astype(np.int32)
    keys = jax.random.split(jax.random.key(rows), 3)
    shapes = ((rows * E + 5, K), (E, K, N), (rows * E + 5, N))
    x, w, d = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    got = run(x, w, sizes, d, "triton_gpu")
    wide = (a.astype(jnp.float32) for a in (x, w, d))
    x, w, d = wide
    y, pull = jax.vjp(lambda x, w: reference.dense(x, w, sizes), x, w)
    assert_close(got, (y, *pull(d)), "bfloat16")


@pytest.mark.gpu
def test_kf_063_memory_is_a_small_multiple_of_the_arrays():
    """At K3's number of experts on one of eight devices; forward and backward."""
    E, M, K, N = 112, 4096, 896, 768
    x, w, d = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, K), (E, K, N), (M, N)))
    compiled = run.lower(x, w, jax.ShapeDtypeStruct((E,), jnp.int32), d, "triton_gpu").compile()
    arrays = 2 * 2 * (M * K + E * K * N + M * N)  # inputs and outputs
    assert compiled.memory_analysis().temp_size_in_bytes < arrays / 4


@pytest.mark.gpu
def test_it_is_what_runs_on_a_gpu():
    x, w = jnp.ones((4, 16), jnp.bfloat16), jnp.ones((2, 16, 16), jnp.bfloat16)
    grouped_matmul(x, w, jnp.array([1, 3], jnp.int32))
    assert "triton_gpu" in dispatch.used("grouped_matmul")


def test_it_comes_before_what_runs_everywhere():
    for choice in (api.backends(), api.EXPERTS, api.FORWARD, api.BACKWARD):
        assert list(choice)[:2] == ["pallas_tpu", "triton_gpu"]
