"""`k3jax import` and `k3jax export`: bytes come back, bad values are named, interruptions cost nothing."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from tokenizers.models import WordLevel

from k3jax import checkpoint, cli, import_official, leaf_files
from k3jax.convert_hf import from_official
from k3jax.data.tokenizer import load_tokenizer
from k3jax.errors import UserError
from k3jax.export_official import Export, export_model
from k3jax.import_official import ImportArgs, import_model
from k3jax.import_plan import make_plan, reproducible
from k3jax.initial_state import initial_state, training_config
from k3jax.official_audit import audit
from k3jax.official_folder import KEPT, pass_on, read_manifest
from k3jax.pallas_kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from k3jax.run_dir import load_trained
from k3jax.safetensors_files import SafetensorsFolder
from k3jax.sharding.mesh import MeshConfig, make_mesh
from k3jax.train import train
from k3jax.train_state import abstract_state, init_params
from tests.data.chat_cases import small_tokenizer
from tests.official_helpers import (
    assert_same_files,
    contents,
    multimodal,
    patch,
    random_checkpoint,
    text_checkpoint,
    trainable_config,
)
from tests.tiny_run import text_folder

LAYER = "language_model.model.layers.1"
WEIGHT = f"{LAYER}.block_sparse_moe.experts.0.w1.weight"
CHOICES = {"mxfp4": ImportArgs(), "bf16": ImportArgs(experts="bf16")}


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the golden multimodal checkpoint."""
    return Path(shutil.copytree(multimodal(), tmp_path / "source"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The golden multimodal checkpoint imported both ways; not to be changed."""
    base = tmp_path_factory.mktemp("models")
    for choice, asked in CHOICES.items():
        import_model(str(multimodal()), str(base / choice), asked)
    return {choice: base / choice for choice in CHOICES}


def refused(function, *args) -> str:
    """The one line of a UserError."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def expected(source: Path, *, decoded: bool):
    """Parameters and buffers of a checkpoint by `from_official`, all tensors in memory."""
    folder = SafetensorsFolder(str(source))
    found = audit(folder)
    tensors = {p.name: folder.read(p.name) for p in found.text}
    cfg = found.cfg
    if decoded:
        cfg = replace(cfg, moe=replace(cfg.moe, weights="plain"))
        for name in [n for n in tensors if n.endswith("_packed")]:
            pair = tensors.pop(name), tensors.pop(name.replace("_packed", "_scale"))
            tensors[name.removesuffix("_packed")] = dequantize_mxfp4(*pair, jnp.bfloat16)
    return from_official(cfg, tensors, prefix=found.prefix)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


# ---- bytes come back


@pytest.mark.golden
@pytest.mark.parametrize("choice", CHOICES)
def test_the_golden_release_comes_back_byte_by_byte(models, choice, tmp_path):
    """KF-078 too: its A_log has 16 entries for 4 heads, with a zero tail, on the way in and out."""
    export_model(str(models[choice]), str(tmp_path / "out"))
    assert_same_files(tmp_path / "out", multimodal())


@pytest.mark.golden
@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_takes_over_what_its_export_needs(models, choice, tmp_path):
    """Vision tensors, names and placement, on whatever disk; unchanged weights come back as well."""
    run = tmp_path / "run"
    shutil.copytree(models[choice] / "checkpoints", run / "checkpoints")
    for _ in range(2):  # a start that was killed is followed by another
        pass_on(models[choice], run)
    export_model(str(run), str(tmp_path / "out"))
    assert_same_files(tmp_path / "out", multimodal())


@pytest.mark.golden
@pytest.mark.parametrize("choice", CHOICES)
def test_a_model_folder_loads_like_the_tensors_in_memory(models, choice):
    trained = load_trained(models[choice])
    want = expected(multimodal(), decoded=choice == "bf16")
    assert (trained.step, trained.cfg.name) == (0, choice)
    assert trained.cfg.model.moe.weights == ("plain" if choice == "bf16" else "mxfp4")
    assert_trees_equal((trained.params, trained.buffers), want)


@pytest.mark.golden
@pytest.mark.parametrize("case", ["text_k3", "text_linear"])
def test_golden_text_models_come_back_byte_by_byte(case, tmp_path):
    source = text_checkpoint(case, tmp_path / "source")
    import_model(str(source), str(tmp_path / "model"), ImportArgs())
    trained = load_trained(tmp_path / "model")
    assert trained.cfg.model.param_dtype == "float32"
    assert_trees_equal((trained.params, trained.buffers), expected(source, decoded=False))
    export_model(str(tmp_path / "model"), str(tmp_path / "out"))
    assert_same_files(tmp_path / "out", source)


def test_other_files_and_the_tokenizer_travel(source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    (source / "LICENSE").write_text("words")
    (source / "weights.bin").write_bytes(b"pickle")
    import_model(str(source), str(tmp_path / "model"), ImportArgs())
    moved = (tmp_path / "model").rename(tmp_path / "moved")
    assert load_trained(moved).cfg.tokenizer == str(moved / "tokenizer.json")
    export_model(str(moved), str(tmp_path / "out"))
    (source / "weights.bin").unlink()
    assert_same_files(tmp_path / "out", source)


def test_the_tokenizers_roles_travel_with_it(source, tmp_path):
    """Which token ends a document stands in tokenizer_config.json, beside tokenizer.json."""
    inner = tokenizers.Tokenizer(WordLevel({"a": 0, "halt": 1}, unk_token="a"))
    inner.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "halt"}')
    import_model(str(source), str(tmp_path / "model"), ImportArgs())
    assert load_tokenizer(load_trained(tmp_path / "model").cfg.tokenizer).eos_id == 1


def test_an_import_without_a_tokenizer_says_so(source, tmp_path, capsys):
    import_model(str(source), str(tmp_path / "model"), ImportArgs())
    assert "no tokenizer.json or tiktoken.model came with it" in capsys.readouterr().out
    (source / "tiktoken.model").write_bytes(b"ranks")
    import_model(str(source), str(tmp_path / "other"), ImportArgs())
    assert "came with it" not in capsys.readouterr().out


@pytest.mark.parametrize("given", ["file", "folder"])
def test_the_vocabulary_of_a_run_comes_back_from_its_export(tmp_path, given):
    """Whatever its file is called: an import finds it by the release's name alone."""
    vocabulary = Path(small_tokenizer(tmp_path).name)
    if given == "folder":
        (tmp_path / "vocabulary").mkdir()
        shutil.copy(vocabulary, tmp_path / "vocabulary/tiktoken.model")
    spec = {"file": vocabulary, "folder": tmp_path / "vocabulary"}[given]
    size = load_tokenizer(str(spec)).size
    cfg = trainable_config(num_layers=3, pattern=("kda",), closing=("mla",))
    cfg = replace(cfg, vocab_size=size)
    run = saved_run(tmp_path / "run", cfg, tokenizer=str(spec))
    export_model(str(run), str(tmp_path / "out"))
    assert (tmp_path / "out/tiktoken.model").read_bytes() == vocabulary.read_bytes()
    import_model(str(tmp_path / "out"), str(tmp_path / "model"), ImportArgs())
    found = load_tokenizer(load_trained(tmp_path / "model").cfg.tokenizer)
    assert found.fingerprint == load_tokenizer(str(spec)).fingerprint


def test_a_run_with_another_vocabulary_exports_that(tmp_path, monkeypatch):
    """Its own in place of the source's; the source's where the run has kept it, whatever lies about here."""
    vocabulary = Path(small_tokenizer(tmp_path).name)
    cfg = trainable_config(num_layers=3, pattern=("kda",), closing=("mla",))
    cfg = replace(cfg, vocab_size=1000)
    source = random_checkpoint(cfg, tmp_path / "source")
    (source / "tokenizer.json").write_text('{"of": "the source"}')
    (source / "tokenizer_config.json").write_text("{}")
    import_model(str(source), str(tmp_path / "model"), ImportArgs())
    (tmp_path / "here").mkdir()
    (tmp_path / "here/tokenizer.json").write_text('{"of": "somebody else"}')
    monkeypatch.chdir(tmp_path / "here")
    export_model(str(tmp_path / "model"), str(tmp_path / "same"))
    assert_same_files(tmp_path / "same", source)
    other = replace(cfg, param_dtype="float32")
    for spec, names in (
        (vocabulary, {"tiktoken.model": vocabulary}),
        (tmp_path / "model/tokenizer.json", {"tokenizer.json": source / "tokenizer.json"}),
    ):
        run = saved_run(tmp_path / f"run-{spec.name}", other, tokenizer=str(spec))
        pass_on(tmp_path / "model", run)
        out = tmp_path / f"out-{spec.name}"
        export_model(str(run), str(out))
        found = {path.name for path in out.iterdir() if "token" in path.name}
        assert found - {"tokenizer_config.json"} == set(names)
        assert ("tokenizer_config.json" in found) == ("tokenizer.json" in names)
        for name, path in names.items():
            assert (out / name).read_bytes() == path.read_bytes()


def test_a_memory_url_is_a_source_and_no_target(source, models, tmp_path):
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(source), "/released", recursive=True)
    try:
        import_model("memory://released", str(tmp_path / "model"), ImportArgs())
    finally:
        fs.rm("/released", recursive=True)
    export_model(str(tmp_path / "model"), str(tmp_path / "out"))
    assert_same_files(tmp_path / "out", source)
    assert "no local folder" in refused(export_model, str(models["mxfp4"]), "memory://out")


# ---- 4-bit pairs


def test_what_encoding_again_gives_is_read_off_the_codes():
    """`reproducible` against the encoder, on every kind of group."""
    rng, found = np.random.default_rng(0), set()
    for most in (0, 1, 4, 6, 8):  # codes below this
        for base in (0, 1, 60, 127):
            codes = rng.integers(0, max(most, 1), (40, 32), np.uint8)
            codes |= rng.integers(0, 2, codes.shape, np.uint8) << 3
            packed = codes[:, ::2] | codes[:, 1::2] << 4
            scale = np.full((40, 1), base, np.uint8)
            for p, s in zip(packed, scale, strict=True):
                again = quantize_mxfp4(dequantize_mxfp4(p, s, jnp.bfloat16))
                same = np.array_equal(again[0], p) and np.array_equal(again[1], s)
                assert reproducible(p, s) == same
                found.add(same)
    assert found == {True, False}


def test_a_pair_that_no_encoder_writes_is_kept_while_its_weight_is(source, tmp_path):
    """A group of codes up to 3 under too large a scale: encoding would double the codes."""
    packed = np.full(16, 0x32, np.uint8)
    patch(source, f"{WEIGHT}_packed", packed)
    model, kept = tmp_path / "model", f"official/tensors/{KEPT}"
    import_model(str(source), str(model), CHOICES["bf16"])
    with safe_open(model / kept, "numpy") as file:
        assert set(file.keys()) == {f"{WEIGHT}_packed", f"{WEIGHT}_scale"}
    export_model(str(model), str(tmp_path / "out"))
    assert_same_files(tmp_path / "out", source)

    folder = checkpoint.checkpoint_folder(model / "checkpoints")
    cfg, meta = load_trained(model).cfg, checkpoint.read_meta(folder)
    job = Export(model, folder, cfg, meta, tmp_path / "changed")
    weight = dequantize_mxfp4(
        *(job.others.read(f"{WEIGHT}_{p}") for p in ("packed", "scale")), jnp.bfloat16
    )
    np.testing.assert_array_equal(job._encoded(WEIGHT, weight)[0][0], packed)
    weight[5, 5] += 1  # as training would
    again = job._encoded(WEIGHT, weight)
    np.testing.assert_array_equal(again[0], quantize_mxfp4(weight)[0])
    assert not np.array_equal(again[0][0], packed)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    ("scale", "words"),
    [(255, "scale of 255, which is no number"), (250, "decodes to weights up to")],
)
def test_kf_073_scales_that_are_no_scales_are_named(source, tmp_path, choice, scale, words):
    patch(source, f"{WEIGHT}_packed", np.full(16, 0x77, np.uint8))
    patch(source, f"{WEIGHT}_scale", np.array([scale], np.uint8))
    message = refused(import_model, str(source), str(tmp_path / "model"), CHOICES[choice])
    assert f"{WEIGHT}_scale" in message
    assert words in message
    assert checkpoint.steps(tmp_path / "model/checkpoints") == ([], [])


