"""Lag of the loop: steps that hold it are seen, counted, and forgotten after a while."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from rpc_kit import rpc_kit

from kvmoverd.rpc import loop_lag
from kvmoverd.rpc.loop_lag import LoopLag


async def blocked(times: int, block_s: float) -> LoopLag:
    """What is seen of so many steps of this length."""
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    for _ in range(times):
        await asyncio.sleep(0.004)
        until_s = time.perf_counter() + block_s
        while time.perf_counter() < until_s:
            pass
    await asyncio.sleep(0.004)
    watching.cancel()
    return lag


async def test_steps_of_5_ms_are_seen_and_counted() -> None:
    lag = await blocked(5, 0.005)
    assert lag.max_us >= 3_000
    assert lag.long_count >= 5
    assert lag.quantile_us(1.0) == lag.max_us


def test_a_lag_stands_for_all_moments_that_it_covers() -> None:
    lag = LoopLag()
    for _ in range(98):
        lag.saw(100)
    lag.saw(20_000)
    assert lag.quantile_us(0.5) == 111, "a quarter of an octave"
    assert lag.quantile_us(0.99) > 16_000, "11 of 109 moments were in the one that lasted 20 ms"
    assert (lag.max_us, lag.long_count) == (20_000, 1)


def test_nothing_was_late_before_the_first_timer_and_a_coarse_clock_is_never_early() -> None:
    lag = LoopLag()
    assert (lag.max_us, lag.quantile_us(0.99), lag.long_count) == (0, 0, 0)
    lag.saw(-500)
    lag.saw(1_000)
    assert (lag.max_us, lag.long_count) == (1_000, 0)
    lag.saw(1 << 40)
    assert lag.max_us == (1 << 24) - 1


async def test_lags_are_forgotten_but_not_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "WINDOW_S", 0.002)
    lag = LoopLag()
    lag.saw(5_000_000)
    watching = asyncio.create_task(lag.watch())
    for _ in range(2_000):
        if lag.max_us < 5_000_000:
            break
        await asyncio.sleep(0.005)
    watching.cancel()
    assert lag.max_us < 5_000_000
    assert lag.long_count >= 1


async def test_nothing_of_the_watch_is_left_when_it_is_cancelled() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.005)
    watching.cancel()
    await asyncio.wait([watching])
    assert lag._timer is not None and lag._timer.cancelled()


async def test_the_status_tells_the_lag_of_the_daemons_loop(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        await asyncio.sleep(0.02)
        time.sleep(0.03)  # noqa: ASYNC251 - what it is about
        await asyncio.sleep(0.005)
        status = await kit.status()
        assert status.loop_lag_us_max >= 25_000
        assert status.loop_lag_us_max >= status.loop_lag_us_p99 > 0
        assert status.loop_lags_over_1ms >= 1
