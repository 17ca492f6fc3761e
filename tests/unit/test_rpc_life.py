"""Health, reflection, drain and the books: what an operator sees of a daemon through its two servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rpc_kit import (
    LAYERS,
    WAIT_S,
    Case,
    Engine,
    Kit,
    answered,
    end_of,
    events_of,
    keys_of,
    manifest,
    refused,
    rpc_kit,
)

from kvmover_client.errors import QueueFull
from kvmover_proto import common_pb2, engine_pb2, node_pb2

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
DRAINING = (StatusCode.UNAVAILABLE, "DRAINING")


def channels(kit: Kit) -> dict[str, grpc.aio.Channel]:
    return {"kvmover.v1.Engine": kit.engine_channel, "kvmover.v1.Node": kit.node_channel}


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)).status


async def drain(kit: Kit) -> int:
    return (await kit.engine_stub.Drain(engine_pb2.DrainRequest(), timeout=WAIT_S)).running_requests


async def test_both_servers_say_that_they_serve_until_the_node_drains(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        for service, channel in channels(kit).items():
            assert [await health(channel, name) for name in ("", service)] == [SERVING, SERVING]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(channel, "kvmover.v1.Nobody")
            assert caught.value.code() is StatusCode.NOT_FOUND
        assert await drain(kit) == 0
        for service, channel in channels(kit).items():
            assert [await health(channel, name) for name in ("", service)] == [NOT_SERVING, NOT_SERVING]


async def test_whoever_watches_the_health_is_told_of_the_stop_before_the_end(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        watches = []
        for service, channel in channels(kit).items():
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
            assert (await answered(watch.read())).status == SERVING
            watches.append(watch)
        stopping = asyncio.get_running_loop().create_task(kit.daemon.stop())
        for watch in watches:
            assert (await answered(watch.read())).status == NOT_SERVING
            watch.cancel()
        assert await answered(stopping)


async def test_both_servers_describe_themselves(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        for service, channel in channels(kit).items():
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
            ]
            listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=WAIT_S)]
            names = {found.name for found in listed.list_services_response.service}
            assert names == {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
            assert described.file_descriptor_response.file_descriptor_proto


async def test_a_draining_node_refuses_new_requests_and_lets_running_ones_end(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        assembled, pushed = engine.assemble("r"), engine.ask("PushLayers")
        await pushed.write(engine_pb2.PushLayersRequest(plan=engine.plan("r")))
        assert (await assembled.read()).WhichOneof("kind") == "attached"
        assert await drain(kit) == 2
        await kit.hello()
        reservation = node_pb2.ReserveRequest(
            request_id="new",
            attempt=1,
            fingerprint=engine.fingerprint,
            block_keys=b"".join(keys_of(engine.fingerprint, 1)),
            timeout_ms=1000,
            node="here",
            boot_id="boot",
        )
        cases: list[Case] = [
            ("fetch", lambda: engine.ask("FetchBlocks", engine.fetch_request("new")), *DRAINING),
            ("store", lambda: engine.ask("StoreBlocks", engine.store_request("new")), *DRAINING),
            ("assemble", lambda: engine.assemble("new"), *DRAINING),
            ("stream", lambda: engine.stream(engine.plan("new")), *DRAINING),
            ("push", lambda: engine.push(engine.plan("new")), *DRAINING),
            ("reserve", lambda: kit.ask_node("Reserve", reservation), *DRAINING),
        ]
        for name, begin, code, reason in cases:
            found = await refused(begin())
            assert (found.code, found.reason, found.retryable) == (code, reason, True), name
        keys = engine.fetch_request("r").block_keys
        hint = engine_pb2.PrefetchRequest(fingerprint=engine.fingerprint, block_keys=keys)
        assert (await engine.ask("Prefetch", hint)).accepted_blocks == 0
        status = await kit.status()
        assert status.draining
        assert dict(status.requests) == {"assemble": 1, "push": 1}
        await pushed.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        assert (await assembled.read()).WhichOneof("kind") == "whole"
        request = engine_pb2.DeliverRequest(
            request_id="r", attempt=1, region_id=engine.region_id, pages=common_pb2.PageSet(pages=[8, 9])
        )
        assert (await end_of(engine.ask("Deliver", request))).status.reason == common_pb2.OK
        assert (await end_of(assembled)).status.reason == common_pb2.OK
        await kit.everything_is_home()


async def test_a_request_that_runs_may_open_its_second_half_while_the_node_drains(tmp_path: Path) -> None:
    """The stream was admitted; without its push the request could only die."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        plan = engine.plan("r", hit_blocks=2)
        streamed = engine.stream(plan)
        await kit.until_live(lambda: kit.node.requests.by_kind()["assemble"] == 1)
        await drain(kit)
        pushed = engine.ask("PushLayers")
        await pushed.write(engine_pb2.PushLayersRequest(plan=plan))
        assembled = engine.assemble("r")
        assert (await end_of(streamed)).status.reason == common_pb2.OK
        await pushed.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        assert [(await assembled.read()).WhichOneof("kind") for _ in range(2)] == ["attached", "whole"]
        assembled.cancel()
        await kit.everything_is_home()


