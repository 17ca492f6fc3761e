"""Real daemons as processes: started, killed, stopped and started again over one store, and looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvmoverd.rpc.status_client import node_status

ROOT = Path(__file__).resolve().parents[2]
START_S = 20.0
STOP_S = 15.0
SETTLE_S = 10.0
POLL_S = 0.02
BUSY = ("filling", "leased", "quarantined")
NAMES = PREFILL, DECODE, *_ = "pe", "de", "h0", "h1"

CONFIG = """\
[node]
name = "{name}"

[engine_api]
socket = "{socket}"
streams_max = {streams_max}

[node_api]
listen = "127.0.0.1:{port}"
silence = "{silence}"

[pool]
bytes = "{pool_bytes}"
read_bytes = "{read_bytes}"
de_buffer_bytes = "{de_buffer_bytes}"
write_back_bytes = "{write_back_bytes}"
{more_pool}

[[storage]]
name = "store"
path = "{store}"
{more_storage}

[transport]
kind = "{transport}"
listen = "127.0.0.1:0"
socket = "{data_socket}"
io_timeout = "{io_timeout}"
lane_floor = "{lane_floor}"
lane_window = "{lane_window}"

[requests]
live_max = {live_max}
admission_wait = "{admission_wait}"
attach_timeout = "{attach_timeout}"

[shutdown]
drain = "{drain}"

[split]
{split}
"""

SETTINGS = {
    "pool_bytes": "64MiB",
    "read_bytes": "16MiB",
    "de_buffer_bytes": "24MiB",
    "write_back_bytes": "24MiB",
    "io_timeout": "1s",
    "lane_floor": "0B",
    "lane_window": "1s",
    "admission_wait": "3s",
    "attach_timeout": "5s",
    "drain": "3s",
    "silence": "5s",
    "live_max": "4096",
    "streams_max": "4096",
    "more_pool": "",
    "more_storage": "",
    "split": "",
}
"""What a suite may want otherwise; the last three are lines of their sections."""

PEER = """
[[peers]]
name = "{name}"
address = "127.0.0.1:{port}"
"""


def environment() -> dict[str, str]:
    """This checkout's packages come first, whatever is installed."""
    paths = [ROOT, ROOT / "proto", ROOT / "client", os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@dataclass
class Node:
    """One daemon, or the place of one. `config` may be changed between starts."""

    name: str
    home: Path
    port: int
    transport: str
    settings: dict[str, str] = field(default_factory=dict)
    peers: list[Node] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.home / f"{self.name}.sock"

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    @property
    def config(self) -> Path:
        return self.home / f"{self.name}.toml"

    @property
    def log(self) -> Path:
        return self.home / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    def write_config(self) -> None:
        text = CONFIG.format(
            name=self.name,
            socket=self.socket,
            port=self.port,
            store=self.home / "store",
            transport=self.transport,
            data_socket=self.home / f"{self.name}.data",
            **(SETTINGS | self.settings),
        )
        peers = "".join(PEER.format(name=peer.name, port=peer.port) for peer in self.peers)
        self.config.write_text(text + peers)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvmoverd", "serve", "--config", str(self.config)]

    def start(self) -> None:
        """Returns when the daemon answers."""
        assert self.process is None, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment(), cwd=self.home
            )
        until = time.monotonic() + START_S
        while not self.socket.exists() or node_status(str(self.socket), timeout_s=2.0) is None:
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.log_text()}"
            assert time.monotonic() < until, f"{self.name} did not answer:\n{self.log_text()}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is cleaned up."""
        assert self.process is not None, f"{self.name} was not started"
        self.process.kill()
        self.process.wait(STOP_S)
        self.process = None

    def terminate(self) -> int:
        """SIGTERM; its exit code. What it must not leave behind is checked."""
        assert self.process is not None, f"{self.name} was not started"
        process, self.process = self.process, None
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
            raise AssertionError(f"{self.name} outlived SIGTERM by {STOP_S} s:\n{self.log_text()}") from None
        assert not self.sockets(), f"{self.name} left {self.sockets()}"
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], f"{self.name} left children"
        return code

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def sockets(self) -> list[str]:
        return sorted(path.name for path in self.home.glob(f"{self.name}.*") if path.is_socket())

    def log_text(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    async def status(self) -> dict[str, Any]:
        found = await asyncio.to_thread(node_status, str(self.socket), timeout_s=5.0)
        assert found is not None, f"{self.name} does not answer:\n{self.log_text()}"
        return found

    async def settled(self, is_settled: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Waits until the status is as it should be."""
        until = time.monotonic() + SETTLE_S
        while not is_settled(status := await self.status()):
            assert time.monotonic() < until, f"{self.name}: not {what} after {SETTLE_S} s: {status}\n{self.log_text()}"
            await asyncio.sleep(POLL_S)
        return status

    async def slots_home(self) -> dict[str, Any]:
        """Waits until no request lives and no slot is in use."""
        return await self.settled(_is_home, "at rest")

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))


def _is_home(status: dict[str, Any]) -> bool:
    busy = sum(counts[state] for counts in status["slots"] for state in BUSY)
    return not busy and not sum(status["requests"].values()) and not status["leases"]


def children_of(pid: int) -> list[int]:
    """Processes that `pid` has started and that still live."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


class Cluster:
    """A prefill and a decode node, or only the former, and maybe helpers, over one store."""

    node_class: ClassVar[type[Node]] = Node
    settings: ClassVar[dict[str, str]] = {}

    def __init__(self, home: Path, *, nodes: int, transport: str) -> None:
        self.home = home
        self.store = home / "store"
        self.store.mkdir()
        names = zip(NAMES[:nodes], free_ports(nodes), strict=True)
        self.nodes = [self.node_class(name, home, port, transport, self.settings) for name, port in names]
        try:
            for node in self.nodes:
                node.peers = [peer for peer in self.nodes if peer is not node]
                node.write_config()
                node.start()
        except BaseException:
            for node in self.nodes:
                if node.process is not None:
                    node.kill()
            raise

    @property
    def pe(self) -> Node:
        return self.nodes[0]

    @property
    def de(self) -> Node:
        return self.nodes[1]

    @property
    def helpers(self) -> list[Node]:
        return self.nodes[2:]

    def restart(self) -> None:
        """With empty pools: what is stored has to be read."""
        for node in self.nodes:
            assert node.terminate() == 0, node.log_text()
        for node in self.nodes:
            node.start()

    def end(self) -> None:
        """Every daemon that still lives must leave by itself, and cleanly."""
        codes = {}
        try:
            for node in self.nodes:
                if node.process is not None:
                    codes[node.name] = node.terminate()
        finally:
            for node in self.nodes:
                if node.process is not None:
                    node.kill()
        assert not any(codes.values()), f"exit codes {codes}:\n" + "\n".join(node.log_text() for node in self.nodes)


@contextlib.contextmanager
def running(*, nodes: int = 2, transport: str = "tcp", cluster_class: type[Cluster] = Cluster) -> Iterator[Cluster]:
    """A cluster in a directory with a short name: the paths of its sockets are limited."""
    home = Path(tempfile.mkdtemp(prefix="kvme2e-", dir="/tmp"))
    try:
        cluster = cluster_class(home, nodes=nodes, transport=transport)
        try:
            yield cluster
        finally:
            cluster.end()
    finally:
        shutil.rmtree(home)
