"""Audits of official checkpoints: what fits, one line for all that does not, the table, the release's headers."""

import copy
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from k3jax import cli
from k3jax.errors import UserError
from k3jax.inspection import counted, parts
from k3jax.official_audit import audit
from k3jax.official_config import config_from_official
from k3jax.release import (
    TENSORS,
    TOTAL_BYTES,
    release_config,
    release_model,
    shard_of,
    write_headers,
)
from k3jax.safetensors_files import SafetensorsFolder, write_file
from k3jax.safetensors_header import name_of
from tests.golden_io import golden_dir, load

PREFIX = "language_model."
LAYER = f"{PREFIX}model.layers.2."
EXPERT = f"{LAYER}block_sparse_moe.experts.3.w1.weight"


@pytest.fixture(scope="module")
def golden():
    """(config, tensors) of the golden checkpoint; copy before changing."""
    folder = SafetensorsFolder(str(golden_dir() / "multimodal" / "checkpoint"))
    return folder.config, {name: folder.read(name) for name in folder.tensors}


def audited(path, config, tensors):
    """The audit of a checkpoint of one file."""
    (path / "config.json").write_text(json.dumps(config))
    kinds = {name: (name_of(x.dtype), x.shape) for name, x in tensors.items()}
    write_file(path / "model.safetensors", kinds, tensors.__getitem__, None)
    return audit(SafetensorsFolder(str(path)))


# -- what fits


@pytest.mark.golden
def test_the_golden_checkpoint_fits(tmp_path, golden):
    found = audited(tmp_path, *golden)
    assert (found.prefix, found.padded_a_log, found.plain) == (PREFIX, True, "BF16")
    assert (len(found.text), len(found.carried)) == (320, 24)
    assert {p.name for p in found.text} | set(found.carried) == set(golden[1])
    assert found.cfg.moe.weights == "mxfp4"
    plain = replace(found.cfg, moe=replace(found.cfg.moe, weights="plain"))
    assert plain == config_from_official(golden[0])


@pytest.mark.golden
@pytest.mark.parametrize(("case", "parts_of_k3"), [("text_k3", True), ("text_linear", False)])
def test_kf_081_a_text_config_alone_is_known_by_its_keys(tmp_path, case, parts_of_k3):
    config, tensors = load(f"{case}/io")[0]["config"], load(f"{case}/weights")[1]
    found = audited(tmp_path, config, tensors)
    assert (found.prefix, found.plain, found.carried) == ("", "F32", [])
    assert found.cfg.param_dtype == "float32"
    assert found.cfg.moe.weights == "plain"
    assert (found.cfg.attn_res.kind == "block") == parts_of_k3
    assert not found.padded_a_log


def test_an_outer_config_without_a_vision_tower_has_none(tmp_path, golden):
    config = {k: v for k, v in golden[0].items() if k != "vision_config"}
    tensors = {k: v for k, v in golden[1].items() if k.startswith(PREFIX)}
    assert audited(tmp_path, config, tensors).carried == []


def test_tensors_decide_what_is_packed_not_the_list_of_exceptions(tmp_path, golden):
    """The release's list omits router and latent projections, which are plain (KF-088)."""
    config = copy.deepcopy(golden[0])
    config["text_config"]["quantization_config"]["ignore"] = ["re:.*experts.*"]
    assert audited(tmp_path, config, golden[1]).cfg.moe.weights == "mxfp4"


def test_kf_078_a_log_of_either_length(tmp_path, golden):
    config, tensors = golden
    short = {k: v[:4] if k.endswith(".A_log") else v for k, v in tensors.items()}
    assert not audited(tmp_path, config, short).padded_a_log


# -- what does not: (change of config and tensors, words of the one line)


def drop(*names):
    return lambda config, tensors: [tensors.pop(name) for name in names]


def put(name, change):
    def edit(config, tensors):
        tensors[name] = change(tensors.get(name))

    return edit


def drop_experts(config, tensors):
    for name in [n for n in tensors if ".experts." in n and "layers.2." in n]:
        del tensors[name]


