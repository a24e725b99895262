"""The KDA layer: official numbers, streaming, padding, packing, gates, precision, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.layers import cast_params
from k3jax.layers.kda import KDACache, KDAConfig, KimiDeltaAttention, init_dt_bias
from k3jax.testing import assert_close, random_layer
from tests.golden_io import cases, check, load
from tests.layers.helpers import (
    TINY_KDA,
    caller,
    check_tracing,
    kda_config,
    load_layer,
    normal,
    official_leaves,
    puller,
    segments,
)

WIDTH = 12


@pytest.fixture(scope="module")
def tiny():
    """(graphdef, parameters, call) of a small K3 layer with wide gates."""
    graphdef, params = random_layer(TINY_KDA, WIDTH)
    return graphdef, params, caller(graphdef)


def golden_layer(case):
    meta, t = load(case)
    cfg = kda_config(meta["config"], t)
    width = meta["config"]["hidden_size"]
    graphdef, params = load_layer(
        lambda rngs: cfg.build(width, rngs=rngs, param_dtype="float32", init_std=0.02), t
    )
    return meta, t, cfg, graphdef, params


def check_cache(tag, cache, meta, t):
    """Our caches in the fixture's layout: its conv buffer has one column more, never read again."""
    for i, name in enumerate("qkv"):
        want = t[f"{tag}.conv_{name}"]
        ours = jnp.moveaxis(cache.conv[:, :, i], 1, 3).reshape(*want.shape[:2], -1)
        check(f"{tag}.conv_{name}", np.concatenate([want[..., :1], ours], -1), meta)
    check(f"{tag}.recurrent_state_vk", cache.state.swapaxes(2, 3), meta)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("kda_layer"))
def test_golden_outputs_inner_values_and_gradients(case, monkeypatch):
    meta, t, _, graphdef, params = golden_layer(case)
    inner, mix = {}, KimiDeltaAttention.mix

    def spy(self, *args):
        inner["core_o"], state = mix(self, *args)
        return inner["core_o"], state

    monkeypatch.setattr(KimiDeltaAttention, "mix", spy)

    def run(params, x):
        layer = nnx.merge(graphdef, params)
        y, _ = layer(x)
        q, k, v, _ = layer._project(x, None, None)
        g_raw, beta = layer.f_b_proj(layer.f_a_proj(x)), layer.b_proj(x)
        inner.update(q_conv=q, k_conv=k, v_conv=v, g_raw=g_raw, beta_logits=beta)
        return y, dict(inner)

    @jax.jit
    def pull(params, x, d_y):
        y, vjp, inner = jax.vjp(run, params, x, has_aux=True)
        return y, inner, *vjp(d_y)

    y, inner_values, d_params, d_x = pull(params, t["x"], t["d_y"])
    check("full.y", y, meta)
    for name, value in inner_values.items():
        check(f"full.inner.{name}", value, meta)
    check("full.grad_x", d_x, meta)
    for name, grad in official_leaves(d_params).items():
        check(f"full.grad_weights.{name}", grad, meta)


class Opened(KimiDeltaAttention):
    """KDA with an overridden step: norm and gate stay in front of the op."""

    def mix(self, q, k, v, g, beta, state, segment_ids):
        return super().mix(q, k, v, g, beta, state, segment_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "gate", [{}, {"gate": "softplus", "g_min": None}], ids=["bounded", "softplus"]
)
def test_the_op_gates_as_the_methods_do(gate, dtype):
    """Raw projections into the op, or activated ones through the overridable methods: same bits."""
    cfg = replace(TINY_KDA, **gate)
    _, params = random_layer(cfg, WIDTH)
    x, ids = jnp.asarray(normal(2, 5, WIDTH), dtype), segments(2, 2, size=5, rows=2)
    cache = KDACache(jnp.asarray(normal(2, 3, 3, 2, 8), dtype), normal(2, 2, 8, 8, seed=1))

    def build(layer):
        def make():
            return layer(cfg, WIDTH, rngs=nnx.Rngs(0), param_dtype="float32", init_std=0.02)

        return jax.eval_shape(lambda: nnx.split(make()))[0]

    outs = [caller(build(layer))(params, x, ids, cache) for layer in (KimiDeltaAttention, Opened)]
    for a, b in zip(*map(jax.tree.leaves, outs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("kda_layer"))
def test_golden_stream(case):
    """KF-040: a prefill, a longer continuation and single steps carry conv inputs and memory on."""
    meta, t, cfg, graphdef, params = golden_layer(case)
    call, x, pieces = caller(graphdef), t["x"], meta["stream"]
    at, cache = pieces["prefill"], cfg.init_cache(len(x), 0, "float32")
    y, cache = call(params, x[:, :at], None, cache)
    check("stream.y_prefill", y, meta)
    check_cache("stream.after_prefill", cache, meta, t)
    end = at + pieces["continuation"]
    y, cache = call(params, x[:, at:end], None, cache)
    check("stream.y_continue", y, meta)
    check_cache("stream.after_continue", cache, meta, t)
    steps = []
    for i in range(end, end + pieces["single_steps"]):
        y, cache = call(params, x[:, i : i + 1], None, cache)
        steps.append(y)
    check("stream.y_steps", jnp.concatenate(steps, axis=1), meta)
    check_cache("stream.after_steps", cache, meta, t)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("kda_layer"))
