"""`k3jax plan` without its compiler: prices by hand, programs as text, errors, golden plans."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax import cli, plan_program
from k3jax.configs import preset
from k3jax.errors import UserError
from k3jax.plan import PlanConfig, advice, command, from_command, make_plan
from k3jax.plan_cost import (
    CHIPS,
    HOP_SECONDS,
    LINK_SHARE,
    Layout,
    collective_seconds,
    mfu,
    parse_topology,
    sent_bytes,
    work,
)
from k3jax.plan_program import group_axes, read_program, too_large
from k3jax.plan_report import html
from k3jax.plan_search import search, state_bytes
from k3jax.sharding.mesh import AXES, MeshConfig, make_mesh
from k3jax.train_state import abstract_state

PLANS = sorted((Path(__file__).parent.parent / "configs" / "plans").glob("*.json"))


def layout(topology: str, **sizes: int) -> Layout:
    return Layout(parse_topology(topology), dict.fromkeys(AXES, 1) | sizes)


# ------------------------------------------------------------------------------------------- torus


def test_axes_become_compact_blocks_that_hold_every_device_once():
    pod = layout("tpu7x:8x16x16", fsdp=64, expert=64)
    expert, fsdp = pod.box(("expert",)), pod.box(("fsdp",))
    assert sorted(span.extent for span in expert.spans) == [2, 4, 4]
    assert (expert.cores, expert.sharers, expert.size) == (2, 1, 64)
    assert (fsdp.cores, fsdp.sharers, fsdp.size) == (1, 2, 64)
    whole = pod.box(("fsdp", "expert"))
    assert [(s.extent, s.stride, s.ring) for s in whole.spans] == [
        (8, 1, True), (16, 1, True), (16, 1, True),
    ]  # fmt: skip
    assert pod.box(("expert", "fsdp")[::-1]).size == 4096


def test_only_whole_cubes_and_sides_of_16_close_to_rings():
    assert parse_topology("tpu7x:4x4x4").is_ring(0)
    assert not parse_topology("tpu7x:2x2x1").is_ring(0)
    assert parse_topology("v5e:8x16").is_ring(1)
    assert not parse_topology("v5e:8x16").is_ring(0)


def test_prices_of_a_ring():
    """16 chips of a v6e side: two links each; an exchange takes a quarter of a gather of as much."""
    ring, chip = layout("v6e:16x16", fsdp=16, tensor=16).box(("fsdp",)), CHIPS["v6e"]
    assert [span.extent for span in ring.spans if span.extent > 1] == [4, 4]  # a compact block
    ring = dataclasses.replace(
        ring, spans=(ring.spans[0]._replace(extent=16, stride=1, ring=True),)
    )
    bandwidth, size, hops = 100e9 * LINK_SHARE, 1e9, 8 * HOP_SECONDS
    gather = collective_seconds("all-gather", size, ring, chip) - hops
    assert gather == pytest.approx(16 * size * (15 / 16) / (2 * bandwidth))
    scatter = collective_seconds("reduce-scatter", 16 * size, ring, chip) - hops
    assert scatter == pytest.approx(gather)
    both = collective_seconds("all-reduce", 16 * size, ring, chip) - hops
    assert both == pytest.approx(2 * gather)
    exchange = collective_seconds("all-to-all", size, ring, chip) - hops
    assert exchange == pytest.approx(16 * size / (8 * bandwidth))
    shift = collective_seconds("collective-permute", size, ring, chip) - HOP_SECONDS
    assert shift == pytest.approx(size / bandwidth)


def test_two_devices_of_a_chip_share_its_links():
    """The same gather by every device: in one group of both, or in two groups beside each other."""
    chip = CHIPS["tpu7x"]
    together = layout("tpu7x:4x4x4", fsdp=128).box(("fsdp",))
    apart = layout("tpu7x:4x4x4", fsdp=64, tensor=2).box(("fsdp",))
    assert (together.sharers, apart.sharers) == (1, 2)
    result = 1e12  # bytes that each device ends up with
    one = collective_seconds("all-gather", result / 128, together, chip)
    two = collective_seconds("all-gather", result / 64, apart, chip)
    assert two == pytest.approx(2 * one, rel=1e-3)


def test_bytes_sent():
    assert sent_bytes("all-gather", 10, 4) == 30
    assert sent_bytes("reduce-scatter", 40, 4) == 30
    assert sent_bytes("all-reduce", 40, 4) == 60
    assert sent_bytes("ragged-all-to-all", 40, 4) == 30


# ----------------------------------------------------------------------------------------- program


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups=mesh['data'=1,'fsdp'=4,'expert'=2] {'expert','fsdp'}, x", "fsdp expert"),
        ("replica_groups=mesh['data'=1,'fsdp'=4,'expert'=2] {'data','fsdp'}", "fsdp"),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, x", "expert"),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}, x", "fsdp"),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x", "fsdp"),
        ("replica_groups=[4,2]<=[8], x", "expert"),
        ("replica_groups=[1,8]<=[8]", "fsdp expert"),
        ("replica_groups={}, x", "fsdp expert"),
        ("source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3}}, x", "fsdp"),
    ],
)
def test_groups_are_axes(groups, axes):
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 4, "expert": 2}
    assert " ".join(group_axes(f", channel_id=1, {groups}", sizes)) == axes


HLO = """
HloModule step

