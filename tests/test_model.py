"""The text model: schedules, scan against unrolled, packing and padding, state hand-over, memory, recompilation."""

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from k3jax.configs import PRESETS, preset
from k3jax.configs.k3 import kimi_k3_model, kimi_linear_48b_model
from k3jax.decode_state import compact_rows, init_decode_state
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.layers.recompute import Remat
from k3jax.model import K3
from k3jax.stacks import locate, plan_stacks, restacked
from tests.model_helpers import (
    build,
    layer_modules,
    random_tokens,
    run_unrolled,
    split,
    tiny_config,
    with_params,
)

CFG = tiny_config()


@pytest.fixture(scope="module")
def model():
    return build(CFG)


@pytest.fixture(scope="module")
def logits(model):
    """The compiled forward pass: (tokens, segment ids or None) -> logits."""
    return jax.jit(lambda tokens, ids=None: model(tokens, segment_ids=ids))


# -- schedules


def test_released_schedule():
    layers = kimi_k3_model().layers
    assert [i for i, (a, _) in enumerate(layers) if a == "mla"] == [*range(3, 92, 4), 92]
    assert [i for i, (_, m) in enumerate(layers) if m == "dense"] == [0]
    assert sum(a == "kda" for a, _ in layers) == 69
    linear = kimi_linear_48b_model().layers
    assert [i + 1 for i, (a, _) in enumerate(linear) if a == "mla"] == [4, 8, 12, 16, 20, 24, 27]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_every_mechanism(name):
    cfg = preset(name)().model
    assert cfg.layers[0][1] == "dense"
    assert {m for _, m in cfg.layers[1:]} == {"moe"}
    assert cfg.layers[-1][0] == "mla"
    if name != "kimi_linear_48b":
        assert cfg.layers[-2][0] == "mla"  # the lone closing layer
        assert cfg.num_layers % cfg.attn_res.block_size  # a partial last block
        assert cfg.activation.kind == "situ"
        assert cfg.moe.latent_dim < cfg.width


@pytest.mark.parametrize("num_layers", [1, 5, 9, 13, 21, 93])
@pytest.mark.parametrize("dense", [0, 1, "most"])
def test_plan_covers_each_layer_once(num_layers, dense):
    dense = min(num_layers, 5) if dense == "most" else dense
    cfg = tiny_config(num_layers=num_layers, num_dense_layers=dense)
    places = [locate(cfg, i) for i in range(num_layers)]
    assert len(set(places)) == num_layers
    plans = {plan.name: plan for plan in plan_stacks(cfg)}
    assert sum(plan.size * plan.repeats for plan in plans.values()) == num_layers
    for i, (stack, name, repetition) in enumerate(places):
        plan, position = plans[stack], int(name.removeprefix("layer_"))
        assert plan.first + repetition * plan.size + position == i
        assert cfg.layers[i] == cfg.layers[plan.first + position]


def test_stacks_of_the_released_model():
    names = [(plan.name, plan.size, plan.repeats) for plan in plan_stacks(kimi_k3_model())]
    assert names == [
        ("layers_0_to_0", 1, 1),
        ("layers_1_to_2", 1, 2),
        ("layers_3_to_3", 1, 1),
        ("layers_4_to_91", 4, 22),
        ("layers_92_to_92", 1, 1),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_layers=8), "num_layers=8 does not match .* use 7 or 9"),
        (dict(pattern=()), "pattern is empty"),
        (dict(pattern=("kda", "rnn")), "'rnn'"),
        (dict(num_dense_layers=99), "num_dense_layers=99"),
        (dict(moe=None), "model.moe is None"),
        (dict(remat="some"), "'some'"),
        (dict(dtype="float8"), "'float8'"),
        (dict(vocab_size=0), "vocab_size is 0"),
    ],
)
def test_bad_config_names_the_value(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        tiny_config(**changes)
    assert "\n" not in str(error.value)


# -- scan, rematerialisation, depth


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("block", "float32"),
        pytest.param("block", "bfloat16", marks=pytest.mark.slow),
        pytest.param("full", "float32", marks=pytest.mark.slow),
        pytest.param("none", "float32", marks=pytest.mark.slow),
    ],
)
def test_kf_122_scanned_equals_unrolled(kind, dtype):
    """Logits and gradients agree whether groups are scanned or not, whatever is recomputed."""
    res = AttnResConfig(kind=kind, block_size=5 if kind == "block" else None)
    cfg = tiny_config(attn_res=res, dtype=dtype)
    _, params, buffers = split(build(cfg))
    tokens = random_tokens(cfg, (2, 11))

    def loss(run, cfg):
        def fn(params):
            h = run(with_params(cfg, params, buffers))
            return jnp.mean(jnp.sin(h.astype(jnp.float32)))

        # Otherwise XLA skips roundings to bfloat16 inside a fusion, and the two programs fuse
        # differently: enough to send a token of a bfloat16 model to another expert.
        compiled = jax.jit(
            jax.value_and_grad(fn), compiler_options={"xla_allow_excess_precision": False}
        )
        return compiled(params)

    want, want_grads = loss(lambda m: run_unrolled(m, tokens)[0], cfg)
    tolerance = 1e-5
    # "offload" keeps what "routed" and "outputs" keep.
    for remat in set(get_args(Remat)) - {"routed", "outputs"}:
        got, grads = loss(lambda m: m.hidden(tokens)[0], replace(cfg, remat=remat))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
        scale = optax.tree.norm(want_grads)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
        ):
            error = jnp.linalg.norm(a - b) / scale
            assert error <= tolerance, (jax.tree_util.keystr(path), remat, float(error))


