"""The KDA kernels compile for every TPU generation: libtpu holds the whole compiler, no TPU needed."""

import pytest

from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES, compile_all

CASES = {
    # One head and few chunks compile fastest.
    "float32": {"H": 1, "T": 100, "dtype": "float32", "inference": True},
    "bfloat16": {"inference": True},
    "from logits, float32": {"H": 1, "logits": True, "dtype": "float32", "inference": True},
    "from logits, bfloat16": {"logits": True, "inference": True},
    "KF-016: a long row": {"logits": True, "T": 131_072, "H": 12},
    "state, segment_ids": {"H": 1, "logits": True, "state": True, "packing": "segment_ids"},
    "state, cu_seqlens": {"H": 1, "logits": True, "state": True, "packing": "cu_seqlens"},
    "snapshots": {"H": 1, "snapshot_every": 128},
    "checkpoints": {"H": 1, "checkpoint_every": 2},
    "two rows, K and V 64": {"H": 1, "B": 2, "K": 64, "V": 64},
    "K and V 256": {"H": 1, "K": 256, "V": 256},
    "no erase": {"H": 1, "erase": False},
    "T 20": {"H": 1, "T": 20},
}

# What differs between generations; the rest is compiled for one of them.
EVERYWHERE = (
    "float32",
    "bfloat16",
    "from logits, float32",
    "from logits, bfloat16",
    "state, segment_ids",
    "state, cu_seqlens",
)


def _compile(chip: str, cases: dict[str, dict]) -> dict[str, dict]:
    """Reports by case; fails with every compiler message."""
    requests = [
        {"target": "tests.aot.cases:passes", "topology": TOPOLOGIES[chip], "kwargs": kwargs}
        for kwargs in cases.values()
    ]
    reports = dict(zip(cases, compile_all(requests), strict=True))
    errors = {name: report["error"] for name, report in reports.items() if "error" in report}
    if errors:
        listed = "\n\n".join(f"{name}: {error}" for name, error in errors.items())
        pytest.fail(
            f"{len(errors)} of {len(cases)} do not compile for {chip}:\n{listed}", pytrace=False
        )
    for name, report in reports.items():
        assert report["kernels"], f"{name} on {chip} compiled without a Pallas kernel"
    return reports


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_forward_and_backward_compile(chip):
    every = chip == "v6e"
    _compile(chip, {name: x for name, x in CASES.items() if every or name in EVERYWHERE})


@pytest.mark.aot_tpu
def test_kf_016_on_chip_memory_does_not_grow_with_the_row():
    lengths = {str(T): {"T": T, "H": 1, "logits": True} for T in (1024, 131_072)}
    short, long = _compile("v6e", lengths).values()
    held = [[kernel["vmem_bytes"] for kernel in r["kernels"]] for r in (short, long)]
    assert held[0] == held[1]
    assert min(held[0]) > 0
