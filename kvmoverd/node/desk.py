"""Storage desk: the queues in front of the storage port. Probes first, then reads in the order of need, writes, hints."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node.hand_out import HandOut
from kvmoverd.node.read_meter import ReadMeter
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, Storage, StorageDone, StorageOp

COMPLETIONS_MAX = 64
"""Taken in one step of the loop: some 0.5 ms."""
LOW_PRIORITY = 3
"""Reads with this priority, or a greater number, are nobody's who waits: they are `low` to the storage, and after all else."""
STANDS_BACK_NS = 50_000_000
"""For each step of priority a read stands back so long for those that are due by then, and no longer: none starves."""
NEVER_NS = 1 << 62
ORDER_SPARE = 64
"""Entries of reads that left the queue that the order may carry beside one for each read that waits."""

OnDone = Callable[[StorageDone], None]
"""Called with the completion of an op. After one that is not `quiet` it is called once more, when the device has let go of
the op's slot: until then the slot is the device's."""


Rank = tuple[int, int]
"""Priority, and due time in ns of the node's clock. Of one priority what is due first goes first."""


@dataclass(slots=True)
class _WaitingRead:
    """A read that was not submitted yet."""

    op: BlockRead
    done: OnDone
    rank: Rank


class StorageDesk:
    """At most `ops_max` ops are under way; at most `queue_max` of each kind wait.

    A write is under way until its group is durable. While blocks are read, writes have a quarter of the places; else all but a
    quarter, which is there for reads that come. While any write waits, one may go beside the reads: a buffer that waits to be
    stored comes home however much is read. Reads of `LOW_PRIORITY` count for nothing here: they go when nothing else may. A
    read or a probe that still waits can be dropped; what was submitted ends in its own time. `read_queue_bytes`: what is left
    to read of all blocks that wait or are being read. `on_pumped` is called after each batch of completions, then `on_spare`,
    unless a write or a probe waits. An op that has ended, but whose slot the device still has, is nobody's burden but its
    slot's: it takes no place here.
    """

    def __init__(
        self, storage: Storage, *, ops_max: int, queue_max: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.storage = storage
        self._now_ns = now_ns
        self._meter = ReadMeter()
        self.ops_max = ops_max
        self.queue_max = queue_max
        self.writes_beside_reads_max = max(1, ops_max // 4)
        self.writes_max = max(1, ops_max - ops_max // 4)
        self._ids = itertools.count(1)
        self._reads: dict[int, _WaitingRead] = {}
        self._later_ranges = 0
        self._cut_bytes: dict[int, int] = {}
        """By op: what will not be read of its block, though it lies behind what was."""
        self._ranks: list[tuple[int, Rank]] = []
        self._lines: dict[Rank, deque[int]] = {}
        self._in_lines = 0
        self._probes: dict[int, tuple[StorageOp, OnDone]] = {}
        self._writes: deque[tuple[BlockWrite, OnDone]] = deque()
        self._under_way: dict[int, tuple[StorageOp, OnDone]] = {}
        self._writes_under_way = 0
        self._low_under_way = 0
        self._late: dict[int, tuple[StorageOp, OnDone]] = {}
        self.read_queue_bytes = 0
        self.on_pumped: Callable[[], None] = _nothing
        self.on_spare: Callable[[], None] = _nothing

    def read(
        self,
        namespace: Namespace,
        key: bytes,
        address: int,
        *,
        layers: tuple[int, int] = (0, 0),
        rank: Rank,
        done: OnDone,
        place: Place | None = None,
        rest_from: int = 0,
        end_layer: int = 0,
    ) -> int:
        """Queues a read of layers [first, stop), as `BlockRead` has them, and `rest_from`; `rank` says what goes first.

        `end_layer`: as by `end_at`, if not 0.

        Returns the op's id. Raises `QueueFull`, but not for a block's later ranges: the place of the first one is theirs.
        """
        first_layer, stop_layer = layers
        if not first_layer:
            self._check_queue("block reads", self.reads_waiting())
        op = BlockRead(next(self._ids), namespace, key, address, first_layer, stop_layer, place, rest_from=rest_from)
        self._reads[op.op_id] = _WaitingRead(op, done, rank)
        self._line_up(op.op_id, rank)
        if first_layer:
            self._later_ranges += 1
        else:
            self.read_queue_bytes += _left_bytes(op)
        if end_layer:
            self._cut_bytes[op.op_id] = _cut_bytes(op, end_layer)
        return op.op_id

    def reads_waiting(self) -> int:
        """Blocks that wait to be begun; those that wait for a later range are not among them."""
        return len(self._reads) - self._later_ranges

    def waits(self, op_id: int) -> bool:
        """Is the read still here, so that it can be dropped?"""
        return op_id in self._reads

    def hasten(self, op_id: int, rank: Rank) -> None:
        """Someone more urgent waits for this read too; nothing for one that was submitted, or is as urgent already."""
        waiting = self._reads.get(op_id)
        if waiting is not None and rank < waiting.rank:
            waiting.rank = rank
            self._line_up(op_id, rank)
            self._tidy()

    def drop_read(self, op_id: int) -> bool:
        """Takes a waiting read out of the queue; False when it was submitted already. A dropped read has no completion."""
        waiting = self._take_out(op_id)
        if waiting is None:
            return False
        self.read_queue_bytes -= _left_bytes(waiting.op) - self._cut_bytes.pop(op_id, 0)
        self._tidy()
        return True

    def end_at(self, op_id: int, end_layer: int) -> None:
        """Of the block of this read no layer from `end_layer` on will be read; one that waits here is shortened.

        One that was submitted reads none of these.
        """
        waiting = self._reads.get(op_id)
        op = waiting.op if waiting is not None else self._under_way[op_id][0]
        assert isinstance(op, BlockRead) and op.first_layer < end_layer, f"{op} can't end at layer {end_layer}"
        if waiting is not None and op.layers.stop > end_layer:
            op.stop_layer = end_layer
        self._cut_bytes[op_id] = cut_bytes = _cut_bytes(op, end_layer)
        self.read_queue_bytes -= cut_bytes

    def leave_out(self, size_bytes: int) -> None:
        """The later ranges of a block will not be read."""
        self.read_queue_bytes -= size_bytes

    def write(
        self,
        namespace: Namespace,
        key: bytes,
        parent: bytes,
        depth: int,
        address: int,
        done: OnDone,
        *,
        layer_crcs: tuple[int, ...] = (),
    ) -> None:
        """Queues a write; `layer_crcs` as in `BlockWrite`. Raises `QueueFull`."""
        self._check_queue("block writes", len(self._writes))
        self._writes.append((BlockWrite(next(self._ids), namespace, key, parent, depth, address, layer_crcs), done))

    def probe(self, namespace: Namespace, keys: tuple[bytes, ...], done: OnDone, *, looks: bool = False) -> int:
        """Probes are quick and someone waits for them: they go before all else. Returns the op's id. Raises `QueueFull`.

        `looks` as in `BlockProbe`.
        """
        self._check_queue("probes", len(self._probes))
        op = BlockProbe(next(self._ids), namespace, keys, looks)
        self._probes[op.op_id] = (op, done)
        return op.op_id

    def drop_probe(self, op_id: int) -> None:
        """Nobody waits for it any more; one that was submitted ends in its own time."""
        self._probes.pop(op_id, None)

    def submit(self) -> None:
        """Hands waiting ops to the storage as far as the limits allow; called once after a burst of events."""
        batch: list[StorageOp] = []
        reads = 0
        while len(self._under_way) < self.ops_max and (taken := self._next()):
            op = taken[0]
            self._under_way[op.op_id] = taken
            self._writes_under_way += isinstance(op, BlockWrite)
            self._low_under_way += isinstance(op, BlockRead) and op.low
            reads += isinstance(op, BlockRead)
            batch.append(op)
        if reads:
            self._meter.begun(reads, self._now_ns())
        if batch:
            self.storage.submit(batch)

    def depth(self) -> Depth:
        """What waits here or is under way, and how fast the storage reads, all roots together."""
        now_ns = self._now_ns()
        return Depth(self.read_queue_bytes, self._meter.rate_bytes_per_s(now_ns), self._meter.silent_ns(now_ns))

    def pump(self) -> None:
        """Hands completions to their owners, a bounded number of them: the storage stays readable while it has more."""
        completions = self.storage.poll(COMPLETIONS_MAX)
        handed = HandOut()
        for completion in completions:
            handed.out(self._take, completion)
        self.submit()
        handed.out(lambda pumped: pumped(), self.on_pumped)
        if not (self._writes or self._probes):
            handed.out(lambda spare: spare(), self.on_spare)
        handed.check()

    def _take(self, completion: StorageDone) -> None:
        under_way = self._under_way.pop(completion.op_id, None)
        if under_way is None:
            self._let_go(completion)
            return
        op, done = under_way
        if not completion.quiet:
            self._late[op.op_id] = under_way
        if isinstance(op, BlockRead):
            self._meter.ended(completion.moved_bytes, self._now_ns())
            cut_bytes = self._cut_bytes.pop(op.op_id, 0)
            is_read = completion.reason is Reason.OK
            self.read_queue_bytes -= _read_bytes(op) if is_read else _left_bytes(op) - cut_bytes
            self._low_under_way -= op.low
        self._writes_under_way -= isinstance(op, BlockWrite)
        done(completion)

    def _let_go(self, completion: StorageDone) -> None:
        """The second completion of an op that had failed for taking too long, or of a write whose copies are made now."""
        _, done = self._late.pop(completion.op_id)
        done(completion)

    def drop_writes(self, namespace: Namespace) -> None:
        """Gives up the namespace's writes that still wait: `Reason.DROPPED`."""
        dropped = [(op, done) for op, done in self._writes if op.namespace == namespace]
        self._writes = deque(entry for entry in self._writes if entry[0].namespace != namespace)
        for op, done in dropped:
            done(StorageDone(op.op_id, Reason.DROPPED, message="its namespace was purged"))

    def stop_writes(self, message: str) -> None:
        """Gives up all writes that still wait: `Reason.SHUTTING_DOWN`."""
        while self._writes:
            op, done = self._writes.popleft()
            done(StorageDone(op.op_id, Reason.SHUTTING_DOWN, message=message))

    def writes_waiting(self) -> int:
        """Writes that no device knows of yet."""
        return len(self._writes)

    def writes(self, namespace: Namespace) -> int:
        """Writes of the namespace that were submitted and whose slots the device still has."""
        ops = (op for op, _ in itertools.chain(self._under_way.values(), self._late.values()))
        return sum(isinstance(op, BlockWrite) and op.namespace == namespace for op in ops)

    def late(self) -> int:
        """Ops that have ended for their owners while the device still has their slots."""
        return len(self._late)

    def idle(self) -> bool:
        """Nothing waits and nothing is under way, but for what is late."""
        return not (self._under_way or self._probes or self._writes or self._reads)

    def _check_queue(self, what: str, waiting: int) -> None:
        if waiting >= self.queue_max:
            raise QueueFull(f"{waiting} {what} wait, at most {self.queue_max} may", waiting=waiting)

    def _take_out(self, op_id: int) -> _WaitingRead | None:
        waiting = self._reads.pop(op_id, None)
        if waiting is not None and waiting.op.first_layer:
            self._later_ranges -= 1
        return waiting

    def _tidy(self) -> None:
        """Forgets what left the queue, before it piles up behind a device that hangs."""
        if self._in_lines > 2 * len(self._reads) + ORDER_SPARE:
            self._ranks, self._lines, self._in_lines = [], {}, 0
            for op_id, waiting in self._reads.items():
                self._line_up(op_id, waiting.rank)

    def _line_up(self, op_id: int, rank: Rank) -> None:
        """Reads of one rank, as those of one request are, go in the order they came: one line, one place among the ranks."""
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = deque()
            heapq.heappush(self._ranks, (_goes_at_ns(rank), rank))
        line.append(op_id)
        self._in_lines += 1

    def _first_read(self, *, low: bool) -> _WaitingRead | None:
        """`low`: those that nobody waits for may go, too."""
        while self._ranks and (low or self._ranks[0][1][0] < LOW_PRIORITY):
            line = self._lines[self._ranks[0][1]]
            while line:
                waiting = self._take_out(line.popleft())
                self._in_lines -= 1
                if waiting is not None:
                    return waiting
            del self._lines[heapq.heappop(self._ranks)[1]]
        return None

    def _next(self) -> tuple[StorageOp, OnDone] | None:
        if self._probes:
            return self._probes.pop(next(iter(self._probes)))
        if self._writes and self._under_way and not self._writes_under_way:
            return self._writes.popleft()
        if waiting := self._first_read(low=False):
            return waiting.op, waiting.done
        if self._writes and self._writes_under_way < self._writes_max_now():
            return self._writes.popleft()
        if waiting := self._first_read(low=True):
            waiting.op.low = waiting.rank[0] >= LOW_PRIORITY
            return waiting.op, waiting.done
        return None

    def _writes_max_now(self) -> int:
        """All that waits to be read is under way already."""
        if len(self._under_way) > self._writes_under_way + self._low_under_way:
            return self.writes_beside_reads_max
        return self.writes_max


def _goes_at_ns(rank: Rank) -> int:
    """What stands for a rank in the order."""
    priority, due_ns = rank
    return due_ns + (NEVER_NS if priority >= LOW_PRIORITY else priority * STANDS_BACK_NS)


def _read_bytes(op: BlockRead) -> int:
    """What the op moves; a whole block, the usual case, needs no span."""
    return len(op.span) if op.first_layer or op.stop_layer else op.namespace.layout.record_bytes


def _left_bytes(op: BlockRead) -> int:
    """What is left to read of a block, from this op on: its later ranges are counted from the start."""
    layout = op.namespace.layout
    if op.first_layer:
        return layout.record_bytes - op.span.start
    return layout.rest_bytes(op.rest_from) if op.rest_from else layout.record_bytes


def _cut_bytes(op: BlockRead, end_layer: int) -> int:
    layout = op.namespace.layout
    return len(layout.read_span(end_layer, layout.layer_count))


def _nothing() -> None:
    """Nobody wants to know."""
