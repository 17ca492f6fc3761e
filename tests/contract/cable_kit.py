"""A TCP wire that a test can hold, so that both ends wait, or cut, so that nobody is reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 1 << 16
CLOSE_S = 2.0


class Cable:
    """To a port of this machine. Made by `cable`, used from its loop."""

    def __init__(self, port: int) -> None:
        self._to_port = port
        self._through = asyncio.Event()
        self._through.set()
        self._is_cut = False
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        return f"localhost:{self._server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        """What goes in at one end comes out of the other only after `release`; connections live on."""
        self._through.clear()

    def cut(self) -> None:
        """Connections end, and new ones do at once."""
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def release(self) -> None:
        """As if nothing had ever been."""
        self._is_cut = False
        self._through.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        self._ends.add(writer)
        try:
            if not self._is_cut:
                there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
                ends.append(back)
                self._ends.add(back)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(reader, back))
                    both.create_task(self._carry(there, writer))
        except (OSError, ExceptionGroup):
            return
        finally:
            for end in ends:
                self._ends.discard(end)
                end.transport.abort()
            self._tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._through.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("the other end has closed")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.release()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)


@asynccontextmanager
async def cable(port: int) -> AsyncIterator[Cable]:
    made = Cable(port)
    made._server = await asyncio.start_server(made._serve, "127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.close()
