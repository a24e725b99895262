"""Gated MLA with the tokens of a row split over devices: the unsharded layer's numbers, work, traffic."""

import functools
import re
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.layers import mla_context
from k3jax.sharding import context_balance
from k3jax.sharding.annotate import pmax, psum, region
from k3jax.sharding.mesh import AXES, ROWS, MeshConfig, make_mesh
from k3jax.testing import assert_close, random_layer
from tests.layers.helpers import TINY_MLA, normal, segments

pytestmark = pytest.mark.devices
WIDTH = 13
# Widths that divide by no number of ranks, so that parameters are stored whole on every rank.
TINY = replace(TINY_MLA, q_rank=7, kv_rank=7)
PLAIN = replace(TINY, q_rank=None, out_gate=False)


def pull(graphdef, params, x, ids, d_y):
    """(y, top), gradients of sum(y * d_y) by (params, x)."""

    def run(params, x):
        y, _, top = nnx.merge(graphdef, params)(x, ids)
        return y, top

    y, vjp, top = jax.vjp(run, params, x, has_aux=True)
    return (y, top), vjp(d_y)


@functools.cache
def split(graphdef, ranks, data=1, block=mla_context.BLOCK):
    """The same on a mesh of `ranks` windows of each row and `data` parts of the rows, and where it
    wants its arguments."""
    mesh = make_mesh(MeshConfig(data=data, context=ranks), jax.devices()[: data * ranks])

    def local(params, x, ids, d_y):
        with mock.patch.object(mla_context, "BLOCK", block):
            (y, top), (d_params, d_x) = pull(graphdef, params, x, ids, d_y)
        return (y, pmax(top, *ROWS)), (psum(d_params, *AXES), d_x)

    whole, window, row = PartitionSpec(), PartitionSpec(ROWS, "context"), PartitionSpec(ROWS)
    inputs = (whole, window, row, window)
    run = jax.jit(region(local, mesh, inputs, ((window, whole), (whole, window))))
    return run, [NamedSharding(mesh, spec) for spec in inputs]


@functools.cache
def unsharded(graphdef):
    return jax.jit(functools.partial(pull, graphdef))


def compare(cfg, ranks, ids, **options):
    B, T = ids.shape
    graphdef, params = random_layer(cfg, WIDTH)
    x, d_y = normal(B, T, WIDTH), normal(B, T, WIDTH, seed=1)
    x[ids == 0] = 1e4  # padding may hold anything
    run, places = split(graphdef, ranks, **options)
    (y, top), grads = run(*map(jax.device_put, (params, x, ids, d_y), places))
    (want, want_top), want_grads = unsharded(graphdef)(params, x, ids, d_y)
    assert np.abs(want_top).min() > 0.1
    assert_close(y, want)
    assert_close(top, want_top)
    assert_close(grads, want_grads, "float32_grad")

    x[ids == 0] = np.nan
    (y, top), _ = run(*map(jax.device_put, (params, x, ids, d_y), places))
    assert_close((np.asarray(y)[ids > 0], top), (np.asarray(want)[ids > 0], want_top), what="NaN")


@pytest.mark.parametrize(
    ("cfg", "ranks", "tokens", "documents"),
    [
        (TINY, 2, 2 * 8, (5, 9)),
        (PLAIN, 2, 2 * 1, (2,)),
        (replace(TINY, rope_theta=100.0), 3, 3 * 7, (3, 13, 4)),
        (TINY, 4, 4 * 5, (20,)),
        (replace(PLAIN, rope_theta=100.0), 4, 4 * 6, (1, 17, 2)),
        (TINY, 8, 8 * 1, (3, 4)),
        (PLAIN, 8, 8 * 3, (2, 18)),
    ],
)
def test_equals_the_unsharded_layer(cfg, ranks, tokens, documents):
    """KF-048 across ranks: windows of 1, odd and even lengths, documents that end in and on borders."""
    compare(cfg, ranks, segments(*documents, size=tokens))


@pytest.mark.parametrize("block", [1, 3])
def test_several_blocks_in_a_chunk(block):
    """Two rows in each of two parts, of other documents; ids fall and come back, padding in between."""
    ids = np.repeat([[5, 3, 0, 5, 9, 0], [1, 0, 2, 0, 1, 7]], 4, axis=1).astype(np.int32)
    ids = np.concatenate([ids, segments(11, 13, size=24), segments(size=24)])
    compare(replace(TINY, rope_theta=100.0), 2, ids, data=2, block=block)