async def test_a_stop_ends_running_requests_with_a_terminal(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        assembled, alone = engine.assemble("r"), engine.assemble("alone")
        pushed = engine.push(engine.plan("r"))
        assert (await assembled.read()).WhichOneof("kind") == "attached"
        stopping = asyncio.get_running_loop().create_task(kit.daemon.stop())
        for call in (assembled, alone, pushed):
            end = await end_of(call)
            assert (end.status.reason, end.status.retryable, end.pages_quiet) == (common_pb2.SHUTTING_DOWN, True, True)
        assert await answered(stopping)


def counters(status: engine_pb2.NodeStatusReply) -> dict[str, int]:
    (root,) = status.storage
    names = ("read_bytes", "written_bytes", "read_blocks", "written_blocks", "missed_blocks", "corrupt_blocks")
    return {name: getattr(root, name) for name in (*names, "failed_ops", "read_queue_bytes")}


async def fetched(engine: Engine, request_id: str, keys: list[bytes]) -> engine_pb2.FetchResult:
    request = engine.fetch_request(request_id, block_keys=b"".join(keys))
    events = [event async for event in events_of(engine.ask("FetchBlocks", request))]
    return next(event.result for event in events if event.WhichOneof("kind") == "result")


async def test_every_counter_of_the_books_moves_with_what_happens(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        fresh = await kit.status()
        assert (fresh.sessions, fresh.regions, fresh.leases, len(fresh.slots)) == (0, 0, 0, 0)
        assert set(counters(fresh).values()) == {0}
        engine = await kit.engine()
        await engine.store(3)
        keys, missing = keys_of(engine.fingerprint, 3), keys_of(engine.fingerprint, 2, salt=9)
        stored = await kit.status()
        record_bytes = stored.slots[0].slot_bytes
        assert counters(stored)["written_blocks"] == 3
        assert counters(stored)["written_bytes"] == 3 * record_bytes
        assert (stored.sessions, stored.regions) == (1, 1)
        storage, namespace = kit.daemon.devices.storage, kit.node.models.get(engine.fingerprint)
        # The pool forgets its clean blocks, so that they are read again.
        kit.node.services.reader.forget_namespace(namespace)
        flipped = bytearray(storage.stored(namespace, keys[2]))
        flipped[4096] ^= 1
        storage.tamper(namespace, keys[2], bytes(flipped))
        result = await fetched(engine, "r", [*keys, *missing])
        states = [block.state for block in result.blocks]
        assert states == [common_pb2.HIT] * 2 + [common_pb2.FAILED] + [common_pb2.BLOCK_MISS] * 2
        now = await kit.status()
        assert counters(now)["read_blocks"] == 2
        assert counters(now)["read_bytes"] >= 2 * record_bytes
        assert (counters(now)["missed_blocks"], counters(now)["corrupt_blocks"]) == (2, 1)
        assert (now.leases, now.slots[0].leased, now.slots[0].clean) == (1, 2, 0)
        assert dict(now.outcomes)["store/OK"] == 1
        assert sum(now.outcomes.values()) == 2
        ref = engine_pb2.LeaseRef(lease_id=result.lease_id, lease_generation=result.lease_generation)
        assert (await engine.ask("Renew", engine_pb2.RenewRequest(leases=[ref, ref]))).renewed == [True, True]
        wrong = engine_pb2.LeaseRef(lease_id=ref.lease_id, lease_generation=ref.lease_generation + 1)
        assert (await engine.ask("Release", engine_pb2.ReleaseRequest(leases=[wrong]))).released == 0
        assert (await engine.ask("Release", engine_pb2.ReleaseRequest(leases=[ref, ref]))).released == 1
        assert (await kit.status()).leases == 0
        assert now.uptime_ms >= fresh.uptime_ms
        await kit.everything_is_home()


async def test_live_requests_are_counted_by_kind(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        sets = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]
        plan = engine.plan("r", hit_blocks=2, page_sets=sets)
        streamed, pushed = engine.stream(plan), engine.ask("PushLayers")
        await pushed.write(engine_pb2.PushLayersRequest(plan=plan))
        while (await streamed.read()).WhichOneof("kind") != "ready":
            pass
        status = await kit.status()
        assert dict(status.requests) == {"assemble": 1, "prefill": 1, "push": 1, "read_part": 1}
        (slots,) = status.slots
        assert slots.leased == 2, "on one node the prefill side reads into the DE buffer"
        assert slots.total == slots.free + slots.filling + slots.clean + slots.leased + slots.quarantined
        assert (await engine.ask("Cancel", engine_pb2.CancelRequest(request_id="r", attempt=1))).cancelled_calls == 2
        assert (await end_of(pushed)).status.reason == common_pb2.CANCELLED
        await kit.everything_is_home()
        outcomes = dict((await kit.status()).outcomes)
        assert {"prefill/CANCELLED", "push/CANCELLED", "assemble/CANCELLED"} <= set(outcomes)


async def test_a_message_over_the_limit_is_refused_and_the_server_goes_on(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        # An engine's pull may tell of all that its group holds; daemons have no words as long.
        lookup = engine_pb2.LookupRequest(fingerprint=engine.fingerprint, block_keys=b"k" * ((32 << 20) + 1))
        reserve = node_pb2.ReserveRequest(block_keys=b"k" * ((8 << 20) + 1))
        for call in (engine.ask("Lookup", lookup), kit.ask_node("Reserve", reserve)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answered(call)
            assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
        await kit.everything_is_home()


async def test_more_calls_than_the_limit_are_refused_not_kept_waiting(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, engine_api={"streams_max": 4}) as kit:
        engine = await kit.engine()
        running = [engine.assemble(f"r{number}", timeout_ms=60_000) for number in range(4)]
        await kit.until_live(lambda: len(kit.node.decode_side._waiting) == 4)
        found = await refused(engine.assemble("one too many"))
        assert (found.code, found.reason, found.retryable) == (StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", True)
        assert "4 calls are under way, at most 4 may be" in found.message
        for call in running:
            call.cancel()
        await kit.until_live(lambda: not kit.node.decode_side._waiting)
        await kit.everything_is_home()


async def test_more_live_requests_than_the_limit_are_refused_with_a_reason(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, requests={"live_max": 1}) as kit:
        engine = await kit.engine()
        await engine.store(2)
        sets = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]
        streamed = engine.stream(engine.plan("r", hit_blocks=2, page_sets=sets, decode_node=""))
        await kit.until_live(lambda: len(kit.node.requests.live()) == 1)
        found = await refused(engine.ask("FetchBlocks", engine.fetch_request("other")))
        assert (found.code, found.reason, found.retryable) == (StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", True)
        streamed.cancel()
        await kit.everything_is_home()


async def test_more_sessions_than_the_limit_are_refused(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, engine_api={"sessions_max": 2}) as kit:
        first, _ = await kit.connect(), await kit.connect()
        with pytest.raises(QueueFull):
            await kit.connect()
        first.close()
        await kit.until_live(lambda: len(kit.node.sessions) == 1)
        await kit.connect()


async def test_readers_that_never_read_hold_no_request_and_block_nobody(tmp_path: Path) -> None:
    layers = [common_pb2.LayerSpec(segment_bytes=[8])] * 512
    shape = common_pb2.Layout(block_tokens=4, layers=layers)
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        model = await engine.ask("RegisterModel", engine_pb2.RegisterModelRequest(manifest=manifest(layout=shape)))
        ticket = await engine.pass_fd(512 * 64 * 8)
        runs = [
            engine_pb2.RegionLayer(
                segments=[engine_pb2.RegionSegment(base_bytes=512 * n, page_stride_bytes=8, page_bytes=8, pages=64)]
            )
            for n in range(512)
        ]
        region = await engine.ask(
            "RegisterRegion",
            engine_pb2.RegisterRegionRequest(fd_ticket=ticket, fingerprint=model.fingerprint, layers=runs),
        )
        engine.fingerprint, engine.region_id = model.fingerprint, region.region_id
        await engine.store(2)
        unread = []
        for number in range(16):
            sets = [common_pb2.PageSet(pages=[2 + 2 * number, 3 + 2 * number])]
            plan = engine.plan(f"r{number}", hit_blocks=2, decode_node="", page_sets=sets)
            unread.append(engine.stream(plan))
        await kit.until_live(lambda: dict(kit.node.requests.outcomes).get("prefill/OK") == 16)
        await kit.everything_is_home()
        lookup = engine_pb2.LookupRequest(
            fingerprint=engine.fingerprint, block_keys=engine.fetch_request("r").block_keys
        )
        assert (await answered(engine.ask("Lookup", lookup))).prefix_blocks == 2
        for call in unread:
            assert (await end_of(call)).status.reason == common_pb2.OK


async def test_a_flood_of_words_from_one_caller_does_not_starve_another(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine, other = await kit.engine(), await kit.engine()
        pushed = engine.push(engine.plan("r"), *[1] * 5_000)
        await kit.until_live(lambda: kit.node.requests.by_kind()["push"] == 1)
        for _ in range(10):
            lookup = engine_pb2.LookupRequest(fingerprint=other.fingerprint)
            assert (await answered(other.ask("Lookup", lookup, timeout_s=1.0))).prefix_blocks == 0
        pushed.cancel()
        await kit.everything_is_home()
