"""Official names and configs: strict audits, the A_log layout, layer lists that count from 1, missing keys."""

import json
from dataclasses import replace

import numpy as np
import pytest

from k3jax.configs import PRESETS, preset
from k3jax.convert_hf import all_entries, from_official, to_official
from k3jax.errors import UserError
from k3jax.official_config import (
    MXFP4,
    config_from_official,
    config_to_official,
    fold_schedule,
    function_of,
)
from k3jax.variants.softplus_gate import SoftplusGateConfig
from tests.golden_io import golden_dir, load
from tests.model_helpers import build, split, tiny_config

CFG = tiny_config(num_layers=3, pattern=("kda",), closing=("mla",))


@pytest.fixture(scope="module")
def tensors():
    _, params, buffers = split(build(CFG))
    return to_official(CFG, params, buffers)


@pytest.fixture(scope="module")
def k3_config():
    return load("text_k3/io")[0]["config"]


@pytest.fixture(scope="module")
def checkpoint_config():
    return json.loads((golden_dir() / "multimodal/checkpoint/config.json").read_text())


def without(config, *path):
    """A copy of a nested config with one key removed."""
    if len(path) == 1:
        return {k: v for k, v in config.items() if k != path[0]}
    return {**config, path[0]: without(config[path[0]], *path[1:])}


def with_linear(config, **changes):
    return {**config, "linear_attn_config": {**config["linear_attn_config"], **changes}}


# -- tensors


def test_round_trip_is_lossless(tensors):
    back = to_official(CFG, *from_official(CFG, tensors))
    assert back.keys() == tensors.keys()
    for name in tensors:
        np.testing.assert_array_equal(back[name], tensors[name], err_msg=name)


def test_kf_084_every_matrix_is_transposed_as_its_entry_says(tensors):
    """Square matrices too: each official row is one output, spread over our trailing dimensions."""
    params, buffers = from_official(CFG, tensors)
    squares = 0
    for placed in all_entries(CFG):
        official = tensors[placed.name]
        if official.ndim != 2 or placed.name.endswith(("embed_tokens.weight", "res_proj.weight")):
            continue
        leaf = buffers if placed.entry.buffer else params
        for key in placed.path:
            leaf = leaf[key]
        ours = leaf[placed.index] if placed.index else leaf
        rows = int(np.prod(ours.shape)) // official.shape[1]
        np.testing.assert_array_equal(
            ours.reshape(official.shape[1], rows).T, official, err_msg=placed.name
        )
        squares += official.shape[0] == official.shape[1]
    assert squares


def test_kf_088_missing_extra_and_misshapen_are_listed_together(tensors):
    broken = dict(tensors)
    del broken["model.norm.weight"], broken["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    broken["model.layers.9.input_layernorm.weight"] = np.ones(4, np.float32)
    broken["lm_head.weight"] = np.ones((3, 3), np.float32)
    with pytest.raises(ValueError, match="does not fit") as error:
        from_official(CFG, broken)
    for words in ("missing model.norm.weight", "missing model.layers.1.block_sparse_moe.experts.3.w2.weight",
                  "unexpected model.layers.9.input_layernorm.weight", "lm_head.weight has shape (3, 3)"):  # fmt: skip
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: np.pad(a, (0, 14)), None),
        (lambda a: np.pad(a, (0, 14), constant_values=0.5), "tail is not zero"),
        (lambda a: np.pad(a, (0, 14), constant_values=np.nan), "tail is not zero"),
        (lambda a: np.pad(a, (0, 13)), "has shape (15,)"),
        (lambda a: a[:1], "has shape (1,)"),
    ],
)
def test_kf_078_a_log_is_per_head_and_may_be_padded(tensors, change, words):
    """2 heads of 16 channels: 2 entries, or 16 with a zero tail; anything else is refused by name."""
    name = "model.layers.0.self_attn.A_log"
    changed = {**tensors, name: change(tensors[name])}
    if words is None:
        params, buffers = from_official(CFG, changed)
        np.testing.assert_array_equal(
            params["layers_0_to_0"]["layer_0"]["self_attn"]["A_log"][0], tensors[name]
        )
        padded = to_official(CFG, params, buffers, padded_a_log=True)[name]
        np.testing.assert_array_equal(padded, changed[name])
        return
    with pytest.raises(ValueError, match="A_log") as error:
        from_official(CFG, changed)
    assert name in str(error.value)
    assert words in str(error.value)


