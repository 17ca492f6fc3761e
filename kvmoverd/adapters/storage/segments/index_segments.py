"""The segments that the RAM index knows: a dense number for each, columns of what is known of it, and which authors' are dead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

REUSE_NS = 600 * 10**9
"""A number is not used again for so long after nothing stood for it any more: whoever still holds it has forgotten it."""
_REMEMBERED_MAX = 1 << 28
"""Tombstones of higher segment numbers, which only damage or malice makes, are not remembered."""
_SEGMENT_RAM_BYTES = 256
"""Of the columns and of the dictionary's entry, about."""
_NAME_RAM_BYTES = 512
"""Of an author or namespace, about."""
_COLUMNS = np.dtype(
    [
        ("author", "<u4"),
        ("number", "<u4"),
        ("generation", "<u4"),
        ("purge", "<u4"),
        ("record_pages", "<u4"),
        ("space", "<u4"),
        ("keys", "<i8"),
        ("depths", "<i8"),
        ("told", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """`keys`: keys whose place is in it, in RAM; `depth_mean`: of all blocks that its author's log told of, 0 when unknown."""

    author: str
    number: int
    fingerprint16: bytes
    generation: int
    purge: int
    record_pages: int
    alive: bool
    keys: int
    depth_mean: float


@dataclass(slots=True)
class _Author:
    name: str
    ids: dict[int, int] = field(default_factory=dict)
    gone: bool = False
    dead: bytearray = field(default_factory=bytearray)
    """A bit per segment number that was tombstoned, known here or not: one that is heard of later stays dead."""


class SegmentBook:
    """Numbers count from 1. Not thread-safe."""

    def __init__(self) -> None:
        self.columns = np.zeros(256, _COLUMNS)
        self.alive = np.zeros(256, np.bool_)
        self._spaces: dict[bytes, int] = {}
        self._space_names = [b""]
        self._authors: dict[str, int] = {}
        self._by_author: list[_Author] = []
        self._next = 1
        self._dying: list[Ids] = []
        self._free: deque[tuple[int, int]] = deque()
        self._free_authors: deque[tuple[int, int]] = deque()
        self._free_spaces: list[int] = []
        self._abandoned: set[int] = set()

    @property
    def ram_bytes(self) -> int:
        names = len(self._by_author) + len(self._space_names)
        return self._next * _SEGMENT_RAM_BYTES + names * _NAME_RAM_BYTES

    def __len__(self) -> int:
        """Segments that are alive."""
        return int(np.count_nonzero(self.alive))

    def add(
        self,
        author: str,
        number: int,
        *,
        fingerprint16: bytes,
        generation: int,
        purge: int,
        record_pages: int,
        dead: bool,
        now_ns: int,
    ) -> int:
        """The segment's number here; the one it has, if it is known. `dead`: it is so from the beginning."""
        author_id = self._author_id(author, now_ns)
        entry = self._by_author[author_id]
        entry.gone = False
        space = self._space_id(fingerprint16)
        known = entry.ids.get(number)
        if known is not None and self.columns["space"][known] == space:
            return known
        segment_id = self._take_id(now_ns)
        self.columns[segment_id] = (author_id, number, generation, purge, record_pages, space, 0, 0, 0)
        entry.ids[number] = segment_id
        self.alive[segment_id] = not dead and not _bit(entry.dead, number)
        if not self.alive[segment_id]:
            self._dying.append(np.array([segment_id]))
        return segment_id

    def told(self, segment_ids: Ids, blocks: Ids, depths: Ids) -> Ids:
        """A log tells of so many blocks in each, of that depth in all: the segments' pages a record."""
        np.add.at(self.columns["told"], segment_ids, blocks)
        np.add.at(self.columns["depths"], segment_ids, depths)
        record_pages: Ids = self.columns["record_pages"][segment_ids].astype(np.int64)
        return record_pages

    def id_of(self, author: str, number: int) -> int | None:
        author_id = self._authors.get(author)
        return None if author_id is None else self._by_author[author_id].ids.get(number)

    def known(self, segment_id: int) -> bool:
        """A segment has this number, alive or not."""
        return 0 < segment_id < self._next and bool(self.columns["space"][segment_id])

    def info(self, segment_id: int) -> SegmentInfo:
        assert 0 < segment_id < self._next, f"segment {segment_id} is not known, numbers end at {self._next - 1}"
        row = self.columns[segment_id]
        return SegmentInfo(
            author=self._by_author[int(row["author"])].name,
            number=int(row["number"]),
            fingerprint16=self._space_names[int(row["space"])],
            generation=int(row["generation"]),
            purge=int(row["purge"]),
            record_pages=int(row["record_pages"]),
            alive=bool(self.alive[segment_id]),
            keys=int(row["keys"]),
            depth_mean=int(row["depths"]) / int(row["told"]) if row["told"] else 0.0,
        )

    def space_of(self, segment_id: int) -> bytes:
        """The namespace's fingerprint, first 16 bytes; none for a segment that was forgotten."""
        return self._space_names[int(self.columns["space"][segment_id])]

    def author_of(self, segment_id: int) -> str:
        return self._by_author[int(self.columns["author"][segment_id])].name

    def ids(self, author: str) -> list[int]:
        author_id = self._authors.get(author)
        return [] if author_id is None else list(self._by_author[author_id].ids.values())

    def ids_in(self, fingerprint16: bytes) -> Ids:
        """Segments of a namespace, dead ones too."""
        space = self._spaces.get(fingerprint16)
        if space is None:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.columns["space"][: self._next] == space)

    def bury(self, author: str, numbers: Iterable[int], now_ns: int) -> Ids:
        """These are dead, now or when they are heard of; those that were alive."""
        entry = self._by_author[self._author_id(author, now_ns)]
        entry.gone = False
        killed = []
        for number in numbers:
            if number < _REMEMBERED_MAX:
                _set_bit(entry.dead, number)
            segment_id = entry.ids.get(number)
            if segment_id is not None and self.alive[segment_id]:
                killed.append(segment_id)
        return self.kill(np.unique(np.array(killed, np.int64)))

    def kill(self, segment_ids: Ids) -> Ids:
        """These are dead, each named once: those that were alive."""
        killed = segment_ids[self.alive[segment_ids]]
        self.alive[killed] = False
        self._dying.append(killed)
        return killed

    def abandon(self, fingerprint16: bytes) -> None:
        """No word names the namespace's segments any more: they are dead, and new ones if they are heard of again."""
        ids = self.ids_in(fingerprint16)
        self.alive[ids] = False
        self.columns["keys"][ids] = 0
        self._dying.append(ids)
        space = self._spaces.pop(fingerprint16, None)
        if space is not None:
            self._abandoned.add(space)

    def forget_author(self, author: str, now_ns: int) -> None:
        """Which of his segments were tombstoned is not remembered any more, nor is he when the last of them was swept."""
        author_id = self._authors.get(author)
        if author_id is not None:
            self._by_author[author_id].dead = bytearray()
            self._by_author[author_id].gone = True
            self._let_author_go(author_id, now_ns)

    def later(self, old: Ids, new: Ids, *, others: bool) -> npt.NDArray[np.bool_]:
        """Was `new` begun after `old`, both of one author? `others`: the answer where they are of two."""
        columns = self.columns
        same = columns["author"][old] == columns["author"][new]
        return np.where(same, columns["number"][old] < columns["number"][new], others)

    def keys_by_space(self, segment_ids: Ids) -> list[tuple[bytes, int]]:
        """How many keys have their place in these, by namespace."""
        spaces = self.columns["space"][segment_ids]
        keys = self.columns["keys"][segment_ids]
        return [(self._space_names[number], int(keys[spaces == number].sum())) for number in np.unique(spaces).tolist()]

    def count(self, segment_ids: Ids, sign: int) -> None:
        """So many keys more, or fewer, have a place in these: one for each time that a segment is named."""
        np.add.at(self.columns["keys"], segment_ids, sign)

    def sweep(self, now_ns: int, segments_max: int) -> list[int]:
        """Forgets some of the dead segments in which no key has its place any more: their numbers."""
        if not self._dying:
            self._let_spaces_go()
            return []
        dying = np.unique(np.concatenate(self._dying))
        gone = dying[self.columns["keys"][dying] <= 0][:segments_max]
        self._dying = [np.setdiff1d(dying, gone, assume_unique=True)]
        for segment_id in gone.tolist():
            self._forget(segment_id, now_ns)
            self._free.append((now_ns + REUSE_NS, segment_id))
        self._let_spaces_go()
        return list(gone.tolist())

    def _forget(self, segment_id: int, now_ns: int) -> None:
        row = self.columns[segment_id]
        ids, number = self._by_author[int(row["author"])].ids, int(row["number"])
        if ids.get(number) == segment_id:
            del ids[number]
        row["space"] = 0
        self._let_author_go(int(row["author"]), now_ns)

    def _let_author_go(self, author_id: int, now_ns: int) -> None:
        """Somebody else gets the number of one who is gone when none of his segments is known, after as long as theirs."""
        entry = self._by_author[author_id]
        if entry.gone and not entry.ids and self._authors.get(entry.name) == author_id:
            del self._authors[entry.name]
            self._free_authors.append((now_ns + REUSE_NS, author_id))

    def _let_spaces_go(self) -> None:
        if self._abandoned:
            gone = self._abandoned.difference(np.unique(self.columns["space"][: self._next]).tolist())
            self._abandoned -= gone
            self._free_spaces += gone

    def _take_id(self, now_ns: int) -> int:
        if self._free and self._free[0][0] <= now_ns:
            return self._free.popleft()[1]
        if self._next == len(self.alive):
            self.columns = np.concatenate([self.columns, np.zeros(len(self.columns), _COLUMNS)])
            self.alive = np.concatenate([self.alive, np.zeros(len(self.alive), np.bool_)])
        self._next += 1
        return self._next - 1

    def _author_id(self, author: str, now_ns: int) -> int:
        found = self._authors.get(author)
        if found is None:
            if self._free_authors and self._free_authors[0][0] <= now_ns:
                found = self._free_authors.popleft()[1]
                self._by_author[found] = _Author(author)
            else:
                found = len(self._by_author)
                self._by_author.append(_Author(author))
            self._authors[author] = found
        return found

    def _space_id(self, fingerprint16: bytes) -> int:
        found = self._spaces.get(fingerprint16)
        if found is None:
            if self._free_spaces:
                found = self._free_spaces.pop()
                self._space_names[found] = fingerprint16
            else:
                found = len(self._space_names)
                self._space_names.append(fingerprint16)
            self._spaces[fingerprint16] = found
        return found


def _bit(bits: bytearray, number: int) -> bool:
    return number >> 3 < len(bits) and bool(bits[number >> 3] >> (number & 7) & 1)


def _set_bit(bits: bytearray, number: int) -> None:
    if number >> 3 >= len(bits):
        bits.extend(bytes(max(64, (number >> 3) + 1 - len(bits))))
    bits[number >> 3] |= 1 << (number & 7)
