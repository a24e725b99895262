"""The suite itself: a run that tested nothing must not look like success."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _pytest(*args):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "args",
    [
        ("tests/test_packaging.py", "-k", "no_such_test"),
        ("tests/test_packaging.py", "-m", "gpu"),
        ("tests/no_such_file.py",),
    ],
)
def test_kf_129_an_empty_run_fails(args):
    assert _pytest(*args).returncode != 0


def test_kf_129_a_run_of_skips_fails_and_says_why(tmp_path):
    test = ROOT / "tests" / "test_only_skips_for_kf_129.py"
    test.write_text("import pytest\n\n@pytest.mark.tpu\ndef test_it(): pass\n")
    try:
        run = _pytest(str(test))
    finally:
        test.unlink()
    assert run.returncode != 0
    assert "needs a tpu" in run.stdout
    assert "proves nothing" in run.stdout