def test_without_segment_ids_the_row_is_one_document():
    graphdef, params = random_layer(TINY, WIDTH)
    x = normal(1, 12, WIDTH)
    run, places = split(graphdef, 4)
    (y, _), _ = run(*map(jax.device_put, (params, x, None, x), places))
    assert_close(y, unsharded(graphdef)(params, x, None, x)[0][0])


def test_rows_of_padding_only():
    """KF-046: exact zeros, a largest logit of 0 and no NaN, also where one rank has padding only."""
    graphdef, params = random_layer(TINY, WIDTH)
    run, places = split(graphdef, 2)
    x, ids = normal(1, 8, WIDTH), np.zeros((1, 8), np.int32)
    out, grads = run(*map(jax.device_put, (params, x, ids, x), places))
    assert not any(np.asarray(a).any() for a in jax.tree.leaves((out, grads)))

    # One token, and logits below 0: a 0 of the rank that has none would be the largest.
    ids[0, 0] = 1
    for seed in range(30):
        x = normal(1, 8, WIDTH, seed=seed)
        want = unsharded(graphdef)(params, x, ids, x)[0][1]
        if want.max() < -0.1:
            break
    assert want.max() < -0.1
    (_, top), _ = run(*map(jax.device_put, (params, x, ids, x), places))
    assert_close(top, want)


def test_bfloat16():
    """As far from float32 as the unsharded layer in bfloat16 is, on average over 8 rows."""
    graphdef, params = random_layer(TINY, WIDTH)
    run, places = split(graphdef, 4)
    ids, errors = segments(9, 20, size=32), []
    for seed in range(8):
        x, d_y = normal(1, 32, WIDTH, seed=seed), normal(1, 32, WIDTH, seed=100 + seed)
        exact = unsharded(graphdef)(params, x, ids, d_y)
        rounded = (params, x.astype(jnp.bfloat16), ids, d_y.astype(jnp.bfloat16))
        got = run(*map(jax.device_put, rounded, places))
        usual = unsharded(graphdef)(*rounded)
        assert got[0][0].dtype == got[1][1].dtype == jnp.bfloat16
        trees = zip(*map(jax.tree.leaves, (got, usual, exact)), strict=True)
        errors.append([[np.square(np.float64(a) - c).sum() for a in ab] for *ab, c in trees])
    error, bound = np.sqrt(np.mean(errors, axis=0)).T
    assert (error <= 1.15 * bound).all(), error / bound


def test_inside_a_rematerialised_scan_over_layers():
    graphdef, params = random_layer(PLAIN, WIDTH)
    stack = jax.tree.map(lambda a: np.stack([a, 0.5 * a]), params)
    x, d_y, ids = normal(1, 12, WIDTH), normal(1, 12, WIDTH, seed=1), segments(7, 4, size=12)

    def run(stack, x, ids, d_y):
        @jax.checkpoint
        def layer(x, params):
            y, _, top = nnx.merge(graphdef, params)(x, ids)
            return x + y, top

        y, vjp, top = jax.vjp(lambda p, x: jax.lax.scan(layer, x, p), stack, x, has_aux=True)
        d_stack, d_x = vjp(d_y)
        return y, top, psum(d_stack, "context"), d_x

    mesh = make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    whole, window = PartitionSpec(), PartitionSpec(None, "context")
    inputs = (whole, window, whole, window)
    sharded = jax.jit(region(run, mesh, inputs, (window, whole, whole, window)))
    args = (stack, x, ids, d_y)
    got = sharded(
        *(jax.device_put(a, NamedSharding(mesh, p)) for a, p in zip(args, inputs, strict=True))
    )
    assert_close(got, jax.jit(run)(*args), "float32_grad")


def test_decoding_with_a_cache_is_refused():
    graphdef, params = random_layer(TINY, WIDTH)
    mesh = make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2])

    def step(params, x):
        cache = TINY.init_cache(1, 4, "float32")
        return nnx.merge(graphdef, params)(x, None, cache, jnp.zeros(1, jnp.int32))[0]

    with pytest.raises(ValueError, match=r"mesh\.context"):
        jax.eval_shape(
            region(step, mesh, PartitionSpec(), PartitionSpec()), params, normal(1, 1, WIDTH)
        )


