"""Models for tests: tiny configs, golden text models, and a layer-by-layer run beside the scanned one."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.configs.k3 import kimi_k3_model
from k3jax.convert_hf import from_official
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.model import K3, K3Config, take_layer
from k3jax.official_config import config_from_official
from k3jax.sharding.annotate import Buffer
from k3jax.testing import layer_by_layer, random_model
from tests.golden_io import load


def tiny_config(**changes) -> K3Config:
    """Kimi K3 with every mechanism at 16-wide heads: a dense layer, two scanned groups, a closing layer.

    Groups are KDA + MLA, not three to one: fewer layers to compile.
    """
    k3 = kimi_k3_model()
    assert k3.moe is not None
    cfg = replace(
        k3,
        vocab_size=64,
        width=32,
        num_layers=7,
        pattern=("kda", "mla"),
        dense_ffn_dim=48,
        kda=replace(k3.kda, num_heads=2, head_dim=16, gate_rank=16, chunk_size=16),
        mla=replace(
            k3.mla, num_heads=2, q_rank=16, kv_rank=16, qk_nope_dim=16, qk_shared_dim=8, v_dim=16
        ),
        moe=replace(k3.moe, num_experts=8, num_active=2, ffn_dim=16, latent_dim=16, num_bins=64),
        attn_res=AttnResConfig(kind="block", block_size=3),
        dtype="float32",
        remat="none",
    )
    return replace(cfg, **changes)


def build(cfg: K3Config, seed: int = 0) -> K3:
    """`random_model`, whole."""
    return nnx.merge(*random_model(cfg, seed))


def with_params(cfg: K3Config, params, buffers) -> K3:
    """The model that holds these pure dicts."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: K3(cfg, rngs=nnx.Rngs(params=0))))
    return nnx.merge(graphdef, params, buffers)


def split(model: K3):
    """(graphdef, params, buffers) with pure dicts."""
    graphdef, params, buffers = nnx.split(model, nnx.Param, Buffer)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)


@functools.lru_cache(maxsize=4)
def golden_model(folder: str) -> tuple[K3Config, dict, dict]:
    """Config, parameters and buffers of a golden text model."""
    meta, tensors = load(f"{folder}/weights")
    cfg = config_from_official(meta["config"], dtype="float32", param_dtype="float32")
    params, buffers = from_official(cfg, tensors)
    return cfg, *jax.tree.map(jnp.asarray, (params, buffers))


def layer_modules(model: K3):
    """The layers in order, scanned ones taken out of their stack."""
    return (take_layer(model, i) for i in range(model.cfg.num_layers))


def run_unrolled(model: K3, tokens, segment_ids=None):
    """One layer after the other without scan: (h, bank, prefixes after each layer, mix before the final norm)."""
    return layer_by_layer(model, model.embed_tokens(tokens, model.cfg.dtype), segment_ids)


def random_tokens(cfg: K3Config, shape, seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, cfg.vocab_size, shape), jnp.int32)
