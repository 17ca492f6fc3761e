"""Rows of the transports alone: into an engine's region by shared memory, and to another process by TCP."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.adapters.transport.tcp import Lane, TcpTransport
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import IoVec, Route, Send, Sent, Sink, Transport
from tests.bench.cpu import CpuMeter
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import Run
from tests.bench.reference import Reference
from tests.bench.sampler import Sampler, profile_text, sampled
from tests.bench.slices import EnginePages, PoolBlocks, Shape, in_order, joined
from tests.e2e.cluster import ROOT, environment

RUN_S = 60.0
STOP_S = 10.0
SHM_ROUNDS = 4
"""A run of some 0.1 s or more, whatever the machine."""
KEY = b"k" * 32
SENDER = ("a", "boot-1")
LANE = Lane(dscp=8, so_priority=1)


class MoveRig(Protocol):
    """Both sides of one row over the same slices."""

    notes: dict[str, object]
    pids: tuple[int, ...]

    async def reference(self, number: int) -> Run: ...

    async def ours(self, number: int) -> Run: ...

    async def check(self) -> None:
        """Each side once, to warm up; both must bring all bytes. Raises `BenchFailed`."""

    def measure_from_here(self) -> None:
        """A profile begins now."""

    def measure_to_here(self) -> None:
        """A profile ends now."""


class ShmRig:
    """Clean blocks into a region whose memory another process has made; both sides in this process."""

    def __init__(self, shape: Shape, blocks: PoolBlocks, pages: EnginePages, regions: Regions, c: Reference) -> None:
        self._shape, self._blocks, self._pages, self._c = shape, blocks, pages, c
        self._sinks = itertools.count(1)
        self.transport = ShmTransport(
            *SENDER, None, check_key=lambda key: None, queue_max=1 << 14, arena=blocks.arena, regions=regions
        )
        self.sampler: Sampler | None = None
        self.pids: tuple[int, ...] = (os.getpid(),)
        self.notes: dict[str, object] = {"copy": self.transport.copy_text, "pool_pages": blocks.arena.page_kind}

    async def ours(self, number: int) -> Run:
        """Round after round, by the transport's two threads; what they cost beside the reference's one shows in CPU."""
        rounds = [self._prepare() for _ in range(SHM_ROUNDS)]
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        for _, sends in rounds:
            self.transport.submit(sends)
            _await_sent(self.transport, len(sends))
        found = _run(SHM_ROUNDS * self._shape.total_bytes, began_s, meter)
        for sinks, _ in rounds:
            for sink in sinks:
                self.transport.forget(sink)
        return found

    async def reference(self, number: int) -> Run:
        to, of = joined(self._pages, self._shape), joined(self._blocks, self._shape)
        meter, began_s = CpuMeter(os.getpid()), time.monotonic()
        for _ in range(SHM_ROUNDS):
            self._c.copy(to, of)
        return _run(SHM_ROUNDS * self._shape.total_bytes, began_s, meter)

    def _prepare(self) -> tuple[list[int], list[Send]]:
        """Open sinks, and a send for each layer of each."""
        sinks = [next(self._sinks) for _ in range(self._shape.streams)]
        for stream, sink in enumerate(sinks):
            slices = [self._pages.slices(stream, layer) for layer in range(self._shape.layers)]
            self.transport.expect(Sink(sink, partial(layer_of, slices)))
        return sinks, _sends(self._shape, self._blocks, sinks, None)

    async def check(self) -> None:
        for name, side in (("reference", self.reference), ("ours", self.ours)):
            self._pages.crc_and_clear()
            await side(0)
            _same(name, self._pages.crc_and_clear(), self._blocks.crc())

    def measure_from_here(self) -> None:
        if self.sampler is not None:
            self.sampler.begin()

    def measure_to_here(self) -> None:
        if self.sampler is not None:
            self.sampler.end()


class TcpRig:
    """Blocks in this process's pool to pages in another one, by two transports or by one stream of C."""

    def __init__(self, shape: Shape, blocks: PoolBlocks, far: FarEnd, c: Reference) -> None:
        self._shape, self._blocks, self._far, self._c = shape, blocks, far, c
        self._sinks = itertools.count(1, shape.streams)
        self.transport = TcpTransport(*SENDER, "127.0.0.1", 0, lane=LANE, check_key=lambda key: None, queue_max=1 << 14)
        self._stream = socket.create_connection(("127.0.0.1", far.port), timeout=RUN_S)
        self._stream.settimeout(None)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sampler: Sampler | None = None
        self.pids: tuple[int, ...] = (os.getpid(), far.pid)
        self.notes: dict[str, object] = {"pool_pages": blocks.arena.page_kind}

    async def ours(self, number: int) -> Run:
        first = next(self._sinks)
        self._far.ask(f"expect {first}")
        route = Route("b", "boot-2", self._far.endpoint, KEY)
        sends = _sends(self._shape, self._blocks, range(first, first + self._shape.streams), route)
        meter, began_s = CpuMeter(os.getpid(), self._far.pid), time.monotonic()
        self.transport.submit(sends)
        _await_sent(self.transport, len(sends))
        found = _run(self._shape.total_bytes, began_s, meter)
        self._far.answer()
        return found

    async def reference(self, number: int) -> Run:
        slices = joined(self._blocks, self._shape)
        self._far.ask("reference")
        meter, began_s = CpuMeter(os.getpid(), self._far.pid), time.monotonic()
        self._c.write(self._stream.fileno(), slices)
        if self._stream.recv(1) != b"k":
            raise BenchFailed("the far end of the reference's stream has gone")
        return _run(self._shape.total_bytes, began_s, meter)

    async def check(self) -> None:
        for name, side in (("reference", self.reference), ("ours", self.ours)):
            self._far.ask("crc")
            await side(0)
            _same(name, int(self._far.ask("crc")), self._blocks.crc())

    def measure_from_here(self) -> None:
        if self.sampler is not None:
            self.sampler.begin()
            self._far.ask("begin")

    def measure_to_here(self) -> None:
        if self.sampler is not None:
            self.sampler.end()
            self._far.ask("end")

    def close(self) -> None:
        self._stream.close()