def unpack(config, tensors):
    """All experts plain, as after dequantising."""
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        del tensors[name]
        packed = tensors.pop(name.replace("_scale", "_packed"))
        shape = (packed.shape[0], packed.shape[1] * 2)
        tensors[name.removesuffix("_scale")] = np.zeros(shape, ml_dtypes.bfloat16)


def text(**changes):
    return lambda config, tensors: config["text_config"].update(changes)


def vision(**changes):
    return lambda config, tensors: config["vision_config"].update(changes)


def without(*path):
    def edit(config, tensors):
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return edit


def quantization(key, value, *path):
    def edit(config, tensors):
        part = config["text_config"]["quantization_config"]
        for step in path:
            part = part[step]
        part[key] = value

    return edit


GROUP = ("config_groups", "group_0")
CASES = {
    "scale dropped": (drop(f"{EXPERT}_scale"), f"1 missing: {EXPERT}_scale$"),
    "norm dropped": (
        drop(f"{LAYER}input_layernorm.weight"),
        "1 missing: .*input_layernorm.weight$",
    ),
    "expert dropped": (
        drop(
            *(
                f"{LAYER}block_sparse_moe.experts.7.{w}.weight_{p}"
                for w in ("w1", "w2", "w3")
                for p in ("packed", "scale")
            )
        ),  # fmt: skip
        r"6 missing: .*experts\.7\.w1\.weight_packed, .* and 1 more$",
    ),
    "experts of a layer dropped": (drop_experts, r"48 missing: (\S+, ){4}\S+ and 43 more$"),
    "layer too many": (
        put("language_model.model.layers.5.input_layernorm.weight", lambda _: np.ones(64)),
        r"1 unexpected: language_model\.model\.layers\.5\.input_layernorm\.weight$",
    ),
    "unknown tensor": (put("extra", lambda _: np.ones(2)), "1 unexpected: extra$"),
    "name without prefix": (
        lambda c, t: t.update({"model.norm.weight": t.pop(f"{PREFIX}model.norm.weight")}),
        r"1 missing: language_model\.model\.norm\.weight; 1 unexpected: model\.norm\.weight$",
    ),
    "unknown vision tensor": (
        put("vision_tower.encoder.blocks.3.norm0.weight", lambda _: np.ones(32)),
        r"1 unexpected: vision_tower\.encoder\.blocks\.3",
    ),
    "vision tensor dropped": (
        drop("mm_projector.post_norm.weight"),
        r"1 missing: mm_projector\.post_norm\.weight$",
    ),
    "vision tensor misshapen": (
        put("vision_tower.patch_embed.pos_emb.weight", lambda x: x[:4]),
        r"1 misshapen: .*pos_emb.weight \[4, 8, 32\] instead of \[8, 8, 32\]$",
    ),
    "scales along the outputs": (
        put(f"{EXPERT}_scale", lambda x: x.T),
        r"1 misshapen: .*weight_scale \[1, 32\] instead of \[32, 1\]$",
    ),
    "transposed": (
        put(f"{PREFIX}lm_head.weight", lambda x: np.ascontiguousarray(x.T)),
        r"lm_head\.weight \[64, 256\] instead of \[256, 64\]",
    ),
    "packed as floats": (
        put(f"{EXPERT}_packed", lambda x: x.astype(np.float32)),
        "1 of another type: .*weight_packed F32 instead of U8$",
    ),
    "one plain tensor in float32": (
        put(f"{PREFIX}model.norm.weight", lambda x: x.astype(np.float32)),
        r"1 of another type: .*norm\.weight F32 instead of BF16$",
    ),
    "A_log in bfloat16": (
        put(f"{PREFIX}model.layers.0.self_attn.A_log", lambda x: x.astype(ml_dtypes.bfloat16)),
        "A_log BF16 instead of F32$",
    ),
    "A_log of one layer short": (
        put(f"{PREFIX}model.layers.1.self_attn.A_log", lambda x: x[:4]),
        r"1 misshapen: .*layers\.1\.self_attn\.A_log \[4\] instead of \[16\]$",
    ),
    "A_log of 15": (
        put(f"{PREFIX}model.layers.0.self_attn.A_log", lambda x: x[:15]),
        r"A_log \[15\] instead of \[4\]",
    ),
    "embedding in float16": (
        put(f"{PREFIX}model.embed_tokens.weight", lambda x: x.astype(np.float16)),
        "the embedding is F16; use a checkpoint of BF16 or F32",
    ),
    "several at once": (
        lambda c, t: (t.pop(f"{PREFIX}lm_head.weight"), t.update(extra=np.ones(2, np.float32))),
        r"1 missing: language_model\.lm_head\.weight; 1 unexpected: extra$",
    ),
    "no vision config": (without("vision_config"), "24 unexpected: .* and 19 more$"),
    "inner config for outer names": (
        lambda c, t: c.update(c.pop("text_config")),
        r"320 missing: model\.embed_tokens.weight, .*; 320 unexpected: language_model\.",
    ),
    "key missing": (without("text_config", "routed_expert_hidden_size"), "lacks routed_expert_hid"),
    "inner key missing": (
        without("text_config", "linear_attn_config", "gate_lower_bound"),
        r"config\.json: config lacks linear_attn_config\.gate_lower_bound, which defines the model",
    ),
    "vision key missing": (
        without("vision_config", "qkv_hidden_size"),
        "lacks vision_config.qkv_hid",
    ),
    "vision biases": (vision(attn_bias=True), "vision_config.attn_bias=True is not supported"),
    "vision no object": (lambda c, t: c.update(vision_config=3), "vision_config must be an object"),
    "text no object": (lambda c, t: c.update(text_config=3), "text_config must be an object"),
    "number as text": (text(hidden_size="64"), "hidden_size='64' must be an integer"),
    "fraction": (text(num_experts=8.5), r"num_experts=8\.5 must be an integer"),
    "null": (text(hidden_size=None), r"config\.json: hidden_size=None must be an integer"),
    "false as text": (
        text(mla_use_nope="false"),
        "mla_use_nope='false' must be true or false",
    ),
    "epsilon as text": (text(rms_norm_eps="1e-5"), "rms_norm_eps='1e-5' must be a number"),
    "epsilon true": (text(rms_norm_eps=True), "rms_norm_eps=True must be a number"),
    "number for a word": (text(hidden_act=1), "hidden_act=1 must be a word"),
    "count true": (text(vocab_size=True), "vocab_size=True must be an integer"),
    "lists of another kind": (
        lambda c, t: c["text_config"]["linear_attn_config"].update(kda_layers=["1"]),
        r"config\.json: linear_attn_config\.kda_layers must be a list of layer numbers",
    ),
    "many layers": (text(num_hidden_layers=10**9), "num_hidden_layers=1000000000 is more than"),
    "many experts": (text(num_experts=10**12), "num_experts, over all layers=4000000000000, but"),
    "many vision layers": (
        vision(vt_num_hidden_layers=10**9),
        "vt_num_hidden_layers=1000000000, but",
    ),
    "unknown activation": (text(hidden_act="relu"), "hidden_act='relu' is unknown"),
    "packed without quantisation": (
        without("text_config", "quantization_config"),
        "no quantization_config, but .*weight_packed is packed",
    ),
    "quantisation without packed": (unpack, "quantization_config, but no tensor is packed"),
    "quantisation no object": (
        text(quantization_config="mxfp4"),
        "'mxfp4' where an object must be",
    ),
    "another method": (
        quantization("quant_method", "gptq"),
        "quant_method='gptq' is not supported",
    ),
    "another format": (
        quantization("format", "nvfp4-pack-quantized"),
        "format='nvfp4-pack-quantized' is not supported; .* 'mxfp4-pack-quantized'",
    ),
    "another format of the group": (quantization("format", "int8", *GROUP), "format='int8' is not"),
    "activations": (quantization("input_activations", {}, *GROUP), "input_activations={} is not"),
    "not compressed": (
        quantization("quantization_status", "frozen"),
        "quantization_status='frozen'",
    ),
    "8 bits": (quantization("num_bits", 8, *GROUP, "weights"), "num_bits=8 is not supported"),
    "integers": (quantization("type", "int", *GROUP, "weights"), "type='int' is not supported"),
    "groups of 16": (quantization("group_size", 16, *GROUP, "weights"), "group_size=16 is not"),
    "per channel": (quantization("strategy", "channel", *GROUP, "weights"), "strategy='channel'"),
    "not symmetric": (
        quantization("symmetric", False, *GROUP, "weights"),
        "symmetric=False is not",
    ),
    "group size missing": (
        without("text_config", "quantization_config", *GROUP, "weights", "group_size"),
        "group_size=None is not supported",
    ),
    "no groups": (quantization("config_groups", {}), "config_groups={}; one group is supported"),
    "weights no object": (quantization("weights", 4, *GROUP), "4 where an object must be"),
}