@pytest.mark.parametrize(("depth", "cut"), [(1, 0), (5, 1), (7, 4)])
def test_kf_071_start_in_the_middle(depth, cut):
    """Layers before and after a cut, with the handed-over bank, equal one run; any depth works."""
    cfg = tiny_config(num_layers=depth)
    model, tokens = build(cfg), random_tokens(cfg, (1, 6))
    cut = min(cut, depth)

    @jax.jit
    def run():
        layers = list(layer_modules(model))
        prefix = model.embed_tokens(tokens, cfg.dtype)
        bank = jnp.zeros((cfg.attn_res.num_rows(depth), *prefix.shape))
        for i in range(cut):
            bank, prefix, *_ = layers[i](bank, prefix, i, None)
        # a fresh process gets the written rows and the running sum, nothing else
        rows = int(cfg.attn_res.before_attention(cut)[0])
        bank = jnp.zeros_like(bank).at[:rows].set(bank[:rows])
        for i in range(cut, depth):
            bank, prefix, *_ = layers[i](bank, prefix, i, None)
        h = model.norm(model.output_attn_res(bank, bank.shape[0], prefix))
        return h, model.hidden(tokens)[0]

    np.testing.assert_allclose(*run(), rtol=1e-4, atol=1e-5)


def split_abstract(cfg):
    return split(nnx.eval_shape(lambda: K3(cfg, rngs=nnx.Rngs(params=0))))


def test_layers_that_stand_for_themselves():
    """`scan_layers=False`: the same layers in other trees, there and back; the same activations."""
    cfg = tiny_config()
    alone = replace(cfg, scan_layers=False)
    assert [plan[:] for plan in plan_stacks(alone)] == [(i, 1, 1) for i in range(cfg.num_layers)]
    model = build(cfg)
    graphdef, params, buffers = split(model)
    other = [restacked(tree, cfg, alone) for tree in (params, buffers)]
    for tree, back in zip((params, buffers), other, strict=True):
        jax.tree.map(np.testing.assert_array_equal, restacked(back, alone, cfg), tree)
    there = nnx.merge(split(build(alone))[0], *other)
    tokens = np.arange(22, dtype=np.int32).reshape(2, 11)
    np.testing.assert_allclose(there(tokens), model(tokens), rtol=1e-5, atol=1e-5)


def test_kf_103_scan_returns_no_parameters():
    """Nothing parameter-sized leaves the forward pass, and nothing large is baked into it."""
    sizes = {}
    for depth in (7, 31):
        cfg = tiny_config(num_layers=depth)
        graphdef, params, buffers = split_abstract(cfg)
        forward = lambda p, b: nnx.merge(graphdef, p, b)(jnp.zeros((1, 8), jnp.int32))  # noqa: E731, B023
        lowered = jax.jit(forward).lower(params, buffers)
        assert len(jax.tree.leaves(lowered.out_info)) == 1
        jaxpr = jax.make_jaxpr(forward)(params, buffers)
        assert all(np.size(c) * 4 < 1 << 20 for c in jaxpr.consts)
        sizes[depth] = lowered.compile().memory_analysis().temp_size_in_bytes
    assert sizes[31] <= 1.2 * sizes[7]


