"""An array of slots, sorted by tag: each tag stands at its home slot, or as near behind it as the tags before it leave room.

The home of a tag is `tag / 2^64` of the way through the array, so the order of tags is the order of slots, in a table of
any size. That keeps tags nearer to their homes than unsorted probing does: filled to 0.75, one in ten thousand is 16 slots
away; and a look-up that meets a larger tag, or none, knows at once that its own is not there. So a fixed window of slots
per tag, taken for all tags of a look-up at once, answers nearly all of them.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Slots: TypeAlias = npt.NDArray[np.int64]

SLOT_BYTES = 16
"""A tag and a word."""
HOMES_MAX = 1 << 32
_TAG_MAX = (1 << 64) - 1
_NEAR, _NEAR_BITS = 16, 4
"""Slots that a look-up takes for each tag at once."""
_ROOM = (16, 64, 256)
"""Slots that an insertion takes for each tag: first, then where there was no empty one among them."""
_FAR = _ROOM[-1]
_PIECE_SLOTS = 1 << 18
"""Memory is taken and given back in pieces of so many slots: 2 MiB of tags, and as much of words."""
_PAD = 256
"""Slots behind the last home, for what does not fit before."""


class Memory(Protocol):
    """Where tables lie."""

    def words(self, count: int) -> Words:
        """Zeros, best without taking memory before they are written."""

    def populate(self, words: Words, start: int, stop: int) -> None:
        """Takes the memory of these words now, and changes none of them; other threads may read and write them."""

    def release(self, words: Words, stop: int) -> int:
        """The first `stop` words will not be read any more, and may read as zeros: how many of them were freed."""


class PlainMemory:
    """Arrays of numpy, freed whole."""

    def words(self, count: int) -> Words:
        return np.zeros(count, np.uint64)

    def populate(self, words: Words, start: int, stop: int) -> None:
        """Nothing: memory comes when it is written."""

    def release(self, words: Words, stop: int) -> int:
        """None: the whole array goes when its table does."""
        return 0


class SlotTable:
    """`homes` slots that can be homes; tag 0 is an empty slot. All tags are uint64; `used`: slots that are taken.

    `pad`: slots behind the last home. Tags that are spread at random never need more than the usual number.
    Slots below `floor` are treated as not there: their tags were moved to another table.
    """

    def __init__(self, homes: int, memory: Memory, *, pad: int = _PAD) -> None:
        assert 0 < homes < HOMES_MAX, f"{homes} homes, must be 1 to {HOMES_MAX - 1}"
        self.homes = homes
        self.end = homes + pad
        self.floor = 0
        self.used = 0
        self._memory = memory
        self._released = 0
        self._populated = 0
        self.tags = memory.words(self.end + _FAR)
        self.words = memory.words(self.end + _FAR)
        self._windows = {width: _windows(self.tags, width) for width in {_NEAR, *_ROOM}}
        self._one = self.tags.data

    @property
    def ram_bytes(self) -> int:
        return (len(self.tags) - self._released) * SLOT_BYTES

    def home(self, tags: Words) -> Slots:
        """Where each should stand: its upper half, scaled to the slots."""
        scaled = tags >> 32
        scaled *= self.homes
        scaled >>= 32
        return scaled.view(np.int64)

    def find_one(self, tag: int) -> int:
        """Its slot, or -1. About a microsecond, where arrays would take twenty."""
        slot, tags = max((tag >> 32) * self.homes >> 32, self.floor), self._one
        while (seen := tags[slot]) and seen < tag:
            slot += 1
        return slot if seen == tag else -1

    def find(self, tags: Words) -> tuple[Slots, Slots]:
        """Those that are here, as numbers in `tags`, and their slots; in no order."""
        start = self._start(tags)
        seen = self._seen(start, _NEAR)
        hits = (seen == tags[:, None]).ravel().nonzero()[0]
        rows = hits >> _NEAR_BITS
        slots = start[rows] + (hits & (_NEAR - 1))
        # An empty last slot, less 1, is above all tags: those are done, as are tags that have met a larger one.
        beyond = (seen[:, -1] - 1) < tags
        if not beyond.any():
            return rows, slots
        far = beyond.nonzero()[0]
        far_rows, far_slots = self._find_far(tags[far], start[far] + _NEAR)
        return np.concatenate([rows, far[far_rows]]), np.concatenate([slots, far_slots])

    def _find_far(self, tags: Words, start: Slots) -> tuple[Slots, Slots]:
        rows, slots = [], []
        for row, (tag, first) in enumerate(zip(tags.tolist(), start.tolist(), strict=True)):
            slot = first
            while (seen := self._one[slot]) and seen < tag:
                slot += 1
            if seen == tag:
                rows.append(row)
                slots.append(slot)
        return np.array(rows, np.int64), np.array(slots, np.int64)

    def append(self, tags: Words, words: Words) -> bool:
        """Sorted tags, all above those that are here. False: no room at the end, and nothing was done."""
        if not len(tags):
            return True
        at = self.home(tags)
        order = np.arange(len(tags))
        at -= order
        at[0] = max(int(at[0]), self._empty_from(int(at[0])))
        np.maximum.accumulate(at, out=at)
        at += order
        if at[-1] >= self.end:
            return False
        self.tags[at] = tags
        self.words[at] = words
        self.used += len(tags)
        return True

    def insert(self, tags: Words, words: Words) -> Slots:
        """Sorted tags, each once, none of them here. The numbers of those that found no room at the end."""
        crowded = np.arange(len(tags))
        for width in _ROOM:
            crowded = self._insert_rounds(tags, words, crowded, width)
        homeless = [row for row in crowded.tolist() if not self._insert_one(int(tags[row]), words[row])]
        return np.array(homeless, np.int64)

    def _insert_rounds(self, tags: Words, words: Words, rows: Slots, width: int) -> Slots:
        """Tags in each other's way take turns. Those of `rows` that saw no empty slot among `width`."""
        aside = [rows[:0]]
        while len(rows):
            done, crowded = self._insert_some(tags[rows], words[rows], width)
            aside.append(rows[crowded])
            rows = rows[~(done | crowded)]
        return np.concatenate(aside)

    def _insert_some(
        self, tags: Words, words: Words, width: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Inserts those whose slots, up to the next empty one, nobody before them in `tags` needs: which were done.

        Then those that saw no empty slot.
        """
        start = self._start(tags)
        seen = self._seen(start, width)
        # Less 1, an empty slot is above all tags.
        at = start + ((seen - 1) >= tags[:, None]).argmax(axis=1)
        empties = seen == 0
        empty = empties.argmax(axis=1)
        crowded = ~empties[np.arange(len(tags)), empty]
        empty += start
        crowded |= empty >= self.end
        reach = np.maximum.accumulate(np.where(crowded, -1, empty))
        free = ~crowded
        free[1:] &= start[1:] > reach[:-1]
        self._shift_in(tags[free], words[free], at[free], empty[free])
        return free, crowded

    def _shift_in(self, tags: Words, words: Words, at: Slots, empty: Slots) -> None:
        """Moves slots `at` up to the empty one by one, for all tags together, and puts the tags there."""
        counts = empty - at
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        if total:
            source = np.repeat(at - (ends - counts), counts)
            source += np.arange(total)
            target = source + 1
            self.tags[target] = self.tags[source]
            self.words[target] = self.words[source]
        self.tags[at] = tags
        self.words[at] = words
        self.used += len(tags)

    def _insert_one(self, tag: int, word: np.uint64) -> bool:
        """The same for one tag, however far the next empty slot is."""
        at = max((tag >> 32) * self.homes >> 32, self.floor)
        while (seen := self._one[at]) and seen < tag:
            at += 1
        empty = self._empty_from(at)
        if empty >= self.end:
            return False
        for array in (self.tags, self.words):
            array[at + 1 : empty + 1] = array[at:empty].copy()
        self.tags[at], self.words[at] = tag, word
        self.used += 1
        return True

    def take(self, slots_max: int) -> tuple[Words, Words]:
        """Takes away the tags and words of the next slots above `floor`; empty only where none are left."""
        while self.floor < self.end:
            first, self.floor = self.floor, min(self.end, self.floor + slots_max)
            tags = self.tags[first : self.floor]
            taken = tags.nonzero()[0]
            if len(taken):
                found = tags[taken], self.words[first : self.floor][taken]
                self.used -= len(taken)
                self._release()
                return found
        return np.empty(0, np.uint64), np.empty(0, np.uint64)

    def above(self, tag: int, slots_max: int) -> tuple[Words, Words, int]:
        """Tags from `tag` on with their words, out of so many slots; then the tag to go on from, 0 at the end."""
        first = max((tag >> 32) * self.homes >> 32, self.floor)
        stop = min(self.end, first + slots_max)
        tags = self.tags[first:stop]
        wanted = (tags >= max(1, tag)).nonzero()[0]
        if stop >= self.end:
            return tags[wanted], self.words[first:stop][wanted], 0
        if not len(wanted):
            return self.above(tag, slots_max * 2)
        return tags[wanted], self.words[first:stop][wanted], int(tags[wanted[-1]]) + 1 & _TAG_MAX

    def populate(self, slot: int) -> None:
        """Takes the memory up to this slot, and a piece more: for a thread that does not hold up others meanwhile."""
        start, stop = self._populated, min(len(self.tags), slot + 2 * _PIECE_SLOTS)
        if stop - start >= _PIECE_SLOTS or stop == len(self.tags) > start:
            self._populated = stop
            self._memory.populate(self.tags, start, stop)
            self._memory.populate(self.words, start, stop)

    def _release(self) -> None:
        if self.floor - self._released < _PIECE_SLOTS:
            return
        self._memory.release(self.tags, self.floor)
        self._released = self._memory.release(self.words, self.floor)

    def _seen(self, start: Slots, width: int) -> Words:
        """Row by row, the tags of `width` slots from there on."""
        return self._windows[width][start].view(np.uint64).reshape(-1, width)

    def _start(self, tags: Words) -> Slots:
        """The first slot where each may stand."""
        start = self.home(tags)
        if self.floor:
            np.maximum(start, self.floor, out=start)
        return start

    def _empty_from(self, slot: int) -> int:
        """The first empty slot at or behind `slot`; there are some behind the end."""
        while True:
            empty = (self.tags[slot : slot + _FAR] == 0).argmax()
            if self.tags[slot + empty] == 0:
                return slot + int(empty)
            slot += _FAR


def _windows(words: Words, width: int) -> npt.NDArray[np.void]:
    """Element n: the `width` words from n on, as one lump: to take lumps costs a third of what taking rows would."""
    lumps = words[: len(words) // width * width].view(f"V{width * words.itemsize}")
    count = len(words) - width + 1
    return np.lib.stride_tricks.as_strided(lumps, (count,), (words.itemsize,), writeable=False)
