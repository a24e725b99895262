"""Work on whole matrices of sharded arrays: every layout gives the unsharded result, and who does how much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from k3jax.sharding.owners import by_owner, on_explicit_mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")
pytestmark = pytest.mark.devices


def mesh_of(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * 5, devices=devices)


def placed(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def shared_out(x, axes, mesh, *spec, **kwargs):
    """Result of a function that needs whole matrices, and how many a device was given."""
    given = []

    def fn(matrices):  # every entry depends on its place and on its whole matrix
        given.append(len(matrices))
        flat = matrices.reshape(len(matrices), -1)
        return jnp.cumsum(flat, axis=1).reshape(matrices.shape) * jnp.max(flat, axis=1).reshape(
            -1, *(1,) * len(axes)
        )

    y = jax.jit(lambda a: by_owner(fn, a, axes, **kwargs))(placed(x, mesh, *spec))
    assert y.sharding.is_equivalent_to(placed(x, mesh, *spec).sharding, y.ndim)
    (n,) = given
    return np.asarray(y), n


def wanted(x, axes):
    axes = [axis + x.ndim for axis in axes]
    order = [i for i in range(x.ndim) if i not in axes] + list(axes)
    moved = x.transpose(order)
    flat = moved.reshape(*moved.shape[: -len(axes)], -1)
    y = np.cumsum(flat, axis=-1) * flat.max(-1, keepdims=True)
    return y.reshape(moved.shape).transpose(np.argsort(order))


@pytest.mark.parametrize(
    "shape, axes, spec, sizes, given",
    [
        # rows, columns, or both in parts: 8 or 6 (padded) matrices over those that hold parts
        ((8, 16, 6), (-2, -1), (None, "fsdp"), {"fsdp": 8}, 1),
        ((6, 4, 16), (-2, -1), (None, None, "tensor"), {"tensor": 4}, 2),
        ((6, 8, 4), (-2, -1), (None, "fsdp", "tensor"), {"fsdp": 4, "tensor": 2}, 1),
        ((6, 8, 4), (-2, -1), (None, "tensor", "fsdp"), {"fsdp": 4, "tensor": 2}, 1),
        ((6, 8, 4), (-2, -1), (None, ("tensor", "fsdp")), {"fsdp": 4, "tensor": 2}, 1),
        ((9, 8, 4), (-2, -1), (None, ("fsdp", "tensor"), "expert"),
         {"fsdp": 2, "tensor": 2, "expert": 2}, 2),
        # sharded heads, layers and experts stay where they are
        ((3, 8, 4, 5), (-3, -1), (None, "fsdp", "tensor"), {"fsdp": 2, "tensor": 4}, 2),
        ((4, 8, 4, 5), (-3, -1), ("fsdp", None, "tensor"), {"fsdp": 2, "tensor": 4}, 2),
        ((2, 4, 8, 6), (-2, -1), (None, "expert"), {"expert": 4}, 2),
        ((2, 4, 8, 6), (-2, -1), (None, "expert", "fsdp", "tensor"),
         {"expert": 2, "fsdp": 2, "tensor": 2}, 1),
        # three axes in one matrix
        ((3, 4, 2, 8), (-3, -2, -1), (None, "tensor", None, "fsdp"), {"fsdp": 4, "tensor": 2}, 1),
        ((3, 4, 2, 8), (-3, -2, -1), (None, "tensor", "expert", "fsdp"),
         {"fsdp": 2, "tensor": 2, "expert": 2}, 1),
        # no stack: one owner, the others get padding
        ((8, 6), (-2, -1), ("fsdp", "tensor"), {"fsdp": 4, "tensor": 2}, 1),
        ((8, 6), (-2, -1), (), {}, 1),
    ],
)  # fmt: skip
def test_kf_089_whole_matrices_in_every_layout(shape, axes, spec, sizes, given):
    x = numbers(*shape)
    y, n = shared_out(x, axes, mesh_of(**sizes), *spec)
    np.testing.assert_allclose(y, wanted(x, axes), rtol=1e-5, atol=1e-5)
    assert n == given


@pytest.mark.parametrize(
    "count, sizes, given",
    [
        (8, {"data": 8}, 1),
        (9, {"data": 4, "context": 2}, 2),
        (5, {"data": 8}, 1),
        (3, {"data": 8}, 3),  # padding to 8 would more than double what is stored
        (3, {"data": 2, "context": 4}, 2),  # context would
        (1, {"data": 2}, 1),
        (8, {"data": 2, "fsdp": 4}, 1),
        (4, {"data": 2, "fsdp": 4}, 1),  # nothing to gain from copies
    ],
)
def test_copies_share_the_work_where_that_leaves_less(count, sizes, given):
    x = numbers(count, 8, 6)
    y, n = shared_out(x, (-2, -1), mesh_of(**sizes), None, "fsdp")
    np.testing.assert_allclose(y, wanted(x, (-2, -1)), rtol=1e-5, atol=1e-5)
    assert n == given


def test_what_moves_is_cast_and_what_stays_is_not():
    x = numbers(4, 8, 6)
    y, _ = shared_out(x, (-2, -1), mesh_of(tensor=4), "tensor", dtype="bfloat16")
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, wanted(x, (-2, -1)), rtol=1e-5, atol=1e-5)
    y, _ = shared_out(x, (-2, -1), mesh_of(tensor=4), None, "tensor", dtype="bfloat16")
    assert y.dtype == jnp.bfloat16
    assert np.abs(y.astype(np.float32) - wanted(x, (-2, -1))).max() < 0.5


def test_only_arrays_typed_with_a_mesh_are_shared_out():
    x = numbers(4, 8)
    explicit = mesh_of(fsdp=2)
    auto = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert on_explicit_mesh(placed(x, explicit, "fsdp"))
    assert jax.jit(on_explicit_mesh_traced)(placed(x, explicit)) == 1
    assert not on_explicit_mesh(jnp.asarray(x))
    assert not on_explicit_mesh(placed(x, auto, "fsdp"))


def on_explicit_mesh_traced(x):
    return jnp.int32(on_explicit_mesh(x))
