"""The gated MLA layer: official numbers, attention against NumPy, caches, absorbed form, masks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.configs.k3 import kimi_k3_model
from k3jax.layers.mla import MLACache, document_positions, rotate
from k3jax.pallas_kernels.mla_attention import attention
from k3jax.testing import assert_close, random_layer
from tests.golden_io import cases, check, load
from tests.layers.helpers import (
    TINY_MLA,
    caller,
    check_tracing,
    load_layer,
    mla_config,
    normal,
    official_leaves,
    puller,
    segments,
)

WIDTH = 12


@pytest.fixture(scope="module")
def tiny():
    """(graphdef, parameters, call) of a small layer with wide random parameters."""
    graphdef, params = random_layer(TINY_MLA, WIDTH)
    return graphdef, params, caller(graphdef)


def lengths(*values):
    return np.array(values, np.int32)


def decode(call, params, x, cache, start=0):
    """Outputs of x fed token by token, all rows alike, and the cache."""
    steps = []
    for t in range(x.shape[1]):
        at = np.full(len(x), start + t, np.int32)
        y, cache, _ = call(params, x[:, t : t + 1], None, cache, at)
        steps.append(y)
    return jnp.concatenate(steps, axis=1), cache


def golden_layer(case):
    meta, t = load(case)
    cfg = mla_config(meta["config"], meta["latent_norm_eps"])
    width = meta["config"]["hidden_size"]
    graphdef, params = load_layer(
        lambda rngs: cfg.build(width, rngs=rngs, param_dtype="float32", init_std=0.02), t
    )
    return meta, t, cfg, graphdef, params


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("mla_layer"))
def test_golden_outputs_and_gradients(case):
    """KF-042, KF-044, KF-045: scale, latent epsilon (`eps_probe`), unrotated shared channels."""
    meta, t, _, graphdef, params = golden_layer(case)
    y, (d_params, d_x) = puller(graphdef)(params, t["x"], None, t["d_y"])
    check("full.y", y, meta)
    check("full.grad_x", d_x, meta)
    for name, grad in official_leaves(d_params).items():
        check(f"full.grad_weights.{name}", grad, meta)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("mla_layer"))
def test_golden_stream(case):
    """Prefill and continuation expand the latent; single steps use the absorbed form."""
    meta, t, cfg, graphdef, params = golden_layer(case)
    call, x, pieces = caller(graphdef), t["x"], meta["stream"]
    at, end = pieces["prefill"], pieces["prefill"] + pieces["continuation"]
    size = end + pieces["single_steps"]
    cache = cfg.init_cache(len(x), size, "float32")
    y, cache, _ = call(params, x[:, :at], None, cache, np.zeros(len(x), np.int32))
    check("stream.y_prefill", y, meta)
    y, cache, _ = call(params, x[:, at:end], None, cache, np.full(len(x), at, np.int32))
    check("stream.y_continue", y, meta)
    y, cache = decode(call, params, x[:, end:size], cache, end)
    check("stream.y_steps", y, meta)

    c, k_r = np.split(np.asarray(cache.latent), [cfg.kv_rank], axis=-1)
    expanded = np.einsum("bsc,chn->bhsn", c, params["kv_b_proj"]["kernel"])
    k_n, v = np.split(expanded, [cfg.qk_nope_dim], axis=-1)
    k_r = np.broadcast_to(k_r[:, None], (*k_n.shape[:3], k_r.shape[-1]))
    check("stream.key_cache", np.concatenate([k_n, k_r], axis=-1), meta)
    check("stream.value_cache", v, meta)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("mla_layer"))
def test_golden_left_padding(case):
    meta, t, _, graphdef, params = golden_layer(case)
    y, _, _ = caller(graphdef)(params, t["x"], t["attention_mask"].astype(np.int32))
    check("padded.y", y, meta)


def numpy_attention(q, k, v, scale, q_position, q_segment, k_segment):
    """The definition, in float64, one query at a time."""
    B, T, H, _ = q.shape
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    o, top = np.zeros((B, T, H, v.shape[-1])), np.full(H, -np.inf)
    for b, t, h in np.ndindex(B, T, H):
        own = h // (H // k.shape[2])
        seen = [
            s for s in range(min(q_position[b, t] + 1, k.shape[1]))
            if q_segment[b, t] == k_segment[b, s] > 0
        ]  # fmt: skip
        if seen:
            logits = scale * k[b, seen, own] @ q[b, t, h]
            p = np.exp(logits - logits.max())
            o[b, t, h] = p / p.sum() @ v[b, seen, own]
            top[h] = max(top[h], logits.max())
    return o, np.where(np.isfinite(top), top, 0)


@pytest.mark.parametrize("block", [16, 3])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_is_the_definition(block, key_heads):
    """Documents, padding, an offset into longer keys, shared key heads, Q width != V width."""
    B, T, S, H = 2, 8, 11, 4
    q, k, v = normal(B, T, H, 6), normal(B, S, key_heads, 6, seed=1), normal(B, S, key_heads, 3)
    position = np.stack([np.arange(T) + 3, np.arange(T)])
    k_segment = np.stack([segments(4, 5, size=S)[0], segments(2, 1, 4, size=S)[0]])
    q_segment = np.take_along_axis(k_segment, position, 1)
    q_segment[0, 0], q_segment[1, 2] = 0, 9  # padding, and a document that has no keys
    args = {"scale": 0.7, "q_position": position, "q_segment": q_segment, "k_segment": k_segment}
    where = {name: jnp.asarray(a) for name, a in args.items() if name != "scale"}
    o, top = jax.jit(lambda *a: attention(*a, scale=0.7, **where, block=block))(q, k, v)
    want, want_top = numpy_attention(q, k, v, **args)
    assert o.dtype == top.dtype == jnp.float32
    assert_close(o, want)
    assert_close(top, want_top)
    assert not o[0, 0].any()
    assert not o[1, 2].any()


def test_attention_without_any_pair_is_zero():
    """KF-046: rows without keys give exact zeros, a largest logit of 0, and no NaN gradient."""
    q = normal(1, 3, 2, 4)
    where = {"q_position": jnp.arange(3)[None], "q_segment": jnp.zeros((1, 3), jnp.int32)}

    @jax.jit
    def run(q):
        (o, top), pull = jax.vjp(
            lambda q: attention(q, q, q, scale=1.0, k_segment=where["q_segment"], **where), q
        )
        return o, top, *pull((jnp.ones_like(o), jnp.zeros_like(top)))

    for value in run(q):
        assert not np.asarray(value).any()


def test_attention_blocks_agree_in_gradients_and_need_less_memory():
    B, T, H = 1, 512, 2
    q, k, v = (normal(B, T, H, 8, seed=s) for s in range(3))
    d_o = normal(B, T, H, 8, seed=3)
    ids = jnp.asarray(segments(300, 200, size=T))
    where = {"q_position": jnp.arange(T)[None], "q_segment": ids, "k_segment": ids, "scale": 0.3}

    def compiled(block):
        def loss(q, k, v):
            return (attention(q, k, v, **where, block=block)[0] * d_o).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile()

    whole, blocks = compiled(T), compiled(32)
    assert_close(blocks(q, k, v), whole(q, k, v), "float32_grad")
    used = blocks.memory_analysis().temp_size_in_bytes
    assert used < whole.memory_analysis().temp_size_in_bytes / 4
    assert used < 4 * H * T * T  # less than one float32 matrix of all logits


def test_masked_logits_never_reach_the_exponential():
    """KF-002 in attention: a masked logit of 1e30 must not turn the gradient into NaN."""
    q, k = normal(1, 2, 1, 4), normal(1, 2, 1, 4, seed=1)
    q[0, 0], k[0, 1] = 1e15, 1e15  # the later key, seen from the earlier query
    ids = jnp.ones((1, 2), jnp.int32)

    @jax.jit
    def run(q, k, v):
        def loss(q, k, v):
            where = {"q_position": jnp.arange(2)[None], "q_segment": ids, "k_segment": ids}
            o, top = attention(q, k, v, scale=1.0, **where)
            return o[:, 0].sum(), top

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    grads, top = run(q, k, normal(1, 2, 1, 3))
    assert all(np.isfinite(g).all() for g in grads)
    assert top < 1e20


def test_largest_logit_counts_real_pairs_and_carries_no_gradient(tiny):
    graphdef, params, call = tiny
    x, ids = normal(2, 9, WIDTH), segments(4, 3, size=9, rows=2)
    _, _, top = call(params, x, ids)
    layer = nnx.merge(graphdef, params)
    q, latent = jax.jit(lambda p, x: nnx.merge(graphdef, p)._project(x, None))(params, x)
    c, k_r = np.split(latent, [8], axis=-1)
    k_n = np.einsum("bsc,chn->bshn", c, params["kv_b_proj"]["kernel"][..., :8])
    k = np.concatenate([k_n, np.broadcast_to(k_r[:, :, None], (*k_n.shape[:3], 4))], axis=-1)
    logits = np.einsum("bthq,bshq->bhts", q, k) / np.sqrt(12)
    seen = np.tril(np.ones((9, 9), bool)) & (ids[:, :, None] == ids[:, None]) & (ids > 0)[..., None]
    assert_close(top, np.where(seen[:, None], logits, -np.inf).max((0, 2, 3)))
    assert top.shape == (layer.cfg.num_heads,)

    grad = jax.jit(jax.grad(lambda p: nnx.merge(graphdef, p)(x)[2].sum()))(params)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grad))


def test_kf_042_softmax_scale_of_released_widths():
    """Naive and absorbed attention at q widths 128 + 64, T = 8, H = 2."""
    cfg = replace(TINY_MLA, qk_nope_dim=128, qk_shared_dim=64, v_dim=128, out_gate=False)
    graphdef, params = random_layer(cfg, WIDTH)
    call, x = caller(graphdef), normal(1, 8, WIDTH)
    y = call(params, x)[0]
    absorbed, cache = decode(call, params, x, cfg.init_cache(1, 8, "float32"))
    assert_close(absorbed, y)

    c, k_r = np.split(np.asarray(cache.latent, np.float64), [8], axis=-1)
    k_n, v = np.split(np.einsum("bsc,chn->bshn", c, params["kv_b_proj"]["kernel"]), [128], axis=-1)
    k = np.concatenate([k_n, np.broadcast_to(k_r[:, :, None], (1, 8, 2, 64))], axis=-1)
    q, _ = jax.jit(
        lambda p, x: nnx.merge(graphdef, p)._project(x, None)
    )(params, x)  # fmt: skip
    ones = np.ones((1, 8), int)
    o, _ = numpy_attention(q, k, v, 0.0721687836, np.arange(8)[None], ones, ones)
    assert_close(y, np.einsum("bthv,hvd->btd", o, params["o_proj"]["kernel"]))


def test_kf_043_absorbed_form_is_as_exact_as_the_expanded_one():
    """bfloat16 weights and activations, 512 tokens; both forms against float32."""
    T = 512
    graphdef, params = random_layer(TINY_MLA, WIDTH)
    params = jax.tree.map(lambda a: np.asarray(a, jnp.bfloat16), params)
    x = np.asarray(normal(1, T, WIDTH), jnp.bfloat16)

    @jax.jit
    def by_step(params, x, cache):
        def step(carry, token):
            cache, at = carry
            y, cache, _ = nnx.merge(graphdef, params)(token[:, None], None, cache, at)
            return (cache, at + 1), y[:, 0]

        (cache, _), y = jax.lax.scan(step, (cache, lengths(0)), jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(y, 0, 1), cache

    absorbed, cache = by_step(params, x, TINY_MLA.init_cache(1, T, "bfloat16"))
    call = caller(graphdef)
    naive, naive_cache, _ = call(params, x, None, TINY_MLA.init_cache(1, T, "bfloat16"), lengths(0))
    exact = call(params, x.astype(np.float32), None)[0]
    naive, absorbed = (np.asarray(a, np.float32) for a in (naive, absorbed))
    assert np.linalg.norm(absorbed - exact) <= 1.05 * np.linalg.norm(naive - exact)
    assert np.abs(absorbed - naive).max() <= 2 * np.abs(naive - exact).max()
    assert_close(cache.latent, naive_cache.latent, "bfloat16")

    # from the same rounded queries and latents, the absorbed form adds no rounding of its own
    layer, latent = nnx.merge(graphdef, params), cache.latent
    q = np.asarray(normal(1, 1, 2, 12, seed=5), jnp.bfloat16)
    ones = np.ones((1, T), np.int32)
    where = {"q_position": lengths(T)[None], "q_segment": ones[:, :1], "k_segment": ones}
    o = layer._absorbed(q[:, 0], latent, np.zeros((1, 1), np.int32), lengths(T))
    q, latent, kernel = (
        np.asarray(a).astype(np.float64) for a in (q, latent, params["kv_b_proj"]["kernel"])
    )
    k_n, v = np.split(np.einsum("bsc,chn->bshn", latent[..., :8], kernel), [8], axis=-1)
    k = np.concatenate([k_n, np.broadcast_to(latent[:, :, None, 8:], (1, T, 2, 4))], axis=-1)
    want, _ = numpy_attention(q, k, v, 12**-0.5, **where)
    assert_close(o[:, None], want)


def test_kf_044_latent_norms_use_their_own_epsilon():
    """Latents of RMS 1e-3: 1e-6 and 1e-5 differ by a factor of 0.43."""
    graphdef, params = random_layer(TINY_MLA, WIDTH)
    params["kv_a_layernorm"]["weight"] = np.ones(8, np.float32)
    x = normal(1, 3, WIDTH)
    latent = x @ params["kv_a_proj_with_mqa"]["kernel"][:, :8]
    x *= 1e-3 / np.sqrt((latent**2).mean(-1, keepdims=True))
    rms = {}
    for eps in (1e-6, 1e-5):
        cfg = replace(TINY_MLA, latent_norm_eps=eps)
        call = caller(random_layer(cfg, WIDTH)[0])
        _, cache, _ = call(params, x, None, cfg.init_cache(1, 3, "float32"), lengths(0))
        rms[eps] = np.sqrt((cache.latent[..., :8] ** 2).mean(-1))
        np.testing.assert_allclose(rms[eps], 1e-3 / np.sqrt(1e-6 + eps), rtol=1e-4)
    np.testing.assert_allclose(rms[1e-5] / rms[1e-6], 0.4264, rtol=1e-3)
    k3 = kimi_k3_model()
    assert (k3.mla.latent_norm_eps, k3.norm_eps, k3.kda.norm_eps) == (1e-6, 1e-5, 1e-5)


def test_kf_045_no_positions_and_all_query_channels_count():
    """T = 4 at position 0 and after 1,000 others, with released head widths (192 and 128)."""
    cfg = replace(TINY_MLA, num_heads=1, qk_nope_dim=128, qk_shared_dim=64, v_dim=128)
    graphdef, params = random_layer(cfg, WIDTH)
    call, x = caller(graphdef), normal(1, 1004, WIDTH)
    ids = segments(1000, 4, size=1004)
    late = call(params, x, ids)[0][:, 1000:]
    early = call(params, x[:, 1000:], None)[0]
    assert_close(late, early)

    shared = params | {"kv_a_proj_with_mqa": {
        "kernel": params["kv_a_proj_with_mqa"]["kernel"] * (np.arange(8 + 64) < 8)
    }}  # fmt: skip
    assert np.abs(call(shared, x[:, 1000:], None)[0] - early).max() > 1e-2


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
    assert_close(y[:, 5:], call(params, x[:, 5:], None)[0], what="alone")
    for a, b in zip(jax.tree.leaves(d_params), jax.tree.leaves(d_params2), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("pad", [0.0, 1e4])
def test_kf_031_padding_on_either_side(tiny, pad):
    """Prompts of 5 and 9 tokens; on the right also in pieces of 4 into a poisoned cache."""
    _, params, call = tiny
    prompts = [normal(5, WIDTH), normal(9, WIDTH, seed=1)]
    alone = [call(params, p[None], None)[0] for p in prompts]
    left, right = np.full((2, 2, 9, WIDTH), pad, np.float32)
    left_ids, right_ids = np.zeros((2, 2, 9), np.int32)
    for row, p in enumerate(prompts):
        left[row, 9 - len(p) :], left_ids[row, 9 - len(p) :] = p, 1
        right[row, : len(p)], right_ids[row, : len(p)] = p, 1

    y = call(params, left, left_ids)[0]
    for row, want in enumerate(alone):
        assert_close(y[row, 9 - len(prompts[row]) :], want[0], what="left padding")
    assert not y[0, :4].any()

    # KF-032: what an earlier request left in the slots is never read
    cache = MLACache(jnp.full((2, 10, 12), jnp.nan))
    filled, pieces = lengths(0, 0), []
    for at in (0, 4, 8):
        piece, ids = np.full((2, 4, WIDTH), pad, np.float32), np.zeros((2, 4), np.int32)
        n = min(4, 9 - at)
        piece[:, :n], ids[:, :n] = right[:, at : at + n], right_ids[:, at : at + n]
        y, cache, _ = call(params, piece, ids, cache, filled)
        filled = filled + ids.sum(1, dtype=np.int32)
        pieces.append(y)
    y = jnp.concatenate(pieces, axis=1)
    for row, want in enumerate(alone):
        assert_close(y[row, : len(prompts[row])], want[0], what="right padding, in pieces")
    assert np.isnan(cache.latent[0, 5:]).all()
    assert np.isfinite(cache.latent[0, :5]).all()

    # one row decodes, the other has ended
    token = normal(2, 1, WIDTH, seed=3)
    y, after, _ = call(params, token, np.array([[1], [0]], np.int32), cache, filled)
    longer = np.concatenate([prompts[0], token[0]])[None]
    assert_close(y[0, 0], call(params, longer, None)[0][0, 5], what="decoding")
    assert not y[1].any()
    np.testing.assert_array_equal(after.latent[1], cache.latent[1])


def test_kf_038_cold_cache_and_reset(tiny):
    _, params, call = tiny
    x = normal(1, 5, WIDTH)
    cold = TINY_MLA.init_cache(1, 6, "float32")
    assert not np.asarray(cold.latent).any()
    y, cache, _ = call(params, x[:, :3], None, cold, lengths(0))
    assert_close(y, call(params, x[:, :3], None)[0], what="cold cache")
    _, cache = decode(call, params, x[:, 3:], cache, 3)
    again, _, _ = call(params, x[:, :3], None, cache, lengths(0))  # only the length is reset
    np.testing.assert_array_equal(again, y)


@pytest.mark.parametrize("changes", [{}, {"q_rank": None, "rope_theta": 100.0, "out_gate": False}])
def test_kf_040_windows_and_single_steps_equal_one_pass(changes):
    cfg = replace(TINY_MLA, **changes)
    graphdef, params = random_layer(cfg, WIDTH)
    call, x = caller(graphdef), normal(2, 40, WIDTH)
    want = call(params, x, None)[0]
    cache, pieces = cfg.init_cache(2, 41, "float32"), []
    for at in (0, 16):
        y, cache, _ = call(params, x[:, at : at + 16], None, cache, lengths(at, at))
        pieces.append(y)
    y, cache = decode(call, params, x[:, 32:], cache, 32)
    assert_close(jnp.concatenate([*pieces, y], axis=1), want)


def test_rotation_turns_pairs_by_distance():
    x, y = normal(1, 1, 1, 6), normal(1, 1, 1, 6, seed=1)

    def at(x, position):
        return np.asarray(rotate(jnp.asarray(x), jnp.array([[position]]), 100.0))[0, 0, 0]

    z = x[0, 0, 0, :3] + 1j * x[0, 0, 0, 3:]
    want = z * np.exp(5j * 100.0 ** (-np.arange(3) / 3))
    np.testing.assert_allclose(at(x, 5), np.concatenate([want.real, want.imag]), rtol=1e-5)
    np.testing.assert_array_equal(at(x, 0), x[0, 0, 0])
    np.testing.assert_allclose(at(x, 9) @ at(y, 4), at(x, 5) @ at(y, 0), rtol=1e-4)


def test_rotated_positions_restart_with_every_document():
    ids = np.array([[0, 0, 1, 1, 1, 2, 2, 0]], np.int32)
    positions = document_positions(jnp.asarray(ids))
    np.testing.assert_array_equal(positions[0, 2:7], [0, 1, 2, 0, 1])
    cfg = replace(TINY_MLA, rope_theta=100.0)
    graphdef, params = random_layer(cfg, WIDTH)
    call, x = caller(graphdef), normal(1, 8, WIDTH)
    packed = call(params, x, ids)[0]
    alone = call(params, x[:, 2:5], None)[0]
    assert_close(packed[:, 2:5], alone)
    plain = caller(random_layer(TINY_MLA, WIDTH)[0])(params, x[:, 2:5], None)[0]
    assert np.abs(plain - alone).max() > 1e-2


def test_kf_104_no_leaked_tracers(tiny):
    graphdef, params, _ = tiny
    cache = TINY_MLA.init_cache(1, 4, "float32")
    check_tracing(graphdef, params, normal(1, 3, WIDTH), (cache, lengths(0)))


def test_cache_and_length_go_together(tiny):
    graphdef, params, _ = tiny
    layer = nnx.merge(graphdef, params)
    with pytest.raises(ValueError, match="cache and length go together"):
        layer(jnp.zeros((1, 2, WIDTH)), None, TINY_MLA.init_cache(1, 4, "float32"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 0}, "mla.num_heads=0 must be at least 1"),
        ({"q_rank": 0}, "mla.q_rank=0 must be at least 1, or None"),
        ({"kv_rank": 0}, "mla.kv_rank=0 must be at least 1"),
        ({"qk_nope_dim": 0}, "mla.qk_nope_dim=0 must be at least 1"),
        ({"v_dim": -1}, "mla.v_dim=-1 must be at least 1"),
        ({"qk_shared_dim": -1}, "mla.qk_shared_dim=-1 must be at least 0"),
        ({"latent_norm_eps": 0.0}, "mla.latent_norm_eps=0.0 must be"),
        ({"rope_theta": 0.0}, "mla.rope_theta=0.0 must be"),
        ({"rope_theta": 1e4, "qk_shared_dim": 3}, "mla.qk_shared_dim=3 must be even"),
        ({"rope_theta": 1e4, "qk_shared_dim": 0}, "mla.qk_shared_dim=0 must be even"),
    ],
)
def test_bad_config_is_refused_in_one_line(changes, words):
    with pytest.raises(ValueError) as error:
        replace(TINY_MLA, **changes)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_every_choice_changes_the_parameters_it_names():
    def leaves(**changes):
        return random_layer(replace(TINY_MLA, **changes), WIDTH)[1]

    base = set(leaves())
    assert base ^ set(leaves(q_rank=None)) == {"q_a_proj", "q_a_layernorm", "q_b_proj", "q_proj"}
    assert base - set(leaves(out_gate=False)) == {"g_proj"}
    assert base == set(leaves(rope_theta=1e4))
    assert leaves(qk_shared_dim=0)["kv_a_proj_with_mqa"]["kernel"].shape == (WIDTH, 8)
