"""How much the records of segments were used, and which are pinned, by the touch logs of all authors."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.block_io import BlockIo
from kvmoverd.adapters.storage.inspect.authors import ALIVE, AuthorSeen
from kvmoverd.adapters.storage.segments.touch_log import READ_BYTES, TouchFollower
from kvmoverd.core.store.touch_pages import COUNT_MAX, PINNED, USED, author_tag, unrolled

_POLLS_MAX = 1 << 16


class Touched:
    """Counts by author and segment; none for what was never used."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._pins: dict[tuple[int, int], set[tuple[str, int]]] = {}

    def heat(self, author: str, number: int, records: int) -> npt.NDArray[np.uint8]:
        """A count for each record."""
        found = np.zeros(records, np.uint8)
        counts = self._counts.get((author_tag(author), number), np.zeros(0, np.int64))[:records]
        found[: len(counts)] = np.minimum(counts, COUNT_MAX)
        return found

    def pinned(self, author: str, number: int) -> int:
        """Records that nodes that are alive have pinned."""
        return len({record for _, record in self._pins.get((author_tag(author), number), ())})

    def add(self, entries: npt.NDArray[np.void], speaker: AuthorSeen) -> None:
        """What one author said in one page, in the order of his pages."""
        used = entries[entries["kind"] == USED]
        for name in np.unique(used[["author", "segment"]]).tolist():
            mine = used[(used["author"] == name[0]) & (used["segment"] == name[1])]
            records, counts = unrolled(mine, "count")
            if len(records):
                self._count(name, np.bincount(records, weights=counts).astype(np.int64))
        for pin in entries[entries["kind"] == PINNED] if speaker.state == ALIVE else ():
            name = int(pin["author"]), int(pin["segment"])
            pins = self._pins.setdefault(name, set())
            said = {(speaker.author, record) for record in unrolled(np.array([pin]), "pin_s")[0].tolist()}
            self._pins[name] = pins | said if pin["pin_s"] else pins - said

    def _count(self, name: tuple[int, int], counts: npt.NDArray[np.int64]) -> None:
        known = self._counts.get(name, np.zeros(0, np.int64))
        length = max(len(known), len(counts))
        self._counts[name] = np.pad(known, (0, length - len(known))) + np.pad(counts, (0, length - len(counts)))


def read_touches(authors: Path, seen: Iterable[AuthorSeen]) -> Touched:
    """Reads all touch logs; those that can't be read say nothing."""
    touched, buffer = Touched(), mmap.mmap(-1, READ_BYTES)
    for author in seen:
        follower = TouchFollower(authors / author.author, BlockIo(direct=False), buffer)
        with contextlib.suppress(OSError):
            for _ in range(_POLLS_MAX):
                pages = follower.poll()
                if pages is None:
                    break
                for entries in pages:
                    touched.add(entries, author)
    return touched
