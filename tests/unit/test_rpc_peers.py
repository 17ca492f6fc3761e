"""Two daemons that talk to each other: peers that are up, late, busy, restarted or gone, and the parts they read."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rpc_kit import HERE, LAYERS, THERE, Engine, Kit, end_of, events_of, free_port, keys_of, rpc_kit, until

from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.core.errors import PeerUnreachable, PoolExhausted, TicketExpired
from kvmoverd.core.runs import Runs
from kvmoverd.core.status import BlockOutcome, End, Reason
from kvmoverd.core.status import Path as ReadPath
from kvmoverd.node.peer import PartListener, PartOrder, Reservation, Ticket
from kvmoverd.node.reading import PartDriver
from kvmoverd.rpc import peer_client
from kvmoverd.rpc.peer_client import GrpcPeer

PART_NUMBERS = itertools.count(1)


def other(name: str, port: int) -> list[dict[str, str]]:
    return [{"name": name, "address": f"127.0.0.1:{port}"}]


@asynccontextmanager
async def pair(home: Path, **changed: Any) -> AsyncIterator[tuple[Kit, Kit]]:
    """A prefill node `here` and a decode node `there`, each the other's peer."""
    ports = free_port(), free_port()
    async with (
        rpc_kit(home, name=HERE, port=ports[0], peers=other(THERE, ports[1]), **changed) as here,
        rpc_kit(home, name=THERE, port=ports[1], peers=other(HERE, ports[0]), **changed) as there,
    ):
        yield here, there


def peer_of(kit: Kit, name: str = THERE) -> GrpcPeer:
    assert kit.node.peers is not None
    peer = kit.node.peers.peer(name)
    assert isinstance(peer, GrpcPeer)
    return peer


def reservation(engine: Engine, request_id: str = "r", **changed: Any) -> Reservation:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "fingerprint": engine.fingerprint,
        "block_keys": tuple(keys_of(engine.fingerprint, 2)),
        "tail_tokens": 0,
        "hit_blocks": 2,
        "path": ReadPath.DE,
        "timeout_s": 5.0,
        "node": HERE,
        "boot_id": engine.kit.daemon.boot_id,
    }
    return Reservation(**(fields | changed))


def order(ticket: Ticket, **changed: Any) -> PartOrder:
    """All hits of the usual reservation; without credit nothing is sent."""
    fields: dict[str, Any] = {
        "part": next(PART_NUMBERS),
        "blocks": Runs.of((0, 2)),
        "sink_id": 1,
        "credit_layers": 0,
        "first_layer": 0,
        "holds": False,
        "timeout_s": 5.0,
        "ticket": ticket,
    }
    return PartOrder(**(fields | changed))


class Heard:
    """What a part told its owner."""

    def __init__(self) -> None:
        self.prefixes: list[tuple[int, BlockOutcome | None]] = []
        self.ends: list[End] = []
        self.listener = PartListener(lambda blocks, lost: self.prefixes.append((blocks, lost)), self.ends.append)


@pytest.mark.parametrize("path", [common_pb2.PATH_PE, common_pb2.PATH_DE])
async def test_a_request_over_two_nodes_counts_its_bytes_at_both(tmp_path: Path, path: int) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await (prefill if path == common_pb2.PATH_PE else decode).store(2)
        pages = [common_pb2.PageSet(pages=[0, 1, 2])]
        plan = prefill.plan("r", blocks=3, hit_blocks=2, decode_node=THERE, path=path, page_sets=pages)
        assembled, streamed = decode.assemble("r"), prefill.stream(plan)
        pushed = prefill.ask("PushLayers")
        await pushed.write(engine_pb2.PushLayersRequest(plan=plan))
        ready = await end_of(streamed)
        assert (ready.status.reason, ready.prefix_blocks) == (common_pb2.OK, 2), ready
        await pushed.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
        sent = await end_of(pushed)
        assert sent.status.reason == common_pb2.OK, sent
        deliver = engine_pb2.DeliverRequest(
            request_id="r", attempt=1, region_id=decode.region_id, pages=common_pb2.PageSet(pages=[4, 5, 6])
        )
        while (await assembled.read()).WhichOneof("kind") != "whole":
            pass
        assert (await end_of(decode.ask("Deliver", deliver))).status.reason == common_pb2.OK
        assert (await end_of(assembled)).status.reason == common_pb2.OK
        await here.everything_is_home()
        await there.everything_is_home()
        (seen,) = (await here.status()).peers
        assert (seen.node, seen.state, seen.boot_id) == (THERE, "up", there.daemon.boot_id)
        assert seen.sent_bytes == sent.moved_bytes > 0
        (seen,) = (await there.status()).peers
        assert seen.sent_bytes == (ready.moved_bytes if path == common_pb2.PATH_DE else 0)
        assert ready.moved_bytes > 0


