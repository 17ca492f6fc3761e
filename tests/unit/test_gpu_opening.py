"""Opening GPU memory beside the loop: whoever stops waiting, nothing stays open; nobody is told too early that it may go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvmoverd.adapters.off_loop import off_loop
from kvmoverd.core.errors import BadRegion, NoCuda
from kvmoverd.node import gpu_opening
from kvmoverd.node.gpu_opening import given_back, open_beside
from kvmoverd.ports.memory import GpuShare, Memory

T = TypeVar("T")
SHARE = GpuShare(b"h" * 64, 0, 4096, "0000:3b:00.0")


class Lent:
    """GPU memory without a GPU; `lets_go` sets when it is given back after `close`."""

    address, size_bytes, page_kind = 1 << 40, 4096, "GPU 0"

    def __init__(self, *, lets_go: bool = True) -> None:
        self.closed = threading.Event()
        self.given_back = False
        self._lets_go = lets_go

    def close(self) -> None:
        self.given_back = self._lets_go
        self.closed.set()


class Driver:
    """Opens when it is let."""

    def __init__(self) -> None:
        self.made: list[Lent] = []
        self.asked, self.let, self.opened = threading.Event(), threading.Event(), threading.Event()

    def open(self, share: GpuShare) -> Memory:
        self.asked.set()
        assert self.let.wait(5.0)
        self.made.append(Lent())
        self.opened.set()
        return self.made[-1]

    def has_closed(self) -> bool:
        """Waits for what it opened, and for its end."""
        return self.opened.wait(5.0) and self.made[0].closed.wait(5.0)


async def test_what_was_opened_is_the_callers() -> None:
    driver = Driver()
    driver.let.set()
    memory = await open_beside(off_loop, driver.open, SHARE)
    assert driver.made == [memory] and not driver.made[0].closed.is_set()


async def test_a_refusal_is_the_callers_too() -> None:
    def refuse(share: GpuShare) -> Memory:
        raise BadRegion("no such handle")

    with pytest.raises(BadRegion, match="no such handle"):
        await open_beside(off_loop, refuse, SHARE)


async def test_who_stops_waiting_leaves_nothing_open() -> None:
    driver = Driver()
    opening = asyncio.ensure_future(open_beside(off_loop, driver.open, SHARE))
    await asyncio.to_thread(driver.asked.wait, 5.0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    driver.let.set()
    assert await asyncio.to_thread(driver.has_closed)


async def test_memory_that_comes_just_as_the_caller_leaves_is_closed() -> None:
    made = Lent()

    async def cut_short(work: Callable[[], T], *, what: str, timeout_s: float) -> T:
        work()
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await open_beside(cut_short, lambda share: made, SHARE)
    assert made.closed.is_set()


async def test_a_driver_that_does_not_answer_is_no_cuda_and_what_comes_late_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_opening, "OPEN_S", 0.02)
    driver = Driver()
    with pytest.raises(NoCuda, match=r"CUDA does not answer: opening GPU memory did not end within 0\.02 s"):
        await open_beside(off_loop, driver.open, SHARE)
    driver.let.set()
    assert await asyncio.to_thread(driver.has_closed)


async def test_an_owner_is_told_when_its_memory_was_given_back_and_not_before() -> None:
    memory = Lent(lets_go=False)
    memory.close()
    assert not await given_back(memory, 0.02)
    asyncio.get_running_loop().call_later(0.02, setattr, memory, "given_back", True)
    assert await given_back(memory, 5.0)
