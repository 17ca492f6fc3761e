"""Streaming calls under misuse: broken openings, words out of turn, callers that vanish. The books always come home."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode
from rpc_kit import LAYERS, Engine, Kit, Refusal, end_of, events_of, manifest, refusal_of, refused, rpc_kit

from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.rpc import plan_calls

INVALID = StatusCode.INVALID_ARGUMENT
UINT32_MAX = (1 << 32) - 1


async def events_and_refusal(call: Any) -> tuple[list[Any], Refusal]:
    """What a call told before it failed."""
    events: list[Any] = []
    try:
        async for event in events_of(call):
            events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, refusal_of(error)
    raise AssertionError(f"not refused: {events}")


def opened(engine: Engine, method: str, *messages: Any) -> Any:
    """A call of a stream of requests; without messages the caller's side stays open and silent."""
    return engine.ask(method, iter(messages)) if messages else engine.ask(method)


@pytest.mark.parametrize("method", ["StreamLayers", "PushLayers"])
async def test_a_call_that_does_not_begin_with_a_plan_is_refused(tmp_path: Path, method: str) -> None:
    kind = getattr(engine_pb2, f"{method}Request")
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        for first in (kind(computed=engine_pb2.Computed(layers=1)), kind()):
            found = await refused(opened(engine, method, first))
            assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        silent = opened(engine, method)
        await silent.done_writing()
        assert (await refused(silent)).reason == "BAD_REQUEST"
        await kit.everything_is_home()


@pytest.mark.parametrize("method", ["StreamLayers", "PushLayers"])
async def test_a_caller_that_says_nothing_is_refused_in_time(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_calls, "PLAN_WAIT_S", 0.05)
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        found = await refused(opened(engine, method))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert "0.05 s" in found.message
        await kit.everything_is_home()


