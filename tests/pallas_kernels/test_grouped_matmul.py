"""Every backend of the grouped matmul against a loop over groups: values, gradients, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.grouped_matmul import blocked, grouped_matmul
from tests.pallas_kernels.kda_cases import jit

BACKENDS = ["blocked", "ragged", "reference"]
SIZES = {  # rows of each group; what is left of M belongs to no group
    "even": (13, [3, 3, 3, 4]),
    "empty in the middle": (13, [6, 0, 0, 7]),
    "empty at both ends": (13, [0, 8, 5, 0]),
    "all in one": (13, [0, 13, 0, 0]),
    "rows to spare": (13, [1, 0, 4, 2]),
    "no rows in use": (13, [0, 0, 0, 0]),
    "more groups than rows": (3, [0, 1, 0, 0, 0, 0, 2, 0, 0]),
    "long groups": (300, [129, 1, 170]),
    "no rows": (0, [0, 0]),
}


@functools.partial(jit, static_argnames="backend")
def run(x, w, sizes, dy, backend):
    y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend=backend), x, w)
    return y, *pull(dy)


def by_hand(x, w, sizes, dy):
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw, start = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w), 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start += size
    return y, dx, dw


def make(M, E, K=5, N=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((M, K), (E, K, N), (M, N))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SIZES)
def test_values_and_gradients(case, backend):
    """Rows beyond the groups give 0; a group without rows gets a gradient of exactly 0."""
    M, sizes = SIZES[case]
    x, w, dy = make(M, len(sizes))
    got = run(x, w, np.array(sizes, np.int32), dy, backend)
    for a, b in zip(got, by_hand(x, w, sizes, dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not np.asarray(got[0])[sum(sizes) :].any()
    assert not np.asarray(got[2])[np.array(sizes) == 0].any()


def test_kf_055_groups_without_rows_get_no_gradient():
    """896 experts, 3 tokens of 16: at least 848 empty; the same twice, NaN in their weights."""
    rng = np.random.default_rng(1)
    x, w, dy = make(48, 896)
    sizes = np.bincount(np.sort(rng.choice(896, 48, replace=False)), minlength=896)
    w[sizes == 0] = np.nan
    results = [run(x, w, sizes.astype(np.int32), dy, "blocked") for _ in range(2)]
    for first, second in zip(*results, strict=True):
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, second)
    gradient = np.asarray(results[0][2])
    assert not gradient[sizes == 0].any()
    assert gradient[sizes > 0].any(axis=(1, 2)).all()


def test_kf_063_memory_is_a_small_multiple_of_the_arrays():
    """Forward and backward at many groups: far from E times the rows."""
    M, E, K, N = 1024, 112, 32, 48
    x, w, dy = make(M, E, K, N)
    sizes = np.full(E, M // E, np.int32)

    def temporary(backend):
        compiled = run.lower(x, w, sizes, dy, backend).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    arrays = 2 * (x.nbytes + w.nbytes + dy.nbytes)  # inputs and outputs
    assert temporary("blocked") < 6 * arrays
    assert temporary("reference") > 6 * arrays  # so the bound can tell


def test_blocks_suffice_for_any_sizes():
    """The number of blocks fixed at trace time covers the most uneven groups."""
    rng = np.random.default_rng(2)
    for M, E in ((1, 1), (7, 3), (64, 5), (64, 100), (1000, 7)):
        size = blocked.block_rows(M, E)
        room = (M + min(E, M) * (size - 1)) // size
        for _ in range(50):
            sizes = rng.multinomial(M, rng.dirichlet(np.full(E, 0.3)))
            assert -(-sizes // size).sum() <= room


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in make(13, 4, 64, 32))
    got = run(x, w, np.array([6, 0, 3, 4], np.int32), dy, backend)
    for a, b in zip(got, by_hand(x, w, [6, 0, 3, 4], dy), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=1e-2, atol=1e-2 * abs(b).max())


def test_shapes_that_do_not_fit():
    x, w, _ = (jnp.asarray(a) for a in make(4, 2))
    with pytest.raises((ValueError, TypeError), match=r"do not fit|parameter"):
        grouped_matmul(x[:, :2], w, jnp.array([2, 2]))
    with pytest.raises((ValueError, TypeError), match=r"group_sizes has shape|parameter"):
        grouped_matmul(x, w, jnp.array([2, 1, 1]))
    with pytest.raises(ValueError, match="unknown backend 'dense'"):
        grouped_matmul(x, w, jnp.array([2, 2]), backend="dense")
