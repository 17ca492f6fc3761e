"""What the two ends of links have in common: their limits, their names, and what they need of their route."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmoverd.adapters.transport.verbs.frame import Frame
from kvmoverd.adapters.transport.verbs.pairs import Pair
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Answer, Offer

log = logging.getLogger(__name__)

WINDOW_FRAMES = 16
"""Frames that wait for their end: enough that a round trip is hidden, few enough that cancelling drains quickly."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 2.0
"""Before a link that broke dials again; doubled until a frame is applied."""
PAUSE_ELSEWHERE_MIN_S, PAUSE_ELSEWHERE_MAX_S, PAUSE_ELSEWHERE_GROWS = 1.0, 60.0, 4
"""The same while another pair of CNICs does the work: each trial costs a layer all its retries, and some fabrics never let two
rails meet."""
LINGER_S = 60.0
"""A link without work says goodbye after so long."""
SILENCE_S = 2 * LINGER_S
"""A link on which nothing was heard for so long, not even a goodbye, has nobody at its other end."""
BREAKS_MAX = 2
"""A link that breaks so often without a frame applied in between is not dialled again for a while: its pair is out."""
PROBE_S = 0.5
"""While frames are open something is said so often at least: the other end may have destroyed its queue pair in silence."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    """One link of a route: class, CNIC here, CNIC there."""

    kv_class: KvClass
    cnic: int
    peer_cnic: int

    @property
    def pair(self) -> Pair:
        return self.cnic, self.peer_cnic

    @property
    def words(self) -> str:
        return f"class {self.kv_class.value}, CNIC {self.cnic} here and {self.peer_cnic} there"

    @property
    def link_id(self) -> int:
        return list(KvClass).index(self.kv_class) << 32 | self.cnic << 16 | self.peer_cnic


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Of all links. `fence_s`: how long a forgotten sink waits for its sender before the queue pair is destroyed."""

    io_timeout_s: float
    fence_s: float


class State(enum.Enum):
    """Of the end that sends layers."""

    IDLE = "idle"
    DIALLING = "dialling"
    READY = "ready"
    LEAVING = "leaving"


class Patience:
    """How long a link waits before it dials again, and whether its pair of CNICs is trusted.

    `doubted`: it failed, and no frame was applied since. `broken_by`: words about what broke it last.
    """

    def __init__(self) -> None:
        self.until_s = 0.0
        self.doubted = False
        self.broken_by = ""
        self.breaks = 0
        self._pause_s = 0.0

    def rests(self, now_s: float) -> bool:
        """It failed, and is not dialled yet."""
        return self.doubted and now_s < self.until_s

    def rest(self, now_s: float, *, elsewhere: bool = False) -> None:
        """The pause grows until a frame is applied. `elsewhere`: another pair does the work meanwhile."""
        if elsewhere:
            grown_s = PAUSE_ELSEWHERE_GROWS * self._pause_s
            self._pause_s = min(max(grown_s, PAUSE_ELSEWHERE_MIN_S), PAUSE_ELSEWHERE_MAX_S)
        else:
            self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
        self.until_s = now_s + self._pause_s

    def hurry(self, now_s: float) -> None:
        """No other pair works any more."""
        self._pause_s = min(self._pause_s, PAUSE_MAX_S)
        self.until_s = min(self.until_s, now_s + PAUSE_MAX_S)

    def prove(self) -> None:
        """A frame was applied."""
        self.breaks, self._pause_s, self.broken_by, self.doubted = 0, 0.0, "", False


class RouteHooks(Protocol):
    """What a link needs of its route."""

    node: str
    peer_cnics: int

    @property
    def pairs(self) -> int:
        """Pairs of CNICs, one here and one there."""

    def dial(self, offer: Offer, answered: Callable[[Answer | KvmoverError], None]) -> None: ...

    def next_generation(self) -> int: ...

    def ended(self, frame: Frame, reason: Reason, moved_bytes: int, message: str) -> None:
        """Once for each frame; its source is quiet."""

    def moved(self, frame: Frame, peer_cnic: int, now_s: float) -> None:
        """The frame belongs to the link to another CNIC."""

    def works_elsewhere(self, key: LinkKey) -> bool:
        """Is there a link over another pair of CNICs that is connected?"""

    def failed(self, key: LinkKey, frames: Sequence[Frame], reason: Reason, message: str, now_s: float) -> None:
        """That link's pair is out: its frames, whose sources are quiet, go over another pair, or end if there is none."""


def reason_of(error: KvmoverError) -> Reason:
    """How sends end whose link was refused so: what is full may be free later, all else is a node that can't be reached."""
    return Reason.POOL_EXHAUSTED if error.reason == Reason.POOL_EXHAUSTED.name else Reason.PEER_LOST


def compare_with_peer(node: str, kv_class: KvClass, ours: Marks, theirs: Marks) -> None:
    """Each end marks its own packets, so a link of two configs works, on two lanes: that is said at both, and not refused.

    Else a fabric's classes could never be changed node by node.
    """
    if theirs != ours:
        log.warning(
            "%s marks packets of class %s with %s, this node with %s: one of them is not on the KV lane; compare "
            "[transport.verbs] of both",
            node,
            kv_class.value,
            theirs.text,
            ours.text,
        )
