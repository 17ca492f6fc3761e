"""This side of a gated daemon: a node of the end-to-end cluster whose devices can be held, and whose books can be read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import BUSY, START_S, Cluster, Node, environment

ANSWER_S = 5.0
POLL_S = 0.01
LAUNCHER = Path(__file__).with_name("gated_daemon.py")
KITS = [Path(__file__).parent, Path(__file__).parents[1] / "e2e", Path(__file__).parents[1] / "unit"]


class GatedNode(Node):
    """Answers come over the control socket, which is opened when it is first used."""

    _stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def control(self) -> Path:
        return self.home / f"control-{self.name}"

    def command(self) -> list[str]:
        return [sys.executable, str(LAUNCHER), str(self.config), str(self.control)]

    def kill(self) -> None:
        super().kill()
        self.forget_control()

    def forget_control(self) -> None:
        if self._stream is not None:
            self._stream[1].close()
            self._stream = None

    def start(self) -> None:
        self.control.unlink(missing_ok=True)
        super().start()

    async def open_control(self) -> None:
        """Once after each start."""
        async with asyncio.timeout(START_S):
            while not self.control.exists():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(POLL_S)
            self._stream = await asyncio.open_unix_connection(str(self.control))

    async def ask(self, name: str, *arguments: Any) -> Any:
        """One question. Raises `TimeoutError` or `ConnectionError` when the daemon does not answer."""
        assert self._stream is not None, f"{self.name} has no control connection"
        reader, writer = self._stream
        writer.write(json.dumps([name, *arguments]).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await reader.readline()
        except TimeoutError:
            raise TimeoutError(f"{self.name} did not answer {name!r} within {ANSWER_S:g} s") from None
        if not line:
            raise ConnectionError(f"{self.name} closed its control socket:\n{self.log_text()}")
        answer = json.loads(line)
        assert "ok" in answer, f"{self.name}: {answer['error']}"
        return answer["ok"]

    async def states(self, request_id: str, attempt: int = 1) -> dict[str, set[str]]:
        """Kind of machine -> states that its machines of this attempt are in."""
        found: dict[str, set[str]] = {}
        for told in await self.ask("states"):
            if (told["request"], told["attempt"]) == (request_id, attempt):
                found.setdefault(told["kind"], set()).add(told["state"])
        return found

    async def owed(self) -> dict[str, Any]:
        """What is not as it must be once all is quiet; empty when all is."""
        books = await self.ask("books")
        found = {name: count for name, count in books["owed"].items() if count}
        for counts in books["slots"]:
            found |= {f"slots {state}": counts[state] for state in BUSY if counts[state]}
            summed = sum(counts[state] for state in (*BUSY, "free", "clean"))
            if summed != counts["total"]:
                found["slots in no set"] = counts["total"] - summed
        return found

    def pause(self) -> None:
        """Returns once it stands still."""
        super().pause()
        until_s = time.monotonic() + ANSWER_S
        while not self.is_stopped():
            assert time.monotonic() < until_s, f"{self.name} does not stop"
            time.sleep(POLL_S / 10)

    def is_stopped(self) -> bool:
        status = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        return status.rpartition(")")[2].split()[0] == "T"

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def footprint(self) -> tuple[int, int]:
        """Descriptors and threads."""
        return self.open_files(), self.threads()

    def descriptors(self) -> dict[str, int]:
        """What its descriptors are, and how many of each kind."""
        found: Counter[str] = Counter()
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[os.readlink(path).partition(":[")[0]] += 1
        return dict(found)

    def new_tracebacks(self, since_bytes: int) -> list[str]:
        """Last lines of the tracebacks in the log behind `since_bytes`."""
        text = self.log.read_bytes()[since_bytes:].decode(errors="replace")
        return [_last_line(part) for part in text.split("Traceback (most recent call last)")[1:]]

    def log_bytes(self) -> int:
        return os.stat(self.log).st_size


def _last_line(traceback: str) -> str:
    lines = [line for line in traceback.splitlines()[1:] if line and not line.startswith(" ")]
    return lines[0] if lines else traceback.strip()[-200:]


class GatedCluster(Cluster):
    """Small limits and short waits, so that a cell that waits for one of them ends soon."""

    node_class = GatedNode
    settings = {  # noqa: RUF012 - as in the base class
        "read_bytes": "4MiB",
        "write_back_bytes": "4MiB",
        "io_timeout": "500ms",
        "admission_wait": "2500ms",
        "attach_timeout": "2500ms",
        "drain": "1s",
        "silence": "2500ms",
        "more_pool": 'help_bytes = "1536KiB"',
        "more_storage": "threads = 4\nops_max = 4",
    }


async def until(condition: Callable[[], Any], timeout_s: float) -> bool:
    """Waits for an awaitable condition; False when it did not come true in time."""
    until_s = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > until_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


def kit_environment() -> dict[str, str]:
    """An environment in which the kits are found by their plain names."""
    found = environment()
    return found | {"PYTHONPATH": os.pathsep.join([*map(str, KITS), found["PYTHONPATH"]])}
