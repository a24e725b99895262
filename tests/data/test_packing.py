"""Rows and batches: what they hold, and that a saved position continues bit for bit."""

import base64
import collections
import itertools
import json
import logging
import multiprocessing
import random
import threading
import time
import weakref

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.packing import (
    MixedRows,
    PackedRows,
    join_positions,
    make_eval_batches,
    make_train_iterator,
    num_streams,
)
from k3jax.data.text import load_corpus
from k3jax.data.tokenizer import ByteTokenizer, load_tokenizer
from k3jax.errors import UserError

BOS, EOS, PAD = 256, 257, 258
TOKENIZER = ByteTokenizer()


def write_texts(folder, texts):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return load_corpus(str(path))


def train(split, **options):
    defaults = {"seq_len": 16, "batch_size": 2, "seed": 0, "prefetch": 0, "num_threads": 0}
    defaults |= {"row_window": 1, "streams": 1}  # rows in the order of the documents
    return make_train_iterator(split, TOKENIZER, **(defaults | options))


def evaluate(split, **options):
    defaults = {"seq_len": 16, "rows": 2, "row_window": 1, "prefetch": 0}
    return make_eval_batches(split, TOKENIZER, **(defaults | options))


def segments(batch):
    """The segments of all rows in order, as lists of ids; padding is left out."""
    found = []
    for tokens, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
        for segment in range(1, ids.max() + 1):
            found.append(tokens[ids == segment].tolist())
    return found


def documents(batches):
    """Texts in order, with segments that continue a document joined to its beginning."""
    stream = [i for batch in batches for segment in segments(batch) for i in segment]
    parts = "".join(chr(i) if i < 256 else {BOS: "<", EOS: ">"}[i] for i in stream)
    return [part.removeprefix("<") for part in parts.split(">")]


def assert_same(a, b):
    assert a.keys() == b.keys() == {"tokens", "segment_ids"}
    for name in a:
        assert a[name].dtype == b[name].dtype == np.int32
        np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Documents of length 0 to several rows, one of them unreadable."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("mixed")
    lengths = [0, 1, 1, 2, 13, 14, 15, 16, 17, 45, 200, *(rng.randrange(1, 40) for _ in range(30))]
    lines = [json.dumps({"text": "".join(rng.choices("abcdef", k=n))}) for n in lengths]
    (folder / "a.jsonl").write_text("\n".join([*lines[:20], "{broken", *lines[20:]]))
    return load_corpus(str(folder))


@pytest.mark.parametrize(
    "row_window, prefetch, num_threads, streams", [(1, 0, 0, 1), (5, 0, 0, 1), (10, 2, 2, 2)]
)
def test_resume_is_exact_at_every_point(mixed, row_window, prefetch, num_threads, streams):
    """KF-112: from every batch of three epochs, also in the middle of a document or a window."""
    split = mixed.split("train")
    options = {
        "seq_len": 11,
        "row_window": row_window,
        "prefetch": prefetch,
        "num_threads": num_threads,
        "streams": streams,
    }
    iterator = train(split, **options)
    states, batches = [], []
    for _ in range(120):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    windows = [json.loads(state)["streams"]["0"]["rows"] for state in states]
    assert windows[-1]["documents"]["next_index"] > 2 * len(split) / streams
    assert sum(window["used"] > 0 for window in windows) > 20
    assert max(map(len, states)) < 500
    iterator.close()
    fresh = train(split, **options)
    points = random.Random(1).sample(range(115), 40 if prefetch else 60)
    for point in points:
        if not prefetch:
            fresh = train(split, **options)
        fresh.set_state(json.loads(states[point]))
        for step in range(point, point + 5):
            assert json.dumps(fresh.get_state()) == states[step]
            assert_same(next(fresh), batches[step])
    fresh.close()


