"""Documents to batches of full rows, with a position that can be saved and restored exactly.

    documents of a split → shuffle (anew each epoch) → every S-th for a stream → ids
        → rows of T tokens → shuffle within windows → the stream's rows of each batch
    S streams → batches → a background thread

The order is one endless sequence of documents, a permutation per epoch, dealt to S streams in turn:
streams never share a document of an epoch and together see all of them, however few there are.
Stream s fills rows s·B/S ... (s+1)·B/S - 1 of every batch of B rows. S depends on B alone, so the
batches are the same on any number of processes and any mesh; a process reads the streams whose rows
its devices hold, and the position in the data is that of every stream.

A long document fills many rows in a row; without the second shuffle, and with one stream, they
would be one batch. All work is done by threads of this process: no worker can die alone, no shared
memory is used, and a tokenizer that was used before is safe. An error in a thread is raised by the
next `next()`.
"""

import atexit
import functools
import itertools
import logging
import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from k3jax.data.formats import Document
from k3jax.data.text import Split
from k3jax.data.tokenizer import Tokenizer
from k3jax.errors import UserError

logger = logging.getLogger("k3jax")

Row = dict[str, Int[np.ndarray, " T"]]
Batch = dict[str, Int[np.ndarray, "rows T"]]

READ_AHEAD = 16  # documents being read and tokenised, of all streams
ROW_WINDOW = 512  # rows that are shuffled among each other, of all streams
MAX_STREAMS = 64  # more processes than this that hold different rows read some rows in vain


def num_streams(batch_size: int) -> int:
    """S: as many streams as allow equal shares of a batch, up to `MAX_STREAMS`."""
    return math.gcd(batch_size, MAX_STREAMS)


class Documents(grain.IterDataset):
    """Items 0, 1, ... of an endless dataset, `ahead` of them being made by the threads of a pool."""

    def __init__(self, items: grain.MapDataset, pool: ThreadPoolExecutor | None, ahead: int):
        super().__init__()
        self._options = (items, pool, ahead)

    def __iter__(self) -> "DocumentsIterator":
        return DocumentsIterator(*self._options)


class DocumentsIterator(grain.DatasetIterator):
    """State: the index of the next item."""

    def __init__(self, items: grain.MapDataset, pool: ThreadPoolExecutor | None, ahead: int):
        super().__init__()
        self._items, self._pool, self._ahead = items, pool, ahead
        self._index = 0
        self._coming: deque[Future] = deque()  # items from `_index` on

    def __next__(self) -> Any:
        index, self._index = self._index, self._index + 1
        if self._pool is None:
            return self._items[index]
        while len(self._coming) <= self._ahead:
            wanted = index + len(self._coming)
            self._coming.append(self._pool.submit(self._items.__getitem__, wanted))
        return self._coming.popleft().result()

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._index}

    def set_state(self, state: dict[str, Any]) -> None:
        self._index = state["next_index"]
        for item in self._coming:
            item.cancel()
        self._coming.clear()


class PackedRows(grain.IterDataset):
    """Rows {"tokens", "segment_ids"} of T int32 each, filled from documents given as id arrays.

    Documents follow each other without gaps; one that does not fit continues in the next row as
    that row's first segment. Segment ids are 1, 2, ... within a row. Only the last row of a finite
    sequence is padded: pad_id with segment 0.
    """

    def __init__(self, documents: grain.IterDataset, *, seq_len: int, pad_id: int, patience: int):
        """`patience`: how many documents in a row may be None before that is an error."""
        super().__init__(documents)
        self._documents = documents
        self._options = (seq_len, pad_id, patience)

    def __iter__(self) -> "PackedRowsIterator":
        return PackedRowsIterator(iter(self._documents), *self._options)


class PackedRowsIterator(grain.DatasetIterator):
    """State: the position before the document in hand, and how many of its ids were given out.

    Restoring reads that one document again, so the state is two numbers and exact.
    """

    def __init__(self, documents: grain.DatasetIterator, seq_len: int, pad_id: int, patience: int):
        super().__init__(documents)
        self._documents = documents
        self._seq_len, self._pad_id, self._patience = seq_len, pad_id, patience
        self._before = documents.get_state()
        self._ids = np.zeros(0, np.int32)
        self._used = 0

    def __next__(self) -> Row:
        tokens = np.full(self._seq_len, self._pad_id, np.int32)
        segment_ids = np.zeros(self._seq_len, np.int32)
        filled, segment = 0, 0
        while filled < self._seq_len:
            if self._used == len(self._ids) and not self._fetch():
                break
            ids = self._ids[self._used : self._used + self._seq_len - filled]
            segment += 1
            tokens[filled : filled + len(ids)] = ids
            segment_ids[filled : filled + len(ids)] = segment
            filled += len(ids)
            self._used += len(ids)
        if not filled:
            raise StopIteration
        return {"tokens": tokens, "segment_ids": segment_ids}

    def _fetch(self) -> bool:
        """Takes up the next document that has ids; False at the end."""
        for _ in range(self._patience):
            before = self._documents.get_state()
            try:
                ids = next(self._documents)
            except StopIteration:
                return False
            if ids is not None and len(ids):
                self._before, self._ids, self._used = before, ids, 0
                return True
        raise UserError(f"data has no readable text in {self._patience} documents; check --data")

    def get_state(self) -> dict[str, Any]:
        if self._used == len(self._ids):
            return {"documents": self._documents.get_state(), "used": 0}
        return {"documents": self._before, "used": self._used}

    def set_state(self, state: dict[str, Any]) -> None:
        self._documents.set_state(state["documents"])
        self._ids, self._used = np.zeros(0, np.int32), 0
        if state["used"]:
            found = self._fetch()
            self._used = state["used"]
            if not found or self._before != state["documents"] or self._used > len(self._ids):
                raise UserError(
                    f"the document in use at the checkpoint ({state}) has changed; restore the"
                    " data files as they were, or start in a new --run-dir"
                )


class MixedRows(grain.IterDataset):
    """Rows in windows of `window`, each in an order of its own that the seed decides.

    grain's own window shuffle takes 0.8 ms per row where a window has 64 rows (grain 0.2.18).
    """

    def __init__(self, rows: grain.IterDataset, *, window: int, seed: tuple[int, ...]):
        super().__init__(rows)
        self._rows = rows
        self._options = (window, seed)

    def __iter__(self) -> "MixedRowsIterator":
        return MixedRowsIterator(iter(self._rows), *self._options)


class MixedRowsIterator(grain.DatasetIterator):
    """State: the position before the window, its number, and how many of its rows were given out.

    Restoring reads the window again.
    """

    def __init__(self, rows: grain.DatasetIterator, window: int, seed: tuple[int, ...]):
        super().__init__(rows)
        self._rows, self._size, self._seed = rows, window, seed
        self._before = rows.get_state()
        self._number, self._used = -1, 0  # of the window in hand
        self._window: list[Row] = []

    def __next__(self) -> Row:
        if self._used == len(self._window):
            before = self._rows.get_state()
            self._fill(self._number + 1)
            self._before, self._used = before, 0
        self._used += 1
        return self._window[self._used - 1]

    def _fill(self, number: int) -> None:
        """Reads window `number`; raises StopIteration if nothing is left."""
        rows = list(itertools.islice(self._rows, self._size))
        if not rows:
            raise StopIteration
        order = np.random.default_rng((*self._seed, number)).permutation(len(rows))
        self._number, self._window = number, [rows[place] for place in order]

    def get_state(self) -> dict[str, Any]:
        if self._used == len(self._window):
            return {"rows": self._rows.get_state(), "window": self._number + 1, "used": 0}
        return {"rows": self._before, "window": self._number, "used": self._used}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rows.set_state(state["rows"])
        self._before, self._window = state["rows"], []
        self._number, self._used = state["window"] - 1, 0
        if state["used"]:
            self._fill(state["window"])
            self._used = state["used"]


class Streams(grain.IterDataset):
    """Batches of the held rows {"tokens", "segment_ids"}, each row from its stream."""

    def __init__(self, streams: Mapping[int, grain.IterDataset], share: int, held: Sequence[int]):
        """
        Args:
            streams: by number, those that the held rows need.
            share: rows of a batch that each stream fills.
            held: rows of the batch that are kept, ascending.
        """
        super().__init__(tuple(streams.values()))
        self._streams, self._share, self._held = streams, share, held

    def __iter__(self) -> "StreamsIterator":
        iterators = {number: iter(stream) for number, stream in self._streams.items()}
        return StreamsIterator(iterators, self._share, self._held)


