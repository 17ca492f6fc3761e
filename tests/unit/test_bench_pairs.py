"""The benchmark's method: orders, medians, intervals and verdicts, with numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from tests.bench.pairs import PAIRS_MIN, Interval, Pair, Run, Verdict, interval, orders, run_pairs, verdict


def test_each_side_comes_first_in_half_of_the_pairs_and_chance_says_in_which() -> None:
    assert sum(orders(15, seed=1)) == 8 and sum(orders(16, seed=1)) == 8
    assert orders(15, seed=1) == orders(15, seed=1)
    assert len({tuple(orders(15, seed=seed)) for seed in range(20)}) > 10


async def test_pairs_run_back_to_back_in_the_order_that_was_drawn() -> None:
    said: list[str] = []

    async def reference(number: int) -> Run:
        said.append(f"reference {number}")
        return Run(2.0, 0.1)

    async def ours(number: int) -> Run:
        said.append(f"ours {number}")
        return Run(1.0, 0.2)

    pairs = await run_pairs(6, 7, reference, ours)
    expected = []
    for number, ours_first in enumerate(orders(6, 7)):
        both = [f"ours {number}", f"reference {number}"]
        expected += both if ours_first else both[::-1]
    assert said == expected
    assert [pair.ours_first for pair in pairs] == orders(6, 7)
    assert [pair.ratio for pair in pairs] == [0.5] * 6


def test_the_ratio_of_a_pair_takes_out_what_both_sides_suffer() -> None:
    slow, quick = Pair(Run(1.0, 0), Run(0.9, 0), True), Pair(Run(2.0, 0), Run(1.8, 0), False)
    assert slow.ratio == pytest.approx(quick.ratio)


def test_equal_values_have_an_interval_without_width() -> None:
    assert interval([0.9] * 15, seed=0) == Interval(0.9, 0.9, 0.9)


def test_one_outlier_moves_neither_the_median_nor_the_interval_far() -> None:
    calm = [1.0 + 0.01 * (number % 5) for number in range(15)]
    found = interval([*calm[:-1], 0.01], seed=0)
    assert found.median == pytest.approx(1.02) and found.low >= 1.0 and found.high <= 1.04


def test_the_interval_holds_the_median_and_narrows_with_more_runs() -> None:
    few, many = ([1.0 + 0.01 * (number * 7 % 13) for number in range(count)] for count in (15, 150))
    a, b = interval(few, seed=3), interval(many, seed=3)
    assert a.low <= a.median <= a.high and b.low <= b.median <= b.high
    assert b.high - b.low < a.high - a.low


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [0.8, 0.9, 1.0, 1.1, 1.3] * 3
    assert interval(values, seed=5) == interval(values, seed=5)


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="0 values"):
        interval([], seed=0)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.9, 1.1, Verdict.MET), (0.89, 1.1, Verdict.NOT_RESOLVED), (0.7, 0.89, Verdict.MISSED)],
)
def test_an_aim_is_met_only_by_the_lower_end(low: float, high: float, expected: Verdict) -> None:
    assert verdict(Interval((low + high) / 2, low, high), 0.9, runs=PAIRS_MIN) is expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.1, 0.25, Verdict.MET), (0.2, 0.26, Verdict.NOT_RESOLVED), (0.26, 0.4, Verdict.MISSED)],
)
def test_where_less_is_better_the_upper_end_decides(low: float, high: float, expected: Verdict) -> None:
    found = Interval((low + high) / 2, low, high)
    assert verdict(found, 0.25, runs=PAIRS_MIN, lower_is_better=True) is expected


def test_too_few_runs_give_no_verdict() -> None:
    assert verdict(Interval(1.0, 1.0, 1.0), 0.9, runs=PAIRS_MIN - 1) is Verdict.TOO_FEW


def test_a_figure_without_an_aim_is_only_told() -> None:
    assert verdict(Interval(1.0, 1.0, 1.0), None, runs=PAIRS_MIN) is Verdict.NO_AIM
