"""Routing, dispatch and the expert layer, against golden data and a dense product.

Compiling takes the time here, so most tests share a config, a shape and one program (`train`), and
parameters are drawn by NumPy.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.layers.feed_forward import ActivationConfig
from k3jax.layers.latent_moe import LatentMoEConfig, route
from k3jax.layers.norms import rms_norm
from k3jax.layers.quantile_balancing import collect_stats, update_bias
from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from k3jax.sharding import expert_parallel
from k3jax.sharding.annotate import Buffer, axis_size, psum, region, sum_over_replicas
from k3jax.sharding.mesh import AXES, ROWS, MeshConfig, make_mesh
from k3jax.sharding.rules import logical_axes, state_specs
from k3jax.testing import assert_close
from tests.golden_io import cases, check, load

SITU = ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0)
SMALL = LatentMoEConfig(
    num_experts=8,
    num_active=3,
    ffn_dim=12,
    latent_dim=10,
    latent_norm=True,
    num_shared=2,
    router="sigmoid",
    renormalize=True,
    routed_scale=1.0,
    num_groups=1,
    num_active_groups=1,
    balancing="quantile_histogram",
    num_bins=100,
    weights="plain",
)
WIDTH, BATCH = 16, (2, 8, 16)
ALL, ZERO = np.ones(BATCH[:2], bool), np.zeros(8, np.float32)
replace = dataclasses.replace


@functools.cache
def skeleton(cfg, width, act, eps, dtype):
    """`split` without values, once per config: equal layers then share compiled programs."""
    model = nnx.eval_shape(
        lambda: cfg.build(
            width, activation=act, norm_eps=eps, rngs=nnx.Rngs(0), param_dtype=dtype, init_std=0.02
        )
    )
    return split(model)


def build(cfg=SMALL, width=WIDTH, *, act=SITU, eps=1e-5, dtype="float32", seed=0, std=0.3):
    """A layer with normal matrices, norm weights 1 and biases 0."""
    graphdef, shapes, _ = skeleton(cfg, width, act, eps, dtype)
    draw = np.random.default_rng(seed).normal
    params = jax.tree.map(
        lambda a: jnp.asarray(draw(0, std, a.shape) if a.ndim > 1 else np.ones(a.shape), a.dtype),
        shapes,
    )
    bias = jnp.asarray(np.zeros(cfg.num_experts, np.float32))
    return nnx.merge(graphdef, params, {"router_bias": bias})


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


jit_route = jax.jit(route, static_argnums=3)
jit_update = jax.jit(update_bias, static_argnames=("num_active", "balancing"))


def split(model):
    """(graphdef, parameters, buffers) as pure dicts."""
    graphdef, *states = nnx.split(model, nnx.Param, Buffer)
    return graphdef, *map(nnx.to_pure_dict, states)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, buffers, x, mask=None):
    return nnx.merge(graphdef, params, buffers)(x, mask, collect=True)


@functools.partial(jax.jit, static_argnums=0)
def train(graphdef, params, buffers, x, d_y, mask=None):
    """Output, statistics and the gradients of sum(y d_y): one program for most tests."""

    def loss(params, x):
        y, stats = nnx.merge(graphdef, params, buffers)(x, mask, collect=True)
        return (y * d_y).sum(), (y, stats)

    (_, (y, stats)), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return y, stats, *grads


def routed(graphdef, params, buffers, x, cfg):
    """The routing, and the weighted sum of experts before the norm."""
    layer, x = nnx.merge(graphdef, params, buffers), x.reshape(-1, x.shape[-1])
    r = route(x, layer.gate.kernel[...], layer.router_bias[...], cfg)
    z = x if cfg.latent_dim is None else layer.routed_expert_down_proj(x)
    return r, layer.experts(z, r.ids, r.weights)


@functools.partial(jax.jit, static_argnums=(0, 5))
def train_and_look_inside(graphdef, params, buffers, x, d_y, cfg):
    inside = routed(graphdef, params, buffers, x, cfg)
    return *inside, *train(graphdef, params, buffers, x, d_y)


def all_experts(model, x, mask=None):
    """The layer as its equation reads: every expert sees every token, weights select."""
    cfg = model.cfg
    r = route(x, model.gate.kernel[...], model.router_bias[...], cfg)
    chosen = jax.nn.one_hot(r.ids, cfg.num_experts) * r.weights[..., None]
    dense = chosen.sum(-2)  # [B, T, E]
    if mask is not None:
        dense = dense * mask[..., None]
    z = x if cfg.latent_dim is None else model.routed_expert_down_proj(x)
    gate = jnp.einsum("btl,elf->btef", z, model.experts.w1[...])
    up = jnp.einsum("btl,elf->btef", z, model.experts.w3[...])
    a = model.experts.activation(gate, up)
    u = jnp.einsum("bte,btef,efl->btl", dense, a, model.experts.w2[...])
    if cfg.latent_norm:
        u = rms_norm(u, model.routed_expert_norm.weight[...], model.routed_expert_norm.eps)
    y = u if cfg.latent_dim is None else model.routed_expert_up_proj(u)
    return y + model.shared_experts(x) if cfg.num_shared else y


# ------------------------------------------------------------------------------------------- golden


def config_of(meta):
    return LatentMoEConfig(
        num_experts=meta["num_experts"],
        num_active=meta["num_experts_per_token"],
        ffn_dim=meta.get("moe_intermediate_size", 1),
        latent_dim=meta.get("routed_expert_hidden_size"),
        latent_norm=meta.get("latent_moe_use_norm", False),
        num_shared=meta.get("num_shared_experts") or 0,
        router=meta["moe_router_activation_func"],
        renormalize=meta["moe_renormalize"],
        routed_scale=meta["routed_scaling_factor"],
        num_groups=meta["num_expert_group"],
        num_active_groups=meta["topk_group"],
        balancing="none",
        num_bins=1,
        weights="plain",
    )


def by_expert(r):
    order = np.argsort(r.ids, axis=-1)
    return [np.take_along_axis(np.asarray(a), order, axis=-1) for a in (r.ids, r.weights)]


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("router"))
def test_golden_router(case):
    meta, t = load(case)
    x = t["x"].reshape(-1, t["x"].shape[-1])
    assert meta["variants"]
    for tag, variant in meta["variants"].items():
        w = t[f"{tag}.weights.weight"].T
        r = jit_route(x, w, t[f"{tag}.weights.e_score_correction_bias"], config_of(variant))
        ids, weights = by_expert(r)
        check(f"{tag}.scores", r.scores, meta)
        check(f"{tag}.topk_ids", ids, meta)
        check(f"{tag}.topk_weights", weights, meta)
        dense = np.zeros(r.scores.shape, np.float32)
        np.put_along_axis(dense, np.asarray(r.ids), np.asarray(r.weights), axis=-1)
        check(f"{tag}.dense_weights", dense, meta)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("moe"))
def test_golden_moe(case):
    meta, t = load(case)
    config = meta["config"]
    situ = config["hidden_act"] == "situ"
    act = ActivationConfig(
        kind="situ" if situ else "swiglu",
        gate_cap=config["activation_situ_beta"] if situ else None,
        up_cap=config["activation_situ_linear_beta"] if situ else None,
    )
    cfg = config_of(config)
    model = build(cfg, config["hidden_size"], act=act, eps=config["rms_norm_eps"])

    graphdef, params, _ = split(model)
    flat = nnx.traversals.flatten_mapping(params)
    for *modules, leaf in flat:
        module = ".".join(modules)
        if module == "experts":
            value = np.stack(
                [t[f"weights.experts.{e}.{leaf}.weight"].T for e in range(cfg.num_experts)]
            )
        else:
            value = t[f"weights.{module}.weight"]
        flat[*modules, leaf] = value.T if leaf == "kernel" else value
    params = nnx.traversals.unflatten_mapping(flat)
    bias = t["weights.gate.e_score_correction_bias"]

    r, u, y, _, d_params, d_x = train_and_look_inside(
        graphdef, params, {"router_bias": bias}, t["x"], t["d_y"], cfg
    )
    ids, weights = by_expert(r)
    check("topk_ids", ids, meta)
    check("topk_weights", weights, meta)
    check("routed_sum_before_norm", u, meta)

    check("y", y, meta)
    grads = {"grad_x": d_x}
    for (*modules, leaf), grad in nnx.traversals.flatten_mapping(d_params).items():
        module = ".".join(modules)
        if module == "experts":
            names = [f"grad_weights.experts.{e}.{leaf}.weight" for e in range(cfg.num_experts)]
            grads |= {name: grad[e].T for e, name in enumerate(names) if name in t}
        else:
            grads[f"grad_weights.{module}.weight"] = grad.T if leaf == "kernel" else grad
    assert grads.keys() == {name for name in t if name.startswith("grad_")}
    for name, grad in grads.items():
        check(name, grad, meta)


# ------------------------------------------------------------------------------------------ routing


def test_kf_053_selection_in_float32():
    """KF-053: bf16 activations and router weights; the sets are those of float64."""
    cfg = replace(SMALL, num_experts=896, num_active=16)
    x, w = jnp.bfloat16(normal(0, 128, 7168)), jnp.bfloat16(normal(1, 7168, 896) * 0.02)
    bias = jnp.asarray(normal(2, 896) * 0.01)
    r = jit_route(x, w, bias, cfg)
    assert r.scores.dtype == r.weights.dtype == jnp.float32
    logits = np.float64(x) @ np.float64(w)
    biased = 1 / (1 + np.exp(-logits)) + np.float64(bias)
    order = np.argsort(-biased, axis=1)
    top = np.take_along_axis(biased, order, axis=1)
    clear = top[:, 15] - top[:, 16] > 2e-6
    assert clear.mean() > 0.98
    got, want = np.sort(r.ids, axis=1), np.sort(order[:, :16], axis=1)
    np.testing.assert_array_equal(got[clear], want[clear])


def test_kf_053_logits_1e_4_apart():
    """KF-053: experts whose logits are 4 and 4.0001: equal when rounded to bf16."""
    w = np.zeros((512, 8), np.float32)
    w[0, :2], w[1, 1] = 4, 1e-4
    r = jit_route(jnp.ones((1, 512), jnp.bfloat16), jnp.bfloat16(w), jnp.zeros(8), SMALL)
    np.testing.assert_array_equal(r.ids, [[1, 0, 2]])


def test_kf_054_ties_go_to_the_lowest_index():
    """KF-054: a zero router, two equal scores at the boundary, scores that saturate at 1."""
    cfg = replace(SMALL, num_experts=64, num_active=16)
    x, zero = np.ones((5, 1), np.float32), np.zeros(64, np.float32)
    r = jit_route(x, zero[None], zero, cfg)
    np.testing.assert_array_equal(r.ids, np.arange(16)[None].repeat(5, 0))
    np.testing.assert_allclose(r.weights, 1 / 16, rtol=1e-6)

    logits = np.linspace(-2, 2, 64, dtype=np.float32)
    logits[7] = logits[48]  # the 16th and the 17th best
    r = jit_route(x, logits[None], zero, cfg)
    np.testing.assert_array_equal(np.sort(r.ids[0]), [7, *range(49, 64)])
    assert r.cutoff[0] == r.scores[0, 48]

    saturated = np.where(np.arange(64) % 3 == 0, 17.5 + np.arange(64), -1).astype(np.float32)
    r = jit_route(x, saturated[None], zero, cfg)
    np.testing.assert_array_equal(r.ids[0], np.arange(64)[::3][:16])
    assert (r.scores[0, ::3] == 1).all()


@pytest.mark.parametrize("num_active", [1, 7, 8])
def test_cutoff_is_the_best_loser(num_active):
    x, w, bias = normal(3, 2, 5, WIDTH), normal(4, WIDTH, 8), normal(5, 8) * 0.1
    r = jit_route(x, w, bias, replace(SMALL, num_active=num_active))
    biased = np.sort(r.scores + bias, axis=-1)
    if num_active < 8:
        np.testing.assert_array_equal(r.cutoff, biased[..., -num_active - 1])
    assert r.ids.shape == (2, 5, num_active)
    if num_active == 1:  # not renormalised: the gradient would vanish
        np.testing.assert_array_equal(
            r.weights[..., 0], jnp.take_along_axis(r.scores, r.ids, -1)[..., 0]
        )


def test_groups_compete_by_their_two_best():
    cfg = replace(SMALL, num_groups=4, num_active_groups=2)
    biases = normal(6, 50, 8)
    x, w = np.zeros((1, 1), np.float32), np.zeros((1, 8), np.float32)
    for bias in biases:
        group = bias.reshape(4, 2).sum(1)  # two experts per group: both are its best
        allowed = np.isin(np.arange(8) // 2, np.argsort(-group)[:2])
        want = np.argsort(-np.where(allowed, bias, -np.inf))
        r = jit_route(x, w, bias, cfg)
        np.testing.assert_array_equal(r.ids[0], want[:3])
        assert r.cutoff[0] == np.float32(0.5) + bias[want[3]]


def test_kf_051_biases_stay_float32_and_distinct():
    """KF-051: 238 biases in [6.817, 7.063] that bf16 would merge, in a model stored as bf16."""
    _, params, buffers = skeleton(SMALL, WIDTH, SITU, 1e-5, "bfloat16")
    assert params["gate"]["kernel"].dtype == jnp.bfloat16
    assert buffers["router_bias"].dtype == jnp.float32

    cfg = replace(SMALL, num_experts=238, num_active=1)
    ladder = np.linspace(6.817, 7.063, 238, dtype=np.float32)
    assert len(np.unique(jnp.bfloat16(ladder))) < 20
    bias = np.random.default_rng(7).permutation(ladder)
    x, w = jnp.ones((4, 1), jnp.bfloat16), jnp.zeros((1, 238), jnp.bfloat16)
    r = jit_route(x, w, bias, cfg)
    np.testing.assert_array_equal(r.ids, np.full((4, 1), bias.argmax()))
    stats = jax.jit(functools.partial(collect_stats, balancing=cfg.balancing, num_bins=1000))(
        r.scores, r.cutoff, r.ids, bias
    )
    new = jit_update(bias, stats, num_active=1, balancing=cfg.balancing)
    assert new.dtype == jnp.float32
    assert abs(float(new.mean())) < 1e-6


def test_kf_058_bias_is_no_parameter_and_is_not_changed_by_the_layer():
    """KF-058: no gradient and no optimiser state; constant while the layer runs."""
    model = build()
    before = normal(8, 8) * np.float32(0.1)
    model.router_bias[...] = jnp.asarray(before)
    graphdef, params, buffers = split(model)
    assert "router_bias" not in params
    assert list(buffers) == ["router_bias"]
    x = normal(9, *BATCH)
    _, stats, d_params, _ = train(graphdef, params, buffers, x, x, ALL)
    assert d_params.keys() == params.keys()
    np.testing.assert_array_equal(model.router_bias[...], before)
    new = jit_update(before, stats, num_active=3, balancing="quantile_histogram")
    assert np.abs(new - before).max() > 1e-3

    @jax.jit
    @jax.grad
    def d_bias(bias):
        r = route(x, model.gate.kernel[...], bias, SMALL)
        return (r.weights**2).sum() + r.cutoff.sum()

    np.testing.assert_array_equal(d_bias(before), np.zeros(8))


# -------------------------------------------------------------------------------- dispatch, experts


def test_every_choice_has_exactly_one_row():
    ids = jnp.asarray(np.argsort(normal(10, 20, 8), axis=1)[:, :3])
    mask = jnp.arange(20) % 3 != 0
    plan = expert_parallel.plan_dispatch(ids, mask, 8)
    np.testing.assert_array_equal(np.sort(plan.order), np.arange(60))
    np.testing.assert_array_equal(np.asarray(plan.order)[plan.inverse], np.arange(60))
    np.testing.assert_array_equal(plan.group_sizes, np.bincount(np.ravel(ids[mask]), minlength=8))
    expert = np.where(mask[:, None], ids, 8).reshape(-1)[plan.order]
    assert (np.diff(expert) >= 0).all()
    assert (np.diff(plan.order)[np.diff(expert) == 0] > 0).all()  # stable
    assert not mask[plan.order[plan.group_sizes.sum() :] // 3].any()


@pytest.mark.parametrize(
    "cfg",
    [
        SMALL,
        replace(
            SMALL, num_active=8, router="softmax", renormalize=False, routed_scale=2.5,
            latent_dim=None, latent_norm=False, num_shared=0,
        ),
    ],
    ids=["latent", "plain, all experts"],
)  # fmt: skip
def test_output_and_gradients_equal_a_dense_product(cfg):
    """With padding, and an expert without tokens: the bias leaves out number 2 if it can."""
    model = build(cfg)
    model.router_bias[...] = jnp.asarray(np.float32(np.arange(8) == 2) * -9)
    x, d_y, mask = normal(11, *BATCH), normal(12, *BATCH), np.arange(16).reshape(2, 8) % 4 != 1
    graphdef, params, buffers = split(model)

    @jax.jit
    def reference(params, x):
        def loss(params, x):
            y = all_experts(nnx.merge(graphdef, params, buffers), x, mask)
            return (y * d_y).sum(), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return y, *grads

    want = reference(params, x)
    got, stats, *got_grads = train(graphdef, params, buffers, x, d_y, mask)
    assert (stats.load[2] == 0) == (cfg.num_active < 8)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()),
        (got, *got_grads),
        want,
    )


def test_dispatch_and_combine_are_each_other_s_gradient():
    ids = jnp.asarray(np.argsort(normal(13, 6, 8), axis=1)[:, :3])
    plan = expert_parallel.plan_dispatch(ids, jnp.arange(6) != 2, 8)
    z, d_rows, du = normal(14, 6, 4), normal(15, 18, 4), normal(16, 6, 4)
    rows, pull = jax.vjp(lambda z: expert_parallel.dispatch_rows(z, plan), z)
    np.testing.assert_array_equal(rows, np.repeat(z, 3, axis=0)[plan.order])
    want = np.zeros_like(z)
    np.add.at(want, np.asarray(plan.order) // 3, d_rows)
    np.testing.assert_allclose(pull(d_rows)[0], want, rtol=1e-6)
    u, pull = jax.vjp(lambda y: expert_parallel.combine_rows(y, plan, ids), d_rows)
    np.testing.assert_allclose(u, want, rtol=1e-6)
    np.testing.assert_array_equal(pull(du)[0], np.repeat(du, 3, axis=0)[plan.order])


def test_kf_055_experts_without_tokens_have_zero_gradients():
    """KF-055: 896 experts, 3 tokens, k = 16: at least 848 empty experts; twice the same."""
    cfg = replace(SMALL, num_experts=896, num_active=16, latent_dim=4, ffn_dim=4)
    model = build(cfg)
    x, d_y = normal(16, 1, 3, WIDTH), normal(17, 1, 3, WIDTH)
    first = train(*split(model), x, d_y)
    jax.block_until_ready([np.nan * jnp.ones(n) for n in (3000, 900_000)])  # dirty memory
    second = train(*split(model), x, d_y)
    empty = np.asarray(first[1].load) == 0
    assert empty.sum() >= 848
    jax.tree.map(np.testing.assert_array_equal, first, second)
    for leaf in ("w1", "w2", "w3"):
        grad = np.asarray(first[2]["experts"][leaf])
        assert np.isfinite(grad).all()
        assert not grad[empty].any()
        assert grad[~empty].any(axis=(1, 2)).all()


def test_kf_056_padding_uses_no_expert_and_no_statistics():
    """KF-056: 2 x 8 tokens of which 9 are real against the 9 alone; padding may hold anything."""
    model = build()
    mask = np.array([[1] * 5 + [0] * 3, [1] * 4 + [0] * 4], bool)
    x = normal(18, *BATCH)
    packed = np.concatenate([x[mask], normal(19, 7, WIDTH)]).reshape(BATCH)
    want, want_stats, *_ = train(*split(model), packed, x, np.arange(16).reshape(2, 8) < 9)
    want_bias = jit_update(ZERO, want_stats, num_active=3, balancing="quantile_histogram")
    for filler in (3.0, np.nan):
        x[~mask] = filler
        y, stats, *_ = train(*split(model), x, x, mask)
        real = np.reshape(want, (16, WIDTH))[:9]
        np.testing.assert_allclose(np.asarray(y)[mask], real, rtol=1e-5, atol=1e-6)
        assert stats.count == want_stats.count == 9
        np.testing.assert_array_equal(stats.load, want_stats.load)
        assert stats.load.sum() == 27
        np.testing.assert_array_equal(np.sum(stats.statistics, axis=1), [9] * 8)
        bias = jit_update(ZERO, stats, num_active=3, balancing="quantile_histogram")
        np.testing.assert_allclose(bias, want_bias, atol=1e-6)


def test_statistics_of_the_layer():
    """Their shapes by kind; margins and loads describe the routing."""
    x = normal(19, *BATCH)
    shapes = {"quantile_histogram": (8, 100), "quantile_exact": (16, 8), "none": (8, 0)}
    for balancing, shape in shapes.items():
        model = build(replace(SMALL, balancing=balancing))
        stats = jax.eval_shape(functools.partial(model, collect=True), x)[1]
        assert stats.statistics.shape == shape
    model = build(replace(SMALL, balancing="quantile_exact"))
    _, stats = apply(*split(model), x)
    assert stats.count == 16
    assert not stats.all_tied
    r = jit_route(x, model.gate.kernel[...], ZERO, SMALL)
    margins = np.reshape(r.scores - r.cutoff[..., None], (16, 8))
    np.testing.assert_allclose(stats.statistics, margins, atol=1e-6)
    np.testing.assert_array_equal(stats.load, np.sum(margins > 1e-6, axis=0))
    assert stats.load.sum() == 16 * 3


def test_collecting_is_off_by_default():
    assert jax.eval_shape(build(), np.zeros(BATCH, np.float32))[1] is None


def test_bfloat16_compute():
    model = build()
    x = jnp.bfloat16(normal(20, *BATCH))
    want, got = (apply(*split(model), x.astype(d))[0] for d in (jnp.float32, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.float32(got) - want) < 0.02 * np.linalg.norm(want)
    rows = jax.ShapeDtypeStruct((2, 10), jnp.bfloat16)
    u = jax.eval_shape(model.experts, rows, jnp.zeros((2, 1), int), jnp.ones((2, 1)))
    assert u.dtype == jnp.float32


def test_kf_063_no_dense_product_over_experts():
    """KF-063: compiled memory of a training step at a fraction of the real size.

    A product of every row with every expert would need num_experts times the hidden activations.
    """
    cfg = replace(SMALL, num_experts=112, num_active=16, latent_dim=112, ffn_dim=96, num_shared=1)
    width, tokens = 224, 512
    graphdef, params, buffers = split(build(cfg, width))
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
    compiled = train.lower(graphdef, params, buffers, x, x).compile()
    memory = compiled.memory_analysis()
    rows = 4 * tokens * cfg.num_active * (2 * cfg.latent_dim + 4 * cfg.ffn_dim)  # saved activations
    inputs_outputs = memory.argument_size_in_bytes + memory.output_size_in_bytes
    dense = 4 * tokens * cfg.num_active * cfg.num_experts * cfg.ffn_dim
    assert memory.temp_size_in_bytes < 3 * (rows + inputs_outputs) < dense / 2


# ------------------------------------------------------------------------------------ several devices

MESHES = {
    "expert 8": {"expert": 8},
    "KF-065: fsdp 2, expert 2, tensor 2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "expert 4, context 2": {"expert": 4, "context": 2},
    "expert 2, tensor 3: 16 tokens do not divide": {"expert": 2, "tensor": 3},
    "fsdp 2, tensor 4": {"fsdp": 2, "tensor": 4},
}


@functools.cache
def whole():
    """Arguments, and results of the layer on one device: token 5 of every row is padding."""
    model, shape = build(), (8, 4, WIDTH)
    model.router_bias[...] = jnp.asarray(np.float32(np.arange(8) < 3) * 5)  # few experts get all
    args = normal(31, *shape), normal(32, *shape), np.arange(32).reshape(8, 4) % 7 != 5
    graphdef, params, buffers = split(model)
    return graphdef, params, buffers, args, train(graphdef, params, buffers, *args)


@pytest.mark.devices
@pytest.mark.parametrize("name", MESHES)
def test_several_devices_equal_one(name):
    """Outputs, all gradients and statistics; a few experts get all rows, so that rounds repeat."""
    graphdef, params, buffers, args, (y, stats, d_params, d_x) = whole()
    sizes = {"data": 1, **MESHES[name]}
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    specs = state_specs(params, logical_axes(nnx.merge(graphdef, params, buffers)), mesh.shape)
    tokens, nowhere = PartitionSpec(ROWS, "context"), PartitionSpec()

    def step(params, buffers, x, d_y, mask):
        y, stats, d_params, d_x = train.__wrapped__(graphdef, params, buffers, x, d_y, mask)
        y_ways = axis_size("tensor")  # all of which have the same y, hence the same loss
        d_params, d_x = jax.tree.map(lambda d: d / y_ways, (d_params, d_x))
        stats = stats._replace(all_tied=stats.all_tied.astype(int))
        d_params = sum_over_replicas(d_params, specs)
        return y, psum(stats, *AXES), d_params, psum(d_x, "tensor")

    in_specs = specs, nowhere, tokens, tokens, tokens
    placed = jax.tree.map(
        lambda spec, tree: jax.device_put(tree, NamedSharding(mesh, spec)),
        in_specs,
        (params, buffers, *args),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    run = jax.jit(region(step, mesh, in_specs, (tokens, nowhere, specs, tokens)))
    got_y, got_stats, got_params, got_x = jax.device_get(run(*placed))
    assert_close(got_y, np.asarray(y))
    assert_close((got_params, got_x), jax.device_get((d_params, d_x)), "float32_grad")
    assert not got_stats.all_tied
    for field in ("statistics", "count", "load"):
        np.testing.assert_array_equal(getattr(got_stats, field), getattr(stats, field))


# ------------------------------------------------------------------------------------ 4-bit experts

PACKED = replace(SMALL, latent_dim=64, ffn_dim=32, weights="mxfp4")


@functools.cache
def packed_and_plain():
    """`split` of a layer with experts in MXFP4, and of one with the decoded matrices as parameters."""
    graphdef, _, buffers = skeleton(PACKED, WIDTH, SITU, 1e-5, "float32")
    plain, params, bias = split(build(replace(PACKED, weights="plain")))
    experts, codes = {}, {}
    for name, w in params.pop("experts").items():  # E in out
        packed, scale = quantize_mxfp4(np.asarray(w).swapaxes(1, 2))
        codes[name] = {"packed": packed, "scale": scale}
        experts[name] = dequantize_mxfp4(packed, scale, np.float32).swapaxes(1, 2)
    assert jax.tree.map(np.shape, codes) == jax.tree.map(lambda x: x.shape, buffers["experts"])
    return (graphdef, params, {**bias, "experts": codes}), (
        plain,
        {**params, "experts": experts},
        bias,
    )


def test_experts_in_4_bits_equal_decoded_ones():
    packed, plain = packed_and_plain()
    x = normal(41, *BATCH)
    assert_close(apply(*packed, x)[0], np.asarray(apply(*plain, x)[0]))


@pytest.mark.parametrize("kind", [0, 1], ids=["mxfp4", "plain"])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_decoding_fetches_the_chosen_experts_alone(kind, tokens):
    """One token a row: the same result as the prefill form, and NaN in other experts stays there."""
    graphdef, params, buffers = packed_and_plain()[kind]
    x = normal(43, tokens, 1, WIDTH)
    mask = np.ones((tokens, 1), bool)
    mask[1:2] = False  # a slot without a request
    want = np.asarray(apply(graphdef, params, buffers, x.swapaxes(0, 1), mask.swapaxes(0, 1))[0])
    model = nnx.merge(graphdef, params, buffers)
    chosen = route(x[:, 0], model.gate.kernel[...], model.router_bias[...], PACKED).ids
    others = np.setdiff1d(np.arange(PACKED.num_experts), np.asarray(chosen))
    assert len(others) or tokens * PACKED.num_active >= PACKED.num_experts

    def spoilt(x):
        x = np.array(x)
        x[others] = 255 if x.dtype == np.uint8 else np.nan
        return x

    tree = {**(buffers if kind == 0 else params)}
    tree["experts"] = jax.tree.map(spoilt, tree["experts"])
    params, buffers = (params, tree) if kind == 0 else (tree, buffers)
    got = np.asarray(apply(graphdef, params, buffers, x, mask)[0])
    assert_close(got[:, 0], want[0])


def test_decoding_many_rows_on_a_gpu_reads_every_expert_once(monkeypatch):
    """More choices than experts: one product per matrix over all rows, and the prefill form's result."""
    graphdef, params, buffers = packed_and_plain()[1]
    x, mask = normal(44, 5, 1, WIDTH), np.ones((5, 1), bool)
    mask[1:3] = False
    want = np.asarray(apply(graphdef, params, buffers, x.swapaxes(0, 1), mask.swapaxes(0, 1))[0])
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    run = jax.jit(lambda x: nnx.merge(graphdef, params, buffers)(x, mask)[0])
    assert_close(np.asarray(run(x))[:, 0], want[0])
    experts = f"tensor<{PACKED.num_experts}x5x{PACKED.ffn_dim}xf32>"
    assert experts in run.lower(x).as_text()


