"""The mix over depth: every backend against the definition, gradients, and the two phases of inference.

The TPU kernels are interpreted over memory filled with NaN.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.attention_residuals import (
    BankMix,
    attention_residuals,
    merge_prefix,
    mix_bank,
    pallas_tpu,
    reference,
)
from tests.pallas_kernels.kda_cases import jit

EPS, OUT_EPS = 1e-5, 1e-3
BACKENDS = ("chunked", "pallas_tpu")


def interpreted(backend):
    if backend != "pallas_tpu":
        return contextlib.nullcontext()
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))


def make(rows, T, B=1, D=128, seed=0, dtype="bfloat16"):
    rng = np.random.default_rng([seed, rows, T])

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    bank, prefix = (
        normal(rows, B, T, D) * np.arange(1, rows + 1)[:, None, None, None],
        normal(B, T, D),
    )
    sources = [jnp.asarray(x, dtype) for x in (bank, prefix)]
    weights = [jnp.asarray(x) for x in (normal(D) / 4, 1 + normal(D) / 4, 1 + normal(D) / 4)]
    return *sources, *weights


def passes(backend, count, normed, bank, prefix, query, norm, out_norm, dx, d_bank, d_more=None):
    """Result, bank and all gradients; `d_bank` is what the bank's later readers hand back."""

    def run(bank, prefix, query, norm, out_norm):
        after = (out_norm, OUT_EPS) if normed else (None, None)
        return attention_residuals(
            bank, count, prefix, query, norm,
            eps=EPS, out_norm=after[0], out_eps=after[1], backend=backend,
        )  # fmt: skip

    (x, bank), pull = jax.vjp(run, bank, prefix, query, norm, out_norm)
    return x, bank, pull((dx, d_bank))


run = jit(passes, static_argnums=(0, 1, 2))
run_traced = jit(passes, static_argnums=(0, 2))


def both(rows, count, T, *, traced, normed, B=1, beyond=0.0, D=128):
    """(pallas_tpu, chunked in float32 on the same numbers); NaN beyond the count for the kernel."""
    bank, prefix, *weights = make(rows, T, B, D)
    _, dx, *_ = make(rows, T, B, D, seed=1)
    d_bank = make(rows, T, B, D, seed=2)[0]
    poisoned = bank.at[count:].set(beyond)
    call, number = (run_traced, jnp.int32(count)) if traced else (run, count)
    with interpreted("pallas_tpu"):
        got = jax.device_get(
            call("pallas_tpu", number, normed, poisoned, prefix, *weights, dx, d_bank)
        )
    wide = [x.astype(jnp.float32) for x in (bank, prefix)]
    last = [x.astype(jnp.float32) for x in (dx, d_bank)]
    want = jax.device_get(run("chunked", count, normed, *wide, *weights, *last))
    return got, want


def close(got, want, limit, name):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= limit, (name, error)


