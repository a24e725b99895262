"""Windows of rows: tokens beside a window, the memory that enters it, and the cost of both."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.sharding import context_parallel
from k3jax.sharding.annotate import region
from k3jax.sharding.mesh import MeshConfig, make_mesh
from tests.sharding.collectives import PRIMITIVES, collectives, fault

pytestmark = pytest.mark.devices
__all__ = ["collectives"]  # a fixture

ROWS, TOKENS = P("data"), P("data", "context")


def on_ranks(ranks, function, specs, out, *args):
    """Runs `function` in a region in which `ranks` share every row."""
    mesh = make_mesh(MeshConfig(data=1, context=ranks), jax.devices()[:ranks])
    put = jax.tree.map(
        lambda a, s: jax.device_put(jnp.asarray(a), jax.NamedSharding(mesh, s)), args, specs
    )
    return jax.jit(region(function, mesh, specs, out))(*put)


def collective_bytes(text: str) -> dict[tuple[str, tuple[int, ...]], tuple[int, int]]:
    """(name, result shape) -> (calls, bytes each) of the collectives in a compiled program."""
    sizes = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1, "u32": 4, "f64": 8}
    found = {}
    pattern = r"= \(?(\w+)\[([\d,]*)\][^=]* (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
    for dtype, dims, name in re.findall(pattern, text):
        shape = tuple(int(n) for n in dims.split(",") if n)
        calls, _ = found.get((name, shape), (0, 0))
        found[name, shape] = calls + 1, int(np.prod(shape)) * sizes[dtype]
    return found


@pytest.mark.parametrize("name", PRIMITIVES)
def test_kf_121_collectives_of_the_test_backend(name):
    assert fault(name) is None, f"environment: {fault(name)}"


def test_kf_014_rows_that_do_not_divide_are_refused():
    assert context_parallel.window_size(128, 4) == 32
    with pytest.raises(ValueError) as error:
        context_parallel.window_size(130, 4)
    assert "130 tokens does not divide over 4 context ranks: pad it to 132" in str(error.value)
    assert "\n" not in str(error.value)
    row = np.zeros((1, 130), np.int32)
    with pytest.raises(ValueError, match="130 tokens does not divide over 4"):
        on_ranks(4, lambda x: context_parallel.window(x, 32), (P(),), P(), row)
    with pytest.raises(ValueError, match=r"128 tokens on 4 context ranks has windows of 32 .* 16"):
        on_ranks(4, lambda x: context_parallel.window(x, 16), (P(),), P(), row[:, :128])


def test_without_ranks_everything_is_the_identity():
    x = np.arange(12.0, dtype=np.float32).reshape(2, 3, 2)
    before = x[:, :2] + 100
    np.testing.assert_array_equal(context_parallel.window(x, 3), x)
    np.testing.assert_array_equal(context_parallel.gather_tokens(x), x)
    np.testing.assert_array_equal(context_parallel.halo(x, 2), 0 * before)
    np.testing.assert_array_equal(context_parallel.halo(x, 2, before), before)
    np.testing.assert_array_equal(context_parallel.from_next(x), 0 * x[:, :1])
    np.testing.assert_array_equal(context_parallel.from_owner(x, np.array(True)), x)
    M, E = (np.random.default_rng(i).standard_normal((1, 1, 2, 2)) for i in range(2))
    entering, last = context_parallel.entering_state(M, E, E)
    np.testing.assert_array_equal(entering, E)
    np.testing.assert_allclose(last, M @ E + E, rtol=1e-6)
    assert context_parallel.entering_state(M, E)[1] is None


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 4), (4, 3), (4, 2), (8, 1)])
def test_tokens_beside_a_window(collectives, ranks, tokens):
    """Windows shorter than the halo too, and the gradient of everything."""
    draw, T = np.random.default_rng(0).standard_normal, ranks * tokens
    x, before = draw((2, T, 5), np.float32), draw((2, 3, 5), np.float32)
    weight = draw((2, ranks * 3, 5), np.float32)

    def run(x, before, whole, weight):
        halo, pull = jax.vjp(lambda *a: context_parallel.halo(a[0], 3, a[1]), x, before)
        d_x, d_before = pull(weight)
        gathered, pull = jax.vjp(context_parallel.gather_tokens, x)
        (d_gathered,) = pull(whole)  # of every rank the same share
        own = context_parallel.window(whole, tokens)
        rank = jax.lax.axis_index("context")
        owner = context_parallel.from_owner(x[:, :1], rank == ranks - 1)
        d_before = jax.lax.psum(d_before, "context")
        return (
            halo, context_parallel.halo(x, 3), d_x, d_before, gathered, d_gathered, own,
            context_parallel.from_next(x), owner,
        )  # fmt: skip

    specs = (TOKENS, ROWS, ROWS, TOKENS)
    out = (TOKENS, TOKENS, TOKENS, ROWS, ROWS, TOKENS, TOKENS, TOKENS, ROWS)
    got = on_ranks(ranks, run, specs, out, x, before, x, weight)
    halo, cold, d_x, d_before, gathered, d_gathered, own, after, owner = map(np.asarray, got)

    row = np.concatenate([before, x], axis=1)
    d_row = np.zeros_like(row)
    for rank in range(ranks):
        at = rank * tokens
        np.testing.assert_array_equal(halo[:, 3 * rank : 3 * rank + 3], row[:, at : at + 3])
        outside = np.where(np.arange(at, at + 3)[:, None] < 3, 0, row[:, at : at + 3])
        np.testing.assert_array_equal(cold[:, 3 * rank : 3 * rank + 3], outside)
        d_row[:, at : at + 3] += weight[:, 3 * rank : 3 * rank + 3]
    np.testing.assert_allclose(d_before, d_row[:, :3], rtol=1e-6)
    np.testing.assert_allclose(d_x, d_row[:, 3:], rtol=1e-6)
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_allclose(d_gathered, ranks * x, rtol=1e-6)
    np.testing.assert_array_equal(own, x)
    want = np.concatenate([x[:, tokens::tokens], 0 * x[:, :1]], axis=1)
    np.testing.assert_array_equal(after, want)
    np.testing.assert_array_equal(owner, x[:, -tokens][:, None])


def segments(ranks, dtype):
    """M, E and dE of every rank [ranks, 1, 2 heads, 3, 3 or 4], a memory and a gradient."""
    draw = np.random.default_rng(ranks).standard_normal
    M, E, d_E = (0.5 * draw((ranks, 1, 2, 3, n)) for n in (3, 4, 4))
    return *(a.astype(dtype) for a in (M, E, d_E)), *draw((2, 1, 2, 3, 4)).astype(dtype)


def compose(second, first):
    return second[0] @ first[0], second[0] @ first[1] + second[1]


def test_the_worked_example_and_associativity():
    """kcp.md, 2: (0.5, 2), (0.25, 1), (0.8, 3) take 0 to 4.2, in whatever order they are merged."""
    parts = [(np.float64(m), np.float64(e)) for m, e in ((0.5, 2), (0.25, 1), (0.8, 3))]
    assert np.isclose(functools.reduce(lambda S, p: p[0] * S + p[1], parts, 0.0), 4.2)
    M, E, *_ = segments(8, np.float64)
    pairs = list(zip(M, E, strict=True))
    left = functools.reduce(lambda done, pair: compose(pair, done), pairs)
    right = functools.reduce(compose, pairs[::-1])
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", ["gather", "scan"])
@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, "float32"), (3, "float32"), (4, "float64"), (8, "float64")]
)
def test_the_memory_that_enters_a_window_and_its_gradient(collectives, ranks, dtype, form):
    """Both forms equal the left fold, with and without a memory in front of the row."""
    M, E, d_E, start, d_last = segments(ranks, dtype)

    def run(M, E, d_E, start, d_last):
        M, E, d_E = M[0], E[0], d_E[0]
        cold, none = context_parallel.entering_state(M, E, form=form)
        assert none is None
        warm, last = context_parallel.entering_state(M, E, start, form=form)
        d_cold = context_parallel.leaving_gradient(M, d_E, form=form)
        # A share of the gradient on every rank, of which the sum counts.
        share = d_last * jnp.where(jax.lax.axis_index("context") == 1, 0.75, 0.25 / (ranks - 1))
        d_warm = context_parallel.leaving_gradient(M, d_E, share.astype(dtype), form=form)
        between = (
            None if ranks == 2 else M
        )  # no memory crosses the whole window of one of two ranks
        short = context_parallel.entering_state(between, E, form=form)[0]
        d_short = context_parallel.leaving_gradient(between, d_E, form=form)
        return tuple(a[None] for a in (cold, short, warm, last, d_cold, d_short, d_warm))

    split = P("context")
    with jax.enable_x64(dtype == "float64"):
        specs = (split, split, split, P(), P())
        got = on_ranks(ranks, run, specs, (split,) * 7, M, E, d_E, start, d_last)
        got = [np.asarray(a) for a in got]
    cold, short, warm, last, d_cold, d_short, d_warm = got
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    S_cold, S_warm = np.zeros_like(start), start
    for r in range(ranks):
        for S in (cold[r], short[r]):
            close(S, S_cold)
        close(warm[r], S_warm)
        S_cold, S_warm = M[r] @ S_cold + E[r], M[r] @ S_warm + E[r]
    d_cold_want, d_warm_want = np.zeros_like(start), d_last
    for r in reversed(range(ranks)):
        close(last[r], S_warm)
        for d in (d_cold[r], d_short[r]):
            close(d, d_cold_want)
        close(d_warm[r], d_warm_want)
        transposed = M[r].swapaxes(-1, -2)
        d_cold_want, d_warm_want = (
            transposed @ d_cold_want + d_E[r],
            transposed @ d_warm_want + d_E[r],
        )


@pytest.mark.parametrize(("form", "received"), [("gather", 8 * 7), ("scan", 2 * 7 + 4)])
def test_bytes_of_an_exchange(form, received):
    """8 ranks: a gather brings everybody's pairs; the scan two pairs and, at last, E alone."""
    M, E, *_ = segments(8, np.float32)

    def run(M, E):
        return context_parallel.entering_state(M[0], E[0], form=form)[0][None]

    mesh = make_mesh(MeshConfig(data=1, context=8))
    split = P("context")
    args = [jax.device_put(a, jax.NamedSharding(mesh, split)) for a in (M, E)]
    program = jax.jit(region(run, mesh, (split, split), split)).lower(*args).compile()
    calls = collective_bytes(program.as_text())
    assert sum(n * size for n, size in calls.values()) == received * 4 * 2 * 3, calls
    assert {name for name, _ in calls} == {
        "gather": {"all-gather"},
        "scan": {"collective-permute"},
    }[form]


def test_a_memory_across_a_window_needs_its_transition():
    _, E, *_ = segments(4, np.float32)
    with pytest.raises(ValueError, match=r"4 ranks .* need the transition"):
        on_ranks(
            4,
            lambda E: context_parallel.entering_state(None, E[0])[0][None],
            (P("context"),),
            P("context"),
            E,
        )
