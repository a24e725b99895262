"""KF-121: whether the collectives that the library uses are right where the tests run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.sharding.annotate import region
from k3jax.sharding.mesh import MeshConfig, make_mesh

RANKS = 4  # of an axis, beside another axis of 2
NEXT = [(i, i + 1) for i in range(RANKS - 1)]

# name -> (of a device's [4, 3], of all devices' [2 groups, 4 ranks, 4, 3])
PRIMITIVES = {
    "psum": (
        lambda x: jax.lax.psum(x, "context"),
        lambda x: np.broadcast_to(x.sum(1, keepdims=True), x.shape),
    ),
    "pmax": (
        lambda x: jax.lax.pmax(x, "context"),
        lambda x: np.broadcast_to(x.max(1, keepdims=True), x.shape),
    ),
    "psum_scatter": (
        lambda x: jax.lax.psum_scatter(x, "context", scatter_dimension=0, tiled=True),
        lambda x: x.sum(1)[:, :, None],
    ),
    "all_gather": (
        lambda x: jax.lax.all_gather(x, "context", axis=0, tiled=True),
        lambda x: np.broadcast_to(x.reshape(2, 1, 16, 3), (2, 4, 16, 3)),
    ),
    "all_to_all": (
        lambda x: jax.lax.all_to_all(x, "context", 0, 0, tiled=True),
        lambda x: np.swapaxes(x, 1, 2),
    ),
    "ppermute": (
        lambda x: jax.lax.ppermute(x, "context", NEXT),
        lambda x: np.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))),
    ),
}


@functools.cache
def fault(name: str) -> str | None:
    """What is wrong with a primitive; None if three runs in two types give the right numbers."""
    primitive, expected = PRIMITIVES[name]
    mesh = make_mesh(MeshConfig(data=2, context=RANKS))
    both = P(("data", "context"))
    run = jax.jit(region(lambda x: primitive(x[0])[None], mesh, both, both))
    numbers = np.random.default_rng(0).integers(-8, 8, (2, RANKS, 4, 3))
    for dtype in ("float32", "bfloat16"):
        for _ in range(3):
            x = jnp.asarray(numbers.reshape(8, 4, 3), dtype)
            got = run(jax.device_put(x, jax.NamedSharding(mesh, both)))
            want = expected(numbers)
            got = np.asarray(got, np.float32).reshape(want.shape)
            if not np.array_equal(got, want):
                return f"{name} of {dtype} is wrong on backend {jax.default_backend()}"
    return None


@pytest.fixture(scope="session")
def collectives():
    """For tests that need right collectives: skips them, naming what the environment gets wrong."""
    faults = [reason for name in PRIMITIVES if (reason := fault(name))]
    if faults:
        pytest.skip(f"environment: {'; '.join(faults)}")