def compare(got, want, count):
    x, _, grads = got
    x_want, _, wanted = want
    assert x.dtype == grads[0].dtype == grads[1].dtype == jnp.bfloat16
    close(x, x_want, 5e-3, "x")
    names = ("bank", "prefix", "query", "norm", "out_norm")
    for name, a, b in zip(names, grads, wanted, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all(), name
        if name != "bank":
            close(a, b, 1e-2, name)
    for i, (a, b) in enumerate(zip(grads[0], wanted[0], strict=True)):
        if i < count:
            close(a, b, 1e-2, f"bank row {i}")
        else:  # nothing was added to it
            np.testing.assert_array_equal(a, b.astype(a.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normed", [False, True])
def test_the_definition(backend, normed):
    bank, prefix, query, norm, out_norm = make(3, 48, D=384)
    after = (out_norm, OUT_EPS) if normed else (None, None)
    with interpreted(backend):
        got, same = attention_residuals(
            bank, 2, prefix, query, norm,
            eps=EPS, out_norm=after[0], out_eps=after[1], backend=backend,
        )  # fmt: skip
    want = reference.attention_residuals(bank, 2, prefix, query, norm, EPS, *after)
    close(got, want, 4e-3, "x")
    np.testing.assert_array_equal(same, bank)


@pytest.mark.parametrize("T, B", [(1, 1), (63, 2), (1000, 1)])
def test_any_number_of_tokens(T, B):
    compare(*both(2, 2, T, traced=False, normed=True, B=B), 2)


@pytest.mark.parametrize("normed", [False, True])
def test_all_gradients_and_two_rows_of_the_batch(normed):
    """The kernel adds to the bank's cotangent; 160 tokens leave the last tile of 64 cut."""
    compare(*both(3, 3, 160, traced=False, normed=normed, B=2), 3)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_traced_count_never_reads_the_rows_beyond(count):
    """NaN there changes nothing, and their cotangent passes as it came."""
    D = 1152 if count == 1 else 128  # 1152: several steps of columns
    compare(*both(3, count, 224, traced=True, normed=True, beyond=np.nan, D=D), count)


def test_a_zero_query_is_the_average():
    bank, prefix, query, norm, _ = make(2, 16)
    with interpreted("pallas_tpu"):
        got, _ = attention_residuals(
            bank, 2, prefix, 0 * query, norm, eps=EPS, backend="pallas_tpu"
        )
    mean = (bank.astype(jnp.float32).sum(0) + prefix.astype(jnp.float32)) / 3
    close(got, mean, 3e-3, "x")


def test_sites_in_a_row_hand_one_cotangent_on():
    """Two sites on one bank: each adds to what the later one hands back."""
    inputs = make(2, 32)
    _, dx, *_ = make(2, 32, seed=1)

    @functools.partial(jit, static_argnames="backend")
    def gradients(inputs, dx, backend):
        def two(bank, prefix, query, norm, out_norm):
            for q in (query, -query):
                prefix, bank = attention_residuals(
                    bank, 2, prefix, q, norm,
                    eps=EPS, out_norm=out_norm, out_eps=OUT_EPS, backend=backend,
                )  # fmt: skip
            return prefix

        return jax.vjp(two, *inputs)[1](dx)

    with interpreted("pallas_tpu"):
        got = jax.device_get(gradients(inputs, dx, "pallas_tpu"))
    wide = [x.astype(jnp.float32) for x in (*inputs, dx)]
    for a, b in zip(got, gradients(tuple(wide[:-1]), wide[-1], "chunked"), strict=True):
        close(a, b, 2e-2, "gradient")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float32"}, "float32"),
        ({"D": 200}, "200"),
        ({"count": 0}, "nothing"),
        ({"rows": 190, "count": 190}, "190 rows"),
        ({"rows": 64, "D": 128, "count": 64}, "64 rows"),
    ],
)
def test_what_the_kernels_decline(change, reason):
    case = {"rows": 8, "D": 7168, "dtype": "bfloat16", "count": 8} | change
    bank = jax.ShapeDtypeStruct((case["rows"], 1, 64, case["D"]), case["dtype"])
    prefix = jax.ShapeDtypeStruct(bank.shape[1:], bank.dtype)
    assert reason in pallas_tpu.unsupported(bank, case["count"], prefix, None)
    fine = jax.ShapeDtypeStruct((8, 1, 64, 7168), "bfloat16")
    assert (
        pallas_tpu.unsupported(fine, 8, jax.ShapeDtypeStruct(fine.shape[1:], fine.dtype), None)
        is None
    )


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_two_phases_equal_one(count, traced):
    """Phase 1 for three sites at once; phase 2 with a prefix of each site's own."""
    bank, _, _, _, _ = make(3, 5, B=2, D=32, dtype="float32")
    sites = [make(3, 5, B=2, D=32, seed=s, dtype="float32")[1:4] for s in range(3)]
    queries, norms = (jnp.stack([site[n] for site in sites]) for n in (1, 2))
    number = jnp.int32(count) if traced else count
    banked = jax.jit(mix_bank, static_argnums=() if traced else 1, static_argnames="eps")(
        bank, number, queries, norms, eps=EPS
    )
    for s, (prefix, query, norm) in enumerate(sites):
        got = merge_prefix(BankMix(*(x[s] for x in banked)), prefix, query, norm, eps=EPS)
        want = reference.attention_residuals(bank, count, prefix, query, norm, EPS)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        if count:  # at the first layer of a block: the new bank alone, its last row the last source
            alone = banked.mixed[s] / banked.total[s][..., None]
            last = bank[count - 1]
            want = reference.attention_residuals(bank, count - 1, last, query, norm, EPS)
            np.testing.assert_allclose(alone, want, rtol=1e-5, atol=1e-5)
