"""The kernels of MLA's attention compile for every TPU generation: no TPU needed."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.layers.mla_context import context_attention
from k3jax.pallas_kernels.mla_attention import tpu_grid
from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES, compile_all, environment
from k3jax.sharding import context_balance
from k3jax.sharding.annotate import region
from k3jax.sharding.mesh import MeshConfig, make_mesh

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
PAIRS = {"bfloat16, odd length": {}, "float32": {"T": 256, "dtype": "float32"}}
V6E = {
    "a long row, two backward kernels": SHORT | {"T": 1_048_576, "H": 1},
    "two rows, V 256": SHORT | {"T": 600, "B": 2, "V": 256},
    "as it comes": {"T": 4096, "H": 1},
}


def _compile(chip, passes, decode, pairs=None):
    cases = [("passes", kwargs) for kwargs in passes.values()]
    cases += [("decode", kwargs) for kwargs in decode.values()]
    cases += [("pairs_of_chunks", kwargs) for kwargs in (pairs or {}).values()]
    requests = [
        {"target": f"tests.aot.mla_cases:{f}", "topology": TOPOLOGIES[chip], "kwargs": kwargs}
        for f, kwargs in cases
    ]
    names = [*passes, *(f"decode, {name}" for name in decode), *(pairs or {})]
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
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_kernels_of_pairs_compile(chip):
    names = ("", "_exact", "_backward")
    want = {f"mla_attention_pair{name}" for name in names}
    want |= {f"mla_attention_{name}" for name in ("forward", "forward_exact", "backward")}
    for report in _compile(chip, {}, {}, PAIRS).values():
        assert {kernel["name"] for kernel in report["kernels"]} == want


@pytest.mark.aot_tpu
def test_rows_split_over_devices_take_the_kernels(monkeypatch):
    """Unasked; and between pairs of chunks nothing of the queries' size is copied to another layout."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tpu_grid, "LARGEST_BLOCK", 512)
    ranks, T, H = 4, 2048, 8
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES["v6e"])
    mesh = make_mesh(MeshConfig(data=1, context=ranks), topology.devices[:ranks])

    def step(q, latent, kernel, ids, d_o):
        def run(*arrays):
            segments = context_balance.to_chunks(ids, ranks)
            return context_attention(*arrays, segments, scale=192**-0.5)

        (o, top), pull = jax.vjp(run, q, latent, kernel)
        return o, pull((d_o, jnp.zeros_like(top)))

    whole, window = PartitionSpec(), PartitionSpec(None, "context")
    specs = (window, window, whole, whole, window)
    shapes = ((1, ranks * T, H, 192), (1, ranks * T, 576), (512, H, 256), (1, ranks * T))
    shapes = (*shapes, (1, ranks * T, H, 128))
    dtypes = ("bfloat16", "bfloat16", "bfloat16", "int32", "float32")
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]
    outputs = (window, (window, window, whole))
    with jax.default_matmul_precision("default"):  # as a program has it, other than tests
        traced = jax.jit(region(step, mesh, specs, outputs)).trace(*args)
        text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    loops = [part for part in text.split("\n\n") if "mla_attention_pair" in part]
    assert len(loops) == 3  # forward, exact, backward
    for part in loops:
        calls = re.findall(r"%(mla_attention_pair\w*)[.\d]* = ", part)
        assert len(calls) == 1, calls
        copied = re.findall(r" = \w+\[([\d,]+)\]\S* (?:copy|reshape|transpose)\(", part)
        sizes = [math.prod(map(int, shape.split(","))) for shape in copied]
        assert all(size < T // 2 * H * 128 for size in sizes), copied


@pytest.mark.aot_tpu
def test_kf_016_on_chip_memory_does_not_grow_with_the_row():
    reports = _compile("v6e", V6E, {})
    long, short, _ = reports.values()
    names = [kernel["name"] for kernel in long["kernels"]]
    assert names[-2:] == ["mla_attention_backward_kv", "mla_attention_backward_q"]
    for kernel in long["kernels"]:
        assert 0 < kernel["vmem_bytes"] <= 4 * 2**20
    assert short["kernels"]
