"""Synthetic tasks: answers are determined, rows are reproducible, the position is exact."""

import json

import numpy as np
import pytest

from k3jax.data.synthetic import Copy, Recall, synthetic_batches

TASKS = [
    Copy(length=7, num_symbols=5, seed=1),
    Recall(num_pairs=6, num_keys=9, num_values=4, seed=1),
]


def test_copy_repeats_its_symbols():
    task = TASKS[0]
    row = task[3]["tokens"]
    assert row[7] == 5
    np.testing.assert_array_equal(row[:7], row[8:])
    np.testing.assert_array_equal(np.flatnonzero(task.answers), np.arange(8, 15))


def test_recall_asks_for_every_value():
    task = TASKS[1]
    row = task[3]["tokens"]
    pairs = dict(row[:12].reshape(6, 2).tolist())
    assert len(pairs) == 6
    assert [pairs[key] for key in row[12::2].tolist()] == row[13::2].tolist()
    np.testing.assert_array_equal(np.flatnonzero(task.answers), [13, 15, 17, 19, 21, 23])
    assert not (row[:12] == row[12:]).all()


@pytest.mark.parametrize("task", TASKS, ids=["copy", "recall"])
def test_batches_are_exact_and_disjoint(task):
    options = {"rows_per_host": 3, "process_count": 2}
    iterator = synthetic_batches(task, process_index=0, **options)
    other = synthetic_batches(task, process_index=1, **options)
    first, state = next(iterator), json.dumps(iterator.get_state())
    second = next(iterator)
    resumed = synthetic_batches(task, process_index=0, **options)
    resumed.set_state(json.loads(state))
    np.testing.assert_array_equal(next(resumed)["tokens"], second["tokens"])
    rows = {row.tobytes() for b in (first, second, next(other)) for row in b["tokens"]}
    assert len(rows) == 9
    assert first["tokens"].shape == (3, len(task.answers))
    assert first["tokens"].dtype == first["segment_ids"].dtype == np.int32
    assert first["tokens"].max() < task.vocab_size
    assert (first["segment_ids"] == 1).all()


def test_too_few_keys():
    with pytest.raises(ValueError, match="num_pairs 3 exceeds num_keys 2"):
        Recall(num_pairs=3, num_keys=2, num_values=2, seed=0)
