"""The memory that the CNICs may touch: the pool and engines' regions, each registered with every CNIC, found by arrays."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.verbs.book import Keys, NotRegistered
from kvmoverd.adapters.transport.verbs.fabric import Fabric, FabricError, Registration
from kvmoverd.core.errors import BadRegion, QueueFull
from kvmoverd.ports.memory import EngineMemory, GpuRegion, Memory, Near
from kvmoverd.ports.transport import IoVec

log = logging.getLogger(__name__)

POOL_PIECE_BYTES = 1 << 30
REGION_PIECE_BYTES = 64 << 20
"""What is registered in one call: pyverbs keeps the interpreter's lock meanwhile, some milliseconds for pages of 4 KiB."""
STEP_BYTES = 256 << 20
"""After so many bytes it is seen that the region, or all, has gone meanwhile."""
CLOSE_S = 3.0

Choose: TypeAlias = Callable[[Near, Sequence[int]], tuple[int, str]]
"""Which CNIC for memory that is used there, by the number of regions of each, and why. Raises `BadRegion`."""


@dataclass(eq=False)
class _Held:
    """Memory of one owner. `cnic` -1: no CNIC is nearer to it than another."""

    address: int
    size_bytes: int
    cnic: int
    at_once: bool = True
    """Deregistered in its owner's own step: it is one piece, or the descriptor that it came by is closed next."""
    registrations: list[list[Registration]] = field(default_factory=list)
    """With each CNIC, one behind the other, of `step_bytes` each but the last."""
    step_bytes: int = 0
    gone: bool = False

    @property
    def end(self) -> int:
        return self.address + self.size_bytes


@dataclass(frozen=True, slots=True)
class _Table:
    """Pieces on one CNIC in the order of their addresses. Never changed: readers need no lock."""

    starts: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.uint64]
    keys: Keys


