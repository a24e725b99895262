"""Kernels on several devices; choosing among backends otherwise: test_kda_api.py."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from k3jax.pallas_kernels import dispatch

BACKENDS = {
    "pallas_tpu": (lambda: "kernel", dispatch.always),
    "chunked": (lambda: "portable", dispatch.always),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(dispatch, "_used", {})


def chosen(requested=None):
    return dispatch.choose("op", BACKENDS, requested)()


@pytest.mark.devices
def test_several_devices_take_it_inside_shard_map_only(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    with caplog.at_level("INFO", "k3jax"):
        assert chosen() == "portable"
    assert "not pallas_tpu: 8 devices, and this is outside shard_map" in caplog.text
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def body(x):
        seen.append(chosen())
        return x

    split = PartitionSpec(("data", "fsdp"))
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split))(jax.numpy.ones(8))
    assert seen == ["kernel"]
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    with jax.set_mesh(one):
        assert chosen() == "kernel"


@pytest.mark.devices
def test_the_mesh_says_what_is_compiled_for():
    """Ahead of time the process runs on another platform than the program will."""
    assert dispatch.platform() == "cpu"
    kind = AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu")
    for sizes, expected in (((4,), "portable"), ((1,), "kernel")):
        mesh = AbstractMesh(sizes, ("data",), abstract_device=kind)
        with jax.sharding.use_abstract_mesh(mesh):
            assert (dispatch.platform(), chosen()) == ("tpu", expected)
