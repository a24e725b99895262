"""Bad input: one line that names value and fix, exit code 2, nothing written, nothing lost."""

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from k3jax import cli, devices
from k3jax.checkpoint import CheckpointWriter
from k3jax.data.packing import make_train_iterator
from k3jax.data.text import load_corpus
from k3jax.data.tokenizer import load_tokenizer
from k3jax.run_dir import RunDir, to_json
from k3jax.train_state import init_state
from tests.tiny_run import TINY, listing, text_folder, tiny

IMPOSSIBLE = [  # flags, what the message must name
    ("--stps 3", ["--stps", "--steps"]),
    ("--num-layers 3", ["--num-layers", "--model.num-layers"]),
    ("--model.kda.headdim 8", ["--model.kda.headdim", "--model.kda.head-dim"]),
    ("--steps ten", ["--steps", "ten", "whole number"]),
    ("--steps 1e3", ["--steps", "1e3", "whole number"]),
    ("--optim.peak-lr fast", ["--optim.peak-lr", "fast", "number"]),
    ("--model.kda.gate open", ["--model.kda.gate", "open", "bounded or softplus"]),
    ("--steps", ["--steps", "no value"]),
    ("100", ["'100'", "--flag value"]),
    ("--steps -1", ["steps", "-1"]),
    ("--seq-len 1", ["seq_len", "1", "at least 2"]),
    ("--eval-every -1", ["eval_every", "-1"]),
    ("--seed 99999999999999999999", ["seed", "99999999999999999999", "2**32"]),
    ("--run-dir=", ["run_dir is empty"]),
    ("--data --x", ["--data", "--data=VALUE"]),
    ("--batch-size 0", ["batch_size", "0", "at least 1"]),
    ("--batch-size 3 --accumulation 2", ["batch_size=3", "accumulation=2"]),
    ("--platform quantum", ["platform", "'quantum'", "cpu, cuda or tpu"]),
    ("--model.kda.num-heads 0", ["num_heads", "0"]),
    ("--model.kda.head-dim -4", ["head_dim", "-4"]),
    ("--model.mla.v-dim 0", ["v_dim", "0"]),
    ("--model.moe.num-active 400", ["num_active=400", "num_experts"]),
    ("--model.num-layers 8", ["num_layers=8", "pattern"]),
    ("--model.pattern kda foo", ["--model.pattern", "foo", "kda or mla"]),
    ("--model.dtype float33", ["float33"]),
    ("--model.vocab-size 100", ["tokenizer 'bytes' has 259 ids", "--model.vocab-size 259"]),
    ("--tokenizer /nowhere/tokenizer.json", ["/nowhere/tokenizer.json", "bytes"]),
    ("--mesh.data 3", ["mesh data 3", "8 are here", "--mesh.data"]),
    ("--batch-size 12", ["batch_size=12", "8 devices"]),
    ("--data /nowhere", ["'/nowhere'", "--data"]),
]


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command in this process; returns code and error lines."""
    logger = logging.getLogger("k3jax")
    before = (logger.handlers[:], logger.level, logger.propagate)
    monkeypatch.setenv("K3JAX_CACHE_DIR", "")

    def run(*args):
        code = cli.main(list(map(str, args)))
        return code, capsys.readouterr().err.splitlines()

    yield run
    logger.handlers[:], logger.level, logger.propagate = before


def assert_refused(result, words) -> None:
    code, lines = result
    assert code == 2
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(("flags", "words"), IMPOSSIBLE, ids=[row[0] for row in IMPOSSIBLE])
def test_impossible_flags(command, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(command("train", "nano", *flags.split()), words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "nanno"], ["'nanno'", "nano"]),
        (["train", "kimi-k3"], ["'kimi-k3'", "kimi_k3"]),
        (["configs", "colb"], ["'colb'", "colab"]),
        (["trian", "nano"], ["'trian'", "train"]),
        (["generate"], ["which model", "MODEL_DIR"]),
        (["generate", "nowhere"], ["--prompt", "--chat", "--input"]),
        (["generate", "nowhere", "--prompt", "a", "--chat", "b"], ["one of", "--chat"]),
        (["generate", "nowhere", "--prompt", "a"], ["nowhere", "train first"]),
        (["generate", "nowhere", "--prompt", "a", "--top-p", "x"], ["--top-p", "x", "a number"]),
        (["generate", "nowhere", "--prompt", "a", "--seed", "-1"], ["seed", "-1"]),
        (["generate", "nowhere", "--prompt", "a", "--seed", str(2**70)], ["seed", str(2**70)]),
        (["generate", "nowhere", "--prompt", "a", "--max-tokens", "0"], ["max_tokens is 0"]),
        (["generate", "nowhere", "--prompt", "a", "--slots", "0"], ["slots is 0"]),
        (["generate", "nowhere", "--input", "a"], ["--input", "--output"]),
        (["generate", os.devnull, "--prompt", "a"], [os.devnull, "no folder"]),
        (["eval", "--run-dir", "nowhere"], ["nowhere", "train first"]),
        (["train", "nano", "--run-dir", "gs://bucket/run"], ["gs://bucket/run", "local path"]),
    ],
)
def test_wrong_names_and_folders(command, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(command(*args), words)
    assert not list(tmp_path.iterdir())


# ---- data


def bad_data(kind: str, folder: Path) -> tuple[Path, list[str]]:
    folder.mkdir()
    if kind == "empty folder":
        return folder, [f"'{folder}'", "no file of a supported kind"]
    if kind == "empty file":
        (folder / "a.txt").write_text("")
        return folder / "a.txt", ["a.txt", "empty"]
    if kind == "unknown suffix":
        (folder / "a.docx").write_text("x")
        return folder / "a.docx", ["a.docx", ".txt"]
    if kind == "glob without match":
        return folder / "*.txt", ["*.txt", "matches no file"]
    (folder / "a.txt").write_bytes(b"\xff\xfe\x00 not text \x80")
    return folder / "a.txt", ["a.txt", "UTF-8"]


KINDS = ["empty folder", "empty file", "unknown suffix", "glob without match", "undecodable file"]


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_is_missing_or_empty(command, tmp_path, kind):
    path, words = bad_data(kind, tmp_path / "data")
    run = tmp_path / "run"
    assert_refused(command("train", "nano", *TINY, "--batch-size", 8, "--data", path,
                           "--run-dir", run), words)  # fmt: skip
    assert not run.exists()


def test_a_single_document_trains_without_validation(command, tmp_path):
    """The message's own advice works."""
    data, run = tmp_path / "one.txt", tmp_path / "run"
    data.write_text("a single short document")
    args = ["train", "nano", *TINY, "--batch-size", 8, "--data", data, "--run-dir", run]
    assert_refused(command(*args), ["single document", "--eval-every 0"])
    code, _ = command(*args, "--eval-every", 0, "--steps", 1)
    assert code == 0
    assert (run / "checkpoints/1").is_dir()