@pytest.mark.parametrize("case", CASES)
def test_kf_088_what_does_not_fit_is_one_line(tmp_path, golden, case):
    change, words = CASES[case]
    config, tensors = copy.deepcopy(golden[0]), dict(golden[1])
    change(config, tensors)
    with pytest.raises(UserError, match=words) as error:
        audited(tmp_path, config, tensors)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1500


@pytest.mark.golden
def test_kf_088_no_damage_ends_in_a_traceback(tmp_path, golden):
    """Damaged headers, indices and configs are refused in one line, or change nothing that counts."""
    source = golden_dir() / "multimodal" / "checkpoint"
    intact = {path.name: path.read_bytes() for path in source.iterdir()}
    for name, data in intact.items():
        (tmp_path / name).write_bytes(data)
    words = [b"null", b"true", b"-1", b"1e9", b"[]", b"{}", b'""', b"9" * 20, b"0", b'"a"', b"1.5"]
    rng, refused = random.Random(0), 0
    for round_ in range(400):
        name = rng.choice(["config.json", *sorted(intact)])
        data = bytearray(intact[name])
        header = min(len(data), 8 + int.from_bytes(data[:8], "little"))
        at = rng.randrange(header)
        if round_ % 4 == 0:
            data[at] = rng.randrange(256)
        elif round_ % 4 == 1:
            del data[at : at + rng.randint(1, 50)]
        else:  # another value, of the same length in a header
            values = list(re.finditer(rb"(?<=: )[^,{}\[\]]+|(?<=:)[^,{}\[\]]+", data[:header]))
            start, end = rng.choice(values).span()
            word = rng.choice(words)
            size = end - start if name.endswith(".safetensors") else len(word)
            data[start:end] = word.ljust(size)[: max(size, len(word))]
        (tmp_path / name).write_bytes(data)
        try:
            audit(SafetensorsFolder(str(tmp_path)))
        except UserError:
            refused += 1
        (tmp_path / name).write_bytes(intact[name])
    assert refused > 200