@pytest.mark.golden
def test_released_layout_of_a_log_matches_the_fixture():
    for case in ("kda_layer_k3", "kda_layer_linear"):
        meta, t = load(case)
        cfg = config_from_official(meta["config"], dtype="float32", param_dtype="float32")
        entry = next(
            p.entry for p in all_entries(cfg, padded_a_log=True) if p.name.endswith("A_log")
        )
        np.testing.assert_array_equal(
            entry.save(t["weights.A_log"]), t["weights_release_layout.A_log"]
        )
        np.testing.assert_array_equal(
            entry.load(t["weights_release_layout.A_log"]), t["weights.A_log"]
        )


def test_kf_085_a_tied_head_is_no_tensor():
    tied = replace(CFG, tie_embeddings=True)
    _, params, buffers = split(build(tied))
    names = to_official(tied, params, buffers)
    assert "lm_head.weight" not in names
    assert "lm_head" not in from_official(tied, names)[0]


def test_kf_051_float32_parameters_stay_float32(tensors):
    params, buffers = from_official(replace(CFG, param_dtype="bfloat16"), tensors)
    layer = params["layers_0_to_0"]["layer_0"]["self_attn"]
    assert layer["A_log"].dtype == layer["dt_bias"].dtype == np.float32
    assert layer["q_proj"]["kernel"].dtype == "bfloat16"
    assert (
        buffers["layers_1_to_1"]["layer_0"]["block_sparse_moe"]["router_bias"].dtype == np.float32
    )


# -- configs


@pytest.mark.parametrize(
    "path",
    [
        ("activation_situ_beta",),
        ("activation_situ_linear_beta",),
        ("routed_expert_hidden_size",),
        ("latent_moe_use_norm",),
        ("num_shared_experts",),
        ("num_experts_per_token",),
        ("attn_res_block_size",),
        ("mla_use_output_gate",),
        ("linear_attn_config", "gate_lower_bound"),
        ("linear_attn_config", "use_full_rank_gate"),
        ("linear_attn_config", "kda_layers"),
    ],
)
def test_kf_067_a_key_that_defines_the_model_has_no_default(k3_config, path):
    with pytest.raises(ValueError, match=f"lacks .*{path[-1]}"):
        config_from_official(without(k3_config, *path))


def test_kf_020_the_gate_bound_is_explicit(k3_config):
    assert config_from_official(k3_config).kda.g_min == -5.0
    unbounded = config_from_official(with_linear(k3_config, gate_lower_bound=None))
    assert unbounded.kda.gate == "softplus"
    for bad in (0, 5.0):
        with pytest.raises(ValueError, match="g_min"):
            config_from_official(with_linear(k3_config, gate_lower_bound=bad))


