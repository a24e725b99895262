"""SiTU-GLU, Linear and the dense feed-forward layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.layers.feed_forward import ActivationConfig, FeedForward, Linear, situ
from tests.golden_io import cases, check, load
from tests.layers.helpers import activation_config, load_layer, normal, official_leaves, puller

SWIGLU = ActivationConfig(kind="swiglu", gate_cap=None, up_cap=None)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("situ"))
def test_golden_situ(case):
    meta, t = load(case)
    for tag, p in meta["parameters"].items():
        act = partial(situ, gate_cap=p["beta"], up_cap=p["linear_beta"])

        @jax.jit
        def run(gate, up, d_y, act=act):
            y, pull = jax.vjp(act, gate, up)
            return y, *pull(d_y)

        y, d_gate, d_up = run(t["gate"], t["up"], t["d_y"])
        check(f"{tag}.y", y, meta)
        check(f"{tag}.grad_gate", d_gate, meta)
        check(f"{tag}.grad_up", d_up, meta)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("mlp"))
def test_golden_feed_forward(case):
    meta, t = load(case)
    c = meta["config"]
    graphdef, params = load_layer(
        lambda rngs: FeedForward(
            c["hidden_size"],
            c["intermediate_size"],
            activation=activation_config(c),
            rngs=rngs,
            init_std=0.02,
        ),
        t,
    )
    y, (d_params, d_x) = puller(graphdef)(params, t["x"], None, t["d_y"])
    check("y", y, meta)
    check("grad_x", d_x, meta)
    for name, grad in official_leaves(d_params).items():
        check(f"grad_weights.{name}", grad, meta)


def test_situ_worked_values():
    gate, up = jnp.array([1.0, -1.0, 4.0, 10.0, 100.0]), jnp.array([1.0, 1.0, 10.0, 30.0, 100.0])
    want = [0.7158178281, -0.2633345727, 28.4162295230, 82.2458215453, 99.9329299737]
    np.testing.assert_allclose(situ(gate, up, 4.0, 25.0), want, rtol=1e-6)  # architecture 4.2
    # a gate cap of 1, which the reference falls back to, would give 0.948
    np.testing.assert_allclose(situ(jnp.array(3.0), jnp.array(1.0), 4.0, None), 2.420, atol=5e-4)


def test_activation_rounds_once():
    gate, up = (jnp.asarray(3 * normal(256, seed=s), jnp.bfloat16) for s in (0, 1))
    for cfg in (SWIGLU, ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0)):
        exact = cfg(gate.astype(jnp.float32), up.astype(jnp.float32))
        got = cfg(gate, up)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "gelu"}, ["activation.kind='gelu'", "situ"]),
        ({"gate_cap": None}, ["activation.gate_cap=None", "4.0"]),
        ({"gate_cap": 0.0}, ["activation.gate_cap=0.0", "above 0"]),
        ({"up_cap": -25.0}, ["activation.up_cap=-25.0", "above 0"]),
        ({"gate_cap": float("nan")}, ["activation.gate_cap=nan", "above 0"]),
        ({"kind": "swiglu"}, ["activation.gate_cap=4.0", "None"]),
        ({"kind": "swiglu", "gate_cap": None}, ["activation.up_cap=25.0", "None"]),
    ],
)
def test_bad_activation_is_refused(changes, words):
    good = {"kind": "situ", "gate_cap": 4.0, "up_cap": 25.0}
    ActivationConfig(**good)
    with pytest.raises(ValueError) as error:
        ActivationConfig(**good | changes)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_linear_contracts_and_makes_several_dimensions():
    linear = Linear((2, 3), (4,), ("heads", "value", "embed"), rngs=nnx.Rngs(0), init_std=0.5)
    x = jnp.asarray(normal(5, 7, 2, 3))
    want = np.einsum("abhv,hvd->abd", x, linear.kernel[...])
    np.testing.assert_allclose(linear(x), want, rtol=1e-5, atol=1e-6)
    assert linear.kernel.get_metadata("logical_axes") == ("heads", "value", "embed")
    assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_linear_initial_deviation():
    kernel = Linear((64,), (64,), ("embed", "ffn"), rngs=nnx.Rngs(0), init_std=0.02).kernel[...]
    np.testing.assert_allclose(kernel.std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(kernel.mean(), 0, atol=0.002)
