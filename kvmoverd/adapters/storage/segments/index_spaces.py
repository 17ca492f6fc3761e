"""The namespaces of the RAM index: a key table each, within a limit of bytes; what was used longest ago is left out whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.index_segments import Ids, SegmentBook
from kvmoverd.core.store.key_table import KeyTable, Rules
from kvmoverd.core.store.slot_table import Memory, Words

RECORD_SHIFT, SEGMENT_SHIFT = 8, 32
RECORD_MAX = (1 << SEGMENT_SHIFT - RECORD_SHIFT) - 1
FLAGS_MASK = (1 << RECORD_SHIFT) - 1
BAD, BAD_FOR_A_WHILE = 1, 2
DWELL_NS = 10 * 10**9
"""A namespace that was used within this time is not left out for another's sake, and one that was is not loaded again:
or two that do not fit together would be loaded in turns for ever."""


class Space:
    """One namespace. Its words: segment number << 32 | record << 8 | flags. `dead_keys`: whose segment is dead."""

    def __init__(self, fingerprint16: bytes, book: SegmentBook, *, mixer: int, memory: Memory) -> None:
        self.fingerprint16 = fingerprint16
        self.dead_keys = 0
        self._old = False
        self.used_ns = 0
        self.counted_bytes = 0
        """What the total of all namespaces has of this one."""
        self._book = book
        self.table = KeyTable(Rules(alive=self._alive, wins=self._wins, gone=self._gone), mixer=mixer, memory=memory)

    def put(self, raw: Words, words: Words, *, old: bool) -> None:
        """`old`: it is not known when these were stored."""
        self._old = old
        taken = self.table.put(raw, words)
        ids = segments_of(taken)
        self._book.count(ids, 1)

    def _alive(self, words: Words) -> npt.NDArray[np.bool_]:
        alive: npt.NDArray[np.bool_] = self._book.alive[segments_of(words)]
        return alive

    def _wins(self, old: Words, new: Words) -> npt.NDArray[np.bool_]:
        """A place gives way when it is dead, or bad and the new one is another, or to one that was stored later.

        The last is what a block does that is stored again before its old segment is dropped: the key must go with it. Of one
        author the segments' numbers tell what is later; of two it is what was told just now. A segment says nothing there: the
        one that an adopter fills now may have been begun before the dead author's.
        """
        old_ids, new_ids = segments_of(old), segments_of(new)
        bad = ((old & FLAGS_MASK) != 0) & ((old >> RECORD_SHIFT) != (new >> RECORD_SHIFT))
        later = self._book.later(old_ids, new_ids, others=not self._old)
        wins: npt.NDArray[np.bool_] = bad | ~self._book.alive[old_ids] | later
        return wins

    def _gone(self, words: Words) -> None:
        ids = segments_of(words)
        self._book.count(ids, -1)
        self.dead_keys -= int(np.count_nonzero(~self._book.alive[ids]))


def segments_of(words: Words) -> Ids:
    return (words >> SEGMENT_SHIFT).view(np.int64)


def words_of(segment_ids: npt.NDArray[np.integer], records: npt.NDArray[np.integer]) -> Words:
    words = segment_ids.astype(np.uint64)
    words <<= SEGMENT_SHIFT - RECORD_SHIFT
    words |= records.astype(np.uint64)
    words <<= RECORD_SHIFT
    return words


def turns_of(raw: Words, keys_max: int) -> Iterator[slice | npt.NDArray[np.int64]]:
    """Parts of an array in its order, none with a key twice: which place is the better is to be asked one after the other."""
    for first in range(0, len(raw), keys_max):
        part = raw[first : first + keys_max]
        order = part.argsort(kind="stable")
        again = part[order[1:]] == part[order[:-1]]
        if not again.any():
            yield slice(first, first + keys_max)
            continue
        # The how manieth of its key each is.
        at = np.arange(len(part))
        starts = np.maximum.accumulate(np.where(np.append(False, again), 0, at))
        turns = np.empty(len(part), np.int64)
        turns[order] = at - starts
        for turn in range(int(turns.max()) + 1):
            yield first + np.flatnonzero(turns == turn)


@dataclass(slots=True)
class Spaces:
    """Namespaces in the order of use, the one used longest ago first. Not thread-safe.

    `left_out`: those that did not fit, with the time from which they may be loaded again.
    """

    ram_bytes_max: int
    book: SegmentBook
    mixer: int
    memory: Memory
    loaded: OrderedDict[bytes, Space] = field(default_factory=OrderedDict)
    left_out: dict[bytes, int] = field(default_factory=dict)
    purges: dict[bytes, int] = field(default_factory=dict)
    tables_bytes: int = 0
    dropped: int = 0
    """Namespaces that had to go, in all."""

    @property
    def ram_bytes(self) -> int:
        return self.tables_bytes + self.book.ram_bytes

    def get(self, fingerprint16: bytes) -> Space | None:
        """A namespace to put keys into, made if it is not there; None when it is left out."""
        space = self.loaded.get(fingerprint16)
        if space is None and fingerprint16 not in self.left_out:
            space = self.loaded[fingerprint16] = Space(fingerprint16, self.book, mixer=self.mixer, memory=self.memory)
            self.loaded.move_to_end(fingerprint16, last=False)
            self.count(space)
        return space

    def use(self, fingerprint16: bytes, now_ns: int) -> Space | None:
        """A namespace to look something up in."""
        space = self.loaded.get(fingerprint16)
        if space is not None:
            space.used_ns = now_ns
            self.loaded.move_to_end(fingerprint16)
        return space

    def want(self, fingerprint16: bytes, now_ns: int) -> bool:
        """A namespace that was left out is wanted: True when it is to be loaded now."""
        if self.left_out.get(fingerprint16, now_ns + 1) > now_ns:
            return False
        del self.left_out[fingerprint16]
        self.get(fingerprint16)
        self.use(fingerprint16, now_ns)
        return True

    def count(self, space: Space) -> None:
        """The namespace's table may have another size now."""
        ram_bytes = space.table.ram_bytes
        self.tables_bytes += ram_bytes - space.counted_bytes
        space.counted_bytes = ram_bytes

    def make_room(self, space: Space, keys: int, now_ns: int) -> bool:
        """Leaves colder ones out until so many keys more fit into this one; False when they can't.

        Then, if there are others, this one is the coldest, and is left out itself: half of a namespace serves nobody well.
        """
        more_bytes = space.table.ram_bytes_with(keys) - space.counted_bytes
        while self.ram_bytes + more_bytes > self.ram_bytes_max:
            victim = next((other for other in self.loaded.values() if other is not space), None)
            if victim is None:
                return False
            if victim.used_ns >= space.used_ns or (victim.used_ns and victim.used_ns + DWELL_NS > now_ns):
                self._leave_out(space, now_ns)
                return False
            self._leave_out(victim, now_ns)
        return True

    def drop_empty(self, space: Space, now_ns: int) -> None:
        """Forgets a namespace of which nothing is left, and that nobody used of late."""
        if len(space.table) or space.used_ns + DWELL_NS > now_ns or self.loaded.get(space.fingerprint16) is not space:
            return
        if not len(self.book.ids_in(space.fingerprint16)):
            self._forget(space)

    def _leave_out(self, space: Space, now_ns: int) -> None:
        self.left_out[space.fingerprint16] = now_ns + DWELL_NS
        self.dropped += 1
        self._forget(space)

    def _forget(self, space: Space) -> None:
        """The namespace's keys and segments are not known any more."""
        self.book.abandon(space.fingerprint16)
        del self.loaded[space.fingerprint16]
        self.tables_bytes -= space.counted_bytes
