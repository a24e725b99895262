"""Golden checkpoints in the released layout: imported, run, continued greedily, exported as they were."""

import filecmp
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import cli
from k3jax.decode_state import init_decode_state
from k3jax.generate import Engine
from k3jax.request import Request
from k3jax.run_dir import load_trained
from k3jax.sample import SamplingConfig
from k3jax.train_state import abstract_model, merge
from tests.golden_io import cases, check, golden_dir, load
from tests.official_helpers import text_checkpoint

CASES = cases("multimodal_io")
SOURCE = golden_dir() / "multimodal" / "checkpoint"
ALLOWED = 1e-5  # largest error over the largest logit, float32

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module", params=["mxfp4", "bf16"])
def imported(request, tmp_path_factory):
    """A model folder, and the model in it computing in float32."""
    folder = tmp_path_factory.mktemp("imported") / "model"
    assert cli.main(["import", str(SOURCE), str(folder), "--experts", request.param]) == 0
    trained = load_trained(folder)
    assert trained.cfg.model.moe.weights == {"mxfp4": "mxfp4", "bf16": "plain"}[request.param]
    cfg = replace(trained.cfg.model, dtype="float32")
    return folder, merge(abstract_model(cfg)[0], trained.params, trained.buffers)


def rows(case, situation):
    """Each row's embeddings without padding, and where in the row they lie."""
    meta, tensors = load(case)
    mask = tensors[f"{situation}.merged_mask"].astype(bool)
    return (
        meta,
        tensors,
        [
            (embeddings[keep][None], keep)
            for embeddings, keep in zip(tensors[f"{situation}.merged_embeds"], mask, strict=True)
        ],
    )


@pytest.mark.parametrize("situation", ["single", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_text_and_images(imported, case, situation):
    """The features of the images are given, the text model does the rest."""
    _, model = imported
    meta, tensors, inputs = rows(case, situation)
    want = tensors[f"{situation}.logits"]
    got = np.zeros_like(want)
    for row, (embeddings, keep) in zip(got, inputs, strict=True):
        tokens = jnp.zeros(embeddings.shape[:2], jnp.int32)
        h, _, _ = model.hidden(tokens, embeddings=jnp.asarray(embeddings))
        row[keep] = model.logits(h)[0]
    check(f"{situation}.logits", got, meta)
    assert np.abs(got - want).max() <= ALLOWED * np.abs(want).max()


@pytest.mark.parametrize("situation", ["single", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_behind_images(imported, case, situation):
    """Prefill and one token at a time, over the decode state."""
    _, model = imported
    meta, tensors, inputs = rows(case, situation)
    tokens = tensors[f"{situation}.tokens"]
    found = []
    for (embeddings, _), chosen in zip(inputs, tokens, strict=True):
        state = init_decode_state(model.cfg, 1, embeddings.shape[1] + len(chosen))
        ids = jnp.zeros(embeddings.shape[:2], jnp.int32)
        h, _, state = model.hidden(ids, embeddings=jnp.asarray(embeddings), state=state)
        logits = [model.logits(h)[0, -1]]
        for token in chosen:
            assert int(jnp.argmax(logits[-1])) == token
            h, _, state = model.hidden(jnp.full((1, 1), token, jnp.int32), state=state)
            logits.append(model.logits(h)[0, -1])
        found.append(jnp.stack(logits))
    got = np.stack(jax.device_get(found))
    check(f"{situation}.step_logits", got, meta)
    want = tensors[f"{situation}.step_logits"]
    assert np.abs(got - want).max() <= ALLOWED * np.abs(want).max()


def test_exported_files_are_the_original_ones(imported, tmp_path):
    folder, _ = imported
    target = tmp_path / "exported"
    assert cli.main(["export", str(folder), str(target)]) == 0
    names = sorted(path.name for path in SOURCE.iterdir())
    assert sorted(path.name for path in target.iterdir()) == names
    same, different, errors = filecmp.cmpfiles(SOURCE, target, names, shallow=False)
    assert (sorted(same), different, errors) == (names, [], [])


@pytest.mark.parametrize("case", ["text_k3", "text_linear"])
def test_text_checkpoints_of_float32(case, tmp_path):
    """Kimi K3 and Kimi Linear, imported: logits, and the greedy tokens of the engine."""
    source, folder = text_checkpoint(case, tmp_path / "source"), tmp_path / "model"
    assert cli.main(["import", str(source), str(folder)]) == 0
    trained = load_trained(folder)
    model = merge(abstract_model(trained.cfg.model)[0], trained.params, trained.buffers)
    meta, tensors = load(f"{case}/io")
    got, want = (
        np.asarray(model(jnp.asarray(tensors["input_ids"], jnp.int32))),
        tensors["full.logits"],
    )
    check("full.logits", got, meta)
    assert np.abs(got - want).max() <= ALLOWED * np.abs(want).max()
    prompts, chosen = tensors["prompt_ids"], tensors["decode.tokens"]
    size = prompts.shape[1] + chosen.shape[1]
    engine = Engine(trained.cfg.model, trained.params, trained.buffers, None, slots=2, max_len=size)
    greedy = SamplingConfig(temperature=0.0)
    results = engine.generate(
        Request(prompt=row.tolist(), max_tokens=chosen.shape[1], sampling=greedy) for row in prompts
    )
    np.testing.assert_array_equal([result.tokens for result in results], chosen)
