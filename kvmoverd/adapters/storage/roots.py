"""The storage of a node: one root or several behind one port, each with deadlines and a breaker of its own.

Reads go to the roots in the order of the config: to the first whose index knows the block, then to those that may have it
all the same. Writes go to the main root; what is durable there is copied to the others as far as they can take it. An op
that takes too long fails for its owner, and its slot comes back with a second completion when the device has let go.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from kvmoverd.adapters.storage.roots_calls import close_all
from kvmoverd.adapters.storage.roots_index import RootsIndex
from kvmoverd.adapters.storage.roots_keeper import RootsKeeper
from kvmoverd.adapters.storage.roots_namespaces import RootsNamespaces
from kvmoverd.adapters.storage.roots_open import LATE_CLOSE_S
from kvmoverd.adapters.storage.roots_root import Root, RootSettings, counters_of_all, facts_of_all
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

log = logging.getLogger(__name__)

QUARANTINE_SHARE = 0.1
"""Of the pool: a root that keeps more of it from ops that were given up is refused until they come back."""
BEAT_S_MIN, BEAT_S_MAX = 0.02, 0.5
BEATS = 16
"""In the shortest deadline of a root: so late an overdue op is noticed at most."""


class RootSet(RootsNamespaces):
    """Storage port over one storage or several, in the order of reading; exactly one of them is main.

    A copy that could not be opened is an `AbsentStorage` in its place. `keeps`: a thread looks after the copies. `on_quiet` is
    called when all are closed and quiet. All but `open_namespace`, the purges and `close` is for the loop.
    """

    def __init__(
        self,
        storages: Sequence[tuple[Storage, RootSettings]],
        *,
        pool_bytes: int,
        keeps: bool = True,
        on_quiet: Callable[[], None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        shortest_s = min(settings.io_deadline_s for _, settings in storages)
        self._timer = BeatTimer(min(BEAT_S_MAX, max(BEAT_S_MIN, shortest_s / BEATS)), clock_s)
        self._now_s = self._timer.now_s
        most_bytes = int(pool_bytes * QUARANTINE_SHARE)
        super().__init__(
            [
                Root(storage, settings, quarantine_bytes_max=most_bytes, now_s=self._now_s())
                for storage, settings in storages
            ],
            self._now_s,
        )
        self.ops_max = sum(root.settings.ops_max for root in self.roots)
        """Of all roots together."""
        self._only = self.roots[0] if len(self.roots) == 1 else None
        self._on_quiet = on_quiet
        self.index = RootsIndex(self.roots, self._now_s, self.doubt)
        self._routes = Routes(self.roots)
        self._ended: deque[StorageDone] = deque()
        self._closing, self._turn = False, 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._by_fd = {root.storage.fileno(): root for root in self.roots if not root.is_absent}
        for fd in (*self._by_fd, self._timer.fileno(), self._wake_fd):
            self._epoll.register(fd, select.EPOLLIN)
        self._joining = threading.Lock()
        self.keeper = RootsKeeper(self, self._join)
        if keeps and self.copy_roots:
            self.keeper.start()

    # The port ---------------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> StorageFacts:
        """Those of the root, or of the main one under the names of all."""
        return facts_of_all(self.roots, self.main, self._now_s())

    def parts(self) -> list[tuple[StorageFacts, StorageCounters]]:
        """In the order of reading."""
        now_s = self._now_s()
        return [(root.facts(now_s), root.storage.counters) for root in self.roots]

    @property
    def counters(self) -> StorageCounters:
        """Of all roots together."""
        return counters_of_all(self.roots) if self._only is None else self._only.storage.counters

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """As in the port; what is late is not counted as under way."""
        now_s = self._now_s()
        in_hand = len(ops) - len(self.copying) + sum([len(root.under_way) + len(root.waiting) for root in self.roots])
        assert in_hand <= self.ops_max, f"{in_hand} storage ops are under way, at most {self.ops_max} may be"
        if self._closing:
            for op in ops:
                self._end(StorageDone(op.op_id, Reason.SHUTTING_DOWN, message="the storage is closed"))
        elif self._only is not None and self._only.healthy:
            self._only.submit(ops, now_s)
        else:
            self._route(ops, now_s)
        if not (self._timer.running or self._closing):
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
        with self._joining:
            self._closing = True
        self.keeper.close()
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

    def _join(self, root: Root, storage: Storage) -> None:
        """A copy that was left out is there now. For the keeper's thread: nobody asks the root before it opens a namespace."""
        with self._joining:
            if self._closing:
                storage.close(LATE_CLOSE_S)
                return
            root.storage = storage
            self._by_fd[storage.fileno()] = root
            self._epoll.register(storage.fileno(), select.EPOLLIN)
        log.info("storage %s has come", root.name)

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
            copies = [op.op_id for op in waiting if op.op_id in self.copying]
            others = [op for op in waiting if op.op_id not in self.copying]
            for op_id in copies:
                self.copying.ended(op_id, root, ok=False)
                self._copy_next(op_id, now_s)
            for op in others:
                onward = self._way_round(root, op, now_s)
                if onward is not None:
                    onward.submit([op], now_s)

    def _refuse(self, op: StorageOp, reason: Reason, message: str) -> None:
        is_copy = self.copying.end(op.op_id)
        self._end(StorageDone(op.op_id, Reason.OK if is_copy else reason, message=message))

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
        op, begun_s = flight
        if not done.quiet:
            root.keep_late(*flight)
            self._gave_up(root, op, done.message, now_s)
            return
        root.note_end(done, now_s)
        if isinstance(op, BlockProbe):
            self._probe_ended(root, op, done, now_s, taken)
        elif isinstance(op, BlockWrite) and op.op_id in self.copying:
            self._copy_ended(root, op, done, now_s)
        elif isinstance(op, BlockRead):
            if not self._read_ended(root, op, done, begun_s, taken):
                self._on(op, now_s)
        elif isinstance(op, BlockWrite):
            self._write_ended(root, op, done, begun_s, taken)
        else:
            assert_never(op)

    def _read_ended(
        self, root: Root, op: BlockRead, done: StorageDone, begun_s: float, taken: list[StorageDone]
    ) -> bool:
        """False: a block that was not found, or not whole, may be whole elsewhere; later ranges come from where the first did."""
        if self._only is not None:
            taken.append(done)
        elif done.reason is Reason.OK:
            whole_s = self._routes.served(op, root, begun_s)
            is_for_copy = self.copying.fills and root is self.main and whole_s is not None and not self._closing
            self._take_or_copy(
                done, whole_s is not None and is_for_copy and self.copying.begin_fill(op, whole_s), taken
            )
        else:
            self._routes.failed(op, root, done)
            if not op.first_layer and done.reason is not Reason.SHUTTING_DOWN:
                return False
            taken.append(self._routes.verdict(op))
        return True

    def _take_or_copy(self, done: StorageDone, copies: bool, taken: list[StorageDone]) -> None:
        """Tells a good end; if copies are to be made, the slot comes home after them."""
        if not copies:
            taken.append(done)
            return
        taken.append(replace(done, quiet=False))
        self._copy_next(done.op_id, self._now_s())

    def _probe_ended(
        self, root: Root, op: BlockProbe, done: StorageDone, now_s: float, taken: list[StorageDone]
    ) -> None:
        if self._only is not None or op.looks:
            taken.append(done)
        else:
            self._routes.probed(op, root, done)
            self._on(op, now_s)

    def _write_ended(
        self, root: Root, op: BlockWrite, done: StorageDone, begun_s: float, taken: list[StorageDone]
    ) -> None:
        """Durable is what the main root says."""
        is_good = self._note_write(root, op, done)
        self._take_or_copy(done, is_good and not self._closing and self.copying.begin(op, begun_s), taken)

    def _copy_ended(self, root: Root, op: BlockWrite, done: StorageDone, now_s: float) -> None:
        self.copying.ended(op.op_id, root, ok=self._note_write(root, op, done))
        self._copy_next(op.op_id, now_s)

    def _note_write(self, root: Root, op: BlockWrite, done: StorageDone) -> bool:
        if done.reason is not Reason.OK:
            return False
        root.good_write_s = self._now_s()
        self._routes.written(op, root)
        return True

    def _copy_next(self, op_id: int, now_s: float) -> None:
        onward = None if self._closing else self.copying.next(op_id, now_s)
        if onward is not None:
            root, op = onward
            root.submit([op], now_s)
        else:
            self.copying.end(op_id)
            self._end(StorageDone(op_id, Reason.OK))

    # Time -------------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Ops past their deadline are given up; the timer rests when nothing is under way."""
        self._timer.take()
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
        elif op.op_id in self.copying:
            root.counters.dropped_copies += 1
        else:
            self._routes.forget(op)
            self._end(done)

    def _late_came(self, root: Root, done: StorageDone, now_s: float, taken: list[StorageDone]) -> None:
        op = root.late_came(done, now_s)
        if op.op_id in self.copying:
            self._copy_next(op.op_id, now_s)
        elif not isinstance(op, BlockProbe):
            taken.append(done)
