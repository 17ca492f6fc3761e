"""Processes of a demo: daemons and a scheduler, each with a config file as an operator would write it, and the engines."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmoverd.config import POOL_BYTES_MAX
from kvmoverd.rpc.status_client import node_status
from kvmoverd.toml_table import Table

START_S = 180.0
STOP_S = 15.0
POLL_S = 0.05
LOG_LINES = 20
OPS_MAX, THREADS = 64, 16
"""Of storage, where it is not read by io_uring."""
SHARES = ("read_bytes", "de_buffer_bytes", "help_bytes")
"""Of a pool, by what they are for. A node of the demo has one that is its own role's, and some of each."""


class DemoFailed(Exception):
    """A process of the demo did not do its part; the message says which, and holds the end of its log."""


@dataclass
class Service:
    """`kvmoverd COMMAND --config FILE`, or the place of one. It ends with its standard input, whose other end is here."""

    name: str
    home: Path
    port: int
    command: str = "serve"
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self.home / f"{self.name}.toml"

    @property
    def log(self) -> Path:
        return self.home / f"{self.name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "kvmoverd", self.command, "--until-eof", "--config", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE)

    def answers(self) -> bool:
        """Whether somebody listens at its port."""
        try:
            socket.create_connection(("127.0.0.1", self.port), POLL_S).close()
        except OSError:
            return False
        return True

    def wait(self) -> None:
        """Until it answers. Raises `DemoFailed`."""
        until = time.monotonic() + START_S
        while not self.answers():
            self.check()
            if time.monotonic() > until:
                raise DemoFailed(f"{self.name} did not answer within {START_S:g} s:\n{end_of(self.log)}")
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raises `DemoFailed` when the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise DemoFailed(f"{self.name} ended with {self.process.returncode}:\n{end_of(self.log)}")


@dataclass
class Node(Service):
    """A daemon. `share` is the part of its pool that its role needs most, one of `SHARES`."""

    share: str = "help_bytes"

    @property
    def socket(self) -> Path:
        return self.home / f"{self.name}.sock"

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    def status(self) -> dict[str, Any] | None:
        return node_status(str(self.socket), timeout_s=2.0) if self.socket.exists() else None

    def answers(self) -> bool:
        """Whether it answers on its socket."""
        return self.status() is not None

    def last_status(self) -> dict[str, Any]:
        """Raises `DemoFailed`."""
        status = self.status()
        if status is None:
            raise DemoFailed(f"{self.name} does not answer any more:\n{end_of(self.log)}")
        return status


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the configs of all nodes have in common: sizes as text, rates in bytes a second."""

    pool: str
    read_rate: str
    transport: str = "tcp"
    local: str = "shm"
    own_share: float = 0.8
    other_share: float = 0.05
    scheduler: str = ""
    """HOST:PORT, or empty: there is none."""

    @property
    def rate_bytes_per_s(self) -> int:
        """0: no bound. Raises `ConfigError`."""
        return _size_bytes("read_rate_max", self.read_rate, "storage", 0)

    @property
    def ops_max(self) -> int:
        """Reads that storage has at once: slow storage gets through them in 4 s, be they of 4 MiB. Raises `ConfigError`."""
        rate_bytes_per_s = self.rate_bytes_per_s
        return min(OPS_MAX, max(1, rate_bytes_per_s >> 20)) if rate_bytes_per_s else OPS_MAX


def node_config(node: Node, nodes: Sequence[Node], settings: NodeSettings, cnics: Sequence[str] = ()) -> str:
    """Raises `ConfigError` for a pool that is no size."""
    peers = "".join(
        f'\n[[peers]]\nname = "{peer.name}"\naddress = "{peer.address}"\n' for peer in nodes if peer is not node
    )
    scheduler = f"\n[scheduler]\naddresses = [{json.dumps(settings.scheduler)}]\n" if settings.scheduler else ""
    return f"""\
[node]
name = "{node.name}"

[engine_api]
socket = "{node.socket}"

[node_api]
listen = "{node.address}"

[pool]
{_pool(node, settings)}

[[storage]]
name = "shared"
kind = "auto"
path = "{node.home / "store"}"
read_rate_max = {json.dumps(settings.read_rate)}
ops_max = {settings.ops_max}
threads = {min(THREADS, settings.ops_max)}

[transport]
kind = "{settings.transport}"
listen = "127.0.0.1:0"
local = "{settings.local}"
socket = "{node.home / node.name}.data"

[transport.verbs]
devices = {json.dumps(list(cnics))}
{scheduler}{peers}"""


def _pool(node: Node, settings: NodeSettings) -> str:
    """Each pool is cut for its node's role: one reads for its own engine, one holds DE buffers, the others read for both.

    Raises `ConfigError`.
    """
    pool_bytes = _size_bytes("bytes", settings.pool, "pool", 1)
    sizes = dict.fromkeys(SHARES, int(pool_bytes * settings.other_share))
    sizes[node.share] = int(pool_bytes * settings.own_share)
    return "\n".join([f"bytes = {json.dumps(settings.pool)}", *(f"{key} = {size}" for key, size in sizes.items())])


def _size_bytes(name: str, text: str, table_name: str, low: int) -> int:
    """Raises `ConfigError`."""
    return Table({name: text}, table_name).size_bytes(name, None, low, POOL_BYTES_MAX)


@contextlib.contextmanager
def sigterm_as_sigint() -> Iterator[None]:
    """Whoever ends the demo ends its processes: by default SIGTERM would leave them behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def running(services: Sequence[Service]) -> Iterator[None]:
    """All of them answer within the body, and have ended after it. Raises `DemoFailed`."""
    try:
        for service in services:
            service.start()
        for service in services:
            service.wait()
        yield
    finally:
        _end([service.process for service in services if service.process is not None])


def run_engines(
    home: Path, services: Sequence[Service], command: Sequence[str], timeout_s: float, tell: Callable[[Any], None]
) -> dict[str, Any]:
    """Runs the engines' process and tells each of its lines but the last, which is the summary. Raises `DemoFailed`."""
    summary: dict[str, Any] | None = None
    log_path = home / "engines.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True)
    watchdog = _Watchdog(process, timeout_s)
    try:
        assert process.stdout is not None, "it was opened as a pipe"
        for line in process.stdout:
            event = json.loads(line)
            if "verified_bytes" in event and "turn" not in event:
                summary = event
            else:
                tell(event)
        process.wait(STOP_S)
    finally:
        watchdog.cancel()
        _end([process])
    if summary is None:
        for service in services:
            service.check()
        raise DemoFailed(f"the engines' process ended with {process.returncode}:\n{end_of(log_path)}")
    return summary


def end_of(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """SIGTERM to all, a bounded wait, SIGKILL."""
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


class _Watchdog(threading.Timer):
    """Ends a process that takes too long."""

    def __init__(self, process: subprocess.Popen[str], timeout_s: float) -> None:
        super().__init__(timeout_s, process.kill)
        self.daemon = True
        self.start()
