"""When each layer of a stream is due: by the engine's own pace, as far as it was heard of."""

from __future__ import annotations

from kvmoverd.node.layer_dues import LAYER_NS, LAYER_NS_MAX, LAYER_NS_MIN, LayerDues


def test_the_first_layer_is_due_at_once_and_the_others_at_the_pace_of_an_engine() -> None:
    dues = LayerDues()
    assert dues.due_ns(4, 100) == 100
    assert dues.due_ns(6, 9_999_999) == 100 + 2 * LAYER_NS


def test_a_stream_whose_engine_waits_is_due_before_one_that_is_ahead_of_its_engine() -> None:
    waits, ahead = LayerDues(), LayerDues()
    for dues in (waits, ahead):
        dues.due_ns(0, 0)
    waits.computed(10, 10 * LAYER_NS)
    ahead.computed(4, 10 * LAYER_NS)
    now_ns = 12 * LAYER_NS
    assert waits.due_ns(10, now_ns) < now_ns < ahead.due_ns(10, now_ns)


def test_what_an_engine_takes_for_a_layer_is_measured_within_bounds() -> None:
    slow, quick = LayerDues(), LayerDues()
    for told in range(1, 60):
        slow.computed(told, told * 1_000_000_000)
        quick.computed(told, told)
    assert slow.due_ns(60, 0) - slow.due_ns(59, 0) > 0.9 * LAYER_NS_MAX
    assert quick.due_ns(60, 0) - quick.due_ns(59, 0) < 1.1 * LAYER_NS_MIN


def test_old_news_of_an_engine_change_nothing() -> None:
    dues = LayerDues()
    dues.computed(8, 1_000)
    dues.computed(5, 9_000)
    assert dues.due_ns(8, 10_000) == 1_000
