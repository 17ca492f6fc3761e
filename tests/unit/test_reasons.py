"""Which terminal reason an error of another node stands for."""

from __future__ import annotations

import pytest

from kvmoverd.core.errors import KvmoverError, PeerMismatch, UnknownModel, UnknownPeer
from kvmoverd.core.status import Reason
from kvmoverd.node.reasons import reason_of


@pytest.mark.parametrize("error", [UnknownModel("m"), UnknownPeer("'pe' is none of h1's peers"), PeerMismatch("other")])
def test_a_node_that_does_not_know_us_or_what_we_name_is_as_good_as_lost(error: KvmoverError) -> None:
    assert reason_of(error) is Reason.PEER_LOST