def test_a_large_scale_of_zeros_is_fine(source, tmp_path):
    patch(source, f"{WEIGHT}_packed", np.zeros(16, np.uint8))
    patch(source, f"{WEIGHT}_scale", np.array([200], np.uint8))
    import_model(str(source), str(tmp_path / "model"), ImportArgs())


@pytest.mark.parametrize("value", [0.5, np.nan])
def test_kf_078_a_tail_that_is_not_zero_is_named(source, tmp_path, value):
    name = "language_model.model.layers.0.self_attn.A_log"
    patch(source, name, np.array([value], np.float32), at=9)
    message = refused(import_model, str(source), str(tmp_path / "model"), ImportArgs())
    assert name in message
    assert "tail is not zero" in message


def test_experts_that_are_not_packed_need_no_choice(tmp_path):
    source = text_checkpoint("text_k3", tmp_path / "source")
    message = refused(import_model, str(source), str(tmp_path / "model"), CHOICES["bf16"])
    assert "leave --experts out" in message
    assert not (tmp_path / "model").exists()


# ---- interruptions, foreign folders, damage


class Stop(Exception):
    pass


@pytest.mark.parametrize("choice", CHOICES)
def test_an_interrupted_import_goes_on_where_it_was(source, models, tmp_path, monkeypatch, choice):
    """Stopped after every few pieces: no piece in the journal is made twice, and all files agree."""
    target, made, starts = tmp_path / choice, [], 0
    monkeypatch.setattr(import_official, "ROUND", 8)
    real = import_official.make_piece

    def limited(plan, piece):
        if len(made) - before >= 30:
            raise Stop
        made.append(piece.key)
        return real(plan, piece)

    monkeypatch.setattr(import_official, "make_piece", limited)
    while True:
        before, starts = len(made), starts + 1
        try:
            import_model(str(source), str(target), CHOICES[choice])
            break
        except Stop:
            assert checkpoint.steps(target / "checkpoints") == ([], [])
            journal = next((target / "importing").glob("journal.*"))
            journal.write_bytes(journal.read_bytes() + b'["torn')
    pieces = make_plan(SafetensorsFolder(str(source)), CHOICES[choice].experts).pieces
    assert set(made) == {piece.key for piece in pieces}
    assert starts > 2
    assert len(made) <= len(pieces) + (import_official.ROUND + import_official.WORKERS) * (
        starts - 1
    )
    assert_same_files(target, models[choice])
    monkeypatch.setattr(import_official, "make_piece", None)
    assert import_model(str(source), str(target), CHOICES[choice]) == 0  # nothing to do


