"""Progress pages of a whole daemon: what engines see in them, and what hostile ones achieve, which is nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from companion_kit import open_fds
from grpc import StatusCode
from progress_kit import Hands
from rpc_kit import HERE, LAYERS, WAIT_S, Engine, Kit, end_of, events_of, keys_of, refusal_of, refused, rpc_kit, until

from kvmover_client import AsyncClient, Plan, TimedOut
from kvmover_client import Path as ReadPath
from kvmover_client.companion import Companion
from kvmover_proto import common_pb2, engine_pb2
from kvmoverd.core.progress import ENTRIES, CallState, credit_word

INVALID = StatusCode.INVALID_ARGUMENT
RUNNING, ENDED = CallState.RUNNING, CallState.ENDED
RING = [common_pb2.PageSet(pages=[2 * n, 2 * n + 1]) for n in range(2)]


@asynccontextmanager
async def paged(kit: Kit) -> AsyncIterator[tuple[Engine, Hands]]:
    """An engine that asked for its pages, with a model and a region and two stored blocks."""
    loop = asyncio.get_running_loop()
    companion = await Companion.connect(f"{kit.socket}.companion", lambda why: None, loop.time() + WAIT_S)
    welcome = await companion.hello("paged", WAIT_S, progress_page=True)
    assert welcome.progress_entries == ENTRIES
    fds, companion._fds = companion._fds, []
    hands = Hands(fds)
    engine = await Engine(kit, companion, welcome).register()
    await engine.store(2)
    try:
        yield engine, hands
    finally:
        hands.close()
        engine.close()


def streamed(engine: Engine, name: str, number: int, generation: int = 1, **changed: Any) -> Any:
    """A stream that goes on until layers are computed, unless `changed` says otherwise."""
    fields = {"hit_blocks": 2, "page_sets": RING, "decode_node": ""} | changed
    plan = engine.plan(name, progress_entry=number, progress_generation=generation, **fields)
    return engine.stream(plan)


async def outcome(call: Any) -> tuple[list[str], list[Any], str]:
    """Kinds of the events of a call that fails in the end, its ends, and the reason."""
    kinds: list[str] = []
    ends: list[Any] = []
    try:
        async for event in events_of(call):
            kinds.append(event.WhichOneof("kind"))
            if kinds[-1] == "end":
                ends.append(event.end)
    except grpc.aio.AioRpcError as error:
        return kinds, ends, refusal_of(error).reason
    return kinds, ends, ""


async def test_a_ring_goes_round_by_pages_alone_and_messages_are_coalesced(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        call = streamed(engine, "r", 5, 77)
        for ready in range(1, LAYERS + 1):
            await until(lambda ready=ready: hands.state(5)[:2] >= (77, min(ready + 1, LAYERS)), f"layer {ready}")
            hands.credit(5, 77, ready)
        kinds, ends, _ = await outcome(call)
        assert kinds[0] == "prefix" and kinds[-1] == "end" and kinds.count("ready") <= 2
        assert ends[0].status.reason == common_pb2.OK
        assert hands.state(5) == (77, LAYERS, ENDED, common_pb2.OK)
        assert hands.wakes() > 0
        await kit.everything_is_home()


async def test_a_push_and_a_delivery_go_by_pages(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        assembled = engine.assemble("r")
        pushed = engine.push(engine.plan("r", progress_entry=1, progress_generation=2))
        hands.credit(1, 2, LAYERS)
        assert (await end_of(pushed)).status.reason == common_pb2.OK
        assert hands.state(1) == (2, LAYERS, ENDED, common_pb2.OK)
        while (await assembled.read()).WhichOneof("kind") != "whole":
            pass
        request = engine_pb2.DeliverRequest(
            request_id="r",
            attempt=1,
            region_id=engine.region_id,
            pages=common_pb2.PageSet(pages=[10, 11]),
            progress_entry=1,
            progress_generation=3,
        )
        assert (await end_of(engine.ask("Deliver", request))).status.reason == common_pb2.OK
        assert hands.state(1) == (3, LAYERS, ENDED, common_pb2.OK)
        assert (await end_of(assembled)).status.reason == common_pb2.OK
        await kit.everything_is_home()


@pytest.mark.parametrize("wrong", [LAYERS, LAYERS + 1, (1 << 32) - 1])
async def test_a_credit_beyond_the_layers_that_are_ready_ends_the_request(tmp_path: Path, wrong: int) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        call = streamed(engine, "r", 1)
        await until(lambda: hands.state(1)[1] == 2, "two layers")
        hands.credit(1, 1, wrong)
        _, ends, reason = await outcome(call)
        assert reason == "BAD_REQUEST"
        assert [(end.status.reason, end.pages_quiet) for end in ends] == [(common_pb2.CANCELLED, True)]
        assert hands.state(1)[2:] == (ENDED, common_pb2.CANCELLED)
        await kit.everything_is_home()


async def test_a_credit_that_shrinks_ends_the_request(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        pushed = engine.push(engine.plan("r", progress_entry=1, progress_generation=1))
        hands.credit(1, 1, 2)
        await until(lambda: hands.state(1)[1] == 2, "two layers")
        hands.credit(1, 1, 1)
        _, ends, reason = await outcome(pushed)
        assert reason == "BAD_REQUEST"
        assert [end.status.reason for end in ends] == [common_pb2.CANCELLED]
        assert hands.state(1)[2] is ENDED
        await kit.everything_is_home()


async def test_the_credits_of_an_old_generation_are_ignored_and_the_request_ends_in_its_time(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        call = streamed(engine, "r", 1, 8, timeout_ms=300)
        await until(lambda: hands.state(1)[1] == 2, "two layers")
        hands.credit(1, 7, LAYERS + 5)
        _, ends, _ = await outcome(call)
        assert [end.status.reason for end in ends] == [common_pb2.DEADLINE]
        assert hands.state(1) == (8, 2, ENDED, common_pb2.DEADLINE)
        await kit.everything_is_home()


async def test_an_entry_that_is_held_or_does_not_exist_is_refused_and_its_holder_goes_on(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        call = streamed(engine, "r", 1)
        await until(lambda: hands.state(1)[1] == 2, "two layers")
        for number, generation in ((1, 2), (ENTRIES + 1, 1), (2, 0), ((1 << 32) - 1, 1)):
            found = await refused(streamed(engine, f"n{number}", number, generation))
            assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        bad = await refused(streamed(engine, "bad", 2, page_sets=[common_pb2.PageSet(pages=[1])]))
        assert bad.reason == "BAD_PAGES" and hands.state(2)[2] is ENDED
        assert hands.state(1)[:3] == (1, 2, RUNNING)
        call.cancel()
        await kit.everything_is_home()
        assert hands.state(1)[2] is ENDED


async def test_an_entry_without_a_page_is_refused(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        found = await refused(streamed(await kit.engine(), "r", 1))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert "has no progress page" in found.message
        await kit.everything_is_home()


async def test_an_engine_that_scribbles_and_kicks_all_the_time_harms_only_itself(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, hands):
        honest = await kit.engine()
        await honest.store(2)
        chance = random.Random(3)
        over = asyncio.Event()

        async def scribble() -> None:
            while not over.is_set():
                for _ in range(64):
                    generation = chance.choice([1, 2, chance.getrandbits(32)])
                    hands.credits[chance.randrange(4)] = credit_word(generation, chance.getrandbits(3))
                with suppress(BlockingIOError):
                    hands.kick()
                await asyncio.sleep(0)

        scribbling = asyncio.ensure_future(scribble())
        for number in range(8):
            outcomes = await asyncio.gather(
                *(outcome(streamed(engine, f"r{number}/{n}", n + 1, number + 1, timeout_ms=300)) for n in range(2)),
                end_of(honest.stream(honest.plan(f"h{number}", hit_blocks=2, decode_node=""))),
            )
            assert outcomes[2].status.reason == common_pb2.OK
        over.set()
        await scribbling
        await kit.everything_is_home()


async def test_nothing_is_left_of_a_session_with_pages(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        await kit.status()
        fds, maps = open_fds(), mappings()
        for number in range(3):
            async with paged(kit) as (engine, hands):
                call = streamed(engine, f"r{number}", 1)
                await until(lambda hands=hands: hands.state(1)[1] == 2, "two layers")
                engine.companion.close()
                assert (await end_of(call)).status.reason == common_pb2.ENGINE_GONE
                assert hands.state(1)[:3] == (1, 2, RUNNING), "nobody writes after the session"
        await until(lambda: (open_fds(), mappings()) == (fds, maps), f"{open_fds()} descriptors, {fds} before")


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("kvmoverd-")


async def test_the_client_waits_and_computes_through_its_pages(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, paged(kit) as (engine, _):
        async with await AsyncClient.connect(f"unix://{kit.socket}") as client:
            assert client._link.pages is not None
            engine.welcome = client._welcome
            engine.companion, ours = client._link.companion, engine.companion
            await engine.register()
            keys = keys_of(engine.fingerprint, 2)
            sets = [[2 * n, 2 * n + 1] for n in range(2)]
            for number in range(3):
                plan = Plan(f"c{number}", 1, engine.fingerprint, keys, 0, 2, HERE, ReadPath.PE, engine.region_id, sets)
                stream, push = await client.stream_layers(plan), await client.push_layers(plan)
                entry = stream._entry
                assert entry is not None and entry.generation == 2 * number + 1
                for layer in range(LAYERS):
                    await stream.wait_layer(layer, WAIT_S)
                    assert entry.stamp_ns > 0 or entry._pages is None, "an entry of a call that is over has no stamp"
                    await push.computed(layer + 1)
                    await push.wait_pushed(layer + 1, WAIT_S)
                assert (await stream.end(), await push.end()) and stream.ready_layers == push.pushed_layers == LAYERS
            with pytest.raises(TimedOut):
                await (await client.stream_layers(_other(plan))).wait_layer(2, 0.05)
            engine.companion = ours
        await kit.everything_is_home()


def _other(plan: Plan) -> Plan:
    return Plan(
        "other", 1, plan.fingerprint, plan.block_keys, 0, 2, "", ReadPath.PE, plan.region_id, plan.page_sets, 5.0
    )


async def test_the_clients_entries_run_out_and_come_back(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit, await AsyncClient.connect(f"unix://{kit.socket}") as client:
        pages = client._link.pages
        assert pages is not None
        taken = [pages.take() for _ in range(ENTRIES)]
        assert pages.take() is None and len({entry.number for entry in taken if entry is not None}) == ENTRIES
        for entry in taken:
            assert entry is not None
            entry.release()
            entry.release()
        assert pages.take() is not None


async def test_the_client_leaves_neither_descriptors_nor_mappings(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        counts = []
        for _ in range(4):
            async with await AsyncClient.connect(f"unix://{kit.socket}") as client:
                await client.node_status()
            await until(lambda: len(kit.node.sessions) == 0, "the session's end")
            await asyncio.sleep(0.02)
            counts.append((open_fds(), mappings()))
        assert counts[-1] <= counts[0], counts


async def test_without_its_page_the_client_works_by_messages(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        client = await AsyncClient.connect(f"unix://{kit.socket}", progress_page=False)
        assert client._link.pages is None
        await client.close()
