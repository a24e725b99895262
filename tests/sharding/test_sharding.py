"""Mesh and rules: sizes that do not fit are refused by name, every parameter is placed, 8 devices equal one."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from k3jax.optim.build import OptimConfig
from k3jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh
from k3jax.sharding.rules import RULES, logical_axes, partition_spec, state_shardings
from k3jax.train_state import abstract_model, init_state
from k3jax.train_step import make_train_step
from tests.model_helpers import build, random_tokens, tiny_config

CFG = tiny_config(num_layers=3, pattern=("kda",), closing=("mla",))


@pytest.fixture(scope="module")
def axes():
    return logical_axes(build(CFG))


def test_kf_061_sizes_that_do_not_divide_are_named(axes):
    mesh = make_mesh(MeshConfig(data=1, fsdp=5), jax.devices()[:5])
    _, params, _ = abstract_model(CFG)
    with pytest.raises(
        ValueError, match=r"size 32\) does not divide over mesh axis fsdp of size 5"
    ):
        state_shardings(params, axes, mesh)
    with pytest.raises(ValueError, match="needs 6 devices, 8 are here"):
        make_mesh(MeshConfig(data=3, fsdp=2))
    with pytest.raises(ValueError, match="'haeds' has no rule"):
        partition_spec(("embed", "haeds"))


def test_kf_061_every_rule_serves_a_parameter_and_every_parameter_a_rule(axes):
    _, params, _ = abstract_model(CFG)
    paths = {"/".join(str(k.key) for k in path) for path, _ in jax.tree.leaves_with_path(params)}
    assert set(axes) == paths
    used = {axis for names in axes.values() for axis in names if axis is not None}
    assert used == set(RULES)


def test_a_mesh_axis_serves_one_dimension():
    assert partition_spec(("embed", "latent")) == PartitionSpec("fsdp", None)
    assert partition_spec(("layers", "experts", "latent", "ffn")) == PartitionSpec(
        None, None, "fsdp", None
    )


@pytest.mark.parametrize("bad", [{"data": 0}, {"fsdp": -2}, {"data": -1, "fsdp": -1}])
def test_bad_mesh_sizes_are_refused(bad):
    with pytest.raises(ValueError, match=r"mesh\.data="):
        MeshConfig(**bad)


@pytest.mark.devices
def test_eight_devices_equal_one(axes):
    """Two training steps on 2 x 4 devices: the loss, the load and the router biases of one device."""
    optim = OptimConfig(peak_lr=1e-2, final_lr=1e-3, warmup_fraction=0.0, ns_dtype="float32")
    cfg = SimpleNamespace(model=replace(CFG, remat="none"), optim=optim, steps=10)
    batch = {
        "tokens": random_tokens(CFG, (1, 8, 16)),
        "segment_ids": np.sort(np.random.default_rng(0).integers(1, 3, (1, 8, 16)), -1).astype(
            np.int32
        ),
    }
    results = []
    for devices, sizes in ((jax.devices()[:1], (1, 1)), (jax.devices(), (2, 4))):
        mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1]), devices)
        state = init_state(cfg.model, cfg.optim, jax.random.key(0))
        state = jax.device_put(state, state_shardings(state, axes, mesh))
        placed = jax.device_put(batch, batch_sharding(mesh))
        step, metrics = make_train_step(cfg), []
        for _ in range(2):
            state, m = step(state, placed)
            metrics.append((float(m["loss"]), np.asarray(m["expert_load"])))
        results.append((metrics, jax.tree.map(np.asarray, state.buffers)))
    (one, one_bias), (eight, eight_bias) = results
    for (loss, load), (other_loss, other_load) in zip(one, eight, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        np.testing.assert_allclose(other_load, load, rtol=0.05)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-2), one_bias, eight_bias)