class MemoryBook:
    """Implements `Book`. Memory is added and removed by any thread, and looked up by the transport's.

    `fabrics`: the CNICs, in the order in which they are counted. `choose`: which of them a region is near to.
    """

    def __init__(self, fabrics: Sequence[Fabric], choose: Choose) -> None:
        self._fabrics = list(fabrics)
        self._choose = choose
        self._changed = threading.Condition()
        self._held: list[_Held] = []
        self._regions: dict[int, _Held] = {}
        self._busy = 0
        self._kept = False
        """A device did not let go of something."""
        self._closed = False
        self._tables = [_table([], cnic) for cnic in range(len(self._fabrics))]
        self._near: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], list[int]] = _near([])

    @property
    def registered_bytes(self) -> int:
        """With each CNIC."""
        with self._changed:
            return sum(held.size_bytes for held in self._held)

    def users(self) -> list[int]:
        """Regions of each CNIC, by which it is the nearest."""
        with self._changed:
            return self._users()

    def add_pool(self, pool: Memory, piece_bytes: int) -> None:
        """In pieces of about 1 GiB that end where the pool's own do, so that no slot lies in two. Raises `FabricError`."""
        step_bytes = max(piece_bytes, POOL_PIECE_BYTES // piece_bytes * piece_bytes)
        self._register(_Held(pool.address, pool.size_bytes, -1), step_bytes)

    def adopt(self, memory: Memory, near: Near) -> None:
        """Registers a region with every CNIC, until it is closed; what is registered already stays so.

        Takes a second for some gigabytes: not for the loop, and one at a time. Raises `BadRegion`; nothing is registered then.
        Raises `QueueFull` for one that another thread is still at.
        """
        assert isinstance(memory, EngineMemory), f"{memory!r} does not say when it goes"
        with self._changed:
            known = self._regions.get(id(memory))
            if known is not None and known not in self._held:
                raise QueueFull(
                    f"a region of {known.size_bytes} bytes is still being registered, ask again in a moment"
                )
            if known is not None:
                return
            users = self._users()
        cnic, why = self._choose(near, users)
        at_once = memory.size_bytes <= REGION_PIECE_BYTES or isinstance(memory, GpuRegion)
        held = _Held(memory.address, memory.size_bytes, cnic, at_once)
        with self._changed:
            self._regions[id(memory)] = held
        memory.on_close(lambda: self._forget(id(memory), held))
        try:
            self._register(held, REGION_PIECE_BYTES, memory)
        except FabricError as error:
            self._forget(id(memory), held)
            raise BadRegion(f"the region is not taken by the CNICs: {error}", size_bytes=held.size_bytes) from error
        log.info("a region of %d bytes in %s pages goes by %s", held.size_bytes, memory.page_kind, why)

    def keyed(self, cnic: int, slices: IoVec) -> tuple[IoVec, Keys]:
        """As `Book` has it."""
        table = self._tables[cnic]
        if not slices[:, 1].all():
            slices = slices[slices[:, 1] > 0]
        starts = slices[:, 0]
        at = table.starts.searchsorted(starts, side="right") - 1
        if not len(slices):
            return slices, table.keys[at]
        if not len(table.starts) or at.min() < 0:
            raise _unknown(slices, at < 0)
        if (starts + slices[:, 1] <= table.ends[at]).all():
            return slices, table.keys[at]
        return _cut(table, slices, at)

    def preferred(self, slices: IoVec) -> int:
        """As `Book` has it."""
        starts, ends, cnics = self._near
        if not len(slices):
            return -1
        address = slices[0, 0]
        at = int(starts.searchsorted(address, side="right")) - 1
        return cnics[at] if at >= 0 and address < ends[at] else -1

    def close(self) -> bool:
        """Ends all registrations; waits some seconds for those that are being made or ended in other threads.

        False: some are left, and so must the CNICs be.
        """
        with self._changed:
            self._closed = True
            held, self._held = self._held, []
            self._regions.clear()
            self._rebuild()
        kept = sum(not _close_all(each) for each in held) > 0
        until = time.monotonic() + CLOSE_S
        with self._changed:
            while self._busy and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)
            if self._busy:
                log.warning("%d regions are still being registered after %g s", self._busy, CLOSE_S)
            return not (self._busy or self._kept or kept)

    def _users(self) -> list[int]:
        near = [held.cnic for held in self._regions.values()]
        return [near.count(cnic) for cnic in range(len(self._fabrics))]

    def _register(self, held: _Held, piece_bytes: int, memory: Memory | None = None) -> None:
        """Raises `FabricError`; nothing is registered then."""
        with self._changed:
            self._busy += 1
        try:
            held.registrations = [[] for _ in self._fabrics]
            whole = isinstance(memory, GpuRegion)
            held.step_bytes = held.size_bytes if whole else max(1, STEP_BYTES // piece_bytes) * piece_bytes
            for fabric, into in zip(self._fabrics, held.registrations, strict=True):
                for registration in _registering(fabric, held, piece_bytes, memory):
                    into.append(registration)
                    self._check_wanted(held)
            self._keep(held)
        except BaseException:
            self._kept = not _close_all(held) or self._kept
            raise
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _check_wanted(self, held: _Held) -> None:
        if held.gone or self._closed:
            raise FabricError(f"{held.size_bytes} bytes at {held.address:#x} went away meanwhile")

    def _keep(self, held: _Held) -> None:
        with self._changed:
            self._check_wanted(held)
            self._held.append(held)
            self._rebuild()

    def _forget(self, name: int, held: _Held) -> None:
        """Nobody finds it from here on. A large one is deregistered beside the loop: the devices hold its pages until then."""
        with self._changed:
            held.gone = True
            if self._regions.get(name) is held:
                del self._regions[name]
            if held not in self._held:
                return
            self._held.remove(held)
            self._rebuild()
            self._busy += 1
        if held.at_once or not self._in_background(held):
            self._end(held)

    def _in_background(self, held: _Held) -> bool:
        try:
            threading.Thread(target=self._end, args=(held,), name="kvmover-deregister", daemon=True).start()
        except RuntimeError:
            # The system starts no thread: then the loop has to wait.
            return False
        return True

    def _end(self, held: _Held) -> None:
        closed = _close_all(held)
        with self._changed:
            self._kept = self._kept or not closed
            self._busy -= 1
            self._changed.notify_all()

    def _rebuild(self) -> None:
        held = sorted(self._held, key=lambda each: each.address)
        self._tables = [_table(held, cnic) for cnic in range(len(self._fabrics))]
        self._near = _near(held)


def _registering(fabric: Fabric, held: _Held, piece_bytes: int, memory: Memory | None) -> Iterator[Registration]:
    """GPU memory goes by a descriptor that begins some bytes before it, at a page. Raises `FabricError`."""
    if not isinstance(memory, GpuRegion):
        for start in range(held.address, held.end, held.step_bytes):
            yield fabric.register(start, min(held.step_bytes, held.end - start), piece_bytes=piece_bytes)
        return
    if memory.dmabuf_fd < 0:
        text = f"{fabric.name} can't reach {held.size_bytes} bytes of GPU memory without a dmabuf"
        raise FabricError(f"{text}: {memory.dmabuf_refusal}")
    size_bytes = held.size_bytes + memory.dmabuf_offset_bytes
    address = held.address - memory.dmabuf_offset_bytes
    yield fabric.register(address, size_bytes, piece_bytes=size_bytes, dmabuf_fd=memory.dmabuf_fd)


def _close_all(held: _Held) -> bool:
    """False when a device kept something."""
    registrations, held.registrations = held.registrations, []
    kept = False
    for registration in chain.from_iterable(registrations):
        try:
            registration.close()
        except FabricError as error:
            log.warning("%d bytes at %#x stay registered: %s", held.size_bytes, held.address, error)
            kept = True
    return not kept


def _table(held: Sequence[_Held], cnic: int) -> _Table:
    """`held` in the order of addresses."""
    starts, ends = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    keys = [np.zeros((0, 2), np.uint32)]
    for each in held:
        steps = len(each.registrations[cnic])
        for number, registration in enumerate(each.registrations[cnic]):
            start = each.address + number * each.step_bytes
            end = start + each.step_bytes if number + 1 < steps else each.end
            cuts = registration.cuts
            cuts = cuts[(cuts > start) & (cuts < end)]
            starts.append(np.append(np.uint64(start), cuts))
            ends.append(np.append(cuts, np.uint64(end)))
            keys.append(registration.keys(starts[-1], ends[-1] - starts[-1]))
    flat_starts, flat_ends, rows = _flat(np.concatenate(starts), np.concatenate(ends))
    return _Table(flat_starts, flat_ends, np.concatenate(keys)[rows])


def _near(held: Sequence[_Held]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], list[int]]:
    """`held` in the order of addresses."""
    starts = np.array([each.address for each in held], np.uint64)
    ends = np.array([each.end for each in held], np.uint64)
    starts, ends, rows = _flat(starts, ends)
    return starts, ends, [held[row].cnic for row in rows.tolist()]


