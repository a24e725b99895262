"""The grouped matmul kernels compile for every TPU generation, without one."""

import pytest

from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES, compile_all

CASES = {
    "experts, bfloat16": ("feed_forward", {}),
    "experts, float32": ("feed_forward", {"M": 100, "dtype": "float32"}),
    "KF-064: odd widths": ("matmul", {"M": 1000, "K": 96, "N": 1408}),
    "fewer rows than a chunk": ("matmul", {"M": 7, "K": 200, "N": 72}),
    "K3's widths": ("matmul", {"M": 1024, "K": 3584, "N": 3072, "E": 2}),
    "896 experts of 16 rows": ("matmul", {"M": 896 * 16, "E": 896}),
}
ONCE = ("896 experts of 16 rows",)  # what does not differ between generations


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_forward_and_backward_compile(chip):
    cases = {name: x for name, x in CASES.items() if name not in ONCE or chip == "v6e"}
    requests = [
        {
            "target": f"tests.aot.grouped_matmul_cases:{factory}",
            "topology": TOPOLOGIES[chip],
            "kwargs": kwargs,
        }
        for factory, kwargs in cases.values()
    ]
    reports = dict(zip(cases, compile_all(requests), strict=True))
    errors = [f"{name}: {r['error']}" for name, r in reports.items() if "error" in r]
    assert not errors, "\n\n".join(errors)
    for name, report in reports.items():
        assert report["kernels"], f"{name} compiled without a Pallas kernel"
