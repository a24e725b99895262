"""A run of seconds that has every part of a large one: shared by the tests of loop and command."""

import json
from pathlib import Path
from typing import Any

from k3jax.configs import preset
from k3jax.configs.experiment import ExperimentConfig
from k3jax.flags import overridden

FLAGS = """
    --model.num-layers 3 --model.pattern kda mla --model.closing mla --model.width 32
    --model.dense-ffn-dim 48 --model.kda.num-heads 2 --model.kda.head-dim 16
    --model.kda.gate-rank 16 --model.mla.num-heads 2 --model.mla.q-rank 16 --model.mla.kv-rank 16
    --model.mla.qk-nope-dim 16 --model.mla.qk-shared-dim 8 --model.mla.v-dim 16
    --model.moe.num-experts 4 --model.moe.num-active 2 --model.moe.ffn-dim 16
    --model.moe.latent-dim 16 --model.moe.num-bins 32 --model.attn-res.block-size 2
    --batch-size 2 --seq-len 64 --eval-batches 2 --steps 6 --checkpoint-every 2 --eval-every 4
"""
TINY = FLAGS.split()
TIMES = ("seconds", "tokens_per_second", "flops_per_second", "mfu")  # differ from run to run


def text_folder(folder: Path) -> Path:
    """Twenty-four small files, so that the split goes by file."""
    folder.mkdir()
    for i in range(24):
        lines = [f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(12)]
        (folder / f"file_{i:02}.py").write_text("\n".join(lines))
    return folder


def tiny(run_dir: Path, data: Path, *flags: str) -> ExperimentConfig:
    """The tiny configuration with more flags."""
    where = ["--run-dir", str(run_dir), "--data", str(data)]
    return overridden(preset("nano")(), [*TINY, *where, *flags], "tiny")


def records(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def listing(folder: Path) -> dict[str, int]:
    """Every file below a folder with its time of change."""
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"}