class StreamsIterator(grain.DatasetIterator):
    """State: that of each stream, by number."""

    def __init__(self, streams: dict[int, grain.DatasetIterator], share: int, held: Sequence[int]):
        super().__init__(tuple(streams.values()))
        self._streams, self._share = streams, share
        self._held = frozenset(held)

    def __next__(self) -> Batch:
        rows = []
        for number, stream in self._streams.items():
            for row in range(number * self._share, (number + 1) * self._share):
                content = next(stream)
                if row in self._held:
                    rows.append(content)
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def get_state(self) -> dict[str, Any]:
        return {str(number): stream.get_state() for number, stream in self._streams.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for number, stream in self._streams.items():
            stream.set_state(state[str(number)])


_FIXES = {  # per field of a position's identity
    "data": "restore the files as they were",
    "tokenizer": "use the tokenizer of the first run",
    "seq_len": "use the --seq-len of the first run",
    "seed": "use the --seed of the first run",
    "row_window": "use the k3jax of the first run",
    "streams": "use the --batch-size of the first run",
}


class TrainIterator(grain.DatasetIterator):
    """Endless batches of the rows that this process holds, with a guarded position.

    `get_state()` is a JSON-able dict of some hundred bytes per stream, with the streams that this
    process saves: each is saved by one, for example as `data/process_{i}-of-{P}.json` in the
    checkpoint (`grain.checkpoint.CheckpointSave` does that). `join_positions` makes one of all;
    `set_state()` with it makes the next batch the one that would have come, on any number of
    processes, or raises UserError naming the field if data, tokenizer, seed, row length or streams
    differ.
    """

    def __init__(
        self, batches: grain.DatasetIterator, identity: dict[str, Any], saved: Iterable[int]
    ):
        """
        Args:
            batches: whose state is that of `StreamsIterator`.
            identity: what must be the same where a position is restored.
            saved: streams whose state this process saves.
        """
        super().__init__(batches)
        self._batches = batches
        self._saved = frozenset(map(str, saved))
        self._ahead: tuple[Batch, Any] | None = None  # what `peek` made, and the position before
        self.identity = identity
        # Symptom without this: AttributeError in grain's __del__ when Python exits (grain 0.2.18).
        atexit.register(_close, weakref.ref(self))

    def peek(self) -> Batch:
        """The batch that `next` gives; the position stays before it."""
        self._assert_not_closed()
        if self._ahead is None:
            before = self._batches.get_state()
            self._ahead = next(self._batches), before
        return self._ahead[0]

    def __next__(self) -> Batch:
        batch, self._ahead = self.peek(), None
        return batch

    def close(self) -> None:
        """Ends the threads. Done at exit at the latest, while grain's modules are still there."""
        if not self._closed:
            super().close()
            self._parents = ()
            del self._batches

    def get_state(self) -> dict[str, Any]:
        streams = self._batches.get_state() if self._ahead is None else self._ahead[1]
        saved = {number: state for number, state in streams.items() if number in self._saved}
        return {"identity": self.identity, "streams": saved}

    def set_state(self, state: dict[str, Any]) -> None:
        for field, fix in _FIXES.items():
            saved, here = state["identity"].get(field), self.identity[field]
            if saved != here:
                raise UserError(
                    f"the checkpoint's data position has {field}={saved!r}, this run has"
                    f" {field}={here!r}; {fix}, or start in a new --run-dir"
                )
        missing = set(self._batches.get_state()) - set(state["streams"])
        if missing:
            raise UserError(
                f"the checkpoint's data position lacks stream {min(missing, key=int)} of"
                f" {self.identity['streams']}: a process's file is gone; use an older checkpoint"
            )
        self._ahead = None
        self._batches.set_state(state["streams"])


def join_positions(positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One position with the streams that the processes saved, from what each saved."""
    streams = {number: state for p in positions for number, state in p["streams"].items()}
    return {"identity": positions[0]["identity"], "streams": streams}


def _close(reference: weakref.ref) -> None:
    iterator = reference()
    if iterator is not None:
        iterator.close()


def tokenize(document: Document, tokenizer: Tokenizer) -> Int[np.ndarray, " T"]:
    """[begin] + ids + [end]; a piece of a long document has only the ends that it contains."""
    ids = tokenizer.encode_bytes(document.data)
    begin = [tokenizer.bos_id] * document.first
    end = [tokenizer.eos_id] * document.last
    return np.concatenate([begin, ids, end], dtype=np.int32, casting="unsafe")


def make_train_iterator(
    split: Split,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int,
    seed: int,
    held: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
    streams: int | None = None,
    row_window: int = ROW_WINDOW,
    num_threads: int = 2,
    prefetch: int = 2,
) -> TrainIterator:
    """Endless shuffled batches {"tokens", "segment_ids"}, int32 [held rows, seq_len].

    Args:
        split: documents, `load_corpus(...).split("train")`.
        seq_len: tokens per row.
        batch_size: rows of a whole batch, over all processes.
        seed: order of the documents, any integer >= 0.
        held: rows of the batch that this process gives, ascending; all if omitted.
        first: of these, the rows that no process of a lower number holds: the streams that begin
            with one of them are saved here. All if omitted.
        streams: S, a divisor of `batch_size`; `num_streams(batch_size)` if omitted.
        row_window: rows shuffled among each other, in S parts; 1 keeps them in the order of the
            documents.
        num_threads: threads that read and tokenise; at most one per document is used. 0: the thread
            that makes the batch does it.
        prefetch: batches made ahead of use; 0 makes each one when it is asked for.

    Raises: UserError if the split is empty; while iterating, if a whole epoch has no text or a file
    has gone. Cost: memory of READ_AHEAD documents, `row_window` rows and `prefetch` batches, the
    first two for S streams; a restored position reads its windows again.
    """
    _check_rows(seq_len=seq_len, batch_size=batch_size)
    if seed < 0:
        raise UserError(f"seed is {seed}; give --seed a number of at least 0")
    if not len(split):
        raise UserError(f"data {split.corpus.name!r} has no document for {split.name}; add text")
    streams = num_streams(batch_size) if streams is None else streams
    for what, count in (("streams", streams), ("reading threads", num_threads)):
        if count > len(split):
            logger.warning("data: %d %s share %d documents", count, what, len(split))
    held = range(batch_size) if held is None else held
    first = held if first is None else first
    share = batch_size // streams
    needed = sorted({row // share for row in held})
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    items = grain.MapDataset.source(split).shuffle(seed=shuffle_seed).repeat()
    pool = None
    if num_threads:
        pool = ThreadPoolExecutor(min(num_threads, len(split)), "k3jax-read")
    window = max(1, row_window // streams)

    def rows(stream: int) -> grain.IterDataset:
        mine = items[stream::streams].map(functools.partial(tokenize, tokenizer=tokenizer))
        documents = Documents(mine, pool, max(1, READ_AHEAD // len(needed)))
        packed = PackedRows(
            documents, seq_len=seq_len, pad_id=tokenizer.pad_id, patience=len(split) + 1
        )
        return MixedRows(packed, window=window, seed=(shuffle_seed, stream))

    batches = grain.experimental.ThreadPrefetchIterDataset(
        Streams({stream: rows(stream) for stream in needed}, share, held),
        prefetch_buffer_size=prefetch,
    )
    identity = {
        "data": split.corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "seq_len": seq_len,
        "seed": seed,
        "row_window": row_window,
        "streams": streams,
    }
    begun = {row // share for row in first if row % share == 0}
    iterator = TrainIterator(iter(batches), identity, begun)
    if pool is not None:  # the threads end with the iterator, closed or forgotten
        weakref.finalize(iterator._batches, pool.shutdown, wait=False, cancel_futures=True)
    return iterator


def make_eval_batches(
    split: Split,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    rows: int,
    num_batches: int | None = None,
    row_window: int = ROW_WINDOW,
    prefetch: int = 2,
) -> grain.IterDataset:
    """The split once, in a fixed order, as batches [rows, seq_len]; iterate it as often as needed.

    Every process makes the whole batches and gives its devices their part, so all have equally
    many, and they depend on `rows` only. The last batch is filled with padding (segment 0).
    `num_batches` stops earlier; documents and rows come mixed, so the first batches are a fair
    sample.
    """
    _check_rows(seq_len=seq_len, rows=rows)
    documents = (
        grain.MapDataset.source(split)
        .shuffle(seed=0)
        .map(functools.partial(tokenize, tokenizer=tokenizer))
        .to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD), allow_nones=True
        )
    )
    packed = PackedRows(
        documents, seq_len=seq_len, pad_id=tokenizer.pad_id, patience=len(split) + 1
    )
    mixed = MixedRows(packed, window=row_window, seed=(0,))
    stack = functools.partial(_stack, count=rows, pad_id=tokenizer.pad_id)
    batches = mixed.batch(rows, batch_fn=stack)
    if num_batches is not None:
        batches = grain.experimental.LimitIterDataset(batches, count=num_batches)
    return grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)


def _stack(rows: Sequence[Row], *, count: int, pad_id: int) -> Batch:
    """`count` rows, of which the missing ones are padding."""
    empty = {
        "tokens": np.full_like(rows[0]["tokens"], pad_id),
        "segment_ids": np.zeros_like(rows[0]["segment_ids"]),
    }
    rows = [*rows, *[empty] * (count - len(rows))]
    return {name: np.stack([row[name] for row in rows]) for name in empty}


def _check_rows(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} is {value}; give a positive number")