def _flat(
    starts: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    """Ranges that do not overlap and cover the same, and the row that each is of. `starts` rise.

    Regions overlap where they are parts of one allocation of a GPU, which is opened once: any of their keys will do.
    """
    if (starts[1:] >= ends[:-1]).all():
        return starts, ends, np.arange(len(starts))
    begins, stops = starts.tolist(), ends.tolist()
    found: list[tuple[int, int, int]] = []
    at, following, furthest = begins[0], 0, 0
    while True:
        while following < len(begins) and begins[following] <= at:
            furthest = max(furthest, following, key=stops.__getitem__)
            following += 1
        if stops[furthest] > at:
            found.append((at, stops[furthest], furthest))
            at = stops[furthest]
        elif following < len(begins):
            at = begins[following]
        else:
            break
    columns = list(zip(*found, strict=True))
    return np.array(columns[0], np.uint64), np.array(columns[1], np.uint64), np.array(columns[2], np.intp)


def _cut(table: _Table, slices: IoVec, first: npt.NDArray[np.intp]) -> tuple[IoVec, Keys]:
    """Slices that lie in several pieces; `first`: the piece that each begins in. Raises `NotRegistered` for a gap."""
    slice_ends = slices[:, 0] + slices[:, 1]
    last = table.starts.searchsorted(slice_ends, side="left") - 1
    counts = last - first + 1
    which = np.repeat(np.arange(len(slices)), counts)
    number = np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
    at = first[which] + number
    starts = np.maximum(slices[which, 0], table.starts[at])
    ends = np.minimum(slice_ends[which], table.ends[at])
    covered = np.bincount(which, np.where(ends > starts, ends - starts, 0), len(slices))
    missing = covered != slices[:, 1]
    if missing.any():
        raise _unknown(slices, missing)
    return np.column_stack((starts, ends - starts)), table.keys[at]


def _unknown(slices: IoVec, missing: npt.NDArray[np.bool_]) -> NotRegistered:
    address, size_bytes = slices[int(missing.argmax())].tolist()
    return NotRegistered(
        f"{size_bytes} bytes at {address:#x} lie in no registered memory, as {int(missing.sum())} slices of {len(slices)}"
    )