def test_golden_left_padding(case):
    """KF-031: as segment ids in place, and moved to the right with a cache."""
    meta, t, cfg, graphdef, params = golden_layer(case)
    call, x, mask = caller(graphdef), t["x"], t["attention_mask"].astype(np.int32)
    check("padded.y", call(params, x, mask)[0], meta)
    order = np.argsort(mask == 0, axis=1, kind="stable")[..., None]
    right = np.take_along_axis(x, order, 1)
    ids = np.take_along_axis(mask, order[..., 0], 1)
    y, cache = call(params, right, ids, cfg.init_cache(len(x), 0, "float32"))
    back = np.zeros_like(x)
    np.put_along_axis(back, order, np.asarray(y), 1)
    check("padded.y", back, meta)
    check_cache("padded.after", cache, meta, t)


def test_kf_018_decays_start_spread_and_stay_float32():
    cfg = replace(TINY_KDA, num_heads=8, head_dim=16)

    def build():
        return cfg.build(WIDTH, rngs=nnx.Rngs(0), param_dtype="bfloat16", init_std=0.02)

    @jax.jit
    def start():
        layer = build()
        g = layer.log_decay(layer.dt_bias[...])  # at zero logits
        return layer.A_log[...], layer.dt_bias[...], g, layer.q_conv1d.kernel[...]

    A_log, dt_bias, g, conv = start()
    np.testing.assert_array_equal(A_log, np.zeros(8, np.float32))
    assert A_log.dtype == dt_bias.dtype == jnp.float32
    assert (g > -0.476).all()
    assert (g < -0.00499).all()
    assert len(np.unique(g)) > 120
    assert g.min() < -0.3
    assert g.max() > -0.008
    assert np.abs(conv).max() <= 0.5  # U(-1/sqrt(W), 1/sqrt(W)), W = 4
    assert np.abs(conv).max() > 0.48

    params = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(build())))
    assert params["q_proj"]["kernel"].dtype == jnp.bfloat16
    params = jax.tree.map(lambda a: np.ones(a.shape, np.float32), params)
    cast = cast_params(params | {"router_bias": np.ones(3, np.float32)}, "bfloat16")
    wide = {path[-1] for path, a in nnx.traversals.flatten_mapping(cast).items()
            if a.dtype == np.float32}  # fmt: skip
    assert wide == {"A_log", "dt_bias", "router_bias"}


def test_dt_bias_is_the_inverse_softplus():
    dt = jax.nn.softplus(jax.jit(init_dt_bias, static_argnums=1)(jax.random.key(1), (4096,)))
    np.testing.assert_allclose([dt.min(), dt.max()], [1e-3, 0.1], rtol=0.01)
    np.testing.assert_allclose(np.median(dt), 1e-2, rtol=0.1)  # log-uniform


