"""What is specific to the chunked backend: its derivative rule, tiles, groups, memory and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.pallas_kernels.kda import chunked, chunked_tiles, kda, reference
from k3jax.pallas_kernels.kda.config import Config
from tests.pallas_kernels.kda_cases import (
    NAMES,
    REGIMES,
    compare,
    inputs_for,
    jit,
    make_inputs,
    oracle,
    run,
)

# A tile is made of halves of halves, or of one product under a promised g_min.
MODES = {"halved": "chunked", "bounded": "chunked bounded"}
each_mode = pytest.mark.parametrize("backend", MODES.values(), ids=MODES)
SMALL = dict(heads=1, K=16, V=17)


def call(inputs: dict, **settings):
    """`kda` on these inputs: outputs, final memory and, if asked for, snapshots."""
    return kda(**{name: inputs[name] for name in NAMES}, backend="chunked", **settings)


def recurrence(inputs: dict, erase: bool = True) -> dict:
    """`oracle` written out in NumPy, float64, with the adjoint of every line: nothing to compile."""
    x = {name: a.astype(np.float64) for name, a in inputs.items()}
    T, S = x["q"].shape[1], x["state"]
    o, states, errors = np.zeros_like(x["v"]), [], np.zeros_like(x["v"])
    for t in range(T):
        q, k, v, g, beta = (x[name][:, t] for name in NAMES[:5])
        S = np.exp(g)[..., None] * S
        errors[:, t] = v - np.einsum("bhk,bhkv->bhv", k, S) * erase
        states.append(S)
        S = S + (beta[..., None] * k)[..., None] * errors[:, t, :, None]
        o[:, t] = np.einsum("bhk,bhkv->bhv", q, S)
    final, dS = S, x["d_state"]
    grads = {name: np.zeros_like(x[name]) for name in NAMES[:5]}
    for t in reversed(range(T)):
        q, k, v, g, beta = (x[name][:, t] for name in NAMES[:5])
        decayed, e, d_o = states[t], errors[:, t], x["d_o"][:, t]
        S = decayed + (beta[..., None] * k)[..., None] * e[..., None, :]
        grads["q"][:, t] = np.einsum("bhkv,bhv->bhk", S, d_o)
        dS = dS + q[..., None] * d_o[..., None, :]
        dk = np.einsum("bhkv,bhv->bhk", dS, e)
        grads["beta"][:, t] = (k * dk).sum(-1)
        de = beta[..., None] * np.einsum("bhkv,bhk->bhv", dS, k)
        grads["v"][:, t] = de
        grads["k"][:, t] = beta[..., None] * dk
        if erase:
            grads["k"][:, t] -= np.einsum("bhkv,bhv->bhk", decayed, de)
            dS = dS - k[..., None] * de[..., None, :]
        grads["g"][:, t] = (dS * decayed).sum(-1)
        dS = np.exp(g)[..., None] * dS
    grads["state"] = dS
    return {"o": o, "final_state": final} | {f"grad_{name}": d for name, d in grads.items()}


def test_the_written_out_recurrence_is_the_oracle():
    for erase in (True, False):
        inputs = make_inputs(5, ("mild", "mixed"), **SMALL)
        compare(recurrence(inputs, erase), oracle(inputs, erase=erase), rtol=1e-12)


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129])
def test_gradients_at_every_length(T):
    """KF-002, KF-003, KF-011: around the edges of tiles and chunks, in every regime."""
    inputs = make_inputs(T, heads=1)
    got = jax.block_until_ready(run(inputs))
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, recurrence(inputs))


@pytest.mark.parametrize("T", [33, 129])
def test_gradients_under_a_promised_bound(T):
    """KF-010: tiles as products of exp(G) and exp(-G), 80 nats deep in the regime `floor`."""
    inputs = inputs_for("chunked bounded", T, heads=1)
    compare(run(inputs, backend="chunked bounded"), recurrence(inputs))


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_small_gradients_survive_the_promised_bound(size):
    """At -5 nats throughout a tile factors reach exp(-80); nothing of them is flushed to zero."""
    inputs = make_inputs(32, ("floor",) * 2, heads=1)
    inputs |= {name: inputs[name] * np.float32(size) for name in ("d_o", "d_state")}
    got, want = run(inputs, backend="chunked bounded"), recurrence(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        a, b = np.asarray(got[f"grad_{name}"], np.float64), want[f"grad_{name}"]
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), name


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("chunked", dict(checkpoint_every=3)),
        ("chunked bounded", dict(checkpoint_every=8)),
        ("chunked bounded", dict(checkpoint_every=2, erase=False)),
        ("chunked", dict(checkpoint_every=5, erase=False)),
    ],
)
def test_settings_change_no_value(backend, settings, monkeypatch):
    """Memories kept every few chunks, in one group or over several, with and without erasure."""
    inputs = inputs_for(backend, 200, ("mild_negative_eigenvalues", "floor", "mixed"), heads=1)
    monkeypatch.setattr(chunked, "GROUP_ELEMENTS", dict.fromkeys(chunked.GROUP_ELEMENTS, 3000))
    layout = chunked.layout(inputs["q"], inputs["v"], None, Config(chunk_size=16, **settings))
    assert layout.chunks == 2
    assert (layout.groups > 1) == (settings["checkpoint_every"] > 2)
    want = recurrence(inputs, settings.get("erase", True))
    compare(run(inputs, backend=backend, chunk_size=16, **settings), want)


def test_chunks_and_groups_of_any_number():
    """Every token has one place, whatever the sizes ask for, and few places stay empty."""
    for T in (1, 16, 17, 100, 1000, 1024, 5000):
        for every in (1, 2, 3, 7, 100):
            x = jax.ShapeDtypeStruct((2, T, 2, 16), jnp.float32)
            layout = chunked.layout(x, x, None, Config(chunk_size=16, checkpoint_every=every))
            count = -(-T // 16)
            places = layout.segments * layout.groups * layout.chunks
            assert layout.groups * layout.chunks >= min(every, count)
            assert count <= places < count + layout.segments * layout.groups
    x = jnp.arange(2 * T * 3 * 4).reshape(2, T, 3, 4)
    assert layout.cut(x).shape == (
        *(layout.segments, layout.groups, layout.chunks)[: 2 + (layout.groups > 1)],
        *(2, 16, 3, 4),
    )
    np.testing.assert_array_equal(layout.uncut(layout.cut(x), T), x)


@pytest.mark.parametrize("every", [1, 3])
def test_documents_with_their_own_memories(every):
    """KF-009: their gradients too, empty documents between them, kept memories across them."""
    offsets = np.array([0, 0, 40, 41, 41, 100], np.int32)
    inputs = make_inputs(100, ("mixed",), heads=1)
    states = make_inputs(0, ("mild",) * 5, heads=1)
    inputs |= {name: states[name] for name in ("state", "d_state")}
    settings = dict(chunk_size=16, checkpoint_every=every)
    got = run(inputs, cu_seqlens=offsets, **settings)
    compare(got, oracle(inputs, cu_seqlens=offsets))
    empty = np.diff(offsets) == 0
    for name, given in (("final_state", "state"), ("grad_state", "d_state")):
        np.testing.assert_array_equal(np.asarray(got[name])[empty], inputs[given][empty])


def test_documents_inside_a_chunk_under_a_promised_bound():
    """A start cuts every factor of a chunk, and the pairs of the tile that it lies in."""
    inputs = inputs_for("chunked bounded", 70, ("mild", "floor", "one"), heads=1)
    ids = np.repeat([1, 2, 3, 4, 5], [5, 11, 1, 23, 30])[None].repeat(3, 0).astype(np.int32)
    ids[1] = np.roll(ids[1], 7)
    ids[1, :7] = 0
    compare(run(inputs, ids, backend="chunked bounded"), oracle(inputs, ids))


def with_snapshots(inputs, d_snapshots, **settings):
    """Outputs, memories and gradients, also those that come in through snapshots."""
    args = {name: inputs[name] for name in NAMES}
    out, pull = jax.vjp(lambda x: kda(**x, **settings), args)
    grads = pull((inputs["d_o"], inputs["d_state"], d_snapshots))[0]
    return dict(zip(("o", "state", "snapshots"), out, strict=True)) | {
        f"grad_{name}": grads[name] for name in NAMES
    }


@pytest.mark.parametrize(("T", "every", "checkpoint_every"), [(100, 16, 1), (96, 48, 2)])
def test_snapshots_carry_gradients(T, every, checkpoint_every):
    """KF-035: memories after every n tokens, the last one only if the row reaches it."""
    inputs = make_inputs(T, ("mild", "one"), heads=1)
    d = np.random.default_rng(0).normal(size=(2, T // every, 1, *inputs["state"].shape[2:]))
    results = jit(with_snapshots, static_argnames=("backend", "snapshot_every", "checkpoint_every"))
    got = results(
        inputs,
        d.astype(np.float32),
        backend="chunked",
        snapshot_every=every,
        checkpoint_every=checkpoint_every,
    )
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in inputs.items()}
        want = results(wide, jnp.asarray(d), backend="reference", snapshot_every=every)
        want = jax.device_get(want)
    assert got["snapshots"].shape == d.shape
    compare(got, want)


def test_a_row_too_short_for_a_snapshot_returns_none_of_them():
    inputs = make_inputs(40, ("mild",), **SMALL)
    d = jnp.zeros((1, 0, 1, 16, 17))
    settings = dict(backend="chunked", snapshot_every=64)
    got = jax.eval_shape(functools.partial(with_snapshots, **settings), inputs, d)
    assert got["snapshots"].shape == d.shape


def test_plain_autodiff_in_forward_and_reverse_mode():
    """The differentiable form: gradients, jvp and Hessian-vector products against float64."""
    inputs = make_inputs(33, ("mild", "one", "mixed"), **SMALL)
    args = {name: inputs[name] for name in NAMES}
    rng = np.random.default_rng(1)
    tangents = {name: rng.normal(size=x.shape).astype(np.float32) for name, x in args.items()}

    def loss(args, d, **settings):
        o, state = kda(**args, **settings)[:2]
        return jnp.sum(d["d_o"] * o**2) + jnp.sum(d["d_state"] * state)

    @functools.partial(jit, static_argnames="settings")
    def results(args, tangents, d, settings):
        f = functools.partial(loss, d=d, **dict(settings))
        value, derivative = jax.jvp(f, (args,), (tangents,))
        gradient, product = jax.jvp(jax.grad(f), (args,), (tangents,))
        product = {f"hvp_{name}": x for name, x in product.items()}
        return {"value": value[None], "jvp": derivative[None]} | gradient | product

    d = {name: inputs[name] for name in ("d_o", "d_state")}
    plain = (("backend", "chunked"), ("g_min", None), ("plain_autodiff", True), ("chunk_size", 16))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (args, tangents, d))
        want = jax.device_get(results(*wide, (("backend", "reference"),)))
    compare(results(args, tangents, d, plain), want)


def test_the_promise_does_not_change_plain_autodiff():
    """Its dg would be a difference of large terms in a tile of one product."""
    assert chunked.is_bounded(Config(g_min=-5.0))
    assert not chunked.is_bounded(Config(g_min=-5.0, plain_autodiff=True))
    assert not chunked.is_bounded(Config(g_min=-5.1))
    assert not chunked.is_bounded(Config())


@each_mode
def test_bits_depend_on_nothing_later(backend):
    """Outputs before token t, and the gradients of them, keep every bit when t and later change."""
    inputs = inputs_for(backend, 100, ("mild", "floor", "one"), heads=1)
    settings = {"g_min": -5.0} if "bounded" in backend else {}

    @functools.partial(jax.jit, static_argnames="t")
    def results(inputs, t):
        def head(args):
            return call(args, **settings)[0][:, :t]

        o, pull = jax.vjp(head, {name: inputs[name] for name in NAMES})
        return o, pull(inputs["d_o"][:, :t])[0]

    t = 71
    changed = {name: x.copy() for name, x in inputs.items()}
    for name, value in {"q": 9.0, "k": 0.3, "v": 1e6, "g": -4.5, "beta": 0.7}.items():
        changed[name][:, t:] = value
    before, again, after = (results(x, t) for x in (inputs, inputs, changed))
    for name in NAMES[:5]:
        assert not np.asarray(before[1][name])[:, t:].any(), name
    jax.tree.map(np.testing.assert_array_equal, before, again)
    jax.tree.map(np.testing.assert_array_equal, before, after)


@each_mode
def test_kf_048_documents_keep_their_bits(backend):
    """Nothing of one document reaches another in a chunk, forward or backward, not a rounding."""
    inputs = inputs_for(backend, 50, ("mild", "one"), heads=1)
    ids = np.repeat([[1, 2, 3]], [19, 18, 13], axis=1).repeat(2, 0).astype(np.int32)
    others = (ids != 2)[..., None, None]
    settings = {"g_min": -5.0} if "bounded" in backend else {}

    @jax.jit
    def results(inputs):
        args = {name: inputs[name] for name in NAMES}
        (o, _), pull = jax.vjp(lambda x: call(x, segment_ids=ids, **settings), args)
        return o, pull((jnp.where(others, 0, inputs["d_o"]), jnp.zeros_like(args["state"])))[0]

    noise = inputs_for(backend, 50, ("one", "mild"), seed=1, heads=1)
    changed = dict(inputs, state=noise["state"])
    for name in NAMES[:5]:
        where = others.reshape(2, 50, *[1] * (inputs[name].ndim - 2))
        changed[name] = np.where(where, noise[name], inputs[name])
    before, after = results(inputs), results(changed)
    np.testing.assert_array_equal(before[0][:, 19:37], after[0][:, 19:37])
    for name in NAMES[:5]:
        d, d_changed = np.asarray(before[1][name]), np.asarray(after[1][name])
        np.testing.assert_array_equal(d[:, 19:37], d_changed[:, 19:37], err_msg=name)
        assert not d[:, :19].any(), name
        assert not d[:, 37:].any(), name


@each_mode
def test_bfloat16_operands_lose_no_decay(backend):
    """1e-2 in norm, for dg too, whose terms cancel where decays are steep."""
    names = ("open", "slow_correlated_keys", "mild", "one", "floor")
    inputs = {n: jnp.asarray(x) for n, x in inputs_for(backend, 260, names, heads=1).items()}
    inputs |= {n: inputs[n].astype(jnp.bfloat16) for n in ("q", "k", "v")}
    got = run(inputs, backend=backend)
    want = recurrence({name: np.asarray(x) for name, x in inputs.items()})
    for name in want:
        a, b = (np.asarray(x[name], np.float64).reshape(len(names), -1) for x in (got, want))
        error = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
        assert (error <= 1e-2).all(), (name, error)


def test_kf_027_the_inverse_survives_identical_keys():
    """(I + P)^-1 for P = 1 below the diagonal: -1 on the first subdiagonal, 0 elsewhere."""
    for t, levels in ((8, 3), (16, 2), (16, 0)):
        blocks = [jnp.asarray(np.tril(np.ones((2**levels, t, t)), -1), jnp.float32)]
        for level in range(levels):
            s = 2**level * t
            blocks.append(jnp.ones((2 ** (levels - level - 1), s, s)))
        C = t * 2**levels
        want = np.eye(C) - np.eye(C, k=-1)
        got = jax.jit(chunked_tiles.inverse)(blocks, jnp.ones(C))
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_kf_028_an_identity_inverse_is_noticed(monkeypatch):
    """Mutation check: without the triangular solve each regime with memory must fail."""
    inputs = make_inputs(18, heads=1)
    monkeypatch.setattr(
        chunked_tiles, "inverse", lambda _, beta: jnp.eye(beta.shape[-1]) + 0 * beta[..., None]
    )
    # A setting of its own, or JAX would find the unmutated rule traced before.
    got = jit(lambda x: call(x, chunk_size=32, checkpoint_every=5)[0])(inputs)
    want = recurrence(inputs)["o"]
    for row, name in enumerate(REGIMES):
        if name in ("floor", "steep", "steepest"):
            continue  # their memory is gone before the next token
        with pytest.raises(AssertionError):
            compare({"o": got[row : row + 1]}, {"o": want[row : row + 1]}, rtol=1e-3)


def compiled_bytes(T: int, dtype=jnp.float32, K: int = 64, **settings):
    """Arguments, results and working memory of forward and backward, in bytes."""
    shapes = dict.fromkeys(("q", "k", "v", "g"), (1, T, 1, K))
    shapes |= {"beta": (1, T, 1), "state": (1, 1, K, K)}
    inputs = {
        name: jax.ShapeDtypeStruct(shape, dtype if name in "qkv" else jnp.float32)
        for name, shape in shapes.items()
    }

    def both(inputs, d_o):
        out, pull = jax.vjp(lambda x: call(x, **settings), inputs)
        return out, pull((d_o, out[1]))

    d_o = jax.ShapeDtypeStruct(shapes["v"], dtype)
    memory = jit(both).lower(inputs, d_o).compile().memory_analysis()
    return (
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def test_memory_is_states_and_one_more_copy_of_the_gradients(monkeypatch):
    """Per token the working memory grows by the states kept, and by results before they are put
    into place (XLA copies them if H = 1); by nothing else."""
    monkeypatch.setattr(chunked, "GROUP_ELEMENTS", dict.fromkeys(chunked.GROUP_ELEMENTS, 1))
    settings, few, many = dict(chunk_size=16, g_min=-5.0), 2048, 8192
    (_, results, small), (_, more_results, large) = (
        compiled_bytes(T, **settings) for T in (few, many)
    )
    states, results = (many - few) / 16 * 64 * 64 * 4, more_results - results
    assert large - small <= states + results
    sparse = compiled_bytes(many, checkpoint_every=16, **settings)[2]
    assert sparse <= small + states / 16 + results


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_million_tokens_fit_in_16_gib(dtype):
    """T = 1,048,576 of one head of 128, forward and backward; compiled, not run."""
    total = sum(compiled_bytes(1 << 20, dtype, K=128, g_min=-5.0))
    assert total < 16 * 2**30


def test_the_backward_rule_keeps_inputs_and_states():
    """What lies between forward and backward: the arguments and a state per segment."""
    inputs = make_inputs(256, ("mild",), **SMALL)
    arrays = [jnp.asarray(inputs[name]) for name in NAMES]
    cfg = Config(chunk_size=16, checkpoint_every=4)
    _, saved = jax.eval_shape(lambda *x: chunked._forward_rule(cfg, *x, None, None), *arrays)
    extra = [x.shape for x in jax.tree.leaves(saved)[len(arrays) :]]
    assert extra == [(chunked.layout(*arrays[:1], arrays[2], None, cfg).segments, 1, 1, 16, 17)]


@pytest.mark.devices
@pytest.mark.parametrize("settings", [dict(g_min=-5.0), dict(checkpoint_every=4)], ids=str)
def test_a_mesh_splits_rows_and_heads(settings):
    """Explicit axes go through every reshape, in both directions; the values stay."""
    inputs = inputs_for("chunked bounded", 70, ("mild", "floor") * 2, heads=2, K=16, V=24)
    ids = np.repeat([[1, 2, 0, 3]], [30, 20, 5, 15], axis=1).repeat(4, 0).astype(np.int32)
    settings = dict(settings, backend="chunked", chunk_size=16)

    @jit
    def gradients(inputs, ids):
        def loss(args):
            o, state = kda(**args, segment_ids=ids, **settings)
            return jnp.sum(o * inputs["d_o"]) + jnp.sum(state * inputs["d_state"])

        return jax.grad(loss)({name: inputs[name] for name in NAMES})

    want = gradients(inputs, ids)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        axes = {n: ("data", "tensor") if "state" in n else ("data", None, "tensor") for n in inputs}
        split = {n: jax.device_put(x, P(*axes[n])) for n, x in inputs.items()}
        got = gradients(split, jax.device_put(ids, P("data")))
    for name, x in got.items():
        assert x.sharding.is_equivalent_to(split[name].sharding, x.ndim), name
    compare(got, want)


def test_float64_inputs_stay_float64():
    inputs = make_inputs(20, ("mild",), **SMALL)
    with jax.enable_x64(True):
        wide = [jnp.asarray(inputs[name], jnp.float64) for name in NAMES]
        got = chunked.chunked(*wide, None, None, Config(chunk_size=16))[:2]
        want = reference.recurrent(*wide, None, None, Config())[:2]
        for a, b in zip(got, want, strict=True):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_document_start_is_exact_forgetting():
    """What packs documents: exp of a sum that holds FORGET is 0, and the sum stays finite."""
    for dtype in (np.float32, np.float64):
        total = np.full(256, chunked_tiles.FORGET, dtype).sum()
        assert np.isfinite(total)
        assert np.exp(dtype(chunked_tiles.FORGET)) == 0
