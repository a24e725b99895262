"""Attention by pairs of chunks: both backends, chunk after chunk of a row, against the whole row in float64.

The TPU kernels are interpreted over memory filled with NaN, in blocks of 128 or 256 tokens.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.mla_attention import pairs, tpu_backward, tpu_grid
from tests.pallas_kernels.test_mla_attention import NAMES, SCALE, compare, definition, ids, normal


@functools.partial(jax.jit, static_argnames=("backend", "chunks", "n"))
def program(arrays, d_o, segment_ids, backend, chunks, n):
    """o, top and gradients of a row in equal chunks, one after the other as on different devices."""
    way = pairs.choose(*arrays, backend=backend)
    T, blocks = segment_ids.shape[1], chunks * n

    def split(x):  # [blocks B S ...]
        return jnp.moveaxis(x.reshape(len(x), blocks, T // blocks, *x.shape[2:]), 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), T, *x.shape[3:])

    q, *keys = map(split, arrays)
    index, segments = jnp.arange(blocks), split(segment_ids)
    carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys)

    def add(carry, j, *grads):
        return tuple(x.at[j].add(g) for x, g in zip(carry, grads, strict=True))

    def one(carry, xs):
        chunk, q, d_o = xs
        visits = (0, (chunk + 1) * n, jnp.maximum(index - chunk * n, 0), jnp.full(blocks, n))
        row = pairs.Row(lambda j: tuple(x[j] for x in keys), SCALE, segments, chunk * n, visits)
        o, m, total, top = way.forward(q, row)
        d_o = (d_o / jnp.moveaxis(total, 2, 3)[..., None]).astype(q.dtype)
        delta = jnp.moveaxis((o * d_o.astype(jnp.float32)).sum(-1), 2, 3)
        dq, carry = way.backward(q, d_o, m, delta, row, add, carry)
        return carry, (o, top, dq)

    def by_chunk(x):
        return x.reshape(chunks, n, *x.shape[1:])

    xs = (jnp.arange(chunks), by_chunk(q), by_chunk(split(d_o)))
    carry, (o, top, dq) = jax.lax.scan(one, carry, xs)
    o, dq = (x.reshape(blocks, *x.shape[2:]) for x in (o, dq))
    out = {"o": join(o), "top": top.max(0)}
    return out | {f"d_{name}": join(x) for name, x in zip(NAMES, (dq, *carry), strict=True)}


def results(arrays, segment_ids=None, *, chunks, n=1, backend="pallas_tpu", dtype="float32"):
    *arrays, d_o = arrays
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    if segment_ids is None:
        segment_ids = np.ones(arrays[0].shape[:2], np.int32)
    nan = pltpu.InterpretParams(uninitialized_memory="nan")
    kernels = backend == "pallas_tpu"
    with pltpu.force_tpu_interpret_mode(nan) if kernels else contextlib.nullcontext():
        return jax.device_get(
            program(tuple(arrays), jnp.asarray(d_o), segment_ids, backend, chunks, n)
        )


@pytest.fixture
def block(monkeypatch):
    """Sets the largest block of the kernels, forward and backward, for float32 inputs."""

    def set_block(size, backward=None):
        monkeypatch.setattr(tpu_grid, "LARGEST_BLOCK", 4 * size)
        monkeypatch.setattr(tpu_backward, "LARGEST_BLOCK", backward or size)
        program.clear_cache()

    yield set_block
    program.clear_cache()


WAYS = [("pallas_tpu", 1), ("blocks", 1), ("blocks", 5)]


@pytest.mark.parametrize("backend, n", WAYS)
@pytest.mark.parametrize("chunk, heads", [(100, 3), (130, 1), (280, 2)])
def test_one_document(backend, n, chunk, heads, block):
    """Chunks of one block and of several, none a multiple of a block of the kernels."""
    block(128)
    arrays = normal(3 * chunk, heads, seed=chunk)
    compare(results(arrays, chunks=3, n=n, backend=backend), definition(arrays))


@pytest.mark.parametrize("backend, n", WAYS)
def test_documents_and_padding(backend, n, block):
    """KF-046, KF-048: borders in and between chunks, ids that fall, chunks of padding."""
    block(256, 128)
    segment_ids = np.concatenate([
        ids((0, 30), (1, 290), (2, 100), (0, 64), (3, 1), (4, 283), (0, 32), (6, 400)),
        ids((7, 600), (3, 250), (0, 350)),
        ids((5, 150), (1, 350), (9, 100), (2, 600)),
    ])  # fmt: skip
    arrays = normal(1200, B=3, seed=1)
    got = results(arrays, segment_ids, chunks=4, n=n, backend=backend)
    compare(got, definition(arrays, segment_ids))
    for name in ("o", "d_q", "d_k", "d_k_shared", "d_v"):
        assert not got[name][segment_ids == 0].any(), name


def test_nothing_but_padding(block):
    block(128)
    got = results(normal(260), np.zeros((1, 260), np.int32), chunks=2)
    assert np.isneginf(got.pop("top")).all()
    assert not any(np.asarray(x).any() for x in got.values())


@pytest.mark.parametrize("backend, n", WAYS)
def test_extreme_logits(backend, n, block):
    """Logits up to +-1e4, far above what the forward kernel's first form stands."""
    block(256, 128)
    arrays = normal(900, seed=3, scale=2.5e3)
    want = definition(arrays)
    assert want["top"].max() > 9e3
    # A logit of 1e4 in float32 is known to 1e-3 only.
    compare(results(arrays, chunks=3, n=n, backend=backend), want, limit=2e-3)


