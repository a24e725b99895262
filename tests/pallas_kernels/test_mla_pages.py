"""Paged latents: writes that go where the table says, and a walk over pages that equals the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.mla_attention import decode, mla_decode, mla_prefill, prefill, write_pages
from k3jax.testing import assert_close

SIZE, RANK, SHARED, HEADS, NOPE, V = 4, 12, 4, 3, 8, 6
LENGTHS = np.array([0, 1, 4, 11, 37], np.int32)
SCALE = (NOPE + SHARED) ** -0.5


@pytest.fixture
def small_visits(monkeypatch):
    """Eight tokens at a time, so that the longest request takes five visits."""
    monkeypatch.setattr(decode, "VISIT", 8)
    monkeypatch.setattr(prefill, "VISIT", 8)


def case(dtype="float32", seed=0):
    """(rows of each request, pages, table): NaN where nobody wrote, nonsense in the table where nobody looks."""
    draw = np.random.default_rng(seed)
    rows = [draw.normal(size=(n, RANK + SHARED)).astype(dtype) for n in LENGTHS]
    pages = np.full((24, SIZE, RANK + SHARED), np.nan, dtype)
    table, free = np.full((5, 11), -7, np.int32), list(draw.permutation(24))
    for b, row in enumerate(rows):
        for at in range(0, len(row), SIZE):
            table[b, at // SIZE] = page = free.pop()
            pages[page, : len(row[at : at + SIZE])] = row[at : at + SIZE]
    return rows, pages, table


def by_hand(q, keys, values, last):
    """Attention of queries [T H Q] at positions `last` to keys [S H Q] and values [S H V], float64."""
    logits = SCALE * np.einsum("thq,shq->hts", q, keys)
    logits[:, np.arange(len(keys)) > last[:, None]] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hts,shv->thv", p / p.sum(-1, keepdims=True), values)


def run_decode(q, pages, table, lengths):
    call = functools.partial(mla_decode, scale=SCALE, kv_rank=RANK, backend="gathered")
    return np.asarray(jax.jit(call)(q, pages, table, lengths))


def test_decoding_in_several_visits(small_visits):
    rows, pages, table = case()
    q = np.random.default_rng(1).normal(size=(5, HEADS, RANK + SHARED)).astype(np.float32)
    got = run_decode(q, pages, table, LENGTHS)
    assert not got[0].any()
    for b, row in enumerate(rows[1:], 1):
        keys = np.repeat(row[:, None].astype(np.float64), HEADS, 1)
        want = by_hand(q[b][None].astype(np.float64), keys, keys[..., :RANK], LENGTHS[b : b + 1])
        assert_close(got[b], want[0])


def test_a_request_cannot_tell_how_long_others_are(small_visits):
    """To the last bit: visits past its end leave its sums as they are."""
    _, pages, table = case()
    q = np.random.default_rng(1).normal(size=(5, HEADS, RANK + SHARED)).astype(np.float32)
    together = run_decode(q, pages, table, LENGTHS)
    shorter = run_decode(q, pages, table, np.minimum(LENGTHS, 11))
    np.testing.assert_array_equal(together[:4], shorter[:4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_a_chunk_of_queries(small_visits, dtype, tokens):
    """The last tokens of each request, then padding of NaN: causal, over all pages before."""
    rows, pages, table = case(jnp.dtype(dtype))
    draw = np.random.default_rng(2)
    q = draw.normal(size=(5, tokens + 2, HEADS, NOPE + SHARED)).astype(dtype)
    kernel = draw.normal(size=(RANK, HEADS, NOPE + V)).astype(dtype)
    new = np.minimum(LENGTHS, tokens)
    real = np.arange(tokens + 2) < new[:, None]
    position = (LENGTHS - new)[:, None] + np.arange(tokens + 2, dtype=np.int32)
    q = np.where(real[..., None, None], q, np.asarray(np.nan, q.dtype))
    call = jax.jit(functools.partial(mla_prefill, scale=SCALE))
    got = np.asarray(call(q, pages, table, position, real, LENGTHS, kernel))
    assert got.dtype == np.float32
    assert not got[~real].any()
    for b, row in enumerate(rows[1:], 1):
        row, weights = row.astype(np.float64), kernel.astype(np.float64)
        expanded = np.einsum("sr,rhj->shj", row[:, :RANK], weights)
        shared = np.repeat(row[:, None, RANK:], HEADS, 1)
        keys = np.concatenate([expanded[..., :NOPE], shared], -1)
        asked = q[b, : new[b]].astype(np.float64)
        want = by_hand(asked, keys, expanded[..., NOPE:], position[b, : new[b]])
        assert_close(got[b, : new[b]], want, dtype)


def test_writes_go_where_the_table_says():
    """Padding, and what is past the table's last page, is dropped and not moved elsewhere (KF-033)."""
    pages = np.full((6, 2, 1), np.nan, np.float32)
    table = np.array([[4, 1], [3, 0]], np.int32)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4, 1)
    position = np.array([[1, 2, 3, 4], [0, 1, 2, 3]], np.int32)
    real = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    got = np.asarray(jax.jit(write_pages)(pages, table, position, rows, real))[..., 0]
    want = np.full((6, 2), np.nan, np.float32)
    want[4, 1], want[1] = 0, [1, 2]  # row 0: its fourth token has no page
    want[3] = [4, 5]
    np.testing.assert_array_equal(got, want)