# -- the table


@pytest.fixture
def command(capsys):
    def run(*args):
        code = cli.main(list(args))
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run


def test_inspect_shows_components_and_totals(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = command("inspect", str(golden_dir() / "multimodal" / "checkpoint"))
    assert code == 0
    rows = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 6:
            rows[cells[0], cells[2]] = cells[1:2] + cells[3:]
    assert rows["routed experts", "U8"] == ["192", "98,304", "52,224", "4-bit weights"]
    assert rows["KDA layers", "F32"] == ["18", "2,556", "10,368", "parameters, float32"]
    assert rows["vision tower", "BF16"] == ["21", "51,808", "103,616", "kept for the export"]
    assert rows["total", ""] == ["344", "404,204", "669,344", ""]
    assert "Kimi K3, with a vision tower" in out
    assert "1 KDA + dense, 2 KDA + MoE, 2 MLA + MoE" in out


def test_inspect_cuts_no_word_on_a_narrow_terminal(command, monkeypatch):
    """65 columns here are 80 for the release, whose numbers take 15 more."""
    monkeypatch.setenv("COLUMNS", "65")
    code, out, _ = command("inspect", str(golden_dir() / "multimodal" / "checkpoint"))
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 65


def test_every_component_has_a_row_of_its_own(tmp_path, golden):
    folder = SafetensorsFolder(str(golden_dir() / "multimodal" / "checkpoint"))
    names = {name for name, _ in parts(folder, audit(folder))}
    assert names == {
        "embedding", "head", "KDA layers", "MLA layers", "dense layers", "routers", "latent projections",
        "shared experts", "routed experts", "attention residuals", "norms", "vision tower", "projector",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["a", "b"], "takes one folder, not 'a b'"),
        (["--release"], "takes one folder, not 'none'"),
        (["--headers", "a"], "takes one folder, not '--headers a'"),
        (["--release", "."], r". exists and is not empty"),
    ],
)
def test_bad_arguments_are_one_line(command, args, words):
    code, out, err = command("inspect", *args)
    assert (code, out, len(err)) == (2, "", 1)
    assert words in err[0]


