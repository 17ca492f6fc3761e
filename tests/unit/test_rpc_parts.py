"""Parts that a node reads for others, under misuse: strangers, wrong blocks, owners that vanish, ask too much or contradict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from rpc_kit import (
    HERE,
    LAYERS,
    THERE,
    Case,
    Engine,
    check_refusals,
    end_of,
    events_of,
    keys_of,
    manifest,
    refused,
    rpc_kit,
)
from rpc_parts_kit import BOOT, opened_part, opening, read_part, release, reserved, runs, set_prefix, stop_part

from kvmover_proto import common_pb2, node_pb2
from kvmoverd.rpc import node_service, part_calls

INVALID, NOT_FOUND = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
PRECONDITION = StatusCode.FAILED_PRECONDITION
UINT32_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1
DE = {"hit_blocks": 2, "path": common_pb2.PATH_DE}
PEERS = [{"name": THERE, "address": "127.0.0.1:1"}]


def credit(prefix_blocks: int, layers: int, assembly_sink: int = 0) -> node_pb2.ReadPartRequest:
    told = node_pb2.PartCredit(prefix_blocks=prefix_blocks, credit_layers=layers, assembly_sink=assembly_sink)
    return node_pb2.ReadPartRequest(credit=told)


def give_up(kept_blocks: int) -> node_pb2.ReadPartRequest:
    return node_pb2.ReadPartRequest(give_up=node_pb2.GiveUp(kept_blocks=kept_blocks))


def help_of(engine: Engine, blocks: int = 2, **changed: Any) -> node_pb2.Help:
    fields: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "manifest": manifest(),
        "block_keys": b"".join(keys_of(engine.fingerprint, blocks)),
    }
    return node_pb2.Help(**(fields | changed))


def bad_openings(engine: Engine, ticket: node_pb2.Ticket) -> dict[str, tuple[StatusCode, str, dict[str, Any]]]:
    request, plan, mismatch = "BAD_REQUEST", "BAD_PLAN", (PRECONDITION, "PROTOCOL_MISMATCH")
    return {
        "an old boot": (*mismatch, {"boot_id": "old"}),
        "no boot": (*mismatch, {"boot_id": ""}),
        "a node that does not watch": (*mismatch, {"node": THERE}),
        "1 MB of name": (*mismatch, {"node": "n" * (1 << 20)}),
        "no blocks": (INVALID, plan, {"blocks": None}),
        "empty runs": (INVALID, plan, {"blocks": common_pb2.BlockRuns(first=[0], count=[0])}),
        "runs that overlap": (INVALID, plan, {"blocks": common_pb2.BlockRuns(first=[0, 1], count=[2, 1])}),
        "more firsts than counts": (INVALID, plan, {"blocks": common_pb2.BlockRuns(first=[0, 1], count=[1])}),
        "blocks beyond any prompt": (INVALID, plan, {"blocks": common_pb2.BlockRuns(first=[UINT32_MAX], count=[1])}),
        "blocks beyond the hits": (NOT_FOUND, "UNKNOWN_REQUEST", {"blocks": runs((1, 3))}),
        "no time": (INVALID, request, {"timeout_ms": 0}),
        "too much time": (INVALID, request, {"timeout_ms": 3_600_001}),
        "a layer beyond the last": (INVALID, request, {"first_layer": LAYERS + 1}),
        "layer uint32 max": (INVALID, request, {"first_layer": UINT32_MAX}),
        "neither ticket nor help": (INVALID, request, {"ticket": None}),
        "both ticket and help": (INVALID, request, {"ticket": ticket, "help": help_of(engine)}),
        "a rest of a buffer": (INVALID, request, {"rest": True, "first_layer": 1}),
        "a rest from the first layer": (INVALID, request, {"ticket": None, "help": help_of(engine), "rest": True}),
        "a rest of nothing": (
            INVALID,
            request,
            {"ticket": None, "help": help_of(engine), "rest": True, "first_layer": LAYERS},
        ),
        "a rest for a decode node": (
            INVALID,
            request,
            {"ticket": None, "help": help_of(engine, decode_node=THERE), "rest": True, "first_layer": 1},
        ),
    }


def bad_helps(engine: Engine) -> dict[str, tuple[StatusCode, str, dict[str, Any]]]:
    request = "BAD_REQUEST"
    return {
        "no id": (INVALID, request, {"request_id": ""}),
        "an id of 129": (INVALID, request, {"request_id": "r" * 129}),
        "attempt 0": (INVALID, request, {"attempt": 0}),
        "no manifest": (INVALID, "BAD_LAYOUT", {"manifest": None}),
        "no model": (INVALID, "BAD_MANIFEST", {"manifest": manifest(model_id=None)}),
        "fewer keys than blocks": (INVALID, "BAD_KEYS", {"block_keys": b"k" * 32}),
        "broken keys": (INVALID, "BAD_KEYS", {"block_keys": b"k" * 33}),
        "places of more blocks": (
            INVALID,
            request,
            {"places": node_pb2.BlockPlaces(author=[0] * 3, segment=[0] * 3, page=[0] * 3)},
        ),
        "an author with a slash": (
            INVALID,
            request,
            {"places": node_pb2.BlockPlaces(authors=["a/b"], author=[1, 1], segment=[0] * 2, page=[0] * 2)},
        ),
        "an unknown decode node": (INVALID, "UNKNOWN_PEER", {"decode_node": "stranger"}),
        "itself as decode node": (INVALID, "BAD_PLAN", {"decode_node": HERE}),
    }


async def test_every_bound_of_a_part_is_kept(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, peers=PEERS) as kit:
        engine = await kit.engine()
        await engine.store(2)
        ticket = (await reserved(kit, engine, **DE)).ticket
        cases: list[Case] = [
            (what, lambda c=changed: read_part(kit, **({"ticket": ticket} | c)), code, reason)
            for what, (code, reason, changed) in bad_openings(engine, ticket).items()
        ]
        await check_refusals(kit, cases)
        await release(kit, ticket)
        await kit.everything_is_home()


async def test_every_bound_of_help_is_kept(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, peers=PEERS) as kit:
        engine = await kit.engine()
        await kit.hello()
        cases: list[Case] = [
            (what, lambda c=changed: read_part(kit, None, help=help_of(engine, **c)), code, reason)
            for what, (code, reason, changed) in bad_helps(engine).items()
        ]
        await check_refusals(kit, cases)
        await kit.everything_is_home()


@pytest.mark.parametrize("changed", [{"split": {"helps": False}}, {"pool": {"help_bytes": 0}}])
async def test_a_node_that_helps_nobody_says_so(tmp_path: Path, changed: dict[str, Any]) -> None:
    async with rpc_kit(tmp_path, **changed) as kit:
        engine = await kit.engine()
        await kit.hello()
        assert not (await kit.ask_node("ReadDepth", node_pb2.ReadDepthRequest(node=HERE))).helps
        found = await refused(read_part(kit, None, help=help_of(engine)))
        assert (found.code, found.reason) == (INVALID, "BAD_PLAN")
        await kit.everything_is_home()


async def test_help_for_a_model_that_nobody_registered_here_is_given(tmp_path: Path) -> None:
    """Nothing of it is stored: the part says so, as of any block."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await kit.hello()
        strange = help_of(engine, manifest=manifest(model_id="strange"))
        part = read_part(kit, None, help=strange)
        told = [event async for event in _until_prefix(part)]
        assert told[-1].prefix.first_lost.reason == common_pb2.MISS
        assert (await end_of(part)).prefix_blocks == 0
        assert len(kit.node.models) == 2
        await kit.everything_is_home()