@pytest.mark.parametrize("ranks", [*range(1, 10), 16, 33, 64])
def test_schedule_gives_all_ranks_the_same_work(ranks):
    held = np.array([context_balance.held_chunks(rank, ranks) for rank in range(ranks)])
    assert sorted(held.flat) == list(range(2 * ranks))
    # a chunk of queries meets itself and all chunks of keys before it
    np.testing.assert_array_equal((held + 1).sum(1), 2 * ranks + 1)
    np.testing.assert_array_equal(
        context_balance.place_of(held.flatten(), ranks), np.arange(2 * ranks)
    )
    np.testing.assert_array_equal(held[:, 0], 2 * np.arange(ranks))  # stays where it is
    np.testing.assert_array_equal(held[::-1, 1], 2 * np.arange(ranks) + 1)  # comes from the mirror


@pytest.mark.parametrize("documents", [(48,), (10, 1, 13, 20)])
def test_pairs_of_blocks_that_ranks_visit(documents):
    """The same number on all ranks for one document; for several those that share one, no others."""
    ranks, size, T = 4, 2, 48  # blocks of 2, three to a chunk
    ids = segments(*documents, size=T)
    mesh = make_mesh(MeshConfig(data=1, context=ranks), jax.devices()[:ranks])

    def count(ids):
        x = jnp.zeros((1, T // ranks, 1, 3))
        at = mla_context._Blocks(
            1.0, size, x, x[:, :, 0], jnp.zeros((2, 1, 3)), context_balance.to_chunks(ids, ranks)
        )
        pairs = 0
        for chunk in at.held:
            first, end, first_query, end_query = at.visits(chunk)
            key = jnp.arange(len(first_query))
            pairs += jnp.where((first <= key) & (key < end), end_query - first_query, 0).sum()
        return pairs[None]

    whole, each = PartitionSpec(), PartitionSpec("context")
    pairs = jax.jit(region(count, mesh, whole, each))(
        jax.device_put(ids, NamedSharding(mesh, whole))
    )
    blocks = ids.reshape(-1, size)
    needed = [
        [bool(set(q) & set(k) - {0}) and j <= i for j, k in enumerate(blocks)]
        for i, q in enumerate(blocks)
    ]
    of_chunk = np.array(needed).reshape(2 * ranks, -1).sum(1)
    held = np.array([context_balance.held_chunks(rank, ranks) for rank in range(ranks)])
    np.testing.assert_array_equal(pairs, of_chunk[held].sum(1))
    if len(documents) == 1:
        assert set(np.asarray(pairs)) == {(2 * ranks * 3) * (2 * ranks * 3 + 1) // 2 // ranks}


def compiled(cfg, ranks, window, backward, **options):
    """The program of one layer, one row of `ranks` windows."""
    graphdef, params = random_layer(cfg, WIDTH)
    run, places = split(graphdef, ranks, **options)
    x = np.zeros((1, ranks * window, WIDTH), np.float32)
    args = [*map(jax.device_put, (params, x, x[..., 0].astype(np.int32), x), places)]
    program = run if backward else jax.jit(lambda *args: run(*args)[0])
    return program.lower(*args).compile()


def collectives(program):
    """Sorted (operation, elements) of what a program sends."""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    found = re.findall(rf"= (.+?) ({kinds})(?:-start)?\(", program.as_text())

    def elements(shape):
        return np.prod([int(n) for n in shape.split(",") if n], dtype=int)

    return sorted(
        (kind, sum(map(elements, re.findall(r"\w\[([\d,]*)\]", shapes)))) for shapes, kind in found
    )


def test_only_latents_and_half_windows_travel():
    ranks, window = 4, 16
    gathered = ("all-gather", ranks * window * (7 + 4))
    swap = ("collective-permute", window // 2 * WIDTH)
    forward = collectives(compiled(PLAIN, ranks, window, backward=False))
    assert [c for c in forward if c[0] != "all-reduce"] == [gathered, swap, swap]
    assert all(size <= 2 for name, size in forward if name == "all-reduce")  # largest logits
    both = collectives(compiled(PLAIN, ranks, window, backward=True))
    summed = ("reduce-scatter", window * (7 + 4))
    assert [c for c in both if c[0] != "all-reduce"] == [gathered] * 2 + [swap] * 4 + [summed]


def test_memory_grows_with_the_window_and_not_with_the_row():
    """What a longer row adds is its latent and the gradient of that, not its keys and values."""
    cfg = replace(PLAIN, num_heads=16, qk_nope_dim=16, v_dim=16)
    window = 1024

    def temporary(ranks):
        program = compiled(cfg, ranks, window, backward=True, block=64)
        return program.memory_analysis().temp_size_in_bytes

    more = temporary(8) - temporary(2)
    latent = 6 * window * (7 + 4) * 4  # of the six windows more, in float32
    assert 0 < more < 2.5 * latent
    assert 2.5 * latent < 6 * window * 16 * (16 + 16) * 4 / 4
