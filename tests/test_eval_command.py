"""`k3jax eval`: one figure, on one device and on many."""

import re

import jax
import pytest

from k3jax import cli
from k3jax.train import train
from tests.data.chat_cases import small_tokenizer
from tests.tiny_run import text_folder, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    base = tmp_path_factory.mktemp("eval")
    flags = ["--batch-size", "4", "--steps", "2", "--eval-every", "0", "--checkpoint-every", "2"]
    cfg = tiny(base / "run", text_folder(base / "text"), *flags)
    assert train(cfg, on=jax.devices()[:1]) == 0
    return base / "run"


def figures(capsys, *args):
    assert cli.main(["eval", *map(str, args)]) == 0
    found = re.search(
        r"step 2: loss ([\d.]+) .* ([\d.]+) bits per byte on", capsys.readouterr().out
    )
    assert found
    return found.groups()


@pytest.mark.devices
@pytest.mark.parametrize(
    "mesh",
    ["--mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2", "--mesh.expert 4 --mesh.context 2"],
)
def test_a_mesh_gives_the_figures_of_one_device(run, capsys, mesh):
    asked = ("--run-dir", run, "--batches", 2)
    assert figures(capsys, *asked, *mesh.split()) == figures(capsys, *asked)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("--mesh.fsdp 3", "needs 3 devices, 8 are here"),
        ("--mesh.fsdp 8", "4 rows per pass do not divide"),
        ("--mesh.tensor 8", "does not divide over mesh axis tensor"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(run, capsys, mesh, words):
    assert cli.main(["eval", "--run-dir", str(run), *mesh.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_another_tokenizer(run, capsys, tmp_path):
    """For a model that came without its own; one with too many ids is refused with what to do."""
    asked = ("--run-dir", run, "--batches", 2)
    assert figures(capsys, *asked, "--tokenizer", "bytes") == figures(capsys, *asked)
    larger = small_tokenizer(tmp_path)
    assert cli.main(["eval", "--run-dir", str(run), "--tokenizer", larger.name]) == 2
    error = capsys.readouterr().err
    assert f"{larger.size} ids" in error
    assert error.endswith("give the model's own with --tokenizer FILE\n")
