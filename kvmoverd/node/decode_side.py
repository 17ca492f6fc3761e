"""Decode side: DE buffers by ticket and by request, for prefill nodes and for this node's decode engines."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import (
    BadRequest,
    Draining,
    KvmoverError,
    PeerUnreachable,
    PoolExhausted,
    RequestTaken,
    StaleAttempt,
    TicketExpired,
    UnknownRequest,
)
from kvmoverd.core.machines.actions import Finish
from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import End, Reason
from kvmoverd.node.assembling import AssemblyDriver
from kvmoverd.node.de_parts import DeParts
from kvmoverd.node.de_places import Place, Places
from kvmoverd.node.de_plan import Given, plan_of
from kvmoverd.node.driver import Call
from kvmoverd.node.outbox import Outbox
from kvmoverd.node.parts import PartBook
from kvmoverd.node.peer import Helped, PartListener, PartOrder, Reservation, Reserved, Ticket
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.node.requests import Over, Requests
from kvmoverd.node.room import RETRY_S
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.ports.transport import Sender

T = TypeVar("T")

GENERATION_BITS = 63
"""A ticket's generation is drawn by lot: whoever has a ticket was given it, and nobody comes upon another's by counting."""


@dataclass(eq=False)
class Waiting:
    """A decode engine that came before its prefill node."""

    session_id: str
    attempt: int
    outbox: Outbox
    namespace: Namespace
    until_s: float
    timer: asyncio.TimerHandle


class DecodeSide:
    """Whichever of Reserve and AssembleBlocks comes alone expires after `limits.attach_timeout_s`."""

    def __init__(self, services: Services, requests: Requests, parts: PartBook) -> None:
        self._services = services
        self._requests = requests
        self._tickets = itertools.count(1)
        self._by_ticket: dict[Ticket, AssemblyDriver] = {}
        self._by_request: dict[str, AssemblyDriver] = {}
        self._parts = DeParts(services, requests, parts)
        self._waiting: dict[str, Waiting] = {}
        self._places = Places()
        self._given = Given()
        self.fences_asked: Callable[[], Awaitable[bool]] | None = None
        """Has the scheduler say now which attempts are over; whether it did."""
        requests.on_over.append(self._end_over)
        requests.waiting_owners.append(self._waiting_owners)

    @property
    def own(self) -> Sender:
        """This node, as it names itself to others."""
        return self._services.node, self._services.boot_id

    def depth(self) -> Depth:
        """What this node's storage has to read."""
        return self._services.reader.depth()

    async def reserve(self, namespace: Namespace, reservation: Reservation) -> Reserved:
        """Takes a DE buffer, whole or not at all, and begins to read what falls to this node.

        Raises `PoolExhausted` and `QueueFull`, both with the advice of `Places.advise`; `TooBig`, `StaleAttempt`,
        `Draining`, `BadPlan`, `PeerUnreachable` when the prefill node is lost meanwhile, `BadRequest` when the decode engine
        waits for another model.
        """
        waiting = self._waiting.get(reservation.request_id)
        if waiting is not None and waiting.attempt == reservation.attempt:
            _check_same_namespace(waiting.namespace, namespace)
        try:
            return await self._enter(namespace, reservation)
        except RequestTaken:
            # A prefill node that was given the next attempt may come here before the fence of the last one.
            if self.fences_asked is None or not await self.fences_asked():
                raise
        return await self._enter(namespace, reservation)

    async def _enter(self, namespace: Namespace, reservation: Reservation) -> Reserved:
        owner = reservation.owner
        with self._requests.entering("assemble", reservation.request_id, reservation.attempt, owner=owner):
            return await self._reserve(namespace, reservation)

    async def _reserve(self, namespace: Namespace, reservation: Reservation) -> Reserved:
        total = len(reservation.block_keys) + (reservation.tail_tokens > 0)
        loop, room = asyncio.get_running_loop(), self._services.room
        place = Place(reservation, loop.time())
        size_bytes = total * namespace.layout.record_bytes
        waited_s = reservation.waited_s
        self._places.add(place)
        try:
            room.ask(Purpose.DE_BUFFER, place, size_bytes, granted=place.grant, refused=place.refuse, waited_s=waited_s)
            await place.wait()
            driver, depth = await self._open_when_slots_are_home(namespace, reservation, place)
        except BaseException as error:
            room.give_back(place)
            if isinstance(error, KvmoverError):
                self._places.advise(error, loop.time(), self._services.limits.admission_wait_s)
            raise
        finally:
            self._places.remove(place)
        self._places.served(place, loop.time())
        ticket = self._add(driver)
        return Reserved(ticket, driver.push_sink, None, driver.plan, depth)

    async def _open_when_slots_are_home(
        self, namespace: Namespace, reservation: Reservation, place: Place
    ) -> tuple[AssemblyDriver, Depth]:
        """Room is granted, but slots may still be on their way home."""

        def opened() -> tuple[AssemblyDriver, Depth]:
            place.check()
            return self._open(namespace, reservation, place)

        return await self._when_slots_are_home(opened)

    async def _when_slots_are_home(self, take: Callable[[], T]) -> T:
        """Tries again, within the admission wait, while there are too few slots."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._services.limits.admission_wait_s
        while True:
            try:
                return take()
            except PoolExhausted:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    def _open(self, namespace: Namespace, reservation: Reservation, place: Place) -> tuple[AssemblyDriver, Depth]:
        """The buffer, and what this node's storage had to do before it."""
        plan, depth = plan_of(self._services, namespace, reservation, self._given)
        call = Call(reservation.request_id, reservation.attempt, "", reservation.timeout_s)
        driver = AssemblyDriver(self._services, call, namespace=namespace, reservation=reservation, plan=plan)
        self._services.room.rename(place, driver)
        return driver, depth

    def _add(self, driver: AssemblyDriver) -> Ticket:
        ticket = Ticket(self._services.boot_id, next(self._tickets), secrets.randbits(GENERATION_BITS))
        request_id = driver.call.request_id
        self._by_ticket[ticket] = driver
        self._by_request[request_id] = driver
        driver.on_gone.append(lambda: self._remove(ticket, request_id, driver))
        self._requests.add(driver, owner=driver.reservation.owner)
        self._match(request_id, driver)
        return ticket

    def _match(self, request_id: str, driver: AssemblyDriver) -> None:
        loop, waiting = asyncio.get_running_loop(), self._waiting.get(request_id)
        if waiting is not None and waiting.attempt == driver.call.attempt:
            del self._waiting[request_id]
            waiting.timer.cancel()
            driver.attach(waiting.session_id, waiting.outbox, waiting.until_s - loop.time())
            return
        timer = loop.call_later(self._services.limits.attach_timeout_s, self._expire_unattached, driver)
        driver.on_gone.append(timer.cancel)

    def _expire_unattached(self, driver: AssemblyDriver) -> None:
        if driver.machine.state is AssembleState.WAITING_ENGINE:
            driver.stop(Reason.LEASE_EXPIRED, "no decode engine attached in time")

    def _remove(self, ticket: Ticket, request_id: str, driver: AssemblyDriver) -> None:
        del self._by_ticket[ticket]
        if self._by_request.get(request_id) is driver:
            del self._by_request[request_id]

    def _driver(self, ticket: Ticket) -> AssemblyDriver:
        driver = self._by_ticket.get(ticket)
        if driver is None:
            raise TicketExpired(
                f"ticket {ticket.ticket_id} of boot {ticket.boot_id[:8]} is void", ticket=ticket.ticket_id
            )
        return driver

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        """Tells the buffer which blocks are new; the sinks for third nodes' parts of the others, in the order of `helped`.

        Raises as `AssemblyDriver.set_prefix`, and `TicketExpired`. Behind a cut the slots of reads that were given up are on
        their way home: tries again within the admission wait.
        """
        return await self._when_slots_are_home(lambda: self._driver(ticket).set_prefix(prefix_blocks, helped))

    def read_part(
        self, order: PartOrder, owner: Sender, destination: Destination, listener: PartListener
    ) -> PartDriver:
        """Reads hit blocks into a DE buffer and sends their layers; to be started. Raises as `DeParts.open`, `TicketExpired`."""
        if order.ticket is None:
            raise BadRequest(f"part {order.part} has no ticket")
        assembly = self._driver(order.ticket)
        if (assembly.reservation.node, assembly.reservation.boot_id) != owner:
            raise TicketExpired(f"ticket {order.ticket.ticket_id} is not {owner[0]}'s", ticket=order.ticket.ticket_id)
        if assembly.buffer.released:
            raise TicketExpired(f"the buffer of ticket {order.ticket.ticket_id} is gone", ticket=order.ticket.ticket_id)
        return self._parts.open(assembly, order, owner, destination, listener)

    def release_ticket(self, ticket: Ticket, reason: Reason) -> None:
        """The prefill node gives up; a ticket that is void already is no error."""
        try:
            driver = self._driver(ticket)
        except TicketExpired:
            return
        # What is given up did not go well, whatever became of the last of its calls.
        given_up = Reason.CANCELLED if reason is Reason.OK else reason
        driver.stop(given_up, f"the prefill node {driver.reservation.node} gave the request up")

    def return_ticket(self, ticket: Ticket) -> None:
        """The request goes back to admission: its engine waits on, and the same attempt may reserve again."""
        driver = self._by_ticket.get(ticket)
        if driver is None:
            return
        request_id, attempt = driver.call.request_id, driver.call.attempt
        state, message = driver.machine.state, f"{driver.reservation.node} has no room for it now"
        waits_still = state in (AssembleState.WAITING_ENGINE, AssembleState.FILLING) and driver.moved_bytes == 0
        if waits_still and self._by_request.get(request_id) is driver:
            del self._by_request[request_id]
            self._requests.withdraw("assemble", request_id, attempt)
            engine = driver.detach()
            if engine is not None:
                session_id, outbox, left_s = engine
                self._wait(driver.namespace, request_id, attempt, session_id, left_s, outbox)
        driver.stop(Reason.POOL_EXHAUSTED, message)

    def sinks_lost(self, sink_ids: Collection[int], message: str) -> None:
        """A prefill node's channel broke over which frames came here: what these buffers miss does not come any more.

        What a third node was to send may still be taken over: that is its owner's affair.
        """
        for driver in list(self._by_ticket.values()):
            if driver.push_sink in sink_ids and not driver.machine.received:
                driver.stop(Reason.PEER_LOST, message)

    def peer_lost(self, node: str, boot_id: str, message: str) -> None:
        """A prefill node's boot is lost: buffers that it has not filled can't become whole."""
        lost = (node, boot_id)
        for driver in list(self._by_ticket.values()):
            if (driver.reservation.node, driver.reservation.boot_id) == lost and not driver.machine.received:
                driver.stop(Reason.PEER_LOST, f"{node}: {message}")
        for place in self._places:
            if (place.reservation.node, place.reservation.boot_id) == lost:
                place.refuse(PeerUnreachable(f"{node}: {message}"))

    def attach(self, namespace: Namespace, request_id: str, attempt: int, session_id: str, timeout_s: float) -> Outbox:
        """AssembleBlocks: the engine waits for this request's buffer. Raises `StaleAttempt`, `RequestTaken`, `BadRequest`."""
        outbox = Outbox()
        waiting = self._waiting.get(request_id)
        if waiting is not None and waiting.session_id != session_id:
            raise RequestTaken(f"another session waits for request {request_id!r}", request_id=request_id)
        with self._requests.entering("attach", request_id, attempt, owner=session_id):
            driver = self._by_request.get(request_id)
            if driver is not None and driver.call.attempt > attempt:
                raise StaleAttempt(request_id=request_id, attempt=attempt, known=driver.call.attempt)
            if driver is not None and driver.call.attempt == attempt:
                _check_same_namespace(namespace, driver.namespace)
                driver.attach(session_id, outbox, timeout_s)
                return outbox
        self._wait(namespace, request_id, attempt, session_id, timeout_s, outbox)
        return outbox

    def _wait(
        self, namespace: Namespace, request_id: str, attempt: int, session_id: str, timeout_s: float, outbox: Outbox
    ) -> None:
        loop, wait_s = asyncio.get_running_loop(), min(timeout_s, self._services.limits.attach_timeout_s)
        text = f"the prefill node did not reserve within {wait_s:g} s"
        timer = loop.call_later(wait_s, self._drop_waiting, request_id, Reason.DEADLINE, text)
        until_s = loop.time() + timeout_s
        self._waiting[request_id] = Waiting(session_id, attempt, outbox, namespace, until_s, timer)

    def _end_over(self, over: Over) -> None:
        """Engines and reservations that wait under attempts that are over wait in vain."""
        waiting = self._waiting.get(over.request_id)
        if waiting is not None and waiting.attempt <= over.attempt:
            self._drop_waiting(over.request_id, Reason.STALE_ATTEMPT, over.why)
        for place in self._places:
            asked = place.reservation
            if asked.request_id == over.request_id and asked.attempt <= over.attempt:
                place.refuse(StaleAttempt(request_id=over.request_id, attempt=asked.attempt, known=over.known))

    def _waiting_owners(self, kind: str, request_id: str, attempt: int) -> set[str]:
        """Owners of lower attempts that wait here; an engine that came first leaves to the prefill node which attempt it is."""
        asked = [place.reservation for place in self._places]
        owners = {one.owner for one in asked if one.request_id == request_id and one.attempt < attempt}
        waiting = self._waiting.get(request_id)
        if waiting is not None and waiting.attempt < attempt and kind != "assemble":
            owners.add(waiting.session_id)
        return owners

    def _drop_waiting(self, request_id: str, reason: Reason, message: str) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        waiting.timer.cancel()
        waiting.outbox.put(Finish(End(reason, message)))
        return True

    def deliver(self, request_id: str, attempt: int, region: Region, pages: Pages, session_id: str) -> Outbox:
        """Starts a delivery. Raises `UnknownRequest`, `NotWhole`, `BadPages`, `PagesBusy`, `BadRequest`; nothing is lost then."""
        driver = self._by_request.get(request_id)
        if driver is None or driver.call.attempt != attempt or driver.call.session_id != session_id:
            raise UnknownRequest(f"no DE buffer of request {request_id!r} attempt {attempt} belongs to this session")
        _check_same_namespace(region.namespace, driver.namespace)
        return driver.deliver(region, pages, session_id)

    def end_delivery(self, request_id: str, attempt: int, session_id: str) -> None:
        """Nobody listens to a delivery any more: one that still goes on ends, and its request with it."""
        driver = self._by_request.get(request_id)
        if driver is None or (driver.call.attempt, driver.call.session_id) != (attempt, session_id):
            return
        if driver.machine.state is AssembleState.DELIVERING:
            driver.stop(Reason.CANCELLED, "the caller of Deliver went away")

    def cancel(self, request_id: str, attempt: int, session_id: str, message: str) -> int:
        """Ends the wait of an engine that came before its prefill node."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.attempt > attempt or waiting.session_id != session_id:
            return 0
        return int(self._drop_waiting(request_id, Reason.CANCELLED, message))

    def session_gone(self, session_id: str) -> None:
        for request_id, waiting in list(self._waiting.items()):
            if waiting.session_id == session_id:
                self._drop_waiting(request_id, Reason.ENGINE_GONE, "the engine is gone")

    def stop(self, reason: Reason, message: str) -> None:
        """Nobody waits any more: neither engines nor reservations."""
        for request_id in list(self._waiting):
            self._drop_waiting(request_id, reason, message)
        for place in self._places:
            place.refuse(Draining(message))


def _check_same_namespace(asked: Namespace, reserved: Namespace) -> None:
    """Raises `BadRequest` when a decode engine speaks of another model than the prefill node."""
    if asked != reserved:
        ours, theirs = asked.fingerprint.hex()[:16], reserved.fingerprint.hex()[:16]
        raise BadRequest(f"the decode engine speaks of namespace {ours}, the prefill node reserved for {theirs}")
