"""Where each key of one namespace lies: a word per key in an array of slots that grows and shrinks bit by bit. Pure, numpy.

A key is known by its tag, made of its first 8 bytes; who finds a place compares the whole key there. To grow, to shrink,
or to be rid of words that count no more, a table moves to a new array in the order of tags: what is below `bound` is in
the new one already, so that each step takes a fraction of a millisecond and look-ups go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmoverd.core.store.slot_table import HOMES_MAX, SLOT_BYTES, Memory, PlainMemory, SlotTable, Words

KEY_BYTES = 32
FILL_MAX = 0.75
"""Of the homes: above it the table moves to more."""
FILL = 0.6
"""After a move: 27 B a key."""
_FILL_MIN = 0.3
_DEAD_MAX = 1 / 16
_HOMES_MIN = 256
_SMALL_HOMES = 32_768
"""Up to this size a table is made anew in one step, of a millisecond; above it moves."""
_REBUILD_PART = 64
"""A batch of one key per so many homes is merged with the whole of a small table rather than inserted."""
_STEP_SLOTS = 4096
_SLOTS_PER_KEY = 16
"""Slots moved for each key that comes during a move, or more where many slots move to few: it ends before either is full."""
_SHRINK_MAX = 8
"""By so much a table becomes smaller in one move: a step for many keys must not be long."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Rules:
    """What words mean. All take arrays of words, and are called inside `put` and `step`.

    `alive`: which still count; the others are dropped as a move passes by. `wins(old, new)`: which of the new words
    replace the old ones of the same keys. `gone`: these words were replaced or dropped.
    """

    alive: Callable[[Words], npt.NDArray[np.bool_]]
    wins: Callable[[Words, Words], npt.NDArray[np.bool_]]
    gone: Callable[[Words], None]


