"""A real scheduler as a process: started, killed, stopped, and asked from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmoverd.core.errors import SchedulerUnreachable
from kvmoverd.rpc.scheduler_status_client import scheduler_status

ROOT = Path(__file__).resolve().parents[1]
START_S = 20.0
STOP_S = 15.0
POLL_S = 0.02
SERVES = re.compile(r"scheduler serves at (\S+),")
METRICS = re.compile(r"metrics at http://(\S+)/metrics")

CONFIG = """\
[scheduler]
listen = "127.0.0.1:{port}"
policy = "{policy}"
report_interval = "50ms"
pull_interval = "20ms"
{more_scheduler}

[scheduler.journal]
path = "{journal}"

[[models]]
name = "m"
kv_bytes_per_token = 40016
alpha_tokens = 3750000
beta_tokens = 800000

[limits]
{limits}

[metrics]
listen = "127.0.0.1:0"

{more}
"""


@dataclass
class SchedulerProcess:
    """One scheduler, or the place of one. The settings may be changed between starts; `port` 0 is any that is free."""

    home: Path
    policy: str = "paper"
    port: int = 0
    limits: str = ""
    more_scheduler: str = ""
    more: str = ""
    journal: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    address: str = ""
    _starts: int = 0

    @property
    def log(self) -> Path:
        return self.home / f"scheduler.{self._starts}.log"

    @property
    def config(self) -> Path:
        return self.home / "scheduler.toml"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the scheduler was not started"
        return self.process.pid

    @property
    def metrics_address(self) -> str:
        found = METRICS.search(self.log.read_text())
        assert found is not None, self.log_text()
        return found[1]

    def write_config(self) -> None:
        self.config.write_text(
            CONFIG.format(
                port=self.port,
                policy=self.policy,
                limits=self.limits,
                more_scheduler=self.more_scheduler,
                more=self.more,
                journal=self.journal,
            )
        )

    def start(self) -> None:
        """Returns when it serves; `address` is where."""
        assert self.process is None, "the scheduler runs already"
        self._starts += 1
        self.write_config()
        command = [sys.executable, "-m", "kvmoverd", "scheduler", "--config", str(self.config)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment() | self.environ,
                cwd=self.home,
            )
        until = time.monotonic() + START_S
        while (found := SERVES.search(self.log.read_text())) is None:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log_text()}"
            assert time.monotonic() < until, f"it did not serve:\n{self.log_text()}"
            time.sleep(POLL_S)
        self.address = found[1]

    def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is cleaned up."""
        assert self.process is not None, "the scheduler was not started"
        self.process.kill()
        self.process.wait(STOP_S)
        self.process = None

    def terminate(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None, "the scheduler was not started"
        process, self.process = self.process, None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
            raise AssertionError(f"it outlived SIGTERM by {STOP_S} s:\n{self.log_text()}") from None

    def status(self) -> dict[str, Any]:
        """Its books, and who it is."""
        try:
            return scheduler_status(self.address, timeout_s=5.0)
        except SchedulerUnreachable as error:
            raise AssertionError(f"{error}\n{self.log_text()}") from error

    def log_text(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def environment() -> dict[str, str]:
    """This checkout's packages come first, whatever is installed."""
    paths = [ROOT, ROOT / "proto", ROOT / "client", os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}


@contextlib.contextmanager
def scheduler(home: Path, **settings: Any) -> Iterator[SchedulerProcess]:
    """It serves within the body, and must leave cleanly after it unless the body has ended it."""
    made = SchedulerProcess(home, **settings)
    made.start()
    try:
        yield made
    except BaseException:
        if made.process is not None:
            made.kill()
        raise
    if made.process is not None:
        assert made.terminate() == 0, made.log_text()
