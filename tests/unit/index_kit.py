"""A RAM index with a clock, and short words for what its tests do."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store.log_pages import entries_of

ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16
PAGES = 3
SECOND_NS = 10**9


@dataclass
class Clock:
    ns: int = SECOND_NS

    def __call__(self) -> int:
        return self.ns


@dataclass
class Shop:
    """An index with a clock, and short words for what its tests do."""

    ram_bytes_max: int = 1 << 30
    clock: Clock = field(default_factory=Clock)
    wanted: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.touches = Touches(now_ns=self.clock)
        self.index = SegmentIndex(
            ram_bytes_max=self.ram_bytes_max, touches=self.touches, now_ns=self.clock, on_wanted=self.wanted.append
        )

    def segment(self, author: str = "a", number: int = 1, space: bytes = ONE, purge: int = 0) -> int:
        return self.index.add_segment(
            author, number, fingerprint16=space, generation=7, purge=purge, record_pages=PAGES
        )

    def add(self, segment_id: int, keys: list[bytes], first_record: int = 0) -> None:
        self.index.add_blocks(segment_id, self.entries(keys, first_record))

    def entries(self, keys: list[bytes], first_record: int = 0) -> npt.NDArray[np.void]:
        records = range(first_record, first_record + len(keys))
        places = zip(keys, records, strict=True)
        return entries_of([(key, bytes(32), 1 + record * PAGES, depth) for depth, (key, record) in enumerate(places)])

    def found(self, keys: list[bytes], space: bytes = ONE) -> list[bool]:
        return self.index.locate(space, b"".join(keys))[2].tolist()


def some_keys(count: int, seed: int = 1) -> list[bytes]:
    chance = Random(seed)
    return [chance.randbytes(32) for _ in range(count)]
