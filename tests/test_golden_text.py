"""Complete text models against the official numbers: forward, gradients, cached decoding, padded batches, names."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.convert_hf import from_official, to_official
from k3jax.decode_state import compact_rows, init_decode_state
from k3jax.stacks import locate
from tests.golden_io import cases, check, load
from tests.model_helpers import golden_model, layer_modules, run_unrolled, with_params

pytestmark = pytest.mark.golden

FOLDERS = sorted(case.rsplit("/", 1)[0] for case in cases("text_weights"))


@pytest.fixture(scope="module", params=FOLDERS)
def text(request):
    cfg, params, buffers = golden_model(request.param)
    meta, tensors = load(f"{request.param}/io")
    return request.param, cfg, params, buffers, meta, tensors


def test_forward_layer_by_layer(text):
    _, cfg, params, buffers, meta, t = text
    model = with_params(cfg, params, buffers)
    h, bank, prefixes, before_norm = jax.jit(lambda ids: run_unrolled(model, ids))(t["input_ids"])
    for i, prefix in enumerate(prefixes):
        if cfg.attn_res.kind == "none":
            check(f"full.layer{i}.hidden", prefix, meta)
        else:
            check(f"full.layer{i}.prefix_sum", prefix, meta)
            assert t[f"full.layer{i}.num_blocks"] == cfg.attn_res.before_mixer(i)[0]
    if cfg.attn_res.kind != "none":
        check(
            "full.block_residual", bank.reshape(bank.shape[0], -1, cfg.width).swapaxes(0, 1), meta
        )
    check("full.before_final_norm", before_norm, meta)
    check("full.after_final_norm", h, meta)


def _loss(cfg, params, buffers, t):
    logits = with_params(cfg, params, buffers)(t["input_ids"])
    logp = jax.nn.log_softmax(logits[:, :-1])
    labels = t["labels"][:, 1:]
    kept = labels != -100
    nll = -jnp.take_along_axis(logp, jnp.where(kept, labels, 0)[..., None], -1)[..., 0]
    return jnp.sum(nll * kept) / kept.sum(), logits


@pytest.mark.parametrize("remat", ["none", "full"])
def test_logits_loss_and_gradients(text, remat):
    folder, cfg, params, buffers, meta, t = text
    cfg = replace(cfg, remat=remat)
    (loss, logits), grads = jax.jit(
        jax.value_and_grad(lambda p: _loss(cfg, p, buffers, t), has_aux=True)
    )(params)
    check("full.logits", logits, meta)
    check("full.loss", loss[None], meta)
    meta, want = load(f"{folder}/grads")
    got = to_official(cfg, grads, jax.tree.map(jnp.zeros_like, buffers))
    for name in want:
        if name != "l2_norms":
            check(name, got[name], meta)
    norms = [np.linalg.norm(got[name].astype(np.float64)) for name in meta["l2_norms_order"]]
    check("l2_norms", np.array(norms), meta)
    for name in meta["parameters_without_gradient"]:
        assert not got[name].any(), name


def test_decode(text):
    """Prefill, its caches, then greedy tokens one by one."""
    _, cfg, params, buffers, meta, t = text
    prompt, want = t["prompt_ids"], t["decode.tokens"]

    @jax.jit
    def run(params, tokens, state):
        model = with_params(cfg, params, buffers)
        h, _, state = model.hidden(tokens, state=state)
        return model.logits(h), state

    state = init_decode_state(cfg, prompt.shape[0], prompt.shape[1] + want.shape[1])
    logits, state = run(params, prompt, state)
    check("decode.prefill_logits", logits, meta)
    _check_caches(cfg, params, buffers, state, meta, t)
    steps = [logits[:, -1]]
    for _ in range(want.shape[1] - 1):
        logits, state = run(params, jnp.argmax(steps[-1], -1)[:, None], state)
        steps.append(logits[:, 0])
    steps = jnp.stack(steps, 1)
    check("decode.step_logits", steps, meta)
    check("decode.tokens", jnp.argmax(steps, -1), meta)
    np.testing.assert_array_equal(state.length, prompt.shape[1] + want.shape[1] - 1)


def _check_caches(cfg, params, buffers, state, meta, t):
    model = with_params(cfg, params, buffers)
    checked = 0
    for i, layer in enumerate(layer_modules(model)):
        stack, name, repetition = locate(model.cfg, i)
        cache = jax.tree.map(lambda x, r=repetition: x[r], state.caches[stack][name])
        key = f"decode.cache_after_prefill.layer{i}."
        if layer.attention == "kda" and key + "conv_q" in t:
            for s, stream in enumerate("qkv"):
                # official caches are four columns wide; the oldest is never read again
                meta_conv = t[f"{key}conv_{stream}"][..., -cache.conv.shape[1] :]
                ours = np.asarray(cache.conv[:, :, s]).reshape(*cache.conv.shape[:2], -1)
                tolerance = meta["tolerance"][f"{key}conv_{stream}"]["suggested"]
                np.testing.assert_allclose(ours.swapaxes(1, 2), meta_conv, **tolerance)
            check(key + "recurrent_state_vk", cache.state.swapaxes(-1, -2), meta)
            checked += 1
        if layer.attention == "mla" and key + "key_cache" in t:
            length = t[key + "key_cache"].shape[2]
            latent = cache.latent[:, :length]
            c, shared = jnp.split(latent, [cfg.mla.kv_rank], -1)
            kv = jnp.einsum("bsc,chn->bhsn", c, layer.self_attn.kv_b_proj.kernel[...])
            k, v = jnp.split(kv, [cfg.mla.qk_nope_dim], -1)
            shared = jnp.broadcast_to(shared[:, None], (*k.shape[:-1], shared.shape[-1]))
            check(key + "key_cache", jnp.concatenate([k, shared], -1), meta)
            check(key + "value_cache", v, meta)
            checked += 1
    assert checked


def test_left_padded_batch(text):
    """Left padding by segment ids in one pass, and by compaction into the decode state."""
    _, cfg, params, buffers, meta, t = text
    mask = t["attention_mask"].astype(bool)
    model = with_params(cfg, params, buffers)
    logits = jax.jit(lambda: model(t["padded_ids"], segment_ids=mask.astype(jnp.int32)))()
    check("padded.logits", jnp.where(mask[..., None], logits, 0), meta)

    tokens, segment_ids, order = compact_rows(jnp.asarray(t["padded_ids"]), jnp.asarray(mask))
    want = t["padded.tokens"]
    state = init_decode_state(cfg, len(mask), mask.shape[1] + want.shape[1])

    @jax.jit
    def run(tokens, segment_ids, state):
        h, _, state = model.hidden(tokens, segment_ids=segment_ids, state=state)
        return model.logits(h), state

    logits, state = run(tokens, segment_ids, state)
    spread = jnp.zeros_like(logits).at[jnp.arange(len(mask))[:, None], order].set(logits)
    check("padded.logits", jnp.where(mask[..., None], spread, 0), meta)
    steps = [logits[jnp.arange(len(mask)), mask.sum(1) - 1]]
    for _ in range(want.shape[1]):
        token = jnp.argmax(steps[-1], -1)[:, None]
        logits, state = run(token, jnp.ones_like(token), state)
        steps.append(logits[:, 0])
    steps = jnp.stack(steps, 1)
    check("padded.step_logits", steps, meta)
    check("padded.tokens", jnp.argmax(steps, -1)[:, : want.shape[1]], meta)


def test_names_round_trip(text):
    """Official names to our tree and back give the same tensors, bit for bit."""
    folder, cfg, *_ = text
    _, tensors = load(f"{folder}/weights")
    back = to_official(cfg, *from_official(cfg, tensors))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
        assert back[name].dtype == tensor.dtype
