"""Mesh and rules: sizes that do not fit are refused by name, every parameter is placed."""

import jax
import pytest
from jax.sharding import PartitionSpec

from k3jax.sharding.mesh import AXES, MeshConfig, check_batch, make_mesh
from k3jax.sharding.rules import RULES, logical_axes, partition_spec, state_specs
from k3jax.train_state import abstract_model
from tests.model_helpers import build, tiny_config

CFG = tiny_config(num_layers=3, pattern=("kda",), closing=("mla",))


@pytest.fixture(scope="module")
def axes():
    return logical_axes(build(CFG))


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def test_kf_061_sizes_that_do_not_divide_are_named(axes):
    """Before anything is compiled: parameter, dimension, mesh axis, sizes, and what would do."""
    _, params, _ = abstract_model(CFG)
    for given, told in (
        ({"fsdp": 5}, "dimension embed of size 32 does not divide over mesh axis fsdp of size 5"),
        ({"expert": 5}, r"experts/w1: dimension experts of size 8 .* use --mesh.expert 4"),
        ({"tensor": 8}, "dimension heads of size 2 does not divide over mesh axis tensor"),
    ):
        with pytest.raises(ValueError, match=told):
            state_specs(params, axes, sizes(**given))
    with pytest.raises(
        ValueError, match="size 896 does not divide over mesh axis expert of size 5"
    ):
        partition_spec(("experts", "latent", "expert_ffn"), (896, 3584, 3072), sizes(expert=5))
    with pytest.raises(ValueError, match="size 12 does not divide over mesh axis tensor of size 8"):
        partition_spec(("embed", "heads", "key"), (64, 12, 16), sizes(tensor=8))
    with pytest.raises(ValueError, match="needs 6 devices, 8 are here"):
        make_mesh(MeshConfig(data=3, fsdp=2))
    with pytest.raises(ValueError, match="'haeds' has no rule"):
        partition_spec(("embed", "haeds"), (32, 2), sizes())


def test_kf_061_every_rule_serves_a_parameter_and_every_parameter_a_rule(axes):
    _, params, _ = abstract_model(CFG)
    paths = {"/".join(str(k.key) for k in path) for path, _ in jax.tree.leaves_with_path(params)}
    assert set(axes) == paths
    used = {axis for names in axes.values() for axis in names if axis is not None}
    assert used == set(RULES)


def test_a_mesh_axis_serves_one_dimension():
    wide = sizes(data=2, fsdp=2, expert=2, context=2, tensor=2)
    assert partition_spec(("embed", "latent"), (32, 16), wide) == PartitionSpec(
        ("fsdp", "context", "expert", "tensor"), None
    )
    assert partition_spec(
        ("layers", "experts", "latent", "expert_ffn"), (3, 8, 16, 12), wide
    ) == PartitionSpec(None, "expert", ("fsdp", "context", "tensor"), None)
    # Heads are split while the layer computes, so `tensor` is taken; 12 has room for 4 ways only.
    assert partition_spec(("embed", "heads", "key"), (12, 2, 16), wide) == PartitionSpec(
        ("fsdp", "context"), "tensor", None
    )


def test_vectors_are_whole_everywhere_but_for_heads():
    wide = sizes(fsdp=2, tensor=2)
    assert partition_spec(("layers", "embed"), (3, 32), wide) == PartitionSpec(None, None)
    assert partition_spec(("heads",), (2,), wide) == PartitionSpec("tensor")


def test_batches_that_do_not_divide_are_refused():
    mesh = make_mesh(MeshConfig(fsdp=2, context=4))
    check_batch(mesh.shape, rows=2, tokens=16)
    with pytest.raises(ValueError, match=r"3 rows per pass .* = 2: choose --batch-size"):
        check_batch(mesh.shape, rows=3, tokens=16)
    with pytest.raises(ValueError, match=r"seq_len=130 tokens .* mesh.context=4"):
        check_batch(mesh.shape, rows=2, tokens=130)


@pytest.mark.parametrize("bad", [{"data": 0}, {"fsdp": -2}, {"data": -1, "fsdp": -1}])
def test_bad_mesh_sizes_are_refused(bad):
    with pytest.raises(ValueError, match=r"mesh\.data="):
        MeshConfig(**bad)
