"""One author as this node follows him: where it is in his logs, and what is still to be read of the older ones."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.leases import LEASE, LeaseWatch, Life
from kvmoverd.adapters.storage.segments.log_reader import LogCounters, LogReader
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.core.store.log_pages import author16
from kvmoverd.core.store.places import Place, number_of

SEGMENT_NUMBER_MAX = 1 << 26
FSCK_NODE = "_fsck"
"""Authors of this node have no segments, only word of others': nobody adopts them but another check.

No daemon can have this name: what a config may call a node begins with a letter or digit."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]{0,254}")
_NOT_READ_MAX = 2
"""How many logs beside the one that is written may exist: the next one, and the one after that while a log is sealed."""
_RETRY_NS_MAX = 5 * 10**9
_QUIET_AFTER_NS = 5 * 10**9
_QUIET_POLLS = 4
_DEAD_POLLS = 10


class IndexSink(Protocol):
    """What following asks of the index."""

    def add_segment(
        self, author: str, number: int, *, fingerprint16: bytes, generation: int, purge: int, record_pages: int
    ) -> int: ...

    def add_many(self, parts: Sequence[tuple[int, npt.NDArray[np.void]]], *, old: bool = False) -> None:
        """Blocks of segments, in this order: number of the segment as `add_segment` gave it, array of `ENTRY`.

        `old`: it is not known when they were stored; else it was just now.
        """

    def drop_segments(self, author: str, numbers: list[int]) -> None: ...

    def drop_author(self, author: str) -> None: ...

    def mark_bad(self, fingerprint16: bytes, key: bytes, place: Place, *, for_s: float | None) -> None: ...


def is_author(name: str) -> bool:
    """Whether a directory, or a word from a peer, may be an author's name.

    >>> is_author("node-0.0123abcd"), is_author(".trash"), is_author("../x")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None and "." in name


def node_of(author: str) -> str:
    """
    >>> node_of("rack-1.node-7.0123abcd-2")
    'rack-1.node-7'
    """
    return author.rpartition(".")[0]


class SegmentBits:
    """A set of segment numbers, a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> None:
        if number < SEGMENT_NUMBER_MAX:
            if number >> 3 >= len(self._bits):
                self._bits.extend(bytes((number >> 3) + 1 - len(self._bits)))
            self._bits[number >> 3] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        return number >> 3 < len(self._bits) and bool(self._bits[number >> 3] >> (number & 7) & 1)

    def numbers(self) -> list[int]:
        """For any thread: of a copy, as an array that has no other end of its buffer may not grow."""
        bits = np.unpackbits(np.frombuffer(bytes(self._bits), np.uint8), bitorder="little")
        found: list[int] = np.flatnonzero(bits).tolist()
        return found


@dataclass(frozen=True, slots=True)
class Listing:
    """Numbers of an author's logs and snapshots, each in order."""

    logs: tuple[int, ...]
    snapshots: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path) -> Listing:
        """Raises `OSError`."""
        names = os.listdir(directory)
        logs = sorted(number for name in names if (number := number_of(name, "log")) is not None)
        snapshots = sorted(number for name in names if (number := number_of(name, "snap")) is not None)
        return cls(tuple(logs), tuple(snapshots))

    @property
    def first_tail(self) -> int:
        """The log from which on an author is followed: the one he writes, or one shortly before it."""
        if not self.logs:
            return self.snapshots[-1] + 1 if self.snapshots else 1
        return max(self.logs[0], self.logs[-1] - _NOT_READ_MAX, self.snapshots[-1] + 1 if self.snapshots else 0)

    def older(self, below: int) -> tuple[tuple[int, ...], int | None]:
        """What is to be read for all before log `below`: logs, the newest first, and then a snapshot."""
        snapshot = max((number for number in self.snapshots if number < below), default=None)
        logs = [number for number in self.logs if (snapshot or 0) < number < below]
        return tuple(reversed(logs)), snapshot


class Followed:
    """`due_ns`: when his log is looked at again; `caught_up`: all was read that there was, once at least."""

    def __init__(
        self, authors: Path, name: str, files: PageFiles, counters: LogCounters, settings: SegmentSettings, machine: str
    ) -> None:
        self.name, self.name16, self.node = name, author16(name), node_of(name)
        self.directory = authors / name
        self.lease = LeaseWatch(
            self.directory / LEASE, machine=machine, heartbeat_s=settings.heartbeat_s, dead_s=settings.dead_s
        )
        self.tail: LogReader | None = None
        self.due_ns = self.lease_due_ns = 0
        self.looked_ns: int | None = None
        self.caught_up = False
        self.failures = 0
        self.error = ""
        self.wanted: set[bytes] = set()
        """Namespaces for which all his logs are to be read again."""
        self._files, self._counters = files, counters
        self._poll_ns = round(settings.poll_s * 1e9)
        self._news_ns: int | None = None

    def follow_from(self, log: int) -> LogReader:
        self.close()
        self.tail = LogReader(self.directory, self._files, self._counters, log=log)
        return self.tail

    def looked(self, now_ns: int, *, pages: int, more: bool) -> None:
        """His log was looked at: sets when that is due again."""
        self.failures, self.error = 0, ""
        self.looked_ns = now_ns
        if pages or self._news_ns is None:
            self._news_ns = now_ns
        if pages:
            self.lease.heard()
        self.caught_up = self.caught_up or not more
        quiet = now_ns - self._news_ns > _QUIET_AFTER_NS
        polls = _DEAD_POLLS if self.lease.life is not Life.LIVE else _QUIET_POLLS if quiet else 1
        self.due_ns = now_ns if more else now_ns + polls * self._poll_ns

    def failed(self, now_ns: int, error: OSError) -> None:
        """It could not be looked at: the more often that happens, the longer until it is tried again."""
        self.failures += 1
        self.error = str(error)
        self.caught_up = True
        self.due_ns = now_ns + min(_RETRY_NS_MAX, self._poll_ns << min(self.failures, 10))

    def close(self) -> None:
        if self.tail is not None:
            self.tail.close()
        self.tail = None
