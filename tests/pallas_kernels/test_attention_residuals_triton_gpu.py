"""The Triton kernels of Attention Residuals: interpreted over memory full of NaN, or on the card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.attention_residuals import attention_residuals, reference, triton_gpu
from tests.pallas_kernels.kda_cases import jit
from tests.pallas_kernels.test_attention_residuals import (
    EPS,
    OUT_EPS,
    close,
    compare,
    make,
    run,
    run_traced,
)


def both(rows, count, T, *, traced, normed, B=1, beyond=0.0, D=128, dtype="bfloat16"):
    """(triton_gpu, chunked in float32 on the same numbers)"""
    bank, prefix, *weights = make(rows, T, B, D, dtype=dtype)
    dx = make(rows, T, B, D, seed=1, dtype=dtype)[1]
    d_bank = make(rows, T, B, D, seed=2, dtype=dtype)[0]
    poisoned = bank.at[count:].set(beyond)
    call, number = (run_traced, jnp.int32(count)) if traced else (run, count)
    got = call("triton_gpu", number, normed, poisoned, prefix, *weights, dx, d_bank)
    wide = [x.astype(jnp.float32) for x in (bank, prefix)]
    last = [x.astype(jnp.float32) for x in (dx, d_bank)]
    want = run("chunked", count, normed, *wide, *weights, *last)
    return jax.device_get(got), jax.device_get(want)


@pytest.mark.parametrize("normed", [False, True])
def test_the_definition(normed):
    bank, prefix, query, norm, out_norm = make(3, 5, D=384)
    after = (out_norm, OUT_EPS) if normed else (None, None)
    got, same = attention_residuals(
        bank, 2, prefix, query, norm,
        eps=EPS, out_norm=after[0], out_eps=after[1], backend="triton_gpu",
    )  # fmt: skip
    want = reference.attention_residuals(bank, 2, prefix, query, norm, EPS, *after)
    close(got, want, 4e-3, "x")
    np.testing.assert_array_equal(same, bank)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("D", [200, 1024])
def test_all_gradients_and_two_rows_of_the_batch(normed, D):
    """The kernel adds to the bank's cotangent; widths that fill no power of two."""
    compare(*both(3, 3, 4, traced=False, normed=normed, B=2, D=D), 3)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_traced_count_never_reads_the_rows_beyond(count):
    """NaN there changes nothing, and their cotangent passes as it came."""
    compare(*both(3, count, 9, traced=True, normed=True, beyond=np.nan), count)


@pytest.mark.parametrize("normed", [False, True])
def test_float32(normed):
    (x, _, grads), (want, _, wanted) = both(
        3, 2, 9, traced=True, normed=normed, beyond=np.nan, D=96, dtype="float32"
    )
    close(x, want, 1e-5, "x")
    for n, (a, b) in enumerate(zip(grads, wanted, strict=True)):
        assert a.dtype == jnp.float32
        close(a, b, 1e-5, n)


def test_a_program_that_has_several_tokens(monkeypatch):
    """It goes on with its own sums of the weights' gradients."""
    monkeypatch.setattr(triton_gpu, "_programs", lambda: 2)
    compare(*both(2, 2, 7, traced=False, normed=True, D=144), 2)


def test_a_zero_query_is_the_average():
    bank, prefix, query, norm, _ = make(2, 6)
    got, _ = attention_residuals(bank, 2, prefix, 0 * query, norm, eps=EPS, backend="triton_gpu")
    mean = (bank.astype(jnp.float32).sum(0) + prefix.astype(jnp.float32)) / 3
    close(got, mean, 3e-3, "x")


def test_sites_in_a_row_hand_one_cotangent_on():
    """Two sites on one bank: each adds to what the later one hands back."""
    inputs = make(2, 12, dtype="float32")
    dx = make(2, 12, seed=1, dtype="float32")[1]

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

    got, want = (gradients(inputs, dx, name) for name in ("triton_gpu", "chunked"))
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-5, "gradient")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float16"}, "float16"),
        ({"D": 8_320}, "8320"),
        ({"D": 4_224, "dtype": "float32"}, "4224"),
        ({"count": 0}, "nothing"),
        ({"T": 0}, "nothing"),
    ],
)
def test_what_the_kernels_decline(change, reason):
    case = {"T": 64, "D": 7168, "dtype": "bfloat16", "count": 8} | change
    bank = jax.ShapeDtypeStruct((8, 1, case["T"], case["D"]), case["dtype"])
    prefix = jax.ShapeDtypeStruct(bank.shape[1:], bank.dtype)
    assert reason in triton_gpu.unsupported(bank, case["count"], prefix, None)
    fine = jax.ShapeDtypeStruct((8, 1, 64, 7168), "bfloat16")
    other = jax.ShapeDtypeStruct(fine.shape[1:], fine.dtype)
    assert triton_gpu.unsupported(fine, 8, other, None) is None
