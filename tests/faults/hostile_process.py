"""An engine that means no good: `engine_process` with the questions that a well-behaved engine is never asked."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from typing import Any

import numpy as np
from engine_process import EngineProcess

from kvmover_client.errors import KvmoverError

ROUND_S = 0.002


class HostileProcess(EngineProcess):
    """Its pages are its own, and so are its calls: that is all it may spoil."""

    async def do_truncate(self, session: str) -> list[str]:
        """Shrinks the memory that the daemon has mapped; the name of the error for each of its regions."""
        found = []
        for memory in self.engines[session].memory:
            try:
                os.ftruncate(memory.fileno(), 0)
                found.append("done")
            except OSError as error:
                found.append(errno.errorcode[error.errno or 0])
        return found

    async def do_pass_unsealed(self, session: str) -> str:
        """Offers memory that could be shrunk later; the class of the refusal."""
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 1 << 20)
            await self.engines[session].client._link.companion.pass_fd(fd, "unsealed", 5.0)
        except KvmoverError as error:
            return type(error).__name__
        finally:
            os.close(fd)
        return "accepted"

    async def do_scribble(self, session: str, seconds: float) -> int:
        """Writes noise over all its pages, again and again, beside its calls; how often."""
        loop, rng, rounds = asyncio.get_running_loop(), np.random.default_rng(7), 0
        until_s = loop.time() + seconds
        while loop.time() < until_s:
            for memory in self.engines[session].memory:
                pages = memory.array()
                start = int(rng.integers(0, len(pages) - 4096))
                pages[start : start + (1 << 20)] = rng.integers(0, 256, 1, dtype=np.uint8)
            rounds += 1
            await asyncio.sleep(ROUND_S)
        return rounds

    async def do_flood(self, session: str, calls: int, timeout_s: float) -> dict[str, int]:
        """So many fetches at once, of blocks that nobody has; how they ended."""
        made = self.engines[session]
        ends = await asyncio.gather(*(self._one_of_a_flood(made, number, timeout_s) for number in range(calls)))
        return dict(Counter(ends))

    async def _one_of_a_flood(self, made: Any, number: int, timeout_s: float) -> str:
        try:
            keys = made.keys(f"flood {number}", 1)
            call = await made.client.fetch_blocks(
                f"flood {number} {timeout_s}", 1, made.model, keys, lease_s=0.2, timeout_s=timeout_s
            )
            return str((await call.end(timeout_s + 10.0)).reason.name)
        except KvmoverError as error:
            return type(error).__name__


if __name__ == "__main__":
    asyncio.run(HostileProcess().serve())
