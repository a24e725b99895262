"""Per-Head Muon against the formulas of training.md §2, worked out in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.optim.muon import Blocks, orthogonalize, scale_by_per_head_muon

MATRIX, PER_HEAD = Blocks((-2,), (-1,)), Blocks((-3,), (-1,))
INTO_HEADS, OUT_OF_HEADS = Blocks((-3,), (-2, -1)), Blocks((-3, -2), (-1,))
KEYS_AND_VALUES = PER_HEAD._replace(cuts=(3,))
BOTH_TYPES = pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def newton_schulz(x):
    """The iteration as written, for one matrix, always on the rows' Gram matrix; float64."""
    x = np.asarray(x, np.float64)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        y = x @ x.T
        x = 3.4445 * x + (-4.7750 * y + 2.0315 * y @ y) @ x
    return x


def expected(x):
    return 0.2 * np.sqrt(max(x.shape)) * newton_schulz(x)


def rms(x):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))


def close(actual, wanted, tolerance=2e-5):
    error = np.abs(np.asarray(actual, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < tolerance, error


# ------------------------------------------------------------------------------------ which blocks


def test_kf_090_per_head_matrices_are_cut_on_the_head_axis_only():
    stack = normal(2, 12, 3, 5)  # two layers of [D, H, K]
    scaled = stack * np.array([1, 100, 1], np.float32)[:, None]  # one head x100
    update = np.asarray(orthogonalize(scaled, PER_HEAD))
    for layer in range(2):
        for head in range(3):
            close(update[layer, :, head], expected(stack[layer, :, head]))
    whole = np.asarray(orthogonalize(scaled[0], INTO_HEADS))  # the same weight as one matrix
    close(whole.reshape(12, 15), expected(scaled[0].reshape(12, 15)))
    assert rms(whole[:, 0]) < 0.9 * rms(whole[:, 1])  # the loud head takes over


def test_kf_090_o_proj_is_one_matrix_from_heads_to_width():
    x = normal(4, 8, 20)  # [H, V, D]
    update = np.asarray(orthogonalize(x, OUT_OF_HEADS))
    close(update.reshape(32, 20), expected(x.reshape(32, 20)))


def test_kf_091_keys_and_values_of_a_head_are_two_matrices():
    x = normal(6, 2, 7)  # [C, H, N + V], N = 3
    update = np.asarray(orthogonalize(x, KEYS_AND_VALUES))
    for head in range(2):
        close(update[:, head, :3], expected(x[:, head, :3]))
        close(update[:, head, 3:], expected(x[:, head, 3:]))
    assert KEYS_AND_VALUES.shapes(x.shape) == [(2, 6, 3), (2, 6, 4)]


@pytest.mark.parametrize("blocks", [PER_HEAD, KEYS_AND_VALUES])
def test_kf_091_permuting_heads_permutes_updates(blocks):
    x, order = normal(6, 4, 7), np.array([2, 0, 3, 1])
    np.testing.assert_allclose(
        orthogonalize(x[:, order], blocks), orthogonalize(x, blocks)[:, order], atol=1e-6
    )


def test_kf_092_matrices_stored_together_do_not_see_each_other():
    experts = normal(3, 8, 6)  # [E, L, F]
    update = np.asarray(orthogonalize(experts, MATRIX))
    for e in range(3):
        close(update[e], expected(experts[e]))
    louder = experts * np.array([1, 1e4, 1], np.float32)[:, None, None]
    np.testing.assert_allclose(orthogonalize(louder, MATRIX), update, atol=1e-5)


# ----------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize("shape", [(128, 7168), (7168, 128), (192, 112), (336, 384), (72, 72)])
def test_kf_094_update_rms_does_not_depend_on_the_shape(shape):
    # KF-101 too. 0.157-0.191 for Gaussian inputs (training.md §14): singular values end below 1.
    update = orthogonalize(normal(*shape), MATRIX)
    assert 0.15 < rms(update) < 0.21
    singular = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(shape)))
    assert singular.max() < 1.3
    assert np.sort(singular)[len(singular) // 20] > 0.6  # square Gaussians have a few near zero


def test_kf_094_the_block_gives_the_factor_not_the_weight():
    x = normal(8, 16, 8)  # 16 heads of 8 x 8 in a weight of 8 x 128
    assert rms(orthogonalize(x, PER_HEAD)) < 0.21  # sqrt(128) in place of sqrt(8) would give 0.7


# -------------------------------------------------------------------------------------- extremes


@BOTH_TYPES
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_kf_093_tiny_and_huge_gradients_are_not_damped(scale, ns_dtype):
    x = normal(8, 16)
    close(
        orthogonalize(x * np.float32(scale), MATRIX, ns_dtype), orthogonalize(x, MATRIX, ns_dtype)
    )


@BOTH_TYPES
def test_kf_093_zero_blocks_stay_zero(ns_dtype):
    x = normal(3, 8, 16)
    x[1] = 0  # one expert
    update = np.asarray(orthogonalize(x, MATRIX, ns_dtype))
    assert np.isfinite(update).all()
    assert not update[1].any()
    assert rms(update[0]) > 0.1


@pytest.mark.parametrize("shape", [(7168, 128), (1, 7168)])
def test_kf_101_singular_values_in_bfloat16(shape):
    update = orthogonalize(normal(*shape), MATRIX, "bfloat16")
    singular = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(shape)))
    assert singular.min() >= 0.65
    assert singular.max() <= 1.25


