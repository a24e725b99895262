"""What tests share: the tolerance table, and the contract that every KDA variant keeps."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.layers.kda import KDACache, KDAConfig
from k3jax.model import K3, K3Config, take_layer
from k3jax.train_state import abstract_model

# Largest error over largest expected value, for full-precision matrix products. Raising one is a
# change of its own.
TOLERANCE = {
    "float32": 1e-5,  # outputs and states of an op or layer
    "float32_grad": 1e-4,  # its gradients
    "bfloat16": 2e-2,  # the same computed in bfloat16, against float32
}


def assert_close(
    got: Any,
    want: Any,
    kind: Literal["float32", "float32_grad", "bfloat16"] = "float32",
    what: str = "",
) -> None:
    """Asserts that two trees of arrays agree: max |got - want| <= TOLERANCE[kind] max |want|.

    Every leaf is compared on its own; NaN and infinity never pass.
    """
    tolerance, want_leaves = TOLERANCE[kind], jax.tree_util.tree_leaves_with_path(want)
    assert jax.tree.structure(got) == jax.tree.structure(want), f"{what}: trees differ"
    for got_leaf, (path, want_leaf) in zip(jax.tree.leaves(got), want_leaves, strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        a, b = (np.asarray(leaf).astype(np.float64) for leaf in (got_leaf, want_leaf))
        assert a.shape == b.shape, f"{where}: shape {a.shape}, expected {b.shape}"
        if not b.size:
            continue
        error, scale = np.abs(a - b).max(), np.abs(b).max()
        assert error <= tolerance * scale, (
            f"{where}: error {error:.3g} where values reach {scale:.3g}, allowed {tolerance} times "
            f"that ({kind})"
        )


def random_model(cfg: K3Config, seed: int = 0) -> tuple[nnx.GraphDef, dict, dict]:
    """(graphdef, parameters, buffers) of a model with random parameters at which every mechanism matters.

    Drawn by NumPy, which compiles nothing.
    """
    rng = np.random.default_rng(seed)
    graphdef, shapes, buffers = abstract_model(cfg)

    def draw(path, leaf):
        name = path[-1].key
        if name == "weight":
            values = 1 + 0.1 * rng.normal(size=leaf.shape)
        elif name == "dt_bias":
            values = rng.uniform(-6, -2, leaf.shape)
        elif name in ("A_log", "embedding"):
            values = 0.3 * rng.normal(size=leaf.shape)
        elif name == "proj":
            # logits of about 2: a sharper softmax over depth would magnify rounding
            values = 0.3 * rng.normal(size=leaf.shape)
        else:
            values = 0.06 * rng.normal(size=leaf.shape)
        return jnp.asarray(values, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return graphdef, params, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), buffers)


def layer_by_layer(
    model: K3, embeddings: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None
) -> tuple[
    Float[Array, "B T D"],
    Float[Array, "M B T D"],
    list[Float[Array, "B T D"]],
    Float[Array, "B T D"],
]:
    """A model without scan and without state: the equations as they are read.

    Returns: activations after the final norm, the bank, the prefix after each layer, and the mix that
    the final norm reads.
    """
    cfg, prefix, prefixes = model.cfg, embeddings, []
    bank = jnp.zeros((cfg.attn_res.num_rows(cfg.num_layers), *prefix.shape), prefix.dtype)
    for i in range(cfg.num_layers):
        bank, prefix, *_ = take_layer(model, i)(bank, prefix, i, segment_ids)
        prefixes.append(prefix)
    mix = prefix
    if cfg.attn_res.kind != "none":
        mix = model.output_attn_res(bank, bank.shape[0], prefix)
    return model.norm(mix), bank, prefixes, mix


def random_layer(cfg: Any, width: int, seed: int = 0) -> tuple[Any, dict]:
    """(graphdef, parameters) of `cfg.build(width)` with wide random parameters, without compiling.

    A fresh layer hides mistakes: its gates are mild and its norms are the identity. Here decays
    reach from none to the bound, and every norm weight differs from one.
    """

    def build():
        layer = cfg.build(width, rngs=nnx.Rngs(0), param_dtype="float32", init_std=0.02)
        return nnx.split(layer)

    graphdef, state = jax.eval_shape(build)
    draw = np.random.default_rng(seed).standard_normal

    def wide(path, leaf):
        return (path[-1].key == "weight") + np.float32(0.3) * draw(leaf.shape, np.float32)

    return graphdef, jax.tree_util.tree_map_with_path(wide, nnx.to_pure_dict(state))


def check_kda_contract(cfg: KDAConfig, *, width: int = 24, seed: int = 0) -> None:
    """Asserts what model and decoder rely on, for the layer that `cfg.build` returns.

    1. Causality: no output depends on a later token, not even through rounding.
    2. Documents: packed rows equal separate ones; no gradient crosses a boundary or enters padding.
    3. Splitting: a row cut anywhere and continued from the cache gives the same outputs and cache.
    4. Token by token gives them too, and the same gradients.
    5. bfloat16 stays near float32, and the memory is float32 in both.

    Args:
        cfg: a small layer: the check runs 2 chunk_size + 3 tokens.
        width: model width D, channels.
        seed: of parameters and inputs.
    """
    with jax.default_matmul_precision("highest"):
        probe = _Probe(cfg, width, seed)
        _check_causality(probe)
        _check_documents(probe)
        _check_splitting(probe)
        _check_low_precision(probe)


class _Probe:
    """A layer with parameters and input, and the three compiled ways to call it."""

    def __init__(self, cfg: KDAConfig, width: int, seed: int):
        graphdef, self.params = random_layer(cfg, width, seed)
        draw = np.random.default_rng(seed).standard_normal
        self.cfg, self.chunk, self.size = cfg, cfg.chunk_size, 2 * cfg.chunk_size + 3
        self.x = draw((2, self.size, width), np.float32)
        self.d_y = draw((2, self.size, width), np.float32)
        self.column = np.arange(self.size)

        def layer(params, x, segment_ids, cache):
            return nnx.merge(graphdef, params)(x, segment_ids, cache)

        def pull(params, x, segment_ids, d_y):
            y, vjp = jax.vjp(lambda p, x: layer(p, x, segment_ids, None)[0], params, x)
            return y, vjp(d_y)

        def stepwise(params, x, cache, d_y):
            def run(params, x):
                def step(cache, token):
                    y, cache = layer(params, token[:, None], None, cache)
                    return cache, y[:, 0]

                last, y = jax.lax.scan(step, cache, jnp.moveaxis(x, 1, 0))
                return jnp.moveaxis(y, 0, 1), last

            y, vjp, last = jax.vjp(run, params, x, has_aux=True)
            return y, last, vjp(d_y)

        # Each runs a few times on little data: compilation is nearly all of the cost.
        fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        self.layer, self.pull, self.stepwise = (
            jax.jit(f, compiler_options=fast) for f in (layer, pull, stepwise)
        )

    def empty(self, dtype: str = "float32") -> KDACache:
        return self.cfg.init_cache(2, self.size, dtype)

    def first(self, count: int) -> np.ndarray:
        """Segment ids of rows with `count` real tokens, padded on the right."""
        return np.broadcast_to(self.column < count, self.x.shape[:2]).astype(np.int32)


def _check_causality(p: _Probe) -> None:
    edge = p.chunk + 1
    d_early = np.where(p.first(edge)[..., None], p.d_y, 0)
    _, (_, d_x) = p.pull(p.params, p.x, p.first(p.size), d_early)
    assert not np.asarray(d_x)[:, edge:].any(), "causality: an output depends on a later token"


def _check_documents(p: _Probe) -> None:
    one, two = p.chunk - 1, p.chunk // 2 + 2  # tokens of two documents; the rest is padding
    packed = p.first(one) + 2 * (p.first(one + two) - p.first(one))
    inside = (packed == 2)[..., None]
    y, (_, d_x) = p.pull(p.params, p.x, packed, np.where(inside, p.d_y, 0))
    y, d_x = np.asarray(y), np.asarray(d_x)
    alone = [p.layer(p.params, np.roll(p.x, -at, 1), p.first(n), p.empty())[0]
             for at, n in ((0, one), (one, two))]  # fmt: skip
    assert_close(y[:, :one], alone[0][:, :one], what="documents: the first of a row")
    assert_close(y[:, one : one + two], alone[1][:, :two], what="documents: the second of a row")
    assert not y[:, one + two :].any(), "documents: padding gives an output"
    assert np.isfinite(d_x).all(), "documents: a gradient is not finite"
    assert not np.where(inside, 0, d_x).any(), "documents: a gradient crosses a boundary"


def _check_splitting(p: _Probe) -> None:
    chunk, size = p.chunk, p.size
    y, grads = p.pull(p.params, p.x, p.first(size), p.d_y)
    y_cached, last = p.layer(p.params, p.x, p.first(size), p.empty())
    assert_close(y_cached, y, what="an empty cache and no cache")

    for cut in (1, chunk - 1, chunk, chunk + 1, size - 1):
        head, cache = p.layer(p.params, p.x, p.first(cut), p.empty())
        rest, cache = p.layer(p.params, np.roll(p.x, -cut, 1), p.first(size - cut), cache)
        joined = np.concatenate([head[:, :cut], rest[:, : size - cut]], axis=1)
        assert_close((joined, cache), (y, last), what=f"splitting after {cut} tokens: ")

    y_steps, last_step, grads_steps = p.stepwise(p.params, p.x, p.empty(), p.d_y)
    assert_close((y_steps, last_step), (y, last), what="token by token: ")
    assert_close(grads, grads_steps, "float32_grad", "gradients: ")


def _check_low_precision(p: _Probe) -> None:
    everything = p.first(p.size)
    want, _ = p.layer(p.params, p.x, everything, p.empty())
    x = jnp.asarray(p.x, jnp.bfloat16)
    got, cache = p.layer(p.params, x, everything, p.empty("bfloat16"))
    assert got.dtype == jnp.bfloat16, f"bfloat16 activations give {got.dtype} outputs"
    assert cache.state.dtype == jnp.float32, f"the memory is {cache.state.dtype}, not float32"
    want, got = np.asarray(want), np.asarray(got).astype(np.float32)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= TOLERANCE["bfloat16"], f"bfloat16 is {error:.3g} off float32 (in norm)"
