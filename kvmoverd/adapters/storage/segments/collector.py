"""Garbage collection of one root: by whole segments, those of this node's authors and of those it has adopted."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.segments.budgets import Budgets, Excess, Taken, choose_victims, of_limits
from kvmoverd.adapters.storage.segments.census import Census
from kvmoverd.adapters.storage.segments.collector_stats import CollectorCounters
from kvmoverd.adapters.storage.segments.graveyard import Graveyard
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.rooms import Rooms
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.adapters.storage.segments.usage import Room, SegmentFile, Usage
from kvmoverd.adapters.storage.trash import Trash
from kvmoverd.core.store.eviction import SegmentUse, Victim, Why
from kvmoverd.core.store.places import Place

STEP_S = 1.0
"""Period of `Collector.step`."""
REFRESH_S = 5.0
"""How often directories and the filesystem's room are looked at; less often where a look takes long."""
WHOLE_S = 60.0
"""How often all segments are looked at: for those that are dead, or not ours alone to make."""
SALVAGE_S = 5.0
"""How long one segment's hot records may take: those that took longer are lost."""
_REFRESH_PART = 20
_VICTIMS_AT_ONCE = 64
_SEEN_AT_ONCE = 4096
_COUNTED_AT_ONCE = 2048
_SECOND_NS = 10**9


class Writer(Protocol):
    """Whoever writes this node's segments."""

    def active(self, author: str) -> Collection[int]:
        """Segments of this author that take records, or have some under way: none of an author whom it does not write as."""

    def retire(self, fingerprints16: Collection[bytes]) -> None:
        """These namespaces' segments take no more records."""

    def move(self, places: Sequence[Place], timeout_s: float) -> Mapping[Place, Place]:
        """Appends these records anew, where the index finds them from then on: the new places of those that are durable."""


class Owners(Protocol):
    """Whose segments are collected here."""

    def own(self) -> str: ...

    def owned(self) -> Collection[str]:
        """The own author, and adopted ones of whom all logs and tails were read."""

    def left(self, author: str) -> None:
        """Nothing is left of this adopted author: his directory is gone."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A segment that would be dropped now."""

    author: str
    number: int
    size_bytes: int
    why: Why
    salvaged_blocks: int
    idle_s: float


