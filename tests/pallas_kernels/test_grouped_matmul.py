"""Every backend of the grouped matmul against a loop over groups: values, gradients, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.grouped_matmul import (
    blocked,
    experts,
    experts_backward,
    experts_forward,
    grouped_matmul,
    pallas_tpu,
    tpu_rows,
    tpu_weights,
)
from k3jax.pallas_kernels.grouped_matmul.visits import plan_visits
from k3jax.testing import assert_close
from tests.pallas_kernels.kda_cases import jit

BACKENDS = ["blocked", "ragged", "reference"]
FLOATS = ("x", "w1", "w3", "w2", "p")
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


# -------------------------------------------------------------------------------- experts


def situ(gate, up):
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    a = 4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * 25 * jnp.tanh(u / 25)
    return a.astype(gate.dtype)


def expert_inputs(M, sizes, L, F, seed=3, dtype="float32"):
    """Rows of no expert hold NaN, in x, p and the cotangent; some weights are 0."""
    rng, E, n = np.random.default_rng(seed), len(sizes), sum(sizes)
    inputs = {
        "x": rng.normal(size=(M, L)),
        "w1": 2 * rng.normal(size=(E, L, F)) / L**0.5,
        "w3": 2 * rng.normal(size=(E, L, F)) / L**0.5,
        "w2": rng.normal(size=(E, F, L)) / F**0.5,
        "p": rng.uniform(size=M) * (np.arange(M) % 3 > 0),
        "dy": rng.normal(size=(M, L)),
    }
    for name in ("x", "p", "dy"):
        inputs[name][n:] = np.nan
    return {k: jnp.asarray(v, "float32" if k == "p" else dtype) for k, v in inputs.items()}


@functools.partial(jit, static_argnames="backend")
def run_experts(inputs, sizes, backend):
    def call(*args):
        return experts(*args, sizes, situ, backend=backend)

    y, pull = jax.vjp(call, *(inputs[name] for name in FLOATS))
    return dict(zip(("y", *FLOATS), (y, *pull(inputs["dy"])), strict=True))


def experts_by_hand(inputs, sizes):
    """A loop over experts in float64, by JAX's derivatives."""
    with jax.enable_x64(True):
        wide = {k: jnp.nan_to_num(jnp.asarray(v, "float64")) for k, v in inputs.items()}
        starts = np.cumsum([0, *sizes])

        def call(x, w1, w3, w2, p):
            y = jnp.zeros_like(x)
            for e, rows in enumerate(map(slice, starts[:-1], starts[1:])):
                g, u = x[rows] @ w1[e], x[rows] @ w3[e]
                a = 4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * 25 * jnp.tanh(u / 25)
                y = y.at[rows].set(p[rows, None] * (a @ w2[e]))
            return y

        y, pull = jax.vjp(call, *(wide[name] for name in FLOATS))
        want = dict(zip(("y", *FLOATS), (y, *pull(wide["dy"])), strict=True))
        return jax.tree.map(np.asarray, want)


EXPERTS = {  # rows, rows of each expert, latent and hidden width
    "rows to spare, odd widths": (13, [1, 0, 4, 2], 5, 3),
    "empty at both ends": (13, [0, 8, 5, 0], 8, 12),
    "no rows in use": (13, [0, 0, 0, 0], 5, 3),
}


@pytest.mark.parametrize("backend", ["composed", "reference"])
@pytest.mark.parametrize("case", EXPERTS)
def test_experts(case, backend):
    M, sizes, L, F = EXPERTS[case]
    inputs = expert_inputs(M, sizes, L, F)
    if backend == "reference":  # it multiplies every row by every matrix
        inputs = jax.tree.map(jnp.nan_to_num, inputs)
    got = run_experts(inputs, np.array(sizes, np.int32), backend)
    assert_close(got, experts_by_hand(inputs, sizes), "float32_grad")


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_by_hand_in_two_steps(case):
    """The forward pass that returns what the backward pass takes, as `experts` and its gradients."""
    M, sizes, L, F = EXPERTS[case]
    inputs, n = expert_inputs(M, sizes, L, F), jnp.array(sizes, jnp.int32)
    inputs = {name: jnp.nan_to_num(value) for name, value in inputs.items()}

    @jit
    def run(inputs):
        args = [inputs[name] for name in FLOATS]
        y, saved = experts_forward(*args, n, situ)
        return y, *experts_backward(saved, inputs["dy"], *args, n, situ)

    got = dict(zip(("y", *FLOATS), run(inputs), strict=True))
    assert_close(got, experts_by_hand(inputs, sizes), "float32_grad")


def test_experts_that_do_not_fit():
    x, w1, w3, w2, p = (expert_inputs(4, [2, 2], 5, 3)[name] for name in FLOATS)
    sizes = jnp.array([2, 2])
    for changed in ((x, w1, w3, w1, p), (x, w1, w2, w2, p), (x, w1, w3, w2, p[:3])):
        with pytest.raises((ValueError, TypeError), match=r"fit|must be|parameter"):
            experts(*changed, sizes, situ)


# -------------------------------------------------------------------------------- TPU kernels


def interpreted():
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))


