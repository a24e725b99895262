"""One optimizer step as a pure function: forward, backward, update, clipping, balancing."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from k3jax.layers.quantile_balancing import pool_over_devices, pool_stats
from k3jax.losses import cross_entropy, next_token_targets
from k3jax.model import K3, K3Config, LayerStats, Stats, apply_balancing
from k3jax.optim.build import OptimConfig
from k3jax.optim.qk_clip import qk_clip
from k3jax.optim.schedule import learning_rate
from k3jax.sharding.annotate import axis_size, pmax, psum, region, split_tokens, sum_over_replicas
from k3jax.sharding.context_parallel import from_next
from k3jax.sharding.mesh import AXES, ROWS, batch_sharding, rows_sharding
from k3jax.stacks import plan_stacks
from k3jax.train_state import TrainState, abstract_model, make_optimizer, merge, weight_specs

Batch = dict[str, Int[Array, "A B T"]]  # "tokens" and "segment_ids"; A accumulation steps
Metrics = dict[str, Array]


class Run(Protocol):
    """What a step needs of an experiment; `k3jax.configs.experiment.ExperimentConfig` has it."""

    @property
    def model(self) -> K3Config: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def steps(self) -> int: ...


class Sums(NamedTuple):
    """Totals over the supervised tokens of some rows."""

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    bytes: Float[Array, ""]  # of the predicted tokens; 0 if the tokenizer has no byte counts
    rows: Float[Array, ""]  # rows with at least one supervised token


def make_train_step(
    cfg: Run, token_bytes: Int[np.ndarray, " X"] | None = None, *, mesh: Mesh | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step of a run, jitted; it takes over the memory of the state it is given.

        L = sum of nats / number of supervised tokens, over all rows of all micro-batches

    With A micro-batches gradients are added in float32, and the statistics of QB and QK-Clip are
    pooled, so that A changes memory but nothing else. If the loss or the gradient is not finite,
    parameters, optimizer state and router biases stay as they were, and only the counters move on
    (so does the position in the data): one bad batch costs one step, and the caller stops after
    `optim.max_skipped_steps` in a row (`state.skipped`).

    Args:
        cfg: model, optimizer and number of steps.
        token_bytes: UTF-8 length of each token id, for bits per byte.
        mesh: devices to divide the work over, with the state and the batch placed as in
            `abstract_state` and `batch_sharding`; call the step under `jax.set_mesh(mesh)`.

    Returns: train_step(state, batch) -> (state, metrics). Batches are int32 [A, B, T] "tokens" and
        "segment_ids" (0 is padding); any number of documents per row runs in the same program.
        Metrics, float32 unless said otherwise:
          loss            nats per supervised token, 0 without any
          nats, tokens, bytes, supervised_rows   the sums of `Sums`
          grad_norm       of the whole gradient before clipping
          lr              learning rate of this step
          expert_load     [MoE layers] fullest expert's tokens over the mean, from layer 0 on
          tied_routers    int32, layers whose router told no experts apart
          max_logit       [MLA layers] largest attention logit, 0 without any
          skipped         int32, 1 if this step changed nothing
    """
    model, optim = cfg.model, cfg.optim
    optimizer = make_optimizer(model, optim)
    gradients = make_gradients(model, token_bytes, mesh)
    schedule = partial(
        learning_rate,
        num_steps=cfg.steps,
        peak=optim.peak_lr,
        final=optim.final_lr,
        warmup_fraction=optim.warmup_fraction,
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, sums, total, stats = gradients(state.params, state.buffers, batch)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(sums.nats) & jnp.isfinite(grad_norm)

        lr = schedule(state.step)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: (p - lr * u).astype(p.dtype), state.params, updates)
        if optim.qk_clip is not None:
            params = _clip_attention(params, stats, optim.qk_clip, model.mla.qk_nope_dim)
        buffers = apply_balancing(model, state.buffers, stats)  # this step routed with the old ones
        new = (params, buffers, opt_state)
        old = (state.params, state.buffers, state.opt_state)
        params, buffers, opt_state = jax.tree.map(partial(jnp.where, finite), new, old)

        skipped = 1 - finite.astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            params=params,
            buffers=buffers,
            opt_state=opt_state,
            key=state.key,
            skipped=(state.skipped + 1) * skipped,
            skipped_total=state.skipped_total + skipped,
        )
        metrics = {
            "loss": sums.nats / total,
            "nats": sums.nats,
            "tokens": sums.tokens,
            "bytes": sums.bytes,
            "supervised_rows": sums.rows,
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped": skipped,
            **_layer_metrics(model, stats),
        }
        return state, metrics

    return jax.jit(train_step, donate_argnums=0)


