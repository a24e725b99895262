"""The README's Python runs, its files exist, and the notebook executes from a clean state."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax.configs import preset
from k3jax.sharding.mesh import AXES, check_batch
from k3jax.sharding.rules import logical_axes, state_specs
from k3jax.train_state import abstract_model, merge

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_links_lead_somewhere():
    for document in (
        "README.md",
        "docs/architecture.md",
        "docs/chat.md",
        "docs/gpu.md",
        "docs/scaling.md",
        "tests/README.md",
        "benchmarks/README.md",
    ):
        text = (ROOT / document).read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert ((ROOT / document).parent / target).exists(), (document, target)


def test_readme_names_the_two_commands():
    assert "pip install uv && uv run k3jax train nano" in README
    assert "pip install uv && uv run pytest" in README


def test_documented_meshes_divide_what_they_split():
    """Every `train` command with a mesh, in the README and in docs, up to the device."""
    found = []
    for document in ("README.md", "docs/scaling.md"):
        text = re.sub(r"\\\n\s*|,\s*\n\s*", " ", (ROOT / document).read_text())
        for line in re.findall(r"train(?:,? )(?:mini|nano)[^\n]*--mesh[^\n]*", text):
            words = re.sub(r'[\[\],"\']', " ", line).split("#")[0].split()
            flags = dict(itertools.pairwise(words))
            cfg = preset(words[1])()
            sizes = {axis: int(flags.get(f"--mesh.{axis}", 1)) for axis in AXES}
            passes = int(flags.get("--accumulation", cfg.accumulation))
            check_batch(sizes, rows=cfg.batch_size // passes, tokens=cfg.seq_len)
            graphdef, params, buffers = abstract_model(cfg.model)
            state_specs(params, logical_axes(merge(graphdef, params, buffers)), sizes)
            found.append(sizes)
    assert len(found) >= 6


def test_notebooks_hold_no_outputs():
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path


@pytest.mark.slow
def test_readme_python_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


def test_chat_guide_prints_what_it_shows(tmp_path):
    """The command and the Python of docs/chat.md, one after the other, in an empty folder."""
    guide = (ROOT / "docs/chat.md").read_text()
    blocks = {
        kind: re.findall(rf"```{kind}\n(.*?)```", guide, re.DOTALL)
        for kind in ("bash", "python", "text")
    }
    for command in blocks["bash"]:
        name, *args = command.split()
        assert name == "k3jax"
        subprocess.run([sys.executable, "-m", "k3jax.cli", *args], cwd=tmp_path, check=True)
    program = [sys.executable, "-c", "\n".join(blocks["python"])]
    done = subprocess.run(program, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == "".join(blocks["text"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.ipynb"])
def test_kf_126_notebook_runs(name, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbmake",
        "--nbmake-timeout=900",
        "-q",
        "-c",
        os.devnull,
    ]
    command += ["--rootdir", str(ROOT / "notebooks"), str(ROOT / "notebooks" / name)]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ
        | {"K3JAX_NOTEBOOK_STEPS": "4", "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]
