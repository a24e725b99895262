"""The passes of context parallelism over a window: `kda_summary` and the gradient of `kda`'s memory,
without what these do besides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.kda import chunked, kda, kda_summary
from k3jax.pallas_kernels.kda.summary import segment_gradient, segment_summary
from k3jax.testing import assert_close
from tests.layers.helpers import normal, segments

B, T, H, K, V = 3, 100, 2, 8, 6
IDS = np.concatenate([segments(T, size=T), segments(20, 13, 60, size=T), segments(50, 50, size=T)])
IDS[1, 40:44] = 0
IDS[2, :3] = 0


def inputs(lowest):
    q, k = (normal(B, T, H, K, seed=n) for n in range(2))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    g = lowest * np.random.default_rng(2).random((B, T, H, K), np.float32) ** 4
    beta = np.random.default_rng(3).random((B, T, H), np.float32)
    return q, k, normal(B, T, H, V, seed=4), g, beta


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("ids", "g_min"), [(None, -5.0), (IDS, -5.0), (IDS[[1, 1, 2]], None)])
def test_summary_and_gradient(ids, g_min, groups, monkeypatch):
    """In one group of chunks, and in several, of which only those count that a memory crosses."""
    size = 16 * B * H * K * (8 if groups == 1 else 2)
    monkeypatch.setattr(chunked, "GROUP_ELEMENTS", {"cpu": size, "other": size})
    q, k, v, g, beta = inputs(g_min or -50.0)
    d_o, state = normal(B, T, H, V, seed=5), normal(B, H, K, V, seed=6)
    if ids is not None:
        d_o = np.where(ids[..., None, None] > 0, d_o, 0)
    options = {"segment_ids": ids, "g_min": g_min, "chunk_size": 16}

    @jax.jit
    def expected(q, k, v, g, beta):
        _, vjp = jax.vjp(lambda s: kda(q, k, v, g, beta, state=s, **options)[0], state)
        return kda_summary(k, v, g, beta, **options), *vjp(d_o)

    @jax.jit
    def got(q, k, v, g, beta):
        M, E = segment_summary(k, v, g, beta, **options)
        none, alone = segment_summary(k, v, g, beta, transition=False, **options)
        assert none is None
        return (M, E), segment_gradient(q, k, g, beta, d_o, **options), alone

    want, (pair, gradient, alone) = expected(q, k, v, g, beta), got(q, k, v, g, beta)
    assert_close(pair, want[0], what="M and E")
    assert_close(alone, want[0][1], what="E alone")
    assert_close(gradient, want[1], what="dE")
    if ids is not None:  # padding may hold anything
        padding = (ids == 0)[..., None, None]
        q, k, v, g = (np.where(padding, np.nan, a) for a in (q, k, v, g))
        again = got(q, k, v, g, np.where(padding[..., 0], np.nan, beta))
        for a, b in zip(
            jax.tree.leaves(again), jax.tree.leaves((pair, gradient, alone)), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_bfloat16_inputs_are_summed_up_in_float32():
    q, k, v, g, beta = inputs(-1.0)
    low = [jnp.asarray(a, "bfloat16") for a in (q, k, v)]
    wide = [np.asarray(a, np.float32) for a in low]
    pair = segment_summary(low[1], low[2], g, beta)
    assert {a.dtype for a in pair} == {jnp.dtype("float32")}
    assert_close(pair, segment_summary(wide[1], wide[2], g, beta))
