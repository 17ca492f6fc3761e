"""This side of an engine process: start it, tell it what to do, stop it in every way there is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from fault_control import kit_environment

CHILD = Path(__file__).with_name("engine_process.py")
ANSWER_S = 15.0
LINE_BYTES_MAX = 1 << 20


class EngineFailed(Exception):
    """The engine answered a question with an error; `error` names its class."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error = error


class EngineHandle:
    """One engine process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, script: Path = CHILD) -> EngineHandle:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                str(script),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=kit_environment(),
                limit=LINE_BYTES_MAX,
            )
        )

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            number, answer = json.loads(line)
            asked = self._asked.pop(number, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineFailed("EngineDied", "the engine process has ended"))

    async def ask(self, name: str, /, *, wait_s: float = ANSWER_S, **options: Any) -> Any:
        """Raises `EngineFailed`, `TimeoutError`."""
        assert self.process.stdin is not None
        self._number += 1
        asked = self._asked[self._number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps([self._number, name, options]).encode() + b"\n")
        try:
            async with asyncio.timeout(wait_s):
                answer = await asked
        except TimeoutError:
            raise TimeoutError(f"an engine did not answer {name!r} within {wait_s:g} s") from None
        if "error" in answer:
            raise EngineFailed(answer["error"], answer["message"])
        return answer["ok"]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        """Harmless when it is dead already."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading
