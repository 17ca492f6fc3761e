"""One root among others: what it has under way, how long that takes, and whether it may be asked at all."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.roots_absent import AbsentStorage
from kvmoverd.adapters.storage.roots_calls import RootCalls
from kvmoverd.adapters.storage.roots_marks import DiskMarks, Marks, RamMarks
from kvmoverd.core.breaker import Breaker
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, Storage, StorageCounters, StorageDone, StorageFacts, StorageOp

log = logging.getLogger("kvmoverd.events")

FAILURES_MAX = 5
"""Failures in a row, of the kinds that say that the device is ill, after which it is left alone."""
PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
FAILED_SAY_S = 10.0
"""Of the failures before it is left alone one in so long is logged."""
STALL_SHARE = 0.25
"""Of the deadline. A root whose every place is taken and that has ended nothing for this long fails early."""

_ANSWERS = frozenset({Reason.CORRUPT, Reason.SHORT_READ, Reason.NO_SPACE})
"""Ends that a device in order may have, besides OK."""


@dataclass(frozen=True, slots=True)
class RootSettings:
    """`is_main`: writes must succeed there; another root holds copies. Ops at a time, and seconds that one may take.

    `fill`: a copy gets blocks, too, that are read from the main root. `base`: where its namespaces lie, None: in RAM.
    """

    is_main: bool = True
    ops_max: int = 64
    io_deadline_s: float = 10.0
    fill: bool = True
    base: Path | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tenure:
    """A namespace that a root has open. `token`: of the main root; what was begun before `since_s` may be older than that.

    On the set's own clock, like all times.
    """

    namespace: Namespace
    token: str
    since_s: float


@dataclass(slots=True)
class RootCounters:
    """Totals since the start."""

    late_ops: int = 0
    dropped_writes: int = 0
    """Writes that were not tried, as the root was left alone."""
    dropped_copies: int = 0
    """Copies that were not made, or failed."""
    filled_blocks: int = 0
    """Blocks that were read from the main root, and copied."""
    skipped_fills: int = 0
    """Those that were not, as enough others were under way."""


class Root:
    """The books of one storage. All is for the loop; times are of the set's own clock.

    Ops are under way, waiting for a place, or late: failed for their owners while the device still has their slots. A root
    is `healthy`, left alone after failures ("open", as a breaker), or "refused" while it holds too much of the pool.
    """

    def __init__(self, storage: Storage, settings: RootSettings, *, quarantine_bytes_max: int, now_s: float) -> None:
        self.storage = storage
        self.settings = settings
        self.name = storage.facts.root
        self.calls = RootCalls(self.name)
        self.counters = RootCounters()
        self.under_way: dict[int, tuple[StorageOp, float]] = {}
        self.late: dict[int, tuple[StorageOp, float]] = {}
        self.waiting: deque[StorageOp] = deque()
        self.opened: dict[bytes, Tenure] = {}
        """By fingerprint, the namespaces that the root may be asked for: their manifests were compared, old blocks purged."""
        self.marks: Marks = DiskMarks(settings.base) if settings.base else RamMarks()
        self.namespaces = threading.Lock()
        """Held while one of them is opened or purged, by a thread that may hang."""
        self.healthy = True
        self.quarantined_bytes = 0
        self.why = ""
        self.good_write_s: float | None = None
        self.ended_s = now_s
        self._quarantine_bytes_max = quarantine_bytes_max
        self.troubled = False
        """Failures were counted, or a trial is under way: what ends now is to be looked at."""
        self._breaker = Breaker(failures_max=FAILURES_MAX, pause_s=PAUSE_S, pause_max_s=PAUSE_MAX_S)
        self._trial: int | None = None
        self._said_state, self._failed_said_s = "ok", -FAILED_SAY_S

    # Ops --------------------------------------------------------------------------------------------------------------

    def submit(self, ops: Sequence[StorageOp], now_s: float) -> None:
        """Hands ops on as far as the root has places; the rest waits."""
        room = self.settings.ops_max - len(self.under_way) - len(self.late)
        if self.waiting or len(ops) > room:
            self.waiting.extend(ops)
            ops = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        if not self.under_way:
            self.ended_s = now_s
        under_way = self.under_way
        for op in ops:
            under_way[op.op_id] = op, now_s
        if ops:
            self.storage.submit(ops)

    def has_place(self) -> bool:
        return not self.waiting and len(self.under_way) + len(self.late) < self.settings.ops_max

    def oldest_s(self, now_s: float) -> float:
        """Age of the oldest op that the device has not ended, late ones too."""
        ages = [now_s - next(iter(ops.values()))[1] for ops in (self.under_way, self.late) if ops]
        return max(ages, default=0.0)

    def take_overdue(self, now_s: float) -> list[tuple[StorageOp, float]]:
        """Ops past the deadline, with their ages; they are late from now on. The first under way is the oldest."""
        found = []
        while self.under_way:
            op_id, (op, since_s) = next(iter(self.under_way.items()))
            if now_s - since_s < self.settings.io_deadline_s:
                break
            del self.under_way[op_id]
            self.keep_late(op, since_s)
            found.append((op, now_s - since_s))
        return found

    def keep_late(self, op: StorageOp, since_s: float) -> None:
        """The op is given up, and is the device's until that comes back."""
        self.late[op.op_id] = op, since_s
        self.counters.late_ops += 1
        self.quarantined_bytes += _slot_bytes(op)

    def late_came(self, done: StorageDone, now_s: float) -> StorageOp:
        """The device has let go of a late op; when all that was late came back well, the root is in order again."""
        op, _ = self.late.pop(done.op_id)
        self.quarantined_bytes -= _slot_bytes(op)
        if not self.late and done.reason is Reason.OK:
            self._recovered()
        self._look()
        self.ended_s = now_s
        return op

    # Absence ----------------------------------------------------------------------------------------------------------

    @property
    def is_absent(self) -> bool:
        """It could not be opened yet; nobody asks it for anything."""
        return isinstance(self.storage, AbsentStorage)

    def may_copy(self, fingerprint: bytes, begun_s: float) -> bool:
        """May the root have a copy of what was begun then? Not if a purge may have come between."""
        tenure = self.opened.get(fingerprint)
        return tenure is not None and tenure.since_s < begun_s

    # Health -----------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Too much went wrong; it is left alone, but for a trial now and then."""
        return self._breaker.failures >= FAILURES_MAX

    @property
    def is_refused(self) -> bool:
        """It has too much of the pool."""
        return self.quarantined_bytes > self._quarantine_bytes_max

    def state(self) -> str:
        """As NodeStatus says it."""
        return "refused" if self.is_refused else "open" if self.is_open else "ok"

    def is_promising(self, now_s: float) -> bool:
        """Would an op be let in?"""
        return self.healthy or self._may_try(now_s)

    def lets_in(self, op: StorageOp, now_s: float) -> bool:
        """May the op be submitted? When the pause is over, one at a time is let through, to see."""
        if self.healthy:
            return True
        if not self._may_try(now_s):
            return False
        self._trial = op.op_id
        self.troubled = True
        return True

    def refusal(self, now_s: float) -> str:
        """Why an op is not let in."""
        if self.is_refused:
            return (
                f"{self.name} still has {self.quarantined_bytes} bytes of the pool from ops that were given up, at most "
                f"{self._quarantine_bytes_max} may be"
            )
        wait_s, failures = self._breaker.wait_s(now_s), self._breaker.failures
        if wait_s == 0.0:
            return f"{self.name} failed {failures} times, one op at a time tries it again: {self.why}"
        return f"{self.name} is left alone for {wait_s:.1f} s, it failed {failures} times: {self.why}"

    def note_end(self, done: StorageDone, now_s: float) -> None:
        """What an op's end says of the device. A miss may come from RAM alone, and says nothing."""
        self.ended_s = now_s
        is_trial = done.op_id == self._trial
        if is_trial:
            self._trial = None
            self._look()
        if done.reason is Reason.IO_ERROR:
            self.note_failure(done.message, now_s)
        elif (done.reason is Reason.OK and done.moved_bytes) or (is_trial and done.reason in _ANSWERS):
            self._recovered()

    def note_hang(self, op_id: int, message: str, now_s: float) -> None:
        """An op was given up; when half of the places are lost so, the root is left alone whatever else it did."""
        if op_id == self._trial:
            self._trial = None
        self.note_failure(message, now_s)
        if 2 * len(self.late) >= self.settings.ops_max:
            self.trip(message, now_s)

    def note_failure(self, message: str, now_s: float) -> None:
        self.why = message
        self._breaker.on_failure(now_s)
        self._look()
        if self.healthy and now_s - self._failed_said_s >= FAILED_SAY_S:
            self._failed_said_s = now_s
            log.warning("root_failed", extra={"fields": {"root": self.name, "why": message}})

    def trip(self, why: str, now_s: float) -> None:
        """Leaves the root alone now."""
        self.why = why
        self._breaker.trip(now_s)
        self._look()

    def is_stalled(self, now_s: float) -> bool:
        """Every place is taken, others wait, and nothing has ended for long."""
        silent_s = now_s - self.ended_s
        return bool(self.waiting) and silent_s > STALL_SHARE * self.settings.io_deadline_s

    def _may_try(self, now_s: float) -> bool:
        has_place = len(self.late) < self.settings.ops_max
        return self._trial is None and has_place and not self.is_refused and self._breaker.wait_s(now_s) == 0.0

    def _recovered(self) -> None:
        if self._breaker.failures:
            self._breaker.on_success()
            self._look()

    def _look(self) -> None:
        self.healthy = not (self.is_open or self.is_refused)
        self.troubled = self._breaker.failures > 0 or self._trial is not None
        if self.healthy and not self._breaker.failures:
            self.why = ""
        if (state := self.state()) != self._said_state:
            self._said_state = state
            level = logging.INFO if state == "ok" else logging.WARNING
            fields = {"root": self.name, "state": state, "why": self.why or "it answers again"}
            log.log(level, "root_changed", extra={"fields": fields})

    # Status -----------------------------------------------------------------------------------------------------------

    def facts(self, now_s: float) -> StorageFacts:
        """The storage's own, and what is known of it here."""
        own = self.storage.facts
        if self.is_absent:
            return own
        state, why = self.state(), self.why
        if state != "ok":
            why = self.refusal(now_s)
        elif refusal := own.details.get("refusal"):
            state, why = "refused", str(refusal)
        mine: dict[str, int | str] = {
            "role": "main" if self.settings.is_main else "copy",
            "state": state,
            "why": why,
            "oldest_op_ms": int(1000 * self.oldest_s(now_s)),
            "quarantined_bytes": self.quarantined_bytes,
            "late_completions": self.counters.late_ops,
            "dropped_writes": self.counters.dropped_writes,
            "dropped_copies": self.counters.dropped_copies,
            "filled_blocks": self.counters.filled_blocks,
            "skipped_fills": self.counters.skipped_fills,
            "last_good_write_ms_ago": -1 if self.good_write_s is None else int(1000 * (now_s - self.good_write_s)),
        }
        return StorageFacts(own.root, own.kind, own.io_mode, own.note, {**own.details, **mine})


def facts_of_all(roots: Sequence[Root], main: Root, now_s: float) -> StorageFacts:
    """Those of the main root under the names of all that are there."""
    own = main.facts(now_s)
    names = "+".join(root.name for root in roots if not root.is_absent)
    return StorageFacts(names, own.kind, own.io_mode, own.note, own.details)


def counters_of_all(roots: Sequence[Root]) -> StorageCounters:
    each = [root.storage.counters for root in roots]
    return StorageCounters(**{name: sum(getattr(one, name) for one in each) for name in StorageCounters.__slots__})


def _slot_bytes(op: StorageOp) -> int:
    """Bytes of the pool that the device has for this op."""
    return 0 if isinstance(op, BlockProbe) else op.namespace.layout.record_bytes
