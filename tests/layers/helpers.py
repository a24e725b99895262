"""Layers for tests: built from a fixture's official config and tensors, called through one jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.layers.feed_forward import ActivationConfig
from k3jax.layers.kda import KDAConfig
from k3jax.layers.mla import MLAConfig

TINY_KDA = KDAConfig(
    num_heads=2,
    head_dim=8,
    conv_size=4,
    gate="bounded",
    g_min=-5.0,
    gate_rank=4,
    out_gate_rank=None,
    beta_max=1.0,
    norm_eps=1e-5,
    chunk_size=16,
    backend=None,
)
TINY_MLA = MLAConfig(
    num_heads=2,
    q_rank=8,
    kv_rank=8,
    qk_nope_dim=8,
    qk_shared_dim=4,
    v_dim=6,
    out_gate=True,
    latent_norm_eps=1e-6,
    rope_theta=None,
)


def activation_config(config: dict) -> ActivationConfig:
    if config["hidden_act"] == "silu":
        return ActivationConfig(kind="swiglu", gate_cap=None, up_cap=None)
    return ActivationConfig(
        kind="situ",
        gate_cap=config["activation_situ_beta"],
        up_cap=config["activation_situ_linear_beta"],
    )


def kda_config(config: dict, tensors: dict) -> KDAConfig:
    linear = config["linear_attn_config"]
    g_min = linear.get("gate_lower_bound")
    rank = tensors["weights.f_a_proj.weight"].shape[0]
    return KDAConfig(
        num_heads=linear["num_heads"],
        head_dim=linear["head_dim"],
        conv_size=linear["short_conv_kernel_size"],
        gate="softplus" if g_min is None else "bounded",
        g_min=g_min,
        gate_rank=rank,
        out_gate_rank=None if linear.get("use_full_rank_gate") else rank,
        beta_max=1.0,
        norm_eps=config["rms_norm_eps"],
        chunk_size=16,
        backend=None,
    )


def mla_config(config: dict, latent_norm_eps: float) -> MLAConfig:
    return MLAConfig(
        num_heads=config["num_attention_heads"],
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        qk_nope_dim=config["qk_nope_head_dim"],
        qk_shared_dim=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
        out_gate=config["mla_use_output_gate"],
        latent_norm_eps=latent_norm_eps,
        rope_theta=None,
    )


def official_leaves(params: dict) -> dict[str, np.ndarray]:
    """Parameters or gradients under official names and in official layout: matrices [out, in]."""
    leaves = {}
    for path, value in nnx.traversals.flatten_mapping(params).items():
        name, value = path[0] if path[-1] == path[0] else f"{path[0]}.weight", np.asarray(value)
        if path[-1] != "kernel":
            value = value.reshape(-1)  # vectors, head-major
        elif "conv1d" in name:
            value = value.reshape(value.shape[0], -1).T[:, None]  # W H K -> H*K 1 W
        elif path[0] == "o_proj":
            value = value.reshape(-1, value.shape[-1]).T  # H V D -> D H*V
        else:
            value = value.reshape(value.shape[0], -1).T  # D H K -> H*K D
        leaves[name] = value
    return leaves


def from_official(shapes: dict, tensors: dict, prefix: str = "weights.") -> dict:
    """Official tensors as a parameter tree of these shapes; a name too many or too few fails."""
    wanted = nnx.traversals.flatten_mapping(shapes)
    names = {path: path[0] if len(path) == 1 else f"{path[0]}.weight" for path in wanted}
    stored = {name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    assert stored == set(names.values())

    def convert(path, leaf):
        value = tensors[prefix + names[path]]
        if "conv1d" in path[0]:
            value = value[:, 0]
        return np.ascontiguousarray(value.T if value.ndim == 2 else value).reshape(leaf.shape)

    flat = {path: convert(path, leaf) for path, leaf in wanted.items()}
    return nnx.traversals.unflatten_mapping(flat)


def load_layer(build, tensors: dict):
    """(graphdef, parameters) of the module that `build(rngs)` makes, with a fixture's weights."""
    graphdef, state = jax.eval_shape(lambda: nnx.split(build(nnx.Rngs(0))))
    return graphdef, from_official(nnx.to_pure_dict(state), tensors)


@functools.cache
def caller(graphdef):
    """Compiled `layer(*args)` as a function of (params, *args)."""
    return jax.jit(lambda params, *args: nnx.merge(graphdef, params)(*args))


@functools.cache
def puller(graphdef):
    """Compiled (y, gradients) of sum(y * d_y) by (params, x); y is the layer's first output."""

    def pull(params, x, segment_ids, d_y):
        def run(params, x):
            out = nnx.merge(graphdef, params)(x, *(() if segment_ids is None else (segment_ids,)))
            return out[0] if isinstance(out, tuple) else out

        y, vjp = jax.vjp(run, params, x)
        return y, vjp(d_y)

    return jax.jit(pull)


def segments(*lengths: int, size: int, rows: int = 1) -> np.ndarray:
    """Segment ids of rows that hold documents of these lengths, then padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.tile(np.pad(ids, (0, size - len(ids))).astype(np.int32), (rows, 1))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def check_tracing(graphdef, params, x, cache_args=()) -> None:
    """KF-104: every way of calling a layer leaves it, and jax, as they were (leak checker on)."""
    layer = nnx.merge(graphdef, params)

    def structure():
        kind = jax.tree.map(lambda a: (type(a), a.shape), nnx.to_pure_dict(nnx.state(layer)))
        return nnx.graphdef(layer), kind

    def loss(params, x):
        return nnx.merge(graphdef, params)(x)[0].sum()

    def failing(x):
        layer(x)
        raise RuntimeError("in the middle of a trace")

    before = structure()
    with jax.checking_leaks():
        with pytest.raises(RuntimeError, match="in the middle"):
            jax.jit(failing)(x)
        first = jax.jit(lambda x: layer(x)[0])(x)
        jax.jit(jax.grad(jax.checkpoint(loss)))(params, x)
        _, scanned = jax.jit(
            lambda x: jax.lax.scan(lambda _, x: (None, layer(x)[0]), None, x[None])
        )(x)
        cached = jax.jit(lambda x: layer(x, None, *cache_args)[0])(x)
    eager = layer(jnp.asarray(x))[0]
    assert repr(layer)
    assert structure() == before
    for y in (scanned[0], cached, eager):
        np.testing.assert_allclose(y, first, rtol=1e-4, atol=1e-5)