async def test_a_second_plan_ends_the_request(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        message = engine_pb2.PushLayersRequest(plan=engine.plan("r"))
        events, found = await events_and_refusal(opened(engine, "PushLayers", message, message))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        (end,) = [event.end for event in events if event.WhichOneof("kind") == "end"]
        assert (end.status.reason, end.pages_quiet) == (common_pb2.CANCELLED, True)
        await kit.everything_is_home()


@pytest.mark.parametrize("layers", [LAYERS + 1, UINT32_MAX])
async def test_layers_that_do_not_exist_can_not_be_computed(tmp_path: Path, layers: int) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        events, found = await events_and_refusal(engine.push(engine.plan("r"), 1, layers))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert f"layers [0, {layers})" in found.message
        assert [event.end.pages_quiet for event in events if event.WhichOneof("kind") == "end"] == [True]
        await kit.everything_is_home()


async def test_layers_that_are_not_ready_can_not_be_computed(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        sets = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]
        plan = engine.plan("r", hit_blocks=2, page_sets=sets)
        pushed = engine.push(plan)
        streamed = engine.ask("StreamLayers")
        await streamed.write(engine_pb2.StreamLayersRequest(plan=plan))
        while (await streamed.read()).WhichOneof("kind") != "ready":
            pass
        # Two sets are granted, so at most two of three layers are ready.
        await streamed.write(engine_pb2.StreamLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
        _, found = await events_and_refusal(streamed)
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert "are ready" in found.message
        assert (await end_of(pushed)).status.reason == common_pb2.CANCELLED
        await kit.everything_is_home()


@pytest.mark.parametrize(
    "changed",
    [
        {"tail_tokens": 1, "page_sets": [common_pb2.PageSet(pages=[0, 1, 2])]},
        {"path": common_pb2.PATH_DE},
        {"page_sets": [common_pb2.PageSet(pages=[1, 0])]},
        {"page_sets": [common_pb2.PageSet(pages=[0, 1]), common_pb2.PageSet(pages=[2, 3])]},
        {"hit_blocks": 1},
        {"block_keys": b"k" * 64},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_two_calls_of_one_request_must_carry_one_plan(tmp_path: Path, changed: dict[str, Any]) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        pushed = engine.ask("PushLayers")
        await pushed.write(engine_pb2.PushLayersRequest(plan=engine.plan("r")))
        await kit.until_live(lambda: kit.node.requests.by_kind()["push"] == 1)
        found = await refused(engine.stream(engine.plan("r", **changed)))
        assert (found.code, found.reason) == (INVALID, "BAD_PLAN")
        assert kit.node.requests.by_kind()["push"] == 1
        pushed.cancel()
        await kit.everything_is_home()


def deliver(engine: Engine, request_id: str = "r", **changed: Any) -> Any:
    fields = {
        "request_id": request_id,
        "attempt": 1,
        "region_id": engine.region_id,
        "pages": common_pb2.PageSet(pages=[10, 11]),
    }
    return engine.ask("Deliver", engine_pb2.DeliverRequest(**(fields | changed)))


async def test_deliver_needs_an_assembly_that_is_whole(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine, other = await kit.engine(), await kit.engine()
        nothing = await refused(deliver(engine))
        assert (nothing.code, nothing.reason, nothing.retryable) == (StatusCode.NOT_FOUND, "UNKNOWN_REQUEST", False)
        assembled, pushed = engine.assemble("r"), engine.ask("PushLayers")
        await pushed.write(engine_pb2.PushLayersRequest(plan=engine.plan("r")))
        assert (await assembled.read()).attached.blocks == 2
        early = await refused(deliver(engine))
        assert (early.code, early.reason, early.retryable) == (StatusCode.FAILED_PRECONDITION, "NOT_WHOLE", True)
        await pushed.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        assert (await assembled.read()).WhichOneof("kind") == "whole"
        assert (await refused(deliver(other))).reason == "UNKNOWN_REQUEST"
        assert (await refused(deliver(engine, attempt=2))).reason == "UNKNOWN_REQUEST"
        for numbers in ([10], [10, 10], [10, 32], [10, 11, 12]):
            wrong = await refused(deliver(engine, pages=common_pb2.PageSet(pages=numbers)))
            assert (wrong.code, wrong.reason) == (INVALID, "BAD_PAGES")
        delivered = await end_of(deliver(engine))
        assert delivered.status.reason == common_pb2.OK
        assert (await end_of(assembled)).status.reason == common_pb2.OK
        assert (await refused(deliver(engine))).reason == "UNKNOWN_REQUEST"
        await kit.everything_is_home()


async def test_an_assembly_is_not_delivered_into_a_region_of_another_model(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        ours, fingerprint = engine.region_id, engine.fingerprint
        assembled, pushed = engine.assemble("r"), engine.push(engine.plan("r"), LAYERS)
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        await engine.register(model_id="other")
        assert engine.fingerprint != fingerprint
        found = await refused(deliver(engine))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert (await end_of(deliver(engine, region_id=ours))).status.reason == common_pb2.OK
        assert (await end_of(assembled)).status.reason == common_pb2.OK
        await kit.everything_is_home()


async def test_an_engine_of_another_model_does_not_get_the_buffer(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        pushed = engine.push(engine.plan("r"))
        await kit.until_live(lambda: kit.node.requests.by_kind()["assemble"] == 1)
        model = engine_pb2.RegisterModelRequest(manifest=manifest(model_id="other"))
        alien = (await engine.ask("RegisterModel", model)).fingerprint
        found = await refused(engine.assemble("r", fingerprint=alien))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        pushed.cancel()
        await kit.everything_is_home()


async def begun(kit: Kit, engine: Engine, method: str) -> list[Any]:
    """Calls in mid-stream: the one of `method` first; none of them can end by itself."""
    await engine.store(2)
    sets = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]
    plan = engine.plan("r", hit_blocks=2, page_sets=sets)
    calls = {
        "AssembleBlocks": engine.assemble("r"),
        "StreamLayers": engine.stream(plan),
        "PushLayers": engine.ask("PushLayers"),
    }
    await calls["PushLayers"].write(engine_pb2.PushLayersRequest(plan=plan))
    await kit.until_live(lambda: sum(kit.node.requests.by_kind().values()) >= 3)
    while (await calls["StreamLayers"].read()).WhichOneof("kind") != "ready":
        pass
    return [calls.pop(method), *calls.values()]


@pytest.mark.parametrize("method", ["AssembleBlocks", "StreamLayers", "PushLayers"])
async def test_a_caller_that_vanishes_in_mid_stream_leaves_nothing_behind(tmp_path: Path, method: str) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        vanished, *others = await begun(kit, engine, method)
        vanished.cancel()
        for other in others:
            end = await end_of(other)
            assert end.status.reason in (common_pb2.CANCELLED, common_pb2.PREFIX_CUT, common_pb2.PEER_LOST), end
        await kit.everything_is_home()


@pytest.mark.parametrize("method", ["FetchBlocks", "StoreBlocks", "Prefetch", "Lookup"])
async def test_a_caller_that_vanishes_at_once_leaves_nothing_behind(tmp_path: Path, method: str) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        keys = engine.fetch_request("r").block_keys
        requests = {
            "FetchBlocks": engine.fetch_request,
            "StoreBlocks": engine.store_request,
            "Prefetch": lambda _: engine_pb2.PrefetchRequest(fingerprint=engine.fingerprint, block_keys=keys),
            "Lookup": lambda _: engine_pb2.LookupRequest(fingerprint=engine.fingerprint, block_keys=keys),
        }
        for number in range(20):
            call = engine.ask(method, requests[method](f"r{number}"))
            for _ in range(number):
                await asyncio.sleep(0)
            call.cancel()
        await kit.until_live(lambda: not kit.node.requests.live())
        engine.close()
        await kit.until_live(lambda: len(kit.node.sessions) == 0)
        await kit.everything_is_home()


@pytest.mark.parametrize("patience", [0, 3, 30])
async def test_a_delivery_whose_caller_vanishes_comes_to_its_end(tmp_path: Path, patience: int) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        assembled = engine.assemble("r")
        assert (await end_of(engine.push(engine.plan("r"), LAYERS))).status.reason == common_pb2.OK
        while (await assembled.read()).WhichOneof("kind") != "whole":
            pass
        vanished = deliver(engine)
        for _ in range(patience):
            await asyncio.sleep(0)
        vanished.cancel()
        if kit.node.requests.by_kind()["assemble"]:
            # Whether the daemon ever heard of the call is chance: if not, the buffer is still there to be delivered.
            assembled.cancel()
        await kit.everything_is_home()


async def test_the_lease_of_a_caller_that_vanished_runs_out(tmp_path: Path) -> None:
    """Nobody knows its number, so nobody can release or renew it."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        call = engine.ask("FetchBlocks", engine.fetch_request("r", lease_ms=100))
        await kit.until_live(lambda: len(kit.node.leases) == 1)
        call.cancel()
        await kit.until_live(lambda: len(kit.node.leases) == 0)
        await kit.everything_is_home()


async def test_a_broken_connection_ends_every_call_of_the_engine(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        calls = await begun(kit, engine, "PushLayers")
        await kit.engine_channel.close()
        await kit.until_live(lambda: not kit.node.requests.live())
        assert all(call.done() for call in calls)
        kit.reconnect()
        await kit.everything_is_home()


async def test_an_engine_that_dies_gets_its_last_word_in_every_call(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        calls = await begun(kit, engine, "PushLayers")
        engine.close()
        for call in calls:
            end = await end_of(call)
            assert end.status.reason == common_pb2.ENGINE_GONE
            assert end.pages_quiet
        await kit.everything_is_home()
        status = await kit.status()
        assert (status.sessions, status.regions, status.leases) == (0, 0, 0)


async def test_unregistering_a_region_ends_what_uses_it(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        assembled, *others = await begun(kit, engine, "AssembleBlocks")
        gone = engine_pb2.UnregisterRegionRequest(region_id=engine.region_id)
        assert (await engine.ask("UnregisterRegion", gone)).pages_quiet
        for call in (*others, assembled):
            assert (await end_of(call)).status.reason == common_pb2.CANCELLED
        assert (await refused(engine.push(engine.plan("r2")))).reason == "UNKNOWN_REGION"
        await kit.everything_is_home()
        assert (await kit.status()).regions == 0


async def test_a_region_is_quiet_also_when_a_stream_went_well_and_its_push_never_came(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, requests={"attach_timeout": "60s"}) as kit:
        engine = await kit.engine()
        await engine.store(2)
        assert (await end_of(engine.stream(engine.plan("r", hit_blocks=2)))).status.reason == common_pb2.OK
        gone = engine_pb2.UnregisterRegionRequest(region_id=engine.region_id)
        assert (await engine.ask("UnregisterRegion", gone)).pages_quiet
        await kit.everything_is_home()


async def test_a_deadline_of_the_call_itself_ends_the_request(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        request = engine_pb2.AssembleBlocksRequest(request_id="r", attempt=1, fingerprint=engine.fingerprint)
        call = engine.ask("AssembleBlocks", request, timeout_s=0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is StatusCode.DEADLINE_EXCEEDED
        await kit.everything_is_home()


async def test_the_requests_own_time_ends_it_with_a_terminal(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        end = await end_of(engine.push(engine.plan("r", timeout_ms=50)))
        assert (end.status.reason, end.status.retryable) == (common_pb2.DEADLINE, True)
        assert (await end_of(engine.assemble("alone", timeout_ms=50))).status.reason == common_pb2.DEADLINE
        await kit.everything_is_home()


async def test_an_assembly_that_ends_by_itself_cancels_no_other_call_of_its_request(tmp_path: Path) -> None:
    """Nobody reserved in time, so the assembly ends; what the same engine streams under that id goes on."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        sets = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]
        streamed = engine.stream(engine.plan("r", hit_blocks=2, page_sets=sets, decode_node=""))
        while (await streamed.read()).WhichOneof("kind") != "ready":
            pass
        assert (await end_of(engine.assemble("r", timeout_ms=50))).status.reason == common_pb2.DEADLINE
        assert kit.node.requests.by_kind()["prefill"] == 1
        streamed.cancel()
        await kit.everything_is_home()
