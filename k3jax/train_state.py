"""Everything that a training step changes, as plain arrays in nested dicts."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int, UInt32

from k3jax.layers.mla import MLAConfig
from k3jax.optim.build import OptimConfig, build_optimizer
from k3jax.sharding.annotate import Buffer


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


def abstract_model(model: ModelConfig) -> tuple[nnx.GraphDef, dict, dict]:
    """`split` of the model without its numbers: shapes and dtypes in place of arrays."""
    return split(nnx.eval_shape(lambda: model.build(rngs=nnx.Rngs(params=0))))


def make_optimizer(model: ModelConfig, optim: OptimConfig) -> optax.GradientTransformation:
    """The optimizer for a model's parameters; raises ValueError for one that no rule covers."""
    _, params, _ = abstract_model(model)
    return build_optimizer(optim, params, qk_nope_dim=model.mla.qk_nope_dim)


@partial(jax.jit, static_argnums=(0, 1))  # thousands of small operations otherwise
def init_state(model: ModelConfig, optim: OptimConfig, key: Array) -> TrainState:
    """The state before the first step.

    Args:
        model: model config.
        optim: optimizer settings.
        key: typed key (`jax.random.key(seed)`) of the initialisation and of the run.
    """
    init_key, run_key = jax.random.split(key)
    _, params, buffers = split(model.build(rngs=nnx.Rngs(params=init_key)))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        buffers=buffers,
        opt_state=make_optimizer(model, optim).init(params),
        key=jax.random.key_data(run_key),
        skipped=jnp.zeros((), jnp.int32),
        skipped_total=jnp.zeros((), jnp.int32),
    )
