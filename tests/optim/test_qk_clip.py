"""QK-Clip: after it, the same inputs give logits of at most tau."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.optim.qk_clip import qk_clip

R, H, N, S, V, C = 6, 3, 4, 2, 5, 7
TAU = 1.5


def weights(query="q_b_proj", layers=(), seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal((*layers, *shape)), jnp.float32)  # noqa: E731
    return {
        query: {"kernel": draw(R, H, N + S)},
        "kv_b_proj": {"kernel": draw(C, H, N + V)},
        "o_proj": {"kernel": draw(H, V, 8)},
    }


def max_logit(attention, query="q_b_proj", shared=1.0, seed=1):
    """Largest scaled logit per head over all pairs of 32 tokens; the shared key is an input."""
    rng = np.random.default_rng(seed)
    x, c, key = (rng.standard_normal((32, n)) for n in (R, C, S))
    q = np.einsum("tr,rhn->thn", x, np.asarray(attention[query]["kernel"], np.float64))
    k = np.einsum("sc,chn->shn", c, np.asarray(attention["kv_b_proj"]["kernel"], np.float64))
    logits = np.einsum("thn,shn->hts", q[..., :N], k[..., :N])
    logits += shared * np.einsum("thn,sn->hts", q[..., N:], key)
    return jnp.asarray(logits.max((1, 2)) / np.sqrt(N + S), jnp.float32)


@pytest.mark.parametrize("query", ["q_b_proj", "q_proj"])
@pytest.mark.parametrize("shared", [0.0, 1.0])  # content channels alone, and mixed
def test_logits_shrink_by_gamma(query, shared):
    before = weights(query)
    largest = max_logit(before, query, shared)
    assert (largest > TAU).all()
    after = qk_clip(before, largest, limit=TAU, qk_nope_dim=N)
    np.testing.assert_allclose(max_logit(after, query, shared), np.full(H, TAU), rtol=1e-5)


def test_values_other_weights_and_quiet_heads_stay():
    before = weights()
    after = qk_clip(before, jnp.array([TAU, 4 * TAU, -1.0]), limit=TAU, qk_nope_dim=N)
    q, kv = (
        np.asarray(after[n]["kernel"] / before[n]["kernel"]) for n in ("q_b_proj", "kv_b_proj")
    )
    np.testing.assert_allclose(q[:, 1, :N], 0.5, rtol=1e-6)
    np.testing.assert_allclose(q[:, 1, N:], 0.25, rtol=1e-6)
    np.testing.assert_allclose(kv[:, 1, :N], 0.5, rtol=1e-6)
    assert (kv[:, 1, N:] == 1).all()
    for head in (0, 2):
        assert (q[:, head] == 1).all()
        assert (kv[:, head] == 1).all()
    assert after["o_proj"] is before["o_proj"]


def test_a_stack_of_layers_is_clipped_layer_by_layer():
    stack = weights(layers=(2,))
    largest = jnp.array([[9.0, 1.0, 1.0], [1.0, 1.0, 5.0]])
    after = qk_clip(stack, largest, limit=TAU, qk_nope_dim=N)
    for i in range(2):
        layer = {name: {"kernel": stack[name]["kernel"][i]} for name in stack}
        alone = qk_clip(layer, largest[i], limit=TAU, qk_nope_dim=N)
        for name in ("q_b_proj", "kv_b_proj"):
            np.testing.assert_array_equal(after[name]["kernel"][i], alone[name]["kernel"])
