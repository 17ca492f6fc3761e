"""Metrics over HTTP on the loop, for Prometheus: `GET /metrics`, one answer a connection. Bounded in all it takes."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvmoverd.core.errors import ConfigError

log = logging.getLogger(__name__)

HEAD_BYTES_MAX = 8 << 10
CONNECTIONS_MAX = 16
ANSWER_S = 5.0
PATH = "/metrics"


class MetricsServer:
    """Answers with what `registry` collects."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """The port it listens at. Raises `ConfigError`."""
        try:
            self._server = await asyncio.start_server(self._taken, host, port, limit=HEAD_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"metrics.listen: can't listen at {host}:{port}: {error.strerror or error}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Whoever is being answered is cut."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_S)

    def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; one too many is cut."""
        if len(self._tasks) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._answered(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer_to(head.decode("latin-1")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            log.debug("a question for metrics broke off: %r", error)
        finally:
            writer.transport.abort()

    def _answer_to(self, head: str) -> bytes:
        first, *lines = head.split("\r\n")
        method, _, rest = first.partition(" ")
        if rest.split(" ")[0].split("?")[0] != PATH:
            return _answer("404 Not Found", "text/plain", f"ask for {PATH}\n".encode())
        if method not in ("GET", "HEAD"):
            return _answer("405 Method Not Allowed", "text/plain", b"GET or HEAD\n")
        accept = next((line.partition(":")[2].strip() for line in lines if line.lower().startswith("accept:")), "")
        encode, kind = choose_encoder(accept)
        body: bytes = encode(self._registry)
        return _answer("200 OK", kind, body, is_shown=method == "GET")


def _answer(status: str, kind: str, body: bytes, *, is_shown: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if is_shown else b"")