def test_rows_are_mixed_within_windows_and_none_is_lost(tmp_path):
    """Documents of 8 rows each: in their own order a batch of 4 rows is one document."""
    split = write_texts(tmp_path, [chr(ord("a") + i) * 94 for i in range(16)]).split("all")
    options = {"seq_len": 12, "batch_size": 4}

    def rows(**more):
        batches = list(itertools.islice(train(split, **options, **more), 32))
        return [[bytes(row.astype(np.uint8)) for row in batch["tokens"]] for batch in batches]

    plain, mixed, other = rows(), rows(row_window=64), rows(row_window=64, seed=1)
    for begin in (0, 16):  # 16 batches are a window
        window = slice(begin, begin + 16)
        both = [sorted(itertools.chain(*order[window])) for order in (plain, mixed)]
        assert both[0] == both[1]
    texts = lambda batch: len({row[6] for row in batch})  # noqa: E731
    assert max(map(texts, plain)) == 1
    assert np.mean([texts(batch) for batch in mixed]) > 3
    assert mixed[:16] != mixed[16:]
    assert mixed != other


def test_kf_112_stop_after_37_of_100(tmp_path):
    """Rows of exactly one document: 37 examples, stop, resume."""
    corpus = write_texts(tmp_path, [f"document{i:02}" for i in range(100)])
    split = corpus.split("all")
    options = {"seq_len": 12, "batch_size": 1}
    whole = documents(itertools.islice(train(split, **options), 100))
    assert sorted(whole[:-1]) == [f"document{i:02}" for i in range(100)]
    stopped = train(split, **options)
    for _ in range(37):
        next(stopped)
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = train(split, **options)
    resumed.set_state(state)
    assert documents(next(resumed) for _ in range(63)) == whole[37:]


def shares(split, holds, **options):
    """Iterators of processes that hold these rows each, and `first` as the training loop says."""
    taken, found = set(), []
    for held in holds:
        first = [row for row in held if row not in taken]
        taken |= set(held)
        found.append(train(split, held=held, first=first, streams=None, **options))
    return found


ALL = [[0, 1, 2, 3, 4, 5, 6, 7]]
HOLDS = {
    "1": ALL,
    "2": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "2 with two passes": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "2 that hold the same": ALL * 2,
    "4": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "4 in another order": [[6, 7], [0, 1], [4, 5], [2, 3]],
    "4, two by two": [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]],
    "8": [[row] for row in range(8)],
}


@pytest.mark.parametrize("batch_size", [8, 24])
@pytest.mark.parametrize("before, after", list(itertools.pairwise([*HOLDS, "1"])))
def test_kf_112_any_processes_continue_the_same_batches(mixed, before, after, batch_size):
    """Also with several rows per stream, of which a process may hold a part."""
    options = {"seq_len": 11, "row_window": 40, "batch_size": batch_size}
    split, share = mixed.split("train"), batch_size // 8

    def spread(holds):
        return [[row * share + i for row in held for i in range(share)] for held in holds]

    whole = train(split, streams=None, **options)
    batches = [next(whole) for _ in range(14)]
    position = None
    for holds, steps in ((spread(HOLDS[before]), range(7)), (spread(HOLDS[after]), range(7, 14))):
        iterators = shares(split, holds, **options)
        for step in steps:
            for iterator, held in zip(iterators, holds, strict=True):
                if position is not None:
                    iterator.set_state(position)
                wanted = {name: values[held] for name, values in batches[step].items()}
                assert_same(next(iterator), wanted)
            position = None
        saved = [json.loads(json.dumps(iterator.get_state())) for iterator in iterators]
        counted = sorted(int(stream) for state in saved for stream in state["streams"])
        assert counted == list(range(8)), "every stream is saved exactly once"
        position = join_positions(saved)


def test_a_missing_part_of_the_position_is_named(mixed):
    split, options = mixed.split("train"), {"batch_size": 8}
    saved = [iterator.get_state() for iterator in shares(split, HOLDS["4"], **options)]
    with pytest.raises(UserError, match="lacks stream 2 of 8"):
        shares(split, ALL, **options)[0].set_state(join_positions([saved[0], *saved[2:]]))


def test_streams_depend_on_the_batch_alone():
    assert [num_streams(rows) for rows in (1, 3, 8, 96, 1536)] == [1, 1, 8, 32, 64]


def test_peek_does_not_move_the_position(mixed):
    iterator = train(mixed.split("train"))
    next(iterator)
    before = iterator.get_state()
    peeked = iterator.peek()
    assert iterator.get_state() == before
    assert_same(iterator.peek(), peeked)
    assert_same(next(iterator), peeked)
    assert iterator.get_state() != before
    iterator.peek()
    iterator.set_state(before)
    assert_same(next(iterator), peeked)


@settings(deadline=None, max_examples=25)
@given(count=st.integers(0, 30), window=st.integers(1, 12), seed=st.integers(0, 3))
def test_mixing_against_windows(count, window, seed):
    """A permutation of each window, resumable before every row."""
    rows = grain.MapDataset.range(count).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    mixed = MixedRows(rows, window=window, seed=(seed,))
    iterator, states, order = iter(mixed), [], []
    while True:
        states.append(json.loads(json.dumps(iterator.get_state())))
        row = next(iterator, None)
        if row is None:
            break
        order.append(int(row))
    for begin in range(0, count, window):
        assert sorted(order[begin : begin + window]) == list(range(count))[begin : begin + window]
    for place, state in enumerate(states):
        again = iter(mixed)
        again.set_state(state)
        assert again.get_state() == state
        assert list(map(int, again)) == order[place:]


def test_restoring_elsewhere_is_refused_by_field(tmp_path, mixed):
    split = mixed.split("train")
    state = train(split).get_state()
    other = write_texts(tmp_path, ["x", "y", "z"]).split("train")
    wrong = {
        "data": train(other),
        "seq_len": train(split, seq_len=17),
        "seed": train(split, seed=1),
        "streams": train(split, streams=2),
    }
    for field, iterator in wrong.items():
        with pytest.raises(UserError, match=f"has {field}=.*this run has {field}=.*--run-dir"):
            iterator.set_state(state)
    lines = [base64.b64encode(bytes([i])) + b" %d" % i for i in range(256)]
    (tmp_path / "t.tiktoken").write_bytes(b"\n".join(lines))
    ranks = load_tokenizer(str(tmp_path / "t.tiktoken"))
    iterator = make_train_iterator(split, ranks, seq_len=16, batch_size=2, seed=0, streams=1)
    with pytest.raises(UserError, match="has tokenizer='bytes-259'"):
        iterator.set_state(state)
    iterator.close()