def make_gradients(
    model: K3Config, token_bytes: Int[np.ndarray, " X"] | None, mesh: Mesh | None
) -> Callable[[dict, dict, Batch], tuple[dict, Sums, Float[Array, ""], Stats]]:
    """gradients(params, buffers, batch) -> (gradients in float32, sums, supervised tokens, stats).

    On a mesh this is the region: every device adds up the gradients of its rows and tokens over all
    micro-batches, and only then are those of replicated parameters summed over the devices.
    """
    graphdef, _, _ = abstract_model(model)

    def loss(params, buffers, rows, total):
        sums, stats = _forward(merge(graphdef, params, buffers), rows, token_bytes, collect=True)
        return sums.nats / total, (sums, stats)

    def gradients(params, buffers, batch):
        batch = _with_targets(batch)
        total = psum(batch["weights"].sum(), *ROWS, "context")
        total = jnp.maximum(total, 1)  # 1: a batch without supervision has loss 0

        def accumulate(grads, rows):
            new, aux = jax.grad(loss, has_aux=True)(params, buffers, rows, total)
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), grads, new), aux

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        grads, (sums, stats) = jax.lax.scan(accumulate, zeros, batch)
        grads = grads if specs is None else sum_over_replicas(grads, specs)
        sums, stats = jax.tree.map(lambda x: x.sum(0), sums), _over_devices(_pool(stats))
        return grads, psum(sums, *AXES), total, stats

    specs = None
    if mesh is None:
        return gradients
    specs, buffer_specs = weight_specs(model, mesh)
    return region(
        gradients,
        mesh,
        in_specs=(specs, buffer_specs, batch_sharding(mesh).spec),
        out_specs=(specs, PartitionSpec(), PartitionSpec(), _stats_specs(model, mesh)),
    )


def make_eval_step(
    cfg: Run, token_bytes: Int[np.ndarray, " X"] | None = None, *, mesh: Mesh | None = None
) -> Callable[[dict, dict, dict[str, Int[Array, "B T"]]], Metrics]:
    """The validation step, jitted: eval_step(params, buffers, batch) -> sums, changing nothing.

    Args:
        cfg: model of the run.
        token_bytes: UTF-8 length of each token id, for bits per byte.
        mesh: as in `make_train_step`; batches are placed as in `rows_sharding`.

    Returns: a function of parameters, router biases and one batch of int32 [B, T] "tokens" and
        "segment_ids". It gives "nats", "tokens" and "bytes": add them over batches, then divide.
    """
    graphdef, _, _ = abstract_model(cfg.model)

    def eval_step(params, buffers, batch):
        rows = {
            name: x[0] for name, x in _with_targets({k: v[None] for k, v in batch.items()}).items()
        }
        sums, _ = _forward(merge(graphdef, params, buffers), rows, token_bytes, collect=False)
        sums = psum(sums, *AXES)
        return {"nats": sums.nats, "tokens": sums.tokens, "bytes": sums.bytes}

    if mesh is not None:
        specs = (*weight_specs(cfg.model, mesh), rows_sharding(mesh).spec)
        eval_step = region(eval_step, mesh, in_specs=specs, out_specs=PartitionSpec())
    return jax.jit(eval_step)


def _stats_specs(model: K3Config, mesh: Mesh) -> Any:
    """Placement of the pooled statistics: everywhere, but for the heads of attention logits."""
    heads: Any = PartitionSpec(None, "tensor" if mesh.shape["tensor"] > 1 else None)
    everywhere: Any = PartitionSpec()

    def of(attention, mixer):
        return LayerStats(
            everywhere if mixer == "moe" else None, heads if attention == "mla" else None
        )

    return {
        plan.name: {f"layer_{j}": of(*model.layers[plan.first + j]) for j in range(plan.size)}
        for plan in plan_stacks(model)
    }


