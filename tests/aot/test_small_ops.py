"""The kernels of AttnRes and of the short convolution compile for every TPU generation."""

import pytest

from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES, compile_all

CASES = {
    "attn_res, traced": ("attn_res", {"traced": True, "normed": True}),
    "attn_res of K3": ("attn_res", {"traced": False, "normed": True, "rows": 8, "D": 7168}),
    "conv, packed": ("conv", {"packed": True}),
    "conv of K3": ("conv", {"packed": True, "H": 96}),
}
ONCE = {  # does not differ between generations
    "attn_res, no norm": ("attn_res", {"traced": False, "normed": False}),
    "attn_res, a cut tile": ("attn_res", {"traced": True, "normed": True, "B": 2, "T": 330}),
    "conv, float32, a cut tile": ("conv", {"packed": False, "dtype": "float32", "T": 100, "B": 2}),
    "conv, 2 taps": ("conv", {"packed": False, "W": 2}),
}


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_forward_and_backward_compile(chip):
    cases = CASES | (ONCE if chip == "v6e" else {})
    requests = [
        {
            "target": f"tests.aot.small_op_cases:{factory}",
            "topology": TOPOLOGIES[chip],
            "kwargs": kwargs,
        }
        for factory, kwargs in cases.values()
    ]
    reports = dict(zip(cases, compile_all(requests), strict=True))
    errors = {name: report["error"] for name, report in reports.items() if "error" in report}
    assert not errors, "\n\n".join(f"{name} on {chip}: {x}" for name, x in errors.items())
    for name, report in reports.items():
        assert len(report["kernels"]) == 2, f"{name} on {chip}: a forward and a backward kernel"