%aside (p0: bf16[16,128]) -> bf16[64,128] {
  %p0 = bf16[16,128]{1,0} parameter(0)
  ROOT %gather = bf16[64,128]{1,0} all-gather(%p0), replica_groups=mesh['fsdp'=4,'expert'=2] {'fsdp'}, dimensions={0}
}

%first (p1: bf16[16,128]) -> (bf16[64,128]) {
  %p1 = bf16[16,128]{1,0} parameter(0)
  %g1 = bf16[64,128]{1,0} all-gather(%p1), replica_groups=mesh['fsdp'=4,'expert'=2] {'fsdp'}, frontend_attributes={chain_id="0"}
  ROOT %c1 = (bf16[64,128]{1,0}) custom-call(%g1), custom_call_target="AsyncCollectiveStart"
}

%second (p2: bf16[16,128]) -> bf16[64,128] {
  %p2 = bf16[16,128]{1,0} parameter(0)
  ROOT %g2 = bf16[64,128]{1,0} all-gather(%p2), replica_groups=mesh['fsdp'=4,'expert'=2] {'fsdp'}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.1 (p3: f32[64,128]) -> f32[16,128] {
  %p3 = f32[64,128]{1,0} parameter(0)
  ROOT %r3 = f32[64,128]{1,0} all-reduce(%p3), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}

%layers (s: (s32[], bf16[16,128])) -> (s32[], bf16[16,128]) {
  %s = (s32[], bf16[16,128]{1,0}) parameter(0)
  %w = bf16[16,128]{1,0} get-tuple-element(%s), index=1
  %start = ((), (), s32[1]{0}) call-start(), to_apply=%aside
  %before = bf16[16,128]{1,0} fusion(%w), kind=kLoop, calls=%nothing, backend_config={"estimated_cycles":"99"}
  %update = ((bf16[16,128]{1,0}), bf16[64,128]{1,0}) call-update(%start, %w)
  %beside = bf16[16,128]{1,0} fusion(%w), kind=kLoop, calls=%nothing, backend_config={"estimated_cycles":"17"}
  %full = bf16[64,128]{1,0} call-done(%update)
  %rows = bf16[512,64]{1,0} custom-call(%w), custom_call_target="rows"
  %room = bf16[640,64]{1,0} custom-call(%w), custom_call_target="room"
  %sent = bf16[640,64]{1,0} ragged-all-to-all(%rows, %room, %i, %i, %i, %i), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %t = (s32[], bf16[16,128]{1,0}) tuple(%i, %w)
}

%more (c: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  ROOT %go = pred[] compare(%c, %c), direction=LT
}

%below (d: s32[]) -> pred[] {
  %d = s32[] parameter(0)
  %n = s32[] constant(23)
  ROOT %go2 = pred[] compare(%d, %n), direction=LT
}

ENTRY %main (x: bf16[16,128], g: f32[64,128]) -> f32[] {
  %x = bf16[16,128]{1,0} parameter(0)
  %g = f32[64,128]{1,0} parameter(1)
  %loop = (s32[], bf16[16,128]{1,0}) while(%x), condition=%below, body=%layers
  %rounds = (s32[], bf16[16,128]{1,0}) while(%x), condition=%more, body=%layers
  %f1 = (bf16[64,128]{1,0}) fusion(%x), kind=kCustom, calls=%first
  %f2 = bf16[64,128]{1,0} fusion(%x), kind=kCustom, calls=%second
  %scattered = f32[16,128]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %alone = f32[64,128]{1,0} all-reduce(%g), replica_groups=mesh['data'=1] {'data'}, to_apply=%add
  ROOT %sum = f32[64,128]{1,0} all-reduce(%g), replica_groups={}, to_apply=%add
}
"""


def test_collectives_of_a_program_by_axis_and_how_often():
    """Loops turn as often as they say, one over data never; a chain of fusions is one collective."""
    traffic = read_program(HLO, layout("v5e:2x4", fsdp=4, expert=2))
    found = {(c.kind, " ".join(c.axes)): (c.runs, c.sent) for c in traffic.collectives}
    hidden = {c.kind: c.hidden / c.seconds for c in traffic.collectives}
    weights, grads, rows = 16 * 128 * 2, 64 * 128 * 4, 512 * 64 * 2
    assert found == {
        ("all-gather", "fsdp"): (24, 24 * 3 * weights),
        ("ragged-all-to-all", "expert"): (23, 23 * rows / 2),
        ("reduce-scatter", "fsdp"): (1, grads * 3 / 4),
        ("all-reduce", "fsdp expert"): (1, 2 * grads * 7 / 8),
    }
    assert traffic.data_loops == 1
    # 17 cycles lie beside the gather in the loop; a chain of fusions is all beside compute.
    beside = 23 * 17 / 1.5e9
    gather = next(c for c in traffic.collectives if c.kind == "all-gather")
    assert gather.hidden == pytest.approx(gather.seconds / 24 + beside)
    assert hidden["ragged-all-to-all"] == hidden["reduce-scatter"] == 0
    assert all(c.seconds > 0 for c in traffic.collectives)


def test_bytes_that_were_not_there():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (151.17G) exceeds available HBM (94.74G). HLO module: jit_f."
    )
    assert too_large(message) == (151.17 * 2**30, True)
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm."
    assert too_large(used) == (17.5 * 2**30, False)
    assert too_large("RESOURCE_EXHAUSTED: scoped vmem limit exceeded") is None
    with pytest.raises(RuntimeError, match="another form"):
        too_large("RESOURCE_EXHAUSTED: out of HBM")


# ------------------------------------------------------------------------------- state, work, plans


@pytest.mark.devices
@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"fsdp": 4, "expert": 2}, {"fsdp": 2, "context": 2, "tensor": 2}],
    ids=str,
)
def test_state_takes_what_its_shardings_say(sizes):
    cfg = preset("nano")()
    mesh = make_mesh(MeshConfig(**{"data": 1, **sizes}))
    state = abstract_state(cfg.model, cfg.optim, mesh)

    def held(tree):
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )

    found = state_bytes(cfg, mesh.shape)
    assert found["parameters"] == held(state.params)
    assert found["optimizer"] == held(state.opt_state)
    assert found["gradients"] == found["parameters"]  # nano stores float32
    rest = held((state.buffers, state.step, state.key, state.skipped, state.skipped_total))
    assert found["buffers"] == rest


def test_work_of_a_step():
    """104 B active parameters, 6 FLOP for each and token, attention and the rest on top."""
    cfg = preset("kimi_k3")()
    found = work(cfg.model, cfg.optim, tokens=2**25, seq_len=8192, devices=4096)
    assert 6 * 102e9 < found.useful / 2**13 < 6 * 110e9
    assert found.recomputed == pytest.approx(found.useful / 3)
    assert found.attention == 3 * 24 * 96 * (128 + 64 + 128) * 8192 * 2**13
    none = dataclasses.replace(cfg.model, remat="none")
    assert work(none, cfg.optim, tokens=2**25, seq_len=8192, devices=4096).recomputed == 0
    # "outputs" repeats all but the experts' w2 (92 layers) and the output projections (93).
    outputs = dataclasses.replace(cfg.model, remat="outputs")
    less = work(outputs, cfg.optim, tokens=2**25, seq_len=8192, devices=4096)
    spared = 2 * (92 * 16 * 3072 * 3584 + 93 * 12288 * 7168)
    assert found.recomputed - less.recomputed == pytest.approx(spared * 2**13)
    chip = CHIPS["tpu7x"]
    assert mfu(chip, found, found.useful / chip.peak) == 1


def request(*flags: str) -> PlanConfig:
    return from_command(["mini", *flags])


@pytest.fixture(scope="module")
def formula():
    flags = ["--topology", "v5e:4x4", "--batch-tokens", str(2**20), "--seq-len", "8192"]
    return request(*flags, "--mesh.fsdp", "8", "--mesh.expert", "2", "--accumulation", "4")


def test_a_plan_can_be_made_again_from_its_command(formula):
    made = make_plan(formula.run, parse_topology(formula.topology), compiled=False)
    again = from_command(command(formula, made))
    assert again.run == dataclasses.replace(formula.run, mesh=MeshConfig(**made.sizes))
    assert again.batch_size * again.seq_len == 2**20
    assert make_plan(again.run, made.topology, compiled=False).figures() == made.figures()


def test_the_report_needs_nothing_else(formula):
    made = make_plan(formula.run, parse_topology(formula.topology), compiled=False)
    page = html([made], [advice(made)])
    assert not re.search(r"<script|<link|https?:|url\(", page)
    assert page.count("<svg") == page.count("</svg>") == 2
    for part in ("parameters", "optimizer", "expert", "Assumed", "MFU"):
        assert part in page
    assert page.count("<table") == page.count("</table>")


def test_advice_names_a_flag_that_helps():
    topology = parse_topology("v5e:4x4")

    def made(*flags):
        asked = request("--seq-len", "16384", "--topology", topology.name, *flags)
        return make_plan(asked.run, topology, compiled=False)

    large = made("--batch-tokens", str(2**21), "--mesh.fsdp", "16", "--model.remat", "none")
    assert not large.memory.fits
    assert "--model.remat outputs" in advice(large)[0]
    many = made("--batch-tokens", str(2**22), "--mesh.fsdp", "16", "--accumulation", "1")
    assert not many.memory.fits
    assert "--accumulation 2" in advice(many)[0]
    fewer = made("--batch-tokens", str(2**22), "--mesh.fsdp", "16", "--accumulation", "2")
    assert fewer.memory.total < many.memory.total
    far = made("--batch-tokens", str(2**18), "--mesh.expert", "16", "--accumulation", "1")
    assert any("--mesh.expert" in line for line in advice(far))


def test_a_search_ranks_what_fits(formula):
    topology = parse_topology("v5e:4x4")
    cfg = dataclasses.replace(formula.run, mesh=MeshConfig())
    found, fitting, tried = search(cfg, topology, best=5)
    assert 5 == len(found) <= fitting < tried
    for c in found:
        assert math.prod(c.sizes.values()) == 16
        assert c.memory <= topology.chip.hbm
        assert 32 % (c.sizes["data"] * c.sizes["fsdp"] * c.sizes["expert"]) == 0
    steps = [c.times.scheduled for c in found]
    assert steps == sorted(steps)
    fixed, _, fewer = search(dataclasses.replace(cfg, mesh=MeshConfig(context=2)), topology, best=2)
    assert fewer < tried
    assert {c.sizes["context"] for c in fixed} == {2}


def test_golden_plans_cover_the_contexts_of_kimi_k3():
    lengths = {"tpu7x": (8, 64, 256, 1024), "v5p": (8, 64)}  # thousands of tokens a row
    asked = [from_command(json.loads(path.read_text())["command"]) for path in PLANS]
    got = sorted((cfg.topology, cfg.run.seq_len) for cfg in asked)
    slices = {"tpu7x": "tpu7x:8x16x16", "v5p": "v5p:16x16x16"}
    assert got == sorted((slices[chip], k * 1024) for chip in lengths for k in lengths[chip])


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_golden_plans_hold(path):
    """What needs no compiler is derived again; what the compiler said is consistent."""
    record = json.loads(path.read_text())
    asked = from_command(record["command"])
    topology = parse_topology(asked.topology)
    made = make_plan(asked.run, topology, compiled=False)
    figures, program = made.figures(), record["figures"]["program"]
    assert {k: v for k, v in figures.items() if k != "program"} == {
        k: v for k, v in record["figures"].items() if k != "program"
    }
    assert sum(program["memory"].values()) == pytest.approx(program["total_bytes"], abs=10)
    assert program["total_bytes"] <= program["limit_bytes"] == round(topology.chip.hbm)
    for how, share in program["mfu"].items():
        assert share == pytest.approx(made.mfu(program["seconds"][how]), abs=2e-4)
    sent = sum(c["sent"] for c in program["collectives"])
    assert sent == pytest.approx(sum(program["sent_bytes"].values()), rel=1e-6)


# ------------------------------------------------------------------------------------ command line

BASE = ["--topology", "v5e:2x2", "--no-compiled"]
IMPOSSIBLE = [
    ([], ["--topology", "v5e:4x4", "tpu7x:8x16x16"]),
    (["--topology", "v9:2x2"], ["'v9:2x2'", "v5e, v5p, v6e, tpu7x"]),
    (["--topology", "tpu7x:4x4"], ["'tpu7x:4x4'", "3 dimensions"]),
    (["--topology", "v5e:big"], ["'v5e:big'", "2 dimensions"]),
    ([*BASE, "--mesh.fsdp", "3"], ["fsdp 3", "4 are here"]),
    ([*BASE, "--batch-tokens", "1000", "--seq-len", "256"], ["1000", "seq_len=256", "use 1024"]),
    ([*BASE, "--batch-tokens", "1536", "--seq-len", "256"],
     ["6 rows per pass", "data 4", "--batch-tokens 2048", "--mesh.context"]),
    ([*BASE, "--batch-size", "1", "--seq-len", "255", "--mesh.context", "4"],
     ["seq_len=255", "context=4"]),
    ([*BASE, "--out", "report.pdf"], ["'report.pdf'", ".html"]),
    ([*BASE, "--best", "0"], ["best is 0"]),
    ([*BASE, "--topologie", "x"], ["--topologie", "--topology"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "words"), IMPOSSIBLE, ids=[" ".join(f) for f, _ in IMPOSSIBLE])
def test_bad_input_is_one_line(flags, words, capsys):
    assert cli.main(["plan", "nano", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in words:
        assert word in line


def test_no_compiler_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(plan_program.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["plan", "nano", "--topology", "v5e:2x2"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert 'pip install "k3jax[aot]"' in lines[-1]


def test_the_command_by_formula(capsys, tmp_path):
    out, save = tmp_path / "new" / "report.html", tmp_path / "plan.json"
    flags = ["--topology", "v5e:2x2", "--no-compiled", "--search", "--best", "2"]
    assert cli.main(["plan", "nano", *flags, "--out", str(out), "--save", str(save)]) == 0
    shown = capsys.readouterr().out
    for word in ("fits", "MFU", "parameters", "should fit", "what to change", "assumed"):
        assert word in shown
    assert "<svg" in out.read_text()
    record = json.loads(save.read_text())
    assert record["figures"]["program"] is None
    assert np.prod(list(record["figures"]["mesh"].values())) == 4


def test_files_that_cannot_be_written_are_one_line(capsys, tmp_path):
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "report.html")
    assert cli.main(["plan", "nano", *BASE, "--out", out]) == 2
    assert out in capsys.readouterr().err


def test_user_errors_of_layouts():
    with pytest.raises(UserError, match="fsdp of size 3"):
        make_plan(
            dataclasses.replace(preset("nano")(), mesh=MeshConfig(data=1, fsdp=3), batch_size=3),
            dataclasses.replace(parse_topology("v5e:1x3")),
            compiled=False,
        )