@BOTH_TYPES
def test_kf_101_ill_conditioned_and_rank_one(ns_dtype):
    u, _ = np.linalg.qr(normal(48, 16, seed=1))
    v, _ = np.linalg.qr(normal(16, 16, seed=2))
    values = np.geomspace(1, 1e-6, 16)  # condition number 1e6
    update = orthogonalize(((u * values) @ v.T).astype(np.float32), MATRIX, ns_dtype)
    ends = np.diagonal(u.T @ np.asarray(update, np.float64) @ v) / (0.2 * np.sqrt(48))
    large = values / np.linalg.norm(values) > 1e-2
    assert ((ends[large] > 0.65) & (ends[large] < 1.25)).all()
    if ns_dtype == "float32":  # bfloat16 rounds away what is 1e-6 of the largest
        assert (ends > 0).all()
    one = np.outer(u[:, 0], v[:, 0]).astype(np.float32)
    update = np.asarray(orthogonalize(one, MATRIX, ns_dtype)) / (0.2 * np.sqrt(48))
    assert 0.65 < u[:, 0] @ update @ v[:, 0] < 1.25
    assert np.linalg.norm(update, 2) < 1.25


def test_kf_101_transposed_input_gives_the_transposed_update():
    x = normal(16, 40)
    np.testing.assert_array_equal(orthogonalize(x.T, MATRIX), orthogonalize(x, MATRIX).T)


# -------------------------------------------------------------------------------------- momentum


@pytest.mark.parametrize("nesterov", [True, False])
def test_kf_096_the_momentum_is_orthogonalised_not_the_gradient(nesterov):
    g1, g2, mu = np.diag([2.0, 1.0]), np.array([[0.0, 1.0], [1.0, 0.0]]), 0.5
    muon = scale_by_per_head_muon({"w": MATRIX}, momentum=mu, nesterov=nesterov, ns_dtype="float32")
    state = muon.init({"w": jnp.zeros((2, 2))})
    updates = []
    for g in (g1, g2):
        update, state = muon.update({"w": jnp.asarray(g, jnp.float32)}, state)
        updates.append(update["w"])
    m2 = np.array([[1.0, 1.0], [1.0, 0.5]])  # 0.5 g1 + g2
    x2 = np.array([[0.5, 1.5], [1.5, 0.25]]) if nesterov else m2  # 0.5 m2 + g2
    close(updates[0], expected(g1))  # (1 + mu) g1 or g1: the same direction
    close(updates[1], expected(x2))
    assert np.abs(np.asarray(updates[1]) - expected(g2)).max() > 0.05
    momentum = jax.tree.leaves(state)
    assert len(momentum) == 1  # nothing else is kept
    np.testing.assert_allclose(momentum[0], m2)
