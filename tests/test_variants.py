"""KDA variants: the contract, what each one computes, and that the contract notices violations."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.layers import kda as kda_layer
from k3jax.layers.kda import KDAConfig, KimiDeltaAttention
from k3jax.testing import assert_close, check_kda_contract, random_layer
from k3jax.variants.gated_delta_net import GatedDeltaNetConfig
from k3jax.variants.softplus_gate import SoftplusGateConfig
from tests.layers.helpers import TINY_KDA, caller, normal

WIDTH = 12
GATED_DELTA_NET = GatedDeltaNetConfig(**vars(TINY_KDA))
SOFTPLUS = {"gate": "softplus", "g_min": None, "rate_min": 1.0, "rate_max": 16.0}
SOFTPLUS_GATE = SoftplusGateConfig(**vars(TINY_KDA) | SOFTPLUS)
EVERYTHING_ELSE = replace(
    TINY_KDA,
    conv_size=None,
    gate="softplus",
    g_min=None,
    gate_rank=None,
    out_gate_rank=3,
    beta_max=2.0,
    backend="reference",
)


@pytest.mark.parametrize(
    "cfg",
    [TINY_KDA, EVERYTHING_ELSE, GATED_DELTA_NET],
    ids=["k3", "every other choice", "gated delta net"],
)
def test_kf_028_contract_at_wide_decays(cfg):
    check_kda_contract(cfg, width=WIDTH)


def test_gated_delta_net_is_the_scalar_decay_recurrence(monkeypatch):
    graphdef, params = random_layer(GATED_DELTA_NET, WIDTH)
    assert params["dt_bias"].shape == (2, 1)
    assert params["f_b_proj"]["kernel"].shape == (4, 2, 1)
    seen = {}
    mix = type(nnx.merge(graphdef, params)).mix

    def spy(self, *args):
        seen["args"], seen["out"] = args[:5], mix(self, *args)
        return seen["out"]

    monkeypatch.setattr(type(nnx.merge(graphdef, params)), "mix", spy)
    run = jax.jit(lambda p, x: (nnx.merge(graphdef, p)(x)[0], seen.pop("args"), seen.pop("out")))
    _, args, (o, state) = run(params, normal(1, 7, WIDTH))
    q, k, v, g, beta = (np.asarray(a, np.float64)[0] for a in args)
    assert g.shape == (7, 2, 1)
    for h in range(2):
        S = np.zeros((8, 8))
        for t in range(7):
            write = np.eye(8) - beta[t, h] * np.outer(k[t, h], k[t, h])
            S = np.exp(g[t, h, 0]) * write @ S + beta[t, h] * np.outer(k[t, h], v[t, h])
            assert_close(o[0, t, h], S.T @ q[t, h], what=f"token {t}")
        assert_close(state[0, h], S, what="memory")


def test_only_kdas_own_gate_promises_its_bound(monkeypatch):
    """A variant with a gate of its own may fall below cfg.g_min: the op must not rely on it."""
    promised = []

    def record(*args, g_min=None, **kwargs):
        promised.append(g_min)
        raise InterruptedError

    class Steep(KimiDeltaAttention):
        def log_decay(self, z):
            return 2 * super().log_decay(z)

    monkeypatch.setattr(kda_layer, "kda", record)
    monkeypatch.setattr(kda_layer, "kda_from_logits", record)
    make = dict(rngs=nnx.Rngs(0), param_dtype="float32", init_std=0.02)
    for cfg, layer in ((TINY_KDA, KimiDeltaAttention), (TINY_KDA, Steep), (GATED_DELTA_NET, None)):
        layer = layer(cfg, WIDTH, **make) if layer else cfg.build(WIDTH, **make)
        with pytest.raises(InterruptedError):
            layer(jnp.zeros((1, 3, WIDTH)))
    assert promised == [-5.0, None, -5.0]


def test_softplus_gate_starts_with_spread_rates():
    cfg = replace(SOFTPLUS_GATE, num_heads=64)

    def start():
        layer = cfg.build(WIDTH, rngs=nnx.Rngs(0), param_dtype="bfloat16", init_std=0.02)
        return layer.A_log[...], layer.log_decay(layer.dt_bias[...])

    A_log, g = jax.jit(start)()
    rate = np.exp(A_log)
    assert A_log.dtype == jnp.float32
    assert rate.min() >= 1
    assert rate.max() <= 16
    np.testing.assert_allclose(rate.mean(), 8.5, rtol=0.2)
    assert (g < -0.9e-3).all()
    assert (g > -1.61).all()


def test_softplus_gate_computes_what_the_field_of_kda_selects():
    graphdef, params = random_layer(SOFTPLUS_GATE, WIDTH)
    plain = random_layer(replace(TINY_KDA, gate="softplus", g_min=None), WIDTH)[0]
    x = normal(1, 5, WIDTH)
    y, want = (caller(g)(params, x)[0] for g in (graphdef, plain))
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate": "bounded", "g_min": -5.0}, "kda.gate='bounded': a softplus-gate layer needs"),
        ({"rate_min": 0.0}, "kda.rate_min=0.0, kda.rate_max=16.0: need 0 < rate_min <= rate_max"),
        ({"rate_min": 20.0}, "kda.rate_min=20.0, kda.rate_max=16.0: need"),
        ({"beta_max": 3.0}, "kda.beta_max=3.0"),  # the checks of KDA stay
    ],
)
def test_bad_softplus_gate_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        replace(SOFTPLUS_GATE, **changes)
    assert str(error.value).startswith(words)


class LeakyAttention(KimiDeltaAttention):
    """Broken on purpose, as `cfg.defect` says."""

    def log_decay(self, z):
        if self.cfg.defect == "future":
            z = z + 1e-3 * jnp.roll(z, -1, axis=1)
        return super().log_decay(z)

    def mix(self, q, k, v, g, beta, state, segment_ids):
        if self.cfg.defect == "boundaries":
            segment_ids = None if segment_ids is None else jnp.minimum(segment_ids, 1)
        o, new = super().mix(q, k, v, g, beta, state, segment_ids)
        if self.cfg.defect == "state":
            new = new.astype(jnp.bfloat16).astype(jnp.float32)
        if self.cfg.defect == "gradient" and q.shape[1] > 1:
            o = (o + jax.lax.stop_gradient(o)) / 2
        return o, new


@dataclass(frozen=True, kw_only=True)
class LeakyConfig(KDAConfig):
    defect: str

    def build(self, width, **kwargs):
        return LeakyAttention(self, width, **kwargs)


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("future", "causality"),
        ("state", "splitting"),
        ("gradient", "gradients"),
        ("boundaries", "documents"),
    ],
)
def test_contract_notices(defect, words):
    quick = vars(TINY_KDA) | {"conv_size": None, "backend": "reference"}  # to compile
    with pytest.raises(AssertionError, match=words):
        check_kda_contract(LeakyConfig(**quick, defect=defect), width=WIDTH)


def test_contract_refuses_nan():
    with pytest.raises(AssertionError):
        assert_close(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    with pytest.raises(AssertionError):
        assert_close(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
