"""Push: computed layers leave the prefill engine's pages for the DE buffer."""

from __future__ import annotations

import pytest
from machines_kinds import push

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.machines.actions import AnnounceLayers, AnnounceQuiet, Finish, SendLayer
from kvmoverd.core.machines.push import PushState
from kvmoverd.core.status import End, Reason


def test_nothing_is_pushed_before_the_decode_node_knows_what_is_new() -> None:
    bench = push(layers=3, window_layers=2)
    assert bench.run_all("computed 1; computed 3") == []
    assert bench.run("prefix_set") == [SendLayer(0), SendLayer(1)]


def test_nothing_is_pushed_before_it_was_computed() -> None:
    bench = push(layers=2, window_layers=2)
    assert bench.run("prefix_set") == []
    assert bench.run("computed 1") == [SendLayer(0)]
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 0)]
    assert bench.run("computed 2") == [SendLayer(1)]
    assert bench.run("sent 1 OK") == [AnnounceLayers(1, 1), Finish(End(Reason.OK))]
    bench.check_over()


def test_pushed_layers_are_announced_in_order_whatever_the_order_they_arrive_in() -> None:
    bench = push(layers=4, window_layers=3)
    bench.run("prefix_set; computed 4")
    assert bench.run("sent 2 OK") == [SendLayer(3)]
    assert bench.run("sent 1 OK") == []
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 2)]
    assert bench.run("sent 3 OK") == [AnnounceLayers(3, 3), Finish(End(Reason.OK))]


@pytest.mark.parametrize("script", ["", "prefix_set; computed 1", "prefix_set; computed 2; stop CANCELLED"])
def test_layers_that_do_not_exist_are_refused_and_change_nothing(script: str) -> None:
    bench = push(layers=2)
    bench.run(script)
    before = bench.machine.state
    with pytest.raises(BadRequest, match=r"layers \[0, 3\) said to be computed, the model has 2"):
        bench.run("computed 3")
    assert bench.machine.state is before


def test_a_stop_posts_nothing_more_and_waits_for_what_is_under_way() -> None:
    bench = push(layers=3, window_layers=2)
    bench.run("prefix_set; computed 3")
    assert bench.run("stop CANCELLED the engine asked") == []
    assert bench.run_all("sent 0 OK; computed 3") == []
    assert bench.run("sent 1 OK") == [Finish(End(Reason.CANCELLED, "the engine asked"))]


def test_a_failed_push_has_its_own_reason() -> None:
    bench = push(layers=3, window_layers=1)
    bench.run("prefix_set; computed 3; sent 0 OK")
    assert bench.run("sent 1 PEER_LOST cable cut") == [Finish(End(Reason.PEER_LOST, "cable cut"))]


def test_a_second_completion_that_says_failed_does_not_stop_a_healthy_push() -> None:
    bench = push(layers=3, window_layers=1)
    bench.run("prefix_set; computed 3; sent 0 OK")
    assert bench.run("sent 0 PEER_LOST late word") == []
    assert bench.machine.state is PushState.PUSHING


def test_sends_that_do_not_end_leave_the_pages_unquiet_until_they_do() -> None:
    bench = push(layers=3, window_layers=2)
    bench.run("prefix_set; computed 3; stop DEADLINE")
    assert bench.run("quiesce_timeout") == [Finish(End(Reason.DEADLINE, pages_quiet=False))]
    assert bench.run("sent 1 PEER_LOST gone") == []
    assert bench.run("sent 0 OK") == [AnnounceQuiet()]
    bench.check_over()
