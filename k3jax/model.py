"""Kimi K3: embedding, layers joined by Attention Residuals, norm, head."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.decode_state import Cache, DecodeState, put_repetition, take_repetition
from k3jax.layers.attention_residuals import AttnResConfig, AttnResSite, push
from k3jax.layers.feed_forward import ActivationConfig, FeedForward, Linear
from k3jax.layers.kda import KDAConfig
from k3jax.layers.latent_moe import LatentMoEConfig, RouterStats
from k3jax.layers.mla import MLAConfig
from k3jax.layers.norms import RMSNorm
from k3jax.layers.quantile_balancing import update_bias
from k3jax.layers.recompute import KEPT, Outputs, Remat, Run, recalled, scan, scan_units
from k3jax.sharding.annotate import gathered, lookup, param
from k3jax.sharding.context_parallel import gather_tokens, window
from k3jax.stacks import Attention, Mixer, StackPlan, locate, plan_stacks


@dataclass(frozen=True, kw_only=True)
class K3Config:
    vocab_size: int  # rows of the embedding and of the head
    width: int  # hidden size D
    num_layers: int  # whole groups of `pattern`, then `closing`
    pattern: tuple[Attention, ...]  # the attention of one group, repeated from layer 0 on
    closing: tuple[Attention, ...]  # the attention of the last layers, after the last whole group
    num_dense_layers: int  # first layers with a dense feed-forward in place of experts
    dense_ffn_dim: int  # width of that feed-forward
    kda: KDAConfig
    mla: MLAConfig
    moe: LatentMoEConfig | None  # None: every layer is dense
    activation: ActivationConfig  # of every feed-forward: dense, shared and routed
    attn_res: AttnResConfig
    norm_eps: float  # epsilon of all norms but those inside MLA
    init_std: float  # standard deviation of the normal initialisation
    tie_embeddings: bool  # the head is the transposed embedding
    dtype: str  # compute dtype of activations
    param_dtype: str  # storage dtype of parameters (the master weights in training)
    # What the backward pass recomputes: nothing; all but matmuls; whole layers ("full"); layers, but
    # not the outputs of the routed experts ("routed"), nor those of attention ("outputs"); as
    # "outputs", with all that is kept waiting in host memory ("offload").
    remat: Remat
    # Equal layers are scanned, so that the program does not grow with depth. False: each layer stands
    # for itself; a decoding step is then faster, for no weights are cut out of stacks.
    scan_layers: bool

    def __post_init__(self):
        for name in ("vocab_size", "width", "num_layers", "dense_ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("pattern", "closing"):
            if unknown := [a for a in getattr(self, name) if a not in ("kda", "mla")]:
                raise ValueError(f"model.{name} names {unknown[0]!r}; use kda or mla")
        if not self.pattern:
            raise ValueError("model.pattern is empty; name at least one attention, kda or mla")
        whole, rest = divmod(self.num_layers - len(self.closing), len(self.pattern))
        if rest or whole < 0:
            lengths = f"{len(self.pattern)} n + {len(self.closing)}"
            near = max(whole, 0) * len(self.pattern) + len(self.closing)
            raise ValueError(
                f"model.num_layers={self.num_layers} does not match the layer pattern, which has "
                f"{lengths} layers; use {max(near, 1)} or {near + len(self.pattern)}"
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"model.num_dense_layers={self.num_dense_layers} is outside 0..num_layers={self.num_layers}"
            )
        if self.moe is None and self.num_dense_layers != self.num_layers:
            raise ValueError(
                f"model.moe is None, so all layers are dense: set num_dense_layers={self.num_layers}, "
                f"not {self.num_dense_layers}"
            )
        if self.remat not in get_args(Remat):
            known = ", ".join(get_args(Remat))
            raise ValueError(f"model.remat is {self.remat!r}; use one of {known}")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                raise ValueError(
                    f"model.{name} is {getattr(self, name)!r}; use float32, bfloat16 or float16"
                )

    @property
    def layers(self) -> tuple[tuple[Attention, Mixer], ...]:
        """(attention, mixer) of each layer, index 0 first."""
        groups = (self.num_layers - len(self.closing)) // len(self.pattern)
        attention = self.pattern * groups + self.closing
        return tuple(
            (a, "dense" if i < self.num_dense_layers else "moe") for i, a in enumerate(attention)
        )

    def build(self, *, rngs: nnx.Rngs) -> "K3":
        return K3(self, rngs=rngs)


class LayerStats(NamedTuple):
    """What a layer reports to the training loop; nothing here is differentiated."""

    router: RouterStats | None
    max_logit: Float[Array, " H"] | None  # largest attention logit per MLA head; -inf without any


Stats = dict[str, dict[str, LayerStats]]  # stack -> layer -> stats with a leading axis


class Layer(nnx.Module):
    """One decoder layer: attention and channel mixer, each fed by an AttnRes site (architecture 7.2)."""

    def __init__(self, cfg: K3Config, attention: Attention, mixer: Mixer, *, rngs: nnx.Rngs):
        norm = partial(RMSNorm, cfg.width, eps=cfg.norm_eps, rngs=rngs, param_dtype=cfg.param_dtype)
        site = partial(
            AttnResSite, cfg.width, eps=cfg.norm_eps, rngs=rngs, param_dtype=cfg.param_dtype
        )
        shared = dict(rngs=rngs, param_dtype=cfg.param_dtype, init_std=cfg.init_std)
        self.attn_res = cfg.attn_res
        self.attention = attention
        self.mixer = mixer
        self.input_layernorm = norm()
        self.self_attn = (cfg.kda if attention == "kda" else cfg.mla).build(cfg.width, **shared)
        self.post_attention_layernorm = norm()
        if mixer == "dense":
            self.mlp = FeedForward(
                cfg.width, cfg.dense_ffn_dim, activation=cfg.activation, **shared
            )
        else:
            assert cfg.moe is not None
            self.block_sparse_moe = cfg.moe.build(
                cfg.width, activation=cfg.activation, norm_eps=cfg.norm_eps, **shared
            )
        if cfg.attn_res.kind != "none":
            self.self_attention_res = site()
            self.mlp_res = site()

    def __call__(
        self,
        bank: Float[Array, "M B T D"],
        prefix: Float[Array, "B T D"],
        index: int | Int[Array, ""],
        segment_ids: Int[Array, "B S"] | None,
        cache: Cache | None = None,
        length: Int[Array, " B"] | None = None,
        page_table: Int[Array, "B M"] | None = None,
        *,
        collect: bool = False,
        written: bool = False,
        kept: Outputs | None = None,
    ) -> tuple[Float[Array, "M B T D"], Float[Array, "B T D"], Cache | None, LayerStats, Outputs]:
        """Read the mixtures, add the two sub-layer outputs; returns (bank, prefix, cache, stats, outputs).

        `segment_ids` are those of the whole row, of which the T tokens here may be one window.
        `collect`: report what balancing and QK-Clip need. `written`: the bank is the final one (see `push`).
        `kept`: outputs of an earlier pass, which are not computed again (see `recalled`).
        """
        read, max_logit = self.attn_res.kind != "none", None
        kept = kept or Outputs()
        if read:
            count, pushed = self.attn_res.before_attention(index)
            x, bank = self.self_attention_res.normed(bank, count, prefix, self.input_layernorm)
            bank, prefix = push(bank, count, prefix, pushed, written=written)
        else:
            x = self.input_layernorm(prefix)
        attention: Any = self.self_attn
        if kept.attention is not None:
            y = _recalled(attention, lambda m, *args: m(*args)[0], kept.attention, x, segment_ids)
        elif self.attention == "kda":
            y, cache = attention(x, segment_ids, cache)
        else:
            y, cache, max_logit = attention(x, segment_ids, cache, length, page_table)
        prefix = prefix + y

        if read:
            count, pushed = self.attn_res.before_mixer(index)
            x, bank = self.mlp_res.normed(bank, count, prefix, self.post_attention_layernorm)
            bank, prefix = push(bank, count, prefix, pushed, written=written)
        else:
            x = self.post_attention_layernorm(prefix)
        mixed, u, router = self._mix_channels(x, segment_ids, collect, kept)
        if max_logit is not None and segment_ids is not None:
            # Where there is nothing but padding: no logit, which is below any that others have.
            max_logit = jnp.where((segment_ids > 0).any(), max_logit, -jnp.inf)
        stats = LayerStats(router, max_logit if collect else None)
        return bank, prefix + mixed, cache, stats, Outputs(u, y)

    def _mix_channels(self, x, segment_ids, collect, kept):
        """The output, that of the routed experts in the latent, and the router's statistics."""
        if self.mixer == "dense":
            return self.mlp(x), None, None
        mask = None if segment_ids is None else window(segment_ids, x.shape[1]) > 0
        moe, router = self.block_sparse_moe, None
        if kept.routed is None:
            u, router = moe.routed(x, mask, collect)
        else:
            # Forward and backward follow each other here: what has travelled may stay (`keep_rows`).
            again = lambda m, *args: m.routed(*args, keep_rows=True)[0]  # noqa: E731
            u = _recalled(moe, again, kept.routed, x, mask)
        return moe.finish(x, u), u, router


