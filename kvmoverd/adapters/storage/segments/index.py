"""The RAM index of a segment store: which key lies where, for all authors, without a look at any device."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.index_bad import BadPlaces
from kvmoverd.adapters.storage.segments.index_lock import TurnLock
from kvmoverd.adapters.storage.segments.index_memory import MappedMemory
from kvmoverd.adapters.storage.segments.index_port import Ids, PortIndex, TouchCounts
from kvmoverd.adapters.storage.segments.index_segments import SegmentBook, SegmentInfo
from kvmoverd.adapters.storage.segments.index_spaces import (
    BAD,
    BAD_FOR_A_WHILE,
    FLAGS_MASK,
    RECORD_MAX,
    RECORD_SHIFT,
    SEGMENT_SHIFT,
    Space,
    Spaces,
    segments_of,
    turns_of,
    words_of,
)
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.key_table import KEY_BYTES, raw_tags
from kvmoverd.core.store.places import Place
from kvmoverd.core.store.slot_table import Words

_BULK_KEYS = 1024
"""Keys put under one hold of the lock: some tenths of a millisecond."""
_BULK_SEGMENTS = 1024
_TIDY_SLOTS = 16_384
_TAG_BYTES = 8


@dataclass(frozen=True, slots=True)
class LoadState:
    """What is in RAM now. `namespaces_dropped`, `keys_refused`, `entries_odd`: since start.

    `namespaces_left_out`: for the limit, and not wanted since. `keys_refused`: no other namespace could make room for them.
    `keys_dead`: of segments that are dead, still to be swept. `entries_odd`: said to lie where no record of their segment begins.
    """

    namespaces: int
    namespaces_left_out: int
    namespaces_dropped: int
    segments: int
    keys: int
    keys_dead: int
    keys_refused: int
    bad_for_a_while: int
    entries_odd: int
    ram_bytes: int


class SegmentIndex(PortIndex):
    """Implements `BlockIndex`. Thread-safe: one lock, which is held for a millisecond at most.

    The index holds at most about `ram_bytes_max`: beyond it, the namespaces used longest ago are left out whole, and what is
    added to them is ignored. When one is wanted again, `on_wanted` is called with its fingerprint's first 16 bytes, in the
    thread that wanted it: it must not block, and sees to it that all logs are told again. `now_ns`: a monotonic clock.
    """

    def __init__(
        self,
        *,
        ram_bytes_max: int,
        touches: TouchCounts,
        now_ns: Callable[[], int],
        on_wanted: Callable[[bytes], None] | None = None,
    ) -> None:
        super().__init__(touches)
        self._now_ns = now_ns
        self.on_wanted = on_wanted or (lambda fingerprint16: None)
        self._lock = TurnLock()
        self._book = SegmentBook()
        self._spaces = Spaces(ram_bytes_max, self._book, secrets.randbits(64) | 1, MappedMemory())
        self._bad = BadPlaces()
        self._entries_odd = 0
        self._refused = 0

    # What authors' logs say

    def add_segment(
        self, author: str, number: int, *, fingerprint16: bytes, generation: int, purge: int, record_pages: int
    ) -> int:
        """The segment's number here, the same whenever it is asked; -1 when its namespace is left out."""
        with self._lock:
            if self._spaces.get(fingerprint16) is None:
                return -1
            return self._book.add(
                author,
                number,
                fingerprint16=fingerprint16,
                generation=generation,
                purge=purge,
                record_pages=record_pages,
                dead=purge < self._spaces.purges.get(fingerprint16, 0),
                now_ns=self._now_ns(),
            )

    def add_blocks(self, segment_id: int, entries: npt.NDArray[np.void]) -> None:
        """These, an array of `ENTRY`, are durable in this segment. Nothing for -1, or a segment that is not known any more.

        They were stored just now, so a key's place gives way to them, unless it is in a later segment of the same author.
        """
        self.add_many([(segment_id, entries)])

    def add_many(self, parts: Sequence[tuple[int, npt.NDArray[np.void]]], *, old: bool = False) -> None:
        """As `add_blocks` for each of these; a thousand parts of one block take little longer than one of a thousand.

        `old`: nobody knows when they were stored. Then a key keeps a place that another author has, if it is alive and good.
        """
        by_space: dict[bytes, list[tuple[int, npt.NDArray[np.void]]]] = {}
        with self._lock:
            for part in parts:
                if self._book.known(part[0]):
                    by_space.setdefault(self._book.space_of(part[0]), []).append(part)
        for fingerprint16, some in by_space.items():
            self._add_to(fingerprint16, some, old=old)

    def _add_to(self, fingerprint16: bytes, parts: Sequence[tuple[int, npt.NDArray[np.void]]], *, old: bool) -> None:
        """Parts of one namespace."""
        lengths = np.array([len(entries) for _, entries in parts])
        depths = np.array([int(entries["depth"].sum(dtype=np.int64)) for _, entries in parts])
        pages = np.concatenate([entries["page"] for _, entries in parts]).astype(np.int64)
        tags = np.concatenate([entries["key"][:, 0] for _, entries in parts])
        ids = np.array([segment_id for segment_id, _ in parts])
        with self._lock:
            record_pages = self._book.told(ids, lengths, depths)
            space = self._spaces.loaded.get(fingerprint16)
        ids = np.repeat(ids, lengths)
        records, odd = np.divmod(pages - 1, np.repeat(record_pages, lengths))
        good = (odd == 0) & (records >= 0) & (records <= RECORD_MAX)
        if not good.all():
            self._entries_odd += int(np.count_nonzero(~good))
            ids, tags, records = ids[good], tags[good], records[good]
        if space is not None:
            self._put(space, tags, words_of(ids, records), old=old)

    def _put(self, space: Space, raw: Words, words: Words, *, old: bool) -> None:
        for part in turns_of(raw, _BULK_KEYS):
            # Fresh huge pages take up to milliseconds: not under the lock.
            space.table.prepare()
            self._lock.give_way()
            with self._lock:
                self._put_some(space, raw[part], words[part], old=old)

    def _put_some(self, space: Space, raw: Words, words: Words, *, old: bool) -> None:
        if self._spaces.loaded.get(space.fingerprint16) is not space:
            return
        alive = self._book.alive[segments_of(words)]
        if not alive.all():
            raw, words = raw[alive], words[alive]
        if not self._spaces.make_room(space, len(words), self._now_ns()):
            self._refused += len(words)
            return
        space.put(raw, words, old=old)
        self._spaces.count(space)

    def drop_segments(self, author: str, numbers: Sequence[int]) -> None:
        """Tombstoned: what lies in them is not found any more, also if it is heard of later."""
        for first in range(0, len(numbers), _BULK_SEGMENTS):
            self._lock.give_way()
            with self._lock:
                self._died(self._book.bury(author, numbers[first : first + _BULK_SEGMENTS], self._now_ns()))

    def drop_author(self, author: str) -> None:
        """All of his segments are gone, and nobody will tell of them again."""
        with self._lock:
            self._died(self._book.kill(np.array(self._book.ids(author), np.int64)))
            self._book.forget_author(author, self._now_ns())

    def set_purge(self, fingerprint16: bytes, purge: int) -> None:
        """Segments of this namespace with a lower purge number are dead, now or when they are heard of."""
        with self._lock:
            if purge <= self._spaces.purges.get(fingerprint16, 0):
                return
            self._spaces.purges[fingerprint16] = purge
            ids = self._book.ids_in(fingerprint16)
            self._died(self._book.kill(ids[self._book.columns["purge"][ids] < purge]))

    def _died(self, killed: npt.NDArray[np.int64]) -> None:
        """These segments are dead now: so are their keys."""
        for fingerprint16, keys in self._book.keys_by_space(killed):
            space = self._spaces.loaded.get(fingerprint16)
            if space is not None:
                space.dead_keys += keys

    # Look-ups

    def locate(self, fingerprint16: bytes, keys: bytes) -> tuple[Ids, Ids, npt.NDArray[np.bool_]]:
        """Segment numbers and records of these joined keys, and which were found: alive, and not known to be bad.

        Where one was not found the other two say nothing.
        """
        assert len(keys) % KEY_BYTES == 0, f"{len(keys)} bytes of keys, a key has {KEY_BYTES}"
        now_ns = self._now_ns()
        with self._lock:
            self._forgive(now_ns)
            space = self._spaces.use(fingerprint16, now_ns)
            if space is not None:
                words = space.table.find(raw_tags(keys))
                ids = segments_of(words)
                found = self._book.alive[ids]
            wanted = space is None and self._spaces.want(fingerprint16, now_ns)
        if wanted:
            self.on_wanted(fingerprint16)
        if space is None:
            none = np.zeros(len(keys) // KEY_BYTES, np.uint32)
            return none, none, none != 0
        low = words.astype(np.uint32)
        found &= (low & FLAGS_MASK) == 0
        return ids.astype(np.uint32), low >> np.uint32(RECORD_SHIFT), found

    def find(self, fingerprint16: bytes, key: bytes) -> Place | None:
        """Where a block is that is alive and not known to be bad."""
        now_ns = self._now_ns()
        with self._lock:
            self._forgive(now_ns)
            space = self._spaces.use(fingerprint16, now_ns)
            if space is not None:
                word = space.table.find_one(_tag(key))
                return (
                    self._place(word >> SEGMENT_SHIFT, word >> RECORD_SHIFT & RECORD_MAX) if self._good(word) else None
                )
            wanted = self._spaces.want(fingerprint16, now_ns)
        if wanted:
            self.on_wanted(fingerprint16)
        return None

    def segment(self, segment_id: int) -> SegmentInfo | None:
        """What is known of a segment that `locate` or `add_segment` named; None when it was swept since."""
        with self._lock:
            return self._book.info(segment_id) if self._book.known(segment_id) else None

    def places_of(self, segment_ids: Ids, record_indexes: Ids) -> list[Place]:
        """Places as others know them, of what `locate` has just found."""
        with self._lock:
            return [self._place(*both) for both in zip(segment_ids.tolist(), record_indexes.tolist(), strict=True)]

    def blocks(self, fingerprint16: bytes) -> int:
        """Keys of this namespace that are alive, bad ones too."""
        with self._lock:
            space = self._spaces.loaded.get(fingerprint16)
            return len(space.table) - space.dead_keys if space is not None else 0

    def segment_id(self, author: str, number: int) -> int | None:
        with self._lock:
            return self._book.id_of(author, number)

    def wants(self, fingerprint16: bytes) -> bool:
        """False: what is said of this namespace is ignored, for the limit."""
        with self._lock:
            return fingerprint16 not in self._spaces.left_out

    def opened(self, fingerprint16: bytes) -> None:
        """The namespace was opened: it counts as used now, and is loaded if it was left out."""
        now_ns = self._now_ns()
        with self._lock:
            wanted = self._spaces.want(fingerprint16, now_ns)
            self._spaces.get(fingerprint16)
            self._spaces.use(fingerprint16, now_ns)
        if wanted:
            self.on_wanted(fingerprint16)

    def records(self, fingerprint16: bytes, cursor: int, slots_max: int = _TIDY_SLOTS) -> tuple[Words, Ids, Ids, int]:
        """Some of what is alive, for a walk that begins with cursor 0: first 8 bytes of keys, segments, records, next cursor.

        The next cursor is 0 at the end. What is there during the whole walk comes once, bad places do not.
        """
        with self._lock:
            space = self._spaces.loaded.get(fingerprint16)
            if space is None:
                none = np.empty(0, np.uint32)
                return np.empty(0, np.uint64), none, none, 0
            raw, words, following = space.table.above(cursor, slots_max)
            good = self._book.alive[segments_of(words)] & ((words & FLAGS_MASK) == 0)
        raw, words = raw[good], words[good]
        low = words.astype(np.uint32)
        return raw, segments_of(words).astype(np.uint32), low >> np.uint32(RECORD_SHIFT), following

    def load_state(self) -> LoadState:
        with self._lock:
            spaces = self._spaces
            return LoadState(
                namespaces=len(spaces.loaded),
                namespaces_left_out=len(spaces.left_out),
                namespaces_dropped=spaces.dropped,
                segments=len(self._book),
                keys=sum(len(space.table) for space in spaces.loaded.values()),
                keys_dead=sum(space.dead_keys for space in spaces.loaded.values()),
                keys_refused=self._refused,
                bad_for_a_while=len(self._bad),
                entries_odd=self._entries_odd,
                ram_bytes=spaces.ram_bytes,
            )

    # Bad places

    def mark_bad(self, fingerprint16: bytes, key: bytes, place: Place, *, for_s: float | None) -> None:
        """The block can't be had there: for so long, or with None until it is stored elsewhere. Other places are not touched."""
        tag = _tag(key)
        with self._lock:
            space = self._spaces.loaded.get(fingerprint16)
            word = space.table.find_one(tag) if space is not None else 0
            if space is None or not self._names(word, place):
                return
            bare = word & ~FLAGS_MASK
            space.table.set_one(tag, bare | (BAD if for_s is None else word & BAD or BAD_FOR_A_WHILE))
            if for_s is not None:
                self._bad.add(self._now_ns() + round(for_s * 1e9), fingerprint16, tag, bare)

    def _forgive(self, now_ns: int) -> None:
        """Places whose time is over may be tried again."""
        while self._bad.due(now_ns):
            fingerprint16, tag, place = self._bad.take()
            space = self._spaces.loaded.get(fingerprint16)
            if space is not None and space.table.find_one(tag) == place | BAD_FOR_A_WHILE:
                space.table.set_one(tag, place)

    def _names(self, word: int, place: Place) -> bool:
        """Does the word stand for this place?"""
        segment_id = self._book.id_of(place.author, place.segment)
        if not word or segment_id != word >> SEGMENT_SHIFT:
            return False
        return self._place(segment_id, word >> RECORD_SHIFT & RECORD_MAX).page == place.page

    def _good(self, word: int) -> bool:
        return bool(word) and not word & FLAGS_MASK and bool(self._book.alive[word >> SEGMENT_SHIFT])

    def _place(self, segment_id: int, record: int) -> Place:
        row = self._book.columns[segment_id]
        return Place(self._book.author_of(segment_id), int(row["number"]), 1 + record * int(row["record_pages"]))

    def found(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Nothing: where a block lies is known from the logs alone."""

    def lost(self, namespace: Namespace, key: bytes) -> None:
        """Nothing: the store itself has marked the place that failed, and only that."""

    def forget(self, namespace: Namespace) -> None:
        """Nothing: a purge has a number, of which `set_purge` was told; what was stored since is to be found."""

    # The keeper's work

    def tidy(self, slots_max: int = 1 << 20) -> bool:
        """Sweeps what is dead, a short hold of the lock at a time; True while there is more to do."""
        with self._lock:
            spaces = list(self._spaces.loaded.values())
        more = False
        for space in spaces:
            busy = True
            while busy and slots_max > 0:
                busy = self._tidy_some(space)
                slots_max -= _TIDY_SLOTS
            more |= busy
        with self._lock:
            self._forgive(self._now_ns())
            gone = self._book.sweep(self._now_ns(), _BULK_SEGMENTS)
            for space in spaces:
                self._spaces.drop_empty(space, self._now_ns())
        for segment_id in gone:
            self._touches.forget(segment_id)
        return more or len(gone) == _BULK_SEGMENTS

    def _tidy_some(self, space: Space) -> bool:
        space.table.prepare()
        self._lock.give_way()
        with self._lock:
            if self._spaces.loaded.get(space.fingerprint16) is not space:
                return False
            busy = space.table.tidy(space.dead_keys, _TIDY_SLOTS)
            self._spaces.count(space)
            return busy


def _tag(key: bytes) -> int:
    """What the key is known by here."""
    return int.from_bytes(key[:_TAG_BYTES], "little")
