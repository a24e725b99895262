"""Slots, pages and kept prefixes on the host: explicit exhaustion, no page with two writers, nothing lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.paged_cache import PagePool, PrefixCache, SlotPool


def test_kf_033_slots_run_out_explicitly():
    """Ids outside the pool and of free slots raise; an empty pool says so."""
    pool = SlotPool(2)
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.allocate() is None
    pool.release(1)
    for slot in (1, 2, -1):
        with pytest.raises(ValueError, match=f"slot {slot} is not in use; .* slots 0 to 1"):
            pool.release(slot)
    assert pool.allocate() == 1


def test_kf_033_pages_run_out_explicitly():
    """Too many at once take none; bad ids change nothing."""
    pool = PagePool(4)
    first = pool.allocate(3)
    assert first is not None
    assert pool.allocate(2) is None
    assert pool.free == 1
    assert pool.allocate(0) == []
    for pages in ([first[0], 4], [first[0], -1], [3 if 3 not in first else 0]):
        with pytest.raises(ValueError, match="is not in use; the pool has pages 0 to 3"):
            pool.release(pages)
    with pytest.raises(ValueError, match="twice"):
        pool.release([first[0], first[0]])
    pool.release(first)
    assert pool.free == 4


@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 7)), max_size=60))
def test_pages_against_a_model_of_sets(steps):
    """Any order of allocations, shares and releases: as many free as a plain count says, none twice."""
    pool, holders = PagePool(8), []
    for kind, n in steps:
        if kind == "a":
            pages = pool.allocate(n)
            free = set(range(8)).difference(*holders)
            assert (pages is None) == (n > len(free))
            if pages is not None:
                assert len(set(pages)) == n
                assert set(pages) <= free
                holders.append(pages)
        elif holders and kind == "s":
            pool.share(holders[n % len(holders)])
            holders.append(list(holders[n % len(holders)]))
        elif holders:
            pool.release(holders.pop(n % len(holders)))
        assert pool.free == 8 - len(set().union(*holders))


def ids(*values):
    return np.array(values, np.int32)


def kept(capacity=4, boundary=2, size=12):
    pool = PagePool(size)
    return PrefixCache(capacity, boundary, pool), pool


def store(cache, pool, tokens):
    """As an engine does: each whole block of a prompt, one page per block; returns its pages."""
    names, pages = cache.names(tokens), pool.allocate(len(tokens) // cache.boundary)
    for n, name in enumerate(names, 1):
        cache.add(name, n * cache.boundary, pages[:n], lambda n=n: f"{tokens[: n * 2].tolist()}")
    return pages


def found(cache, tokens):
    snapshot = cache.find(cache.names(tokens), len(tokens))
    return 0 if snapshot is None else snapshot.length


def test_kf_035_the_longest_whole_block_that_agrees():
    """One token less falls back to the boundary before; one token is always left to be read."""
    cache, pool = kept()
    store(cache, pool, ids(1, 2, 3, 4, 5))
    assert found(cache, ids(1, 2, 3, 4, 9)) == 4
    assert found(cache, ids(1, 2, 3, 4)) == 2  # all four would leave no logits
    assert found(cache, ids(1, 2, 3, 9, 9)) == 2
    assert found(cache, ids(1, 9, 3, 4, 5)) == 0
    assert found(cache, ids(3, 4, 5, 6)) == 0  # the same block behind another prefix
    assert found(cache, ids(1)) == 0
    snapshot = cache.find(cache.names(ids(1, 2, 3, 4, 5)), 5)
    assert (snapshot.row, len(snapshot.pages)) == ("[1, 2, 3, 4]", 2)


def test_least_recently_used_goes_first_and_gives_its_pages_back():
    cache, pool = kept(capacity=2)
    pages = {}
    for start in (1, 5):
        pages[start] = store(cache, pool, ids(start, start))
        pool.release(pages[start])
    assert pool.free == 10
    assert found(cache, ids(1, 1, 0)) == 2  # used: now the other one is older
    pool.release(store(cache, pool, ids(7, 7)))
    assert (len(cache), pool.free) == (2, 10)
    assert [found(cache, ids(n, n, 0)) for n in (1, 5, 7)] == [2, 0, 2]
    assert cache.drop()
    assert cache.drop()
    assert not cache.drop()
    assert pool.free == 12


def test_nothing_is_named_or_kept_without_capacity():
    cache, _ = kept(capacity=0)
    assert cache.names(ids(1, 2, 3, 4)) == []
    assert cache.find([], 4) is None


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), max_size=12))
def test_kf_035_prefixes_against_a_store_of_whole_prefixes(prompts):
    """What is found is always a prefix that was stored, and the longest of them while none is dropped."""
    cache, pool = kept(capacity=100, size=100)
    stored = set()
    for prompt in prompts:
        tokens = ids(*prompt)
        ends = range(2, len(prompt), 2)
        want = max((end for end in ends if tuple(prompt[:end]) in stored), default=0)
        assert found(cache, tokens) == want
        pool.release(store(cache, pool, tokens))
        stored |= {tuple(prompt[:end]) for end in range(2, len(prompt) + 1, 2)}
    while cache.drop():
        pass
    assert pool.free == 100