def test_kf_019_bounded_gate_is_a_sigmoid_scaled_per_head():
    cfg = replace(TINY_KDA, num_heads=96)
    graphdef, params = random_layer(cfg, WIDTH)
    A_log = np.linspace(-1, 1, 96).astype(np.float32)
    A_log[:2] = 0, np.log(2)
    layer = nnx.merge(graphdef, params | {"A_log": A_log})
    z = jnp.ones((1, 1, 96, 8))
    g = np.asarray(layer.log_decay(z))[0, 0]
    assert abs(g[0, 0] + 3.6553) < 1e-4  # a clamped softplus would give -1.3133
    want = -5 / (1 + np.exp(-np.exp(A_log)))
    np.testing.assert_allclose(g, np.broadcast_to(want[:, None], g.shape), rtol=1e-6)


@pytest.mark.parametrize("g_min", [None, 0.0, 5.0, float("-inf"), float("nan")])
def test_kf_020_bounded_gate_needs_a_negative_bound(g_min):
    with pytest.raises(ValueError, match=r"^kda\.g_min=.*gate='bounded' needs.*below 0.*-5\.0"):
        replace(TINY_KDA, g_min=g_min)


def test_kf_020_unbounded_gate_is_explicit():
    with pytest.raises(ValueError, match=r"^kda\.g_min=-5\.0: gate='softplus'.*g_min=None"):
        replace(TINY_KDA, gate="softplus")
    assert replace(TINY_KDA, gate="softplus", g_min=None).g_min is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 0}, "kda.num_heads=0 must be at least 1"),
        ({"head_dim": -8}, "kda.head_dim=-8 must be at least 1"),
        ({"conv_size": 0}, "kda.conv_size=0 must be at least 1, or None"),
        ({"gate_rank": 0}, "kda.gate_rank=0 must be at least 1, or None"),
        ({"out_gate_rank": 0}, "kda.out_gate_rank=0 must be at least 1, or None"),
        ({"gate": "sigmoid"}, "kda.gate='sigmoid' is unknown: use 'bounded' or 'softplus'"),
        ({"beta_max": 1.5}, "kda.beta_max=1.5: use 1.0, or 2.0"),
        ({"chunk_size": 48}, "kda.chunk_size=48: use 16, 32"),
        ({"norm_eps": 0.0}, "kda.norm_eps=0.0 must be"),
    ],
)
def test_bad_config_is_refused_in_one_line(changes, words):
    with pytest.raises(ValueError) as error:
        replace(TINY_KDA, **changes)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "dtype", "tolerance"),
    [(1, "float16", 2e-3), (3, "float16", 2e-3), (3, "bfloat16", 2e-2)],
)
def test_kf_021_memory_is_float32_whatever_the_activations(tiny, tokens, dtype, tolerance):
    _, params, call = tiny
    params = params | {"dt_bias": params["dt_bias"] - 9}  # hardly any decay
    x = normal(2, tokens, WIDTH)
    cache = TINY_KDA.init_cache(2, 0, "float32")
    cache = cache._replace(state=cache.state + 200_000.0)  # float16 ends at 65,504
    _, want = call(params, x, None, cache)
    assert np.abs(want.state).max() > 65_504
    low = cache._replace(conv=cache.conv.astype(dtype))
    y, got = call(params, jnp.asarray(x, dtype), None, low)
    assert y.dtype == got.conv.dtype == dtype
    assert got.state.dtype == jnp.float32
    error = np.linalg.norm(got.state - want.state) / np.linalg.norm(want.state)
    assert error < tolerance
    # not a rounded copy: most entries need float32's mantissa
    assert (jax.lax.reduce_precision(got.state, 8, 10) != got.state).mean() > 0.9