def test_kf_113_more_streams_and_threads_than_documents(tmp_path, caplog):
    """3 documents, 4 streams, 8 threads: in four epochs every document comes four times."""
    split = write_texts(tmp_path, ["docA", "docB", "docC"]).split("all")
    options = {"seq_len": 6, "batch_size": 4, "num_threads": 8}
    with caplog.at_level(logging.WARNING, "k3jax"):
        hosts = shares(split, [[0], [1], [2], [3]], **options)
    assert "data: 4 streams share 3 documents" in caplog.messages
    assert "data: 8 reading threads share 3 documents" in caplog.messages
    rounds = [[documents([next(host)])[0] for host in hosts] for _ in range(3)]
    order = [text for row in rounds for text in row]  # the sequence that was dealt to the streams
    for epoch in range(4):
        assert sorted(order[3 * epoch : 3 * epoch + 3]) == ["docA", "docB", "docC"]
    readers = [t for t in threading.enumerate() if t.name.startswith("k3jax-read")]
    assert 0 < len(readers) <= 4 * 3  # hosts × documents
    for host in hosts:
        host.close()


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
def test_streams_are_disjoint_and_cover_an_epoch(tmp_path, streams):
    texts = [f"document{i:02}" for i in range(30)]
    split = write_texts(tmp_path, texts).split("all")
    iterator = train(split, seq_len=12, batch_size=streams, streams=streams, seed=3)
    seen = documents(next(iterator) for _ in range(30 // streams))
    assert sorted(seen[:-1]) == texts


def test_order_depends_on_seed_and_epoch_only(tmp_path):
    texts = [f"document{i:02}" for i in range(30)]
    split = write_texts(tmp_path, texts).split("all")

    def order(epochs, **options):
        iterator = train(split, seq_len=12, batch_size=1, **options)
        found = documents(next(iterator) for _ in range(30 * epochs))[:-1]
        return [tuple(found[30 * e : 30 * e + 30]) for e in range(epochs)]

    first, second = order(2)
    assert sorted(first) == sorted(second) == texts
    assert len({first, second, tuple(texts), *order(2, seed=1)}) == 5
    assert order(2) == order(2, prefetch=2, num_threads=2) == [first, second]
    assert train(split, seed=2**40).get_state()  # any size of seed


def test_rows_are_full_and_reproduce_the_documents(mixed):
    iterator = train(mixed.split("train"), seq_len=13, batch_size=3)
    batches = [next(iterator) for _ in range(60)]
    for batch in batches:
        assert batch["tokens"].shape == batch["segment_ids"].shape == (3, 13)
        steps = np.diff(batch["segment_ids"], axis=1)
        assert set(np.unique(steps)) <= {0, 1}
        assert (batch["segment_ids"][:, 0] == 1).all()
        assert not (batch["tokens"] == PAD).any()
        for segment in segments(batch):
            assert BOS not in segment[1:]
            assert EOS not in segment[:-1]
    split = mixed.split("train")
    texts = {split[i].data.decode() for i in range(len(split)) if split[i]}
    assert set(documents(batches)[:-1]) == texts


def test_data_smaller_than_a_row_repeats_without_padding(tmp_path):
    batch = next(train(write_texts(tmp_path, ["ab", "c"]).split("all"), seq_len=64))
    assert (batch["segment_ids"] > 0).all()
    assert set(map(tuple, segments(batch)[:-1])) >= {(BOS, 97, 98, EOS), (BOS, 99, EOS)}


def test_long_document_continues_as_a_new_segment(tmp_path):
    split = write_texts(tmp_path, ["x" * 20]).split("all")
    batch = next(train(split, seq_len=16))
    np.testing.assert_array_equal(batch["segment_ids"][0], [1] * 16)
    np.testing.assert_array_equal(batch["segment_ids"][1], [1] * 6 + [2] * 10)
    assert batch["tokens"][0, 0] == BOS
    assert batch["tokens"][1, :8].tolist() == [120] * 5 + [EOS, BOS, 120]


def test_pieces_of_a_long_file_are_one_document(tmp_path):
    """No begin or end where a text file was only cut to be read."""
    text = "".join(f"{i}\n" for i in range(2000))
    (tmp_path / "a.txt").write_text(text)
    split = load_corpus(str(tmp_path)).split("all")
    assert len(split) > 5
    ids = np.concatenate([batch["tokens"].ravel() for batch in evaluate(split, seq_len=512)])
    assert np.count_nonzero(ids == BOS) == np.count_nonzero(ids == EOS) == 1
    assert np.count_nonzero(ids < 256) == len(text)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 25), max_size=12),
    seq_len=st.integers(1, 12),
    gaps=st.sets(st.integers(0, 11)),
)
def test_packing_against_concatenation(lengths, seq_len, gaps):
    """Rows are the concatenated documents cut every T tokens, resumable before every row."""
    texts = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(lengths)]
    items = [None if i in gaps else text for i, text in enumerate(texts)]
    parent = grain.MapDataset.source(items).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0), allow_nones=True
    )
    packed = PackedRows(parent, seq_len=seq_len, pad_id=-7, patience=99)
    iterator, states, rows = iter(packed), [], []
    while True:
        states.append(iterator.get_state())
        row = next(iterator, None)
        if row is None:
            break
        rows.append(row)
    kept = [text for text in items if text is not None]
    flat = np.concatenate([np.zeros(0, np.int32), *kept])
    owner = np.concatenate([np.zeros(0, int), *(np.full(len(t), i) for i, t in enumerate(kept))])
    assert len(rows) == -(-len(flat) // seq_len)
    for r, row in enumerate(rows):
        here = slice(r * seq_len, (r + 1) * seq_len)
        n = len(flat[here])
        np.testing.assert_array_equal(row["tokens"][:n], flat[here])
        changes = np.diff(owner[here], prepend=owner[here][0]) != 0
        np.testing.assert_array_equal(row["segment_ids"][:n], 1 + np.cumsum(changes))
        assert (row["tokens"][n:] == -7).all()
        assert (row["segment_ids"][n:] == 0).all()
    for r, state in enumerate(states):
        again = iter(packed)
        again.set_state(state)
        rest = list(again)
        assert len(rest) == len(rows) - r
        for a, b in zip(rest, rows[r:], strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("count", range(1, 21))
def test_kf_117_shapes_do_not_depend_on_the_documents(tmp_path, count):
    """1 to 20 documents per row: the same two int32 arrays, so one compilation serves all."""
    split = write_texts(tmp_path, ["x" * (120 // count - 2)] * 3).split("all")
    iterator = train(split, seq_len=120)
    batch = next(iterator)
    assert batch["segment_ids"].max() >= count
    for other in (batch, *evaluate(split, seq_len=120)):
        assert {name: (a.shape, a.dtype.name) for name, a in other.items()} == {
            "tokens": ((2, 120), "int32"),
            "segment_ids": ((2, 120), "int32"),
        }


def test_evaluation_sees_everything_once(mixed):
    split = mixed.split("all")
    batches = list(evaluate(split, seq_len=13, rows=4))
    texts = [split[i].data.decode() for i in range(len(split)) if split[i]]
    assert sorted(documents(batches)[:-1]) == sorted(texts)
    assert {batch["tokens"].shape for batch in batches} == {(4, 13)}
    padding = batches[-1]["segment_ids"] == 0
    assert padding.any()
    assert (batches[-1]["tokens"][padding] == PAD).all()
    assert not any((batch["segment_ids"] == 0).any() for batch in batches[:-1])


def test_evaluation_repeats_and_stops_early(mixed):
    batches = evaluate(mixed.split("all"), prefetch=2)
    first, second = list(batches), list(batches)
    assert len(first) == len(second) >= 2
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)
    short = list(evaluate(mixed.split("all"), num_batches=1, prefetch=2))
    assert len(short) == 1
    assert_same(short[0], first[0])


def test_kf_114_threads_only(mixed):
    """No process to lose; closing ends the threads and frees grain's iterators before exit."""
    before = threading.active_count()
    iterator = train(mixed.split("train"), prefetch=2, num_threads=4)
    next(iterator)
    assert not multiprocessing.active_children()
    assert threading.active_count() > before
    inner = weakref.ref(iterator._batches)
    iterator.close()
    iterator.close()
    assert inner() is None
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


def test_kf_115_error_in_a_thread_reaches_the_loop(tmp_path):
    """A file that goes away stops the next step with its name, instead of hanging it."""
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("text " * 50)
    iterator = train(load_corpus(str(tmp_path)).split("train"), prefetch=2, num_threads=2)
    next(iterator)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"data file '\d\d.txt'.*cannot be read any more"):
        collections.deque(itertools.islice(iterator, 1000), maxlen=0)
    iterator.close()


def test_data_without_text_ends_instead_of_searching_for_ever(tmp_path):
    split = write_texts(tmp_path, [""] * 5).split("all")
    with pytest.raises(UserError, match="no readable text in 6 documents"):
        next(train(split))
    assert list(evaluate(split)) == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_options(mixed, options, message):
    with pytest.raises(ValueError, match=message):
        train(mixed.split("train"), **options)


def test_document_changed_since_the_checkpoint(tmp_path):
    """Same name and size, so the same fingerprint, but the document in use cannot be read again."""
    split = write_texts(tmp_path, ["x" * 40]).split("all")
    iterator = train(split)
    next(iterator)
    state = iterator.get_state()
    size = (tmp_path / "data.jsonl").stat().st_size
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "y", "pad": ""}).ljust(size))
    changed = train(load_corpus(str(tmp_path / "data.jsonl")).split("all"))
    with pytest.raises(UserError, match="has changed; restore the data files"):
        changed.set_state(state)
