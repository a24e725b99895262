"""Kernels on several devices; choosing among backends otherwise: test_kda_api.py."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

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
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
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
