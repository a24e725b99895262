"""The state before a run's first step: random, or the weights of a model folder with a fresh optimizer."""

from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from k3jax import checkpoint
from k3jax.configs.experiment import ExperimentConfig
from k3jax.errors import UserError
from k3jax.run_dir import RunDir, load_config
from k3jax.train_state import TrainState, abstract_model, init_state, state_of


def training_config(path: str) -> ExperimentConfig:
    """The configuration that trains the model of a folder: its own, with float32 master weights.

    Raises: UserError if the folder has no complete checkpoint, or its experts are in 4 bits.
    """
    cfg = load_config(path)
    check_trainable(cfg)
    model = replace(cfg.model, param_dtype="float32")
    return replace(
        cfg, model=model, init_from=str(Path(path).expanduser().absolute()), run_dir=None
    )


def check_trainable(cfg: ExperimentConfig) -> None:
    """Raises UserError if the model cannot be trained."""
    if cfg.model.moe is not None and cfg.model.moe.weights == "mxfp4":
        raise UserError(
            f"the experts of {cfg.name} are in 4 bits, which cannot be trained: import the model "
            "again with --experts bf16"
        )


def initial_state(cfg: ExperimentConfig, mesh: Mesh, abstract: TrainState) -> TrainState:
    """The state before the first step; on a mesh it is born sharded, by one compiled program.

    Args:
        cfg: the run.
        mesh: its devices.
        abstract: shapes, dtypes and placements.

    Raises: UserError if the model of `cfg.init_from` has other parameters.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    key = jax.random.key(cfg.seed)
    if cfg.init_from is not None:
        params, buffers = _loaded(cfg, abstract)
        with jax.set_mesh(mesh):

            def begin(params, buffers):
                like = {"params": abstract.params, "buffers": abstract.buffers}
                given = {"params": params, "buffers": buffers}
                cast = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), given, like)
                return state_of(cfg.model, cfg.optim, jax.random.split(key)[1], **cast)

            return jax.jit(begin, out_shardings=shardings)(params, buffers)
    if mesh.size == 1:  # uncompiled, see `init_params`
        return jax.device_put(init_state(cfg.model, cfg.optim, key), shardings)
    with jax.set_mesh(mesh):
        make = jax.jit(
            lambda: init_state(cfg.model, cfg.optim, jax.random.key(cfg.seed), mesh),
            out_shardings=shardings,
        )
        return make()


def _loaded(cfg: ExperimentConfig, abstract: TrainState) -> tuple[dict, dict]:
    """Parameters and buffers of `cfg.init_from` in its own dtypes, where the run wants them."""
    assert cfg.init_from is not None
    folder = RunDir(cfg.init_from).checkpoints
    saved = load_config(cfg.init_from).model.param_dtype
    _, params, buffers = abstract_model(replace(cfg.model, param_dtype=saved))
    stored = {"params": params, "buffers": buffers}
    placed = {"params": abstract.params, "buffers": abstract.buffers}
    target = jax.tree.map(
        lambda x, leaf: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf.sharding),
        stored,
        placed,
    )
    found = checkpoint.restore(folder, target, parts=tuple(target))
    return found.state["params"], found.state["buffers"]
