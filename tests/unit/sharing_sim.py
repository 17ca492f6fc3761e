"""Several nodes that share a root, each with its real followers, adoption, recovery and snapshots; their writers are plain files.

All that they do can be cut short at any step, by a crash or a standstill. A model of what was told durable and what was
told dead says what each node that lives must find in the end, and what none may.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.adoption import Adoption
from kvmoverd.adapters.storage.segments.claims import highest
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.adapters.storage.segments.recovery import Recovery
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.snapshot_writer import Snapshots
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store.log_pages import ENTRY, Kind, LogPage, encode_page
from kvmoverd.core.store.places import PAGE_BYTES, Place
from kvmoverd.core.store.segment_header import SegmentHeader
from tests.unit.segment_kit import FINGERPRINT, RECORD_PAGES, Clock, LogKit, keys_of

SETTINGS = SegmentSettings(poll_s=0.5, heartbeat_s=2.0, dead_s=20.0, grace_s=10.0)
SPACE = FINGERPRINT[:16]
GRACE_NS = round(SETTINGS.grace_s * 1e9)
STEP_S = 1.0
RECORDS_MAX = 5
"""Of a segment, after which its author begins the next."""
LOG_PAGES = 6
STEPS_MAX = 2000
SETTLE_S = 120
"""So long after the last deed everybody knows everything: death by silence, its spread, two adoptions in a row."""


class Crashed(BaseException):
    """The process is no more."""


class Truth:
    """What was told, whoever has heard it. `durable`: the places of each key."""

    def __init__(self) -> None:
        self.durable: dict[bytes, set[Place]] = {}
        self.dead: set[tuple[str, int]] = set()
        self.purge = 0
        self.purges: dict[tuple[str, int], int] = {}
        self.written: dict[bytes, set[Place]] = {}
        """Records that are whole in their segments, told or not."""

    def is_dead(self, place: Place) -> bool:
        name = place.author, place.segment
        return name in self.dead or self.purges[name] < self.purge

    def check(self, index: SegmentIndex, who: str) -> int:
        """How many keys it must find, and does. The index may know no place that is dead or was never written."""
        must = 0
        for key, places in self.written.items():
            found = index.find(SPACE, key)
            living = [place for place in self.durable.get(key, ()) if not self.is_dead(place)]
            assert found is not None or not living, f"{who} does not find {key.hex()[:8]}, which lies at {living}"
            if found is not None:
                assert found in places, f"{who} finds {key.hex()[:8]} at {found}, which nobody wrote"
                assert not self.is_dead(found), f"{who} finds {key.hex()[:8]} at {found}, which is dead"
            must += bool(living)
        return must


class Writer(LogKit):
    """An author's files, who tells of each log that he has sealed."""

    on_seal: Callable[[int], None] = staticmethod(lambda log: None)

    def seal(self, *, written: bool = True) -> None:
        sealed = self.log
        super().seal(written=written)
        self.on_seal(sealed)