async def test_a_peer_nobody_spoke_to_is_unknown_and_one_that_does_not_listen_is_down(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, peers=other(THERE, free_port())) as kit:
        engine = await kit.engine()
        (fresh,) = (await kit.status()).peers
        assert (fresh.node, fresh.state, fresh.boot_id, fresh.sent_bytes) == (THERE, "unknown", "", 0)
        end = await end_of(engine.push(engine.plan("r", decode_node=THERE)))
        assert (end.status.reason, end.status.retryable, end.pages_quiet) == (common_pb2.PEER_LOST, True, True)
        (down,) = (await kit.status()).peers
        assert down.state == "down"
        again = await end_of(engine.push(engine.plan("r2", decode_node=THERE)))
        assert again.status.reason == common_pb2.PEER_LOST
        assert "asked again in" in again.status.message
        await kit.everything_is_home()


async def test_a_node_that_restarted_is_greeted_again(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    async with rpc_kit(tmp_path, name=HERE, port=ports[0], peers=other(THERE, ports[1])) as here:
        prefill = await here.engine()
        boots = []
        for number in range(2):
            async with rpc_kit(tmp_path, name=THERE, port=ports[1], peers=other(HERE, ports[0])) as there:
                await there.engine()
                await pushed_at_last(prefill, prefill.plan(f"r{number}", decode_node=THERE))
                boots.append(peer_of(here).boot_id)
                assert boots[-1] == there.daemon.boot_id
        assert boots[0] != boots[1]


async def pushed_at_last(engine: Engine, plan: engine_pb2.RequestPlan) -> None:
    """As an engine does: a higher attempt after PEER_LOST, until the pause is over."""
    for attempt in range(1, 20):
        plan.attempt = attempt
        end = await end_of(engine.push(plan, LAYERS))
        if end.status.reason == common_pb2.OK:
            return
        assert end.status.reason == common_pb2.PEER_LOST, end
        await asyncio.sleep(0.2)
    raise AssertionError("the node was not reached any more")


async def test_a_peer_that_lets_a_request_wait_too_long_is_not_lost(tmp_path: Path) -> None:
    async with pair(tmp_path, pool={"de_buffer_bytes": 16_384}, requests={"admission_wait": "4s"}) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        peer = peer_of(here)
        held = await peer.reserve(reservation(prefill))
        with pytest.raises(PeerUnreachable, match="DEADLINE_EXCEEDED"):
            await peer.reserve(reservation(prefill, "late", timeout_s=0.1))
        assert (peer.state, peer.boot_id) == ("up", there.daemon.boot_id)
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()


async def test_a_decode_node_whose_slots_come_home_late_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a cut it waits for slots, as long as a reservation may."""
    async with pair(tmp_path) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        peer = peer_of(here)
        held = await peer.reserve(reservation(prefill))
        for name in ("CALL_S", "RESERVE_S"):
            monkeypatch.setattr(peer_client, name, 0.05)

        async def waits(*said: object) -> list[int]:
            await asyncio.sleep(1.0)
            return []

        monkeypatch.setattr(there.node.decode_side, "set_prefix", waits)
        for _ in range(peer_client.FAILURES_MAX):
            with pytest.raises(PeerUnreachable, match="DEADLINE_EXCEEDED"):
                await peer.set_prefix(held.ticket, 2, ())
        assert (await peer.route()).boot_id == there.daemon.boot_id, "it is not left alone"
        monkeypatch.undo()
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()


async def test_a_peer_that_refuses_is_not_lost_and_its_words_arrive(tmp_path: Path) -> None:
    async with pair(tmp_path, pool={"de_buffer_bytes": 16_384}, requests={"admission_wait": "50ms"}) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        peer = peer_of(here)
        held = await peer.reserve(reservation(prefill))
        with pytest.raises(PoolExhausted) as full:
            await peer.reserve(reservation(prefill, "late"))
        assert full.value.details["free"] == "0"
        void = Ticket(there.daemon.boot_id, 99, 1)
        with pytest.raises(TicketExpired, match="99"):
            await peer.set_prefix(void, 0, ())
        await peer.release_ticket(void, Reason.CANCELLED)
        assert peer.state == "up"
        heard = Heard()
        peer.read_part(order(void, credit_layers=LAYERS), heard.listener)
        await until(lambda: heard.ends, "the part ends")
        assert [end.reason for end in heard.ends] == [Reason.LEASE_EXPIRED]
        assert peer.state == "up"
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()


async def test_credits_that_pile_up_are_sent_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    credit = PartDriver.credit

    def counted(part: PartDriver, prefix_blocks: int, layers: int) -> None:
        taken.append((prefix_blocks, layers))
        credit(part, prefix_blocks, layers)

    monkeypatch.setattr(PartDriver, "credit", counted)
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer = peer_of(here)
        held = await peer.reserve(reservation(prefill))
        arrived: list[int] = []
        sink = here.node.services.mover.expect(lambda layer, first: None, lambda layer, moved: arrived.append(layer))
        heard = Heard()
        part = peer.read_part(order(held.ticket, sink_id=sink), heard.listener)
        await until(lambda: heard.prefixes, "the prefix is told")
        for number in range(1_000):
            part.credit(99, number)
        await until(lambda: (99, 999) in taken, "the last credit arrives")
        assert len(taken) <= 3
        assert (arrived, heard.ends) == ([], [])
        part.stop()
        await until(lambda: heard.ends, "the part ends")
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()
        assert [end.reason for end in heard.ends] == [Reason.CANCELLED]


async def test_a_part_ends_once_when_it_is_stopped_before_and_after_it_begins(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer = peer_of(here)
        for number in range(6):
            held = await peer.reserve(reservation(prefill, f"r{number}"))
            heard = Heard()
            part = peer.read_part(order(held.ticket), heard.listener)
            for _ in range(4**number):
                await asyncio.sleep(0)
            part.stop()
            part.stop()
            await until(lambda heard=heard: heard.ends, "the part ends")
            part.credit(2, 1)
            part.stop()
            await peer.release_ticket(held.ticket, Reason.CANCELLED)
            await there.everything_is_home()
            assert [end.reason for end in heard.ends] == [Reason.CANCELLED], number


async def test_a_listener_that_fails_does_not_leave_the_part_without_an_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer, heard = peer_of(here), Heard()
        held = await peer.reserve(reservation(prefill))

        def broken(blocks: int, lost: BlockOutcome | None) -> None:
            raise RuntimeError("a secret")

        peer.read_part(order(held.ticket), PartListener(broken, heard.ends.append))
        await until(lambda: heard.ends, "the part ends")
        assert [end.reason for end in heard.ends] == [Reason.INTERNAL]
        assert any(record.name == "kvmoverd.rpc.remote_part" and record.exc_info for record in caplog.records)
        await there.everything_is_home()


async def test_a_part_whose_reader_stops_ends_in_bounded_time(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer, heard = peer_of(here), Heard()
        held = await peer.reserve(reservation(prefill))
        peer.read_part(order(held.ticket), heard.listener)
        await until(lambda: heard.prefixes, "the prefix is told")
        await there.daemon.stop()
        await until(lambda: heard.ends, "the part ends")
        assert len(heard.ends) == 1
        assert heard.ends[0].reason in (Reason.SHUTTING_DOWN, Reason.CANCELLED, Reason.PEER_LOST)


async def test_a_part_that_outlives_its_time_is_over_and_its_node_not_lost(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer, heard = peer_of(here), Heard()
        held = await peer.reserve(reservation(prefill))
        peer.read_part(order(held.ticket, timeout_s=0.1), heard.listener)
        await until(lambda: heard.ends, "the part ends")
        assert [end.reason for end in heard.ends] == [Reason.DEADLINE]
        assert peer.state == "up"
        await there.everything_is_home()


async def test_a_failed_greeting_is_told_to_all_who_wait_and_said_anew_after_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_client, "PAUSE_S", 0.05)
    ports = free_port(), free_port()
    async with rpc_kit(tmp_path, name=HERE, port=ports[0], peers=other(THERE, ports[1])) as here:
        peer = peer_of(here)
        outcomes = await asyncio.gather(*(peer.route() for _ in range(8)), return_exceptions=True)
        assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)
        impatient = asyncio.get_running_loop().create_task(peer.route())
        await asyncio.sleep(0)
        impatient.cancel()
        async with rpc_kit(tmp_path, name=THERE, port=ports[1], peers=other(HERE, ports[0])) as there:
            assert await reached_at_last(peer) == there.daemon.boot_id
            assert peer.state == "up"


async def reached_at_last(peer: GrpcPeer) -> str:
    for _ in range(500):
        try:
            return (await peer.route()).boot_id
        except PeerUnreachable:
            await asyncio.sleep(0.02)
    raise AssertionError("the node was not reached any more")


async def test_a_stream_over_a_dead_node_tells_its_engine(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        sets = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]
        plan = prefill.plan("r", hit_blocks=2, decode_node=THERE, path=common_pb2.PATH_DE, page_sets=sets)
        streamed, pushed = prefill.stream(plan), prefill.push(plan)
        while (await streamed.read()).WhichOneof("kind") != "ready":
            pass
        await there.daemon.stop()
        ends = [await end_of(streamed), await end_of(pushed)]
        assert all(end.pages_quiet for end in ends)
        assert ends[0].status.reason == common_pb2.PREFIX_CUT
        assert [event async for event in events_of(streamed)] == []
        await here.everything_is_home()
