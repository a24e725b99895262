"""The Triton kernels of the short convolution: interpreted over memory full of NaN, or on the card."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.short_conv import reference, short_conv, short_conv_streams
from k3jax.pallas_kernels.short_conv.triton_gpu import BACKWARD, FORWARD, unsupported
from tests.pallas_kernels.test_short_conv_pallas_tpu import compare, make, passes


def both(inputs, segment_ids=None):
    got, want = (
        jax.device_get(passes(inputs, segment_ids, name)) for name in ("triton_gpu", "chunked")
    )
    return got, want


@pytest.mark.parametrize(
    "T", [16, 63, BACKWARD.tokens, FORWARD.tokens + 1, BACKWARD.tokens + 1, 300]
)
def test_any_number_of_tokens(T):
    compare(*both(make(1, T)))


def test_the_definition():
    """One document per row, the cache before it."""
    inputs = make(2, 100)
    got = passes(inputs, None, "triton_gpu")
    ones = np.ones((2, 100), np.int32)
    want = reference.short_conv(inputs["x"], inputs["kernel"], inputs["cache"], ones)
    np.testing.assert_allclose(got["y"], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["new_cache"], want[1], rtol=1e-6)


def test_documents_across_tiles_and_padding_of_nan():
    """KF-011: starts on both sides of a tile's edge, documents of one token, padding inside and at the end."""
    edges = [(1, 62), (2, 1), (3, 1), (4, 59), (0, 2), (5, 1), (6, 64), (7, 70), (0, 3)]
    row = np.concatenate([np.full(n, i, np.int32) for i, n in edges])
    other = np.where(np.arange(len(row)) < 130, 9, 0).astype(np.int32)
    segment_ids = np.stack([row, other, np.zeros_like(row)])
    inputs = make(3, len(row))
    real = segment_ids[..., None, None] > 0
    clean, poisoned = (inputs | {"x": jnp.where(real, inputs["x"], fill)} for fill in (0, np.nan))
    got = jax.device_get(passes(poisoned, segment_ids, "triton_gpu"))
    # XLA's form has zeros there: this is about what the kernels do with NaN, not XLA.
    compare(got, jax.device_get(passes(clean, segment_ids, "chunked")))
    for name in ("y", "dx"):
        assert not got[name][segment_ids == 0].any(), name


def test_what_another_document_holds():
    """An infinity stays in its own document, in outputs and in gradients."""
    inputs = make(1, 40)
    segment_ids = np.repeat([[1, 2]], [20, 20], axis=1).astype(np.int32)
    x = inputs["x"].at[:, 18].set(np.inf)
    got, want = (
        jax.device_get(passes(inputs | {"x": value}, segment_ids, "triton_gpu"))
        for value in (x, inputs["x"])
    )
    np.testing.assert_array_equal(got["y"][:, 20:], want["y"][:, 20:])
    np.testing.assert_array_equal(got["dx"][:, 20:], want["dx"][:, 20:])


@pytest.mark.parametrize("W", [2, 8])
def test_other_numbers_of_taps(W):
    compare(*both(make(1, 130, W)))


@pytest.mark.parametrize("heads, dim", [(3, 40), (1, 5)])
def test_channels_that_fill_no_block(heads, dim):
    rng = np.random.default_rng(dim)
    shapes = {"x": (2, 70), "dy": (2, 70), "kernel": (4,), "cache": (2, 3), "d_cache": (2, 3)}
    inputs = {
        name: jnp.asarray(rng.normal(size=(*lead, heads, dim)), "float32")
        for name, lead in shapes.items()
    }
    compare(*both(inputs))


def test_bfloat16():
    inputs = make(1, 80, dtype="bfloat16")
    got, _ = both(inputs)
    assert got["y"].dtype == got["dx"].dtype == got["d_old_cache"].dtype == jnp.bfloat16
    assert got["d_kernel"].dtype == jnp.float32
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    compare(got, jax.device_get(passes(wide, None, "chunked")), 5e-3)


def test_streams_are_single_calls():
    inputs = [make(1, 16, 4) for _ in range(3)]
    xs, kernels = (tuple(n * i[name] for n, i in enumerate(inputs, 1)) for name in ("x", "kernel"))
    cache = jnp.stack([i["cache"] for i in inputs], axis=2)
    ys, new = short_conv_streams(xs, kernels, cache=cache, backend="triton_gpu")
    for n, (x, kernel) in enumerate(zip(xs, kernels, strict=True)):
        y, last = short_conv(x, kernel, cache=cache[:, :, n], backend="chunked")
        np.testing.assert_allclose(ys[n], y, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(new[:, :, n], last)


@pytest.mark.parametrize(
    "shape, dtype, W, reason",
    [
        ((1, 1, 96, 128), "bfloat16", 4, "T = 1"),
        ((1, 64, 96, 128), "bfloat16", 9, "9 taps"),
        ((1, 64, 96, 128), "float16", 4, "float16"),
        ((0, 64, 96, 128), "bfloat16", 4, "empty"),
    ],
)
def test_what_the_kernels_decline(shape, dtype, W, reason):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert reason in unsupported(x, jax.ShapeDtypeStruct((W, *shape[2:]), "float32"))
    fine = jax.ShapeDtypeStruct((1, 64, 96, 128), "bfloat16")
    assert unsupported(fine, jax.ShapeDtypeStruct((4, 96, 128), "float32")) is None
