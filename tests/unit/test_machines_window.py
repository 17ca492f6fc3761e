"""The bookkeeping of layers: what may go, what is under way, what has arrived."""

from __future__ import annotations

from itertools import permutations

import pytest

from kvmoverd.core.machines.actions import AnnounceLayers, SendLayer
from kvmoverd.core.machines.window import Arrivals, LayerWindow


def test_layers_that_arrive_out_of_order_are_announced_in_order_as_one_range() -> None:
    arrivals = Arrivals(4)
    assert arrivals.add(2) == []
    assert arrivals.add(1) == []
    assert arrivals.add(0) == [AnnounceLayers(0, 2)]
    assert not arrivals.complete
    assert arrivals.add(3) == [AnnounceLayers(3, 3)]
    assert arrivals.complete


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_whatever_the_order_the_ranges_are_ascending_without_gaps_and_complete(order: tuple[int, ...]) -> None:
    arrivals = Arrivals(4)
    announced = [
        layer for arrived in order for told in arrivals.add(arrived) for layer in range(told.first, told.last + 1)
    ]
    assert announced == [0, 1, 2, 3]


def test_a_layer_that_arrives_twice_or_does_not_exist_is_not_announced() -> None:
    arrivals = Arrivals(2)
    assert arrivals.add(0) == [AnnounceLayers(0, 0)]
    assert arrivals.add(0) == []
    assert arrivals.add(2) == []
    assert arrivals.add(1) == [AnnounceLayers(1, 1)]
    assert arrivals.complete


def test_a_window_sends_in_order_and_never_more_than_fit() -> None:
    window = LayerWindow(layers=4, window_layers=2)
    assert window.due() == []
    window.allow(3)
    assert window.due() == [SendLayer(0), SendLayer(1)]
    assert window.due() == []
    assert window.sent(1) == []
    assert window.due() == [SendLayer(2)]
    assert window.sent(0) == [AnnounceLayers(0, 1)]
    assert window.due() == [], "layer 3 is not allowed yet"


def test_an_allowance_never_shrinks_and_never_exceeds_the_layers() -> None:
    window = LayerWindow(layers=2, window_layers=9)
    window.allow(5)
    window.allow(1)
    assert window.due() == [SendLayer(0), SendLayer(1)]
    assert window.due() == []


def test_a_lost_send_leaves_the_window_and_is_never_complete() -> None:
    window = LayerWindow(layers=1, window_layers=1)
    window.allow(1)
    window.due()
    window.lost(0)
    assert not window.inflight
    assert not window.complete


def test_a_window_that_begins_later_takes_the_layers_before_for_arrived() -> None:
    window = LayerWindow(layers=4, window_layers=4, first_layer=2)
    assert window.due() == []
    window.allow(1)
    assert window.due() == [], "it is there already"
    window.allow(4)
    assert window.due() == [SendLayer(2), SendLayer(3)]
    assert window.arrived.add(1) == []
    assert window.sent(3) == []
    assert window.sent(2) == [AnnounceLayers(2, 3)]
    assert window.complete
    assert LayerWindow(layers=4, window_layers=4, first_layer=4).complete
