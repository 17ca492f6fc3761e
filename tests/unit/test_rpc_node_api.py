"""The node-to-node API under misuse: strangers, old boots, void tickets, parts that can't be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from rpc_kit import (
    HERE,
    THERE,
    TOKENS,
    Case,
    Engine,
    Kit,
    check_refusals,
    end_of,
    events_of,
    refused,
    rpc_kit,
)
from rpc_parts_kit import BOOT, read_part, release, reservation, reserved, set_prefix

from kvmover_proto import common_pb2, node_pb2
from kvmoverd.core.admission import Purpose

INVALID, NOT_FOUND = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
PRECONDITION = StatusCode.FAILED_PRECONDITION
UINT32_MAX, UINT64_MAX = (1 << 32) - 1, (1 << 64) - 1


def hello(kit: Kit, **changed: Any) -> Any:
    fields: dict[str, Any] = {"node": HERE, "boot_id": BOOT, "protocol": 2, "transport": "tcp"}
    return kit.ask_node("Hello", node_pb2.HelloRequest(**(fields | changed)))


def void_tickets(ticket: node_pb2.Ticket) -> dict[str, node_pb2.Ticket]:
    found = {"an empty": node_pb2.Ticket()}
    for name, changed in (
        ("another boot's", {"boot_id": "0" * 16}),
        ("an unknown", {"ticket_id": UINT64_MAX}),
        ("another generation's", {"generation": ticket.generation + 1}),
        ("an endless", {"boot_id": "b" * (1 << 20)}),
    ):
        fields = {"boot_id": ticket.boot_id, "ticket_id": ticket.ticket_id, "generation": ticket.generation}
        found[name] = node_pb2.Ticket(**(fields | changed))
    return found


async def test_a_stranger_is_told_what_does_not_match(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        mismatch = (PRECONDITION, "PROTOCOL_MISMATCH")
        cases: list[Case] = [
            ("no name", lambda: hello(kit, node=""), INVALID, "BAD_REQUEST"),
            ("a name of 129", lambda: hello(kit, node="n" * 129), INVALID, "BAD_REQUEST"),
            ("no boot id", lambda: hello(kit, boot_id=""), INVALID, "BAD_REQUEST"),
            ("a boot id of 65", lambda: hello(kit, boot_id="b" * 65), INVALID, "BAD_REQUEST"),
            ("protocol 0", lambda: hello(kit, protocol=0), *mismatch),
            ("protocol 1", lambda: hello(kit, protocol=1), *mismatch),
            ("protocol uint32 max", lambda: hello(kit, protocol=UINT32_MAX), *mismatch),
            ("no transport", lambda: hello(kit, transport=""), PRECONDITION, "TRANSPORT_MISMATCH"),
            ("shm", lambda: hello(kit, transport="shm"), PRECONDITION, "TRANSPORT_MISMATCH"),
            ("1 MB of transport", lambda: hello(kit, transport="t" * (1 << 20)), PRECONDITION, "TRANSPORT_MISMATCH"),
            ("an unknown node", lambda: hello(kit, node="stranger"), INVALID, "UNKNOWN_PEER"),
        ]
        await check_refusals(kit, cases)
        first, second = await hello(kit), await hello(kit)
        assert (len(first.data_key), first.protocol, first.boot_id) == (32, 2, kit.daemon.boot_id)
        assert first.data_key != second.data_key


async def test_a_reservation_needs_the_callers_own_watch_of_its_present_boot(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        mismatch = (PRECONDITION, "PROTOCOL_MISMATCH")

        def reserve(**changed: Any) -> Any:
            return kit.ask_node("Reserve", reservation(engine, **changed))

        await check_refusals(kit, [("no Hello", reserve, *mismatch)])
        await hello(kit)
        await check_refusals(kit, [("no watch", reserve, *mismatch)])
        await kit.hello(boot_id="old")
        await kit.hello()
        cases: list[Case] = [
            ("an old boot", lambda: reserve(boot_id="old"), *mismatch),
            ("no boot", lambda: reserve(boot_id=""), *mismatch),
            ("another's name", lambda: reserve(node="there"), *mismatch),
            ("no name", lambda: reserve(node="", boot_id=""), *mismatch),
            ("1 MB of name", lambda: reserve(node="n" * (1 << 20)), *mismatch),
        ]
        await check_refusals(kit, cases)


def bad_reservations(engine: Engine) -> dict[str, tuple[StatusCode, str, dict[str, Any]]]:
    request, keys, plan = "BAD_REQUEST", "BAD_KEYS", "BAD_PLAN"
    return {
        "no id": (INVALID, request, {"request_id": ""}),
        "an id of 129": (INVALID, request, {"request_id": "r" * 129}),
        "attempt 0": (INVALID, request, {"attempt": 0}),
        "no fingerprint": (NOT_FOUND, "UNKNOWN_MODEL", {"fingerprint": b""}),
        "an unknown fingerprint": (NOT_FOUND, "UNKNOWN_MODEL", {"fingerprint": b"u" * 32}),
        "broken keys": (INVALID, keys, {"block_keys": b"k" * 33}),
        "65,537 keys": (INVALID, keys, {"block_keys": b"k" * 32 * 65_537}),
        "neither blocks nor a tail": (INVALID, request, {"block_keys": b""}),
        "a tail of a block": (INVALID, request, {"tail_tokens": TOKENS}),
        "a tail of uint32 max": (INVALID, request, {"tail_tokens": UINT32_MAX}),
        "more hits than keys": (INVALID, request, {"hit_blocks": 3, "path": common_pb2.PATH_PE}),
        "no path with hits": (INVALID, plan, {"hit_blocks": 2}),
        "an unknown path": (INVALID, plan, {"path": 7}),
        "no time": (INVALID, request, {"timeout_ms": 0}),
        "too much time": (INVALID, request, {"timeout_ms": 3_600_001}),
        "too much waited": (INVALID, request, {"waited_ms": 3_600_001}),
        "uint32 max time": (INVALID, request, {"timeout_ms": UINT32_MAX}),
        "more than the pool": (StatusCode.OUT_OF_RANGE, "TOO_BIG", {"block_keys": b"k" * 32 * 65_536}),
    }


async def test_every_bound_of_a_reservation_is_kept(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await kit.hello()
        cases: list[Case] = [
            (what, lambda c=changed: kit.ask_node("Reserve", reservation(engine, **c)), code, reason)
            for what, (code, reason, changed) in bad_reservations(engine).items()
        ]
        await check_refusals(kit, cases)
        reply = await kit.ask_node("Reserve", reservation(engine, attempt=UINT32_MAX, timeout_ms=3_600_000))
        assert reply.ticket.boot_id == kit.daemon.boot_id
        assert 0 < reply.timeout_ms <= 3_600_000
        stale = await refused(kit.ask_node("Reserve", reservation(engine, attempt=UINT32_MAX - 1)))
        assert (stale.code, stale.reason) == (StatusCode.ABORTED, "STALE_ATTEMPT")
        await release(kit, reply.ticket)
        await kit.everything_is_home()


async def test_reservations_without_an_engine_expire(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, requests={"attach_timeout": "100ms"}) as kit:
        engine = await kit.engine()
        reply = await reserved(kit, engine)
        assert kit.node.requests.by_kind()["assemble"] == 1
        await kit.everything_is_home()
        assert (await refused(set_prefix(kit, reply.ticket, 0))).reason == "TICKET_EXPIRED"


async def test_void_tickets_open_nothing_and_end_nothing(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        reply = await reserved(kit, engine, hit_blocks=2, path=common_pb2.PATH_DE)
        for name, ticket in void_tickets(reply.ticket).items():
            for begin in (lambda t=ticket: set_prefix(kit, t, 0), lambda t=ticket: read_part(kit, t)):
                found = await refused(begin())
                assert (found.code, found.reason) == (NOT_FOUND, "TICKET_EXPIRED"), name
                assert len(found.message.encode()) <= 512
            assert await release(kit, ticket) == node_pb2.ReleaseTicketReply()
        assert kit.node.requests.by_kind()["assemble"] == 1, "a void ticket ended an assembly"
        await release(kit, reply.ticket)
        await release(kit, reply.ticket)
        await kit.everything_is_home()


async def test_who_has_a_ticket_can_not_tell_the_next_one(tmp_path: Path) -> None:
    """Whoever could would set another request's prefix, and name himself as the one who sends its blocks."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        first, second = [(await reserved(kit, engine, request_id=f"r{number}")).ticket for number in range(2)]
        guess = node_pb2.Ticket(boot_id=first.boot_id, ticket_id=second.ticket_id, generation=first.generation)
        assert (await refused(set_prefix(kit, guess, 0))).reason == "TICKET_EXPIRED"
        await release(kit, guess)
        assert kit.node.requests.by_kind()["assemble"] == 2
        for ticket in (first, second):
            await release(kit, ticket)
        await kit.everything_is_home()