def test_kf_079_layer_lists_count_from_one(k3_config):
    layers = config_from_official(k3_config).layers
    assert [i for i, (a, _) in enumerate(layers) if a == "mla"] == [3, 7, 8]
    n = k3_config["num_hidden_layers"]
    for kda, mla, words in (
        ([1, 2, 3, 4, 5, 6, 7], [4, 8, 9], r"in both \[4\]"),
        ([1, 2, 3, 5, 6], [4, 8, 9], r"in neither \[7\]"),
        ([0, 1, 2, 3, 5, 6, 7], [4, 8, 9], r"outside \[0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            config_from_official(with_linear(k3_config, kda_layers=kda, full_attn_layers=mla))
    assert n == 9


def test_kf_081_outer_inner_and_linear_configs(k3_config):
    assert config_from_official(
        {"text_config": k3_config, "model_type": "outer"}
    ) == config_from_official(k3_config)
    linear = config_from_official(load("text_linear/io")[0]["config"])
    assert (linear.attn_res.kind, linear.kda.gate, linear.activation.kind) == (
        "none",
        "softplus",
        "swiglu",
    )
    assert linear.kda.out_gate_rank == linear.kda.head_dim
    assert linear.moe.latent_dim is None


def test_schedules_fold_to_their_shortest_description():
    k, m = "kda", "mla"
    assert fold_schedule((k, k, k, m) * 23 + (m,)) == ((k, k, k, m), (m,))
    assert fold_schedule((k, k, k, m) * 6 + (k, k, m)) == ((k, k, k, m), (k, k, m))
    assert fold_schedule((k,)) == ((k,), ())


# -- configs, back


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_an_official_config(name):
    """Outer with a text_config if it has parts of K3 (KF-081); all but how it is trained and computed."""
    model = preset(name)().model
    official = config_to_official(model)
    assert ("text_config" in official) == (name != "kimi_linear_48b")
    assert config_from_official(official) == function_of(model)
    changed = replace(model, remat="none", dtype="float32", param_dtype="float16")
    assert function_of(changed) == function_of(model)
    assert function_of(replace(model, norm_eps=1e-3)) != function_of(model)


def test_a_model_without_experts_survives():
    dense = replace(CFG, moe=None, num_dense_layers=3)
    official = config_to_official(dense)
    assert official["text_config"]["num_experts"] is None
    assert config_from_official(official) == function_of(dense)


@pytest.mark.parametrize("case", ["text_k3/io", "text_linear/io"])
def test_official_configs_survive_with_all_their_keys(case):
    """With the original as base nothing is lost; keys that say nothing about the function stay."""
    config = load(case)[0]["config"] | {"unknown_key": [1], "bos_token_id": 7}
    back = config_to_official(config_from_official(config), config)
    assert {key: back[key] for key in config} == config
    assert set(back) - set(config) <= {"initializer_range", "dtype"}
    from_scratch = config_to_official(config_from_official(config))
    assert config_from_official(from_scratch) == config_from_official(config)


def test_the_outer_config_survives_with_its_vision_tower(checkpoint_config):
    packed = config_from_official(checkpoint_config)
    packed = replace(packed, moe=replace(packed.moe, weights="mxfp4"))
    back = config_to_official(packed, checkpoint_config)
    back["text_config"].pop("initializer_range")
    assert back == checkpoint_config


def test_kf_079_the_lists_of_layers_count_from_one_again(k3_config):
    back = config_to_official(config_from_official(k3_config))["text_config"]["linear_attn_config"]
    assert back["full_attn_layers"] == [4, 8, 9]
    assert back["kda_layers"] == [1, 2, 3, 5, 6, 7]


def test_the_quantisation_follows_the_experts(checkpoint_config):
    plain = config_from_official(checkpoint_config)
    packed = replace(plain, moe=replace(plain.moe, weights="mxfp4"))
    assert checkpoint_config["text_config"]["quantization_config"] == MXFP4
    assert config_to_official(packed)["text_config"]["quantization_config"] == MXFP4
    for base in (None, checkpoint_config):
        assert "quantization_config" not in config_to_official(plain, base)["text_config"]
    outside = {k: v for k, v in checkpoint_config.items() if k != "text_config"}
    outside |= {"text_config": dict(checkpoint_config["text_config"])}
    outside["quantization_config"] = outside["text_config"].pop("quantization_config")
    back = config_to_official(packed, outside)
    assert back["quantization_config"] == MXFP4
    assert "quantization_config" not in back["text_config"]
    assert "quantization_config" not in config_to_official(plain, outside)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: replace(c, kda=replace(c.kda, beta_max=2.0)),
            r"model\.kda\.beta_max=2\.0 .* 1\.0",
        ),
        (lambda c: replace(c, kda=replace(c.kda, gate_rank=None)), r"model\.kda\.gate_rank=None"),
        (lambda c: replace(c, kda=replace(c.kda, norm_eps=1e-3)), r"model\.kda\.norm_eps=0\.001"),
        (lambda c: replace(c, mla=replace(c.mla, latent_norm_eps=0.5)), r"latent_norm_eps=0\.5"),
        (
            lambda c: replace(c, attn_res=replace(c.attn_res, kind="full", block_size=None)),
            r"model\.attn_res\.kind='full' cannot be stated in an official config: that means 'none'",
        ),
    ],
)
def test_what_no_official_config_can_state_is_named(change, words):
    with pytest.raises(UserError, match=words):
        config_to_official(change(CFG))


def test_a_variant_cannot_be_stated():
    kda = {f: getattr(CFG.kda, f) for f in CFG.kda.__dataclass_fields__}
    variant = SoftplusGateConfig(**kda | dict(gate="softplus", g_min=None, rate_min=1, rate_max=16))
    with pytest.raises(UserError, match=r"model\.kda=SoftplusGateConfig .* means KDAConfig"):
        config_to_official(replace(CFG, kda=variant))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(text_config=[]), "text_config must be an object"),
        (dict(linear_attn_config=[1]), "linear_attn_config must be an object"),
        (dict(num_hidden_layers=10**12), "num_hidden_layers=1000000000000 is more than 10000"),
        (dict(num_experts=0), "num_experts=0 must be at least 1"),
    ],
)
def test_an_odd_config_is_named(k3_config, change, words):
    with pytest.raises(ValueError, match=words):
        config_from_official(k3_config | change)
