"""Transports over queue pairs in one process: who dials whom, and memory that is registered as it is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from verbs_kit import FakeFabric, FakeWire

from kvmoverd.adapters.transport.verbs.book import NotRegistered
from kvmoverd.adapters.transport.verbs.device import Retries, open_fabric
from kvmoverd.adapters.transport.verbs.fabric import Fabric, Registration
from kvmoverd.adapters.transport.verbs.transport import VerbsTransport
from kvmoverd.core.errors import KvmoverError, PeerUnreachable
from kvmoverd.core.qos import KV_LANE, KvClass
from kvmoverd.ports.connection import Answered, Dial, Offer
from kvmoverd.ports.transport import IoVec, Route, Sender

PIECE_BYTES = 64 << 10
"""Small, so that slices lie across pieces."""
MARKS = dict.fromkeys(KvClass, KV_LANE)


class NamedMemory:
    """A `Book` for memory that nobody has told it of: what a look-up names is registered then, and stays so.

    `near`: which CNIC is nearest to memory, by address ranges. `forbidden`: addresses that are not registered.
    """

    def __init__(self, fabrics: Sequence[Fabric], piece_bytes: int = PIECE_BYTES) -> None:
        self.near: list[tuple[range, int]] = []
        self.forbidden = range(0)
        self._fabrics = fabrics
        self._piece_bytes = piece_bytes
        self._kept: list[Registration] = []

    def keyed(self, cnic: int, slices: IoVec) -> tuple[IoVec, npt.NDArray[np.uint32]]:
        slices = slices[slices[:, 1] > 0]
        if not len(slices):
            return slices, np.zeros((0, 2), np.uint32)
        if int(slices[0, 0]) in self.forbidden:
            raise NotRegistered(f"{int(slices[0, 1])} bytes at {int(slices[0, 0]):#x} are not registered")
        begin, end = int(slices[:, 0].min()), int(slices.sum(axis=1).max())
        registration = self._fabrics[cnic].register(begin, end - begin, piece_bytes=self._piece_bytes)
        self._kept.append(registration)
        # In the order of the slices, which need not rise: positions in the frame are cut, not addresses.
        stops = slices[:, 1].cumsum()
        starts = stops - slices[:, 1]
        cuts = registration.cuts
        inside = (
            (cuts[:, None] > slices[:, 0]) & (cuts[:, None] < slices.sum(axis=1)) if len(cuts) else np.zeros((0, 1))
        )
        cut, row = np.nonzero(inside)
        positions = starts[row] + cuts[cut] - slices[row, 0]
        edges = np.unique(np.concatenate([starts, stops, positions.astype(np.uint64)]))
        which = stops.searchsorted(edges[:-1], side="right")
        pieces = np.stack([slices[which, 0] + edges[:-1] - starts[which], np.diff(edges)], axis=1)
        return pieces, registration.keys(pieces[:, 0], pieces[:, 1])

    def preferred(self, slices: IoVec) -> int:
        if not len(slices):
            return -1
        return next((cnic for memory, cnic in self.near if int(slices[0, 0]) in memory), -1)

    def close(self) -> bool:
        for registration in self._kept:
            registration.close()
        self._kept.clear()
        return True


@dataclass
class Desk:
    """Where offers are handed over: a `Dial` for the sender that it is made for. `refusal`: what all are answered."""

    nodes: dict[tuple[str, str], VerbsTransport] = field(default_factory=dict)
    refusal: KvmoverError | None = None
    silent: bool = False
    offers: list[Offer] = field(default_factory=list)
    on_offer: Callable[[], None] = lambda: None

    def dial_of(self, sender: Sender) -> Dial:
        def dial(route: Route, offer: Offer, answered: Answered) -> None:
            self.offers.append(offer)
            self.on_offer()
            target = self.nodes.get((route.node, route.boot_id))
            if self.silent:
                return
            if self.refusal is not None or target is None:
                answered(self.refusal or PeerUnreachable(f"nobody is {route.node} of boot {route.boot_id}"))
                return
            target.accept(sender, offer, answered)

        return dial


@dataclass
class Node:
    """A transport with its CNICs and its book."""

    transport: VerbsTransport
    fabrics: list[FakeFabric]
    book: NamedMemory


def fake_node(
    wire: FakeWire, desk: Desk, sender: Sender, cnics: int = 1, piece_bytes: int = PIECE_BYTES, **settings: Any
) -> Node:
    fabrics = [FakeFabric(wire, f"{sender[0]}{index}:1", cnic=index) for index in range(cnics)]
    book = NamedMemory(fabrics, piece_bytes)
    transport = verbs(fabrics, book, **settings)
    transport.dial_with(desk.dial_of(sender))
    desk.nodes[sender] = transport
    return Node(transport, fabrics, book)


def rxe_node(device: str, desk: Desk, sender: Sender, **settings: Any) -> VerbsTransport:
    """Real verbs on a Soft-RoCE device. Short retries: nobody waits there for a switch."""
    fabric = open_fabric(device, 1, retries=Retries(timeout=12, retry=3))
    transport = verbs([fabric], NamedMemory([fabric], piece_bytes=1 << 20), **settings)
    transport.dial_with(desk.dial_of(sender))
    desk.nodes[sender] = transport
    return transport


def verbs(fabrics: Sequence[Fabric], book: NamedMemory, **settings: Any) -> VerbsTransport:
    usual: dict[str, Any] = {"marks": MARKS, "io_timeout_s": 5.0, "fence_s": 0.3, "queue_max": 64, "qps_max": 64}
    return VerbsTransport(fabrics, book, **(usual | settings))
