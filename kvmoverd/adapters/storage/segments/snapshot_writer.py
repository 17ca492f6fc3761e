"""Makes a snapshot of this author's sealed logs, and takes those away that it stands for."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.adapters.storage.block_io import create_file
from kvmoverd.adapters.storage.namespaces import sync_directory
from kvmoverd.adapters.storage.segments.followed import Listing
from kvmoverd.adapters.storage.segments.log_reader import LogCounters, LogReader, News, Run
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.snapshots import (
    BLOCK,
    ROW,
    SECTION_BYTES,
    TOMBSTONE,
    Snapshot,
    SnapshotDamaged,
    encode_head,
    sections_of,
    tables_bytes,
)
from kvmoverd.adapters.storage.segments.usage import SEGMENTS
from kvmoverd.core.store.places import PAGE_BYTES, log_name, segment_name, snapshot_name

PERIOD_S = 1.0
_STEP_NS = 50_000_000
_GROWTH = 8
"""A snapshot is made anew when the logs since the last one hold an eighth of its blocks: each block is copied some eight times
in all, however many there come to be."""
_BLOCKS_AT_ONCE = SECTION_BYTES // BLOCK.itemsize
_NO_OWNER = bytes(16)


@dataclass(slots=True)
class SnapshotStats:
    """Totals since start; `last`: number of the newest snapshot. `damaged`: own ones that the next could not be built on."""

    last: int = 0
    written: int = 0
    damaged: int = 0
    blocks: int = 0
    failures: int = 0
    trashed: int = 0


@dataclass(slots=True)
class _Part:
    """A segment's rows and blocks in the making: `old`, first and count in the snapshot before; `new`: arrays of `BLOCK`."""

    row: npt.NDArray[np.void]
    old: tuple[int, int] = (0, 0)
    new: list[npt.NDArray[np.void]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.old[1] + sum(map(len, self.new))


class Snapshots:
    """`step` is the keeper's job; `sealed` is for any thread. `directory`: the own author's.

    `is_known`: whether an owner, by his 16 bytes, is still there: what is said of others is not kept. `throw` takes a file
    away for good: path, and a name that it may have in the trash. Logs and older snapshots go `grace_s` after the snapshot is
    durable.
    """

    def __init__(
        self,
        directory: Path,
        *,
        is_known: Callable[[bytes], bool],
        throw: Callable[[Path, str], None],
        grace_s: float,
        now_ns: Callable[[], int] = time.monotonic_ns,
        direct: bool = True,
    ) -> None:
        self.directory, self._is_known, self._throw = directory, is_known, throw
        self._grace_ns, self._now_ns = round(grace_s * 1e9), now_ns
        self._files = PageFiles(direct=direct)
        self._sealed: deque[int] = deque()
        self._newest_sealed = 0
        self._blocks = 0
        self._making: Generator[None, None, None] | None = None
        self._covered: deque[tuple[int, int]] = deque()
        self._damaged: set[int] = set()
        self._stats = SnapshotStats()

    def sealed(self, log: int) -> None:
        """The author has sealed this log."""
        self._sealed.append(log)

    def step(self) -> bool:
        """Makes a snapshot if one is due, a bit at a time; True when there is more to do. Raises `OSError`."""
        while self._sealed:
            self._newest_sealed = max(self._newest_sealed, self._sealed.popleft())
        self._take_away()
        if self._making is None:
            if not self._is_due():
                return False
            self._making = self._make(self._newest_sealed)
        deadline_ns = self._now_ns() + _STEP_NS
        try:
            while self._now_ns() < deadline_ns:
                if next(self._making, self) is self:
                    self._making = None
                    return False
        except OSError:
            self._making = None
            self._stats.failures += 1
            raise
        return True

    def stats(self) -> SnapshotStats:
        return self._stats

    def close(self) -> None:
        """Leaves a snapshot that is being made."""
        if self._making is not None:
            self._making.close()
            self._making = None

    def _is_due(self) -> bool:
        logs = self._newest_sealed - self._stats.last
        # A log holds 62 blocks a page at most; how many pages it has is its author's own affair.
        return logs > 0 and logs * self._log_blocks() * _GROWTH >= self._blocks

    def _has_segment(self, number: int) -> bool:
        """Whether the own segment is there; so it is where that can't be found out."""
        try:
            os.stat(self.directory / SEGMENTS / segment_name(number))
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def _log_blocks(self) -> int:
        try:
            return os.stat(self.directory / log_name(self._newest_sealed)).st_size // PAGE_BYTES * 62
        except OSError:
            return 0

    def _make(self, number: int) -> Generator[None, None, None]:
        old, since = self._open_newest()
        try:
            book = _Book(self._is_known, self._has_segment)
            if old is not None:
                yield from book.add_old(old)
            for news in self._read_logs(since + 1, number):
                book.add(news)
                yield
            parts = book.parts()
            temp = self.directory / f"{snapshot_name(number)}.{secrets.token_hex(4)}"
            try:
                yield from _write(temp, number, parts, book.tombstones(), old)
                os.rename(temp, self.directory / snapshot_name(number))
            except BaseException:
                with contextlib.suppress(OSError):
                    temp.unlink()
                raise
            sync_directory(self.directory)
        finally:
            if old is not None:
                old.close()
        self._stats.written += 1
        self._stats.last, self._stats.blocks = number, sum(part.count for part in parts)
        self._blocks = self._stats.blocks
        self._covered.append((number, self._now_ns() + self._grace_ns))

    def _open_newest(self) -> tuple[Snapshot | None, int]:
        """The newest snapshot that can be used, and its number. Raises `OSError`.

        What only a damaged one has is lost here: the records themselves are found when somebody adopts this directory.
        """
        if not self._stats.last:
            return None, 0
        for number in reversed(Listing.of(self.directory).snapshots):
            try:
                return Snapshot(self.directory, number), number
            except SnapshotDamaged:
                self._damaged.add(number)
                self._stats.damaged = len(self._damaged)
        return None, 0

    def _read_logs(self, first: int, last: int) -> Iterator[News]:
        there = set(Listing.of(self.directory).logs)
        for number in range(first, last + 1):
            if number <= self._stats.last and number not in there:
                continue
            reader = LogReader(self.directory, self._files, LogCounters(), log=number, follow=False)
            try:
                more = True
                while more:
                    news = reader.read()
                    more = news.more
                    yield news
            finally:
                reader.close()

    def _take_away(self) -> None:
        """Logs up to the newest snapshot that is old enough, and the snapshots before it."""
        if not self._covered or self._covered[0][1] > self._now_ns():
            return
        number, _ = self._covered[0]
        listing = Listing.of(self.directory)
        names = [log_name(log) for log in listing.logs if log <= number]
        names += [snapshot_name(old) for old in listing.snapshots if old < number]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._throw(self.directory / name, f"{self.directory.name}.{name}")
                self._stats.trashed += 1
        self._covered.popleft()


class _Book:
    """Segments that are alive, and which are dead."""

    def __init__(self, is_known: Callable[[bytes], bool], has_segment: Callable[[int], bool]) -> None:
        self._is_known, self._has_segment = is_known, has_segment
        self._parts: dict[tuple[bytes, int, int], _Part] = {}
        self._dead: set[tuple[bytes, int]] = set()

    def add_old(self, snapshot: Snapshot) -> Generator[None, None, None]:
        """What lies in damaged parts is lost: its blocks are misses after a restart."""
        for row in snapshot.rows:
            yield
            if snapshot.read_blocks(int(row["first"]), int(row["count"])) is None:
                continue
            name = row["owner16"].tobytes(), int(row["number"]), int(row["bad"])
            self._parts[name] = _Part(np.array([row]), (int(row["first"]), int(row["count"])))
        for row in snapshot.tombstones:
            self._dead.add((row["owner16"].tobytes(), int(row["number"])))

    def add(self, news: News) -> None:
        for run, bad in [(run, 0) for run in news.runs] + [(run, 1) for run in news.bad]:
            part = self._parts.setdefault((run.owner16, run.segment, bad), _Part(_row_of(run, bad)))
            part.row["time_s"] = max(int(part.row["time_s"][0]), run.time_s)
            blocks = np.zeros(len(run.entries), BLOCK)
            blocks["tag"] = run.entries["key"][:, 0]
            blocks["page"], blocks["depth"] = run.entries["page"], run.entries["depth"]
            part.new.append(blocks)
        for owner16, numbers in news.tombstones:
            self._dead.update((owner16, number) for number in numbers)

    def parts(self) -> list[_Part]:
        """In the order of a snapshot's rows, with their places set."""
        alive = [
            (part.row["fingerprint16"][0].tobytes(), *name, part)
            for name, part in self._parts.items()
            if name[:2] not in self._dead and self._is_kept(name[0])
        ]
        first, parts = 0, [entry[4] for entry in sorted(alive, key=lambda entry: entry[:4])]
        for part in parts:
            part.row["first"], part.row["count"] = first, part.count
            first += part.count
        return parts

    def tombstones(self) -> npt.NDArray[np.void]:
        """Of others' segments while they are known, of own ones as long as they are there.

        That no blocks of a dead own segment are told is not enough: whoever adopts the directory would take its records for
        some that its author did not live to tell.
        """
        kept = sorted(name for name in self._dead if self._is_kept_dead(*name))
        found = np.zeros(len(kept), TOMBSTONE)
        for at, (owner16, number) in enumerate(kept):
            found[at] = (owner16, number)
        return found

    def _is_kept_dead(self, owner16: bytes, number: int) -> bool:
        return self._has_segment(number) if owner16 == _NO_OWNER else self._is_known(owner16)

    def _is_kept(self, owner16: bytes) -> bool:
        return owner16 == _NO_OWNER or self._is_known(owner16)


def _row_of(run: Run, bad: int) -> npt.NDArray[np.void]:
    row = np.zeros(1, ROW)
    row["fingerprint16"], row["owner16"] = np.frombuffer(run.fingerprint16, "V16"), np.frombuffer(run.owner16, "V16")
    row["number"], row["generation"], row["purge"] = run.segment, run.generation, run.purge
    row["record_pages"], row["time_s"], row["bad"] = run.record_pages, run.time_s, bad
    return row


def _write(
    temp: Path, number: int, parts: list[_Part], tombstones: npt.NDArray[np.void], old: Snapshot | None
) -> Generator[None, None, None]:
    """Writes the whole file and makes it durable: the blocks first, then what stands before them."""
    count = sum(part.count for part in parts)
    size_bytes = tables_bytes(len(parts), len(tombstones), count)
    with open(create_file(temp), "wb") as file:
        file.seek(PAGE_BYTES + size_bytes)
        crcs = []
        for section in _sections(_blocks(parts, old)):
            crcs.append(crc32c(section))
            file.write(section)
            yield
        assert len(crcs) == sections_of(count), f"{len(crcs)} sections of {count} blocks"
        tables = b"".join(
            (*(part.row.tobytes() for part in parts), tombstones.tobytes(), np.array(crcs, "<u4").tobytes())
        )
        tables += bytes(size_bytes - len(tables))
        file.seek(0)
        file.write(encode_head(number, len(parts), len(tombstones), count, tables) + tables)
        file.flush()
        os.fsync(file.fileno())


def _blocks(parts: list[_Part], old: Snapshot | None) -> Iterator[bytes]:
    for part in parts:
        first, left = part.old
        while left:
            assert old is not None, f"{left} blocks of a snapshot that is not there"
            count = min(left, _BLOCKS_AT_ONCE)
            blocks = old.read_blocks(first, count)
            if blocks is None:
                raise SnapshotDamaged(f"blocks {first} to {first + count} of the last snapshot were damaged just now")
            yield blocks.tobytes()
            first, left = first + count, left - count
        yield from (blocks.tobytes() for blocks in part.new)


def _sections(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, a section at a time; the last may be shorter."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        while len(waiting) >= SECTION_BYTES:
            yield bytes(waiting[:SECTION_BYTES])
            del waiting[:SECTION_BYTES]
    if waiting:
        yield bytes(waiting)
