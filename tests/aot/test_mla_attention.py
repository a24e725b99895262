"""The kernels of MLA's attention compile for every TPU generation: no TPU needed."""

import pytest

from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES, compile_all

SHORT = {"largest_block": 512}
PASSES = {
    # Two blocks: one on the diagonal and one beside it, forward, exact and backward.
    "bfloat16, documents": SHORT | {"T": 1000, "H": 1, "segments": True},
    "float32, odd length": {"T": 150, "H": 1, "dtype": "float32", "largest_block": 1024},
}
DECODE = {
    "bfloat16": {},
    "float32 queries": {"q_dtype": "float32"},
    "float32": {"dtype": "float32", "H": 8, "page": 16},
}
V6E = {
    "a long row, two backward kernels": SHORT | {"T": 1_048_576, "H": 1},
    "two rows, V 256": SHORT | {"T": 600, "B": 2, "V": 256},
    "as it comes": {"T": 4096, "H": 1},
}


def _compile(chip, passes, decode):
    cases = [("passes", kwargs) for kwargs in passes.values()]
    cases += [("decode", kwargs) for kwargs in decode.values()]
    requests = [
        {"target": f"tests.aot.mla_cases:{f}", "topology": TOPOLOGIES[chip], "kwargs": kwargs}
        for f, kwargs in cases
    ]
    names = [*passes, *(f"decode, {name}" for name in decode)]
    reports = dict(zip(names, compile_all(requests), strict=True))
    errors = [f"{name}: {r['error']}" for name, r in reports.items() if "error" in r]
    if errors:
        pytest.fail(f"{len(errors)} do not compile for {chip}:\n" + "\n\n".join(errors), False)
    return reports


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_kernels_compile(chip):
    reports = _compile(chip, PASSES, DECODE)
    for name, report in reports.items():
        assert report["kernels"], f"{name} on {chip} compiled without a Pallas kernel"
    names = {kernel["name"] for kernel in reports["bfloat16, documents"]["kernels"]}
    stem = "mla_attention_"
    assert names == {stem + "forward", stem + "forward_exact", stem + "backward"}


@pytest.mark.aot_tpu
def test_kf_016_on_chip_memory_does_not_grow_with_the_row():
    reports = _compile("v6e", V6E, {})
    long, short, _ = reports.values()
    names = [kernel["name"] for kernel in long["kernels"]]
    assert names[-2:] == ["mla_attention_backward_kv", "mla_attention_backward_q"]
    for kernel in long["kernels"]:
        assert 0 < kernel["vmem_bytes"] <= 4 * 2**20
    assert short["kernels"]
