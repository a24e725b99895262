"""The training step on a small model with every mechanism; nearly all tests share one program."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from k3jax.layers.quantile_balancing import RouterStats
from k3jax.losses import next_token_targets
from k3jax.model import LayerStats, apply_balancing
from k3jax.optim.build import OptimConfig
from k3jax.stacks import plan_stacks
from k3jax.train_state import abstract_model, init_params, init_state, merge
from k3jax.train_step import _layer_metrics, _over_devices, _pool, make_eval_step, make_train_step
from tests.model_helpers import tiny_config

# Two MLA layers with experts, scanned: every layer kind more is ten seconds of compiling.
MODEL = tiny_config(pattern=("mla",), closing=(), num_layers=2, num_dense_layers=0)
LAYERS = plan_stacks(MODEL)[0].name
OPTIM = OptimConfig(peak_lr=2e-2, final_lr=2e-3, warmup_fraction=0.0, ns_dtype="float32")
CONFIG = SimpleNamespace(model=MODEL, optim=OPTIM, steps=40)
A, B, T = 2, 2, 32
POISON = MODEL.vocab_size - 1  # tests that want a NaN give this token a NaN embedding
BYTES = np.arange(MODEL.vocab_size) % 5


@cache
def step():
    return make_train_step(CONFIG, BYTES)


def new_state(cfg=CONFIG):
    return init_state(cfg.model, cfg.optim, jax.random.key(0))


def make_batch(seed=0, shape=(A, B, T), documents=3):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, POISON, shape)
    segments = np.sort(rng.integers(1, documents + 1, shape), axis=-1)
    segments[0, 0, T // 2 :] = 0  # rows differ in how many tokens they supervise
    return {"tokens": np.int32(tokens), "segment_ids": np.int32(segments)}


def numpy(tree):
    return jax.tree.map(np.array, tree)


def assert_same(actual, wanted):
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)


@cache
def forward():
    graphdef, _, _ = abstract_model(MODEL)

    def run(params, buffers, tokens, segment_ids):
        model = merge(graphdef, params, buffers)
        h, stats, _ = model.hidden(tokens, segment_ids=segment_ids, collect=True)
        return model.logits(h), stats

    return jax.jit(run)


def inspect(state, batch):
    """Loss in float64, and the statistics, of the whole batch in one pass."""
    rows = {name: x.reshape(-1, T) for name, x in batch.items()}
    logits, stats = forward()(state.params, state.buffers, **rows)
    targets, weights = next_token_targets(**rows)
    logits = np.asarray(logits, np.float64)
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    nll = np.log(np.exp(logits).sum(-1)) - picked
    return (weights * nll).sum(), np.asarray(weights), stats


def momentum(state):
    return optax.tree.get(state.opt_state, "trace")


# ----------------------------------------------------------------------------------- what it does


def test_loss_falls_and_the_metrics_say_what_happened():
    state, batch = new_state(), make_batch()
    nats, weights, stats = inspect(state, batch)
    state, first = step()(state, batch)
    np.testing.assert_allclose(first["nats"], nats, rtol=1e-5)
    np.testing.assert_allclose(first["loss"], nats / weights.sum(), rtol=1e-5)
    targets = np.asarray(next_token_targets(*(x.reshape(-1, T) for x in batch.values()))[0])
    assert first["tokens"] == weights.sum()
    assert first["bytes"] == (weights * BYTES[targets]).sum()
    assert first["supervised_rows"] == A * B
    np.testing.assert_allclose(first["lr"], OPTIM.peak_lr, rtol=1e-6)
    layer = stats[LAYERS]["layer_0"]
    load = [x.max() / x.mean() for x in layer.router.load]
    np.testing.assert_allclose(first["expert_load"], load, rtol=1e-6)
    np.testing.assert_allclose(first["max_logit"], layer.max_logit.max(-1), rtol=1e-4)
    assert first["tied_routers"] == 0
    for _ in range(11):
        state, last = step()(state, batch)
    assert last["loss"] < 0.8 * first["loss"]
    assert int(state.step) == 12


def test_kf_117_one_program_for_all_steps_and_document_counts():
    state = new_state()
    for seed, documents in enumerate((1, 2, 7, 20, 20)):
        state, _ = step()(state, make_batch(seed, documents=documents))
    assert step()._cache_size() == 1


def test_kf_102_the_old_state_is_consumed_and_its_memory_reused():
    state, batch = new_state(), make_batch()
    compiled = step().lower(state, batch).compile()
    memory = compiled.memory_analysis()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes == state_bytes
    assert memory.output_size_in_bytes < state_bytes + 8192  # metrics, and pointers to the leaves
    new, _ = step()(state, batch)  # an unusable donated buffer would warn, and warnings are errors
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))


def test_kf_100_a_copied_state_continues_bit_for_bit():
    state = new_state()
    for seed in range(2):
        state, _ = step()(state, make_batch(seed))
    copy = jax.tree.map(jnp.asarray, numpy(state))
    ends = []
    for start in (state, copy):
        for seed in range(2, 5):
            start, _ = step()(start, make_batch(seed))
        ends.append(numpy(start))
    assert_same(*ends)
    assert ends[0].step == 5


# ----------------------------------------------------------------------------- the global batch


def test_kf_058_one_pass_or_several_give_the_same_update():
    batch = make_batch()
    whole = {name: x.reshape(1, A * B, T) for name, x in batch.items()}
    two, two_metrics = step()(new_state(), batch)
    one, one_metrics = make_train_step(CONFIG)(new_state(), whole)
    for name in ("loss", "nats", "tokens", "grad_norm", "expert_load", "max_logit"):
        np.testing.assert_allclose(two_metrics[name], one_metrics[name], rtol=2e-5, err_msg=name)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(momentum(one)))
    for a, b in zip(jax.tree.leaves(momentum(one)), jax.tree.leaves(momentum(two)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * largest)
    (a,), (b,) = (jax.tree.leaves(state.buffers) for state in (one, two))  # one stack
    tolerance = 1e-5
    assert (
        np.abs(a).max() > 100 * tolerance
    )  # the biases moved, or their equality would say nothing
    np.testing.assert_allclose(a, b, atol=tolerance)


def test_kf_058_statistics_of_micro_batches_are_one_sample():
    passes, layers, tokens, experts = 3, 2, 4, 5
    margins = np.random.default_rng(0).random((passes, layers, tokens, experts))
    counts, tied = np.full((passes, layers), tokens), np.array([[1, 1], [1, 0], [1, 1]], bool)
    load, logits = np.ones((passes, layers, experts), int), margins[:, :, 0]
    stats = RouterStats(*map(jnp.asarray, (margins, counts, load, tied)))
    router, max_logit = _pool({"s": {"layer_0": LayerStats(stats, jnp.asarray(logits))}})["s"][
        "layer_0"
    ]
    rows = np.moveaxis(margins, 0, 1).reshape(layers, -1, experts)
    np.testing.assert_allclose(router.statistics, rows, rtol=1e-6)
    assert router.count.tolist() == [passes * tokens] * layers
    assert (router.load == passes).all()
    assert router.all_tied.tolist() == [True, False]
    np.testing.assert_allclose(max_logit, logits.max(0), rtol=1e-6)


def test_kf_058_a_bias_is_used_from_the_next_step_on():
    state = new_state()
    for seed in range(3):
        batch = make_batch(seed)
        _, _, stats = inspect(state, batch)  # routed with the bias that the state holds now
        wanted = numpy(apply_balancing(MODEL, state.buffers, stats))
        before = numpy(state.buffers)
        load = numpy(stats[LAYERS]["layer_0"].router.load[-1])
        state, metrics = step()(state, batch)
        np.testing.assert_allclose(metrics["expert_load"][-1], load.max() / load.mean(), rtol=1e-6)
        for new, expected, old in zip(
            *map(jax.tree.leaves, (state.buffers, wanted, before)), strict=True
        ):
            np.testing.assert_allclose(new, expected, atol=1e-5)
            assert np.abs(new - old).max() > 1e-3


def test_evaluation_gives_the_same_loss_and_changes_nothing():
    state, batch = new_state(), make_batch()
    nats, weights, _ = inspect(state, batch)
    evaluate = make_eval_step(CONFIG, BYTES)
    rows = {name: x.reshape(-1, T) for name, x in batch.items()}
    sums = evaluate(state.params, state.buffers, rows)
    np.testing.assert_allclose(sums["nats"], nats, rtol=1e-5)
    assert sums["tokens"] == weights.sum()
    _, metrics = step()(state, batch)
    assert sums["bytes"] == metrics["bytes"]


# -------------------------------------------------------------------------------------- bad batches


def test_kf_119_a_batch_that_is_not_finite_changes_only_the_counters():
    state = new_state()
    table = state.params["embed_tokens"]["embedding"]
    poisoned = table.at[POISON].set(jnp.nan)  # of a token that the good batches do not use
    state = replace(state, params={**state.params, "embed_tokens": {"embedding": poisoned}})
    state, metrics = step()(state, make_batch(0))
    assert metrics["skipped"] == 0
    before = numpy(state)
    bad = make_batch(1)
    bad["tokens"][1, 1, 5] = POISON  # one token of one micro-batch
    for skips in (1, 2):
        state, metrics = step()(state, bad)
        assert metrics["skipped"] == 1
        assert not np.isfinite(metrics["loss"])
        for part in ("params", "buffers", "opt_state", "key"):
            assert_same(numpy(getattr(state, part)), getattr(before, part))
        assert (state.step, state.skipped, state.skipped_total) == (1 + skips, skips, skips)
    state, metrics = step()(state, make_batch(2))
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["loss"])
    assert (state.step, state.skipped, state.skipped_total) == (4, 0, 2)


def test_kf_120_a_batch_without_supervision_has_no_gradient():
    state, _ = step()(new_state(), make_batch())
    before = numpy(state)
    batch = make_batch(1)
    batch["segment_ids"] = np.broadcast_to(np.int32(np.arange(1, T + 1)), (A, B, T))
    state, metrics = step()(state, batch)  # real tokens, but every document has one
    assert metrics["loss"] == metrics["grad_norm"] == metrics["tokens"] == 0
    assert metrics["supervised_rows"] == metrics["skipped"] == 0
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, OPTIM.momentum * old, rtol=1e-6),
        momentum(state),
        momentum(before),
    )


def test_kf_120_rows_of_padding_do_not_dilute_the_mean():
    batch = make_batch()
    alone, empty = {}, {}
    for name, x in batch.items():
        alone[name] = x.copy()
        empty[name] = x.copy()
        alone[name][1] = x[0]  # micro-batch 0 twice
    empty["segment_ids"][1] = 0  # micro-batch 0 and nothing
    _, once = step()(new_state(), empty)
    _, twice = step()(new_state(), alone)
    assert once["supervised_rows"] == B
    assert twice["tokens"] == 2 * once["tokens"]
    np.testing.assert_allclose(once["loss"], twice["loss"], rtol=1e-5)
    np.testing.assert_allclose(once["grad_norm"], twice["grad_norm"], rtol=1e-4)


def test_only_padding_leaves_the_router_biases_alone():
    state, _ = step()(new_state(), make_batch())
    before = numpy(state.buffers)
    padding = {name: x * 0 for name, x in make_batch().items()}
    state, metrics = step()(state, padding)
    assert_same(numpy(state.buffers), before)
    assert np.isfinite(metrics["expert_load"]).all()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params))


# ---------------------------------------------------------------------------------------- QK-Clip


def test_qk_clip_acts_on_every_attention_layer():
    model = replace(MODEL, moe=None, num_dense_layers=2)
    still = replace(
        OPTIM, peak_lr=1e-30, final_lr=0.0, qk_clip=1e-3
    )  # the update itself is nothing
    cfg = SimpleNamespace(model=model, optim=still, steps=40)
    train, batch = make_train_step(cfg), make_batch(shape=(1, B, T))
    state, before = train(new_state(cfg), batch)
    state, after = train(state, batch)
    assert (before["max_logit"] > 2e-3).all()
    # Smaller logits change the inputs of later layers a little.
    np.testing.assert_allclose(after["max_logit"], 1e-3, rtol=0.02)


def test_figures_of_several_stacks_come_in_the_order_of_the_network():
    model = tiny_config(pattern=("kda", "mla"), closing=("kda",), num_layers=7)  # 1 + 1 + 2 x 2 + 1
    stats, wanted = {}, {"expert_load": [], "max_logit": []}
    for plan in plan_stacks(model):
        layers = stats[plan.name] = {}
        for j in range(plan.size):
            indices = jnp.arange(plan.repeats) * plan.size + plan.first + j
            attention, mixer = model.layers[plan.first + j]
            load = jnp.stack([1 + indices, 1 - indices], -1)  # max / mean is 1 + layer index
            router = SimpleNamespace(load=load, all_tied=indices == 5) if mixer == "moe" else None
            logit = indices[:, None] * jnp.array([0.5, 1.0]) if attention == "mla" else None
            layers[f"layer_{j}"] = LayerStats(router, logit)
    for i, (attention, mixer) in enumerate(model.layers):
        wanted["expert_load"] += [1 + i] if mixer == "moe" else []
        wanted["max_logit"] += [i] if attention == "mla" else []
    metrics = _layer_metrics(model, stats)
    assert metrics.pop("tied_routers") == 1
    assert {name: x.tolist() for name, x in metrics.items()} == wanted


# ------------------------------------------------------------------------------------ initial state


def test_initial_parameters_have_the_distributions_of_the_model():
    model = replace(MODEL, pattern=("kda",), closing=("mla",))
    params, buffers = init_params(model, jax.random.key(1))
    _, abstract, abstract_buffers = abstract_model(model)
    jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or 1 / 0, params, abstract)
    assert jax.tree.structure(buffers) == jax.tree.structure(abstract_buffers)
    attention, layer = (params[plan.name]["layer_0"] for plan in plan_stacks(model))
    attention = attention["self_attn"]
    for kernel in (attention["q_proj"]["kernel"], layer["block_sparse_moe"]["experts"]["w1"]):
        np.testing.assert_allclose(kernel.std(), MODEL.init_std, rtol=0.15)
    assert (layer["input_layernorm"]["weight"] == 1).all()
    assert not layer["mlp_res"]["proj"].any()
    conv = attention["q_conv1d"]["kernel"]
    assert 0.4 < conv.max() <= 0.5  # U(-1/2, 1/2)
    assert -6.91 <= attention["dt_bias"].min() < attention["dt_bias"].max() <= -2.25
    kernels = [layer["self_attn"][f"{n}_proj"]["kernel"].ravel()[:16] for n in ("g", "o", "q_b")]
    assert len({float(k[0]) for k in kernels}) == 3  # no two weights share their numbers
    again, _ = init_params(model, jax.random.key(1))
    assert_same(again, params)


def test_large_weights_have_draws_of_their_own(monkeypatch):
    monkeypatch.setattr("k3jax.train_state.POOLED_SIZE", 1500)
    params, _ = init_params(MODEL, jax.random.key(1))
    w1, w3 = (params[LAYERS]["layer_0"]["block_sparse_moe"]["experts"][n] for n in ("w1", "w3"))
    np.testing.assert_allclose(w1.std(), MODEL.init_std, rtol=0.1)
    assert (w1 != w3).all()


def test_a_part_with_nothing_but_padding_has_no_logit():
    """So that it hides no negative largest logit of others, micro-batches or devices."""
    graphdef, params, buffers = abstract_model(MODEL)
    params, buffers = init_params(MODEL, jax.random.key(0))

    @jax.jit
    def logits(segment_ids):
        model = merge(graphdef, params, buffers)
        tokens = jnp.zeros(segment_ids.shape, jnp.int32)
        _, stats, _ = model.hidden(tokens, segment_ids=segment_ids, collect=True)
        return stats[LAYERS]["layer_0"].max_logit

    rows = jnp.ones((1, 8), jnp.int32)
    assert np.isneginf(logits(0 * rows)).all()
    assert np.isfinite(logits(rows)).all()

    def pooled(*parts):
        stats = {"stack": {"layer_0": LayerStats(None, jnp.array(parts, jnp.float32)[:, None])}}
        return float(_over_devices(_pool(stats))["stack"]["layer_0"].max_logit[0])

    assert pooled(-jnp.inf, -0.5, -jnp.inf) == -0.5
    assert pooled(-jnp.inf, -jnp.inf) == 0
