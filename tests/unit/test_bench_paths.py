"""The benchmark of reads by several nodes: its arrivals, its scheduler's books, and what it makes of counters."""

from __future__ import annotations

import pytest

from tests.bench.paths import NAMES
from tests.bench.paths_load import (
    GAP_S_MAX,
    TRACE,
    Queues,
    Rule,
    Turn,
    Window,
    arrivals,
    balance,
    read_turns,
    spread,
    windows,
)

TURNS = [Turn(10.0, 100), Turn(5.0, 50), Turn(60.0, 300)]


def test_the_fixed_names_are_there() -> None:
    assert {"split_speedup", "two_helpers_speedup", "snic_max_over_avg", "first_layer_fraction"} <= set(NAMES)


def test_the_trace_gives_turns_with_a_stored_prefix() -> None:
    turns = read_turns(TRACE)
    assert len(turns) > 50
    assert all(turn.blocks > 0 and 0 <= turn.gap_s <= GAP_S_MAX for turn in turns)
    assert 100 < sum(turn.blocks for turn in turns) / len(turns) < 400


@pytest.mark.parametrize("seed", range(5))
def test_arrivals_bring_the_load_that_is_wanted_in_the_time_that_is_given(seed: int) -> None:
    found = arrivals(read_turns(TRACE), agents=24, decodes=2, blocks_per_s=1000.0, length_s=12.0, seed=seed)
    assert sum(arrival.blocks for arrival in found) == pytest.approx(12_000, rel=0.04)
    times_s = [arrival.at_s for arrival in found]
    assert times_s == sorted(times_s) and times_s[0] >= 0.0 and times_s[-1] == pytest.approx(12.0, rel=0.05)
    assert {arrival.decode for arrival in found} == {0, 1}


def test_arrivals_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    first, again, other = (
        arrivals(TURNS, agents=8, decodes=2, blocks_per_s=100.0, length_s=10.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_rules_of_one_side_choose_as_they_say() -> None:
    queues = Queues()
    assert [queues.choose(Rule.ROUND_ROBIN, "p", "d") for _ in range(4)] == ["p", "d", "p", "d"]
    assert queues.choose(Rule.PE, "p", "d") == "p" and queues.choose(Rule.DE, "p", "d") == "d"
    assert queues.choose(Rule.SHORTER, "p", "d") == "d", "ties go to the decode side"
    queues.given("d", 10)
    assert queues.choose(Rule.SHORTER, "p", "d") == "p"
    queues.given("d", -10)
    assert queues.choose(Rule.SHORTER, "p", "d") == "d"


def test_windows_are_what_counters_gained_between_looks() -> None:
    found = windows([1.0, 2.0, 3.5], [[0, 10], [100, 40], [160, 100]])
    assert found == [Window(1.0, (100, 30)), Window(1.5, (60, 60))]
    assert found[0].max_over_avg == pytest.approx(100 / 65) and found[1].max_over_avg == 1.0


def test_only_windows_with_more_than_half_load_say_something_of_balance() -> None:
    idle, even, uneven = Window(1.0, (100, 0)), Window(1.0, (90, 90)), Window(1.0, (100, 50))
    assert balance([idle, even, uneven], rate_bytes_per_s=100.0) == (pytest.approx((1.0 + 100 / 75) / 2), 2)
    assert balance([idle], rate_bytes_per_s=100.0) == (0.0, 0)


def test_a_spread_is_of_those_that_are_named() -> None:
    assert spread({"a": 30, "b": 10}) == 1.5
    assert spread({"a": 0}) == 0.0
