"""A real etcd on loopback, with its data in a directory of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvmoverd.adapters.membership.etcd import EtcdMembership
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess, EtcdWire
from kvmoverd.ports.membership import Member, Told

START_S = 20.0
PATIENCE_S = 5.0

needs_etcd = pytest.mark.skipif(
    not (shutil.which("etcd") and shutil.which("etcdctl")),
    reason="no etcd here: apt-get install etcd-server etcd-client",
)
PREFIX = "/kvmoverd-test"
TTL_S = 2.0
"""The shortest that settings allow."""
POLL_S = 0.01


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@dataclass
class Etcd:
    """One member, of the `cluster` that is given, or its own. `more`: further flags of etcd. `scheme`: "https" with TLS flags in
    `more`."""

    home: Path
    more: Sequence[str] = ()
    scheme: str = "http"
    port: int = 0
    peer_port: int = 0
    process: subprocess.Popen[bytes] | None = None
    ctl_flags: list[str] = field(default_factory=list)
    name: str = "one"
    cluster: str = ""

    def __post_init__(self) -> None:
        self.port, self.peer_port = free_ports(2)

    @property
    def endpoint(self) -> str:
        return f"localhost:{self.port}"

    @property
    def peer(self) -> str:
        """How the others of its cluster call it."""
        return f"{self.name}=http://127.0.0.1:{self.peer_port}"

    def start(self) -> Etcd:
        self.launch()
        return self.wait()

    def launch(self) -> None:
        """It answers only when most of its cluster do, too."""
        client, peer = f"{self.scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        command = ["etcd", f"--name={self.name}", f"--data-dir={self.home / 'etcd'}", f"--listen-client-urls={client}"]
        command += [f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
        command += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster={self.cluster or self.peer}"]
        command += ["--heartbeat-interval=50", "--election-timeout=500", *self.more]
        with (self.home / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> Etcd:
        """Until it answers."""
        assert self.process is not None
        until_s = time.monotonic() + START_S
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < until_s, (self.home / "etcd.log").read_text()[
                -2000:
            ]
            time.sleep(0.05)
        return self

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                pass
        except OSError:
            return False
        return "healthy" in self.ctl("endpoint", "health", check=False)

    def ctl(self, *words: str, check: bool = True, put: str | None = None) -> str:
        """etcdctl's words; `put` goes into its standard input."""
        command = ["etcdctl", f"--endpoints={self.scheme}://localhost:{self.port}", *self.ctl_flags, *words]
        environ = os.environ | {"ETCDCTL_API": "3"}
        done: Any = subprocess.run(
            command, input=put, capture_output=True, text=True, timeout=START_S, env=environ, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return str(done.stdout + done.stderr)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def restart(self) -> None:
        """Crashed, and started again over the same data, at the same port."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """As a crash: nothing is said to anybody."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
            self.process = None


@contextlib.contextmanager
def running(
    home: Path, more: Sequence[str] = (), scheme: str = "http", ctl_flags: Sequence[str] = ()
) -> Iterator[Etcd]:
    """Whatever the test does with it, nothing is left of it."""
    etcd = Etcd(home, more, scheme, ctl_flags=list(ctl_flags))
    try:
        yield etcd.start()
    finally:
        etcd.kill()


@dataclass
class Recorder:
    """What a membership tells, in order: "+name@address/boot" and "-..."."""

    told: list[str] = field(default_factory=list)

    def __call__(self, member: Member, there: bool) -> None:
        self.told.append(f"{'+' if there else '-'}{member.node}@{member.address}/{member.boot_id}")


async def until(is_so: Callable[[], bool], what: object = "", within_s: float = PATIENCE_S) -> float:
    """Waits for it; returns for how long. `what` may be something to be shown as it is then."""
    begun_s = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun_s + within_s, f"not so after {within_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - begun_s


def access(*endpoints: str, timeout_s: float = 0.5, **more: Any) -> EtcdAccess:
    return EtcdAccess(endpoints, timeout_s, **more)


@asynccontextmanager
async def joined(
    *endpoints: str | EtcdAccess, own: Member | None = None, ttl_s: float = TTL_S, told: Told | None = None
) -> AsyncIterator[EtcdMembership]:
    """A membership that has started, and is closed after the body."""
    first = endpoints[0]
    how = first if isinstance(first, EtcdAccess) else access(*(str(endpoint) for endpoint in endpoints))
    made = EtcdMembership(how, PREFIX, ttl_s=ttl_s, version="1")
    if told is not None:
        made.watch(told)
    try:
        await made.start(own)
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def wire_of(etcd: Etcd) -> AsyncIterator[EtcdWire]:
    """For what a test does in etcd itself."""
    wire = EtcdWire(access(etcd.endpoint))
    try:
        yield wire
    finally:
        await wire.close()


async def crash(membership: EtcdMembership) -> None:
    """As far as etcd can see: its tasks end, its lease is left to expire."""
    for task in membership._tasks:
        task.cancel()
    await asyncio.wait(membership._tasks)
    membership._lease = None