async def test_a_prefix_is_set_once_and_not_beyond_the_hits(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, peers=[{"name": THERE, "address": "127.0.0.1:1"}]) as kit:
        engine = await kit.engine()
        ticket = (await reserved(kit, engine, node=THERE, hit_blocks=1, path=common_pb2.PATH_PE)).ticket
        for prefix in (2, UINT32_MAX):
            assert (await refused(set_prefix(kit, ticket, prefix))).reason == "BAD_REQUEST"
        await set_prefix(kit, ticket, 1)
        await set_prefix(kit, ticket, 1)
        assert (await refused(set_prefix(kit, ticket, 0))).reason == "BAD_REQUEST"
        await release(kit, ticket)
        await kit.everything_is_home()


async def test_a_prefix_is_not_set_beyond_what_the_decode_node_has_read(tmp_path: Path) -> None:
    """Nothing is stored, so nothing can be read."""
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        ticket = (await reserved(kit, engine, hit_blocks=2, path=common_pb2.PATH_DE)).ticket
        events = [event async for event in events_of(read_part(kit, ticket))]
        assert [event.WhichOneof("kind") for event in events] == ["prefix", "end"]
        assert (events[0].prefix.prefix_blocks, events[0].prefix.first_lost.state) == (0, common_pb2.BLOCK_MISS)
        assert (await refused(set_prefix(kit, ticket, 1))).reason == "BAD_REQUEST"
        await set_prefix(kit, ticket, 0)
        await release(kit, ticket)
        await kit.everything_is_home()


