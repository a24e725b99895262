"""Documents to batches of full rows, with a position that can be saved and restored exactly.

    documents of a split → shuffle (anew each epoch) → every P-th for this host → ids
        → rows of T tokens → shuffle within windows → batches → a background thread

A long document fills many rows in a row; without the second shuffle they would be one batch.
The order is one endless sequence of documents, a permutation per epoch, dealt to the P hosts in
turn: hosts never share a document of an epoch and together see all of them, however few there are.
All work is done by threads of this process: no worker can die alone, no shared memory is used, and
a tokenizer that was used before is safe. An error in a thread is raised by the next `next()`.
"""

import atexit
import functools
import logging
import weakref
from collections.abc import Sequence
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

READ_AHEAD = 16  # documents being read and tokenised
ROW_WINDOW = 512  # rows that are shuffled among each other


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


_FIXES = {  # per field of a position's identity
    "data": "restore the files as they were",
    "tokenizer": "use the tokenizer of the first run",
    "seq_len": "use the --seq-len of the first run",
    "seed": "use the --seed of the first run",
    "row_window": "use the k3jax of the first run",
    "process_count": "start as many processes as before",
    "process_index": "give each process the state that it saved",
}


class TrainIterator(grain.DatasetIterator):
    """Endless batches of this host, with a guarded position.

    `get_state()` is a JSON-able dict of a few hundred bytes; every host saves its own, for example
    as `data/process_{i}-of-{P}.json` in the checkpoint (`grain.checkpoint.CheckpointSave` does
    that). `set_state()` makes the next batch the one that would have come, or raises UserError
    naming the field if data, tokenizer, seed, row length or hosts differ.
    """

    def __init__(self, batches: grain.DatasetIterator, identity: dict[str, Any]):
        super().__init__(batches)
        self._batches = batches
        self._identity = identity
        # Symptom without this: AttributeError in grain's __del__ when Python exits (grain 0.2.18).
        atexit.register(_close, weakref.ref(self))

    def __next__(self) -> Batch:
        self._assert_not_closed()
        return next(self._batches)

    def close(self) -> None:
        """Ends the threads. Done at exit at the latest, while grain's modules are still there."""
        if not self._closed:
            super().close()
            self._parents = ()
            del self._batches

    def get_state(self) -> dict[str, Any]:
        return {"identity": self._identity, "position": self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        for field, fix in _FIXES.items():
            saved, here = state["identity"].get(field), self._identity[field]
            if saved != here:
                raise UserError(
                    f"the checkpoint's data position has {field}={saved!r}, this run has"
                    f" {field}={here!r}; {fix}, or start in a new --run-dir"
                )
        self._batches.set_state(state["position"])


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
    rows_per_host: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    row_window: int = ROW_WINDOW,
    num_threads: int = 2,
    prefetch: int = 2,
) -> TrainIterator:
    """Endless shuffled batches {"tokens", "segment_ids"}, int32 [rows_per_host, seq_len].

    Args:
        split: documents, `load_corpus(...).split("train")`.
        seq_len: tokens per row.
        rows_per_host: rows of each batch of this host; may change between runs, rows continue.
        seed: order of the documents, any integer >= 0.
        process_index, process_count: this host and the number of hosts.
        row_window: rows shuffled among each other; 1 keeps them in the order of the documents.
        num_threads: threads that read and tokenise; at most one per document is used.
        prefetch: batches made ahead of use; 0 makes each one when it is asked for.

    Raises: UserError if the split is empty; while iterating, if a whole epoch has no text or a file
    has gone. Cost: memory of READ_AHEAD documents, `row_window` rows and `prefetch` batches; a
    restored position reads its window again.
    """
    _check_rows(seq_len, rows_per_host, process_index, process_count)
    if seed < 0:
        raise UserError(f"seed is {seed}; give --seed a number of at least 0")
    if not len(split):
        raise UserError(f"data {split.corpus.name!r} has no document for {split.name}; add text")
    for what, count in (("hosts", process_count), ("reading threads", num_threads)):
        if count > len(split):
            logger.warning("data: %d %s share %d documents", count, what, len(split))
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    documents = (
        grain.MapDataset.source(split)
        .shuffle(seed=shuffle_seed)
        .repeat()[process_index::process_count]
        .map(functools.partial(tokenize, tokenizer=tokenizer))
        .to_iter_dataset(
            grain.ReadOptions(
                num_threads=min(num_threads, len(split)), prefetch_buffer_size=READ_AHEAD
            ),
            allow_nones=True,
        )
    )
    rows = PackedRows(documents, seq_len=seq_len, pad_id=tokenizer.pad_id, patience=len(split) + 1)
    mixed = grain.experimental.WindowShuffleIterDataset(
        rows, window_size=row_window, seed=shuffle_seed
    )
    batches = grain.experimental.ThreadPrefetchIterDataset(
        mixed.batch(rows_per_host), prefetch_buffer_size=prefetch
    )
    identity = {
        "data": split.corpus.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "seq_len": seq_len,
        "seed": seed,
        "row_window": row_window,
        "process_count": process_count,
        "process_index": process_index,
    }
    return TrainIterator(iter(batches), identity)


def make_eval_batches(
    split: Split,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    rows_per_host: int,
    num_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    row_window: int = ROW_WINDOW,
    prefetch: int = 2,
) -> grain.IterDataset:
    """The split once, in a fixed order, as batches of one shape; iterate it as often as needed.

    Every host packs the same rows and keeps its share of each batch, so all hosts have equally many
    batches and the global batch depends only on the global number of rows. The last batch is
    filled with padding (segment 0). `num_batches` stops earlier; documents and rows come mixed, so
    the first batches are a fair sample.
    """
    _check_rows(seq_len, rows_per_host, process_index, process_count)
    documents = (
        grain.MapDataset.source(split)
        .shuffle(seed=0)
        .map(functools.partial(tokenize, tokenizer=tokenizer))
        .to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD), allow_nones=True
        )
    )
    rows = PackedRows(documents, seq_len=seq_len, pad_id=tokenizer.pad_id, patience=len(split) + 1)
    mixed = grain.experimental.WindowShuffleIterDataset(rows, window_size=row_window, seed=0)
    stack = functools.partial(_stack, count=rows_per_host * process_count, pad_id=tokenizer.pad_id)
    mine = slice(process_index * rows_per_host, (process_index + 1) * rows_per_host)
    batches = mixed.batch(rows_per_host * process_count, batch_fn=stack).map(
        lambda batch: {name: values[mine] for name, values in batch.items()}
    )
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


def _check_rows(seq_len: int, rows_per_host: int, process_index: int, process_count: int) -> None:
    for name, value in (("seq_len", seq_len), ("rows_per_host", rows_per_host)):
        if value < 1:
            raise UserError(f"{name} is {value}; give a positive number")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} is outside 0..{process_count - 1}")