def test_kf_070_the_backward_pass_keeps_no_copies_of_the_bank():
    """AttnRes costs the bank, its gradient and two temporaries of that size, however many sites a unit has."""
    kda = replace(CFG.kda, num_heads=1)
    cfg = tiny_config(
        num_layers=33, pattern=("kda", "kda", "kda", "mla"), width=64, kda=kda, remat="full"
    )

    def peak(kind, block_size):
        res = AttnResConfig(kind=kind, block_size=block_size)
        graphdef, params, buffers = split_abstract(replace(cfg, attn_res=res))
        tokens = jnp.zeros((1, 512), jnp.int32)
        loss = lambda p, b: jnp.sum(nnx.merge(graphdef, p, b).hidden(tokens)[0])  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(params, buffers).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (512 * cfg.width * 4)

    rows = 9  # of the bank; a unit has 8 sites, each with one input of a row
    assert peak("block", 4) - peak("none", None) <= 4 * rows + 8


def test_depth_does_not_grow_the_program():
    """The traced program of 93 layers has the size of the one of 7."""

    def size(depth):
        cfg = tiny_config(num_layers=depth)
        graphdef, params, buffers = split_abstract(cfg)
        return len(
            jax.jit(lambda p, b: nnx.merge(graphdef, p, b)(jnp.zeros((1, 8), jnp.int32)))
            .lower(params, buffers)
            .as_text()
        )

    assert size(93) <= 1.1 * size(7)


def test_kf_104_calls_leave_the_model_alone(model):
    """No attributes, no tracers: under jit, grad, after an exception in the middle, and eagerly."""
    before = str(nnx.graphdef(model))
    tokens = random_tokens(CFG, (1, 4))
    with jax.checking_leaks():
        jax.jit(lambda: model(tokens))()
        jax.grad(lambda s: (s * model(tokens)).sum())(1.0)
    with pytest.raises(TypeError):
        jax.jit(lambda: model("text"))()
    assert str(nnx.graphdef(model)) == before
    assert all(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        for x in jax.tree.leaves(nnx.state(model))
    )


# -- documents and padding


def test_kf_048_packed_documents_are_alone(model, logits):
    """Other tokens in document 1 change nothing in document 2, which equals itself alone; no gradient crosses."""
    a, b = random_tokens(CFG, (1, 5), 1), random_tokens(CFG, (1, 7), 2)
    segments = jnp.array([[1] * 5 + [2] * 7])
    run = jax.jit(lambda tokens: model(tokens, segment_ids=segments)[:, 5:])
    packed = run(jnp.concatenate([a, b], 1))
    np.testing.assert_array_equal(
        packed, run(jnp.concatenate([random_tokens(CFG, (1, 5), 3), b], 1))
    )
    np.testing.assert_allclose(packed, logits(b), rtol=1e-4, atol=1e-5)

    graphdef, params, buffers = split(model)

    def loss(table):
        p = {**params, "embed_tokens": {"embedding": table}}
        first = jnp.arange(5)[None]  # ids that only document 1 uses
        tokens = jnp.concatenate([first, b % 32 + 32], 1)
        return nnx.merge(graphdef, p, buffers)(tokens, segment_ids=segments)[:, 5:].sum()

    grad = jax.grad(loss)(params["embed_tokens"]["embedding"])
    assert not grad[:5].any()
    assert grad[32:].any()


def test_kf_031_padding_left_right_and_packed(logits):
    """Prompts of 5 and 9 tokens: left padded, right padded and packed give the numbers of separate runs."""
    short, long = random_tokens(CFG, (5,), 1), random_tokens(CFG, (9,), 2)
    want = [logits(short[None])[0], logits(long[None])[0]]
    run = logits
    for pad_token in (0, 63):
        pad = jnp.full(4, pad_token)
        left = run(
            jnp.stack([jnp.concatenate([pad, short]), long]),
            jnp.array([[0] * 4 + [1] * 5, [1] * 9]),
        )
        right = run(
            jnp.stack([jnp.concatenate([short, pad]), long]),
            jnp.array([[1] * 5 + [0] * 4, [1] * 9]),
        )
        for got in ((left[0, 4:], left[1]), (right[0, :5], right[1])):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    packed = run(jnp.concatenate([short, long])[None], jnp.array([[1] * 5 + [2] * 9]))[0]
    np.testing.assert_allclose(packed[:5], want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[5:], want[1], rtol=1e-4, atol=1e-5)


