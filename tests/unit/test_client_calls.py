"""Calls that take a while, against a real gRPC server that plays scripts: what each wait says, and when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from client_kit import LAYERS, ScriptedDaemon

from kvmover_client import AsyncClient as Client
from kvmover_client import (
    Attached,
    BadKeys,
    BadRequest,
    BlockResult,
    BlockState,
    CallCancelled,
    DaemonGone,
    Geometry,
    KvmoverError,
    Layout,
    Lease,
    Manifest,
    Model,
    Plan,
    Prefix,
    QueueFull,
    Reason,
    Region,
    RegionMemory,
    RequestEnded,
    StaleAttempt,
    StoreChain,
    Stored,
    TimedOut,
    Whole,
    async_client,
    paged_geometry,
)
from kvmover_client import Path as ReadPath
from kvmover_client.call import Call
from kvmover_proto import common_pb2

LAYOUT = Layout.uniform(layers=LAYERS, tokens=4, token_bytes=8)
MODEL = Model(Manifest("m", bytes(32), bytes(32), LAYOUT, "fp8"), bytes(32), 128, 9)
KEYS = (bytes([1]) * 32, bytes([2]) * 32)

Opener = Callable[[Client, str], Any]


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[ScriptedDaemon]:
    daemon = await ScriptedDaemon(tmp_path / "s").start()
    yield daemon
    await daemon.stop()


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[Client]:
    async with await Client.connect(daemon.endpoint, name="test") as client:
        yield client


def plan(request_id: str, decode_node: str = "de", page_sets: tuple[tuple[int, ...], ...] = ((0, 1, 2),)) -> Plan:
    return Plan(request_id, 1, MODEL.fingerprint, KEYS, 3, 2, decode_node, ReadPath.DE, 5, page_sets, 30.0)


def region() -> Region:
    geometry: Geometry = paged_geometry(LAYOUT, 4)
    return Region(5, 4, 1, RegionMemory.create(geometry.size_bytes, "kv"), geometry)


OPENERS: dict[str, Opener] = {
    "fetch": lambda client, name: client.fetch_blocks(name, 1, MODEL, KEYS),
    "stream": lambda client, name: client.stream_layers(plan(name)),
    "push": lambda client, name: client.push_layers(plan(name)),
    "assemble": lambda client, name: client.assemble_blocks(name, 1, MODEL),
    "deliver": lambda client, name: client.deliver(name, 1, region(), [0, 1, 2]),
    "store": lambda client, name: client.store_blocks(name, 1, MODEL, KEYS, bytes(32), 0, region(), [0, 1]),
}
LAST_WAITS: dict[str, Callable[[Any], Any]] = {
    "fetch": lambda call: call.result(),
    "stream": lambda call: call.wait_layer(3),
    "push": lambda call: call.wait_pushed(1),
    "assemble": lambda call: call.stored(),
    "deliver": lambda call: call.wait_layer(0),
    "store": lambda call: call.result(),
}


async def test_a_fetch_tells_each_block_and_its_lease(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.fetch_blocks("plain", 1, MODEL, KEYS, lease_s=2.0, timeout_s=3.0)
    result = await call.result()
    # The second reason is a number that this client does not know.
    assert result.blocks == (
        BlockResult(BlockState.HIT, Reason.OK),
        BlockResult(BlockState.FAILED, Reason.INTERNAL),
    )
    assert result.lease == Lease(1, 2, 1.5) and call.done_blocks == 1
    end = await call.end()
    assert (end.reason, end.pages_quiet, end.moved_bytes, end.storage_read_bytes) == (Reason.OK, True, 7, 5)
    (request,) = daemon.engine.seen
    assert (request.timeout_ms, request.lease_ms, request.region_id) == (3000, 2000, 0)
    assert request.block_keys == b"".join(KEYS)


async def test_a_fetch_through_to_pages_names_them(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.fetch_blocks("plain", 1, MODEL, KEYS, region=region(), pages=(3, 1))
    await call.end()
    (request,) = daemon.engine.seen
    assert (request.region_id, list(request.pages.pages), request.lease_ms) == (5, [3, 1], 0)


async def test_a_stream_tells_prefix_then_layers_then_its_end(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.stream_layers(plan("plain", page_sets=((0, 1, 2), (3, 4, 5))))
    assert await call.prefix() == Prefix(2, None)
    for layer in range(LAYERS):
        await call.wait_layer(layer)
    assert call.ready_layers == LAYERS
    assert (await call.end()).prefix_blocks == 2
    await call.quiet()
    await call.computed(LAYERS)
    (sent,) = daemon.engine.seen
    assert (sent.request_id, sent.attempt, sent.fingerprint) == ("plain", 1, MODEL.fingerprint)
    assert (sent.tail_tokens, sent.hit_blocks, sent.decode_node, sent.path) == (3, 2, "de", common_pb2.PATH_DE)
    assert (sent.timeout_ms, sent.region_id, sent.block_keys) == (30_000, 5, b"".join(KEYS))
    assert [list(pages.pages) for pages in sent.page_sets] == [[0, 1, 2], [3, 4, 5]]


async def test_a_stream_without_a_push_takes_what_was_computed(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.stream_layers(plan("plain", decode_node=""))
    await call.wait_layer(1)
    with pytest.raises(BadRequest, match=r"layers \[0, 3\) said to be computed, 2 are ready"):
        await call.computed(3)
    await call.computed(2)
    await call.wait_layer(3)
    assert daemon.engine.seen[-1].layers == 2


async def test_a_push_sends_the_latest_word_and_tells_what_was_applied(client: Client) -> None:
    call = await client.push_layers(plan("plain"))
    await call.computed(1)
    await call.wait_pushed(1)
    for layers in (2, 3, LAYERS):
        await call.computed(layers)
    with pytest.raises(BadRequest, match=r"layers \[0, 2\) said to be computed after \[0, 4\)"):
        await call.computed(2)
    await call.wait_pushed(LAYERS)
    assert call.pushed_layers == LAYERS and (await call.end()).reason is Reason.OK
    await call.computed(LAYERS)


async def test_an_assembly_is_attached_then_whole_then_stored(client: Client) -> None:
    call = await client.assemble_blocks("plain", 1, MODEL)
    assert await call.attached() == Attached(3, 1, "pe")
    assert await call.whole() == Whole(2)
    assert await call.stored() == Stored(1, 0)
    assert (await call.end()).reason is Reason.OK


async def test_a_delivery_tells_its_layers(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.deliver("plain", 2, region(), [2, 0, 1])
    await call.wait_layer(LAYERS - 1)
    assert (await call.end()).reason is Reason.OK
    (request,) = daemon.engine.seen
    assert (request.attempt, request.region_id, list(request.pages.pages)) == (2, 5, [2, 0, 1])


async def test_a_store_is_accepted_then_durable(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.store_blocks("plain", 1, MODEL, KEYS, KEYS[0], 6, region(), [2, 3])
    assert await call.accepted() == 2
    assert await call.result() == [
        BlockResult(BlockState.HIT, Reason.OK),
        BlockResult(BlockState.FAILED, Reason.DROPPED),
    ]
    (request,) = daemon.engine.seen
    assert (request.parent_key, request.first_depth, list(request.pages.pages)) == (KEYS[0], 6, [2, 3])


async def test_blocks_of_several_chains_go_in_one_call(daemon: ScriptedDaemon, client: Client) -> None:
    chains = [StoreChain(KEYS[:1], KEYS[1], 6), StoreChain(KEYS[1:], bytes(32), 0)]
    call = await client.store_chains("plain", 1, MODEL, chains, region(), [2, 3])
    assert len(await call.result()) == 2
    (request,) = daemon.engine.seen
    assert (request.block_keys, request.parent_key, request.first_depth) == (b"".join(KEYS), KEYS[1], 6)
    assert [(chain.blocks, chain.parent_key, chain.first_depth) for chain in request.chains] == [(1, bytes(32), 0)]
    for wrong in ([], [*chains, StoreChain((), bytes(32), 0)]):
        with pytest.raises(BadRequest, match="chains are given: there must be one or more"):
            await client.store_chains("plain", 2, MODEL, wrong, region(), [2, 3])


async def test_a_cut_stream_keeps_what_came_and_says_the_rest_will_not(client: Client) -> None:
    call = await client.stream_layers(plan("cut"))
    with pytest.raises(RequestEnded, match="ended with PREFIX_CUT before layer 2: as scripted") as caught:
        await call.wait_layer(2)
    assert caught.value.end.prefix_blocks == 2 and caught.value.retryable
    assert await call.prefix() == Prefix(2, BlockResult(BlockState.FAILED, Reason.CORRUPT))
    await call.wait_layer(1)
    with pytest.raises(RequestEnded):
        await call.computed(1)


@pytest.mark.parametrize("kind", ["fetch", "stream", "push", "deliver", "store"])
async def test_pages_that_were_not_quiet_at_the_end_become_so(client: Client, kind: str) -> None:
    call = await OPENERS[kind](client, "unquiet")
    end = await call.end()
    assert (end.reason, end.pages_quiet) == (Reason.DEADLINE, False)
    await call.quiet()


@pytest.mark.parametrize("kind", OPENERS)
async def test_a_cancelled_call_still_has_its_last_word(daemon: ScriptedDaemon, client: Client, kind: str) -> None:
    call = await OPENERS[kind](client, "hang")
    call.cancel()
    call.cancel()
    end = await call.end(5.0)
    assert (end.reason, end.pages_quiet) == (Reason.CANCELLED, True)
    with pytest.raises(RequestEnded, match="ended with CANCELLED"):
        await LAST_WAITS[kind](call)
    call.cancel()


async def test_cancelling_repeats_itself_until_the_daemon_has_heard_of_the_request(
    daemon: ScriptedDaemon, client: Client
) -> None:
    call = await client.assemble_blocks("hang", 1, MODEL)
    await call.attached()
    daemon.engine.running.clear()
    call.cancel()
    await asyncio.sleep(0.25)
    daemon.engine.running.add("hang")
    assert (await call.end(5.0)).reason is Reason.CANCELLED


async def test_a_call_that_can_not_be_cancelled_in_order_is_closed(daemon: ScriptedDaemon, client: Client) -> None:
    call = await client.assemble_blocks("hang", 1, MODEL)
    await call.attached()
    del daemon.engine.cancelled
    call.cancel()
    with pytest.raises(CallCancelled, match="cancelling it failed"):
        await call.end(5.0)


@pytest.mark.parametrize("kind", OPENERS)
async def test_what_the_daemon_refuses_is_raised_by_every_wait(client: Client, kind: str) -> None:
    call = await OPENERS[kind](client, "stale")
    for wait in (LAST_WAITS[kind](call), call.end(), call.quiet()):
        with pytest.raises(StaleAttempt, match="attempt 1 is not above attempt 8"):
            await wait


@pytest.mark.parametrize("kind", OPENERS)
async def test_every_wait_of_every_call_fails_at_once_when_the_daemon_goes(
    daemon: ScriptedDaemon, client: Client, kind: str
) -> None:
    call = await OPENERS[kind](client, "hang")
    waits = [asyncio.create_task(wait) for wait in (LAST_WAITS[kind](call), call.end(), call.quiet())]
    await asyncio.sleep(0.05)
    began_s = time.monotonic()
    await daemon.companion.stop()
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DaemonGone] * 3
    assert time.monotonic() - began_s < 1


@pytest.mark.parametrize("kind", OPENERS)
async def test_a_call_whose_daemon_falls_silent_is_a_fault_and_not_a_hang(client: Client, kind: str) -> None:
    call = await OPENERS[kind](client, "silent")
    with pytest.raises(KvmoverError, match="closed the call of 'silent' before its last word"):
        await call.end()


async def test_layers_announced_with_a_gap_are_a_fault_of_the_daemon(client: Client) -> None:
    call = await client.stream_layers(plan("gap"))
    with pytest.raises(KvmoverError, match="announced layers 1 to 1 after 0 layers"):
        await call.wait_layer(1)


async def test_a_wait_ends_at_its_own_time_and_the_call_goes_on(client: Client) -> None:
    call = await client.assemble_blocks("hang", 1, MODEL)
    await call.attached()
    with pytest.raises(TimedOut, match="request 'hang': it was whole did not come in time"):
        await call.whole(0.05)
    call.cancel()
    assert (await call.end()).reason is Reason.CANCELLED


async def test_a_cancelled_wait_leaves_the_call_alone(client: Client) -> None:
    call = await client.push_layers(plan("plain"))
    waiting = asyncio.create_task(call.wait_pushed(LAYERS))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await call.computed(LAYERS)
    assert (await call.end()).reason is Reason.OK


async def test_a_call_past_its_time_and_grace_is_closed(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmover_client.call.GRACE_S", 0.05)
    call = await client.assemble_blocks("hang", 1, MODEL, 0.05)
    with pytest.raises(TimedOut):
        await call.end()


async def test_calls_are_bounded_and_ended_ones_make_room(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client, "CALLS_MAX", 2)
    async with await Client.connect(daemon.endpoint) as client:
        calls = [await client.assemble_blocks(f"hang/{index}", 1, MODEL) for index in range(2)]
        with pytest.raises(QueueFull, match="2 calls run, at most 2 may"):
            await client.assemble_blocks("plain", 1, MODEL)
        calls[0].cancel()
        await calls[0].end()
        await settled(calls[0])
        assert (await (await client.assemble_blocks("plain", 1, MODEL)).end()).reason is Reason.OK


async def settled(call: Call[Any]) -> None:
    """The stream itself ends a moment after its last word."""
    await asyncio.gather(*call._tasks, return_exceptions=True)


async def test_closing_the_client_fails_its_calls(client: Client) -> None:
    call = await client.assemble_blocks("hang", 1, MODEL)
    waiting = asyncio.create_task(call.end())
    await asyncio.sleep(0.02)
    await client.close()
    with pytest.raises(DaemonGone, match="this client closed its session"):
        await waiting


async def test_keys_of_a_wrong_size_are_refused_before_anything_is_sent(daemon: ScriptedDaemon, client: Client) -> None:
    with pytest.raises(BadKeys, match="key 1 has 31 bytes"):
        await client.fetch_blocks("plain", 1, MODEL, [bytes(32), bytes(31)])
    with pytest.raises(BadKeys, match="key 0 has 0 bytes"):
        await client.store_blocks("plain", 1, MODEL, KEYS, b"", 0, region(), [0, 1])
    assert not daemon.engine.seen
