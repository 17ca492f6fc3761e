"""What the client library says of who reads: paths, parts, helpers, resident blocks; and what a look-up tells of the node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmover_client import BadRequest, LookupResult, Part, Plan, ReaderDepth, RoomUse, wire
from kvmover_client import Path as ReadPath
from kvmover_proto import common_pb2, engine_pb2

KEYS = (bytes([1]) * 32, bytes([2]) * 32)
PLAN = Plan("r", 1, bytes(32), KEYS, 3, 2, "de", ReadPath.AUTO, 5, ((0, 1, 2),), 30.0)


def message(**changed: Any) -> engine_pb2.RequestPlan:
    return wire.plan_message(replace(PLAN, **changed))


def test_a_plan_that_lets_the_nodes_decide_says_nothing_more() -> None:
    sent = message()
    assert (sent.path, sent.resident_blocks, list(sent.parts)) == (common_pb2.PATH_AUTO, 0, [])
    assert (list(sent.helpers), sent.no_helpers) == ([], False)


def test_helpers_are_named_or_refused_and_resident_blocks_counted() -> None:
    sent = message(helpers=("a", "b"), resident_blocks=1)
    assert (list(sent.helpers), sent.no_helpers, sent.resident_blocks) == (["a", "b"], False, 1)
    assert message(no_helpers=True).no_helpers


def test_parts_are_sent_as_runs() -> None:
    sent = message(path=ReadPath.PARTS, parts=(Part("pe", ((0, 3), (5, 6))), Part("de", ((3, 5),))))
    assert sent.path == common_pb2.PATH_PARTS
    assert [part.node for part in sent.parts] == ["pe", "de"]
    assert [(list(part.blocks.first), list(part.blocks.count)) for part in sent.parts] == [([0, 5], [3, 1]), ([3], [2])]


@pytest.mark.parametrize("blocks", [((2, 2),), ((3, 2),), ((-1, 2),), ((0, 65_537),), ((0, 1), (2, 2))])
def test_ranges_that_are_none_are_refused_before_they_are_sent(blocks: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(BadRequest, match=r"of pe are refused, must be of \[0, 65536\)"):
        message(path=ReadPath.PARTS, parts=(Part("pe", blocks),))


def test_a_look_up_tells_how_busy_the_node_is() -> None:
    room = engine_pb2.RoomStatus(
        purpose="read", limit_bytes=10, taken_bytes=8, waiting=2, waiting_bytes=7, oldest_wait_ms=1_500, refused=1
    )
    depth = common_pb2.ReaderDepth(queue_bytes=3_000, rate_bytes_per_s=1_000)
    told = wire.lookup_result(engine_pb2.LookupReply(prefix_blocks=4, pooled_blocks=1, reader=depth, rooms=[room]))
    assert told == LookupResult(4, 1, reader=ReaderDepth(3_000, 1_000), rooms=(RoomUse("read", 10, 8, 2, 7, 1.5, 1),))
    assert told.reader.busy_s == 3.0
    assert ReaderDepth(5, 0).busy_s == 0.0, "a node of which no rate is known"
