"""A training step does not depend on the mesh: whole on 6 meshes, gradients and statistics on 35 more."""

import itertools
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from k3jax.decode_state import decode_state_specs, init_decode_state
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.model import K3Config, LayerStats
from k3jax.optim.build import OptimConfig
from k3jax.sharding.annotate import region
from k3jax.sharding.mesh import AXES, ROWS, MeshConfig, batch_sharding, make_mesh, rows_sharding
from k3jax.sharding.rules import logical_axes, state_specs
from k3jax.train_state import abstract_state, init_params, init_state, merge, split
from k3jax.train_step import make_eval_step, make_gradients, make_train_step
from tests.model_helpers import build, random_tokens, tiny_config

pytestmark = pytest.mark.devices

BASE = tiny_config(
    num_layers=2, pattern=("kda",), closing=("mla",), num_dense_layers=0, remat="outputs"
)
assert BASE.moe is not None
# Every dimension that an axis splits has room for 8 ways; rank 12 has room for 4 only.
MOE = replace(BASE.moe, num_experts=16, num_active=3)
MODEL = replace(
    BASE,
    kda=replace(BASE.kda, num_heads=8, gate_rank=12),
    mla=replace(BASE.mla, num_heads=8),
    moe=MOE,
)
OPTIM = OptimConfig(peak_lr=1e-2, final_lr=1e-3, warmup_fraction=0.0, ns_dtype="float32")
CONFIG = SimpleNamespace(model=MODEL, optim=OPTIM, steps=10)
A, B, T = 2, 8, 40
BYTES = np.arange(MODEL.vocab_size) % 5

SHAPES = [
    shape
    for devices in (1, 2, 8)
    for shape in itertools.product((1, 2, 4, 8), repeat=len(AXES))
    if math.prod(shape) == devices
]
# Mixtures in which every axis meets every other one.
QUICK = [(1, 1, 1, 8, 1), (2, 2, 2, 1, 1), (1, 2, 1, 2, 2), (1, 1, 2, 2, 2), (2, 1, 1, 1, 4),
         (1, 2, 2, 2, 1)]  # fmt: skip


@cache
def batch() -> dict[str, np.ndarray]:
    """Documents that cross the windows of a row, one row of a single document, padding, an empty row."""
    rng = np.random.default_rng(1)
    segment_ids = np.sort(rng.integers(1, 5, (A, B, T)), axis=-1)
    segment_ids[0, 0] = 1
    segment_ids[0, 1, T // 3 :] = 0
    segment_ids[1, 2] = 0
    tokens = np.asarray(random_tokens(MODEL, (A, B, T)))
    return {"tokens": tokens, "segment_ids": np.int32(segment_ids)}


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def mesh_of(shape: tuple[int, ...]):
    sizes = dict(zip(AXES, shape, strict=True))
    return make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(shape)])


@cache
def run(shape: tuple[int, ...] | None):
    """What one step, and the validation of its result, give on a mesh; None: without a mesh."""
    key = jax.random.key(0)
    if shape is None:
        state, placed, mesh = init_state(MODEL, OPTIM, key), batch(), None
        rows = {name: x[0] for name, x in placed.items()}
        return measure(state, placed, rows, mesh)
    mesh = mesh_of(shape)
    wanted = jax.tree.map(lambda x: x.sharding, abstract_state(MODEL, OPTIM, mesh))
    with jax.set_mesh(mesh):
        state = jax.jit(lambda key: init_state(MODEL, OPTIM, key, mesh))(key)
        assert_placed(state, wanted)  # born sharded
        placed = jax.device_put(batch(), batch_sharding(mesh))
        rows = jax.device_put({n: x[0] for n, x in batch().items()}, rows_sharding(mesh))
        found = measure(state, placed, rows, mesh)
    return found


def measure(state, placed, rows, mesh):
    before = as_numpy(state.params)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(CONFIG, BYTES, mesh=mesh)
    state, metrics = step(state, placed)
    assert_placed(state, shardings)
    update = jax.tree.map(lambda a, b: a - b, as_numpy(state.params), before)
    evaluated = make_eval_step(CONFIG, BYTES, mesh=mesh)(state.params, state.buffers, rows)
    return {
        "parameters": before,
        "moments": as_numpy(state.opt_state),
        "update": update,
        "biases": as_numpy(state.buffers),
        "metrics": as_numpy(metrics),
        "evaluated": as_numpy(evaluated),
    }


def assert_placed(state, shardings):
    def check(x, sharding):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)

    jax.tree.map(check, state, shardings)


def assert_close(found, wanted, tolerance):
    """Largest difference of a leaf against the leaf's largest value."""

    def compare(path, a, b):
        scale = max(np.abs(b).max(initial=0), 1e-6)
        error = np.abs(np.float64(a) - np.float64(b)).max(initial=0) / scale
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: off by {error:.1e} of {scale:.1e}"

    jax.tree_util.tree_map_with_path(compare, found, wanted)


@cache
def gradients(shape: tuple[int, ...] | None, model: K3Config = MODEL):
    """Gradients, sums and pooled statistics of a batch on a mesh; None: without a mesh."""
    params, buffers = init_params(model, jax.random.key(0))
    if shape is None:
        return as_numpy(jax.jit(make_gradients(model, BYTES, None))(params, buffers, batch()))
    mesh = mesh_of(shape)
    where = jax.tree.map(lambda x: x.sharding, abstract_state(model, OPTIM, mesh))
    with jax.set_mesh(mesh):
        placed = jax.device_put((params, buffers), (where.params, where.buffers))
        rows = jax.device_put(batch(), batch_sharding(mesh))
        return as_numpy(jax.jit(make_gradients(model, BYTES, mesh))(*placed, rows))