@pytest.mark.parametrize(("sent", "told"), [(common_pb2.MISS, common_pb2.MISS), (99, common_pb2.INTERNAL), (0, 17)])
async def test_a_released_ticket_ends_the_assembly_with_its_reason(tmp_path: Path, sent: int, told: int) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        ticket = (await reserved(kit, engine)).ticket
        assembled = engine.assemble("r")
        assert (await assembled.read()).attached.prefill_node == HERE
        await release(kit, ticket, sent)
        end = await end_of(assembled)
        assert (end.status.reason, end.pages_quiet) == (told, True)
        await kit.everything_is_home()


async def test_a_ticket_that_is_given_back_for_a_while_leaves_its_engine_waiting_and_may_be_had_again(
    tmp_path: Path,
) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        first = (await reserved(kit, engine)).ticket
        assembled = engine.assemble("r")
        assert (await assembled.read()).WhichOneof("kind") == "attached"
        for _ in range(2):
            await kit.ask_node("ReleaseTicket", node_pb2.ReleaseTicketRequest(ticket=first, again=True))
            assert len(kit.node.decode_side._waiting) == 1
        assert (await refused(set_prefix(kit, first, 0))).reason == "TICKET_EXPIRED"
        second = (await reserved(kit, engine, waited_ms=50)).ticket
        assert (await assembled.read()).WhichOneof("kind") == "attached"
        await release(kit, second)
        assert (await end_of(assembled)).status.reason == common_pb2.CANCELLED
        await kit.everything_is_home()


async def test_a_higher_attempt_ends_the_reservation_of_a_lower_one(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        old = (await reserved(kit, engine)).ticket
        assembled = engine.assemble("r")
        assert (await assembled.read()).WhichOneof("kind") == "attached"
        new = (await reserved(kit, engine, attempt=2)).ticket
        assert (await end_of(assembled)).status.reason == common_pb2.STALE_ATTEMPT
        assert (await refused(set_prefix(kit, old, 0))).reason == "TICKET_EXPIRED"
        await release(kit, new)
        await kit.everything_is_home()


async def test_room_that_does_not_come_in_time_is_refused_with_numbers(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, requests={"admission_wait": "50ms"}, pool={"de_buffer_bytes": 16_384}) as kit:
        engine = await kit.engine()
        held = (await reserved(kit, engine)).ticket
        full = await refused(kit.ask_node("Reserve", reservation(engine, request_id="other")))
        assert (full.code, full.reason, full.retryable) == (StatusCode.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED", True)
        assert full.facts["free"] == "0"
        assert full.facts["asked"]
        await release(kit, held)
        again = await kit.ask_node("Reserve", reservation(engine, request_id="other"))
        await release(kit, again.ticket)
        await kit.everything_is_home()


async def test_a_caller_that_gives_up_waiting_for_room_leaves_the_queue(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, requests={"admission_wait": "30s"}, pool={"de_buffer_bytes": 16_384}) as kit:
        engine = await kit.engine()
        held = (await reserved(kit, engine)).ticket
        waiting = kit.ask_node("Reserve", reservation(engine, request_id="other"))
        admission = kit.node.services.room._admission
        await kit.until_live(lambda: admission.waiting(Purpose.DE_BUFFER) == 1)
        waiting.cancel()
        await kit.until_live(lambda: admission.waiting(Purpose.DE_BUFFER) == 0)
        await release(kit, held)
        await kit.everything_is_home()
