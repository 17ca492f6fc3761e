"""Decode nodes that refuse, answer late, or say that they have stopped before they have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from node_kit import NodeKit, OwnPeers, end_of, node_kit, told, until
from node_world import World
from test_node_incidents import SHORT

from kvmoverd.core.errors import KvmoverError, PeerUnreachable, TicketExpired
from kvmoverd.core.status import End, Path, Reason
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.peer import Helped, PartHandle, PartListener, PartOrder, Reservation, Reserved, Ticket
from kvmoverd.node.services import Limits

LONG = Limits(admission_wait_s=30, attach_timeout_s=30)


class LamePeer(LocalPeer):
    """A decode node that refuses one of its calls."""

    def __init__(self, kit: NodeKit, call: str, error: KvmoverError) -> None:
        super().__init__(kit.node.decode_side, kit.node.models)
        self._call, self._error = call, error
        self.answers = asyncio.Event()
        self.answers.set()

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        await self.answers.wait()
        self._maybe("set_prefix")
        return await super().set_prefix(ticket, prefix_blocks, helped)

    async def release_ticket(self, ticket: Ticket, reason: Reason) -> None:
        self._maybe("release_ticket")
        await super().release_ticket(ticket, reason)

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle:
        self._maybe("read_part")
        return super().read_part(order, listener)

    def _maybe(self, call: str) -> None:
        if call == self._call:
            raise self._error


async def test_a_decode_node_that_fails_before_the_first_layer_ends_the_stream() -> None:
    async with node_kit(limits=LONG) as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.node.peers = OwnPeers(LamePeer(kit, "set_prefix", PeerUnreachable("no answer")))
        kit.wire.closed = True
        stream = kit.node.stream(kit.plan(prefill, kit.call(prefill), keys, hit=2, path=Path.PE))
        await until(lambda: stream.machine.state.name == "DRAINING", "the stream stops")
        kit.wire.closed = False
        while kit.wire.release_one():
            pass
        end = end_of(await told(stream.outbox))
        assert (end.reason, end.message) == (Reason.PEER_LOST, "here: no answer")
        await kit.everything_is_home()


async def test_a_push_that_comes_after_the_decode_node_failed_is_told_at_once() -> None:
    async with node_kit(limits=LONG) as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        await kit.store(kit.engine(), keys)
        peer = LamePeer(kit, "set_prefix", PeerUnreachable("no answer"))
        peer.answers.clear()
        kit.node.peers = OwnPeers(peer)
        plan = kit.plan(prefill, kit.call(prefill, timeout_s=60), keys, hit=2, path=Path.PE)
        assert end_of(await told(kit.node.stream(plan).outbox)).reason is Reason.OK
        peer.answers.set()
        await until(lambda: bool(kit.node.prefills.by_name[plan.call.request_id, 1].failed), "the decode node's answer")
        push = kit.node.push(plan)
        end = end_of(await told(push.outbox))
        assert (end.reason, end.message) == (Reason.PEER_LOST, "here: no answer")
        await kit.everything_is_home()


async def test_a_ticket_that_is_void_when_the_part_begins_ends_the_stream() -> None:
    async with node_kit(limits=SHORT) as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.node.peers = OwnPeers(LamePeer(kit, "read_part", TicketExpired("void")))
        stream = kit.node.stream(kit.plan(prefill, kit.call(prefill), keys, hit=2, path=Path.DE))
        end = end_of(await told(stream.outbox))
        assert (end.reason, end.message, end.pages_quiet) == (Reason.LEASE_EXPIRED, "here: void", True)
        await kit.everything_is_home()


async def test_a_decode_node_that_does_not_take_the_ticket_back_harms_nobody() -> None:
    async with node_kit(limits=SHORT) as kit:
        prefill, keys = kit.engine(), kit.chain(2)
        kit.node.peers = OwnPeers(LamePeer(kit, "release_ticket", PeerUnreachable("no answer")))
        push = kit.node.push(kit.plan(prefill, kit.call(prefill), keys, hit=0, path=None))
        await until(lambda: push.request.prefix_set, "reserved")
        push.stop(Reason.CANCELLED, "test")
        assert end_of(await told(push.outbox)).reason is Reason.CANCELLED
        assert prefill.region.users == 0
        await kit.everything_is_home()


class SlowPeer(LocalPeer):
    """A decode node whose answer to a reservation takes its time on the way."""

    def __init__(self, kit: NodeKit) -> None:
        super().__init__(kit.node.decode_side, kit.node.models)
        self.answers = asyncio.Event()

    async def reserve(self, reservation: Reservation) -> Reserved:
        reserved = await super().reserve(reservation)
        await self.answers.wait()
        return reserved


async def test_a_buffer_that_was_reserved_for_a_request_that_is_gone_is_given_back() -> None:
    async with node_kit(limits=LONG) as kit:
        prefill, peer = kit.engine(), SlowPeer(kit)
        kit.node.peers = OwnPeers(peer)
        push = kit.node.push(kit.plan(prefill, kit.call(prefill, timeout_s=60), kit.chain(2), hit=0, path=None))
        await until(lambda: len(kit.node.decode_side._by_ticket) == 1, "reserved over there")
        push.stop(Reason.CANCELLED, "test")
        assert end_of(await told(push.outbox)).reason is Reason.CANCELLED
        assert prefill.region.users == 0
        peer.answers.set()
        await kit.everything_is_home()


class _HastyPart:
    """Says at once that it has stopped; what it has under way lands when it lands."""

    def __init__(self, real: PartHandle, listener: PartListener) -> None:
        self._real, self._listener = real, listener

    def credit(self, prefix_blocks: int, layers: int) -> None:
        self._real.credit(prefix_blocks, layers)

    def assemble(self, sink_id: int) -> None:
        self._real.assemble(sink_id)

    def give_up(self, kept_blocks: int) -> None:
        self._real.give_up(kept_blocks)

    def stop(self) -> None:
        self._listener.on_end(End(Reason.CANCELLED, "stopped by its owner"))


class HastyPeer(LocalPeer):
    """A decode node that can't be reached any more: its part is given up without knowing what it still sends."""

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle:
        silent = replace(listener, on_end=lambda end: None)
        return _HastyPart(super().read_part(order, silent), listener)


async def test_pages_are_quiet_when_their_sink_is_whatever_the_reader_says() -> None:
    async with node_kit(slots=24, limits=SHORT) as kit:
        kit.node.peers = OwnPeers(HastyPeer(kit.node.decode_side, kit.node.models))
        world = World(kit)
        await world.prepare()
        world.turn_de()
        while not kit.wire.held:
            await world.step()
        stream = next(heard for heard in world.heard if heard.name == "stream")
        kit.node.cancel("x", 1, world.prefill.session.session_id)
        await world.settle()
        assert stream.end is None, "a frame may still land in the pages"
        while stream.end is None:
            assert await world.step()
        assert (stream.end.reason, stream.end.pages_quiet) == (Reason.CANCELLED, True)
        await world.finish()
