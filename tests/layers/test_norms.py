"""RMS norms against the official numbers, and the two rules of rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.layers.norms import RMSNorm, gated_rms_norm, rms_norm
from k3jax.pallas_kernels.kda.gates import l2_normalize
from tests.golden_io import cases, check, load
from tests.layers.helpers import normal


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("norms"))
def test_golden_norms(case):
    meta, t = load(case)
    tags = sorted({name.split(".")[0] for name in t if name.startswith("eps")})
    assert tags
    for tag in tags:
        eps = float(tag.removeprefix("eps"))

        @jax.jit
        def rms(x, weight, d_y, eps=eps):
            y, pull = jax.vjp(lambda x, w: rms_norm(x, w, eps), x, weight)
            return y, *pull(d_y)

        @jax.jit
        def gated(x, weight, gate, d_y, eps=eps):
            y, pull = jax.vjp(lambda x, w, gate: gated_rms_norm(x, w, gate, eps), x, weight, gate)
            return y, *pull(d_y)

        y, d_x, d_weight = rms(t["x"], t["weights.weight"], t["d_y"])
        check(f"{tag}.rms", y, meta)
        check(f"{tag}.rms_grad_x", d_x, meta)
        check(f"{tag}.rms_grad_weight", d_weight, meta)
        y, d_x, d_weight, d_gate = gated(t["x"], t["weights.weight"], t["gate"], t["d_y"])
        check(f"{tag}.gated", y, meta)
        check(f"{tag}.gated_grad_x", d_x, meta)
        check(f"{tag}.gated_grad_weight", d_weight, meta)
        check(f"{tag}.gated_grad_gate", d_gate, meta)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("norms"))
def test_golden_l2_norm(case):
    meta, t = load(case)

    @jax.jit
    def run(x, d_y):
        y, pull = jax.vjp(lambda x: l2_normalize(x, meta["l2norm_eps"]), x)
        return y, *pull(d_y)

    y, d_x = run(t["x"], t["d_y"])
    check("l2", y, meta)
    check("l2_grad_x", d_x, meta)


def test_rms_norm_rounds_before_the_weight():
    x, weight = jnp.asarray(normal(64, 32), jnp.bfloat16), jnp.asarray(1 + 0.3 * normal(32, seed=1))
    x32 = np.asarray(x, np.float32)
    normed = x32 / np.sqrt((x32**2).mean(-1, keepdims=True) + 1e-5)
    want = np.asarray(weight, jnp.bfloat16) * normed.astype(jnp.bfloat16)
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got) == want).mean() > 0.99  # all but ties of the float32 statistics
    assert (np.asarray(got) == (weight * normed).astype(jnp.bfloat16)).mean() < 0.9


def test_gated_norm_rounds_once():
    x, gate = (jnp.asarray(normal(64, 32, seed=s), jnp.bfloat16) for s in (0, 1))
    weight = jnp.asarray(1 + 0.3 * normal(32, seed=2))
    exact = gated_rms_norm(x.astype(jnp.float32), weight, gate.astype(jnp.float32), 1e-5)
    got = gated_rms_norm(x, weight, gate, 1e-5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


def test_module_starts_at_one_and_names_its_axis():
    norm = RMSNorm(4, eps=1e-5, rngs=nnx.Rngs(0), param_dtype="bfloat16", axis="rank")
    assert norm.weight[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm.weight[...], np.ones(4))
    assert norm.weight.get_metadata("logical_axes") == ("rank",)
