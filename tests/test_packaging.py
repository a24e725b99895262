"""The package is what its folders say: listed sub-packages, links, the built wheel."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("configs", "pallas_kernels", "sharding")


def _packages_on_disk() -> set[str]:
    found = {"k3jax"}
    for base, name in [("k3jax", "k3jax")] + [(d, f"k3jax.{d}") for d in LINKED]:
        for init in (ROOT / base).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / base).parts
            if base == "k3jax" and parts and parts[0] in LINKED:
                continue
            found.add(".".join((name, *parts)))
    return found


def test_every_folder_is_listed():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setup["packages"]) == _packages_on_disk()


def test_every_folder_with_modules_is_a_package():
    for folder in ("k3jax", *LINKED):
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


@pytest.mark.parametrize("name", LINKED)
def test_links_lead_to_the_folders(name):
    link = ROOT / "k3jax" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_modules_import_under_one_name():
    code = (
        "import sys, k3jax.configs, k3jax.sharding.rules, k3jax.pallas_kernels; "
        "bad = [m for m in ('configs', 'sharding', 'pallas_kernels') if m in sys.modules]; sys.exit(bool(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs").returncode == 0


@pytest.mark.slow
def test_wheel_holds_every_module_and_nothing_else(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    everything = zipfile.ZipFile(wheel).namelist()
    assert "k3jax/conformance.md" in everything
    names = {n for n in everything if n.endswith(".py")}
    assert {n.split("/")[0] for n in names} == {"k3jax"}
    want = set()
    for folder in ("k3jax", *LINKED):
        for module in (ROOT / folder).rglob("*.py"):
            parts = module.relative_to(ROOT).parts
            if parts[0] == "k3jax" and parts[1] in LINKED:
                continue
            want.add("/".join(parts if parts[0] == "k3jax" else ("k3jax", *parts)))
    assert names == want