def test_kf_029_beta_reaches_two_with_the_factor_once(monkeypatch):
    cfg = replace(TINY_KDA, beta_max=2.0)
    graphdef, params = random_layer(cfg, WIDTH)
    x = normal(1, 6, WIDTH)
    x[..., 0] = 1
    kernel = np.zeros_like(params["b_proj"]["kernel"])
    kernel[0] = 3  # every logit is 3
    params = params | {"b_proj": {"kernel": kernel}}
    seen = {}
    mix = KimiDeltaAttention.mix

    def spy(self, *args):
        seen["args"], seen["out"] = args[:5], mix(self, *args)
        return seen["out"]

    monkeypatch.setattr(KimiDeltaAttention, "mix", spy)
    run = jax.jit(lambda p, x: (nnx.merge(graphdef, p)(x)[0], seen.pop("args"), seen.pop("out")))
    y, args, (o, state) = run(params, x)
    monkeypatch.undo()
    q, k, v, g, beta = (np.asarray(a, np.float64)[0] for a in args)
    np.testing.assert_allclose(beta, 2 / (1 + np.exp(-3)), rtol=1e-6)  # 1.905

    S = np.zeros(state.shape[1:])
    for t in range(len(q)):
        S = np.exp(g[t])[..., None] * S
        S += np.einsum("h,hk,hv->hkv", beta[t], k[t], v[t] - np.einsum("hkv,hk->hv", S, k[t]))
        assert_close(o[0, t], np.einsum("hkv,hk->hv", S, q[t]), what=f"token {t}")
    assert_close(state[0], S, what="memory")

    call = caller(graphdef)
    cache, steps = cfg.init_cache(1, 0, "float32"), []
    for t in range(x.shape[1]):
        step, cache = call(params, x[:, t : t + 1], None, cache)
        steps.append(step)
    assert_close(jnp.concatenate(steps, axis=1), y, what="decoding")

    d_y = normal(*y.shape, seed=1)
    _, (d_params, _) = puller(graphdef)(params, x, None, d_y)

    def loss(shift):
        moved = params | {"b_proj": {"kernel": kernel + np.float32(shift) * direction}}
        return float((np.asarray(call(moved, x, None, None)[0], np.float64) * d_y).sum())

    direction = np.zeros_like(kernel)
    direction[0] = 1  # moves every logit alike
    slope = (loss(0.05) - loss(-0.05)) / 0.1
    np.testing.assert_allclose((d_params["b_proj"]["kernel"] * direction).sum(), slope, rtol=0.02)


@pytest.mark.parametrize("pad", [0.0, 1e4])
def test_kf_031_padding_on_either_side_and_packing(tiny, pad):
    _, params, call = tiny
    prompts = [normal(5, WIDTH), normal(9, WIDTH, seed=1)]
    fresh = TINY_KDA.init_cache(1, 0, "float32")
    alone = [call(params, p[None], None, fresh) for p in prompts]

    left, right = np.full((2, 2, 9, WIDTH), pad, np.float32)
    left_ids, right_ids = np.zeros((2, 2, 9), np.int32)
    for row, p in enumerate(prompts):
        left[row, 9 - len(p) :], left_ids[row, 9 - len(p) :] = p, 1
        right[row, : len(p)], right_ids[row, : len(p)] = p, 1

    y = call(params, left, left_ids, None)[0]
    for row, (want, _) in enumerate(alone):
        assert_close(y[row, 9 - len(prompts[row]) :], want[0], what="left padding")
    assert not y[0, :4].any()

    cache = TINY_KDA.init_cache(2, 0, "float32")
    pieces = []
    for at in (0, 4, 8):  # pieces of 4, the last of one token and padding
        piece, ids = np.full((2, 4, WIDTH), pad, np.float32), np.zeros((2, 4), np.int32)
        n = min(4, 9 - at)
        piece[:, :n], ids[:, :n] = right[:, at : at + n], right_ids[:, at : at + n]
        y, cache = call(params, piece, ids, cache)
        pieces.append(y)
    y = jnp.concatenate(pieces, axis=1)
    for row, (want, want_cache) in enumerate(alone):
        assert_close(y[row, : len(prompts[row])], want[0], what="right padding, in pieces")
        got = jax.tree.map(lambda a, row=row: a[row : row + 1], cache)
        assert_close(got, want_cache, what="right padding, cache")

    row, ids = np.concatenate(prompts)[None], segments(5, 9, size=14)
    y = call(params, row, ids, None)[0]
    assert_close(y[:, :5], alone[0][0], what="packed, first")
    assert_close(y[:, 5:], alone[1][0], what="packed, second")


def test_kf_031_a_row_of_padding_leaves_the_cache_alone(tiny):
    """The rows of a batch that have finished: their memory must not move, in any kind of call."""
    _, params, call = tiny
    cache = KDACache(normal(2, 3, 3, 2, 8), normal(2, 2, 8, 8, seed=1))
    for tokens in (1, 4):
        ids = np.array([[1], [0]], np.int32).repeat(tokens, axis=1)
        y, new = call(params, normal(2, tokens, WIDTH, seed=2), ids, cache)
        assert not y[1].any()
        np.testing.assert_array_equal(new.state[1], cache.state[1])
        np.testing.assert_array_equal(new.conv[1], cache.conv[1])
        assert np.abs(new.state[0] - cache.state[0]).max() > 0.01


