"""The whole command with the TPU compiler: a small model on the smallest slices."""

import json

import pytest

from k3jax import cli
from k3jax.plan import from_command
from k3jax.plan_search import state_bytes

pytestmark = pytest.mark.aot_tpu
SMALL = """
    --model.num-layers 3 --model.pattern kda mla --model.closing mla --model.width 256
    --model.dense-ffn-dim 256 --model.kda.num-heads 2 --model.kda.head-dim 128
    --model.kda.gate-rank 128 --model.mla.num-heads 2 --model.mla.q-rank 128
    --model.mla.kv-rank 128 --model.mla.qk-nope-dim 128 --model.mla.qk-shared-dim 64
    --model.mla.v-dim 128 --model.moe.num-experts 8 --model.moe.num-active 2
    --model.moe.ffn-dim 128 --model.moe.latent-dim 128 --model.moe.num-bins 32
    --model.attn-res.block-size 2 --model.dtype bfloat16 --model.remat full
    --model.kda.chunk-size 64
"""
FLAGS = SMALL.split()


def planned(tmp_path, *flags):
    save, hlo = tmp_path / "plan.json", tmp_path / "step.txt"
    args = ["nano", *FLAGS, *flags, "--save", str(save), "--hlo", str(hlo)]
    assert cli.main(["plan", *args, "--out", str(tmp_path / "plan.html")]) == 0
    return from_command(args), json.loads(save.read_text())["figures"], hlo.read_text()


def test_a_step_compiles_for_a_slice_and_says_what_it_moves(tmp_path, capsys):
    flags = "--topology v5e:2x2 --seq-len 512 --batch-tokens 4096 --mesh.fsdp 2 --mesh.expert 2"
    asked, figures, hlo = planned(tmp_path, *flags.split())
    shown = capsys.readouterr().out
    program, sizes = figures["program"], figures["mesh"]

    # As on the TPU, not as on the host: kernels, and rows that travel as they are.
    assert "kda pallas_tpu" in shown
    assert "tpu_custom_call" in hlo
    (rows,) = (c for c in program["collectives"] if c["kind"] == "ragged-all-to-all")
    assert rows["axes"] == ["expert"]

    # What lies there between steps is what the formulas say, to the byte.
    held = state_bytes(asked.run, sizes)
    for name in ("parameters", "optimizer", "batch"):
        assert program["memory"][name] == held[name] == figures["state_bytes"][name]
    assert program["memory"]["temporaries"] > held["gradients"]
    assert sum(program["memory"].values()) == pytest.approx(program["total_bytes"], abs=10)

    # Every layer's weights are gathered at least once: bfloat16, half of them from elsewhere.
    layers = held["parameters"] / 4 * 2
    assert program["sent_bytes"]["fsdp"] > layers / 4
    assert 0 < program["seconds"]["overlapped"] <= program["seconds"]["scheduled"]
    assert program["seconds"]["scheduled"] <= program["seconds"]["serial"]


def test_a_step_that_is_too_large_says_by_how_much(tmp_path, capsys):
    flags = "--topology v5e:2x2 --seq-len 32768 --batch-tokens 4194304 --mesh.fsdp 4"
    args = ["nano", *FLAGS, *flags.split(), "--model.remat", "none"]
    assert cli.main(["plan", *args]) == 0
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "GiB above the 15.75 GiB of a device" in shown
    assert "--model.remat outputs" in " ".join(shown.split())


def test_a_slice_that_libtpu_does_not_know_is_one_line(capsys):
    assert cli.main(["plan", "nano", "--topology", "v5e:3x3", "--batch-tokens", "2304"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "v5e:3x3" in line
    assert "libtpu says" in line