class FarEnd:
    """`tests.bench.far_end` as a process: answers each line with one line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        hello = json.loads(self.answer())
        self.pid, self.endpoint, self.port = process.pid, str(hello["endpoint"]), int(hello["port"])

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Raises `BenchFailed` when it does not come, or the process has gone."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], RUN_S)[0]:
            raise BenchFailed(f"the far end said nothing for {RUN_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"the far end ended with {self._process.wait(STOP_S)}")
        return line.strip()


@contextmanager
def shm_rig(home: Path, shape: Shape, *, profile: bool) -> Iterator[ShmRig]:
    with ExitStack() as stack:
        c = Reference(home)
        fd = stack.enter_context(_foreign_memory(shape.total_bytes))
        regions = Regions()
        region = regions.map(fd)
        stack.callback(region.close)
        blocks = PoolBlocks(shape)
        stack.callback(blocks.arena.close)
        rig = ShmRig(shape, blocks, EnginePages(shape, region.address), regions, c)
        stack.callback(rig.transport.close, STOP_S)
        if profile:
            rig.sampler = stack.enter_context(_profiled(home / "shm.json"))
        yield rig


@contextmanager
def tcp_rig(home: Path, shape: Shape, *, profile: bool) -> Iterator[TcpRig]:
    with ExitStack() as stack:
        c = Reference(home)
        books = home / "far.json" if profile else None
        if books is not None:
            stack.callback(_print_profile, "far end", books)
        far = stack.enter_context(_far_end(home, shape, books))
        blocks = PoolBlocks(shape)
        stack.callback(blocks.arena.close)
        rig = TcpRig(shape, blocks, far, c)
        stack.callback(rig.close)
        stack.callback(rig.transport.close, STOP_S)
        if profile:
            rig.sampler = stack.enter_context(_profiled(home / "near.json"))
        yield rig


@contextmanager
def _far_end(home: Path, shape: Shape, profile: Path | None) -> Iterator[FarEnd]:
    command = [sys.executable, "-m", "tests.bench.far_end", str(home), json.dumps(asdict(shape)), str(profile or "")]
    with _child(command) as process:
        yield FarEnd(process)


@contextmanager
def _foreign_memory(size_bytes: int) -> Iterator[int]:
    """A descriptor of sealed memory that another process has made, mapped and touched."""
    with _child([sys.executable, "-m", "tests.bench.far_end", "memory", str(size_bytes)]) as process:
        assert process.stdout is not None
        fd = os.open(f"/proc/{process.pid}/fd/{int(process.stdout.readline())}", os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


@contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Ends when its stdin does; killed, by its pid, when it does not."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
        process.stdout.close()


@contextmanager
def _profiled(out: Path) -> Iterator[Sampler]:
    with sampled(out) as sampler:
        yield sampler
    _print_profile("this process", out)


def _print_profile(who: str, out: Path) -> None:
    if out.exists():
        print(f"{who}:\n{profile_text(out)}", file=sys.stderr)


def _sends(shape: Shape, blocks: PoolBlocks, sinks: Sequence[int], route: Route | None) -> list[Send]:
    return [
        Send(op_id, route, sinks[stream], layer, 0, blocks.slices(stream, layer))
        for op_id, (stream, layer) in enumerate(in_order(shape))
    ]


def _await_sent(transport: Transport, count: int) -> None:
    """Raises `BenchFailed` for a send that failed, or when they take too long."""
    until_s, done = time.monotonic() + RUN_S, 0
    while done < count:
        if not select.select([transport.fileno()], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise BenchFailed(f"{done} of {count} sends ended within {RUN_S:g} s")
        for event in transport.poll(256):
            if isinstance(event, Sent):
                done += 1
                if event.reason is not Reason.OK:
                    raise BenchFailed(f"send {event.op_id} ended with {event.reason.name}: {event.message}")


def layer_of(slices: Sequence[IoVec], layer: int, first_block: int) -> IoVec:
    return slices[layer]


def _run(size_bytes: int, began_s: float, meter: CpuMeter) -> Run:
    took_s, gigabytes = time.monotonic() - began_s, size_bytes / 1e9
    return Run(gigabytes / took_s, meter.spent_s() / gigabytes)


def _same(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise BenchFailed(f"{name} brought other bytes: crc32c {found:08x}, expected {expected:08x}")