class Collector:
    """`step` is the keeper's job; `make_room` is for threads that meet a full disk; all else is for any thread.

    The trashes of all authors lie side by side.
    """

    def __init__(
        self,
        *,
        budgets: Budgets,
        census: Census,
        touches: Touches,
        usage: Usage,
        graveyard: Graveyard,
        trash: Trash,
        purges: Purges,
        writer: Writer,
        owners: Owners,
        room: Callable[[], Room],
        grace_s: float,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._budgets, self._census, self._touches = budgets, census, touches
        self._usage, self._graveyard, self._trash, self._purges = usage, graveyard, trash, purges
        self._writer, self._owners, self._room = writer, owners, room
        self._grace_ns, self._now_ns = round(grace_s * _SECOND_NS), now_ns
        self._emptied: set[str] = set()
        self._met: set[str] = set()
        self._queue: deque[Victim] = deque()
        self._refresh_due_ns = self._refresh_rest_ns = now_ns()
        self._whole_due_ns = now_ns()
        self._unseen: list[SegmentFile] = []
        self._uncounted: list[SegmentFile] = []
        self._uses: list[SegmentUse] = []
        self._unheard_ns: dict[tuple[str, int], int] = {}
        self.counters = CollectorCounters()
        self._failed: dict[str, str] = {}
        self._rooms = Rooms(
            self.counters,
            census=census,
            usage=usage,
            graveyard=graveyard,
            trash=trash,
            owned=owners.owned,
            is_active=self._is_active,
        )

    def grown(self) -> None:
        """A segment was begun: what there is of them is looked at sooner, so that budgets hold while much is written."""
        self._refresh_due_ns = min(self._refresh_due_ns, self._refresh_rest_ns)

    def hurry(self) -> None:
        """Something was purged: the next step looks at once, and at all segments."""
        self._whole_due_ns = self._refresh_due_ns = 0

    def step(self) -> bool:
        """A bit of all that is due; True when there is more to do. What fails is counted, and all else goes on."""
        self._touches.decay()
        owned = self._owners.owned()
        more = self._graveyard.finish(owned)
        self._graveyard.tell(owned)
        began_ns = self._now_ns()
        if not self._met.issuperset(owned):
            # Their segments count from now on, and those that a killed owner was about to delete are looked for.
            self._met = set(owned)
            self.hurry()
        if began_ns >= self._refresh_due_ns:
            self._refresh_due_ns = began_ns + round(REFRESH_S * _SECOND_NS)
            self._refresh(owned)
            self._refresh_rest_ns = began_ns + _REFRESH_PART * (self._now_ns() - began_ns)
            self._refresh_due_ns = max(self._refresh_due_ns, self._refresh_rest_ns)
        segments, self._unseen = self._unseen[:_SEEN_AT_ONCE], self._unseen[_SEEN_AT_ONCE:]
        with self._trying("dropping what is dead"):
            self._drop_dead(segments)
        with self._trying("choosing what goes"):
            self._choose()
        with self._trying("dropping what was chosen"):
            self._drop_victims()
        self._count()
        return more or bool(self._queue or self._unseen or self._uncounted)

    def notes(self) -> list[str]:
        """What failed since directories were last looked at. For any thread."""
        return [f"{part} failed: {error}" for part, error in list(self._failed.items())]

    def plan(self) -> list[Planned]:
        """What would be dropped now, and why, in this order."""
        uses = self._census.uses(self._usage.segments(self._owners.owned()))
        budgets = self._budgets.copy()
        victims = self._victims(uses, budgets)
        return [
            Planned(use.author, use.number, use.size_bytes, victim.why, len(victim.salvage), use.idle_s)
            for victim in victims
            for use in (victim.use,)
        ]

    def make_room(self, bytes_wanted: int) -> bool:
        """Frees so many bytes at once, of what is ours: in the trash, waiting for it, and alive, coldest first.

        One caller at a time. False: nothing was freed within 10 s, or another caller held this for 5 s. What waits is deleted
        before its grace is over, and nothing is salvaged.
        """
        return self._rooms.make(bytes_wanted)

    def _refresh(self, owned: Collection[str]) -> None:
        """A look at directories and room; what must go is chosen when the last choice has gone."""
        whole = self._now_ns() >= self._whole_due_ns and not self._unseen
        self._failed = {}
        if whole:
            self._whole_due_ns = self._now_ns() + round(WHOLE_S * _SECOND_NS)
        with self._trying("looking at segments"):
            self._usage.refresh(owned, self._is_active)
        if whole:
            self._unseen = self._usage.segments(owned)
            self._unheard_ns = {
                one.name: self._unheard_ns[one.name] for one in self._unseen if one.name in self._unheard_ns
            }
        with self._trying("leaving empty directories"):
            self._leave_empty(owned)
        with self._trying("asking for the room that is left"):
            if not self._queue and not self._uncounted and (self._budgets.limits or self._excess(self._budgets)):
                self._uncounted, self._uses = self._usage.segments(owned), []

    def _choose(self) -> None:
        """Counts the use of some more segments, and chooses when it has all."""
        if not self._uncounted:
            return
        self._uses += self._census.uses(self._uncounted[:_COUNTED_AT_ONCE])
        self._uncounted = self._uncounted[_COUNTED_AT_ONCE:]
        if not self._uncounted:
            uses, self._uses = self._uses, []
            self._queue.extend(self._victims(uses, self._budgets))
            self._retire_old(uses)
            self._retire_beyond(uses)

    def _drop_dead(self, segments: Sequence[SegmentFile]) -> None:
        """Segments that are purged, or that a tombstone names which somebody did not live to follow up, or hold nothing."""
        dead = self._census.dead(segments)
        active = [segment for segment in dead.purged if self._is_active(*segment.name)]
        if active:
            kinds = [self._census.kind(segment) for segment in active]
            self._writer.retire({kind.fingerprint16 for kind in kinds if kind})
        purged = [segment for segment in dead.purged if not self._is_active(*segment.name)]
        if len(purged) < len(dead.purged):
            # Some have records under way: they end in a moment.
            self._whole_due_ns = 0
        self.counters.purged_segments += len(purged)
        self._graveyard.lay_down(purged)
        self._graveyard.lay_down(dead.told)
        # Whatever is about to be said of a segment is said by then.
        now_ns = self._now_ns()
        since_ns = {one.name: self._unheard_ns.get(one.name, now_ns) for one in dead.unheard}
        for segment in segments:
            self._unheard_ns.pop(segment.name, None)
        self._unheard_ns |= since_ns
        long_unheard = [one for one in dead.unheard if now_ns - since_ns[one.name] >= self._grace_ns]
        self.counters.unheard_segments += len(self._graveyard.bury(long_unheard))

    def _leave_empty(self, owned: Collection[str]) -> None:
        """Adopted authors of whom no segment is left: their directories go, as does what lay in their trash."""
        adopted = [author for author in owned if author != self._owners.own()]
        for author in adopted:
            if author not in self._emptied:
                with self._trying(f"taking over the trash of {author}"):
                    self._trash.throw(self._trash.directory.parent / author, f"{author}.trash")
                    self._emptied.add(author)
        leaving = [author for author in adopted if not self._usage.of_author(author)]
        if leaving:
            self._graveyard.repeat(leaving)
        for author in leaving:
            with self._trying(f"leaving {author}"):
                self._trash.throw(self._usage.directory(author), f"{author}.author")
                self._usage.left(author)
                self._owners.left(author)
                self.counters.authors_left += 1
            # What is told of the room taken follows what is deleted soon.
            self.grown()

    def _victims(self, uses: Sequence[SegmentUse], budgets: Budgets) -> list[Victim]:
        return choose_victims(uses, budgets.limits, self._excess(budgets), self._purges.identity)

    def _retire_old(self, uses: Sequence[SegmentUse]) -> None:
        """A segment that still takes records, and got none for longer than they may live, must end to go."""
        for limit, _, some in of_limits(self._budgets.limits, uses, self._purges.identity):
            if limit.ttl_s > 0:
                self._writer.retire({use.fingerprint16 for use in some if use.active and use.age_s > limit.ttl_s})

    def _retire_beyond(self, uses: Sequence[SegmentUse]) -> None:
        """Where all else that goes leaves a limit exceeded, what grows must end to go, the coldest first."""
        going = {id(victim.use) for victim in self._queue}
        for limit, mark, some in of_limits(self._budgets.limits, uses, self._purges.identity):
            left = [use for use in some if id(use) not in going]
            beyond_bytes = sum(use.size_bytes for use in left) - round(limit.bytes_max * mark.high)
            for use in sorted(left, key=lambda use: -use.idle_s) if limit.bytes_max > 0 else ():
                if beyond_bytes > 0 and use.active:
                    self._writer.retire({use.fingerprint16})
                    beyond_bytes -= use.size_bytes

    def _excess(self, budgets: Budgets) -> Excess:
        """What must go. While the use by others is unknown the budgets ask for it only beyond 95 %."""
        size_bytes, inodes = self._usage.totals()
        trash_bytes, trash_files = self._trash.pending()
        dying, dying_bytes, _ = self._graveyard.waiting()
        # What can't be deleted is no room to come.
        leaving_bytes = dying_bytes + max(0, trash_bytes - self._trash.stuck_bytes)
        taken = Taken(size_bytes + trash_bytes, inodes + trash_files, leaving_bytes, dying + trash_files)
        self.counters.used_bytes_now, self.counters.used_inodes_now = taken.size_bytes, taken.inodes
        self.counters.trash_bytes_now = trash_bytes
        excess = budgets.excess(taken, self._room(), unknown=bool(self._census.unknown()))
        self.counters.budget_used_now = budgets.used
        return excess

    def _drop_victims(self) -> None:
        """The next victims of the queue: many that leave nothing behind, or one with hot blocks."""
        ready: list[tuple[Victim, SegmentFile]] = []
        while self._queue and len(ready) < _VICTIMS_AT_ONCE and not (ready and len(self._queue[0].salvage)):
            victim = self._queue.popleft()
            segment = self._usage.find(victim.use.author, victim.use.number)
            if segment is None or not self._may_go(segment, victim):
                continue
            ready.append((victim, segment))
            if len(victim.salvage):
                self._salvage(segment, victim)
                if not self._may_go(segment, victim, moved=True):
                    ready.pop()
                break
        buried = {segment.name for segment in self._graveyard.bury([segment for _, segment in ready])}
        for victim, segment in ready:
            if segment.name in buried:
                self.counters.evicted_segments += 1
                self.counters.evicted_bytes += segment.size_bytes
                self.counters.expired_segments += victim.why is Why.EXPIRED

    def _may_go(self, segment: SegmentFile, victim: Victim, *, moved: bool = False) -> bool:
        """Whether it still may: it may have been pinned since it was chosen, or what is pinned could not be `moved` in time."""
        if segment.name in self._graveyard or self._is_active(*segment.name):
            return False
        kind = self._census.kind(segment)
        if victim.why is Why.EXPIRED or kind is None:
            return True
        own = self._touches.own_pins(kind.segment_id)
        return own is not None and not len(own if moved else np.setdiff1d(own, victim.salvage))

    def _salvage(self, segment: SegmentFile, victim: Victim) -> None:
        """Appends its hot and pinned records anew; heat and pins go along."""
        kind = self._census.kind(segment)
        if kind is None:
            return
        records = {Place(*segment.name, 1 + record * kind.record_pages): record for record in victim.salvage.tolist()}
        moved = self._writer.move(list(records), SALVAGE_S)
        for old, new in moved.items():
            segment_id = self._census.id_of(new)
            if segment_id is not None:
                at = np.array([(new.page - 1) // kind.record_pages], np.uint32)
                count = victim.use.heat[records[old] : records[old] + 1]
                self._touches.add(np.array([segment_id], np.uint32), at, count)
                self._touches.move_pin(kind.segment_id, records[old], segment_id, int(at[0]))
        self.counters.salvaged_blocks += len(moved)
        self.counters.lost_hot_blocks += len(records) - len(moved)

    def _is_active(self, author: str, number: int) -> bool:
        return number in self._writer.active(author)

    @contextlib.contextmanager
    def _trying(self, part: str) -> Iterator[None]:
        """An error ends this part, for now, and no other."""
        try:
            yield
        except OSError as error:
            self.counters.failures += 1
            self._failed[part] = f"{errno_name(error)}: {error}"

    def _count(self) -> None:
        counters = self.counters
        counters.dying_segments_now, counters.dying_bytes_now, counters.oldest_dying_s_now = self._graveyard.waiting()
        counters.unknown_peers_now = len(self._census.unknown())
