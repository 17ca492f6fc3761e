"""Blocking work beside the loop: bounded in time and number, and never waited for at the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from kvmoverd.adapters.off_loop import THREADS_MAX, off_loop
from kvmoverd.core.errors import QueueFull, StorageUnusable, UnknownModel


async def test_what_the_work_gives_or_raises_comes_back() -> None:
    assert await off_loop(lambda: 42, what="counting", timeout_s=1.0) == 42

    def fail() -> None:
        raise UnknownModel("nobody knows it")

    with pytest.raises(UnknownModel, match="nobody knows it"):
        await off_loop(fail, what="failing", timeout_s=1.0)


async def test_work_that_hangs_is_left_to_itself_and_too_much_of_it_is_refused() -> None:
    let_go = threading.Event()
    try:
        for _ in range(THREADS_MAX):
            with pytest.raises(StorageUnusable, match=r"hanging did not end within 0\.01 s"):
                await off_loop(let_go.wait, what="hanging", timeout_s=0.01)
        with pytest.raises(QueueFull, match="does a filesystem hang"):
            await off_loop(let_go.wait, what="hanging", timeout_s=0.01)
    finally:
        let_go.set()
    async with asyncio.timeout(2.0):
        while True:
            try:
                assert await off_loop(lambda: 1, what="counting", timeout_s=1.0) == 1
            except QueueFull:
                await asyncio.sleep(0.01)
            else:
                return


def test_a_process_ends_although_work_hangs() -> None:
    program = (
        "import asyncio, time\n"
        "from kvmoverd.adapters.off_loop import off_loop\n"
        "async def main():\n"
        "    try:\n"
        "        await off_loop(lambda: time.sleep(60), what='hanging', timeout_s=0.01)\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__)\n"
        "asyncio.run(main())\n"
    )
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "StorageUnusable"
    assert time.monotonic() - began_s < 20.0
