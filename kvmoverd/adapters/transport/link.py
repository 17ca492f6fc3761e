"""One life of a route: the connections that go together, who of them is idle, and why they ended."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable

from kvmoverd.adapters.transport.channel import Channel
from kvmoverd.adapters.transport.wire import ChannelLost
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Send, Sender

LINK_ID_BITS = 64

End = Callable[[Send, Reason, int, str], None]


class Link:
    """Implements `Work` for its channels, over the queue of its route and under the lock of it.

    `grow` is called without the lock while sends wait, all channels are busy and fewer than `channels_max` were begun.
    """

    def __init__(
        self,
        lock: threading.Lock,
        queue: deque[Send],
        channels_max: int,
        end: End,
        grow: Callable[[Link], None],
    ) -> None:
        self.link_id = secrets.randbits(LINK_ID_BITS)
        self.end = end
        self._lock = lock
        self._queue = queue
        self._channels_max = channels_max
        self._grow = grow
        self._begun = 1
        self._channels: set[Channel] = set()
        self._idle: set[Channel] = set()
        self._loss: tuple[Reason, str] | None = None

    @property
    def loss(self) -> tuple[Reason, str]:
        """Why it ended; what counts is the first that was said."""
        return self._loss if self._loss is not None else (Reason.PEER_LOST, "the link was not lost")

    def wake_one(self) -> None:
        """Under the lock: a send has come."""
        if self._idle:
            self._idle.pop().wake()

    def enter(self, channel: Channel) -> bool:
        """A channel that was let in begins; False when the link was lost meanwhile."""
        with self._lock:
            if self._loss is None:
                self._channels.add(channel)
            return self._loss is None

    def leave(self, channel: Channel) -> None:
        """Nobody wakes the channel any more."""
        with self._lock:
            self._channels.discard(channel)
            self._idle.discard(channel)

    def lose(self, reason: Reason, message: str) -> None:
        """All channels end."""
        with self._lock:
            if self._loss is None:
                self._loss = (reason, message)
            for channel in self._channels:
                channel.wake()

    def stay_small(self) -> None:
        """No more channels than there are."""
        with self._lock:
            self._channels_max = 0

    def take(self, channel: Channel) -> Send | None:
        with self._lock:
            self._idle.discard(channel)
            if not self._queue or self._loss is not None:
                self._idle.add(channel)
                return None
            send = self._queue.popleft()
            if self._queue:
                self.wake_one()
            return send

    def attend(self, *, busy: bool) -> None:
        if self._loss is not None:
            raise ChannelLost(self._loss[1])
        if busy and self._queue and not self._idle and self._begun < self._channels_max:
            with self._lock:
                if self._begun >= self._channels_max:
                    return
                self._begun += 1
            self._grow(self)


class Peers:
    """Connections that others hold here. Those of one link go together: the first that breaks is told, the rest is not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[Sender, int], int] = {}
        self._lost: set[tuple[Sender, int]] = set()

    def enter(self, peer: Sender, link_id: int) -> None:
        with self._lock:
            self._open[peer, link_id] = self._open.get((peer, link_id), 0) + 1

    def leave(self, peer: Sender, link_id: int) -> bool:
        """True when it is the first of its link to go."""
        place = (peer, link_id)
        with self._lock:
            first = place not in self._lost
            self._lost.add(place)
            self._open[place] -= 1
            if not self._open[place]:
                del self._open[place]
                self._lost.discard(place)
            return first