def _with_targets(batch: Batch) -> Batch:
    """The batch [A, B, T] with "targets" and "weights"; a window's last target is the next one's first token."""
    rows = (x.reshape(-1, x.shape[-1]) for x in (batch["tokens"], batch["segment_ids"]))
    tokens, segment_ids = (jnp.concatenate([x, from_next(x)], axis=1) for x in rows)
    found = next_token_targets(tokens, segment_ids)
    found = (x[:, :-1].reshape(batch["tokens"].shape) for x in found)
    return {**batch, **dict(zip(("targets", "weights"), found, strict=True))}


def _forward(model: K3, rows, token_bytes, *, collect: bool) -> tuple[Sums, Stats]:
    """Loss sums of rows [B, T], this device's share, and what the layers report of its tokens."""
    h, stats, _ = model.hidden(rows["tokens"], segment_ids=rows["segment_ids"], collect=collect)
    # Devices that have the same tokens, on the axis "tensor", divide the work of the head.
    flat = split_tokens(h.reshape(-1, h.shape[-1]))
    targets, weights = (split_tokens(rows[name].reshape(-1)) for name in ("targets", "weights"))
    loss = cross_entropy(flat, model.head_kernel(), targets, weights)
    num_bytes = jnp.zeros(())
    if token_bytes is not None:
        sizes = jnp.asarray(token_bytes, jnp.float32)
        num_bytes = (weights * sizes.at[targets].get(mode="fill", fill_value=0)).sum()
    supervised = (pmax(rows["weights"].max(-1), "context")).sum()
    supervised = supervised / (axis_size("context") * axis_size("tensor"))  # that all count it
    return Sums(loss.nats, loss.count, num_bytes, supervised), stats


def _map_layers(fn: Callable[[LayerStats], LayerStats], stats: Stats) -> Stats:
    return jax.tree.map(fn, stats, is_leaf=lambda x: isinstance(x, LayerStats))


def _pool(stats: Stats) -> Stats:
    """Statistics of the whole step from those of its micro-batches, stacked in front."""

    def pool(layer: LayerStats) -> LayerStats:
        router, max_logit = layer
        if router is not None:
            parts = range(router.count.shape[0])
            router = pool_stats(*(jax.tree.map(lambda x, a=a: x[a], router) for a in parts))
        return LayerStats(router, None if max_logit is None else max_logit.max(0))

    return _map_layers(pool, stats)


def _over_devices(stats: Stats) -> Stats:
    """The statistics of all tokens from those of each device's."""

    def pool(layer: LayerStats) -> LayerStats:
        router, max_logit = layer
        if router is not None:
            router = pool_over_devices(router)
        if max_logit is not None:
            max_logit = pmax(max_logit, *ROWS, "context")
            max_logit = jnp.where(jnp.isneginf(max_logit), 0, max_logit)
        return LayerStats(router, max_logit)

    return _map_layers(pool, stats)


def _clip_attention(params: dict, stats: Stats, limit: float, qk_nope_dim: int) -> dict:
    """Apply QK-Clip to every layer that reported attention logits."""
    params = dict(params)
    for stack, layers in stats.items():
        for name, (_, max_logit) in layers.items():
            if max_logit is not None:
                layer = params[stack][name]
                clipped = qk_clip(
                    layer["self_attn"], max_logit, limit=limit, qk_nope_dim=qk_nope_dim
                )
                params[stack] = {**params[stack], name: {**layer, "self_attn": clipped}}
    return params


def _layer_metrics(model: K3Config, stats: Stats) -> Metrics:
    """Figures per layer, in the order of the network."""

    def overload(layer):
        load = layer.router.load.astype(jnp.float32)
        return load.max(-1) / jnp.maximum(load.mean(-1), 1e-9)

    def in_order(field, figure):  # figure: [repeats] of one layer of a stack
        parts = []
        for plan in plan_stacks(model):
            layers = (stats[plan.name][f"layer_{j}"] for j in range(plan.size))
            found = [figure(layer) for layer in layers if getattr(layer, field) is not None]
            if found:
                parts.append(jnp.stack(found, axis=1).reshape(-1))
        return jnp.concatenate(parts) if parts else jnp.zeros(0)

    return {
        "expert_load": in_order("router", overload),
        "tied_routers": in_order("router", lambda x: x.router.all_tied).sum(dtype=jnp.int32),
        "max_logit": in_order("max_logit", lambda x: x.max_logit.max(-1)),
    }
