"""SiTU-GLU: every backend against the definition, gradients, extreme and tiny inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.situ import reference, situ, triton_gpu
from tests.pallas_kernels.kda_cases import jit

every_backend = pytest.mark.parametrize("backend", ["triton_gpu", "chunked"])
CAPS = pytest.mark.parametrize("up_cap", [25.0, None])


@pytest.fixture(autouse=True)
def _small_arrays_too(monkeypatch):
    monkeypatch.setattr(triton_gpu, "SMALLEST", 1)


def passes(gate, up, d_out, up_cap, backend):
    out, pull = jax.vjp(lambda *args: situ(*args, 4.0, up_cap, backend=backend), gate, up)
    return out, *pull(d_out)


run = jit(passes, static_argnums=(3, 4))


def make(*shape, scale=3.0, dtype="float32"):
    rng = np.random.default_rng(shape)
    return [jnp.asarray(scale * rng.normal(size=shape), dtype) for _ in range(3)]


def exact(gate, up, d_out, up_cap):
    """The definition and its finite differences, float64."""
    gate, up, d_out = (np.asarray(x, np.float64) for x in (gate, up, d_out))
    step = 1e-6 * np.maximum(1, np.abs(np.stack([gate, up])))
    slopes = [
        (reference.situ(gate + a, up + b, 4.0, up_cap)
         - reference.situ(gate - a, up - b, 4.0, up_cap)) / (2 * (a + b))
        for a, b in ((step[0], 0), (0, step[1]))
    ]  # fmt: skip
    return reference.situ(gate, up, 4.0, up_cap), *(d_out * slope for slope in slopes)


@CAPS
@every_backend
def test_the_definition_and_its_gradients(backend, up_cap):
    inputs = make(3, 777)
    for got, want in zip(run(*inputs, up_cap, backend), exact(*inputs, up_cap), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@CAPS
@every_backend
def test_tiny_and_huge_inputs(backend, up_cap):
    """Relative accuracy down to the smallest; no overflow."""
    sizes = np.float32([1e-20, 1e-6, 1e-3, 0.1, 0.59, 0.61, 3.7, 3.8, 50, 1e4])
    gate, up = (x.ravel() for x in np.meshgrid([*sizes, *-sizes], [*sizes, *-sizes]))
    got = run(*(jnp.asarray(x) for x in (gate, up, np.ones_like(gate))), up_cap, backend)
    with np.errstate(over="ignore"):
        want = reference.situ(gate, up, 4.0, up_cap)
    np.testing.assert_allclose(got[0], want, rtol=2e-6, atol=1e-30)
    assert all(np.isfinite(x).all() for x in got)


@every_backend
def test_bfloat16_is_rounded_once(backend):
    inputs = make(2, 5, 64, dtype="bfloat16")
    got = run(*inputs, 25.0, backend)
    wide = run(*(x.astype(jnp.float32) for x in inputs), 25.0, "chunked")
    for a, b in zip(got, wide, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=4e-3, atol=1e-6)


def test_what_the_kernels_decline(monkeypatch):
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((2048, 512), "bfloat16")
    assert triton_gpu.unsupported(x, x) is None
    assert "int8" in triton_gpu.unsupported(x, jax.ShapeDtypeStruct(x.shape, "int8"))
    small = jax.ShapeDtypeStruct((4, 512), "bfloat16")
    assert "2048 elements" in triton_gpu.unsupported(small, small)
