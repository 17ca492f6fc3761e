"""The breaker: who failed is left alone for a while, and asked again when the pause is over."""

from __future__ import annotations

from kvmoverd.core.breaker import Breaker


def breaker() -> Breaker:
    return Breaker(failures_max=3, pause_s=1.0, pause_max_s=4.0)


def test_it_opens_after_so_many_failures_in_a_row_and_says_for_how_long() -> None:
    found = breaker()
    waits = []
    for _ in range(3):
        found.on_failure(100.0)
        waits.append(found.wait_s(100.0))
    assert waits == [0.0, 0.0, 1.0]
    assert found.wait_s(100.25) == 0.75
    assert found.wait_s(101.0) == 0.0


def test_a_success_between_failures_starts_the_count_anew() -> None:
    found = breaker()
    for _ in range(4):
        found.on_failure(0.0)
        found.on_failure(0.0)
        found.on_success()
    assert found.wait_s(0.0) == 0.0


def test_each_pause_is_twice_the_last_up_to_the_limit_and_short_again_after_a_success() -> None:
    found = breaker()
    now_s, pauses = 0.0, []
    for _ in range(4):
        found.trip(now_s)
        pauses.append(found.wait_s(now_s))
        now_s += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    found.on_success()
    found.trip(now_s)
    assert found.wait_s(now_s) == 1.0


def test_after_the_pause_one_failure_is_enough() -> None:
    found = breaker()
    for _ in range(3):
        found.on_failure(0.0)
    found.on_failure(1.0)
    assert found.wait_s(1.0) == 2.0


def test_failures_of_calls_that_were_under_way_do_not_lengthen_an_open_pause() -> None:
    found = breaker()
    for _ in range(50):
        found.on_failure(0.0)
    assert found.wait_s(0.0) == 1.0
    assert found.wait_s(1.0) == 0.0
