"""Readers that get slow in mid-stream, simulated: their rests go to others, and those of equal readers never."""

from __future__ import annotations

import pytest
from rest_sim import Rate, Stage

FAST = 4
"""Blocks a millisecond."""


def steady(ms: int) -> float:
    return 1.0


def falls(at_ms: int, to: float) -> Rate:
    return lambda ms: 1.0 if ms < at_ms else to


def slowed(slow: str, at_ms: int, to: float, *, blocks: int = 1600, window: int = 16, seed: int = 0) -> Stage:
    rates = {"p": steady, "d": steady} | {slow: falls(at_ms, to)}
    return Stage(rates, {"p": blocks, "d": blocks}, window=window, seed=seed)


@pytest.mark.parametrize("window", [4, 64])
@pytest.mark.parametrize("blocks", [40, 400, 1600])
def test_equal_readers_are_left_alone(blocks: int, window: int) -> None:
    for seed in range(8):
        stage = Stage({"p": steady, "d": steady}, {"p": blocks, "d": blocks}, seed=seed, window=window)
        stage.run()
        assert not stage.moves, f"seed {seed}"


@pytest.mark.parametrize("at_ms", [60, 120, 200, 300])
@pytest.mark.parametrize("slow", ["p", "d"])
def test_a_reader_that_slows_to_a_tenth_in_mid_stream_gives_what_the_other_reads_sooner(slow: str, at_ms: int) -> None:
    for seed in range(3):
        stage = slowed(slow, at_ms, 0.1, seed=seed)
        took, ideal = stage.run(), at_ms + (3200 - 2 * FAST * at_ms) / FAST / 1.1
        assert len(stage.moves) == 1 and took <= ideal * 1.45, f"seed {seed}: {took} ms, {ideal:.0f} would be ideal"


@pytest.mark.parametrize("to", [0.7, 0.5, 0.3])
def test_a_reader_that_slows_a_little_gives_a_little(to: float) -> None:
    for seed in range(3):
        stage = slowed("d", 60, to, seed=seed)
        took, ideal = stage.run(), 60 + (3200 - 480) / FAST / (1 + to)
        assert 1 <= len(stage.moves) <= 2 and took <= ideal * 1.1, f"seed {seed}: {took} ms, {ideal:.0f} would be ideal"


@pytest.mark.parametrize("at_ms", [30, 50, 70])
def test_small_parts_gain_as_well(at_ms: int) -> None:
    stage = slowed("d", at_ms, 0.1, blocks=400)
    took, alone_ms = stage.run(), at_ms + (400 - FAST * at_ms) / FAST / 0.1
    assert took <= alone_ms * 0.65, f"{took} ms, {alone_ms:.0f} without a move"


@pytest.mark.parametrize("at_ms", [60, 200, 350])
def test_a_reader_that_stops_in_mid_stream_keeps_only_what_its_device_has(at_ms: int) -> None:
    stage = slowed("d", at_ms, 0.0)
    with pytest.raises(AssertionError, match="not over"):
        stage.run(until_ms=2000)
    left = {part.node: part.tasks for request in stage.requests for part in request.parts if part.tasks}
    assert [move.why for move in stage.moves] == ["stopped"] and set(left) == {"d"}
