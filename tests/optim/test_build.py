"""The optimizer table on real parameter trees, and the whole update by hand on small ones."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.optim.build import OptimConfig, build_optimizer, format_table, optimizer_table
from k3jax.train_state import abstract_model
from tests.model_helpers import tiny_config

CONFIG = OptimConfig(ns_dtype="float32", clip_norm=None)
MODEL = tiny_config(pattern=("kda", "mla"), closing=("mla",), num_layers=7)  # groups of 2 layers
N = MODEL.mla.qk_nope_dim


def table(model=MODEL, cfg=CONFIG, **extra):
    _, params, _ = abstract_model(model)
    rows = optimizer_table({**params, **extra}, cfg, qk_nope_dim=model.mla.qk_nope_dim)
    return {row.path: row for row in rows}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ------------------------------------------------------------------------------------- the table

DENSE, MIXED, PAIRS = "layers_0_to_0/layer_0", "layers_1_to_1/layer_0", "layers_2_to_5/layer_0"
KDA, MLA, MOE = f"{DENSE}/self_attn", f"{MIXED}/self_attn", f"{MIXED}/block_sparse_moe"
WANTED = {  # path -> blocks (number, A, B), with D=32, H=2, K=V=N=16, S=8, R=C=L=16, E=8, F=16
    f"{KDA}/q_proj/kernel": [(2, 32, 16)],
    f"{KDA}/v_proj/kernel": [(2, 32, 16)],
    f"{KDA}/f_a_proj/kernel": [(1, 32, 16)],
    f"{KDA}/f_b_proj/kernel": [(1, 16, 32)],
    f"{KDA}/g_proj/kernel": [(1, 32, 32)],
    f"{KDA}/b_proj/kernel": [(1, 32, 2)],
    f"{KDA}/o_proj/kernel": [(1, 32, 32)],
    f"{MLA}/q_a_proj/kernel": [(1, 32, 16)],
    f"{MLA}/q_b_proj/kernel": [(2, 16, 24)],
    f"{MLA}/kv_a_proj_with_mqa/kernel": [(1, 32, 24)],
    f"{MLA}/kv_b_proj/kernel": [(2, 16, 16), (2, 16, 16)],
    f"{MLA}/g_proj/kernel": [(1, 32, 32)],
    f"{DENSE}/mlp/gate_proj/kernel": [(1, 32, 48)],
    f"{DENSE}/mlp/down_proj/kernel": [(1, 48, 32)],
    f"{MOE}/experts/w1": [(8, 16, 16)],
    f"{MOE}/shared_experts/up_proj/kernel": [(1, 32, 32)],
    f"{MOE}/routed_expert_down_proj/kernel": [(1, 32, 16)],
    f"{MOE}/gate/kernel": [(1, 32, 8)],
    f"{PAIRS}/self_attn/q_proj/kernel": [(4, 32, 16)],  # two layers
    f"{PAIRS}/block_sparse_moe/experts/w2": [(16, 16, 16)],
}
ADAMW = {  # path -> decay
    "embed_tokens/embedding": True,
    "lm_head/kernel": True,
    "norm/weight": False,
    "output_attn_res/norm/weight": False,
    "output_attn_res/proj": False,
    f"{DENSE}/mlp_res/proj": False,
    f"{PAIRS}/self_attention_res/norm/weight": False,
    f"{KDA}/A_log": False,
    f"{KDA}/dt_bias": False,
    f"{KDA}/q_conv1d/kernel": True,
    f"{KDA}/o_norm/weight": False,
    f"{MLA}/kv_a_layernorm/weight": False,
    f"{MOE}/routed_expert_norm/weight": False,
}


def test_kf_091_muon_blocks_are_the_semantic_matrices():
    rows = table()
    assert {path: rows[path].blocks for path in WANTED} == WANTED
    assert all(rows[path].decay and rows[path].optimizer == "muon" for path in WANTED)


def test_kf_095_the_rest_is_adamw_with_the_exemptions_from_decay():
    rows = table()
    assert {path: rows[path].decay for path in ADAMW} == ADAMW
    assert all(rows[path].optimizer == "adamw" and not rows[path].blocks for path in ADAMW)
    exempt = ("A_log", "dt_bias", "weight", "proj")  # the last name of norms and AttnRes queries
    assert all(row.decay == (row.path.split("/")[-1] not in exempt) for row in rows.values())
    text = format_table(list(rows.values()))
    assert len(text.splitlines()) == len(rows)
    assert "2 x [16, 16] + 2 x [16, 16]" in text


def test_kf_095_an_unknown_parameter_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"no rule for parameter pooler/kernel \[4, 4\]"):
        table(pooler={"kernel": array(4, 4)})


def test_kf_090_heads_fused_into_one_axis_are_refused():
    path = "layers_2_to_5/layer_0/self_attn/q_proj/kernel"
    stack, layer, *_ = path.split("/")
    params = {stack: {layer: {"self_attn": {"q_proj": {"kernel": array(2, 32, 32)}}}}}
    with pytest.raises(ValueError, match=rf"{path} has shape .* axes"):
        optimizer_table(params, CONFIG, qk_nope_dim=N)


def test_router_and_per_head_are_settings():
    router, query = f"{MOE}/gate/kernel", f"{KDA}/q_proj/kernel"
    keys_values, experts = f"{MLA}/kv_b_proj/kernel", f"{MOE}/experts/w1"
    rows = table(cfg=replace(CONFIG, router_optimizer="adamw", per_head=False))
    assert (rows[router].optimizer, rows[router].decay) == ("adamw", True)
    assert rows[query].blocks == [(1, 32, 32)]
    assert rows[keys_values].blocks == [(1, 16, 64)]
    assert rows[experts] == table()[experts]  # KF-090: the setting is about heads alone


@pytest.mark.parametrize(
    "changes",
    [
        {"kda": replace(MODEL.kda, gate_rank=None, out_gate_rank=8, conv_size=None)},
        {"mla": replace(MODEL.mla, q_rank=None, out_gate=False), "tie_embeddings": True},
        {"moe": replace(MODEL.moe, latent_dim=None, latent_norm=False, num_shared=0)},
        {"attn_res": replace(MODEL.attn_res, kind="none", block_size=None)},
    ],
)
def test_kf_095_every_architecture_choice_is_covered(changes):
    assert table(replace(MODEL, **changes))


@pytest.mark.parametrize(
    "field, value",
    [
        ("peak_lr", 0.0), ("peak_lr", float("nan")), ("final_lr", 1.0), ("momentum", 1.0),
        ("warmup_fraction", -0.1), ("weight_decay", -1.0), ("clip_norm", 0.0), ("qk_clip", 0.0),
        ("ns_dtype", "float16"), ("router_optimizer", "sgd"), ("max_skipped_steps", 0),
    ],
)  # fmt: skip
def test_impossible_settings_name_field_and_value(field, value):
    with pytest.raises(ValueError, match=rf"optim.{field} is .*{value}"):
        replace(OptimConfig(), **{field: value})


# ------------------------------------------------------------------------------------ the update


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {
    "norm": {"weight": normal(4)},
    "lm_head": {"kernel": normal(4, 6, seed=1)},
    "layers_0_to_0": {"layer_0": {"mlp": {"up_proj": {"kernel": normal(1, 4, 6, seed=2)}}}},
}


def leaves(tree):
    norm, head = tree["norm"]["weight"], tree["lm_head"]["kernel"]
    return norm, head, tree["layers_0_to_0"]["layer_0"]["mlp"]["up_proj"]["kernel"]


def direction(cfg, grads, params=PARAMS, steps=1):
    optimizer = build_optimizer(cfg, params, qk_nope_dim=N)
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(grads, state, params)
    return updates, state


def test_decay_is_added_after_scaling_and_only_where_the_table_says():
    grads = jax.tree.map(lambda p: 2 * p + 1, PARAMS)
    plain, _ = direction(replace(CONFIG, weight_decay=0.0), grads)
    decayed, _ = direction(replace(CONFIG, weight_decay=0.1), grads)
    norm, head, matrix = leaves(jax.tree.map(lambda a, b: a - b, decayed, plain))
    assert not norm.any()
    for difference, weight in ((head, leaves(PARAMS)[1]), (matrix, leaves(PARAMS)[2])):
        np.testing.assert_allclose(difference, 0.1 * weight, atol=1e-6)
    # AdamW's first step is the sign of the gradient; Muon's has singular values near 0.2 sqrt(6).
    np.testing.assert_allclose(leaves(plain)[1], np.sign(leaves(grads)[1]), rtol=1e-4)
    singular = np.linalg.svd(leaves(plain)[2], compute_uv=False) / (0.2 * 6**0.5)
    assert 0.6 < singular.min() < singular.max() < 1.3


def test_kf_093_zero_gradients_leave_only_decay():
    updates, state = direction(CONFIG, jax.tree.map(jnp.zeros_like, PARAMS), steps=2)
    norm, head, matrix = leaves(updates)
    assert not norm.any()
    np.testing.assert_allclose(head, 0.1 * leaves(PARAMS)[1], rtol=1e-6)
    np.testing.assert_allclose(matrix, 0.1 * leaves(PARAMS)[2], rtol=1e-6)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


def test_clipping_bounds_the_norm_of_the_whole_gradient():
    grads = jax.tree.map(lambda p: 100 * p, PARAMS)
    _, state = direction(replace(CONFIG, clip_norm=1.0, nesterov=False), grads)
    momentum = optax.tree.get(state, "trace")  # after one step: the clipped gradient
    matrix = momentum["layers_0_to_0"]["layer_0"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_allclose(matrix, leaves(grads)[2] / optax.tree.norm(grads), rtol=1e-5)


def test_kf_058_state_holds_one_moment_per_muon_weight_and_no_buffer():
    _, params, buffers = abstract_model(MODEL)
    optimizer = build_optimizer(CONFIG, params, qk_nope_dim=N)
    state = jax.eval_shape(optimizer.init, params)
    assert buffers
    assert "router_bias" not in str(jax.tree.structure(state))
    rows = optimizer_table(params, CONFIG, qk_nope_dim=N)
    moments = {"muon": 1, "adamw": 2}
    elements = sum(moments[row.optimizer] * np.prod(row.shape, dtype=int) for row in rows)
    assert sum(x.size for x in jax.tree.leaves(state)) == elements + 1  # Adam's step counter


def test_moments_are_float32_for_bfloat16_weights():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    grads = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    _, before = direction(CONFIG, grads, params, steps=2)
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(before))
