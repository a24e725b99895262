"""MXFP4: codes against the official encoder, special codes, products with packed matrices."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.pallas_kernels.grouped_matmul import grouped_matmul
from k3jax.pallas_kernels.mxfp4 import (
    GROUP,
    dequantize_mxfp4,
    grouped_matmul_mxfp4,
    quantize_mxfp4,
)
from k3jax.pallas_kernels.mxfp4 import grouped as grouped_module
from tests.golden_io import cases, load

DRAWN = ("normal", "wide", "heavy_tail", "zeros_and_tiny", "ties", "scale_step")


def unsigned_zeros(packed):
    """Codes with every zero positive: the fixtures say that its sign carries no meaning."""
    low, high = packed & 15, packed >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


def to_numpy(function):
    """`function` of JAX arrays, as one of NumPy arrays."""
    return lambda packed, scale, dtype: np.asarray(
        function(jnp.asarray(packed), jnp.asarray(scale), dtype)
    )


DECODERS = pytest.mark.parametrize(
    "decode", [dequantize_mxfp4, to_numpy(dequantize_mxfp4)], ids=["numpy", "jax"]
)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("mxfp4"))
@pytest.mark.parametrize("tag", DRAWN)
def test_golden_codes(case, tag):
    _, t = load(case)
    packed, scale = quantize_mxfp4(t[f"{tag}.weight"])
    np.testing.assert_array_equal(scale, t[f"{tag}.weight_scale"])
    np.testing.assert_array_equal(unsigned_zeros(packed), unsigned_zeros(t[f"{tag}.weight_packed"]))


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("mxfp4"))
@pytest.mark.parametrize("tag", [*DRAWN, "decode"])
@DECODERS
def test_golden_values(case, tag, decode):
    _, t = load(case)
    got = decode(t[f"{tag}.weight_packed"], t[f"{tag}.weight_scale"], np.float32)
    want = t[f"{tag}.dequantized"]
    small = np.abs(want) < 1.2e-38  # may be flushed to zero, say the fixtures
    np.testing.assert_array_equal(np.where(small & (got == 0), want, got), want)


@DECODERS
def test_kf_074_low_nibble_is_the_even_column(decode):
    packed = np.zeros((1, 16), np.uint8)
    packed[0, 0] = 0x2A
    got = decode(packed, np.full((1, 1), 127, np.uint8), np.float32)
    assert got[0, :3].tolist() == [-1.0, 1.0, 0.0]


def test_kf_074_groups_lie_along_the_inputs_and_shapes_are_checked():
    packed, scale = quantize_mxfp4(np.ones((3, 64), np.float32))
    assert packed.shape == (3, 32)
    assert scale.shape == (3, 2)
    with pytest.raises(ValueError, match=r"scales \(3, 3\) do not fit codes \(3, 32\)"):
        dequantize_mxfp4(packed, np.zeros((3, 3), np.uint8), np.float32)
    with pytest.raises(ValueError, match="width 48 is no multiple of 32"):
        quantize_mxfp4(np.ones((2, 48), np.float32))


@DECODERS
def test_kf_073_scale_bytes_are_exponents(decode):
    packed = np.full((1, 16), 0x22, np.uint8)  # all 1.0
    assert decode(packed, np.full((1, 1), 121, np.uint8), np.float32)[0, 0] == 2.0**-6
    assert np.isnan(decode(packed, np.full((1, 1), 255, np.uint8), np.float32)).all()


def test_kf_075_bias_is_127():
    w = np.zeros((1, 32), np.float32)
    w[0, 4] = 6.0
    packed, scale = quantize_mxfp4(w)
    assert (scale[0, 0], packed[0, 2]) == (127, 0x07)


@pytest.mark.parametrize("tiny", [0.0, 1e-40])
def test_kf_076_zero_groups(tiny):
    w = np.zeros((2, 64), np.float32)
    w[0, 3] = tiny
    packed, scale = quantize_mxfp4(w)
    assert scale[0, 0] == 0
    for decode in (dequantize_mxfp4, to_numpy(dequantize_mxfp4)):
        back = decode(packed, scale, np.float32)
        assert np.isfinite(back).all()
        assert (back[1] == 0).all()
        assert np.abs(back).max() <= 6 * 2.0**-127


def test_the_worked_example():
    """Checkpoint format, section 5."""
    w = np.zeros((1, 32), np.float32)
    w[0, :8] = 0.10, -0.03, 0.25, 0, -0.17, 0.06, 0.21, -0.25
    packed, scale = quantize_mxfp4(w)
    assert scale[0, 0] == 123
    assert [hex(b) for b in packed[0, :4]] == ["0x93", "0x6", "0x2d", "0xe5"]


@pytest.mark.parametrize(
    ("amax", "ours", "ocp"),
    [(7.0, 128, 127), (7.5, 128, 127), (3.5, 127, 126), (3.6, 127, 126), (5.0, 127, 127), (6.9, 127, 127)],
)  # fmt: skip
def test_scale_rules(amax, ours, ocp):
    w = np.full((1, 32), amax, np.float32)
    assert quantize_mxfp4(w)[1][0, 0] == ours
    assert quantize_mxfp4(w, "ocp")[1][0, 0] == ocp


def test_encoding_decoded_weights_gives_the_same_bytes():
    """So that an import as bfloat16 and an export leave what was not trained as it was."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(64, 256)) * np.exp(rng.normal(size=(64, 1)) * 3)
    w[rng.random(w.shape) < 0.1] = -0.0
    packed, scale = quantize_mxfp4(w.astype(np.float32))
    again = quantize_mxfp4(dequantize_mxfp4(packed, scale, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(again[1], scale)


def test_weights_that_are_not_finite_are_refused():
    for bad in (np.nan, np.inf):
        w = np.ones((1, 32), np.float32)
        w[0, 5] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize_mxfp4(w)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[5, 0, 1, 9], [0, 0, 0, 0], [0, 3, 0, 0], [40, 1, 0, 22]])
@pytest.mark.parametrize("at_once", [1, 2**28])
def test_grouped_product_is_that_of_the_decoded_matrices(dtype, sizes, at_once, monkeypatch):
    monkeypatch.setattr(grouped_module, "DECODED_BYTES", at_once)
    rng = np.random.default_rng(1)
    K, N, M = 2 * GROUP, 24, sum(sizes) + 3  # three rows belong to no expert
    packed, scale = quantize_mxfp4(rng.normal(size=(len(sizes), N, K)).astype(np.float32))
    x = jnp.asarray(rng.normal(size=(M, K)), dtype)
    sizes = jnp.asarray(sizes, jnp.int32)
    got = jax.jit(grouped_matmul_mxfp4)(x, packed, scale, sizes)
    w = jnp.asarray(dequantize_mxfp4(packed, scale, np.float32).swapaxes(1, 2), dtype)
    want = grouped_matmul(x, w, sizes, backend="reference")
    # One product in another order: float32 to rounding, bfloat16 to its last bit.
    rtol, atol = (1e-5, 1e-5) if dtype == "float32" else (1e-2, 1e-2)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=rtol, atol=atol
    )


def test_experts_without_rows_are_not_decoded():
    """Their codes may be anything: NaN scales do not reach the result."""
    packed = np.full((3, 8, 16), 0x22, np.uint8)
    scale = np.full((3, 8, 1), 127, np.uint8)
    scale[1] = 255
    x = jnp.ones((4, 32))
    y = grouped_matmul_mxfp4(x, jnp.asarray(packed), jnp.asarray(scale), jnp.array([2, 0, 2]))
    assert (np.asarray(y) == 32).all()
