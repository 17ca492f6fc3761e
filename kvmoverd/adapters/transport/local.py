"""Copies between memories of this process, pool and engines' regions, by a few threads that take them in the order given."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.memory.iovec import CopyStep, Cursor
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.sinks import REASONS, Claim, FrameRefused, Sinks
from kvmoverd.adapters.transport.threads import NO_THREAD, Threads
from kvmoverd.core.status import Reason
from kvmoverd.ports.memory import Memory
from kvmoverd.ports.transport import IoVec, Send, Sent

IDLE_WAIT_S = 60.0
"""A worker looks up at least so often; it is woken for work."""


def apply_locally(sinks: Sinks, send: Send, choose: Callable[[IoVec, IoVec], CopyStep]) -> Sent:
    """Copies a send into a sink of this process, step by step, so that a forgotten sink is left soon.

    `choose`: the step for a destination and a source.
    """
    try:
        source = Cursor(send.source)
        with sinks.claim(None, send.sink_id, send.layer, send.first_block, source.total_bytes) as claim:
            destination = claim.destination
            step = choose(destination.slices, source.slices)
            if (
                claim.opened.sink.on_sums is not None
                and step is iovec.copy_compiled
                and iovec.SUMS
                and source.left_bytes
            ):
                _copy_summed(sinks, claim, source, send.layer)
            while source.left_bytes:
                sinks.write(claim, lambda: step(destination, source, claim.opened.stop))
    except FrameRefused as refused:
        return Sent(send.op_id, REASONS[refused.status], 0, str(refused))
    except Exception as error:  # noqa: BLE001 - whatever `resolve` or the copy did: the send ends, and says so
        return Sent(send.op_id, Reason.INTERNAL, 0, f"copy failed: {error!r}")
    return Sent(send.op_id, Reason.OK, source.total_bytes)


def _copy_summed(sinks: Sinks, claim: Claim, source: Cursor, layer: int) -> None:
    """Copies all, unless it is stopped, and tells the sums."""
    sink = claim.opened.sink
    assert sink.sum_ends is not None and sink.on_sums is not None, f"sink {sink.sink_id} has no ends of sums"
    sums = np.empty((source.total_bytes // int(sink.sum_ends[-1]), len(sink.sum_ends)), np.uint32)
    sinks.write(claim, partial(iovec.copy_summed, claim.destination, source, sink.sum_ends, sums, claim.opened.stop))
    if not source.left_bytes:
        sink.on_sums(layer, sums)


class CopyChoice:
    """Which loop copies: the compiled one, or the kernel's where that was not built or an engine can take memory away.

    GPU memory is copied by CUDA, always: the processor can't touch it. `arena`: the memory with the largest pages; the
    kernel should pin its side of a copy. `regions`: who knows what is on a GPU and what can vanish; None: nothing is, and
    nothing can. `compiled` False: only the kernel's.
    """

    def __init__(
        self, arena: Memory | None, regions: Regions | None = None, *, compiled: bool = iovec.COMPILED
    ) -> None:
        refusal = iovec.pull_refusal()
        self._by_slices = refusal is not None
        self._compiled = compiled
        self._arena = range(arena.address, arena.address + arena.size_bytes) if arena is not None else range(0)
        self._regions = regions
        kernel = "process_vm_readv" if refusal is None else f"a call per slice ({refusal})"
        self._text = f"compiled, {kernel} for hugetlb regions" if compiled else kernel

    @property
    def text(self) -> str:
        """E.g. "compiled, process_vm_readv for hugetlb regions"; what CUDA does too, once there is GPU memory."""
        gpu_text = self._regions.gpu_text if self._regions is not None else ""
        return f"{self._text}; {gpu_text}" if gpu_text else self._text

    def step(self, destination: IoVec, source: IoVec) -> CopyStep:
        gpu_step = self._regions.gpu_step(destination, source) if self._regions is not None else None
        if gpu_step is not None:
            return gpu_step
        if self._compiled and not self._may_vanish(destination, source):
            return iovec.copy_compiled
        if self._by_slices:
            return iovec.copy_by_slices
        if not self._arena or not len(source) or int(source[0, 0]) in self._arena:
            return iovec.copy_pinning_source
        return iovec.copy_pinning_destination

    def _may_vanish(self, destination: IoVec, source: IoVec) -> bool:
        regions = self._regions
        return regions is not None and (regions.may_vanish(destination) or regions.may_vanish(source))


class LocalCopies:
    """A bounded queue and `copy_threads` threads. Layers of one sink may be copied at once: each is ready by itself.

    While one thread keeps the books of a copy, another moves bytes: together they keep a core's memory bandwidth busy.
    """

    def __init__(
        self, sinks: Sinks, events: Events, threads: Threads, *, copy_threads: int, queue_max: int, choice: CopyChoice
    ) -> None:
        self._sinks = sinks
        self._events = events
        self._queue_max = queue_max
        self._choice = choice
        self._waiting: deque[Send] = deque()
        self._running = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = threads
        self._threads_max = copy_threads
        self._threads_missing = copy_threads

    def submit(self, send: Send) -> None:
        with self._changed:
            queued = len(self._waiting) + self._running
            if self._closed:
                self._events.put(Sent(send.op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
            elif queued >= self._queue_max:
                text = f"{queued} copies wait or run, transport.queue_max is {self._queue_max}"
                self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, text))
            elif not self._has_thread():
                self._events.put(Sent(send.op_id, Reason.POOL_EXHAUSTED, 0, NO_THREAD))
            else:
                self._waiting.append(send)
                self._changed.notify()

    def stop(self) -> None:
        """Ends all that waits; the copy under way in each thread ends by itself, it is short."""
        with self._changed:
            self._closed = True
            while self._waiting:
                send = self._waiting.popleft()
                self._events.put(Sent(send.op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
            self._changed.notify_all()

    def _has_thread(self) -> bool:
        """The first sends bring the threads: a transport that only talks to other daemons has none of them.

        Where the system gives fewer than wanted, those there are do the work, and the next send tries again.
        """
        if self._threads_missing and self._threads.start(f"copy-{self._threads_missing}", self._work):
            self._threads_missing -= 1
        return self._threads_missing < self._threads_max

    def _work(self) -> None:
        sent: Sent | None = None
        while (send := self._take(ended=sent is not None)) is not None:
            sent = apply_locally(self._sinks, send, self._choice.step)
            self._events.put(sent)

    def _take(self, *, ended: bool) -> Send | None:
        """The next copy, once the one before has `ended`; None when there will be none."""
        with self._changed:
            self._running -= ended
            while not self._waiting and not self._closed:
                self._changed.wait(IDLE_WAIT_S)
            if self._closed:
                return None
            self._running += 1
            return self._waiting.popleft()