@pytest.mark.parametrize("nats, again", [(40.0, False), (1000.0, True)])
def test_a_key_of_an_earlier_chunk_towers(nats, again, block, monkeypatch):
    """Up to the headroom nothing is done again, beyond it everything, and the results are the same."""
    block(128)
    arrays = normal(256, seed=4)
    arrays[0][:, 150:, :, 0] = 100.0
    arrays[1][..., 0] = 0.0
    arrays[1][:, 3, :, 0] = nats / (100 * SCALE)
    want, got = definition(arrays), results(arrays, chunks=2)
    compare(got, want, limit=1e-4)
    # Without the way out the first form would be right in the first case only.
    monkeypatch.setattr(pairs, "HEADROOM", np.inf)
    program.clear_cache()
    first = results(arrays, chunks=2)
    assert np.isfinite(first["o"]).all() != again
    if not again:
        compare(first, got, limit=0.0)


def test_bfloat16(block):
    """Errors of bfloat16's size, of which float32 logits and outputs have none; as the blocks' are."""
    block(64, 128)  # 256 for bfloat16
    arrays = normal(520, H=2, seed=5)
    want = definition(arrays, dtype="bfloat16")
    for backend, n in WAYS[::2]:
        got = results(arrays, chunks=2, n=n, backend=backend, dtype="bfloat16")
        assert got["o"].dtype == got["d_q"].dtype == np.float32
        compare({"o": got["o"]}, {"o": want["o"]}, limit=2.5e-3)
        compare({"top": got["top"]}, {"top": want["top"]}, limit=1e-6)
        compare(got, want, limit=6e-3)


def test_two_backward_kernels_of_long_chunks(block, monkeypatch):
    """Where dq of a chunk does not fit on chip."""
    block(128)
    monkeypatch.setattr(tpu_backward, "VMEM_BYTES", 0)
    segment_ids = ids((1, 300), (0, 10), (2, 202))
    arrays = normal(512, seed=6)
    compare(results(arrays, segment_ids, chunks=2), definition(arrays, segment_ids))


def test_what_no_pair_needs_is_not_read(block):
    """KF-048: keys of an earlier document may be anything, also in a block that is visited."""
    block(128)
    segment_ids = ids((1, 300), (2, 212))
    arrays = normal(512, seed=2)
    arrays[4][:, :300] = 0
    changed = [x.copy() for x in arrays]
    for x in changed[:4]:
        x[:, :300] = 7.0
    before, after = (results(x, segment_ids, chunks=2) for x in (arrays, changed))
    for name in before.keys() - {"top"}:
        np.testing.assert_array_equal(before[name][:, 300:], after[name][:, 300:], name)


def test_the_choice():
    q, k, s, v, _ = normal(8)
    assert pairs.choose(q, k, s, v) is pairs.Blocks  # not asked for, the kernels run on TPUs only
    assert pairs.choose(q, k, s, v, backend="pallas_tpu") is pairs.Kernels
    with pytest.raises(ValueError, match="N = 64"):
        pairs.choose(q[..., 64:], k[..., 64:], s, v, backend="pallas_tpu")
