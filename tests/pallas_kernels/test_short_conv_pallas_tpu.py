"""The TPU kernels of the short convolution, interpreted over memory filled with NaN."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.short_conv import reference, short_conv, short_conv_streams
from k3jax.pallas_kernels.short_conv.pallas_tpu import unsupported
from tests.pallas_kernels.kda_cases import jit

BACKENDS = ("pallas_tpu", "chunked")
H, K = 2, 128


def interpreted(backend):
    if backend != "pallas_tpu":
        return contextlib.nullcontext()
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))


def make(B, T, W=4, dtype="float32"):
    rng = np.random.default_rng([B, T, W])

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    inputs = {"x": normal(B, T, H, K), "cache": normal(B, W - 1, H, K), "dy": normal(B, T, H, K)}
    inputs = {name: jnp.asarray(x, dtype) for name, x in inputs.items()}
    d_cache = normal(B, W - 1, H, K)
    return inputs | {"kernel": jnp.asarray(normal(W, H, K)), "d_cache": jnp.asarray(d_cache, dtype)}


def _passes(inputs, segment_ids, backend):
    """Outputs, new cache and the gradients of x, kernel and cache."""

    def run(x, kernel, cache):
        return short_conv(x, kernel, cache=cache, segment_ids=segment_ids, backend=backend)

    out, pull = jax.vjp(run, inputs["x"], inputs["kernel"], inputs["cache"])
    names = ("y", "new_cache", "dx", "d_kernel", "d_old_cache")
    return dict(zip(names, (*out, *pull((inputs["dy"], inputs["d_cache"]))), strict=True))


passes = jit(_passes, static_argnames="backend")


def both(inputs, segment_ids=None):
    got = {}
    for backend in BACKENDS:
        with interpreted(backend):
            got[backend] = jax.device_get(passes(inputs, segment_ids, backend))
    return got["pallas_tpu"], got["chunked"]


def compare(got, want, limit=1e-5):
    for name, x in want.items():
        a, b = np.asarray(got[name], np.float64), np.asarray(x, np.float64)
        assert np.isfinite(a).all(), name
        assert np.linalg.norm(a - b) <= limit * max(np.linalg.norm(b), 1e-30), name


@pytest.mark.parametrize("T", [16, 63, 1000])
def test_any_number_of_tokens(T):
    compare(*both(make(1, T)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend):
    """One document per row, the cache before it."""
    inputs = make(2, 100)
    with interpreted(backend):
        got = passes(inputs, None, backend)
    ones = np.ones((2, 100), np.int32)
    want = reference.short_conv(inputs["x"], inputs["kernel"], inputs["cache"], ones)
    np.testing.assert_allclose(got["y"], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["new_cache"], want[1], rtol=1e-6)


def test_documents_across_tiles_and_padding_of_nan():
    """KF-011: starts on both sides of a tile's edge, documents of one token, padding inside and at the end."""
    lengths = [(1, 62), (2, 1), (3, 1), (4, 64), (0, 5), (5, 59), (6, 2), (7, 60), (0, 3)]
    row = np.concatenate([np.full(n, i, np.int32) for i, n in lengths])
    other = np.where(np.arange(len(row)) < 130, 9, 0).astype(np.int32)
    segment_ids = np.stack([row, other])
    inputs = make(2, len(row))
    real = segment_ids[..., None, None] > 0
    poisoned = inputs | {"x": jnp.where(real, inputs["x"], np.nan)}
    got, want = both(poisoned, segment_ids)
    compare(got, want)
    assert not got["dx"][segment_ids == 0].any()
    assert not got["y"][segment_ids == 0].any()


@pytest.mark.parametrize("W", [2, 8])
def test_other_numbers_of_taps(W):
    compare(*both(make(1, 64, W)))


def test_bfloat16():
    inputs = make(1, 80, dtype="bfloat16")
    got, want = both(inputs)
    assert got["y"].dtype == got["dx"].dtype == jnp.bfloat16
    assert got["d_kernel"].dtype == jnp.float32
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    exact = jax.device_get(passes(wide, None, "chunked"))
    compare(got, exact, 5e-3)


@pytest.mark.parametrize(
    "shape, W, reason",
    [
        ((1, 1, 96, 128), 4, "T = 1"),
        ((1, 64, 3, 40), 4, "120 channels"),
        ((1, 64, 96, 128), 9, "9 taps"),
        ((1, 64, 9600, 128), 4, "do not fit"),
    ],
)
def test_what_the_kernels_decline(shape, W, reason):
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    assert reason in unsupported(x, jax.ShapeDtypeStruct((W, *shape[2:]), "float32"))
    fine = jax.ShapeDtypeStruct((1, 64, 96, 128), "bfloat16")
    assert unsupported(fine, jax.ShapeDtypeStruct((4, 96, 128), "float32")) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_are_single_calls(backend):
    """Three streams with a kernel and a cache each equal three calls."""
    inputs = [make(1, 16, W) for W in (4, 4, 4)]
    xs, kernels = (tuple(n * i[name] for n, i in enumerate(inputs, 1)) for name in ("x", "kernel"))
    cache = jnp.stack([i["cache"] for i in inputs], axis=2)
    with interpreted(backend):
        ys, new = short_conv_streams(xs, kernels, cache=cache, backend=backend)
    for n, (x, kernel) in enumerate(zip(xs, kernels, strict=True)):
        y, last = short_conv(x, kernel, cache=cache[:, :, n], backend="chunked")
        np.testing.assert_allclose(ys[n], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(new[:, :, n], last)
