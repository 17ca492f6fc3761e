"""What status says of reads by several nodes, and of who waits for room."""

from __future__ import annotations

from typing import Any

import pytest
from node_kit import NodeKit, node_kit
from test_node_status_storage import FACTS

from kvmover_proto import engine_pb2
from kvmoverd import cli
from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.shares import Depth
from kvmoverd.rpc import status_client
from kvmoverd.rpc.node_status import status_reply
from kvmoverd.rpc.status_client import plain_status


def ignore(error: KvmoverError) -> None:
    """Nobody minds."""


def ask(kit: NodeKit, owner: str, size_bytes: int, waited_s: float = 0.0) -> None:
    room = kit.services.room
    room.ask(Purpose.READ, owner, size_bytes, granted=lambda: None, refused=ignore, waited_s=waited_s)


async def test_rooms_queues_and_counts_are_told() -> None:
    async with node_kit() as kit:
        counts = kit.services.counts
        counts.plans["split"] += 2
        counts.moves["late"] += 1
        counts.dropped["queue full"] += 3
        counts.hints.read_blocks = 5
        limit_bytes = kit.admission.free_bytes(Purpose.READ)
        ask(kit, "first", limit_bytes)
        ask(kit, "second", limit_bytes, waited_s=0.25)
        ask(kit, "third", 100)
        reply = status_reply(kit.node, FACTS, {})
        rooms = {room.purpose: room for room in reply.rooms}
        assert set(rooms) == {purpose.value for purpose in Purpose}
        read = rooms["read"]
        assert (read.limit_bytes, read.taken_bytes, read.waiting) == (limit_bytes, limit_bytes, 2)
        assert read.waiting_bytes == limit_bytes + 100 and read.oldest_wait_ms in (249, 250)
        assert dict(reply.read_plans) == {"split": 2} and dict(reply.moved_parts) == {"late": 1}
        assert dict(reply.dropped_blocks) == {"queue full": 3}
        assert (reply.prefetch.limit_bytes, reply.prefetch.read_blocks) == (kit.services.limits.prefetch_bytes, 5)
        assert (reply.reader.queue_bytes, reply.reader.rate_bytes_per_s) == (0, 0)
        for owner in ("first", "second", "third"):
            kit.services.room.give_back(owner)


async def test_the_queue_of_a_node_is_all_that_it_was_asked_to_read() -> None:
    """Also what waits for its turn to be begun."""
    async with node_kit() as kit:
        reader = kit.services.reader
        reader._unstarted_bytes += 1000
        kit.services.desk.read_queue_bytes += 77
        assert reader.depth() == Depth(1077, 0)
        reader._unstarted_bytes, kit.services.desk.read_queue_bytes = 0, 0


def status(**room: Any) -> dict[str, Any]:
    return plain_status(engine_pb2.NodeStatusReply(rooms=[engine_pb2.RoomStatus(purpose="read", **room)]))


def test_the_command_line_says_who_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_client, "node_status", lambda socket, timeout_s: status(limit_bytes=4096))
    assert cli.main(["status", "--socket", "x"]) == 0
    assert "warning" not in capsys.readouterr().out
    full = status(limit_bytes=4096, taken_bytes=2048, waiting=2, waiting_bytes=3 << 20, oldest_wait_ms=1500)
    monkeypatch.setattr(status_client, "node_status", lambda socket, timeout_s: full)
    assert cli.main(["status", "--socket", "x"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "warning: 2 requests wait for 3MiB of pool.read_bytes, the first for 1.5 s; 2KiB of 4KiB are taken"
    )
