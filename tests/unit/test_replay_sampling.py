"""How evenly storage was read: windows, counters between samples, and what a node is worth that could not be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmover_client import AsyncClient, DaemonGone
from kvmover_client.replay import sampling
from kvmover_client.replay.sampling import Evenness, Samples, evenness, sample, sample_once
from kvmover_client.replay.scheduled_report import times

RATE = 100.0


def read(*steps: int, every_s: float = 0.25) -> Samples:
    """A counter that rises by these, sample by sample."""
    found, total = Samples(), 1_000
    found.add(50.0, total)
    for number, step in enumerate(steps, 1):
        total += step
        found.add(50.0 + number * every_s, total)
    return found


def test_all_alike_is_one_and_one_alone_is_the_number_of_nodes() -> None:
    assert evenness([read(*[25] * 8)] * 3, RATE) == Evenness(1.0, 2, 1.0)
    alone = evenness([read(*[100] * 8), read(*[0] * 8), read(*[0] * 8)], RATE)
    assert alone == Evenness(3.0, 2, 3.0)


def test_windows_that_are_half_idle_do_not_count_but_their_bytes_do() -> None:
    busy, idle = [25] * 4, [1] * 4
    nodes = [read(*busy, *idle, *busy), read(*busy, *[0] * 4, *busy)]
    found = evenness(nodes, RATE)
    assert (found.windows, found.busy_windows) == (1.0, 2)
    assert found.whole == pytest.approx(204 / 202)


def test_exactly_half_is_not_more_than_half() -> None:
    assert evenness([read(*[25] * 4), read(*[0] * 4)], RATE).busy_windows == 0
    assert evenness([read(*[26] * 4), read(*[0] * 4)], RATE).busy_windows == 1


def test_the_mean_is_over_windows_not_over_bytes() -> None:
    """A second that reads twice as much counts as much as the other."""
    found = evenness([read(*[40] * 4, *[10] * 4), read(*[40] * 4, *[30] * 4)], 60.0)
    assert found.windows == pytest.approx((1.0 + 1.5) / 2)


def test_samples_that_came_late_are_put_on_a_line() -> None:
    late = Samples([50.0, 50.9, 52.0], [0, 90, 200])
    values = [late.value(at_s) for at_s in (49.0, 50.0, 50.45, 51.45, 52.0, 60.0)]
    assert values == pytest.approx([0, 0, 45, 145, 200, 200])
    assert evenness([late, read(*[25] * 8)], RATE).busy_windows == 2


def test_nothing_read_and_nothing_sampled_are_zero() -> None:
    assert evenness([], RATE) == Evenness(0.0, 0, 0.0)
    assert evenness([Samples(), Samples()], RATE) == Evenness(0.0, 0, 0.0)
    assert evenness([read(0, 0, 0, 0), read(0, 0, 0, 0)], 0.0) == Evenness(0.0, 0, 0.0)


def test_without_a_bound_every_window_counts_in_which_anything_was_read() -> None:
    assert evenness([read(1, 0, 0, 0, 0, 0, 0, 0), read(*[0] * 8)], 0.0).busy_windows == 1


class _Node:
    """Answers with a counter that rises, or not at all."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self.answers = answers

    async def node_status(self) -> object:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(storage=[SimpleNamespace(read_bytes=part) for part in answer])


async def test_all_storage_roots_of_a_node_count_and_one_that_does_not_answer_is_left_out() -> None:
    samples = {"a": Samples(), "b": Samples()}
    nodes = {"a": _Node(iter([(5, 7), (6, 9)])), "b": _Node(iter([DaemonGone("gone"), (1,)]))}
    clients = cast(dict[str, AsyncClient], nodes)
    await sample_once(clients, samples)
    await sample_once(clients, samples)
    assert samples["a"].read_bytes == [12, 15] and samples["a"].total_bytes == 3
    assert samples["b"].read_bytes == [1] and samples["b"].total_bytes == 0


async def test_samples_are_taken_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SAMPLE_S", 0.001)
    samples = {"a": Samples()}
    clients = cast(dict[str, AsyncClient], {"a": _Node(iter((number,) for number in range(10_000)))})
    task = asyncio.create_task(sample(clients, samples))
    async with asyncio.timeout(5.0):
        while len(samples["a"].at_s) < 3:  # noqa: ASYNC110 (it says so to nobody)
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert samples["a"].at_s == sorted(samples["a"].at_s)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert times([]) == {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    assert times([float(number) for number in range(1, 201)]) == {"mean": 100.5, "p50": 100.0, "p99": 198.0}
