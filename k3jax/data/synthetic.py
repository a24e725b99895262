"""Tasks made of random tokens, for tests and benchmarks: no files, no network, known answers."""

import dataclasses

import grain
import numpy as np
from jaxtyping import Bool, Int

Row = dict[str, Int[np.ndarray, " T"]]

NUM_ROWS = 2**31 - 1  # an epoch nobody finishes; row i depends on the seed and i only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """`length` random symbols, a separator, the same symbols again.

    A recurrent state must hold all of them: the task measures how much it can hold.
    """

    length: int  # symbols
    num_symbols: int  # ids 0 ... num_symbols-1; the separator is num_symbols
    seed: int

    @property
    def vocab_size(self) -> int:
        return self.num_symbols + 1

    @property
    def answers(self) -> Bool[np.ndarray, " T"]:
        """Positions whose token is determined by those before it."""
        return np.arange(2 * self.length + 1) > self.length

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Row:
        symbols = _rng(self.seed, index).integers(self.num_symbols, size=self.length)
        return _row(np.concatenate([symbols, [self.num_symbols], symbols]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """`num_pairs` pairs (key, value) with different keys, then all pairs again in another order.

    In the second half each value must be recalled by its key: the task that separates a delta rule,
    which overwrites by key, from a decaying sum.
    """

    num_pairs: int
    num_keys: int  # ids 0 ... num_keys-1
    num_values: int  # ids num_keys ... num_keys+num_values-1
    seed: int

    def __post_init__(self):
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"num_pairs {self.num_pairs} exceeds num_keys {self.num_keys}; keys differ in a row"
            )

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values

    @property
    def answers(self) -> Bool[np.ndarray, " T"]:
        """Positions whose token is determined by those before it."""
        position = np.arange(4 * self.num_pairs)
        return (position >= 2 * self.num_pairs) & (position % 2 == 1)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Row:
        rng = _rng(self.seed, index)
        keys = rng.choice(self.num_keys, size=self.num_pairs, replace=False)
        values = self.num_keys + rng.integers(self.num_values, size=self.num_pairs)
        pairs = np.stack([keys, values], axis=1)
        return _row(np.concatenate([pairs.ravel(), rng.permutation(pairs).ravel()]))


def synthetic_batches(
    task: Copy | Recall, *, rows_per_host: int, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Endless batches {"tokens", "segment_ids"}, int32 [rows_per_host, T]; its state is exact."""
    rows = grain.MapDataset.source(task).repeat()[process_index::process_count]
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(rows.to_iter_dataset(options).batch(rows_per_host))


def _rng(seed: int, index: int) -> np.random.Generator:
    return np.random.default_rng((seed, index))


def _row(tokens: np.ndarray) -> Row:
    """One document that fills the row."""
    return {"tokens": tokens.astype(np.int32), "segment_ids": np.ones(len(tokens), np.int32)}
