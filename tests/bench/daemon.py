"""A daemon as a process, to be measured: started from a config of the row's own, ended by its pid."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.rpc.status_client import node_status
from tests.bench.cpu import process_cpu_s
from tests.bench.sampler import profile_text
from tests.e2e.cluster import ROOT, environment

START_S = 60.0
STOP_S = 20.0
LOG_LINES = 20


class BenchFailed(Exception):
    """A row can't be measured as its method says; the message says why, with numbers."""


@dataclass
class Daemon:
    """A daemon that answers. `profile`: where its sampler writes, None without one."""

    process: subprocess.Popen[bytes]
    home: Path
    profile: Path | None

    @property
    def endpoint(self) -> str:
        return f"unix://{self.home}/engine.sock"

    @property
    def pid(self) -> int:
        return self.process.pid

    def cpu_s(self) -> float:
        """User + sys since its start. Raises `BenchFailed` when it has died."""
        if self.process.poll() is not None:
            raise BenchFailed(f"the daemon ended with {self.process.returncode}:\n{log_end(self.home)}")
        return process_cpu_s(self.pid)

    def measure_from_here(self) -> None:
        """A profile begins now: what came before was setting up."""
        self._tell_sampler(b"b")

    def measure_to_here(self) -> None:
        """A profile ends now."""
        self._tell_sampler(b"e")

    def _tell_sampler(self, command: bytes) -> None:
        if self.profile is not None:
            assert self.process.stdin is not None
            self.process.stdin.write(command)
            self.process.stdin.flush()


@contextmanager
def daemon(home: Path, config: str, *, profile: bool, name: str = "bench", port: int = 0) -> Iterator[Daemon]:
    """Runs it meanwhile; `config` without the sections `node`, `engine_api` and `node_api`. Raises `BenchFailed`."""
    made = start(home, config, profile=profile, name=name, port=port)
    try:
        _await(made)
        yield made
        made.measure_to_here()
    finally:
        _end(made)


def start(home: Path, config: str, *, profile: bool = False, name: str = "bench", port: int = 0) -> Daemon:
    """A daemon that may not answer yet; the caller ends it. `config` as for `daemon`; `port`: of its node-to-node API."""
    file = home / "node.toml"
    file.write_text(
        f'[node]\nname = "{name}"\n\n[engine_api]\nsocket = "{home}/engine.sock"\n\n'
        f'[node_api]\nlisten = "127.0.0.1:{port}"\n\n{config}'
    )
    out = home / "profile.json" if profile else None
    sampler = ["-m", "tests.bench.sampler", str(out)] if profile else ["-m", "kvmoverd"]
    with (home / "daemon.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *sampler, "serve", "--config", str(file)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment(),
            cwd=ROOT,
        )
    return Daemon(process, home, out)


def _await(made: Daemon) -> None:
    until_s = time.monotonic() + START_S
    socket = made.home / "engine.sock"
    while not socket.exists() or node_status(str(socket), timeout_s=2.0) is None:
        made.cpu_s()
        if time.monotonic() > until_s:
            raise BenchFailed(f"the daemon did not answer within {START_S:g} s:\n{log_end(made.home)}")
        time.sleep(0.02)


def _end(made: Daemon) -> None:
    made.process.send_signal(signal.SIGTERM)
    try:
        made.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        made.process.kill()
        made.process.wait(STOP_S)
    assert made.process.stdin is not None
    made.process.stdin.close()
    if made.profile is not None and made.profile.exists():
        print(profile_text(made.profile), file=sys.stderr)


def log_end(home: Path) -> str:
    """The last lines of the daemon's log."""
    return "\n".join((home / "daemon.log").read_text(errors="replace").splitlines()[-LOG_LINES:])
