"""The storage of a node: one root or several behind one port, each with deadlines and a breaker of its own.

Reads go to the roots in the order of the config: to the first whose index knows the block, then to those that may have it
all the same. Writes go to the main root; what is durable there is copied to the others as far as they can take it. An op
that takes too long fails for its owner, and its slot comes back with a second completion when the device has let go.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import assert_never

from kvmoverd.adapters.storage.roots_calls import close_all
from kvmoverd.adapters.storage.roots_index import RootsIndex
from kvmoverd.adapters.storage.roots_namespaces import RootsNamespaces
from kvmoverd.adapters.storage.roots_root import Root, RootSettings
from kvmoverd.adapters.storage.roots_routes import Routes
from kvmoverd.adapters.storage.roots_timer import BeatTimer
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import (
    BlockProbe,
    BlockRead,
    BlockWrite,
    Storage,
    StorageCounters,
    StorageDone,
    StorageFacts,
    StorageOp,
)

QUARANTINE_SHARE = 0.1
"""Of the pool: a root that keeps more of it from ops that were given up is refused until they come back."""
COPIES_MAX = 64
"""Blocks whose copies are being made; their slots stay with the devices that long. Those of more blocks are dropped."""
BEAT_S_MIN, BEAT_S_MAX = 0.02, 0.5
BEATS = 16
"""In the shortest deadline of a root: so late an overdue op is noticed at most."""


class RootSet(RootsNamespaces):
    """Storage port over one storage or several, in the order of reading; exactly one of them is main.

    `left_out`: roots that could not be opened, for status. `on_quiet` is called when all are closed and quiet. All but
    `open_namespace`, the purges and `close` is for the loop.
    """

    def __init__(
        self,
        storages: Sequence[tuple[Storage, RootSettings]],
        *,
        pool_bytes: int,
        left_out: Sequence[StorageFacts] = (),
        on_quiet: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_s, self._lost_s = clock_s, 0.0
        self._beat_s = clock_s()
        most_bytes = int(pool_bytes * QUARANTINE_SHARE)
        self.roots = [
            Root(storage, settings, quarantine_bytes_max=most_bytes, now_s=self._beat_s)
            for storage, settings in storages
        ]
        super().__init__(self.roots)
        self.ops_max = sum(root.settings.ops_max for root in self.roots)
        """Of all roots together."""
        self._only = self.roots[0] if len(self.roots) == 1 else None
        self._left_out, self._on_quiet = tuple(left_out), on_quiet
        self.index = RootsIndex(self.roots, self._now_s)
        self._routes = Routes(self.roots)
        self._copying: dict[int, tuple[BlockWrite, deque[Root]]] = {}
        self._ended: deque[StorageDone] = deque()
        self._closing, self._turn = False, 0
        shortest_s = min(settings.io_deadline_s for _, settings in storages)
        self._timer = BeatTimer(min(BEAT_S_MAX, max(BEAT_S_MIN, shortest_s / BEATS)))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._by_fd = {root.storage.fileno(): root for root in self.roots}
        for fd in (*self._by_fd, self._timer.fileno(), self._wake_fd):
            self._epoll.register(fd, select.EPOLLIN)

    # The port ---------------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> StorageFacts:
        """Those of the root, or of the main one under the names of all."""
        own = self.main.facts(self._now_s())
        names = "+".join(root.name for root in self.roots)
        return StorageFacts(names, own.kind, own.io_mode, own.note, own.details)

    def parts(self) -> list[tuple[StorageFacts, StorageCounters]]:
        """In the order of reading; those that were left out come last."""
        now_s = self._now_s()
        found = [(root.facts(now_s), root.storage.counters) for root in self.roots]
        return found + [(facts, StorageCounters()) for facts in self._left_out]

    @property
    def counters(self) -> StorageCounters:
        """Of all roots together."""
        if self._only is not None:
            return self._only.storage.counters
        each = [root.storage.counters for root in self.roots]
        sums = {name: sum(getattr(one, name) for one in each) for name in StorageCounters.__slots__}
        return StorageCounters(**sums)

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """As in the port; what is late is not counted as under way."""
        now_s = self._now_s()
        in_hand = len(ops) - len(self._copying) + sum([len(root.under_way) + len(root.waiting) for root in self.roots])
        assert in_hand <= self.ops_max, f"{in_hand} storage ops are under way, at most {self.ops_max} may be"
        if self._closing:
            for op in ops:
                self._end(StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is closed"))
        elif self._only is not None and self._only.healthy:
            self._only.submit(ops, now_s)
        else:
            self._route(ops, now_s)
        if not (self._timer.running or self._closing):
            self._beat_s = self._clock_s()
            self._timer.start()

    def poll(self, completions_max: int) -> list[StorageDone]:
        """Deadlines are looked at only when all that the devices had to say was heard: what has come is not overdue."""
        taken = self._take_ended(completions_max)
        beat, ready = self._ready()
        for root in ready:
            if len(taken) >= completions_max:
                return taken
            self._collect(root, completions_max - len(taken), taken)
        if beat and len(taken) < completions_max:
            self._beat()
        return taken

    def fileno(self) -> int:
        return -1 if self._epoll.closed else self._epoll.fileno()

    def close(self, timeout_s: float) -> bool:
        """All roots at once. False: a device of some root still has a slot. It may be called again."""
        self._closing = True
        for root in self.roots:
            while root.waiting:
                self._refuse(root.waiting.popleft(), Reason.SHUTTING_DOWN, "the storage is being closed")
        quiet = close_all([root.storage for root in self.roots], timeout_s)
        if quiet and not self._epoll.closed:
            self._epoll.close()
            self._timer.close()
            os.close(self._wake_fd)
            self._on_quiet()
        return quiet

    # Ops out ----------------------------------------------------------------------------------------------------------

    def _route(self, ops: Sequence[StorageOp], now_s: float) -> None:
        batches: dict[str, list[StorageOp]] = {}
        for op, first in zip(ops, self._routes.first(ops), strict=True):
            root = first if first.lets_in(op, now_s) else self._way_round(first, op, now_s)
            if root is not None:
                batches.setdefault(root.name, []).append(op)
        for root in self.roots:
            if batch := batches.get(root.name):
                root.submit(batch, now_s)

    def _way_round(self, root: Root, op: StorageOp, now_s: float) -> Root | None:
        """Another root for an op that its root does not let in; without one the op has failed."""
        refusal = root.refusal(now_s)
        if isinstance(op, BlockWrite):
            root.counters.dropped_writes += 1
            self._refuse(op, Reason.DROPPED, refusal)
            return None
        self._routes.failed(op, root, StorageDone(op.op_id, Reason.IO_ERROR, message=refusal))
        return self._next_root(op, now_s)

    def _next_root(self, op: BlockRead | BlockProbe, now_s: float) -> Root | None:
        """The next root in turn that lets the op in; None when there is none, and the op's end is told."""
        for root in () if self._closing else self._routes.others(op):
            if root.lets_in(op, now_s):
                return root
            self._routes.failed(op, root, StorageDone(op.op_id, Reason.IO_ERROR, message=root.refusal(now_s)))
        self._end(self._routes.verdict(op))
        return None

    def _on(self, op: BlockRead | BlockProbe, now_s: float) -> None:
        root = self._next_root(op, now_s)
        if root is not None:
            root.submit([self._routes.rest(op)], now_s)

    def _refill(self, root: Root, now_s: float) -> None:
        """What waits for a place gets it, or goes another way when the root is left alone by now."""
        if root.waiting and root.healthy:
            root.submit((), now_s)
        elif root.waiting:
            waiting, root.waiting = root.waiting, deque()
            copies = [op.op_id for op in waiting if op.op_id in self._copying]
            others = [op for op in waiting if op.op_id not in self._copying]
            for op_id in copies:
                self._copy_ended(root, op_id, now_s, ok=False)
            for op in others:
                onward = self._way_round(root, op, now_s)
                if onward is not None:
                    onward.submit([op], now_s)

    def _refuse(self, op: StorageOp, reason: Reason, message: str) -> None:
        copied = self._copying.pop(op.op_id, None)
        self._end(StorageDone(op.op_id, Reason.OK if copied else reason, message=message))

    def _end(self, done: StorageDone) -> None:
        """A completion of the set's own."""
        if not self._ended and not self._epoll.closed:
            os.eventfd_write(self._wake_fd, 1)
        self._ended.append(done)

    # Completions in ---------------------------------------------------------------------------------------------------

    def _take_ended(self, completions_max: int) -> list[StorageDone]:
        if not self._ended:
            return []
        taken = [self._ended.popleft() for _ in range(min(len(self._ended), completions_max))]
        if not self._ended and not self._epoll.closed:
            os.eventfd_read(self._wake_fd)
        return taken

    def _ready(self) -> tuple[bool, list[Root]]:
        """Is it time to look at deadlines, and which roots have something? They take turns in going first."""
        if self._epoll.closed:
            return False, self.roots
        beat, ready = False, list[Root]()
        for fd, _ in self._epoll.poll(0):
            root = self._by_fd.get(fd)
            if root is not None:
                ready.append(root)
            beat |= fd == self._timer.fileno()
        if len(ready) > 1:
            self._turn = (self._turn + 1) % len(ready)
            ready = ready[self._turn :] + ready[: self._turn]
        return beat, ready

    def _collect(self, root: Root, completions_max: int, taken: list[StorageDone]) -> None:
        """What a root has to say. The usual case, a good read of the only root, costs a look into its books."""
        now_s, under_way, plain = self._now_s(), root.under_way, self._only is not None
        ended = root.storage.poll(completions_max)
        for done in ended:
            flight = under_way.pop(done.op_id, None)
            if flight is None:
                self._late_came(root, done, now_s, taken)
                continue
            if plain and done.reason is Reason.OK and not root.troubled and type(flight[0]) is not BlockWrite:
                taken.append(done)
                continue
            self._settle(root, flight, done, now_s, taken)
        if ended:
            root.ended_s = now_s
        if root.waiting:
            self._refill(root, now_s)

    def _settle(
        self, root: Root, flight: tuple[StorageOp, float], done: StorageDone, now_s: float, taken: list[StorageDone]
    ) -> None:
        op = flight[0]
        if not done.quiet:
            root.keep_late(*flight)
            self._gave_up(root, op, done.message, now_s)
            return
        root.note_end(done, now_s)
        if isinstance(op, BlockRead):
            self._read_ended(root, op, done, now_s, taken)
        elif isinstance(op, BlockWrite):
            self._write_ended(root, op, done, now_s, taken)
        elif isinstance(op, BlockProbe):
            self._probe_ended(root, op, done, now_s, taken)
        else:
            assert_never(op)

    def _read_ended(self, root: Root, op: BlockRead, done: StorageDone, now_s: float, taken: list[StorageDone]) -> None:
        """A block that was not found, or not whole, may be whole elsewhere; a later range goes on where the first came from."""
        if self._only is not None:
            taken.append(done)
        elif done.reason is Reason.OK:
            self._routes.served(op, root)
            taken.append(done)
        else:
            self._routes.failed(op, root, done)
            if op.first_layer or done.reason is Reason.SHUTTING_DOWN:
                taken.append(self._routes.verdict(op))
            else:
                self._on(op, now_s)

    def _probe_ended(
        self, root: Root, op: BlockProbe, done: StorageDone, now_s: float, taken: list[StorageDone]
    ) -> None:
        if self._only is not None:
            taken.append(done)
        else:
            self._routes.probed(op, root, done)
            self._on(op, now_s)

    def _write_ended(
        self, root: Root, op: BlockWrite, done: StorageDone, now_s: float, taken: list[StorageDone]
    ) -> None:
        """Durable is what the main root says; copies of it are made one after another: each adapter fills in the header."""
        if done.reason is Reason.OK:
            root.good_write_s = now_s
            self._routes.written(op, root)
        if op.op_id in self._copying:
            self._copy_ended(root, op.op_id, now_s, ok=done.reason is Reason.OK)
            return
        copies = self._routes.copies(op) if done.reason is Reason.OK and not self._closing else deque()
        if copies and len(self._copying) >= COPIES_MAX:
            for copy in copies:
                copy.counters.dropped_copies += 1
            copies.clear()
        taken.append(_not_quiet(done) if copies else done)
        if copies:
            self._copying[op.op_id] = op, copies
            self._copy_next(op.op_id, now_s)

    def _copy_ended(self, root: Root, op_id: int, now_s: float, *, ok: bool) -> None:
        root.counters.dropped_copies += not ok
        self._copy_next(op_id, now_s)

    def _copy_next(self, op_id: int, now_s: float) -> None:
        op, copies = self._copying[op_id]
        while copies:
            root = copies.popleft()
            if not self._closing and root.lets_in(op, now_s):
                root.submit([op], now_s)
                return
            root.counters.dropped_copies += 1
        del self._copying[op_id]
        self._end(StorageDone(op_id, Reason.OK))

    # Time -------------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        """Seconds of the set's own clock, which stands still while this process does."""
        return self._clock_s() - self._lost_s

    def _beat(self) -> None:
        """Ops past their deadline are given up; the timer rests when nothing is under way."""
        self._timer.take()
        clock_s = self._clock_s()
        gap_s, self._beat_s = clock_s - self._beat_s, clock_s
        if gap_s > 2 * self._timer.beat_s:
            self._lost_s += gap_s - self._timer.beat_s
        now_s = self._now_s()
        for root in self.roots:
            for op, age_s in root.take_overdue(now_s):
                self._gave_up(root, op, f"{root.name} has not answered for {age_s:.1f} s", now_s)
            if root.is_stalled(now_s):
                root.trip(f"all {root.settings.ops_max} places are taken and nothing has ended for long", now_s)
            self._refill(root, now_s)
        if not any(root.under_way for root in self.roots):
            self._timer.stop()

    def _gave_up(self, root: Root, op: StorageOp, message: str, now_s: float) -> None:
        """The op's owner is told; its slot stays with the device. A probe has none, and may go on elsewhere."""
        root.note_hang(op.op_id, message, now_s)
        done = StorageDone(op.op_id, Reason.IO_ERROR, message=message, quiet=False)
        if isinstance(op, BlockProbe):
            self._routes.probed(op, root, done)
            self._on(op, now_s)
        elif op.op_id in self._copying:
            root.counters.dropped_copies += 1
        else:
            self._routes.forget(op)
            self._end(done)

    def _late_came(self, root: Root, done: StorageDone, now_s: float, taken: list[StorageDone]) -> None:
        op = root.late_came(done, now_s)
        if op.op_id in self._copying:
            self._copy_next(op.op_id, now_s)
        elif not isinstance(op, BlockProbe):
            taken.append(done)


def _not_quiet(done: StorageDone) -> StorageDone:
    """The same end, while copies are still being made."""
    return StorageDone(done.op_id, done.reason, done.moved_bytes, message=done.message, place=done.place, quiet=False)
