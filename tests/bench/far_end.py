"""The other process of the transports' rows.

    python -m tests.bench.far_end memory SIZE_BYTES        sealed memory, mapped and touched; prints its descriptor
    python -m tests.bench.far_end DIRECTORY SHAPE PROFILE  receives; prints where, then answers line by line

Both live until their stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import time
from functools import partial
from pathlib import Path

from kvmover_client import RegionMemory
from kvmoverd.adapters.transport.tcp import TcpTransport
from kvmoverd.ports.transport import Received, Sink
from tests.bench.move import KEY, LANE, RUN_S, SENDER, STOP_S, layer_of
from tests.bench.reference import Reference
from tests.bench.sampler import Sampler, sampled
from tests.bench.slices import EnginePages, Shape, joined


class Receiver:
    """Pages in this process: a transport's sinks over them, and the reference's stream into them."""

    def __init__(self, shape: Shape, pages: EnginePages, c: Reference) -> None:
        self._shape, self._pages, self._c = shape, pages, c
        self.transport = TcpTransport(
            "b", "boot-2", "127.0.0.1", 0, lane=LANE, check_key=lambda key: SENDER if key == KEY else None
        )
        self.sampler: Sampler | None = None
        self._slices = joined(pages, shape)
        self._listening = socket.create_server(("127.0.0.1", 0))

    def hello(self) -> str:
        return json.dumps({"endpoint": self.transport.endpoint, "port": self._listening.getsockname()[1]})

    def accept(self) -> None:
        self._listening.settimeout(RUN_S)
        self._stream, _ = self._listening.accept()
        self._stream.settimeout(None)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self, line: str) -> None:
        """Answers one line."""
        match line.split():
            case ["expect", first]:
                self._receive(int(first))
            case ["reference"]:
                _say("ready")
                self._c.read(self._stream.fileno(), self._slices)
                self._stream.send(b"k")
            case ["begin" | "end" as command] if self.sampler is not None:
                self.sampler.begin() if command == "begin" else self.sampler.end()
                _say("sampled")
            case ["crc"]:
                _say(str(self._pages.crc_and_clear()))

    def _receive(self, first_sink: int) -> None:
        """Opens the streams' sinks, says so, and says so again when every layer has come."""
        sinks = range(first_sink, first_sink + self._shape.streams)
        for stream, sink in enumerate(sinks):
            slices = [self._pages.slices(stream, layer) for layer in range(self._shape.layers)]
            self.transport.expect(Sink(sink, partial(layer_of, slices), SENDER))
        _say("ready")
        until_s, left = time.monotonic() + RUN_S, self._shape.streams * self._shape.layers
        while left and time.monotonic() < until_s:
            select.select([self.transport.fileno()], [], [], 1.0)
            left -= sum(isinstance(event, Received) for event in self.transport.poll(256))
        for sink in sinks:
            self.transport.forget(sink)
        _say(f"{left} missing" if left else "whole")


def _say(line: str) -> None:
    print(line, flush=True)


def hold_memory(size_bytes: int) -> None:
    with RegionMemory.create(size_bytes, "bench") as memory:
        memory.array()[:] = 1
        _say(str(memory.fileno()))
        sys.stdin.read()


def main() -> None:
    if sys.argv[1] == "memory":
        hold_memory(int(sys.argv[2]))
        return
    shape, profile = Shape(**json.loads(sys.argv[2])), sys.argv[3]
    with RegionMemory.create(shape.total_bytes, "bench") as memory, contextlib.ExitStack() as stack:
        memory.array()[:] = 1
        receiver = Receiver(shape, EnginePages(shape, int(memory.array().ctypes.data)), Reference(Path(sys.argv[1])))
        stack.callback(receiver.transport.close, STOP_S)
        if profile:
            receiver.sampler = stack.enter_context(sampled(Path(profile)))
        _say(receiver.hello())
        receiver.accept()
        for line in sys.stdin:
            receiver.serve(line)


if __name__ == "__main__":
    main()
