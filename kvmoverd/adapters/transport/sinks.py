"""Open sinks: who may write now, and when a forgotten sink is quiet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvmoverd.adapters.memory.iovec import Cursor
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.frames import Status
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Received, Sender, Sink, SinkQuiet


class OpenSink:
    """One opening of a sink. A frame keeps hold of it, so that a later sink of the same id is never taken for it.

    `stop`: byte 0 is 1 once the sink is forgotten; a step that runs looks at it without the interpreter's lock.
    `link_ids`: the links of its sender that frames for it came over.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.stop = bytearray(1)
        self.writers = 0
        self.taken_layers: set[int] = set()
        self.link_ids: set[int] = set()

    @property
    def forgotten(self) -> bool:
        return bool(self.stop[0])


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one frame to write a layer of a sink, and where the writing stands."""

    opened: OpenSink
    destination: Cursor
    layer: int
    first_block: int


REASONS = {
    Status.APPLIED: Reason.OK,
    Status.REFUSED: Reason.CANCELLED,
    Status.MISMATCH: Reason.INTERNAL,
    Status.FAILED: Reason.INTERNAL,
}
"""How a send ends whose frame had this status."""


class FrameRefused(Exception):
    """A frame that may not be applied: status for the other side, the sink's bytes for a mismatch, and words."""

    def __init__(self, status: Status, message: str, detail: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


class Sinks:
    """All methods may be called from any thread; all but `over` hold the lock for less than a microsecond."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._open: dict[int, OpenSink] = {}

    def expect(self, sink: Sink) -> None:
        with self._lock:
            assert sink.sink_id not in self._open, f"sink {sink.sink_id} is open already"
            self._open[sink.sink_id] = OpenSink(sink)

    def forget(self, sink_id: int) -> None:
        """From now on `write` moves nothing through it; `SinkQuiet` follows when the last running step has ended."""
        with self._lock:
            found = self._open.pop(sink_id, None)
            assert found is not None, f"sink {sink_id} is not open"
            found.stop[0] = 1
            if not found.writers:
                self._events.put(SinkQuiet(sink_id))

    def over(self, sender: Sender, link_id: int) -> frozenset[int]:
        """The open sinks that got frames over a link of their sender."""
        with self._lock:
            found = self._open.items()
            return frozenset(sink_id for sink_id, one in found if one.sink.sender == sender and link_id in one.link_ids)

    @contextlib.contextmanager
    def claim(
        self,
        sender: Sender | None,
        sink_id: int,
        layer: int,
        first_block: int,
        payload_bytes: int,
        link_id: int | None = None,
    ) -> Iterator[Claim]:
        """Where a frame of `sender` (None: this process) goes; no other frame gets this layer meanwhile.

        When the body ends, the whole frame is in its slices: it is told, and the layer is never claimed again. When the
        body fails, the layer is free for another try. `link_id`: the link that it comes over, if `over` is to know it.
        Raises `FrameRefused`.
        """
        claim = self.begin(sender, sink_id, layer, first_block, payload_bytes, link_id)
        try:
            yield claim
            self.complete(claim)
        except BaseException:
            self.give_up(claim)
            raise

    def begin(
        self,
        sender: Sender | None,
        sink_id: int,
        layer: int,
        first_block: int,
        payload_bytes: int,
        link_id: int | None = None,
    ) -> Claim:
        """A claim that ends later: by `complete` that does not fail, or by `give_up`. Raises `FrameRefused`."""
        opened = self._enter(sender, sink_id, layer, link_id)
        try:
            destination = _destination(opened.sink, layer, first_block, payload_bytes)
        except BaseException:
            self._free(opened, layer)
            raise
        return Claim(opened, destination, layer, first_block)

    def complete(self, claim: Claim) -> None:
        """The whole frame is in its slices: it is told. Raises `FrameRefused` when the sink was forgotten."""
        sink_id, size_bytes = claim.opened.sink.sink_id, claim.destination.total_bytes
        with self._lock:
            _check_open(claim.opened)
            self._events.put(Received(sink_id, claim.layer, claim.first_block, size_bytes))

    def give_up(self, claim: Claim) -> None:
        """The layer is free for another try."""
        self._free(claim.opened, claim.layer)

    def hold(self, claim: Claim) -> None:
        """From now on a device may write through the sink: it is not quiet before `let_go`. Raises `FrameRefused`."""
        with self._lock:
            _check_open(claim.opened)
            claim.opened.writers += 1

    def let_go(self, claim: Claim) -> None:
        """The device can't write any more."""
        opened = claim.opened
        with self._lock:
            opened.writers -= 1
            if opened.forgotten and not opened.writers:
                self._events.put(SinkQuiet(opened.sink.sink_id))

    def write(self, claim: Claim, step: Callable[[], int]) -> int:
        """Runs one short step that writes through the sink. Raises `FrameRefused` when it was forgotten."""
        self.hold(claim)
        try:
            return step()
        finally:
            self.let_go(claim)

    def _enter(self, sender: Sender | None, sink_id: int, layer: int, link_id: int | None) -> OpenSink:
        with self._lock:
            found = self._open.get(sink_id)
            if found is None or found.sink.sender != sender:
                raise FrameRefused(Status.REFUSED, f"sink {sink_id} is not open here for {_name(sender)}")
            if layer in found.taken_layers:
                text = f"sink {sink_id} has layer {layer} already, or it is on its way"
                raise FrameRefused(Status.REFUSED, text)
            found.taken_layers.add(layer)
            if link_id is not None:
                found.link_ids.add(link_id)
            return found

    def _free(self, opened: OpenSink, layer: int) -> None:
        with self._lock:
            opened.taken_layers.remove(layer)


def _check_open(opened: OpenSink) -> None:
    if opened.forgotten:
        raise FrameRefused(Status.REFUSED, f"sink {opened.sink.sink_id} was closed while the frame came")


def _name(sender: Sender | None) -> str:
    return f"{sender[0]} of boot {sender[1]}" if sender is not None else "sends of this process"


def _destination(sink: Sink, layer: int, first_block: int, payload_bytes: int) -> Cursor:
    slices = sink.resolve(layer, first_block)
    if slices is None:
        raise FrameRefused(Status.REFUSED, f"sink {sink.sink_id} does not allow layer {layer} at block {first_block}")
    destination = Cursor(slices)
    if destination.total_bytes != payload_bytes:
        size_bytes = destination.total_bytes
        text = f"sink {sink.sink_id} has {size_bytes} bytes for layer {layer}, the frame has {payload_bytes}"
        raise FrameRefused(Status.MISMATCH, text, size_bytes)
    return destination