KERNELS = {
    "tiles and chunks cut anywhere, rows to spare": (700, [5, 0, 300, 1, 340], 128, 256, "float32"),
    "narrow, fewer rows than a chunk": (7, [0, 7, 0], 96, 200, "float32"),
    "no rows in use": (300, [0, 0], 128, 128, "float32"),
    "one expert, one row more than a tile": (513, [513], 128, 128, "float32"),
    "many small experts": (64, [1, 2, 0, 16, 3, 17, 0, 25], 128, 384, "float32"),
    "bfloat16": (700, [128, 0, 300, 16, 200], 128, 256, "bfloat16"),
}


@pytest.mark.parametrize("case", KERNELS)
def test_kernels_over_nan(case):
    """KF-055, KF-064: memory, spare rows and their cotangents full of NaN; empty experts."""
    M, sizes, L, F, dtype = KERNELS[case]
    inputs = expert_inputs(M, sizes, L, F, dtype=dtype)
    n = np.array(sizes, np.int32)
    used = sum(sizes)
    d = np.random.default_rng(4).normal(size=(M, F))
    d[used:] = np.nan
    with interpreted():
        got = run_experts(inputs, n, "pallas_tpu")
        plain = run(inputs["x"], inputs["w1"], n, jnp.asarray(d, dtype), "pallas_tpu")
    kind = "float32_grad" if dtype == "float32" else "bfloat16"
    assert_close(got, experts_by_hand(inputs, sizes), kind)
    x, w = (np.asarray(inputs[name], np.float32) for name in ("x", "w1"))
    assert_close(plain, by_hand(np.nan_to_num(x), w, sizes, np.nan_to_num(d)), kind)
    for name in ("w1", "w3", "w2"):
        assert not np.asarray(got[name])[n == 0].any()
    assert not np.asarray(got["y"])[used:].any()
    assert not np.asarray(got["x"])[used:].any()


def test_kf_064_columns_that_no_tile_divides(monkeypatch):
    """With little on-chip memory 200 columns are two tiles, the second one of 72."""
    sizes, M, n = [20, 0, 9], 40, 200
    enough = 8 * 128 * n + 130 * 8 * (n + 128 * 5)  # 130 columns beside five further arrays
    monkeypatch.setattr(tpu_rows, "BUDGET", enough)
    monkeypatch.setattr(tpu_weights, "BUDGET", enough)
    found = tpu_rows.rows_sizes(M, 3, [n], [n], n, 4, 5)
    assert found is not None
    assert found.columns == 128
    inputs = expert_inputs(M, sizes, n, n)
    with interpreted():
        got = run_experts.__wrapped__(inputs, np.array(sizes, np.int32), "pallas_tpu")
    assert_close(got, experts_by_hand(inputs, sizes), "float32_grad")


def test_evaluation_and_training_see_the_same_outputs():
    """The forward pass alone keeps nothing, and still rounds as the one that is differentiated."""
    inputs, sizes = expert_inputs(40, [20, 0, 20], 128, 128, dtype="bfloat16"), [20, 0, 20]
    n = np.array(sizes, np.int32)
    with interpreted():
        alone = experts(*(inputs[k] for k in FLOATS), n, situ, backend="pallas_tpu")
        training = run_experts(inputs, n, "pallas_tpu")["y"]
    np.testing.assert_array_equal(alone, training)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((0, 5, 8, 8), "bfloat16", "no rows"),
        ((9, 0, 8, 8), "bfloat16", "no groups"),
        ((9, 5, 8, 8), "float16", "float16"),
        ((4096, 2, 2048, 40_960), "bfloat16", "2048 x 40960 do not fit"),
        ((4096, 2, 2048, 8192), "bfloat16", None),
        ((4096, 2, 3584, 3072), "float32", None),
        ((4096, 2, 3584, 3072), "bfloat16", None),
        ((14_336, 896, 3584, 3072), "bfloat16", None),
    ],
)
def test_what_the_kernels_decline(shape, dtype, reason):
    M, E, K, N = shape
    x, w1, w2 = (jax.ShapeDtypeStruct(s, dtype) for s in ((M, K), (E, K, N), (E, N, K)))
    found = pallas_tpu.unsupported(x, w1, w1, w2)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("every", [False, True])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_visits_cover_every_row_once(every, data):
    """In order; each tile's and each group's visits follow each other; the spare ones repeat."""
    E = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=E, max_size=E))
    rows = sum(sizes) + data.draw(st.integers(0, 40)) or 1
    tile = data.draw(st.sampled_from([16, 32, 48]))
    found = plan_visits(jnp.array(sizes, jnp.int32), rows, tile, every=every)
    group, at, first, last, live = (np.asarray(a) for a in found)
    ends = np.cumsum(sizes)
    seen = [
        (at[v] * tile + r, group[v], live[v])
        for v in range(len(at))
        for r in range(first[v], last[v])
    ]
    owners = [int(np.searchsorted(ends, r, side="right")) for r in range(rows)]
    covered = sum(sizes) if every else rows
    assert [row for row, *_ in seen] == list(range(covered))
    for row, g, alive in seen:
        assert alive == (owners[row] < E)
        assert g == owners[row] or not alive
    assert (np.diff(at) >= 0).all() or every
    assert (np.diff(group) >= 0).all()
    if every:
        assert set(group) == set(range(E))
