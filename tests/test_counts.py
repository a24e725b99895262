"""Parameter and FLOP counts against the published figures, and the tables that print them."""

import subprocess
import sys

import pytest

from k3jax.configs import PRESETS, preset
from k3jax.configs.k3 import kimi_k3_model
from k3jax.flops import (
    attn_res_rows,
    flops_per_token,
    forward_flops_per_token,
    parameter_counts,
    peak_flops,
)


@pytest.fixture(scope="module")
def counts():
    return parameter_counts(kimi_k3_model())


def test_totals_of_the_released_model(counts):
    assert counts.total == 2_779_484_476_000
    assert counts.active == 104_189_612_640
    assert counts.matmul == 104_174_092_288
    assert counts.components["KDA"] == 30_618_086_496
    assert counts.components["MLA"] == 5_572_706_304
    assert counts.components["routed experts"] == 2_722_740_830_208
    assert sum(counts.components.values()) == counts.total


def test_flops_of_the_released_model(counts):
    cfg = kimi_k3_model()
    assert attn_res_rows(cfg) == 1002
    for length, forward, training in ((8192, 215.6e9, 646.8e9), (1_048_576, 982.7e9, 2948.0e9)):
        assert forward_flops_per_token(cfg, length, counts.matmul) == pytest.approx(
            forward, rel=1e-3
        )
        assert flops_per_token(cfg, length, counts.matmul) == pytest.approx(training, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("nano", 1e6, 9e6),
        ("colab", 1e8, 1.5e8),
        ("mini", 1e9, 1.5e9),
        ("kimi_linear_48b", 4.7e10, 5e10),
    ],
)
def test_sizes_of_the_presets(name, low, high):
    assert low <= parameter_counts(preset(name)().model).total <= high


def test_peaks_are_matched_by_device_kind():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 9.89e14
    assert (
        peak_flops("TPU v5 lite")
        < peak_flops("TPU v5p")
        < peak_flops("TPU v6 lite")
        < peak_flops("TPU7x")
    )
    assert peak_flops("cpu") is None


@pytest.mark.parametrize("name", [None, "kimi_k3"])
def test_configs_command(name):
    command = [sys.executable, "-m", "k3jax.cli", "configs", *([name] if name else [])]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    if name:
        for figure in ("2,779,484,476,000", "104,189,612,640", "68 KDA + MoE", "training state"):
            assert figure in run.stdout
    else:
        assert all(preset_name in run.stdout for preset_name in PRESETS)