def test_undecodable_file_among_good_ones_stops_only_if_strict(command, tmp_path):
    data = text_folder(tmp_path / "data")
    (data / "bad.txt").write_bytes(b"\xff\xfe\x00 not text \x80")
    args = ["train", "nano", *TINY, "--batch-size", 8, "--data", data, "--run-dir", tmp_path / "r"]
    assert_refused(command(*args, "--strict"), ["bad.txt", "--strict"])
    code, lines = command(*args, "--steps", 0)
    assert (code, lines) == (4, [])
    assert not (tmp_path / "r").exists()


# ---- run folders


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of the tiny model with checkpoints at steps 2 and 4, made without training."""
    base = tmp_path_factory.mktemp("made")
    cfg = tiny(base / "run", text_folder(base / "data"), "--batch-size", "8")
    run = RunDir(cfg.run_dir)
    run.create(cfg)
    state = init_state(cfg.model, cfg.optim, jax.random.key(0))
    split = load_corpus(cfg.data).split("train")
    data = make_train_iterator(
        split, load_tokenizer("bytes"), seq_len=cfg.seq_len, batch_size=8, seed=cfg.seed
    )
    with CheckpointWriter(run.checkpoints, keep_last=3) as writer:
        for step in (2, 4):
            writer.save(step, state, data, to_json(cfg))
    data.close()
    run.close()
    return base


@pytest.fixture
def made(run_folder, tmp_path):
    """A copy of that run: (folder, arguments that continue it)."""
    run = tmp_path / "run"
    shutil.copytree(run_folder / "run", run)
    flags = [*TINY, "--batch-size", "8", "--data", str(run_folder / "data"), "--run-dir", str(run)]
    return run, ["train", "nano", *flags]


def test_folder_of_another_configuration(command, made):
    run, args = made
    before = listing(run)
    result = command(*args, "--model.width", 64, "--seed", 1)
    assert_refused(result, ["model.width=32 (now 64)", "seed=0 (now 1)", "--run-dir"])
    assert listing(run) == before


def test_corrupted_checkpoint(command, made):
    run, args = made
    for file in (run / "checkpoints/4/state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    before = listing(run)
    words = [f"{run}/checkpoints/4 is damaged", "delete that folder to continue from step 2"]
    assert_refused(command(*args), words)
    assert_refused(command("generate", run, "--prompt", "a"), words)
    assert_refused(command("eval", "--run-dir", run), words)
    assert listing(run) == before


def test_one_line_however_many_reads_of_a_checkpoint_fail(made):
    """orbax drops the other reads, which complain from threads and when they are collected."""
    run, _ = made
    largest = max((run / "checkpoints/4/state").rglob("d/*"), key=lambda file: file.stat().st_size)
    os.truncate(largest, 0)
    program = [sys.executable, "-m", "k3jax.cli", "generate", run, "--prompt", "a"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert_refused((done.returncode, done.stderr.splitlines()), [f"{run}/checkpoints/4 is damaged"])


@pytest.mark.parametrize("temperature", ["inf", "nan", "-1"])
def test_temperature_is_a_number(command, made, temperature):
    run, _ = made
    asked = ["generate", run, "--prompt", "a", "--temperature", temperature]
    assert_refused(command(*asked), ["temperature", temperature])


def test_half_written_checkpoint_is_passed_over(command, made):
    run, args = made
    (run / "checkpoints/4/state/_METADATA").unlink()
    before = listing(run)
    code, lines = command(*args, "--steps", 2)
    assert code == 4, "step 2, the one before, is what there is to continue from"
    assert lines
    assert all("checkpoints/4 is incomplete" in line for line in lines)
    assert listing(run) == before


def test_damaged_config_file(command, made):
    run, args = made
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").write_text("{")
    assert_refused(command(*args), ["config.json is not JSON", "--run-dir"])


def test_configuration_from_another_version(command, made):
    run, _ = made
    for folder in (run / "checkpoints").iterdir():
        meta = json.loads((folder / "meta/metadata").read_text())
        del meta["config"]["model"]["width"]
        (folder / "meta/metadata").write_text(json.dumps(meta))
    found = command("generate", run, "--prompt", "a")
    assert_refused(found, ["another version", "model.width"])


def test_folder_that_cannot_be_made(command, tmp_path):
    (tmp_path / "file").write_text("")
    data = text_folder(tmp_path / "data")
    args = [*TINY, "--batch-size", 8, "--data", data, "--run-dir", tmp_path / "file" / "run"]
    assert_refused(command("train", "nano", *args), ["file/run", "Not a directory"])


# ---- machine


def test_unsupported_versions(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "installed", lambda: {"jax": "0.11.2", "flax": "0.12.9"})
    assert_refused(command("train", "nano"), ["jax 0.11.2 with flax 0.12.9", "pip install"])


def test_accelerator_that_is_absent(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert_refused(command("train", "nano", "--platform", "tpu"), ["platform 'tpu'"])


def test_kf_128_kimi_k3_on_one_machine_is_refused_with_its_bytes(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = "--tokenizer bytes --batch-size 8 --accumulation 1".split()  # noqa: SIM905
    code, lines = command("train", "kimi_k3", *flags)
    assert code == 2
    (line,) = lines
    assert line.count("bytes (") == 1
    needed = int(line.split(" needs ")[1].split(" bytes")[0].replace(",", ""))
    assert 30e12 < needed < 40e12
    assert "the largest that fits" in line
    assert not list(tmp_path.iterdir())


SMALL_FILES = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    from k3jax import cli
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_no_space_left(made):
    """Files may not grow beyond 20 kB: the next checkpoint fails, the earlier ones stay."""
    run, args = made
    program = [sys.executable, "-c", textwrap.dedent(SMALL_FILES), *args, "--steps", "6"]
    env = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "K3JAX_CACHE_DIR": ""}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=600, env=os.environ | env
    )
    assert done.returncode == 2, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("k3jax:")]
    assert len(error) == 1
    assert "free some space" in error[0]
    assert "Traceback" not in done.stderr
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "4"}
