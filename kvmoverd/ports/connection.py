"""Connection port: how a transport whose wire can't introduce itself meets its other half. The words travel over gRPC.

An RDMA queue pair is one end of two that must know each other's numbers before the first byte. Who wants to send makes an
`Offer`; the other node's transport makes its end and gives an `Answer`. Nodes are known by name and boot id, never by address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.ports.transport import Route, Sender


@dataclass(frozen=True, slots=True)
class PathEnd:
    """One end of a queue pair. `gid`: 16 bytes; `lid`: 0 on Ethernet; `mtu_bytes`: the most its port takes."""

    cnic: int
    """Which of its node's CNICs, counted from 0."""
    qp_number: int
    packet_number: int
    gid: bytes
    lid: int
    mtu_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """From the end that will send layers. One link for each class, pair of CNICs and direction; a reconnect is a new generation.

    `peer_cnic`: which of the other node's CNICs is wanted. `receive_slots` messages of `message_bytes` are posted at this end.
    """

    protocol: int
    link_id: int
    generation: int
    kv_class: KvClass
    marks: Marks
    peer_cnic: int
    end: PathEnd
    receive_slots: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """From the end that will be written to: it is ready to receive. `marks` are those its own packets carry."""

    end: PathEnd
    marks: Marks
    receive_slots: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class CnicFacts:
    """One CNIC, for status. `state`: of its port, a few seconds ago, empty where it can't be read; `gid`: which, and why."""

    name: str
    state: str
    link_layer: str
    gid: str
    netdev: str
    numa_node: int
    regions: int


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """All CNICs of a node and their links, for status. `counters`: of links since start, by name."""

    library: str
    posting: str
    cnics: Sequence[CnicFacts]
    marks: Mapping[str, str]
    registered_bytes: int
    queue_pairs: int
    queue_pairs_max: int
    counters: Mapping[str, int]


Answered: TypeAlias = Callable[[Answer | KvmoverError], None]
"""Called once, from any thread."""


class Dial(Protocol):
    """Carries an offer to the node of a route; never blocks, always answers within its deadline."""

    def __call__(self, route: Route, offer: Offer, answered: Answered) -> None: ...


class Connects(Protocol):
    """The side of a transport that meets others. Both may be called from any thread."""

    def dial_with(self, dial: Dial) -> None:
        """Before the first send to another node."""

    def accept(self, sender: Sender, offer: Offer, answered: Answered) -> None:
        """Another node's offer, proved to be from `sender`. Refused with an error that says why."""

    def peer_gone(self, sender: Sender, message: str) -> None:
        """That boot of the node is dead: all its ends here are fenced now, what they held is quiet, and its sends end."""
