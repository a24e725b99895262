"""The cost model, on programs whose cost is known."""

import pytest

from k3jax.pallas_kernels.tpu_cost import CHIPS, TOPOLOGIES, compile_all, estimate
from k3jax.pallas_kernels.tpu_cost.program import Program, buffers
from tests.aot.matmul import BLOCK

HLO = """
HloModule example

%body (p: (s32[], bf16[256,64])) -> (s32[], bf16[256,64]) {
  %p = (s32[]{:T(128)}, bf16[256,64]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[256,64]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %y = bf16[256,64]{1,0:T(8,128)(2,1)} copy(%x)
  ROOT %t = (s32[]{:T(128)}, bf16[256,64]{1,0:T(8,128)(2,1)}) tuple(%i, %y)
}

%inside (a: f32[4096,128], j: s32[]) -> f32[8,128] {
  %a = f32[4096,128]{1,0:T(8,128)} parameter(0)
  %j = s32[]{:T(128)} parameter(1)
  ROOT %rows = f32[8,128]{1,0:T(8,128)} dynamic-slice(%a, %j), dynamic_slice_sizes={8,128}
}

ENTRY %main (a: f32[4096,128], j: s32[], s: (s32[], bf16[256,64])) -> f32[8,128] {
  %a.1 = f32[4096,128]{1,0:T(8,128)} parameter(0)
  %j.1 = s32[]{:T(128)S(6)} parameter(1)
  %s = (s32[]{:T(128)}, bf16[256,64]{1,0:T(8,128)(2,1)}) parameter(2)
  %loop = (s32[], bf16[256,64]) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %some = f32[8,128]{1,0:T(8,128)} fusion(%a.1, %j.1), kind=kLoop, calls=%inside
}
"""


def test_loops_count_their_trips_and_slices_their_rows():
    program = Program(HLO)
    schedule = {ins.name: (times, program.hbm_bytes(ins, c)) for ins, c, times in program.schedule}
    row = 128 * 2  # of 64 bfloat16, padded to 128 lanes
    assert schedule == {"y": (7, 2 * 256 * row), "some": (1, 2 * 8 * 128 * 4)}
    assert program.unknown_trip_counts == 0


def test_a_last_dimension_of_one_pays_for_128():
    (buffer,) = buffers("bf16[12,64,1]{2,1,0:T(8,128)(2,1)}")
    assert (buffer.size, buffer.in_hbm) == (12 * 64 * 128 * 2, True)
    assert not buffers("f32[8,128]{1,0:T(8,128)S(1)}")[0].in_hbm


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_a_matmul_keeps_the_mxu_busy_for_its_flops(chip):
    n = 1024
    report = estimate("tests.aot.matmul:blocked", TOPOLOGIES[chip], {"n": n})
    assert "error" not in report, report["error"]
    (op,) = (op for op in report["ops"] if op["op"] == "pallas")
    cycles = 2 * n**3 / CHIPS[report["device_kind"]].flops
    assert op["mxu_cycles"] == cycles
    assert op["bundle_cycles"] >= cycles
    assert cycles <= op["sim_cycles"] <= 4 * cycles  # it also waits for the first and last blocks
    assert report["seconds"] >= report["mxu_seconds"] > 0


@pytest.mark.aot_tpu
def test_a_loop_costs_its_trips():
    reports = [
        estimate("tests.aot.matmul:looped", "v6e:2x2", {"n": 1024, "steps": steps}, simulate=False)
        for steps in (5, 50)
    ]
    few, many = (report["seconds"] for report in reports)
    assert 8 < many / few < 12


@pytest.mark.aot_tpu
def test_one_broken_case_does_not_hide_the_others():
    def case(target):
        return {"target": target, "topology": "v6e:2x2", "kwargs": {"n": 1024}}

    good, bad = case("tests.aot.matmul:blocked"), case("tests.aot.matmul:missing")
    first, broken, last = compile_all([good, bad, good])
    assert "missing" in broken["error"]
    assert first["memory"] == last["memory"]
    (kernel,) = first["kernels"]
    assert kernel["vmem_bytes"] == BLOCK**2 * (3 * 2 + 4)  # three blocks of bfloat16, one float32
    assert kernel["block_bytes"] == BLOCK**2 * 2 * (8 + 8 + 4)  # a step moves both factors' blocks