def assert_same_statistics(found, wanted):
    """Counts are exact; a residual on the edge of a bin may fall on either side of it."""
    is_layer = {"is_leaf": lambda x: isinstance(x, LayerStats)}
    pairs = zip(
        jax.tree.leaves(found, **is_layer), jax.tree.leaves(wanted, **is_layer), strict=True
    )
    for (router, max_logit), (same_router, same_max_logit) in pairs:
        if same_max_logit is not None:
            np.testing.assert_allclose(max_logit, same_max_logit, rtol=1e-5)
        if same_router is None:
            continue
        for field in ("count", "load", "all_tied"):
            np.testing.assert_array_equal(getattr(router, field), getattr(same_router, field))
        moved = np.abs(np.cumsum(router.statistics - same_router.statistics, axis=-1))
        np.testing.assert_array_equal(moved[..., -1], 0)
        assert moved.sum() <= router.statistics.sum() // 1000, moved.sum()


def named(shape):
    return "-".join(f"{axis}{n}" for axis, n in zip(AXES, shape, strict=True) if n > 1) or "one"


@pytest.mark.parametrize("shape", QUICK, ids=named)
def test_a_step_does_not_depend_on_the_mesh(shape):
    found, wanted = run(shape), run(None)
    assert_close(found["parameters"], wanted["parameters"], 1e-6)
    # After one step the moments are the clipped gradients, and the biases the statistics.
    assert_close(found["moments"], wanted["moments"], 2e-5)
    for part in ("metrics", "biases", "evaluated"):
        assert_close(found[part], wanted[part], 1e-5)
    # Newton-Schulz magnifies what is small: 3.44**5 = 480 times the rounding of a gradient.
    assert_close(found["update"], wanted["update"], 2e-3)


def assert_same_gradients(shape, model):
    grads, sums, total, stats = gradients(shape, model)
    wanted_grads, wanted_sums, wanted_total, wanted_stats = gradients(None, model)
    assert_close(grads, wanted_grads, 2e-5)
    assert_close((sums._asdict(), total), (wanted_sums._asdict(), wanted_total), 1e-5)
    assert_same_statistics(stats, wanted_stats)


@pytest.mark.long
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in QUICK], ids=named)
def test_gradients_and_statistics_do_not_depend_on_the_mesh(shape):
    assert_same_gradients(shape, MODEL)


RELATIVES = {
    "tied": replace(
        MODEL,
        tie_embeddings=True,
        remat="none",
        attn_res=AttnResConfig(kind="none", block_size=None),
    ),
    "dense": replace(MODEL, moe=None, num_dense_layers=2, remat="dots"),
    "no latent": replace(MODEL, moe=replace(MOE, latent_dim=None, latent_norm=False), remat="full"),
    "offload": replace(
        MODEL, attn_res=AttnResConfig(kind="full", block_size=None), remat="offload"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RELATIVES)
def test_nor_do_those_of_other_models_and_policies(name):
    shape = {"no latent": (1, 2, 2, 1, 2)}.get(name, (1, 2, 1, 2, 2))
    assert_same_gradients(shape, RELATIVES[name])


def test_meshes_are_many():
    assert len(SHAPES) == 41
    assert set(QUICK) <= set(SHAPES)


def test_kf_118_a_mesh_of_another_type_is_refused():
    auto = jax.make_mesh((1,) * 5, AXES, devices=jax.devices()[:1], axis_types=(AxisType.Auto,) * 5)
    with pytest.raises(ValueError, match="make_mesh, whose axes are Explicit"):
        make_train_step(CONFIG, mesh=auto)


def test_kf_050_decode_caches_are_split_over_heads_and_not_over_tokens():
    """Prefill and one token on rows 2 x tensor 2: the caches by shape, the outputs of one device."""
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    graphdef, params, buffers = split(build(MODEL))
    specs = state_specs(params, logical_axes(merge(graphdef, params, buffers)), mesh.shape)
    cached = decode_state_specs(MODEL, mesh.shape)
    tokens = np.asarray(random_tokens(MODEL, (4, 9)))

    def run(params, buffers, state, tokens):
        h, _, state = merge(graphdef, params, buffers).hidden(tokens, state=state)
        return h, state

    def decode(run, params, state, place=lambda tokens: tokens):
        first, state = run(params, buffers, state, place(tokens[:, :8]))
        last, state = run(params, buffers, state, place(tokens[:, 8:]))
        return np.concatenate([first, last], axis=1), state

    def placed(tree, specs):
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.device_put(tree, where)

    state = init_decode_state(MODEL, 4, 16)
    wanted, wanted_state = decode(jax.jit(run), params, state)
    rows, everywhere = PartitionSpec(ROWS), jax.tree.map(lambda _: PartitionSpec(), buffers)
    divided = jax.jit(region(run, mesh, (specs, everywhere, cached, rows), (rows, cached)))
    with jax.set_mesh(mesh):
        found, state = decode(
            divided, placed(params, specs), placed(state, cached), lambda x: placed(x, rows)
        )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), state, wanted_state
    )
    shapes = {}
    for stack in state.caches.values():
        for layer in stack.values():
            shapes |= {f: x.addressable_shards[0].data.shape for f, x in layer._asdict().items()}
    assert shapes == {
        "conv": (1, 2, 3, 3, 4, 16),  # layers, rows, taps, streams, heads, channels
        "state": (1, 2, 4, 16, 16),
        "latent": (1, 2, 16, 24),  # every token, whole
    }