def raw_tags(keys: bytes) -> Words:
    """The first 8 bytes of each of these joined keys, little-endian."""
    return np.frombuffer(keys, "<u8", len(keys) // 8)[:: KEY_BYTES // 8]


class KeyTable:
    """Words are never 0: that is what `find` answers for a key that is not here. Not thread-safe.

    `mixer`: an odd number that nobody who chooses keys can guess, or keys that lie close together could be made to make
    the table slow. Tags in here are raw tags times `mixer`.
    """

    def __init__(self, rules: Rules, *, mixer: int, memory: Memory | None = None) -> None:
        assert mixer & 1, f"the mixer is {mixer}, must be odd"
        self._rules = rules
        self._mixer = mixer & _MASK
        self._unmixer = np.uint64(pow(mixer, -1, 1 << 64))
        self._memory = memory or PlainMemory()
        self._now = SlotTable(_HOMES_MIN, self._memory)
        self._next: SlotTable | None = None
        self._bound = 0

    def __len__(self) -> int:
        """Keys with a word, alive or not."""
        return self._now.used + (self._next.used if self._next else 0)

    @property
    def ram_bytes(self) -> int:
        """Of the arrays; a new one counts as far as it was written."""
        written_bytes = self._next.ram_bytes * self._bound >> 64 if self._next else 0
        return self._now.ram_bytes + written_bytes

    def ram_bytes_with(self, keys: int) -> int:
        """About what it will be with so many keys more: soon after, should they make it move to a larger array."""
        if self._next is not None:
            return max(self.ram_bytes, self._next.ram_bytes)
        if self._now.used + keys <= FILL_MAX * self._now.homes:
            return self.ram_bytes
        return SLOT_BYTES * _homes_for(len(self) + keys)

    @property
    def moving(self) -> bool:
        return self._next is not None

    def find(self, raw: Words) -> Words:
        """The word of each key, 0 where there is none. 500 keys take some tens of microseconds."""
        tags = self._mixed(raw)
        words = np.zeros(len(tags), np.uint64)
        if self._next is None:
            rows, slots = self._now.find(tags)
            words[rows] = self._now.words[slots]
            return words
        below = tags < self._bound
        for table, part in ((self._next, below.nonzero()[0]), (self._now, (~below).nonzero()[0])):
            if len(part):
                rows, slots = table.find(tags[part])
                words[part[rows]] = table.words[slots]
        return words

    def find_one(self, raw: int) -> int:
        """The same for one key, quickly."""
        table, slot = self._place(raw)
        return int(table.words[slot]) if slot >= 0 else 0

    def set_one(self, raw: int, word: int) -> None:
        """Another word for a key that is here."""
        table, slot = self._place(raw)
        assert slot >= 0, "a word is set only for a key that has one"
        table.words[slot] = word

    def put(self, raw: Words, words: Words) -> Words:
        """Takes words of keys that are not here, and of others where the new word wins: those that it took.

        Of a key given twice the last counts. A thousand keys take some tenths of a millisecond: who has more makes several calls.
        """
        tags = self._mixed(raw)
        order = tags.argsort(kind="stable")
        tags = tags[order]
        last = np.append(tags[1:] != tags[:-1], True)[: len(tags)]
        tags, words = tags[last], words[order[last]]
        fresh, won = self._replace(tags, words)
        taken = words[fresh | won]
        tags, words = tags[fresh], words[fresh]
        if not len(tags):
            return taken
        if self._next is None and self._now.homes <= _SMALL_HOMES and len(tags) * _REBUILD_PART >= self._now.homes:
            self._rebuild(tags, words)
            return taken
        self._insert(tags, words)
        if self._next is None:
            if self._now.used > FILL_MAX * self._now.homes:
                # The first step comes with the next call, when `prepare` has had its turn.
                self._begin(_homes_for(len(self)))
        else:
            self.step(_STEP_SLOTS + self._slots_per_key() * len(tags))
        return taken

    def tidy(self, dead_keys: int, slots_max: int) -> bool:
        """Goes on with a move, or begins one where dead or empty slots make it worth while; True while there is more to do.

        `dead_keys`: words that are not alive.
        """
        if self._next is None:
            live = len(self) - dead_keys
            if not self._sparse(live) and dead_keys <= _DEAD_MAX * len(self):
                return False
            # A sweep takes no more memory than there was: that may be at its limit.
            self._begin(min(_homes_for(live), self._now.homes))
        self.step(slots_max)
        return self._next is not None or self._sparse(len(self))

    def step(self, slots_max: int) -> None:
        """Moves so many slots, where a move is under way."""
        while slots_max > 0 and self._next is not None:
            slots = min(slots_max, _STEP_SLOTS)
            slots_max -= slots
            tags, words = self._now.take(slots)
            if not len(tags):
                self._now, self._next, self._bound = self._next, None, 0
                return
            self._bound = int(tags[-1]) + 1
            tags, words = self._living(tags, words)
            if not self._next.append(tags, words):
                self._rebuild(tags, words)

    def prepare(self) -> None:
        """Takes memory that the next steps of a move will write. Harmless beside any other call, in any thread."""
        table, bound = self._next, self._bound
        if table is not None:
            table.populate(bound * table.homes >> 64)

    def above(self, cursor: int, slots_max: int) -> tuple[Words, Words, int]:
        """Raw tags and words of some keys, for a walk that starts with cursor 0; then the next cursor, 0 at the end.

        A key that is here during the whole walk comes once, whatever is put or moved meanwhile.
        """
        if self._next is not None and cursor < self._bound:
            tags, words, following = self._next.above(cursor, slots_max)
            following = following or (self._bound if self._bound <= _MASK else 0)
        else:
            tags, words, following = self._now.above(cursor, slots_max)
        return tags * self._unmixer, words, following

    def _mixed(self, raw: Words) -> Words:
        tags: Words = raw * np.uint64(self._mixer)
        return np.maximum(tags, 1, out=tags)

    def _place(self, raw: int) -> tuple[SlotTable, int]:
        tag = raw * self._mixer & _MASK or 1
        table = self._now if self._next is None or tag >= self._bound else self._next
        return table, table.find_one(tag)

    def _replace(self, tags: Words, words: Words) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """New words for keys that are here, where they win: which are not here, and which have won."""
        fresh, won = np.ones(len(tags), np.bool_), np.zeros(len(tags), np.bool_)
        for table, part in self._parts(tags):
            rows, slots = table.find(tags[part])
            if not len(rows):
                continue
            rows += part.start
            fresh[rows] = False
            old, new = table.words[slots], words[rows]
            wins = self._rules.wins(old, new)
            table.words[slots[wins]] = new[wins]
            won[rows[wins]] = True
            self._rules.gone(old[wins])
        return fresh, won

    def _parts(self, tags: Words) -> list[tuple[SlotTable, slice]]:
        """Which of these sorted tags belong to which array."""
        if self._next is None:
            return [(self._now, slice(0, len(tags)))]
        below = int(np.searchsorted(tags, np.uint64(self._bound))) if self._bound <= _MASK else len(tags)
        return [(self._next, slice(0, below)), (self._now, slice(below, len(tags)))]

    def _insert(self, tags: Words, words: Words) -> None:
        for table, part in self._parts(tags):
            homeless = table.insert(tags[part], words[part]) + part.start
            if len(homeless):
                self._rebuild(tags[homeless], words[homeless])
                # The arrays are others now: what is left of the tags finds its place among them.
                self._insert(tags[part.stop :], words[part.stop :])
                return

    def _sparse(self, keys: int) -> bool:
        return keys < _FILL_MIN * self._now.homes and self._now.homes > _HOMES_MIN

    def _begin(self, homes: int) -> None:
        """Begins to move to an array with so many homes, or as few as one move may leave."""
        self._next, self._bound = SlotTable(max(homes, self._now.homes // _SHRINK_MAX), self._memory), 0

    def _slots_per_key(self) -> int:
        assert self._next is not None
        return max(_SLOTS_PER_KEY, 10 * self._now.homes // self._next.homes)

    def _rebuild(self, tags: Words, words: Words) -> None:
        """A new array for all that is alive and for these, which are not here; in one step."""
        parts = [(tags, words)]
        for table in (self._now, self._next):
            if table is not None:
                parts.append(self._living(*table.take(table.end)))
        tags, words = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        order = tags.argsort(kind="stable")
        tags, words = tags[order], words[order]
        homes = self._now.homes if len(tags) <= FILL_MAX * self._now.homes else _homes_for(len(tags))
        self._now, self._next, self._bound = SlotTable(homes, self._memory), None, 0
        if not self._now.append(tags, words):
            # Somebody chose keys that crowd at the end: there is room for all of them.
            self._now = SlotTable(homes, self._memory, pad=2 * len(tags))
            self._now.append(tags, words)

    def _living(self, tags: Words, words: Words) -> tuple[Words, Words]:
        alive = self._rules.alive(words)
        if alive.all():
            return tags, words
        self._rules.gone(words[~alive])
        return tags[alive], words[alive]


def _homes_for(keys: int) -> int:
    return min(HOMES_MAX - 1, max(_HOMES_MIN, int(keys / FILL)))
