"""Ends on the wire: each reason has its number, its retry bit and its remedy."""

from __future__ import annotations

import pytest

from kvmover_proto import common_pb2
from kvmoverd.core.status import RETRYABLE, End, Reason
from kvmoverd.rpc.convert import TEXT_MAX, end_from, terminal
from kvmoverd.rpc.remedies import REMEDIES

NEEDS_NONE = {Reason.OK, Reason.CANCELLED}


def test_every_reason_has_a_remedy_or_needs_none() -> None:
    assert set(REMEDIES) == set(Reason)
    assert {reason for reason, remedy in REMEDIES.items() if not remedy} == NEEDS_NONE
    assert max(map(len, REMEDIES.values())) <= TEXT_MAX


@pytest.mark.parametrize("reason", Reason)
def test_a_terminal_says_what_to_do(reason: Reason) -> None:
    end = End(reason, "3 of 7", pages_quiet=False, prefix_blocks=2, moved_bytes=5, storage_read_bytes=6)
    message = terminal(end)
    assert message.status.remedy == REMEDIES[reason]
    assert message.status.reason == common_pb2.Reason.Value(reason.name)
    assert message.status.retryable == (reason in RETRYABLE)
    assert end_from(common_pb2.Terminal.FromString(message.SerializeToString())) == end


def test_an_end_of_a_newer_peer_is_a_fault_to_the_engine() -> None:
    message = common_pb2.Terminal(status=common_pb2.Status(message="new"))
    message.status.MergeFromString(b"\x08\x63")  # field 1, reason, is 99
    assert end_from(message) == End(Reason.INTERNAL, "new", pages_quiet=False)