class Node:
    """One node, from one start to the next. `starts` names them."""

    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim, self.node, self.starts = sim, f"node-{number}", 0
        self.up = False
        self.stands_until = 0.0
        self.ended = False

    def start(self) -> None:
        self.starts += 1
        self.names = 0
        self.beats = 0
        self.segment: SegmentHeader | None = None
        self.records = 0
        self.doomed: list[tuple[int, str, int]] = []
        self.writer = self._writer()
        clock = self.sim.clock
        self.index = SegmentIndex(ram_bytes_max=1 << 30, touches=Touches(now_ns=clock), now_ns=clock)
        self.index.set_purge(SPACE, self.sim.truth.purge)
        shared = {"own": lambda: self.writer.name, "settings": SETTINGS, "now_ns": clock}
        self.followers = Followers(self.sim.authors, self.index, machine=self.node, **shared)  # type: ignore[arg-type]
        self.adoption = Adoption(self.sim.authors, self.followers, **shared)  # type: ignore[arg-type]
        self.recovery = Recovery(
            self.sim.authors,
            self.followers,
            machine=self.node,
            accountable=self.adoption.accountable,
            counted=Uncounted(),
            publish=self._publish,
            bury=self._bury,
            on_found=self._show,
            **shared,  # type: ignore[arg-type]
        )
        self.adoption.on_adopted, self.adoption.on_lost = self.recovery.adopted, self.recovery.lost
        self.snapshots = self._snapshots()
        self.up = True
        self.index.on_wanted = self.followers.wanted

    def die(self) -> None:
        self.up = False
        self.followers.close()
        self.snapshots.close()

    def _writer(self) -> Writer:
        tail = f"-{self.names}" if self.names else ""
        return Writer(self.sim.authors, f"{self.node}.b{self.starts}{tail}", pages=LOG_PAGES)

    def _snapshots(self) -> Snapshots:
        def throw(path: Path, name: str) -> None:
            self.sim.fuse()
            path.unlink()

        snapshots = Snapshots(
            self.writer.directory,
            is_known=lambda owner16: self.followers.name_of(owner16) is not None,
            throw=throw,
            grace_s=SETTINGS.grace_s,
            now_ns=self.sim.clock,
        )
        self.writer.on_seal = snapshots.sealed
        return snapshots

    # What the keeper does

    def keep(self) -> None:
        self._beat()
        self.index.set_purge(SPACE, self.sim.truth.purge)
        for job in (self.followers.step, self.adoption.step, self.recovery.step, self.snapshots.step):
            for _ in range(STEPS_MAX):
                if not job():
                    break
                self.sim.fuse()
            else:
                raise AssertionError(f"{job} of {self.node} never ends")
        self._delete()
        self.index.tidy()

    def fence(self) -> None:
        """As the author does before he writes after a long silence."""
        directory = self.writer.directory
        if not directory.exists() or highest(directory, self.sim.files) is not None:
            self.names += 1
            self.snapshots.close()
            self.writer = self._writer()
            self.snapshots = self._snapshots()
            self.segment = None

    def _beat(self) -> None:
        self.fence()
        self.beats += 1
        self.writer.beat(self.beats, machine=self.node, pid=1)

    def _publish(self, author: str, header: SegmentHeader, entries: npt.NDArray[np.void], time_s: int) -> None:
        self.sim.fuse()
        self.writer.blocks(entries, segment=header.number, purge=header.purge, owner=author)
        self.sim.fuse()

    def _bury(self, author: str, numbers: Sequence[int]) -> None:
        self.sim.fuse()
        self.writer.tombstone(numbers, owner=author)
        self.sim.fuse()
        self.index.drop_segments(author, numbers)

    def _show(self, author: str, header: SegmentHeader, entries: npt.NDArray[np.void]) -> None:
        segment_id = self.index.add_segment(
            author,
            header.number,
            fingerprint16=SPACE,
            generation=header.generation,
            purge=header.purge,
            record_pages=RECORD_PAGES,
        )
        self.index.add_blocks(segment_id, entries)

    def _delete(self) -> None:
        """What was told dead long enough ago goes, by whomever it was told, and a dead author's directory with nothing in it."""
        now_ns = self.sim.clock()
        for author in self.recovery.owned()[1:]:
            for number in self._segments(author):
                if self.followers.dropped(author, number) and not any(
                    one[1:] == (author, number) for one in self.doomed
                ):
                    self.doomed.append((now_ns + GRACE_NS, author, number))
        for due_ns, author, number in [one for one in self.doomed if one[0] <= now_ns]:
            self.doomed.remove((due_ns, author, number))
            if author in self.recovery.owned():
                self.sim.fuse()
                (self.sim.authors / author / "seg" / f"{number:08d}.seg").unlink(missing_ok=True)
        for author in self.recovery.owned()[1:]:
            directory = self.sim.authors / author
            if directory.exists() and not self._segments(author):
                self.sim.fuse()
                shutil.rmtree(directory)
                self.recovery.left(author)

    def _segments(self, author: str) -> list[int]:
        try:
            return sorted(int(name[:8]) for name in os.listdir(self.sim.authors / author / "seg"))
        except FileNotFoundError:
            return []

    # Deeds

    def write(self) -> None:
        """Record, page, index, told: any of it may be the last thing that it did."""
        truth, chance = self.sim.truth, self.sim.chance
        if self.segment is None or self.records >= RECORDS_MAX or self.segment.purge < truth.purge:
            self.segment = self._new_segment(truth.purge)
        header, index = self.segment, self.records
        self.records += 1
        entries = self.sim.new_key(header.page_of(index))
        place = Place(header.author, header.number, header.page_of(index))
        key = entries["key"][0].tobytes()
        self.sim.fuse()
        self.writer.record(header.number, index, entries[0])
        truth.written.setdefault(key, set()).add(place)
        self.sim.fuse()
        if chance.random() < 0.05:
            self._tear()
        self.writer.blocks(entries, segment=header.number, purge=header.purge)
        self.sim.fuse()
        self._show(header.author, header, entries)
        truth.durable.setdefault(key, set()).add(place)

    def _new_segment(self, purge: int) -> SegmentHeader:
        number = max(self.writer.segments, default=0) + 1
        header = self.writer.make_segment(number, purge=purge)
        self.records = 0
        self.sim.truth.purges[header.author, number] = purge
        return header

    def _tear(self) -> None:
        """Half a page, given up with its number."""
        if self.writer.at < self.writer.pages - 1:
            page = encode_page(LogPage(Kind.TOMBSTONE, self.writer.log, self.writer.at, segments=(1,)))
            self.writer.raw(self.writer.at, bytes(16) + page[16:48])
            self.writer.at += 1
            self.sim.fuse()

    def collect(self) -> None:
        """Tells a segment of its own, or of those that it adopted, dead."""
        author = self.sim.chance.choice(self.recovery.owned())
        active = self.segment.number if self.segment is not None and author == self.writer.name else 0
        numbers = [number for number in self._segments(author) if number != active]
        if not numbers:
            return
        number = self.sim.chance.choice(numbers)
        self.sim.fuse()
        self.writer.tombstone([number], owner="" if author == self.writer.name else author)
        self.sim.truth.dead.add((author, number))
        self.sim.fuse()
        self.index.drop_segments(author, [number])
        self.doomed.append((self.sim.clock() + GRACE_NS, author, number))


