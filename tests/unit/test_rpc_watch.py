"""Daemons that watch each other: death, silence, restarts and strangers, and what ends because of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode
from rpc_kit import HERE, LAYERS, THERE, Engine, Kit, check_refusals, end_of, free_port, refused, rpc_kit, until
from test_rpc_node_api import reservation
from test_rpc_peers import Heard, order, other, pair, peer_of, reached_at_last
from test_rpc_peers import reservation as peer_reservation

from kvmover_proto import common_pb2, node_pb2
from kvmoverd.core.errors import PeerMismatch, PeerUnreachable
from kvmoverd.core.status import Reason
from kvmoverd.node.pushing import PushDriver
from kvmoverd.rpc import peer_client
from kvmoverd.rpc.watching import Pulse, Watchers

PRECONDITION, INVALID = StatusCode.FAILED_PRECONDITION, StatusCode.INVALID_ARGUMENT
SHORT = {"silence": "400ms"}


async def assembling(kit: Kit, engine: Engine, request_id: str = "r", **changed: Any) -> Any:
    """An engine that waits for a buffer which `changed` reserved."""
    assembled = engine.assemble(request_id)
    await kit.ask_node("Reserve", reservation(engine, request_id=request_id, **changed))
    assert (await assembled.read()).WhichOneof("kind") == "attached"
    return assembled


def test_silence_is_counted_in_own_beats_so_that_a_pause_of_our_own_is_none() -> None:
    pulse = Pulse(own_silence_s=1.0, other_silence_s=8.0)
    assert pulse.beat_s == 0.25
    assert [pulse.beat() for _ in range(4)] == [False] * 4
    pulse.heard()
    assert [pulse.beat() for _ in range(5)] == [False] * 4 + [True]


async def test_a_watch_that_ends_before_the_first_byte_ends_the_assembly_and_frees_its_buffer(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await kit.hello()
        assembled = await assembling(kit, engine)
        began_s = time.monotonic()
        kit.watches.pop((HERE, "boot")).cancel()
        end = await end_of(assembled)
        assert (end.status.reason, end.pages_quiet) == (common_pb2.PEER_LOST, True)
        assert time.monotonic() - began_s < 1.0
        found = await refused(kit.ask_node("Reserve", reservation(engine, request_id="late")))
        assert (found.code, found.reason) == (PRECONDITION, "PROTOCOL_MISMATCH")
        await kit.everything_is_home()


async def test_a_watch_that_falls_silent_is_as_good_as_ended(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, node_api=SHORT | {"listen": "127.0.0.1:0"}) as kit:
        engine = await kit.engine()
        await kit.hello()
        assembled = await assembling(kit, engine)
        end = await end_of(assembled)
        assert end.status.reason == common_pb2.PEER_LOST
        assert "was silent for 0.4 s" in end.status.message
        await kit.everything_is_home()


async def test_a_watch_that_goes_on_talking_goes_on(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, node_api=SHORT | {"listen": "127.0.0.1:0"}) as kit:
        engine = await kit.engine()
        await kit.hello()
        assembled = await assembling(kit, engine)
        watch, replies = kit.watches[HERE, "boot"], 0
        for _ in range(10):
            await watch.write(node_pb2.WatchRequest())
            await watch.read()
            replies += 1
        assert (replies, kit.node.requests.by_kind()["assemble"]) == (10, 1)
        assembled.cancel()
        await kit.everything_is_home()


async def test_a_new_boot_voids_what_the_old_one_of_the_same_node_held(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await kit.hello(boot_id="old")
        assembled = await assembling(kit, engine, boot_id="old")
        await kit.hello(boot_id="new")
        end = await end_of(assembled)
        assert (end.status.reason, "restarted" in end.status.message) == (common_pb2.PEER_LOST, True)
        again = await assembling(kit, engine, "r2", boot_id="new")
        assert await kit.watches.pop((HERE, "old")).read() is grpc.aio.EOF
        assert kit.node.requests.by_kind()["assemble"] == 1, "the old watch's end touches nothing of the new boot"
        again.cancel()
        await kit.everything_is_home()


async def test_a_boot_that_watches_anew_has_given_up_what_it_held(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await kit.hello()
        assembled = await assembling(kit, engine)
        second = await kit.watch()
        assert (await end_of(assembled)).status.reason == common_pb2.PEER_LOST
        assert len(kit.daemon._watchers) == 1
        second.cancel()
        await until(lambda: not len(kit.daemon._watchers), "the watch ends")


async def test_who_did_not_say_hello_or_says_nothing_sensible_may_not_watch(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        await kit.ask_node("Hello", node_pb2.HelloRequest(node=HERE, boot_id="boot", protocol=2, transport="tcp"))

        def watch(node: str = HERE, boot_id: str = "boot", silence_ms: int = 1_000) -> Any:
            request = node_pb2.WatchRequest(node=node, boot_id=boot_id, silence_ms=silence_ms)
            return kit.ask_node("Watch", iter([request]))

        await check_refusals(
            kit,
            [
                ("a stranger", lambda: watch(node="stranger"), PRECONDITION, "PROTOCOL_MISMATCH"),
                ("no name", lambda: watch(node="", boot_id=""), PRECONDITION, "PROTOCOL_MISMATCH"),
                ("another boot", lambda: watch(boot_id="other"), PRECONDITION, "PROTOCOL_MISMATCH"),
                ("no silence", lambda: watch(silence_ms=0), INVALID, "BAD_REQUEST"),
                ("99 ms", lambda: watch(silence_ms=99), INVALID, "BAD_REQUEST"),
                ("over 10 minutes", lambda: watch(silence_ms=600_001), INVALID, "BAD_REQUEST"),
            ],
        )
        assert len(kit.daemon._watchers) == 0


async def test_both_ends_learn_of_a_watch_that_one_has_given_up(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        assembled, pushed = decode.assemble("r"), prefill.push(prefill.plan("r", decode_node=THERE))
        assert (await assembled.read()).WhichOneof("kind") == "attached"
        (driver,) = [driver for driver in here.node.requests.live() if isinstance(driver, PushDriver)]
        await until(lambda: driver.request.prefix_set, "no call is under way")
        boot_id = here.daemon.boot_id
        there.daemon._peer_lost(HERE, boot_id, "a test says so")
        assert (await end_of(assembled)).status.reason == common_pb2.PEER_LOST
        assert (await end_of(pushed)).status.reason == common_pb2.PEER_LOST
        await here.everything_is_home()
        await there.everything_is_home()
        assert await reached_at_last(peer_of(here)) == there.daemon.boot_id
        await until(lambda: there.daemon._watchers.boot_of(HERE) == boot_id, "it is watched again")


async def test_a_push_whose_decode_node_goes_ends_at_once_with_nothing_under_way(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        pushed = prefill.push(prefill.plan("r", decode_node=THERE, timeout_ms=60_000))
        await until(here.node.requests.live, "it runs")
        (driver,) = [driver for driver in here.node.requests.live() if isinstance(driver, PushDriver)]
        await until(lambda: driver.request.prefix_set, "no call is under way")
        began_s = time.monotonic()
        there.daemon._watchers.stop()
        end = await end_of(pushed)
        assert (end.status.reason, end.pages_quiet) == (common_pb2.PEER_LOST, True)
        assert time.monotonic() - began_s < 1.0
        await here.everything_is_home()


async def test_calls_and_parts_that_run_end_with_the_watch(tmp_path: Path) -> None:
    changed = {"pool": {"de_buffer_bytes": 16_384}, "requests": {"admission_wait": "30s"}}
    async with pair(tmp_path, **changed) as (here, there):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer, heard = peer_of(here), Heard()
        held = await peer.reserve(peer_reservation(prefill, timeout_s=60.0))
        peer.read_part(order(held.ticket, timeout_s=60.0), heard.listener)
        await until(lambda: heard.prefixes, "the prefix is told")
        waits = asyncio.create_task(peer.reserve(peer_reservation(prefill, "late", timeout_s=60.0)))
        await until(lambda: len(there.node.decode_side._places) == 1, "the other waits for room")
        peer.gone("a test says so")
        assert [(end.reason, "a test says so" in end.message) for end in heard.ends] == [(Reason.PEER_LOST, True)]
        with pytest.raises(PeerUnreachable, match="went away meanwhile"):
            await waits
        assert (peer.state, peer.parts, peer._calls) == ("down", set(), set())
        await there.everything_is_home()


async def test_a_node_under_a_name_that_is_not_its_own_is_refused_by_name(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    async with (
        rpc_kit(tmp_path, name=HERE, port=ports[0], peers=other("impostor", ports[1])) as here,
        rpc_kit(tmp_path, name=THERE, port=ports[1], peers=other(HERE, ports[0])) as there,
    ):
        with pytest.raises(PeerMismatch, match=r"says that it is 'there', \[\[peers\]\] says 'impostor'"):
            await peer_of(here, "impostor").route()
        engine = await here.engine()
        end = await end_of(engine.push(engine.plan("r", decode_node="impostor")))
        assert end.status.reason == common_pb2.PEER_LOST
        assert len(there.daemon._watchers) == 0


async def test_a_peer_that_does_not_answer_three_calls_in_a_row_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_client, "PURGED_S", 0.02)
    async with pair(tmp_path) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        peer = peer_of(here)
        held = await peer.reserve(peer_reservation(prefill))

        async def hangs(*_: object) -> None:
            await asyncio.sleep(30)

        monkeypatch.setattr(there.node.namespaces, "purged_elsewhere", hangs)
        for _ in range(3):
            assert peer._breaker.wait_s(time.monotonic()) == 0.0
            await peer.purged(node_pb2.PurgedRequest())
        with pytest.raises(PeerUnreachable, match="asked again in") as refused_now:
            await peer.route()
        assert refused_now.value.retryable
        assert 0 < int(refused_now.value.details["retry_after_ms"]) <= 1_001
        assert peer.state == "up", "its watch goes on"
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        assert (await peer.route()).boot_id == there.daemon.boot_id, "an answer closes the breaker"
        await there.everything_is_home()


async def test_nothing_of_a_watch_is_left_when_either_daemon_stops(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        await end_of(prefill.push(prefill.plan("r", decode_node=THERE), LAYERS))
        assert len(there.daemon._watchers) == 1
        began_s = time.monotonic()
        assert await there.daemon.stop()
        assert await here.daemon.stop()
        assert time.monotonic() - began_s < 2.0
        assert (len(there.daemon._watchers), len(here.daemon._watchers)) == (0, 0)
        await asyncio.sleep(0.05)
        left = [task for task in asyncio.all_tasks() if "watching" in str(task.get_coro())]
        assert not left


async def test_watchers_take_one_boot_of_each_node_and_none_once_they_stop() -> None:
    lost: list[tuple[str, str, str]] = []
    watchers = Watchers(silence_s=1.0, on_lost=lambda *what: lost.append(what), starves=lambda node: False)

    async def nothing() -> Any:
        await asyncio.sleep(60)
        yield node_pb2.WatchRequest()

    serving = []
    for number in range(50):
        first = node_pb2.WatchRequest(node="n", boot_id=f"b{number}", silence_ms=1_000)
        serving.append(watchers.serve(first, nothing()))
        await anext(serving[-1])
    assert (len(watchers), watchers.boot_of("n")) == (1, "b49")
    assert [boot for _, boot, _ in lost] == [f"b{number}" for number in range(49)]
    watchers.stop()
    for replies in serving:
        assert [reply async for reply in replies] == []
    assert (len(watchers), lost[-1]) == (0, ("n", "b49", "this node stops"))
    with pytest.raises(PeerUnreachable, match="stops"):
        await anext(watchers.serve(node_pb2.WatchRequest(node="n", boot_id="b", silence_ms=1_000), nothing()))


async def test_a_push_that_is_still_to_come_ends_at_once_when_its_decode_node_went_meanwhile(tmp_path: Path) -> None:
    async with pair(tmp_path, requests={"attach_timeout": "30s", "admission_wait": "5s"}) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        await prefill.store(2)
        pages = [common_pb2.PageSet(pages=[0, 1, 2])]
        plan = prefill.plan(
            "r", blocks=3, hit_blocks=2, decode_node=THERE, path=common_pb2.PATH_PE, page_sets=pages, timeout_ms=60_000
        )
        assert (await end_of(prefill.stream(plan))).status.reason == common_pb2.OK
        assert len(here.node.prefills) == 1, "the push is awaited"
        there.daemon._watchers.stop()
        await until(lambda: len(here.node.prefills) == 0, "it is given up")
        end = await end_of(prefill.push(plan))
        assert (end.status.reason, end.status.message) == (common_pb2.PEER_LOST, "there: there ended its watch")
        await here.everything_is_home()
