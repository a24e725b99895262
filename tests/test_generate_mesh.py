"""Generation by several devices that share the model: the tokens of one device."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from k3jax import cli
from k3jax.generate import Engine
from k3jax.request import Request
from k3jax.sample import SamplingConfig
from k3jax.sharding.mesh import MeshConfig, make_mesh
from k3jax.train_state import weight_specs
from tests.model_helpers import build, split, tiny_config
from tests.official_helpers import random_checkpoint, trainable_config
from tests.test_hosts import Group, succeeded

CFG = tiny_config()
SIZES = {"slots": 2, "max_len": 96, "chunk": 32, "page_tokens": 16}
GREEDY, DRAWN = SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.9, top_p=0.9)
REQUESTS = [
    Request(prompt=list(range(1, 1 + n)), max_tokens=10, sampling=how, seed=n)
    for n, how in ((5, GREEDY), (40, DRAWN), (17, DRAWN), (40, GREEDY))
]

pytestmark = pytest.mark.devices


def served(sizes=None, **settings):
    """(results, engine) on a mesh, or on one device."""
    weights, mesh = split(build(CFG))[1:], None
    if sizes is not None:
        mesh = make_mesh(MeshConfig(data=1, **sizes))
        weights = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
            tuple(weights),
            weight_specs(CFG, mesh),
        )
    engine = Engine(CFG, *weights, None, **SIZES, mesh=mesh, **settings)
    return engine.generate(REQUESTS), engine


@pytest.fixture(scope="module")
def alone():
    return served()[0]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [{"expert": 4, "tensor": 2}, {"fsdp": 4, "tensor": 2}])
def test_a_mesh_gives_the_tokens_of_one_device(alone, sizes):
    """Experts, heads and stored weights divided; more requests than slots, prompts over chunks."""
    got, engine = served(sizes)
    assert_same(got, alone)
    state = engine._slots.state.caches["layers_0_to_0"]["layer_0"].state
    assert state.addressable_shards[0].data.shape[2] == state.shape[2] // sizes["tensor"]


def test_snapshots_on_a_mesh(alone):
    got, engine = served({"expert": 2, "fsdp": 2, "tensor": 2}, snapshots=4)
    assert engine.stats.restored == 32, "the last prompt begins like the second"
    assert_same(got, alone)


def test_tokens_are_not_divided():
    with pytest.raises(ValueError, match=r"mesh\.context is 2"):
        served({"context": 2, "fsdp": 4})


def test_the_command_on_a_mesh(tmp_path):
    """Experts in 4 bits, each device with its own; the same lines as from one device."""
    cfg, model = trainable_config(), tmp_path / "model"
    moe = replace(cfg.moe, weights="mxfp4", ffn_dim=32, latent_dim=32)
    source = random_checkpoint(replace(cfg, moe=moe), tmp_path / "source")
    assert cli.main(["import", str(source), str(model)]) == 0
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("".join(json.dumps({"prompt": p, "temperature": 0}) + "\n" for p in "ab"))
    lines = []
    for name, mesh in (("one", []), ("eight", ["--mesh.expert", "4", "--mesh.tensor", "2"])):
        output = tmp_path / f"{name}.jsonl"
        arguments = ["--input", jobs, "--output", output, "--max-tokens", 6, "--tokenizer", "bytes"]
        assert cli.main(["generate", str(model), *map(str, arguments), *mesh]) == 0
        lines.append(output.read_text())
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_two_processes_share_a_model(tmp_path):
    """Each holds half of it; the first writes the lines of one process, and continues what a file has."""
    source = random_checkpoint(trainable_config(), tmp_path / "source")
    model = tmp_path / "model"
    assert cli.main(["import", str(source), str(model)]) == 0
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("".join(json.dumps({"prompt": p, "temperature": 0}) + "\n" for p in "abc"))

    def arguments(output):
        flags = ["--max-tokens", 5, "--tokenizer", "bytes", "--slots", 2]
        return [*map(str, [model, "--input", jobs, "--output", output, *flags])]

    assert cli.main(["generate", *arguments(tmp_path / "one.jsonl")]) == 0
    want = (tmp_path / "one.jsonl").read_text()
    both = tmp_path / "both.jsonl"
    both.write_text(want.splitlines(keepends=True)[1])
    mesh = ["--mesh.expert", "2", "--mesh.tensor", "2"]
    asked = ["-m", "k3jax.cli", "generate", *arguments(both), *mesh]
    succeeded(Group([asked] * 2, devices=2).wait())
    assert both.read_text() == want