class Uncounted:
    """Nobody counts bytes here."""

    def look(self, author: object, is_active: object) -> Iterator[None]:
        yield


class Simulation:
    """`crash`: the chance of a crash at each step that could be the last."""

    def __init__(self, authors: Path, seed: int, *, nodes: int = 3, crash: float = 0.004) -> None:
        self.authors, self.chance, self.clock, self.truth = authors, Random(seed), Clock(), Truth()
        self.crash, self.keys = crash, 0
        self.files = PageFiles(pages_max=1)
        self.crashes = 0
        self.nodes = [Node(self, number) for number in range(nodes)]
        for node in self.nodes:
            node.start()

    def fuse(self) -> None:
        if self.chance.random() < self.crash:
            raise Crashed

    def new_key(self, page: int) -> npt.NDArray[np.void]:
        self.keys += 1
        entries: npt.NDArray[np.void] = np.zeros(1, ENTRY)
        entries[0] = keys_of(self.keys, 1)[0]
        entries["page"] = page
        return entries

    def run(self, steps: int) -> int:
        """Deeds, then silence; gives how many keys a node must find in the end, and found."""
        for _ in range(steps):
            self.clock.go(STEP_S)
            for node in self.nodes:
                self.turn(node)
        self.crash = 0.0
        for node in self.nodes:
            if not node.up:
                node.start()
        for _ in range(round(SETTLE_S / SETTINGS.heartbeat_s)):
            self.clock.go(SETTINGS.heartbeat_s)
            for node in self.nodes:
                node.keep()
        found = {self.truth.check(node.index, node.node) for node in self.nodes}
        newcomer = Node(self, 99)
        newcomer.start()
        self.nodes.append(newcomer)
        for _ in range(4):
            self.clock.go(STEP_S)
            newcomer.keep()
        found.add(self.truth.check(newcomer.index, "who comes last"))
        assert len(found) == 1
        return found.pop()

    def turn(self, node: Node) -> None:
        chance = self.chance
        if not node.up:
            if chance.random() < 0.08:
                node.start()
            return
        if self.clock() < node.stands_until:
            return
        try:
            if chance.random() < 0.01:
                node.stands_until = self.clock() + chance.choice([5, 40]) * 10**9
                return
            node.keep()
            for _ in range(chance.randrange(3)):
                chance.choices([node.write, node.collect, self.purge, self.claim], [20, 5, 0.1, 0.1])[0]()
        except Crashed:
            self.crashes += 1
            node.die()

    def purge(self) -> None:
        self.truth.purge += 1

    def claim(self) -> None:
        """A claim of somebody who died before he had signed it, on an author that is dead."""
        dead = [name for name in os.listdir(self.authors) if name not in {n.writer.name for n in self.nodes if n.up}]
        if dead:
            directory = self.authors / self.chance.choice(sorted(dead))
            claim = highest(directory, self.files)
            (directory / f"adopt.{claim.number + 1 if claim else 1}").touch()

    def close(self) -> None:
        for node in self.nodes:
            if node.up:
                node.die()


assert PAGE_BYTES * RECORD_PAGES * RECORDS_MAX < 1 << 20