async def test_a_helper_reads_what_it_is_asked_for_and_holds_it_until_it_hears_of_the_prefix(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        await kit.hello()
        arrived: list[tuple[int, int]] = []
        sink = kit.node.services.mover.expect(
            lambda layer, first: None, lambda layer, moved: arrived.append((layer, moved))
        )
        part = await opened_part(kit, None, help=help_of(engine), sink=sink, holds=True)
        told = [event async for event in _until_prefix(part)]
        assert told[-1].prefix == node_pb2.PartPrefix(prefix_blocks=2)
        assert [event.WhichOneof("kind") for event in told[:-1]] in ([], ["progress"])
        await part.write(credit(0, LAYERS))
        assert (await end_of(part)).status.reason == common_pb2.OK
        assert arrived == []
        await kit.everything_is_home()


async def _until_prefix(part: Any) -> Any:
    async for event in events_of(part):
        yield event
        if event.WhichOneof("kind") == "prefix":
            return


async def test_depth_is_told_to_whoever_asks(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        await kit.engine()
        reply = await kit.ask_node("ReadDepth", node_pb2.ReadDepthRequest(node=HERE))
        assert (reply.helps, reply.depth.queue_bytes) == (True, 0)
        assert reply.help_free_bytes == kit.daemon.config.pool.help_bytes > 0
        kit.node.drain()
        assert not (await kit.ask_node("ReadDepth", node_pb2.ReadDepthRequest(node=HERE))).helps


async def test_only_the_hits_of_a_decode_side_read_can_be_read_and_only_once(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        nothing = (NOT_FOUND, "UNKNOWN_REQUEST")
        ticket = (await reserved(kit, engine, request_id="none", path=common_pb2.PATH_DE)).ticket
        found = await refused(read_part(kit, ticket))
        assert (found.code, found.reason) == nothing
        await release(kit, ticket)
        ticket = (await reserved(kit, engine, **DE)).ticket
        # Without credit nothing is sent, so the part waits.
        first = opening(ticket, credit_layers=0)
        part = kit.ask_node("ReadPart", iter([node_pb2.ReadPartRequest(open=first)]))
        told = [event async for event in _until_prefix(part)]
        assert told[-1].prefix.prefix_blocks == 2
        again = await refused(read_part(kit, ticket, part=first.part))
        assert (again.code, again.reason) == (INVALID, "BAD_REQUEST")
        found = await refused(read_part(kit, ticket))
        assert (found.code, found.reason) == nothing
        for stranger in ({"node": THERE}, {"boot_id": "old"}, {"part": UINT64_MAX}):
            fields: dict[str, Any] = {"node": HERE, "boot_id": BOOT, "part": first.part}
            stopped = await kit.ask_node("StopPart", node_pb2.StopPartRequest(**(fields | stranger)))
            assert (stopped.sent_layers, stopped.quiet) == (0, True)
        assert len(kit.node.parts) == 1, "a stranger stopped a part"
        stopped = await stop_part(kit, first.part)
        assert (stopped.sent_layers, stopped.quiet) == (0, True)
        assert (await end_of(part)).status.reason == common_pb2.CANCELLED
        await release(kit, ticket)
        await kit.everything_is_home()


@pytest.mark.parametrize("sink", [0, 999_999, UINT64_MAX])
async def test_a_part_for_a_sink_that_does_not_exist_ends(tmp_path: Path, sink: int) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        ticket = (await reserved(kit, engine, **DE)).ticket
        end = await end_of(read_part(kit, ticket, sink=sink))
        assert end.status.reason not in (common_pb2.OK, common_pb2.REASON_UNSPECIFIED)
        await release(kit, ticket)
        await kit.everything_is_home()


async def test_a_part_whose_call_breaks_is_stopped_and_the_buffer_stays(tmp_path: Path) -> None:
    """An owner that moves a part breaks its call; that it died is told by its watch."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        ticket = (await reserved(kit, engine, **DE)).ticket
        assembled = engine.assemble("r")
        part = read_part(kit, ticket, credit_layers=0)
        assert [event async for event in _until_prefix(part)][-1].prefix.prefix_blocks == 2
        part.cancel()
        await kit.until_live(lambda: not len(kit.node.parts))
        assert kit.node.requests.by_kind()["assemble"] == 1
        kit.watches[HERE, BOOT].cancel()
        assert (await end_of(assembled)).status.reason == common_pb2.PEER_LOST
        await kit.everything_is_home()


async def test_a_part_must_be_opened_first_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "OPEN_WAIT_S", 0.05)
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        for first in (credit(0, 1), give_up(0), node_pb2.ReadPartRequest()):
            found = await refused(kit.ask_node("ReadPart", iter([first])))
            assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        late = await refused(kit.node_stub.ReadPart(timeout=5.0))
        assert (late.code, late.reason) == (INVALID, "BAD_REQUEST")
        ticket = (await reserved(kit, engine, **DE)).ticket
        first = node_pb2.ReadPartRequest(open=opening(ticket, credit_layers=0))
        found = await refused(kit.ask_node("ReadPart", iter([first, first])))
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        await release(kit, ticket)
        await kit.everything_is_home()


async def test_an_assembly_sink_that_changes_ends_the_part(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        await kit.hello()
        part = await opened_part(kit, None, help=help_of(engine), holds=True, credit_layers=0)
        for sink in (7, 0, 7, 8):
            await part.write(credit(2, 0, assembly_sink=sink))
        found = await refused(part)
        assert (found.code, found.reason) == (INVALID, "BAD_REQUEST")
        assert "assembly_sink is 8 after 7" in found.message
        await kit.everything_is_home()


async def test_give_ups_are_answered_one_by_one_also_after_the_prefix(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        ticket = (await reserved(kit, engine, **DE)).ticket
        part = await opened_part(kit, ticket, holds=True)
        assert [event async for event in _until_prefix(part)][-1].prefix.prefix_blocks == 2
        for kept in (1, 0, UINT32_MAX):
            await part.write(give_up(kept))
            assert (await part.read()).gave_up.kept_blocks == 2, "what was told in the prefix can't be given up"
        await part.write(node_pb2.ReadPartRequest(give_rest=node_pb2.GiveRest(kept_blocks=1)))
        assert (await part.read()).gave_rest == node_pb2.GaveRest(kept_blocks=2), "it does not send yet"
        await part.write(credit(0, LAYERS))
        assert (await end_of(part)).status.reason == common_pb2.OK
        await release(kit, ticket)
        await kit.everything_is_home()


async def test_an_owner_that_asks_on_without_listening_loses_its_part() -> None:
    events = part_calls.PartEvents()
    for _ in range(part_calls.GIVE_UPS_MAX):
        events.asked()
        events.listener.on_gave_up(1)
    with pytest.raises(Exception, match="16 give-ups are not heard of yet, at most 16 may be"):
        events.asked()
    assert (await events.next()).gave_up.kept_blocks == 1
    events.asked()


async def test_a_rest_is_asked_for_and_answered_in_turn_with_what_is_given_up() -> None:
    events = part_calls.PartEvents()
    for _ in range(part_calls.GIVE_UPS_MAX):
        events.asked()
        events.listener.on_gave_rest(3, 2)
    with pytest.raises(Exception, match="at most 16 may be"):
        events.asked()
    assert (await events.next()).gave_rest == node_pb2.GaveRest(kept_blocks=3, first_layer=2)
    events.asked()


async def test_of_progress_only_the_latest_is_told_and_none_after_the_prefix() -> None:
    events = part_calls.PartEvents()
    for begun in range(5):
        events.listener.on_progress(begun, 100 * begun)
    assert (await events.next()).progress == node_pb2.PartProgress(begun_blocks=4, read_bytes=400)
    for begun in range(5, 9):
        events.listener.on_progress(begun, 100 * begun)
    events.listener.on_gave_up(8)
    assert (await events.next()).gave_up.kept_blocks == 8, "what is asked for does not wait behind progress"
    assert (await events.next()).progress.begun_blocks == 8
    events.listener.on_progress(9, 900)
    events.listener.on_prefix(9, None)
    assert (await events.next()).prefix.prefix_blocks == 9


async def test_helped_parts_of_strangers_or_out_of_bounds_are_refused(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, peers=PEERS) as kit:
        engine = await kit.engine()
        ticket = (await reserved(kit, engine, **DE)).ticket

        def helped(node: str, *spans: tuple[int, int]) -> list[node_pb2.HelpedPart]:
            return [node_pb2.HelpedPart(node=node, boot_id="b", blocks=runs(span)) for span in spans]

        cases: list[Case] = [
            ("a stranger", lambda: set_prefix(kit, ticket, 2, helped("stranger", (0, 1))), INVALID, "UNKNOWN_PEER"),
            ("no name", lambda: set_prefix(kit, ticket, 2, helped("", (0, 1))), INVALID, "BAD_REQUEST"),
            ("beyond the prefix", lambda: set_prefix(kit, ticket, 1, helped(THERE, (1, 2))), INVALID, "BAD_PLAN"),
            ("twice the same", lambda: set_prefix(kit, ticket, 2, helped(THERE, (0, 1), (0, 2))), INVALID, "BAD_PLAN"),
            ("65 parts", lambda: set_prefix(kit, ticket, 2, helped(THERE, *[(0, 1)] * 65)), INVALID, "BAD_PLAN"),
        ]
        await check_refusals(kit, cases)
        await release(kit, ticket)
        await kit.everything_is_home()