def test_help_is_usage(command):
    for flag in ("--help", "-h"):
        code, out, _ = command("inspect", flag)
        assert code == 0
        assert "k3jax inspect FOLDER_OR_URL" in out
    code, out, err = command("inspect")
    assert (code, out) == (2, "")
    assert "usage" in err[0]


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("k3jax.inspection.LINES", 0.0)
    with counted(Console(), "headers read") as on_file:
        on_file(1, 2)
    assert capsys.readouterr().out.startswith("headers read 1/2  left ")


# -- the release


def test_the_release_config_is_that_of_the_model():
    config = release_config()
    found = config_from_official(config, param_dtype="float32")
    plain = replace(release_model(), remat="none")
    assert found == replace(plain, moe=replace(plain.moe, weights="plain"))
    assert config["text_config"]["linear_attn_config"]["full_attn_layers"][-3:] == [88, 92, 93]


def test_a_layer_lies_in_a_file_of_its_own():
    names = {
        "language_model.model.layers.0.mlp.up_proj.weight": 1,
        "language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale": 93,
        "language_model.model.embed_tokens.weight": 94,
        "language_model.lm_head.weight": 94,
        "language_model.model.norm.weight": 94,
        "language_model.model.output_attn_res_norm.weight": 94,
        "mm_projector.proj.0.weight": 95,
        "vision_tower.encoder.blocks.3.norm0.weight": 96,
    }
    assert {name: shard_of(name, 93) for name in names} == names


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="exists and is not empty"):
        write_headers(tmp_path, on_file=lambda done, total: None)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_dry_run_of_the_release_in_a_minute_and_two_gib(tmp_path):
    """All 497,220 headers written, read and audited; the figures are those of the released index."""
    folder, began = tmp_path / "release", time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "k3jax.cli", "inspect", "--release", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "160"},
    )
    with process, process.stdout as pipe:
        out = pipe.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert time.monotonic() - began < 60
    assert usage.ru_maxrss < 2 * 2**20  # KiB
    total = next(line for line in out.splitlines() if "total" in line)
    for figure in (TENSORS, 2_779_931_834_976, TOTAL_BYTES):
        assert f" {figure:,} " in total

    found = SafetensorsFolder(str(folder), payload=False)
    assert len(found.files) == 96
    assert len(found.tensors) == TENSORS == 497_220
    sizes = dict.fromkeys(found.files, 0)
    for info in found.tensors.values():
        sizes[info.file] += info.end - info.begin
    shards = list(sizes.values())  # those of the specification, checkpoint format section 3
    assert shards[0] == 2_341_213_184
    assert shards[1] == shards[90] == 16_990_092_800
    assert shards[3] == shards[91] == shards[92] == 16_566_684_160
    assert shards[93:] == [4_697_663_488, 92_289_024, 802_428_928]
    assert sum(shards) == TOTAL_BYTES == 1_560_860_324_864
    with pytest.raises(UserError, match=r"model-00001-of-000096\.safetensors has .*: truncated"):
        SafetensorsFolder(str(folder))
