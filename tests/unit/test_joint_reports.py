"""Each number of a real daemon's report, from the node's books over the wire to what the joint policy decides by it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path as FilePath

import pytest
from joint_kit import BUFFER, GPU, KV, MS, SNIC, Yard, only
from rpc_kit import Kit, rpc_kit

from kvmover_proto import scheduler_pb2
from kvmoverd.core.scheduling.requests import Assignment
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path
from kvmoverd.rpc.node_reporting import node_report
from kvmoverd.rpc.scheduler_convert import node_report_of

Patch = pytest.MonkeyPatch
Books = Callable[[Kit, Patch], None]
WELL = Depth(0, SNIC)


@asynccontextmanager
async def told(home: FilePath, yard: Yard, node: str, books: Books, patch: Patch, *, room: bool) -> AsyncIterator[Kit]:
    """A real daemon has told, as that node of the yard, what is in its books. `room`: its buffer is as large as the others'."""
    async with rpc_kit(home) as kit:
        patch.setattr(kit.node.services.reader, "depth", lambda: WELL)
        books(kit, patch)
        message = scheduler_pb2.ReportNodeRequest.FromString(node_report(kit.node).SerializeToString())
        yard.sequence += 1
        message.node, message.boot_id, message.sequence = node, "b", yard.sequence
        if room:
            message.buffer_bytes = message.buffer_free_bytes = BUFFER
        yard.cluster.node_reported(node_report_of(message), yard.now_ns)
        yard.pull()
        yield kit


def depth(*numbers: int) -> Books:
    return lambda kit, patch: patch.setattr(kit.node.services.reader, "depth", lambda: Depth(*numbers))


def lane(rate_bytes_per_s: int) -> Books:
    return lambda kit, patch: patch.setattr(
        kit.node.services.mover.lanes, "rate_bytes_per_s", lambda now_ns: rate_bytes_per_s
    )


def starved(kit: Kit, patch: Patch) -> None:
    patch.setattr(kit.node.services.mover.lanes, "starved", lambda node, now_ns: True)


def nothing(kit: Kit, patch: Patch) -> None:
    """Happens to its books."""


@pytest.mark.parametrize(
    ("books", "share"),
    [
        (nothing, 0.5),
        (depth(0, SNIC // 4), 0.8),
        (depth(20_000 * KV, SNIC), 0.5 + 10 / 45),
        (depth(0, SNIC, 200 * MS), 0.5 + 10 / 45),
        (depth(0, SNIC, 900 * MS), 1.0),
        (lane(SNIC // 4), 0.8),
        (starved, 1.0),
    ],
    ids=["idle", "rate", "queue", "silent", "silent for long", "lane", "starved"],
)
@pytest.mark.parametrize("router", [False, True], ids=["assigned", "chosen for a router"])
async def test_a_decode_node_reads_as_much_as_its_report_lets_it(
    router: bool, books: Books, share: float, tmp_path: FilePath, monkeypatch: Patch
) -> None:
    yard = Yard(1, 1).begin()
    async with told(tmp_path, yard, "d0", books, monkeypatch, room=True):
        if router:
            read, _ = yard.cluster.choose_path("m", "p0", "d0", 45_000, yard.now_ns)
        else:
            read = only(yard.submit("r", 50_000)).read
    if share == 1.0:
        assert read.path is Path.PE
    else:
        assert [part.node for part in read.parts] == ["p0", "d0"]
        assert read.parts[0].stop == pytest.approx(share, abs=0.001)


async def test_nothing_is_given_to_a_decode_node_beyond_its_buffer(tmp_path: FilePath, monkeypatch: Patch) -> None:
    yard = Yard(1, 1).begin()
    async with told(tmp_path, yard, "d0", nothing, monkeypatch, room=False) as kit:
        tokens = kit.daemon.config.pool.de_buffer_bytes // KV
        assert yard.submit("large", tokens + 1) is None
        assert only(yard.submit("small", tokens)).decode_node == "d0"
        assert yard.submit("next", 1) is None


async def test_nothing_is_given_to_a_node_that_drains(tmp_path: FilePath, monkeypatch: Patch) -> None:
    yard = Yard(1, 1).begin()
    async with told(tmp_path, yard, "d0", lambda kit, patch: kit.node.drain(), monkeypatch, room=True):
        assert yard.submit("r") is None


def helped(what: Assignment) -> bool:
    return "d1" in [part.node for part in what.read.parts]


async def test_a_third_node_helps_as_far_as_it_has_room_for_others(tmp_path: FilePath, monkeypatch: Patch) -> None:
    """Half of a request's size must fit; what was given to it counts until its next report."""
    yard = Yard(1, 2, floor_ns=0)
    yard.room = {"d1/0": 1}
    yard.begin()
    async with told(tmp_path, yard, "d1", nothing, monkeypatch, room=True) as kit:
        tokens = kit.daemon.config.pool.help_bytes // KV
        assert not helped(only(yard.submit("beyond", 3 * tokens, hit=3 * tokens)))
        quiet(yard, "p0", "d0")
        assert helped(only(yard.submit("half", tokens, hit=tokens)))
        quiet(yard, "p0", "d0")
        yard.now_ns += 1_000 * MS
        assert not helped(only(yard.submit("no report since", 2 * tokens, hit=2 * tokens)))
        yard.node("d1", help_free_bytes=kit.daemon.config.pool.help_bytes)
        quiet(yard, "p0", "d0")
        assert helped(only(yard.submit("its next report", 2 * tokens, hit=2 * tokens)))


def test_a_third_node_that_drains_or_whose_lane_is_slow_helps_less_or_not_at_all() -> None:
    shares = []
    for more in ({}, {"lane_bytes_per_s": SNIC // 4}, {"draining": True}):
        yard = Yard(1, 2)
        yard.room = {"d1/0": 1}
        yard.begin()
        yard.node("d1", help_free_bytes=BUFFER, **more)  # type: ignore[arg-type]
        yard.pull()
        parts = only(yard.submit("r", 100_000)).read.parts
        shares.append(sum(part.stop - part.first for part in parts if part.node == "d1"))
    assert shares == pytest.approx([1 / 3, 1 / 9, 0.0], abs=0.001)


def quiet(yard: Yard, *nodes: str) -> None:
    """They have read all by now, and say so."""
    yard.now_ns += 1_000 * MS
    for node in nodes:
        yard.node(node)
    yard.pull()


def test_a_prefill_engine_that_has_become_slow_is_left_within_a_few_pulls() -> None:
    yard = Yard(2, 1)
    yard.busy, yard.rates = {"p1/0": 2_000}, {"p0/0": GPU, "p1/0": GPU}
    yard.begin()
    yard.busy["p0/0"] = 1_000
    yard.pull()
    assert only(yard.submit("a", 1_000, hit=0)).prefill_engine == "p0/0"
    yard.rates["p0/0"] = GPU // 10
    for _ in range(12):
        yard.now_ns += 20 * MS
        yard.pull()
    assert only(yard.submit("b", 1_000, hit=0)).prefill_engine == "p1/0"