@pytest.mark.devices
def test_experts_in_4_bits_on_several_devices():
    """Each device holds its own experts' codes, and nothing else of them."""
    (graphdef, params, buffers), plain = packed_and_plain()
    x = normal(42, 8, 4, WIDTH)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=4), jax.devices()[:8])
    axes = logical_axes(nnx.merge(graphdef, params, buffers))
    specs = tuple(state_specs(tree, axes, mesh.shape) for tree in (params, buffers))
    assert specs[1]["experts"]["w1"]["packed"] == PartitionSpec("expert", None, None)
    tokens = PartitionSpec(ROWS, "context")

    def step(params, buffers, x):
        return nnx.merge(graphdef, params, buffers)(x)[0]

    args = jax.tree.map(
        lambda spec, tree: jax.device_put(tree, NamedSharding(mesh, spec)),
        (*specs, tokens),
        (params, buffers, x),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    got = jax.jit(region(step, mesh, (*specs, tokens), tokens))(*args)
    assert_close(jax.device_get(got), np.asarray(apply(*plain, x)[0]))


# ------------------------------------------------------------------------------------ norm, configs


def test_kf_066_latent_norm_follows_the_complete_sum():
    """KF-066: weights x 10 leave the routed branch alone; norm weight 0 removes it."""
    model = build()
    x = normal(21, *BATCH)
    want, _ = apply(*split(model), x)
    scaled, _ = apply(*split(build(replace(SMALL, routed_scale=10.0))), x)
    np.testing.assert_allclose(scaled, want, rtol=1e-3, atol=1e-3)
    model.routed_expert_norm.weight[...] = jnp.zeros(SMALL.latent_dim)
    shared = jax.jit(lambda x: model.shared_experts(x))(x)
    np.testing.assert_allclose(apply(*split(model), x)[0], shared, rtol=1e-6)
    assert np.abs(want - shared).max() > 0.1


def test_kf_067_config_has_no_defaults():
    """KF-067: latent size, norm flag, shared experts, top-k and the rest must be said."""
    fields = dataclasses.asdict(SMALL)
    for name in fields:
        rest = {k: v for k, v in fields.items() if k != name}
        with pytest.raises(TypeError, match=name):
            LatentMoEConfig(**rest)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_active": 9}, ("num_active=9", "num_experts=8")),
        ({"num_active": 0}, ("num_active=0", "at least 1")),
        ({"num_experts": -4}, ("num_experts=-4",)),
        ({"ffn_dim": 0}, ("ffn_dim=0",)),
        ({"latent_dim": 0}, ("latent_dim=0", "None")),
        ({"weights": "int4"}, ("weights='int4'", "mxfp4")),
        ({"weights": "mxfp4"}, ("ffn_dim=12", "32")),
        ({"latent_dim": None}, ("latent_norm=True", "latent_dim")),
        ({"num_shared": -1}, ("num_shared=-1",)),
        ({"router": "relu"}, ("router='relu'", "sigmoid")),
        ({"routed_scale": 0.0}, ("routed_scale=0.0",)),
        ({"routed_scale": float("nan")}, ("routed_scale=nan",)),
        ({"num_groups": 3}, ("num_groups=3", "num_experts=8")),
        ({"num_groups": 2, "num_active_groups": 3}, ("num_active_groups=3", "num_groups=2")),
        ({"num_groups": 8, "num_active_groups": 2}, ("num_active_groups=2", "num_active=3")),
        ({"num_groups": 8, "num_active_groups": 3}, ("num_active_groups=3", "at least 4")),
        ({"balancing": "loss"}, ("balancing='loss'", "quantile_exact")),
        ({"num_bins": 0}, ("num_bins=0",)),
    ],
)
def test_impossible_configs_say_what_is_wrong(changes, words):
    with pytest.raises(ValueError) as error:
        replace(SMALL, **changes)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
