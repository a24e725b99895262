"""The exchange of experts' rows compiles for TPUs, whose ragged all-to-all no CPU has."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.layers.feed_forward import ActivationConfig
from k3jax.layers.latent_moe import LatentMoEConfig
from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES, environment
from k3jax.sharding.annotate import Buffer, region
from k3jax.sharding.mesh import ROWS, MeshConfig, make_mesh
from k3jax.sharding.rules import logical_axes, state_specs

CFG = LatentMoEConfig(
    num_experts=16,
    num_active=4,
    ffn_dim=256,
    latent_dim=512,
    latent_norm=True,
    num_shared=1,
    router="sigmoid",
    renormalize=True,
    routed_scale=1.0,
    num_groups=1,
    num_active_groups=1,
    balancing="none",
    num_bins=1,
    weights="plain",
)
WIDTH, TOKENS = 1024, 512


def compiled(chip, **sizes):
    """A forward and backward pass of a layer over the four devices of a topology."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    mesh = make_mesh(MeshConfig(data=1, **sizes), topology.devices[:4])
    model = nnx.eval_shape(
        lambda: CFG.build(
            WIDTH,
            activation=ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0),
            norm_eps=1e-5,
            rngs=nnx.Rngs(0),
            param_dtype="float32",
            init_std=0.02,
        )
    )
    graphdef, *states = nnx.split(model, nnx.Param, Buffer)
    params, buffers = map(nnx.to_pure_dict, states)
    specs, rows = state_specs(params, logical_axes(model), mesh.shape), PartitionSpec(ROWS)

    def step(params, buffers, x, d_y):
        def apply(params, x):
            return nnx.merge(graphdef, params, buffers)(x)[0]

        y, pull = jax.vjp(apply, params, x)
        return y, *pull(d_y)

    x = jax.ShapeDtypeStruct((4, TOKENS, WIDTH), jnp.bfloat16)
    in_specs = specs, PartitionSpec(), rows, rows
    args = jax.tree.map(
        lambda spec, tree: jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
            tree,
        ),
        in_specs,
        (params, buffers, x, x),
        is_leaf=lambda a: isinstance(a, PartitionSpec),
    )
    step = region(step, mesh, in_specs, (rows, specs, rows))
    return jax.jit(step).trace(*args).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_forward_and_backward_compile(chip, monkeypatch):
    """Tokens travel by ragged all-to-all, twice forward and three times backward, and once more
    in the loops of further rounds; the experts are the kernels."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    with jax.default_matmul_precision("default"):  # conftest's has no bfloat16 products
        hlo = compiled(chip, expert=4).as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    exchange = r" ragged-all-to-all(-start)?\("
    assert len(re.findall(exchange, entry)) == 2 + 3
    assert len(re.findall(exchange, hlo)) == 2 * (2 + 3)
    kernels = set(re.findall(r"(experts_[a-z_]+)/pallas_call", hlo))
    assert kernels == {
        "experts_up", "experts_down", "experts_down_dx", "experts_up_dx", "experts_up_dw",
        "experts_down_dw",
    }  # fmt: skip
