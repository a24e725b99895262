"""The host's side of the decode state: which slots and pages are whose, and which prefixes are kept."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int


class SlotPool:
    """Which slots of a pool of states are in use: what a server asks before it launches a step."""

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))

    def allocate(self) -> int | None:
        """A free slot, or None if there is no free slot. What it holds is the last user's."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        if not 0 <= slot < self.size or slot in self._free:
            raise ValueError(f"slot {slot} is not in use; the pool has slots 0 to {self.size - 1}")
        self._free.append(slot)


class PagePool:
    """How many users each page has. A page is written by its first user only, so it can be shared
    once it is full.
    """

    def __init__(self, size: int):
        self.size = size
        self._free = list(reversed(range(size)))
        self._users = [0] * size

    @property
    def free(self) -> int:
        """Pages without a user."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Pages with one user each, or None, and nothing taken, if too few are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One user more for pages that have some."""
        self._check(pages)
        for page in pages:
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less; a page without any is free."""
        self._check(pages)
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def _check(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not 0 <= page < self.size or not self._users[page]:
                raise ValueError(
                    f"page {page} is not in use; the pool has pages 0 to {self.size - 1}"
                )
        if len(set(pages)) < len(pages):
            raise ValueError(f"pages {list(pages)} name a page twice")


class Snapshot(NamedTuple):
    """A request's state after `length` tokens: read-only, a hit copies from it."""

    length: int
    pages: tuple[int, ...]  # full ones, shared with whoever wrote them
    row: Any  # memory and conv inputs of the KDA layers


class PrefixCache:
    """The last used snapshots, each of the state after exactly the tokens that name it (KF-035).

    Names are chained: H_n = hash(H_{n-1}, tokens of block n), so one equal name means an equal
    prefix (serving 2.2). A snapshot holds its KDA state and a share of its pages; they go together.
    """

    def __init__(self, capacity: int, boundary: int, pages: PagePool):
        """
        Args:
            capacity: snapshots kept at most.
            boundary: tokens; snapshots are of multiples, whole pages.
            pages: that they share.
        """
        self.capacity, self.boundary, self._pages = capacity, boundary, pages
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def names(self, tokens: Int[np.ndarray, " T"]) -> list[bytes]:
        """Names of the prefixes of a prompt, one per whole block; none where nothing is kept."""
        ids, name, names = tokens.astype(np.int32), b"", []
        if self.capacity:
            for end in range(self.boundary, len(ids) + 1, self.boundary):
                block = ids[end - self.boundary : end].tobytes()
                name = hashlib.blake2b(name + block, digest_size=16).digest()
                names.append(name)
        return names

    def find(self, names: Sequence[bytes], length: int) -> Snapshot | None:
        """The longest kept prefix of a prompt of `length` tokens, of which one at least must be read
        again: there are no logits in a snapshot.
        """
        for name in reversed(names[: (length - 1) // self.boundary]):
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        return None

    def add(self, name: bytes, length: int, pages: Sequence[int], take: Callable[[], Any]) -> None:
        """Keeps the state after the prefix of this name, and drops what was used longest ago.

        Args:
            name: of the prefix.
            length: its tokens, whole blocks.
            pages: those that hold exactly these tokens.
            take: makes a copy of the KDA state; not called if the prefix is kept already.
        """
        if name in self._kept:
            self._kept.move_to_end(name)
            return
        self._pages.share(pages)
        self._kept[name] = Snapshot(length, tuple(pages), take())
        while len(self._kept) > self.capacity:
            self.drop()

    def drop(self) -> bool:
        """Gives back the snapshot used longest ago; False if there is none."""
        if not self._kept:
            return False
        _, snapshot = self._kept.popitem(last=False)
        self._pages.release(snapshot.pages)
        return True