# -- decode state


@pytest.fixture(scope="module")
def consume(model):
    graphdef, params, buffers = split(model)

    @jax.jit
    def run(tokens, segment_ids, state):
        m = nnx.merge(graphdef, params, buffers)
        h, _, state = m.hidden(tokens, segment_ids=segment_ids, state=state)
        return m.logits(h), state

    return run


@pytest.mark.parametrize("pieces", [(16, 16, 8), (39, 1), (1,) * 6 + (34,)])
def test_kf_040_windows_equal_one_pass(logits, consume, pieces):
    """A prompt read in windows gives the logits and the state of one pass."""
    tokens = random_tokens(CFG, (2, 40))
    want, whole = consume(tokens, None, init_decode_state(CFG, 2, 40))
    np.testing.assert_allclose(want, logits(tokens), rtol=1e-4, atol=1e-5)
    state, got, at = init_decode_state(CFG, 2, 40), [], 0
    for n in pieces:
        out, state = consume(tokens[:, at : at + n], None, state)
        got.append(out)
        at += n
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-4, atol=2e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_kf_031_left_padded_batch_in_pieces(logits, consume):
    """A left-padded batch, compacted and read four columns at a time, equals the prompts alone."""
    short, long = random_tokens(CFG, (5,), 1), random_tokens(CFG, (9,), 2)
    tokens = jnp.stack([jnp.concatenate([jnp.full(4, 63), short]), long])
    tokens, ids, order = compact_rows(tokens, jnp.array([[False] * 4 + [True] * 5, [True] * 9]))
    np.testing.assert_array_equal(order[0], [4, 5, 6, 7, 8, 0, 1, 2, 3])
    state, rows = init_decode_state(CFG, 2, 12), [[], []]
    for at in range(0, 9, 4):
        out, state = consume(tokens[:, at : at + 4], ids[:, at : at + 4], state)
        for row in (0, 1):
            rows[row].append(out[row][np.asarray(ids[row, at : at + 4], bool)])
    for got, prompt in zip(rows, (short, long), strict=True):
        np.testing.assert_allclose(
            jnp.concatenate(got), logits(prompt[None])[0], rtol=1e-4, atol=2e-5
        )
    np.testing.assert_array_equal(state.length, [5, 9])


def test_kf_038_length_counts_tokens_not_layers(consume):
    state = init_decode_state(CFG, 1, 16)
    seen = []
    for n in (3, 1, 1):
        _, state = consume(random_tokens(CFG, (1, n)), None, state)
        seen.append(int(state.length[0]))
    fresh = init_decode_state(CFG, 1, 16)  # a reset is a new state: every part of it is zero
    assert not any(leaf.any() for leaf in jax.tree.leaves(fresh))
    _, state = consume(random_tokens(CFG, (1, 3)), None, fresh)
    assert [*seen, int(state.length[0])] == [3, 4, 5, 3]


def test_kf_080_state_bytes_follow_the_layer_types():
    """KDA layers hold a memory and a window whatever the length; only MLA layers grow with it."""
    from k3jax.decode_state import state_bytes

    cfg = kimi_k3_model()
    for batch, length in ((1, 131_072), (64, 1024)):
        state = jax.eval_shape(lambda b=batch, n=length: init_decode_state(cfg, b, n))
        per_token = 24 * (512 + 64) * 2
        per_row = 69 * (96 * 128 * 128 * 4 + 3 * 36_864 * 2)
        want = batch * (length * per_token + per_row)
        assert abs(state_bytes(state) - want) <= 0.05 * want
    kinds = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert kinds == {jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("int32")}


def test_causality(logits):
    """A later token changes no earlier logit, bit for bit."""
    tokens = random_tokens(CFG, (1, 24))
    np.testing.assert_array_equal(logits(tokens)[:, :15], logits(tokens.at[0, 15].add(1))[:, :15])
