"""Everything that a training step changes, as plain arrays in nested dicts."""

import functools
import inspect
import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, UInt32

from k3jax.layers.mla import MLAConfig
from k3jax.optim.build import OptimConfig, build_optimizer
from k3jax.sharding.annotate import Buffer
from k3jax.sharding.rules import logical_axes, partition_spec, state_shardings, state_specs

POOLED_SIZE = 2**20  # elements; larger weights have draws of their own


class ModelConfig(Protocol):
    """What training needs of a model's config; `k3jax.model.K3Config` has it."""

    @property
    def mla(self) -> MLAConfig: ...

    def build(self, *, rngs: nnx.Rngs) -> nnx.Module: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """State between two steps; a checkpoint is this and the position in the data."""

    step: Int[Array, ""]  # steps attempted, skipped ones too: the next batch to read
    params: dict[str, Any]  # master weights
    buffers: dict[str, Any]  # router biases, float32; neither differentiated nor in opt_state
    opt_state: optax.OptState
    key: UInt32[Array, "2"]  # raw key of a run's randomness; steps derive theirs with fold_in
    skipped: Int[Array, ""]  # skipped steps in a row, up to now
    skipped_total: Int[Array, ""]  # skipped steps since the first


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """(graphdef, params, buffers) of a model, arrays as pure nested dicts."""
    graphdef, params, buffers = nnx.split(model, nnx.Param, Buffer)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


def merge(graphdef: nnx.GraphDef, params: dict, buffers: dict) -> Any:
    """The model that holds these arrays; the inverse of `split`."""
    return nnx.merge(graphdef, params, buffers)


@functools.cache  # asked for by optimizer, steps and counts; tracing K3 takes seconds
def abstract_model(model: ModelConfig) -> tuple[nnx.GraphDef, dict, dict]:
    """`split` of the model without its numbers: shapes and dtypes in place of arrays."""
    return split(nnx.eval_shape(lambda: model.build(rngs=nnx.Rngs(params=0))))


def make_optimizer(model: ModelConfig, optim: OptimConfig) -> optax.GradientTransformation:
    """The optimizer for a model's parameters; raises ValueError for one that no rule covers."""
    _, params, _ = abstract_model(model)
    return build_optimizer(optim, params, qk_nope_dim=model.mla.qk_nope_dim)


def weight_specs(model: ModelConfig, mesh: Mesh) -> tuple[dict, dict]:
    """Placements of (params, buffers) on a mesh.

    Raises: ValueError as `abstract_state`.
    """
    graphdef, params, buffers = abstract_model(model)
    axes = logical_axes(merge(graphdef, params, buffers))
    return state_specs(params, axes, mesh.shape), state_specs(buffers, axes, mesh.shape)


def abstract_weights(model: ModelConfig, mesh: Mesh | None) -> dict[str, dict]:
    """Shapes and dtypes of "params" and "buffers", on a mesh with placements.

    Raises: ValueError as `abstract_state`.
    """
    _, *weights = abstract_model(model)
    if mesh is not None:

        def on_mesh(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        weights = jax.tree.map(on_mesh, weights, list(weight_specs(model, mesh)))
    return dict(zip(("params", "buffers"), weights, strict=True))


def abstract_state(model: ModelConfig, optim: OptimConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and placements of the state of a run on `mesh`.

    Raises: ValueError, naming parameter and sizes, if one does not divide over the mesh.
    """
    shapes = jax.eval_shape(lambda: init_state(model, optim, jax.random.key(0)))
    shardings = state_shardings(shapes, logical_axes(merge(*abstract_model(model))), mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def init_params(model: ModelConfig, key: Array, mesh: Mesh | None = None) -> tuple[dict, dict]:
    """Random parameters distributed as in `model.build` (from other keys), and zero buffers.

    All small weights with one initialiser are cut from one draw. Call it without `jax.jit` where
    time to the first step matters: XLA compiles a draw in 0.2 s and a cut in 0.02 s on a CPU, and
    outside jit that is once per shape, of which a model has far fewer than weights.

    Args:
        model: model config.
        key: typed key, `jax.random.key(seed)`.
        mesh: where the parameters are to lie; the values do not depend on it. Large ones are drawn
            by every device for itself, cut from no larger array.
    """
    abstract = nnx.eval_shape(lambda: model.build(rngs=nnx.Rngs(params=0)))
    axes = logical_axes(abstract)
    params, pools = {}, {}

    ways: Any = {} if mesh is None else mesh.shape

    def place(path, shape):
        return partition_spec(axes["/".join(path)], shape, ways)

    for i, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(abstract, nnx.Param))):
        init, shape, dtype = variable.get_metadata("init"), variable.shape, variable.dtype
        if math.prod(shape) > POOLED_SIZE:
            draw = partial(init, jax.random.fold_in(key, i), shape, dtype)
            if mesh is None:
                params[path] = draw()
            elif "out_sharding" in inspect.signature(init).parameters:
                params[path] = draw(out_sharding=place(path, shape))
            else:
                params[path] = jax.reshard(draw(), place(path, shape))
            continue
        # Functions of one def that captured equal values: initializers.normal(0.02), twice.
        captured = tuple(cell.cell_contents for cell in init.__closure__ or ())
        pools.setdefault((init.__code__, captured, dtype), (i, init, []))[-1].append((path, shape))
    for (_, _, dtype), (i, init, members) in pools.items():
        sizes = [math.prod(shape) for _, shape in members]
        pool = init(jax.random.fold_in(key, i), (sum(sizes),), dtype)
        starts = itertools.accumulate(sizes, initial=0)
        for (path, shape), start, size in zip(members, starts, sizes, strict=False):
            part = jax.lax.dynamic_slice_in_dim(pool, start, size).reshape(shape)
            params[path] = part if mesh is None else jax.reshard(part, place(path, shape))
    _, _, buffers = split(abstract)
    return unflatten_dict(params), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), buffers)


def init_state(
    model: ModelConfig, optim: OptimConfig, key: Array, mesh: Mesh | None = None
) -> TrainState:
    """The state before the first step; see `init_params` about `jax.jit`.

    Args:
        model: model config.
        optim: optimizer settings.
        key: typed key (`jax.random.key(seed)`) of the initialisation and of the run.
        mesh: call it in `jax.jit` and under `jax.set_mesh(mesh)`, and the state is born sharded.
    """
    init_key, run_key = jax.random.split(key)
    params, buffers = init_params(model, init_key, mesh)
    return state_of(model, optim, run_key, params=params, buffers=buffers)


def state_of(
    model: ModelConfig, optim: OptimConfig, key: Array, *, params: dict, buffers: dict
) -> TrainState:
    """The state before the first step with these parameters, a fresh optimizer, and the run's key."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        buffers=buffers,
        opt_state=make_optimizer(model, optim).init(params),
        key=jax.random.key_data(key),
        skipped=jnp.zeros((), jnp.int32),
        skipped_total=jnp.zeros((), jnp.int32),
    )
