"""Sends between nodes of one process, which a test can hold: each has its places from the moment it is submitted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node_gates import NEVER

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.memory.iovec import Cursor
from kvmoverd.adapters.transport.events import Events
from kvmoverd.adapters.transport.sinks import REASONS, Claim, FrameRefused, Sinks
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Send, Sent, Sink, TransportEvent

if TYPE_CHECKING:
    from node_net import Net


@dataclass(eq=False)
class FarSend:
    """A send with its place at the other end."""

    send: Send
    to: FarGate
    claim: Claim


class FarGate:
    """`Transport` between the nodes of a net; sinks of this node for other nodes, sends of this node to them."""

    def __init__(self, net: Net, node: str, boot_id: str) -> None:
        self.net, self.node, self.boot_id = net, node, boot_id
        self.events = Events()
        self.sinks = Sinks(self.events)
        self.closed = False
        self.fails: Callable[[Send], Reason | None] = NEVER
        self.held: deque[FarSend] = deque()
        self.sent_bytes: Counter[str] = Counter()
        """Payload that was taken by each other node."""

    def expect(self, sink: Sink) -> None:
        self.sinks.expect(sink)

    def forget(self, sink_id: int) -> None:
        self.sinks.forget(sink_id)

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self._grant(send)
        while not self.closed and self.release_one():
            pass

    def _grant(self, send: Send) -> None:
        route = send.route
        assert route is not None, "a send within a node takes the local transport"
        to = self.net.far_of(route.node, route.boot_id)
        if to is None or self.net.is_cut(self.node, route.node):
            self.events.put(Sent(send.op_id, Reason.PEER_LOST, 0, f"{route.node} is not there"))
            return
        size_bytes = int(send.source[:, 1].sum())
        try:
            claim = to.sinks.begin((self.node, self.boot_id), send.sink_id, send.layer, send.first_block, size_bytes)
            to.sinks.hold(claim)
        except FrameRefused as refused:
            self.events.put(Sent(send.op_id, REASONS[refused.status], 0, str(refused)))
            return
        self.held.append(FarSend(send, to, claim))

    def release_one(self) -> bool:
        """The oldest send lands; False when none waits."""
        if not self.held:
            return False
        far = self.held.popleft()
        send, to, claim = far.send, far.to, far.claim
        reason = Reason.PEER_LOST if self.net.is_cut(self.node, to.node) else self.fails(send)
        if reason is not None:
            to.sinks.give_up(claim)
            self.events.put(Sent(send.op_id, reason, 0, "as the test wants"))
        else:
            self._land(send, to, claim)
        to.sinks.let_go(claim)
        return True

    def _land(self, send: Send, to: FarGate, claim: Claim) -> None:
        source = Cursor(send.source)
        while source.left_bytes:
            iovec.copy_by_slices(claim.destination, source)
        try:
            to.sinks.complete(claim)
        except FrameRefused:
            self.events.put(Sent(send.op_id, Reason.CANCELLED, source.total_bytes, "landed in a forgotten sink"))
            return
        self.sent_bytes[to.node] += source.total_bytes
        self.events.put(Sent(send.op_id, Reason.OK, source.total_bytes))

    def poll(self, events_max: int) -> list[TransportEvent]:
        return self.events.poll(events_max)

    def fileno(self) -> int:
        return self.events.fileno()

    def close(self, timeout_s: float) -> bool:
        self.events.close()
        return True

    def lose(self, name: str) -> None:
        """What is on its way from or to that node lands nowhere."""
        lost = [far for far in self.held if name in (self.node, far.to.node)]
        self.held = deque(far for far in self.held if far not in lost)
        for far in lost:
            far.to.sinks.give_up(far.claim)
            far.to.sinks.let_go(far.claim)
            self.events.put(Sent(far.send.op_id, Reason.PEER_LOST, 0, f"{name} is gone"))
