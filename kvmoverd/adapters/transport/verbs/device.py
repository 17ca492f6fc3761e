"""One port of one CNIC over real verbs: memory, queue pairs, and one completion queue that a descriptor tells of.

All but `register` belong to one thread. No call waits: descriptors are looked at before what would block is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvmoverd.adapters.transport.verbs.fabric import Completion, FabricError, Opcode
from kvmoverd.adapters.transport.verbs.gids import ANY_INDEX, Choice, choose
from kvmoverd.adapters.transport.verbs.library import Library, load
from kvmoverd.adapters.transport.verbs.pointers import domain_address
from kvmoverd.adapters.transport.verbs.ports import (
    LinkLayer,
    PortFacts,
    facts_of,
    list_ports,
    open_context,
    place_of,
    with_event_fd,
)
from kvmoverd.adapters.transport.verbs.posting import MIDDLE
from kvmoverd.adapters.transport.verbs.queue_pair import Home, Retries, VerbsQueuePair
from kvmoverd.adapters.transport.verbs.registration import (
    DirectPins,
    Pieces,
    Pins,
    PyverbsPins,
    piece_size,
    register,
)
from kvmoverd.core.errors import TransportRefused

log = logging.getLogger(__name__)

__all__ = ["PortFacts", "Retries", "VerbsFabric", "VerbsQueuePair", "list_ports", "open_fabric"]

COMPLETIONS_START = 8_192
"""Grows as queue pairs are made: 64 bytes each on most devices."""
STATUS_WORDS = {
    1: "local length error",
    2: "local queue pair error",
    3: "local end-to-end context error",
    4: "local protection error: memory that is not registered, or another key's",
    5: "flushed: the queue pair failed before",
    6: "memory window error",
    7: "bad response",
    8: "local access error",
    9: "remote invalid request",
    10: "remote access error: the peer's memory is not registered any more, or another key's",
    11: "remote operation error",
    12: "retries exceeded: the peer does not answer",
    13: "receiver-not-ready retries exceeded: the peer posts no receive slots",
    14: "local domain violation",
    15: "remote invalid domain request",
    16: "remote aborted",
    17: "invalid context number",
    18: "invalid context state",
    19: "fatal device error",
    20: "response timeout",
    21: "general error",
}
FLUSHED = 5


class VerbsFabric:
    """A `Fabric`. `choice` says which GID it uses, and why; `facts` what the port is: both as of the last queue pair.

    `gid_index`: the one that is wanted, `ANY_INDEX` for the best.
    """

    def __init__(self, library: Library, context: Any, facts: PortFacts, gid_index: int) -> None:
        """Raises `TransportRefused` without a GID."""
        self.library = library
        self._context = context
        self.facts = facts
        self._gid_index = gid_index
        self.choice = _chosen(facts, gid_index)
        self.domain: Any = None
        self.domain_address = 0
        self._channel: Any = None
        self._queue: Any = None
        self._fd = -1
        self._pins: Pins
        self._home: Home
        self._pairs: dict[int, VerbsQueuePair] = {}
        self._registrations = 0
        self._counting = threading.Lock()
        self._promised = 0
        self._room = 0
        self._waiting: deque[Completion] = deque()
        self._opcodes = _opcodes(library.enums)

    def open(self, cnic: int, retries: Retries) -> None:
        """Raises `FabricError`; `close` takes back what was made."""
        library = self.library
        self._room = min(COMPLETIONS_START, self.facts.completions_max)
        try:
            self.domain = library.pd.PD(self._context)
            self._channel, self._fd = with_event_fd(lambda: library.cq.CompChannel(self._context))
            self._queue = library.cq.CQ(self._context, self._room, None, self._channel, 0)
        except library.error as why:
            raise FabricError(f"{self.name} gives no completion queue of {self._room}: {why}") from why
        if self._fd < 0:
            raise FabricError(f"{self.name}: the descriptor of its completions is not to be found in /proc/self/fd")
        self._ready = select.poll()
        self._ready.register(self._fd, select.POLLIN)
        self.domain_address = address = domain_address(self.domain, self._context)
        self._pins = DirectPins(library, address) if address else PyverbsPins(library, self.domain)
        place = place_of(self.facts.device)
        self._home = Home(
            library, self._context, self.domain, self._queue, self.facts, self.choice.gid, cnic, retries, place
        )

    def __repr__(self) -> str:
        return f"<{self.name}, {self.choice.words}, {len(self._pairs)} queue pairs>"

    def __contains__(self, qp_number: int) -> bool:
        """Is there such a queue pair, not destroyed yet?"""
        return qp_number in self._pairs

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def numa_node(self) -> int:
        return self.facts.numa_node

    def register(self, address: int, size_bytes: int, *, piece_bytes: int, dmabuf_fd: int = -1) -> Pieces:
        """From any thread; blocks while the memory is pinned. Raises `FabricError`."""
        size = piece_size(piece_bytes, self.facts.region_bytes_max)
        found = register(self._pins, address, size_bytes, size, dmabuf_fd=dmabuf_fd, closed=self._closed_one)
        with self._counting:
            self._registrations += 1
        return found

    def make_queue_pair(self, *, send_max: int, receive_max: int) -> VerbsQueuePair:
        """Raises `FabricError` when the device or the completion queue has no room for all that may end at once."""
        most = self.facts.requests_max
        if not (1 <= send_max <= most and 1 <= receive_max <= most):
            raise FabricError(f"{self.name} takes 1 to {most} requests a queue, not {send_max} and {receive_max}")
        self._look()
        self._make_room(self._promised + send_max + receive_max)
        pair = VerbsQueuePair(self._home, send_max, receive_max, self._gone)
        self._promised += pair.completions_max
        self._pairs[pair.number] = pair
        return pair

    def poll(self, completions_max: int) -> Sequence[Completion]:
        """Those of one chain come as one, with the first cause of its failure; those of pairs that are gone don't come."""
        found = [self._waiting.popleft() for _ in range(min(completions_max, len(self._waiting)))]
        if len(found) < completions_max:
            self._take(completions_max - len(found), found)
        return found

    def arm(self) -> None:
        try:
            while self._ready.poll(0):
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
            self._queue.req_notify(False)
        except self.library.error as why:
            raise FabricError(f"{self.name} can't be armed: {why}") from why

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Raises `FabricError` when the device keeps something."""
        assert not self._pairs, f"{self.name}: {len(self._pairs)} queue pairs are not destroyed"
        assert not self._registrations, f"{self.name}: {self._registrations} registrations are not closed"
        try:
            for thing in (self._queue, self._channel, self.domain, self._context):
                if thing is not None:
                    thing.close()
        except self.library.error as why:
            raise FabricError(f"{self.name} can't be closed: {why}") from why
        self._fd = -1

    def _look(self) -> None:
        """An address that went and came back has another place in the table, and a network card may have another MTU now.

        Raises `FabricError`.
        """
        facts = facts_of(self._context, self.facts.device, self.facts.port)
        if facts == self.facts:
            return
        try:
            choice = _chosen(facts, self._gid_index)
        except TransportRefused as why:
            raise FabricError(str(why)) from why
        if choice.gid != self.choice.gid:
            log.warning("CNIC %s: %s; it was %s", self.name, choice.words, self.choice.words)
        self.facts, self.choice = facts, choice
        self._home = replace(self._home, facts=facts, gid=choice.gid)

    def _make_room(self, wanted: int) -> None:
        """The completion queue grows to twice its size, or to what is needed, within what the device has."""
        if wanted <= self._room:
            return
        most = self.facts.completions_max
        if wanted > most:
            raise FabricError(
                f"{self.name}: {len(self._pairs)} queue pairs hold {self._promised} completions, {wanted} don't fit its "
                f"{most}: fewer queue pairs (transport.verbs.qps_max)"
            )
        room = min(most, max(wanted, 2 * self._room))
        try:
            self._queue.resize(room)
        except self.library.error as why:
            raise FabricError(f"{self.name}: a completion queue of {self._room} can't grow to {room}: {why}") from why
        self._room = room

    def _take(self, completions_max: int, into: list[Completion] | deque[Completion]) -> int:
        """How many the device had, those that nobody is told of among them."""
        try:
            count, ended = self._queue.poll(completions_max)
        except self.library.error as why:
            raise FabricError(f"{self.name} can't be polled: {why}") from why
        for each in ended:
            told = self._completion(each)
            if told is not None:
                into.append(told)
        return int(count)

    def _completion(self, ended: Any) -> Completion | None:
        pair = self._pairs.get(ended.qp_num)
        if pair is None:
            return None
        status = ended.status
        if status:
            if not pair.cause and status != FLUSHED:
                pair.cause = STATUS_WORDS.get(status, f"status {status}")
            if ended.wr_id == MIDDLE:
                return None
            words = STATUS_WORDS.get(status, f"status {status}") if status != FLUSHED else _flushed(pair.cause)
            return Completion(pair.number, ended.wr_id, False, Opcode.SEND, status=words)
        opcode = self._opcodes[ended.opcode]
        if opcode is Opcode.RECEIVED:
            return Completion(pair.number, ended.wr_id, True, opcode, ended.byte_len)
        if opcode is Opcode.RECEIVED_IMMEDIATE:
            return Completion(pair.number, ended.wr_id, True, opcode, ended.byte_len, socket.ntohl(ended.imm_data))
        return Completion(pair.number, ended.wr_id, True, opcode)

    def _gone(self, number: int) -> None:
        """What it left in the completion queue is dropped now: its number may come again. A poll that fails will again."""
        pair = self._pairs.pop(number)
        self._promised -= pair.completions_max
        kept = [each for each in self._waiting if each.qp_number != number]
        self._waiting = deque(kept)
        left = self._room
        with contextlib.suppress(FabricError):
            while left > 0 and (count := self._take(left, self._waiting)):
                left -= count

    def _closed_one(self) -> None:
        with self._counting:
            self._registrations -= 1


def open_fabric(
    name: str, port: int, gid_index: int = ANY_INDEX, *, cnic: int = 0, retries: Retries | None = None
) -> VerbsFabric:
    """Opens a port, whatever its state. Raises `TransportRefused` without pyverbs or a GID, `FabricError` otherwise.

    `cnic`: the number that its queue pairs' ends carry.
    """
    library = load()
    context = open_context(library, name)
    fabric = None
    try:
        facts = facts_of(context, name, port)
        fabric = VerbsFabric(library, context, facts, gid_index)
        fabric.open(cnic, retries or Retries())
    except BaseException:
        if fabric is None:
            context.close()
        else:
            fabric.close()
        raise
    os.set_blocking(fabric.fileno(), False)
    return fabric


def _chosen(facts: PortFacts, gid_index: int) -> Choice:
    """Raises `TransportRefused`."""
    infiniband = facts.link_layer is LinkLayer.INFINIBAND
    return choose(facts.gids, port=facts.name, infiniband=infiniband, wanted=gid_index)


def _flushed(cause: str) -> str:
    return f"flushed after: {cause}" if cause else STATUS_WORDS[FLUSHED]


def _opcodes(enums: Any) -> dict[int, Opcode]:
    return {
        enums.IBV_WC_SEND: Opcode.SEND,
        enums.IBV_WC_RDMA_WRITE: Opcode.WRITE,
        enums.IBV_WC_RECV: Opcode.RECEIVED,
        enums.IBV_WC_RECV_RDMA_WITH_IMM: Opcode.RECEIVED_IMMEDIATE,
    }