def _recalled(module: nnx.Module, call: Callable, kept: Array, *args: Any) -> Array:
    """`recalled` of call(module, *args)."""
    graphdef, arrays = nnx.split(module)
    return recalled(
        lambda arrays, *args: call(nnx.merge(graphdef, arrays), *args), kept, arrays, *args
    )


class Unit(nnx.Module):
    """The layers of one repetition of a stack, attributes `layer_0`, `layer_1`, ..."""

    def __init__(self, cfg: K3Config, plan: StackPlan, *, rngs: nnx.Rngs):
        self.names = tuple(f"layer_{j}" for j in range(plan.size))
        for j, name in enumerate(self.names):
            setattr(self, name, Layer(cfg, *cfg.layers[plan.first + j], rngs=rngs))

    def __call__(
        self,
        bank,
        prefix,
        first,
        segment_ids,
        caches=None,
        length=None,
        page_table=None,
        *,
        collect=False,
    ):
        """Apply layers `first`, `first` + 1, ...; returns (bank, prefix, caches, stats), the last two by name."""
        new_caches, stats = {}, {}
        for j, name in enumerate(self.names):
            bank, prefix, new_caches[name], stats[name], _ = getattr(self, name)(
                bank,
                prefix,
                first + j,
                segment_ids,
                None if caches is None else caches[name],
                length,
                page_table,
                collect=collect,
            )
        return bank, prefix, new_caches, stats


