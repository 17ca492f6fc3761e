"""A transport over `sim_net`: layers take time, land in halves, and late; the books of sinks are the real ones.

The source is read when the frame leaves or when it arrives, as late as it may be; the destination is written in two halves, and
a sink that was forgotten between them is quiet only after the second. `by_cnic`: frames also land while the receiving process
stands still, and a second half lands though the sink was forgotten meanwhile, as RDMA writes do. Who receives may hear late that
a connection broke: when there is another one already.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim_loop import Process
from sim_net import Connection, Network

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.adapters.transport.sinks import REASONS, Claim, FrameRefused, Sinks
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, RouteLost, Send, Sent, Sink, TransportEvent

LOCAL_S = 0.0005
HEARD_LATE_S_MAX = 5.0


def gather(slices: IoVec) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address, size in slices.tolist())


def scatter(slices: IoVec, content: bytes, first: int, stop: int) -> None:
    """Writes bytes [first, stop) of the content."""
    at = 0
    for address, size in slices.tolist():
        a, b = max(first, at), min(stop, at + size)
        if a < b:
            ctypes.memmove(address + a - at, content[a:b], b - a)
        at += size


@dataclass(eq=False)
class Frame:
    """A send on its way. `content`: what was read of its source, once it was."""

    send: Send
    sender: SimTransport
    content: bytes | None = None
    claim: Claim | None = None
    ended: bool = False


class _Channel:
    """Frames from one daemon to another, in the order sent."""

    def __init__(self, sender: SimTransport, receiver: SimTransport, patience_s: float) -> None:
        self.sender, self.receiver = sender, receiver
        self.link_id = next(sender.link_ids)
        self.connection: Connection = sender.net.connect(sender.process, receiver.process, patience_s)
        self.frames: list[Frame] = []
        self.connection.on_broken.append((sender.process, self._lost_here))
        self.connection.on_broken.append((receiver.process, self._lost_there))

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)
        if self.sender.reads_early:
            frame.content = gather(frame.send.source)
        self.connection.send(self.receiver.process, self.receiver.arrive, frame, self)

    def answer(self, frame: Frame, reason: Reason, message: str = "") -> None:
        self.connection.send(self.sender.process, self.end, frame, reason, message)

    def end(self, frame: Frame, reason: Reason, message: str) -> None:
        if not frame.ended:
            self.frames.remove(frame)
            self.sender.sent(frame, reason, message)

    def _lost_here(self, why: str) -> None:
        self.sender.channels.pop((self.receiver.node, self.receiver.boot_id), None)
        for frame in list(self.frames):
            self.end(frame, Reason.PEER_LOST, why)
        self.sender.put(RouteLost(self.receiver.node, self.receiver.boot_id, inbound=False, message=why))

    def _lost_there(self, why: str) -> None:
        self.receiver.let_go_of(self)
        late = self.receiver.lateness
        late_s = late.random() * HEARD_LATE_S_MAX if late.random() < 0.5 else 0.0
        self.receiver.process.after(late_s, self.receiver.inbound_lost, self, why)


class SimTransport:
    """Both transports of one daemon."""

    endpoint = "sim:1"

    def __init__(
        self, net: Network, process: Process, node: str, boot_id: str, rng: random.Random, patience_s: float
    ) -> None:
        self.net = net
        self.process = process
        self.node = node
        self.boot_id = boot_id
        self.random = rng
        self.patience_s = patience_s
        self.reads_early = rng.random() < 0.5
        self.by_cnic = rng.random() < 0.5
        self.layer_s = rng.choice([0.0001, 0.002, 0.01])
        self.lateness = random.Random(f"late {rng.random()}")
        self.link_ids = itertools.count(1)
        self.frame_fails: Callable[[], bool] = lambda: False
        self.directory: dict[tuple[str, str], SimTransport] = {}
        self.channels: dict[tuple[str, str], _Channel] = {}
        self.on_events: Callable[[], None] = lambda: None
        self.sent_bytes: dict[str, int] = {}
        self._events: deque[TransportEvent] = deque()
        self._sinks = Sinks(self)  # type: ignore[arg-type]
        self._landing: dict[Frame, _Channel | None] = {}
        self._woken = False
        self._closed = False

    # The port ---------------------------------------------------------------------------------------------------------

    def expect(self, sink: Sink) -> None:
        self._sinks.expect(sink)

    def forget(self, sink_id: int) -> None:
        self._sinks.forget(sink_id)

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            frame = Frame(send, self)
            if self._closed:
                self.put(Sent(send.op_id, Reason.SHUTTING_DOWN, 0, "the transport is closed"))
            elif send.route is None:
                self.process.after(LOCAL_S * self.random.random(), self.arrive, frame, None)
            else:
                self._send_remote(frame, (send.route.node, send.route.boot_id))

    def poll(self, events_max: int) -> list[TransportEvent]:
        self._woken = False
        taken = [self._events.popleft() for _ in range(min(events_max, len(self._events)))]
        if self._events:
            self._wake()
        return taken

    def fileno(self) -> int:
        return -1

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        for channel in list(self.channels.values()):
            channel.connection.break_off("the transport was closed")
        return True

    # Events -----------------------------------------------------------------------------------------------------------

    def put(self, event: TransportEvent) -> None:
        """Also for the sinks: what a transport's threads tell the loop."""
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.process.soon(self.on_events)

    def sent(self, frame: Frame, reason: Reason, message: str) -> None:
        frame.ended = True
        size_bytes = int(frame.send.source[:, 1].sum()) if reason is Reason.OK else 0
        self.put(Sent(frame.send.op_id, reason, size_bytes, message))

    # Frames -----------------------------------------------------------------------------------------------------------

    def _send_remote(self, frame: Frame, place: tuple[str, str]) -> None:
        channel = self.channels.get(place)
        if channel is None:
            there = self.directory.get(place)
            if there is None or (there.process.is_dead and not self.net.is_cut(self.process, there.process)):
                self.process.soon(self.sent, frame, Reason.PEER_LOST, "connection refused")
                self.put(RouteLost(*place, inbound=False, message="connection refused"))
                return
            channel = self.channels[place] = _Channel(self, there, self.patience_s)
        channel.send(frame)

    def arrive(self, frame: Frame, channel: _Channel | None) -> None:
        """The first half of a frame is here."""
        if frame.sender.process.is_dead and frame.content is None:
            return
        if frame.content is None:
            frame.content = gather(frame.send.source)
        send, sender = frame.send, frame.sender
        who, link_id = (None, None) if channel is None else ((sender.node, sender.boot_id), channel.link_id)
        try:
            if self.frame_fails():
                raise FrameRefused(Status.FAILED, "as the seed wants")
            claim = self._sinks.begin(who, send.sink_id, send.layer, send.first_block, len(frame.content), link_id)
        except FrameRefused as refused:
            self._answer(frame, channel, REASONS[refused.status], str(refused))
            return
        self._sinks.hold(claim)
        frame.claim = claim
        self._landing[frame] = channel
        half = self.random.randrange(len(frame.content) + 1)
        scatter(claim.destination.slices, frame.content, 0, half)
        context = self.net.context if self.by_cnic else self.process.context
        delay_s = self.layer_s * self.random.random()
        self.net.loop.call_later(delay_s, self._land, frame, half, context=context)

    def _land(self, frame: Frame, half: int) -> None:
        if self.process.is_dead or frame not in self._landing:
            return
        channel, claim = self._landing.pop(frame), frame.claim
        assert claim is not None and frame.content is not None, "a frame lands that never came"
        if self.by_cnic or not claim.opened.forgotten:
            scatter(claim.destination.slices, frame.content, half, len(frame.content))
        self._sinks.let_go(claim)
        try:
            self._sinks.complete(claim)
        except FrameRefused as refused:
            self._sinks.give_up(claim)
            self._answer(frame, channel, REASONS[refused.status], str(refused))
        else:
            self._answer(frame, channel, Reason.OK)

    def _answer(self, frame: Frame, channel: _Channel | None, reason: Reason, message: str = "") -> None:
        if channel is None:
            self.process.soon(self.sent, frame, reason, message)
        else:
            channel.answer(frame, reason, message)

    def let_go_of(self, channel: _Channel) -> None:
        """Half frames of a broken connection are given up."""
        for frame in [frame for frame, over in self._landing.items() if over is channel]:
            del self._landing[frame]
            assert frame.claim is not None, "a frame is landing that never came"
            self._sinks.give_up(frame.claim)
            self._sinks.let_go(frame.claim)

    def inbound_lost(self, channel: _Channel, why: str) -> None:
        sender = (channel.sender.node, channel.sender.boot_id)
        self.put(RouteLost(*sender, inbound=True, message=why, sink_ids=self._sinks.over(sender, channel.link_id)))

    def under_way(self) -> int:
        """Frames that may still be written here."""
        return len(self._landing)