def test_kf_038_cold_cache_reset_and_the_tokens_between(tiny):
    _, params, call = tiny
    x = normal(1, 5, WIDTH)
    cold = TINY_KDA.init_cache(1, 0, "float32")
    assert not any(np.asarray(leaf).any() for leaf in cold)
    y, cache = call(params, x[:, :3], None, cold)
    assert_close(y, call(params, x[:, :3], None, None)[0], what="cold cache")
    for t in (3, 4):
        _, cache = call(params, x[:, t : t + 1], None, cache)
    again, _ = call(params, x[:, :3], None, TINY_KDA.init_cache(1, 0, "float32"))
    np.testing.assert_array_equal(again, y)
    assert np.abs(call(params, x[:, :3], None, cache)[0] - y).max() > 0.01


@pytest.mark.parametrize("conv_size", [None, 4])
def test_kf_040_windows_equal_one_pass(conv_size):
    """A prompt of 40 tokens in windows of 16: the last one holds 8 and padding."""
    cfg = replace(TINY_KDA, conv_size=conv_size)
    graphdef, params = random_layer(cfg, WIDTH)
    call, x, ids = caller(graphdef), normal(1, 48, WIDTH), segments(40, size=48)
    want, want_cache = call(params, x, ids, cfg.init_cache(1, 0, "float32"))
    cache, pieces = cfg.init_cache(1, 0, "float32"), []
    for window, real in zip(np.split(x, 3, axis=1), np.split(ids, 3, axis=1), strict=True):
        y, cache = call(params, window, real, cache)
        pieces.append(y)
    assert_close((jnp.concatenate(pieces, axis=1), cache), (want, want_cache))


def test_kf_048_packed_documents_are_isolated(tiny):
    graphdef, params, call = tiny
    pull = puller(graphdef)
    x, ids = normal(1, 12, WIDTH), segments(5, 7, size=12)
    changed = x.copy()
    changed[:, :5] = normal(1, 5, WIDTH, seed=7)
    d_y = normal(1, 12, WIDTH, seed=1) * (ids == 2)[..., None]
    (y, (d_params, d_x)), (y2, (d_params2, d_x2)) = (
        pull(params, a, ids, d_y) for a in (x, changed)
    )
    assert np.abs(y[:, :5] - y2[:, :5]).max() > 0.01
    np.testing.assert_array_equal(y[:, 5:], y2[:, 5:])
    np.testing.assert_array_equal(d_x[:, 5:], d_x2[:, 5:])
    assert not d_x[:, :5].any()
    assert np.abs(d_x[:, 5:]).min() > 0
    assert_close(y[:, 5:], call(params, x[:, 5:], None, None)[0], what="alone")
    for a, b in zip(jax.tree.leaves(d_params), jax.tree.leaves(d_params2), strict=True):
        np.testing.assert_array_equal(a, b)


def test_kf_104_no_leaked_tracers(tiny):
    graphdef, params, _ = tiny
    check_tracing(graphdef, params, normal(1, 3, WIDTH), (TINY_KDA.init_cache(1, 0, "float32"),))


def test_every_choice_changes_the_parameters_it_names():
    def leaves(**changes):
        return set(random_layer(replace(TINY_KDA, **changes), WIDTH)[1])

    base = leaves()
    convs = {"q_conv1d", "k_conv1d", "v_conv1d"}
    assert base - leaves(conv_size=None) == convs
    assert base ^ leaves(gate_rank=None) == {"f_a_proj", "f_b_proj", "f_proj"}
    assert base ^ leaves(out_gate_rank=3) == {"g_proj", "g_a_proj", "g_b_proj"}
    assert base == leaves(gate="softplus", g_min=None)


def test_config_is_hashable_and_complete():
    assert hash(TINY_KDA) == hash(replace(TINY_KDA))
    with pytest.raises(TypeError, match="missing"):
        KDAConfig(num_heads=2)  # no hidden defaults
