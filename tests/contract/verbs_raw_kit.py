"""One end of a link in a test's own hands: it says and writes what a real one would not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from transport_kit import WAIT_S, Bytes
from verbs_kit import FakeFabric, FakeWire

from kvmoverd.adapters.transport.verbs.end import ASKER, GRANTER, Heard, LinkBroken, LinkEnd, Slots, Told
from kvmoverd.adapters.transport.verbs.fabric import WRITE
from kvmoverd.adapters.transport.verbs.messages import ASK_BYTES, GRANT_BYTES, PLACE, PROTOCOL, Message, Places
from kvmoverd.adapters.transport.verbs.transport import VerbsTransport
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.qos import KV_LANE, KvClass
from kvmoverd.ports.connection import Answer, Answered, Offer
from kvmoverd.ports.transport import Route, Sender

M = TypeVar("M")


def await_true(true: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, f"{what}: awaited for {timeout_s} s"
        time.sleep(0.001)


class RawEnd:
    """Common to both: what was heard, and what broke it."""

    def __init__(self, wire: FakeWire, slots: Slots, name: str) -> None:
        self.fabric = FakeFabric(wire, name)
        self.end: LinkEnd[Any] = LinkEnd(self.fabric, slots, 1)
        self.heard: list[Message] = []
        self.told: list[int] = []
        self.broken = ""
        self._kept: list[Any] = []
        self._sources: list[Bytes] = []

    def pump(self) -> None:
        if self.broken:
            return
        try:
            for done in self.fabric.poll(256):
                found = self.end.take(done)
                if isinstance(found, Heard):
                    self.heard.append(found.message)
                elif isinstance(found, Told):
                    self.told.append(found.immediate)
            self.end.flush()
        except LinkBroken as error:
            self.broken = str(error)

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.end.say(message)
        self.pump()

    def await_true(self, true: Callable[[], bool], what: str) -> None:
        def pumped() -> bool:
            self.pump()
            return true()

        await_true(pumped, what)

    def hear(self, kind: type[M], count: int = 1) -> list[M]:
        """The messages of a kind, once there are so many."""

        def found() -> list[M]:
            return [message for message in self.heard if isinstance(message, kind)]

        self.await_true(lambda: len(found()) >= count, f"{count} {kind.__name__}, there are {self.heard}")
        return found()

    def breaks(self) -> str:
        """What this end hears of its link's end."""
        self.await_true(lambda: bool(self.broken), "the end of the link")
        return self.broken

    def places(self, memory: Bytes) -> Places:
        """Memory of this end that the other may write."""
        at = np.array([memory.ctypes.data], np.uint64)
        registration = self.fabric.register(int(at[0]), len(memory), piece_bytes=len(memory))
        self._kept.append(registration)
        keys = registration.keys(at, np.array([len(memory)], np.uint64))
        return np.array([(int(at[0]), len(memory), int(keys[0, 1]))], PLACE)

    def key_of(self, memory: Bytes) -> int:
        """The local one."""
        at = np.array([memory.ctypes.data], np.uint64)
        registration = self.fabric.register(int(at[0]), len(memory), piece_bytes=len(memory))
        self._kept.append(registration)
        return int(registration.keys(at, np.array([len(memory)], np.uint64))[0, 0])

    def close(self) -> None:
        self.end.fail()
        assert self.end.destroy()
        for registration in self._kept:
            registration.close()
        self.fabric.close()


class RawAsker(RawEnd):
    """Dials a transport as `sender`."""

    def __init__(self, wire: FakeWire, target: VerbsTransport, sender: Sender, **offered: Any) -> None:
        super().__init__(wire, ASKER, "raw:1")
        self.answer: Answer | KvmoverError | None = None
        offer: dict[str, Any] = {
            "protocol": PROTOCOL,
            "link_id": 7,
            "generation": 1,
            "kv_class": KvClass.LAYERS,
            "marks": KV_LANE,
            "peer_cnic": 0,
            "end": self.end.path,
            "receive_slots": ASKER.receive_slots,
            "message_bytes": GRANT_BYTES,
            **offered,
        }

        def answered(answer: Answer | KvmoverError) -> None:
            self.answer = answer

        target.accept(sender, Offer(**offer), answered)
        await_true(lambda: self.answer is not None, "an answer to the offer")

    def connected(self) -> RawAsker:
        assert isinstance(self.answer, Answer), self.answer
        self.end.connect(self.answer.end, KV_LANE, peer_slots=self.answer.receive_slots)
        return self

    def write(self, source: Bytes, places: Places, immediate: int | None) -> None:
        """All of `source` to the places, which are cut as they are."""
        rows = np.zeros(len(places), WRITE)
        sizes = places["size_bytes"].astype(np.uint64)
        rows["local"] = source.ctypes.data + sizes.cumsum() - sizes
        rows["remote"], rows["size_bytes"], rows["remote_key"] = places["address"], sizes, places["key"]
        rows["local_key"] = self.key_of(source)
        self._sources.append(source)
        self.end.post_chain(rows, int(sizes.sum()), self, immediate)


class RawGranter(RawEnd):
    """Is dialled: `dial` is given to a transport."""

    def __init__(self, wire: FakeWire) -> None:
        super().__init__(wire, GRANTER, "raw:1")
        self.offers: list[Offer] = []
        self.slots = GRANTER.receive_slots
        self.message_bytes = ASK_BYTES

    def shrink(self, slots: int) -> None:
        """It never had more receive slots than that."""
        self.end.fail()
        assert self.end.destroy()
        self.slots = slots
        self.end = LinkEnd(self.fabric, replace(GRANTER, receive_slots=slots), 2)

    def dial(self, route: Route, offer: Offer, answered: Answered) -> None:
        """The first offer is taken, later ones are only noted."""
        self.offers.append(offer)
        if len(self.offers) > 1:
            return
        self.end.connect(offer.end, KV_LANE, peer_slots=offer.receive_slots)
        answered(Answer(self.end.path, KV_LANE, self.slots, self.message_bytes))


def first_places(places: Places, size_bytes: int) -> Places:
    """Places for the first so many bytes."""
    ends = places["size_bytes"].astype(np.int64).cumsum()
    found = places[: int(ends.searchsorted(size_bytes)) + 1].copy()
    found["size_bytes"][-1] -= int(ends[len(found) - 1]) - size_bytes
    return found
