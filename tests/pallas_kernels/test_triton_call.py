"""Launching Triton kernels from JAX: what a launch promises, interpreted, and both ways of jax-triton."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels import triton_call

triton = pytest.importorskip("triton", reason="Triton comes with Linux only")
tl = pytest.importorskip("triton.language")


@triton.jit
def _add(x, n, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    z = tl.load(x + i, mask=i < n).to(tl.float32) + 1.0
    tl.store(y + i, z.to(y.dtype.element_ty), mask=i < n)


@triton.jit
def _add_in_place(x, n, same, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n, other=0.0) + 1.0, mask=i < n)


def call(x, kernel=_add, size=None, **options):
    shape = jax.ShapeDtypeStruct((size or x.size,), x.dtype)
    return triton_call.triton_call(
        kernel, x, x.size, out_shape=[shape], grid=(-(-x.size // 16),), B=16, **options
    )[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_every_element_that_a_kernel_writes(dtype):
    x = jnp.arange(37).astype(dtype)
    np.testing.assert_array_equal(jax.jit(call)(x), x + 1)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="memory holds what was there before")
def test_what_a_kernel_does_not_write_is_nan():
    assert np.isnan(jax.jit(lambda x: call(x, size=64))(jnp.ones(37))[37:]).all()


def test_zeroed_outputs_and_aliases():
    x = jnp.arange(37.0)
    y = jax.jit(lambda x: call(x, size=64, zeroed=(0,)))(x)
    np.testing.assert_array_equal(y[37:], 0)
    y = jax.jit(lambda x: call(x, _add_in_place, aliases={0: 0}))(x)
    np.testing.assert_array_equal(y, jnp.arange(37.0) + 1)


def test_kf_010_a_grid_that_no_gpu_takes_is_refused():
    with pytest.raises(ValueError, match="65536"):
        triton_call.triton_call(_add, jnp.ones(4), 4, out_shape=[], grid=(1, 65536), B=16)


def test_both_ways_of_jax_triton():
    """0.3 passes everything on; in 0.4 outputs have another name, and an alias no pointer."""
    seen = []

    def old(*args, kernel, out_shape, input_output_aliases, grid, **constants):
        seen.append((args, out_shape, input_output_aliases, constants))

    def new(*args, kernel, out_type=None, input_output_aliases, grid, **constants):
        seen.append((args, out_type, input_output_aliases, constants))

    for launch in (old, new):
        arguments = (launch, _add_in_place, ["x", np.float32(2)], ["y"], {0: 0}, {"B": 16})
        triton_call._launch(*arguments, grid=(1,))
    assert seen[0] == (("x", np.float32(2)), ["y"], {0: 0}, {"B": 16})
    assert seen[1] == (("x", 2.0), ["y"], {0: 0}, {"B": 16, "same": 0})
    assert [type(args[1]) for args, *_ in seen] == [np.float32, float]


def test_why_no_kernel_can_run(monkeypatch):
    monkeypatch.setattr(triton_call, "INTERPRETED", False)
    if jax.default_backend() == "cpu":
        assert "needs an NVIDIA GPU" in triton_call.unavailable()
    monkeypatch.setattr(triton_call, "_missing", lambda: "jax_triton not installed")
    assert triton_call.unavailable() == "jax_triton not installed"
