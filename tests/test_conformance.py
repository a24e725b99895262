"""The conformance kit: what it holds, that we pass it, and that a wrong implementation does not."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax import cli, conformance
from k3jax.conformance import Programs
from k3jax.errors import UserError
from k3jax.official_audit import audit
from k3jax.safetensors_files import SafetensorsFolder

NAMES = ("k3", "kimi_linear", "mxfp4")


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conformance") / "kit"
    assert cli.main(["conformance", "make", str(folder)]) == 0
    return folder


def results_of(kit, target, change=None):
    """The expected results as another implementation would write them, with one of them changed."""
    target.mkdir()
    for name in NAMES:
        tensors = load_file(kit / "expected" / f"{name}.safetensors")
        if change is not None and change[0] == name:
            tensors[change[1]] = change[2](tensors[change[1]])
        save_file(tensors, target / f"{name}.safetensors")
    return target


def test_each_model_is_a_checkpoint_in_the_official_layout(kit):
    found = {name: audit(SafetensorsFolder(str(kit / name))) for name in NAMES}
    assert {name: a.plain for name, a in found.items()} == {
        "k3": "F32", "kimi_linear": "F32", "mxfp4": "BF16"
    }  # fmt: skip
    assert found["mxfp4"].cfg.moe.weights == "mxfp4"
    assert found["mxfp4"].padded_a_log
    assert found["kimi_linear"].cfg.kda.gate == "softplus"
    assert sum(p.stat().st_size for p in kit.rglob("*")) < 8e6


def test_the_kit_holds_what_its_readme_lists(kit):
    readme = (kit / "README.md").read_text()
    for name in NAMES:
        kinds = {t.split(".")[0] for t in load_file(kit / "expected" / f"{name}.safetensors")}
        assert kinds == {
            "input_ids", "prompt_ids", "hidden", "final", "logits", "loss", "greedy_tokens",
            "greedy_logits", "grad", "grad_norm",
        }  # fmt: skip
        assert all(f"`{kind}" in readme for kind in kinds)


def test_this_implementation_passes(kit, capsys):
    assert cli.main(["conformance", "check", str(kit)]) == 0
    out = capsys.readouterr().out
    assert "DIFFERS" not in out
    total = sum(len(load_file(kit / "expected" / f"{n}.safetensors")) - 2 for n in NAMES)
    assert f"{total} of {total} tensors pass" in " ".join(out.split())


@pytest.mark.parametrize(
    "change",
    [
        ("k3", "logits", lambda x: x * (1 + 1e-2)),
        ("kimi_linear", "hidden.3", lambda x: np.roll(x, 1, 1)),
        ("mxfp4", "greedy_tokens", lambda x: np.where(np.arange(12) == 11, x + 1, x)),
        ("k3", "grad.model.norm.weight", lambda x: -x),
        ("mxfp4", "loss", lambda x: np.full_like(x, np.nan)),
    ],
    ids=lambda change: f"{change[0]}-{change[1]}",
)
def test_a_wrong_result_is_named(kit, tmp_path, change, capsys):
    results = results_of(kit, tmp_path / "results", change)
    assert cli.main(["conformance", "check", str(kit), "--results", str(results)]) == 1
    out = capsys.readouterr().out
    wrong = [line for line in out.splitlines() if line.startswith(f"{change[0]}: ")]
    assert len(wrong) == 1
    assert change[1] in wrong[0]


def test_right_results_and_parts_of_them_pass(kit, tmp_path):
    results = results_of(kit, tmp_path / "results")
    (results / "mxfp4.safetensors").unlink()
    assert cli.main(["conformance", "check", str(kit), "--results", str(results)]) == 0


def test_the_readme_compares_without_this_package(kit, tmp_path, monkeypatch, capsys):
    results_of(kit, tmp_path / "results", ("k3", "final", lambda x: x + 1))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(kit, "KIT")
    code = (kit / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if line[1] == "DIFFERS"] == ["final"]
    assert len(lines) > 100


def test_weights_matter(kit):
    """KF-084 and others: a checkpoint with two square matrices exchanged does not pass."""
    folder, expected = kit / "k3", load_file(kit / "expected/k3.safetensors")
    source = SafetensorsFolder(str(folder))
    a = audit(source)
    tensors = {p.name: source.read(p.name) for p in a.text}
    name = "model.layers.0.self_attn.f_b_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][::-1])
    params, buffers = conformance.from_official(a.cfg, tensors)
    programs = Programs(replace(a.cfg, dtype="float32"))
    _, found = programs.forward(params, buffers, expected["input_ids"], 0.0)
    about = json.loads((kit / "expected/k3.json").read_text())
    got = {name: np.asarray(x) for name, x in found.items()}
    excess = {name: e for name, e, _ in conformance._compare(got, expected, about["tolerances"])}
    assert excess["hidden.0"] > 10
    assert excess["logits"] > 10


def rewritten(kit, **changes):
    """Other tensors in what the kit expects of k3; None takes one away."""
    path = kit / "expected/k3.safetensors"
    tensors = load_file(path) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda kit: (kit / "expected/k3.json").write_bytes(b"\xff"), "k3.json is damaged"),
        (lambda kit: (kit / "expected/k3.json").write_text('{"format": 1}'), "'tolerances'"),
        (lambda kit: (kit / "expected/k3.json").write_text('{"format": 1, "tolerances": 5}'), "is damaged"),
        (lambda kit: rewritten(kit, input_ids=None), "no input_ids"),
        (lambda kit: rewritten(kit, input_ids=np.zeros(3, np.int32)), "no input_ids"),
        (lambda kit: rewritten(kit, prompt_ids=np.zeros((2, 3), np.float32)), "no prompt_ids"),
        (lambda kit: rewritten(kit, logits=None), "logits is in one"),
        (lambda kit: rewritten(kit, more=np.zeros(3, np.float32)), "more is in one"),
        (lambda kit: (kit / "expected/k3.json").write_text("{"), "k3.json is damaged"),
        (lambda kit: (kit / "expected/k3.json").write_text('{"format": 99}'), "has format 99"),
        (lambda kit: (kit / "expected/k3.json").unlink(), "is this a conformance kit"),
        (lambda kit: (kit / "expected/k3.safetensors").write_bytes(b"x" * 40), "k3.safetensors is no whole"),
        (lambda kit: (kit / "k3/model-00001-of-00002.safetensors").unlink(), "model-00001-of-00002"),
    ],
)  # fmt: skip
def test_a_damaged_kit_is_one_line(kit, tmp_path, damage, words):
    copy = tmp_path / "kit"
    shutil.copytree(kit, copy)
    damage(copy)
    with pytest.raises(UserError, match=words):
        conformance.check(str(copy))


def test_bad_results_are_one_line(kit, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    for arguments, words in (
        (["check", str(kit), "--results", str(results)], "has none of k3, kimi_linear, mxfp4"),
        (["make", str(kit)], "is not empty"),
        (["bake", str(kit)], "'bake'"),
        (["check"], "which folder?"),
        (["make", str(tmp_path / "new"), "--results", "x"], "unexpected arguments"),
    ):
        assert cli.main(["conformance", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.strip().splitlines()) == 1
    save_file({"logit": np.zeros(3, np.float32)}, results / "k3.safetensors")
    with pytest.raises(UserError, match="'logit', which the kit does not expect"):
        conformance.check(str(kit), str(results))
    save_file({"logits": np.zeros(3, np.float32)}, results / "k3.safetensors")
    with pytest.raises(UserError, match=r"logits has shape \(3,\)"):
        conformance.check(str(kit), str(results))
