"""What the drivers of a node share. Built once in `daemon.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvmoverd.node.counts import Counts
from kvmoverd.node.write_book import WriteBook
from kvmoverd.ports.clock import Clock
from kvmoverd.ports.observer import Observer

if TYPE_CHECKING:
    from kvmoverd.node.desk import StorageDesk
    from kvmoverd.node.mover import Mover
    from kvmoverd.node.pool import BufferPool
    from kvmoverd.node.reader import BlockReader
    from kvmoverd.node.room import Room


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of requests; durations in seconds."""

    timeout_default_s: float = 60.0
    timeout_max_s: float = 3600.0
    admission_wait_s: float = 10.0
    attach_timeout_s: float = 30.0
    lease_default_s: float = 30.0
    live_max: int = 4096
    queue_max: int = 1024
    leases_max: int = 65_536
    window_layers: int = 4
    drain_s: float = 10.0
    prefetch_bytes: int = 1 << 30
    """Of hinted blocks that nobody has asked for yet, in the pool and on their way there."""


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """How requests are read by several nodes. `helper_nodes`: who may help; empty: any peer."""

    floor_s: float = 0.002
    """What several readers have to gain over one."""
    helpers_max: int = 2
    helper_nodes: tuple[str, ...] = ()
    helps: bool = True
    """Whether this node reads for others."""
    stall_s: float = 1.0
    """A reader that shows no progress for so long is replaced."""
    rebalances: bool = True


class OffLoop(Protocol):
    """Runs blocking work beside the loop, for a bounded time. Raises what the work raises, `StorageUnusable`, `QueueFull`."""

    async def __call__(self, work: Callable[[], T], *, what: str, timeout_s: float) -> T: ...


@dataclass
class Services:
    """Everything a driver needs to carry out actions."""

    node: str
    boot_id: str
    limits: Limits
    clock: Clock
    observer: Observer
    pool: BufferPool
    desk: StorageDesk
    reader: BlockReader
    mover: Mover
    room: Room
    off_loop: OffLoop
    split: SplitSettings = SplitSettings()
    counts: Counts = field(default_factory=Counts)
    writes: WriteBook = field(default_factory=WriteBook)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