def test_an_interrupted_export_keeps_finished_files(models, tmp_path, monkeypatch):
    target, real = tmp_path / "out", Export._write

    def second_fails(self, file, out, shown):
        if (target / next(iter(self.manifest.files))).exists():
            raise Stop
        real(self, file, out, shown)

    monkeypatch.setattr(Export, "_write", second_fails)
    with pytest.raises(Stop):
        export_model(str(models["mxfp4"]), str(target))
    first = target / "model-00001-of-00002.safetensors"
    before = first.stat().st_mtime_ns
    assert not (target / "model.safetensors.index.json").exists()
    monkeypatch.setattr(Export, "_write", real)
    message = refused(export_model, str(models["bf16"]), str(target))
    assert "unfinished export of another model" in message
    export_model(str(models["mxfp4"]), str(target))
    assert first.stat().st_mtime_ns == before
    assert_same_files(target, multimodal())


def test_folders_of_something_else_are_left_alone(source, models, tmp_path, monkeypatch):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("words")
    before = contents(foreign)
    message = refused(import_model, str(source), str(foreign), ImportArgs())
    assert "is not empty (it has thesis.txt)" in message
    assert "is not empty (it has thesis.txt)" in refused(
        export_model, str(models["mxfp4"]), str(foreign)
    )
    assert contents(foreign) == before
    assert not (foreign / ".lock").exists()

    done = shutil.copytree(models["mxfp4"], tmp_path / "done")
    assert "holds another model" in refused(import_model, str(source), str(done), CHOICES["bf16"])

    half = tmp_path / "half"
    monkeypatch.setattr(import_official, "make_piece", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        import_model(str(source), str(half), ImportArgs())
    monkeypatch.undo()
    message = refused(import_model, str(source), str(half), CHOICES["bf16"])
    assert "unfinished import of another source or with other --experts" in message
    patch(source, "language_model.model.norm.weight", np.array([2.0], jnp.bfloat16))
    assert "another source" in refused(import_model, str(source), str(half), ImportArgs())
    assert "no complete checkpoint" in refused(load_trained, half)
    assert "no complete checkpoint" in refused(export_model, str(half), str(tmp_path / "out"))


MANIFESTS = {
    "empty": (lambda m: None, "is damaged"),
    "a list": (lambda m: [m], "is damaged"),
    "another format": (lambda m: {**m, "format": 9}, "has format 9"),
    "a field less": (lambda m: {k: v for k, v in m.items() if k != "plain"}, "'plain'"),
    "a type": (lambda m: {**m, "plain": "I8"}, "plain is 'I8'"),
    "a prefix": (lambda m: {**m, "prefix": 5}, "prefix is 5"),
    "no files": (lambda m: {**m, "files": 5}, "is damaged"),
    "a file's tensors": (lambda m: {**m, "files": {"x.safetensors": "ab"}}, "not listed by name"),
    "outside": (lambda m: {**m, "files": {"../x.safetensors": []}}, "'../x.safetensors', outside"),
    "absolute": (lambda m: {**m, "files": {"/x.safetensors": []}}, "'/x.safetensors', outside"),
    "no tensors": (lambda m: {**m, "files": {"config.json": []}}, "no safetensors file"),
    "metadata": (lambda m: {**m, "metadata": {"a": {"b": 1}}}, "metadata is"),
    "carried": (lambda m: {**m, "carried": [*m["carried"], "nope"]}, "nope"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_no_import_wrote_is_one_line(models, tmp_path, case):
    """A model folder may come from anywhere: what it says leads to no file outside of the target."""
    model = Path(shutil.copytree(models["mxfp4"], tmp_path / "in/model"))
    change, words = MANIFESTS[case]
    manifest = model / "official/manifest.json"
    changed = change(json.loads(manifest.read_bytes()))
    manifest.write_text("" if changed is None else json.dumps(changed))
    assert words in refused(export_model, str(model), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("content", [None, "", "[]", "5", "{}", '{"text_config": 5}'])
def test_a_damaged_config_of_the_source_is_one_line(models, tmp_path, content):
    model = Path(shutil.copytree(models["mxfp4"], tmp_path / "model"))
    config = model / "official/config.json"
    config.unlink() if content is None else config.write_text(content)
    assert str(config) in refused(export_model, str(model), str(tmp_path / "out"))


@pytest.mark.parametrize("content", ["", "[]", "5", "{}"])
def test_a_damaged_note_of_what_was_begun_is_of_something_else(source, models, tmp_path, content):
    for work in ("importing", ".k3jax-export"):
        (tmp_path / work).mkdir()
        (tmp_path / work / "source.json").write_text(content)
    assert "unfinished import" in refused(import_model, str(source), str(tmp_path), ImportArgs())
    assert "unfinished export" in refused(export_model, str(models["mxfp4"]), str(tmp_path))


def test_files_whose_names_are_used_here_are_left_out_aloud(source, tmp_path, caplog):
    """They would stand where the manifest and the kept tensors are to be, or count as half written."""
    names = ["manifest.json", "tensors", "a.part", "b.tmp"]
    for name in names:
        (source / name).write_text("{}")
    import_model(str(source), str(tmp_path / "model"), ImportArgs())
    for name in names:
        assert f"{name} has a name that is used here" in caplog.text
        (source / name).unlink()
    export_model(str(tmp_path / "model"), str(tmp_path / "out"))
    assert_same_files(tmp_path / "out", source)


def test_a_changed_byte_is_damage_for_load_and_export(models, tmp_path):
    model = Path(shutil.copytree(models["mxfp4"], tmp_path / "model"))
    chunk = next(model.glob("checkpoints/0/state/params.embed_tokens.embedding/0.0"))
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(data)
    for function in (load_trained, lambda path: export_model(str(path), str(tmp_path / "out"))):
        message = refused(function, model)
        assert "is damaged (not what was saved: params/embed_tokens/embedding)" in message
    assert not (tmp_path / "out/model.safetensors.index.json").exists()
    chunk.write_bytes(data[:5])
    for function in (load_trained, lambda path: export_model(str(path), str(tmp_path / "out2"))):
        assert "is damaged" in refused(function, model)


def test_a_target_that_cannot_be_written_is_one_line(source, models, capsys):
    for target in ("/proc/model", "/dev/null/model"):
        for command in (["import", str(source)], ["export", str(models["mxfp4"])]):
            assert cli.main([*command, target]) == 2
            line = capsys.readouterr().err.strip()
            assert line.startswith("k3jax: ")
            assert target in line
            assert "\n" not in line


LONG = [  # a name that no file system takes
    (["inspect"], []),
    (["import"], ["y"]),
    (["export"], ["y"]),
    (["train"], []),
    (["generate"], ["--prompt", "a"]),
    (["eval", "--run-dir"], []),
    (["conformance", "check"], []),
    (["tokenizer", "--out"], []),
]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["import"], "two folders are needed first"),
        (["export", "a", "--step"], "two folders are needed first"),
        (["import", "nowhere", "x"], "nowhere does not exist"),
        (["import", "nowhere", "x", "--experts", "int8"], "--experts int8: expected mxfp4 or bf16"),
        (["export", "nowhere", "x"], "'nowhere' is no folder"),
        (["train", "nowhere"], "unknown config 'nowhere'"),
        *(([*args, "x" * 5000, *more], "xxx") for args, more in LONG),
    ],
)
def test_bad_arguments_are_one_line(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(args) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error
    assert not list(tmp_path.iterdir())


# ---- layouts


def test_chunks_hold_whole_experts_and_cut_where_meshes_do():
    shape = (22, 896, 3072, 1792)
    assert leaf_files.chunk_shape(shape, 1, stacked=2) == (1, 4, 3072, 1792)
    assert leaf_files.chunk_shape((5, 6, 4), 2, stacked=2) == (1, 6, 4)
    chunk = leaf_files.chunk_shape((163840, 7168), 2, stacked=0, split=1)
    assert chunk == (163840, 56)
    one = leaf_files.chunk_shape((3, 7168, 96, 128), 2, stacked=1, split=1)
    assert one == (1, 896, 96, 128)


def test_leaves_keep_their_own_dtypes(models):
    """Convolutions, output norms, gates and router biases are float32 in a bfloat16 model."""
    for choice, path in models.items():
        trained = load_trained(path)
        layer = trained.params["layers_0_to_0"]["layer_0"]["self_attn"]
        for leaf in (layer["q_conv1d"]["kernel"], layer["o_norm"]["weight"], layer["A_log"]):
            assert leaf.dtype == jnp.float32, choice
        assert layer["q_proj"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_kf_085_any_run_exports_one_file_per_layer(tmp_path, tied):
    """Of a run that came from no release; tied, the head is no tensor and no entry of the index."""
    cfg = trainable_config(tie_embeddings=tied, num_layers=3, pattern=("kda",), closing=("mla",))
    run = saved_run(tmp_path / "run", cfg)
    export_model(str(run), str(tmp_path / "out"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            found |= dict.fromkeys(tensors.keys(), file.name)
            assert all(tensors.get_slice(name).get_shape() for name in tensors.keys())  # noqa: SIM118
    assert found == index["weight_map"]
    assert ("language_model.lm_head.weight" in found) != tied
    for name, file in found.items():
        layer = name.partition(".layers.")[2].partition(".")[0]
        assert file == f"model-{int(layer) + 1 if layer else 4:05}-of-000004.safetensors"
    audited = audit(SafetensorsFolder(str(tmp_path / "out")))
    assert audited.padded_a_log
    assert audited.cfg.tie_embeddings == tied


def saved_run(path: Path, model, **settings) -> Path:
    """A run folder whose only checkpoint has the model's random parameters."""
    from k3jax.checkpoint import CheckpointWriter
    from k3jax.configs import preset
    from k3jax.run_dir import to_json
    from tests.test_checkpoint import position

    params, buffers = init_params(model, jax.random.key(0))
    cfg = replace(preset("nano")(), model=model, **settings)
    with CheckpointWriter(path / "checkpoints", keep_last=1) as writer:
        writer.save(3, {"params": params, "buffers": buffers}, position(), to_json(cfg))
    return path


# ---- training


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model with packed experts, imported for training (`bf16`) and as it is (`mxfp4`)."""
    folder = tmp_path_factory.mktemp("base")
    model = trainable_config(num_layers=3, pattern=("kda",), closing=("mla",))
    moe = replace(model.moe, ffn_dim=32, latent_dim=32, weights="mxfp4")
    random_checkpoint(replace(model, moe=moe), folder / "source")
    for choice, asked in CHOICES.items():
        import_model(str(folder / "source"), str(folder / choice), asked)
    return folder


def shortened(model: Path, run: Path, data: Path):
    cfg = training_config(str(model))
    sizes = {"steps": 2, "batch_size": 2, "seq_len": 64, "checkpoint_every": 2, "eval_every": 0}
    return replace(cfg, run_dir=str(run), data=str(data), mesh=MeshConfig(), **sizes)


def test_training_starts_from_the_imported_weights_in_float32(base):
    cfg = training_config(str(base / "bf16"))
    assert cfg.init_from == str(base / "bf16")
    assert cfg.model.param_dtype == "float32"
    want = load_trained(base / "bf16")
    for mesh in (
        make_mesh(MeshConfig(), jax.devices()[:1]),
        make_mesh(MeshConfig(data=2, fsdp=2, expert=2)),
    ):
        abstract = abstract_state(cfg.model, cfg.optim, mesh)
        state = initial_state(cfg, mesh, abstract)
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
            lambda x: x.sharding, abstract
        )
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        given = jax.tree.map(lambda x: np.asarray(x, np.float32), (want.params, want.buffers))
        assert_trees_equal((state.params, state.buffers), given)


def test_a_model_is_trained_and_exported_in_the_layout_it_came_in(base, tmp_path):
    data = text_folder(tmp_path / "data")
    cfg = shortened(base / "bf16", tmp_path / "run", data)
    assert train(cfg, on=jax.devices()[:1]) == 0
    export_model(str(tmp_path / "run"), str(tmp_path / "out"))
    before, after = (SafetensorsFolder(str(p)) for p in (base / "source", tmp_path / "out"))
    assert after.tensors == before.tensors  # names, order, types, shapes, files
    assert after.config == before.config
    assert read_manifest(tmp_path / "run") == read_manifest(base / "bf16")
    trained = load_trained(tmp_path / "run")
    kernel = trained.params["lm_head"]["kernel"]
    name = "language_model.lm_head.weight"
    np.testing.assert_array_equal(after.read(name), np.asarray(kernel).T.astype(jnp.bfloat16))
    assert not np.array_equal(after.read(name), before.read(name))
    expert = np.asarray(
        trained.params["layers_1_to_1"]["layer_0"]["block_sparse_moe"]["experts"]["w1"]
    )
    packed, scale = quantize_mxfp4(np.ascontiguousarray(expert[0, 3].T))
    weight = f"{LAYER}.block_sparse_moe.experts.3.w1.weight"
    np.testing.assert_array_equal(after.read(f"{weight}_packed"), packed)
    np.testing.assert_array_equal(after.read(f"{weight}_scale"), scale)
    import_model(str(tmp_path / "out"), str(tmp_path / "again"), ImportArgs())


def test_what_cannot_be_trained_is_refused_before_anything_is_written(base, tmp_path):
    assert "import the model again with --experts bf16" in refused(
        training_config, str(base / "mxfp4")
    )
    cfg = shortened(base / "bf16", base / "bf16", tmp_path)
    assert "is the model that training starts from" in refused(train, cfg)
    data = text_folder(tmp_path / "data")
    cfg = shortened(base / "bf16", tmp_path / "run", data)
    wider = replace(cfg, model=replace(cfg.model, dense_ffn_dim=64))
    assert "does not fit this model" in refused(lambda: train(wider, on=jax.devices()[:1]))
    lost = replace(cfg, init_from=str(tmp_path / "lost"))
    assert "is no folder" in refused(lambda: train(lost, on=jax.devices()[:1]))
    assert not (tmp_path / "run").exists()
