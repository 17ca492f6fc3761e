"""Where a record lies in a segment store, and the names of the store's files.

    <root>/kvm1/format.json                       what kind of store this is; absent: one file per block
               /<fingerprint, 16 bytes in hex>/manifest.json      published once, compared at open
                                              /purge.<n>          the highest n is the namespace's purge number
                                              /birth.<16 hex>     which directory this is; where there are copies of it
                                              /follows.<token>    in a copy: up to where it was purged
               /authors/<author>/lease            heartbeat of the daemon that writes here, one page
                                /log.<nnnnnnnn>   index logs, pre-sized pages
                                /snap.<nnnnnnnn>  what logs up to this number said of segments that are still alive
                                /touch.<nnnnnnnn> touch log: what this node used of others' segments
                                /adopt.<n>        claims on a dead author's directory
                                /seg/<nnnnnnnn>.seg
               /.trash/<author>/...               tombstoned long enough, being deleted

An author is one start of one node's daemon, `<node>.<boot id>`: nobody else writes its logs and segments, ever, and no
number is used twice. What a former start left behind is a dead author's, like any other's. Whoever adopts a dead author
writes what is to be said of its segments into his own log, and may delete them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmoverd.core.layout import ALIGN_BYTES

PAGE_BYTES = ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A record: its author, segment number and header page's number in the segment. Only a hint: the header page decides."""

    author: str
    segment: int
    page: int

    @property
    def offset_bytes(self) -> int:
        """Where in the segment the record begins."""
        return self.page * PAGE_BYTES


def known_places(keys: Iterable[bytes], places: Iterable[Place | None]) -> dict[bytes, Place]:
    """Place of each key that somebody has heard of; `places` may be shorter than `keys`."""
    return {key: place for key, place in zip(keys, places, strict=False) if place is not None}


def segment_name(number: int) -> str:
    """
    >>> segment_name(7)
    '00000007.seg'
    """
    return f"{number:08d}.seg"


def log_name(number: int) -> str:
    return f"log.{number:08d}"


def snapshot_name(number: int) -> str:
    return f"snap.{number:08d}"


def touch_name(number: int) -> str:
    return f"touch.{number:08d}"


def number_of(name: str, prefix: str) -> int | None:
    """The number in `<prefix>.<number>` or `<number>.<prefix>`; None for any other name.

    >>> number_of("log.00000012", "log"), number_of("00000007.seg", "seg"), number_of("log.tmp", "log")
    (12, 7, None)
    """
    first, dot, last = name.partition(".")
    number = last if first == prefix else first if last == prefix else ""
    return int(number) if dot and number.isdecimal() and number.isascii() else None