def _build_stack(cfg: K3Config, plan: StackPlan, key: Array) -> Unit:
    """The units of a stack as one, every leaf with a leading axis."""
    build = nnx.vmap(lambda key: Unit(cfg, plan, rngs=nnx.Rngs(params=key)))
    return build(jax.random.split(key, plan.repeats))


class Embedding(nnx.Module):
    """Token table."""

    def __init__(self, cfg: K3Config, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(cfg.init_std)
        self.embedding = param(
            rngs, init, (cfg.vocab_size, cfg.width), ("vocab", "embed"), cfg.param_dtype
        )

    def __call__(self, tokens: Int[Array, "B T"], dtype: str) -> Float[Array, "B T D"]:
        return lookup(self.embedding, tokens, dtype)


class K3(nnx.Module):
    """The text model of Kimi K3 (architecture 2)."""

    def __init__(self, cfg: K3Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed_tokens = Embedding(cfg, rngs=rngs)
        for plan in plan_stacks(cfg):
            setattr(self, plan.name, _build_stack(cfg, plan, rngs.params()))
        if cfg.attn_res.kind != "none":
            self.output_attn_res = AttnResSite(
                cfg.width, eps=cfg.norm_eps, rngs=rngs, param_dtype=cfg.param_dtype
            )
        self.norm = RMSNorm(cfg.width, eps=cfg.norm_eps, rngs=rngs, param_dtype=cfg.param_dtype)
        if not cfg.tie_embeddings:
            self.lm_head = Linear(
                (cfg.width,), (cfg.vocab_size,), ("embed", "vocab"),
                rngs=rngs, init_std=cfg.init_std, param_dtype=cfg.param_dtype,
            )  # fmt: skip

    def __call__(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T X"]:
        """Logits, float32, of a whole sequence without state; arguments as in `hidden`."""
        return self.logits(self.hidden(tokens, segment_ids=segment_ids)[0])

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecodeState | None = None,
        collect: bool = False,
        embeddings: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Stats, DecodeState | None]:
        """Activations after the final norm: what the head and the loss read.

        Args:
            tokens: token ids.
            segment_ids: document of each token, 1, 2, ... in runs; 0 is padding. None: one document per row.
                With `state`, ids are 1 for real tokens and 0 for padding, which must lie on the right.
            state: decode caches of the tokens before these; without it every row starts afresh.
            collect: also return what balancing and QK-Clip need.
            embeddings: what enters the first layer in place of the tokens' own rows, for example with the features
                of images among them; of `tokens` then only the number counts.

        Returns: activations in the compute dtype, stats (empty entries unless `collect`), the state after the last
        real token (None if none was given).
        """
        cfg = self.cfg
        if embeddings is None:
            prefix = self.embed_tokens(tokens, cfg.dtype)
        else:
            prefix = embeddings.astype(cfg.dtype)
        documents = None if segment_ids is None else gather_tokens(segment_ids)
        bank = jnp.zeros((cfg.attn_res.num_rows(cfg.num_layers), *prefix.shape), prefix.dtype)
        caches, stats = {}, {}
        for plan in plan_stacks(cfg):
            bank, prefix, caches[plan.name], stats[plan.name] = self._stack(
                plan, bank, prefix, documents, collect, state
            )
        if cfg.attn_res.kind == "none":
            h = self.norm(prefix)
        else:
            h, _ = self.output_attn_res.normed(bank, bank.shape[0], prefix, self.norm)
        if state is None:
            return h, stats, None
        new = (
            jnp.full_like(state.length, tokens.shape[1])
            if segment_ids is None
            else (segment_ids > 0).sum(1)
        )
        length = state.length + new.astype(state.length.dtype)
        return h, stats, DecodeState(length, caches, state.page_table)

    def _stack(self, plan, bank, prefix, segment_ids, collect, state):
        """One stack; with caches it is decoding and nothing will be differentiated."""
        graphdef, arrays = nnx.split(getattr(self, plan.name))
        stacked = nnx.to_pure_dict(arrays)
        first = tuple(range(plan.first, plan.first + plan.size * plan.repeats, plan.size))

        if state is not None:

            def cached_step(carry, xs):
                bank, prefix, caches = carry
                (params, i), first = xs
                mine, page_table = take_repetition(caches, state, i)
                bank, prefix, mine, stats = nnx.merge(graphdef, params)(
                    bank, prefix, first, segment_ids, mine, state.length, page_table,
                    collect=collect,
                )  # fmt: skip
                return (bank, prefix, put_repetition(caches, mine, i)), stats

            # The caches are carried, not scanned: so they are updated where they lie.
            caches = state.caches[plan.name]
            numbered = stacked, jnp.arange(plan.repeats, dtype=jnp.int32)
            (bank, prefix, caches), stats = scan(
                cached_step, (bank, prefix, caches), numbered, first
            )
            return bank, prefix, caches, stats

        remat = self.cfg.remat
        if remat in KEPT:
            runs, by_name = self._runs(plan, collect)
            bank, prefix, stats = scan_units(runs, first, remat, by_name, bank, prefix, segment_ids)
            return bank, prefix, None, stats

        def step(carry, xs):
            params, first = xs
            unit = nnx.merge(graphdef, params)
            bank, prefix, _, stats = unit(*carry, first, segment_ids, collect=collect)
            return (bank, prefix), stats

        if remat == "dots":
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            step = jax.checkpoint(step, policy=policy, prevent_cse=False)
        (bank, prefix), stats = scan(step, (bank, prefix), stacked, first)
        return bank, prefix, None, stats

    def _runs(self, plan: StackPlan, collect: bool) -> tuple[tuple[Run, ...], dict[str, Any]]:
        """The runs of a stack's units, and the layers' arrays by name."""
        unit = getattr(self, plan.name)
        split = {name: nnx.split(getattr(unit, name)) for name in unit.names}

        def apply(graphdef, params, index, bank, prefix, segment_ids, *, written=False, kept=None):
            layer = nnx.merge(graphdef, params)
            bank, prefix, _, stats, outputs = layer(
                bank, prefix, index, segment_ids, collect=collect, written=written, kept=kept
            )
            return bank, prefix, stats, outputs

        runs: list[Run] = []
        for _, members in itertools.groupby(
            range(plan.size), lambda j: self.cfg.layers[plan.first + j]
        ):
            start, *_ = positions = list(members)
            names = tuple(unit.names[j] for j in positions)
            runs.append(Run(partial(apply, split[names[0]][0]), names, start))
        by_name = {name: nnx.to_pure_dict(arrays) for name, (_, arrays) in split.items()}
        return tuple(runs), by_name

    def head_kernel(self) -> Float[Array, "D X"]:
        """Matrix from the final activations to logits, in its storage dtype."""
        return (
            gathered(self.embed_tokens.embedding).T
            if self.cfg.tie_embeddings
            else gathered(self.lm_head.kernel)
        )

    def logits(self, h: Float[Array, "B T D"]) -> Float[Array, "B T X"]:
        """Float32 logits; operands in the compute dtype, float32 accumulation."""
        return jnp.einsum(
            "btd,dx->btx", h, self.head_kernel().astype(h.dtype), preferred_element_type=jnp.float32
        )


def take_layer(model: K3, index: int) -> Layer:
    """The layer with this absolute index as a module of its own, with its slice of the stack's parameters."""
    stack, name, repetition = locate(model.cfg, index)
    graphdef, arrays = nnx.split(getattr(getattr(model, stack), name))
    return nnx.merge(graphdef, jax.tree.map(lambda x: x[repetition], arrays))


def apply_balancing(cfg: K3Config, buffers: dict, stats: Stats) -> dict:
    """Router biases for the next step from this step's statistics, layer by layer (architecture 9)."""
    if cfg.moe is None:
        return buffers
    update = jax.vmap(
        partial(update_bias, num_active=cfg.moe.num_active, balancing=cfg.moe.balancing)
    )

    def updated(leaf: dict, layer: LayerStats) -> dict:
        assert layer.router is not None  # every layer with a bias reports, if asked to collect
        bias = leaf["block_sparse_moe"]["router_bias"]
        return {"block_sparse_moe": {"router_bias": update(bias, layer.router)}}

    return {
        stack: {name: updated(leaf, stats[stack][name]) for name, leaf in layers.items()}
        for stack, layers in buffers.items()
    }
