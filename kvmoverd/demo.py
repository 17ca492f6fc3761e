"""The demo: a prefill node and a decode node as processes on this machine, and two engines that replay a real agent trace.

The daemons are started as an operator would start them, each with a config file, a socket and a pool of its own; they share
one storage directory, as they would a cluster filesystem. The engines run in a third process that sees only the client
library. Every byte that reaches an engine's pages is checked there.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvmoverd.rpc.status_client import node_status

PREFILL, DECODE = "prefill-0", "decode-0"
START_S = 60.0
STOP_S = 15.0
REPLAY_S = 900.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `kvmoverd demo` was asked for."""

    layers: int
    sessions: int
    turns: int
    seed: int
    trace: str | None
    transport: str
    pool: str
    json: bool


class DemoFailed(Exception):
    """A process of the demo did not do its part; the message holds the end of its log."""


def run(options: DemoOptions, out: TextIO) -> int:
    """Runs the demo; 0 when every byte was right, 1 otherwise. Nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="kvmoverd-demo-") as scratch, contextlib.ExitStack() as stack:
        home = Path(scratch)
        ports = _free_ports(2)
        for node, port in zip((PREFILL, DECODE), ports, strict=True):
            (home / f"{node}.toml").write_text(_config(home, node, ports, port, options))
        nodes = [stack.enter_context(_daemon(home, node)) for node in (PREFILL, DECODE)]
        for node, process in zip((PREFILL, DECODE), nodes, strict=True):
            _wait_for(home, node, process)
        summary = _replay(home, options, out)
        summary["storage_read_bytes"] = {node: _storage_read_bytes(home, node) for node in (PREFILL, DECODE)}
    print(json.dumps(summary) if options.json else _table(summary, options), file=out)
    return 1 if summary["errors"] else 0


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _config(home: Path, node: str, ports: list[int], port: int, options: DemoOptions) -> str:
    peers = "".join(
        f'\n[[peers]]\nname = "{name}"\naddress = "127.0.0.1:{number}"\n'
        for name, number in zip((PREFILL, DECODE), ports, strict=True)
        if name != node
    )
    return f"""\
[node]
name = "{node}"

[engine_api]
socket = "{home / node}.sock"

[node_api]
listen = "127.0.0.1:{port}"

[pool]
bytes = "{options.pool}"

[[storage]]
name = "shared"
kind = "threads"
path = "{home / "store"}"

[transport]
kind = "{options.transport}"
listen = "127.0.0.1:0"
socket = "{home / node}.data"
{peers}"""


@contextlib.contextmanager
def _daemon(home: Path, node: str) -> Iterator[subprocess.Popen[bytes]]:
    (home / "store").mkdir(exist_ok=True)
    with (home / f"{node}.log").open("wb") as log:
        command = [sys.executable, "-m", "kvmoverd", "serve", "--config", str(home / f"{node}.toml")]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, a bounded wait, SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def _wait_for(home: Path, node: str, process: subprocess.Popen[bytes]) -> None:
    """Until the daemon answers on its socket. Raises `DemoFailed` with the end of its log."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise DemoFailed(f"{node} ended with {process.returncode}:\n{_log_end(home, node)}")
        if _status(home, node) is not None:
            return
        time.sleep(0.05)
    raise DemoFailed(f"{node} did not answer within {START_S:g} s:\n{_log_end(home, node)}")


def _status(home: Path, node: str) -> dict[str, Any] | None:
    path = home / f"{node}.sock"
    return node_status(str(path), timeout_s=2.0) if path.exists() else None


def _storage_read_bytes(home: Path, node: str) -> int:
    status = _status(home, node)
    if status is None:
        raise DemoFailed(f"{node} does not answer any more:\n{_log_end(home, node)}")
    return sum(int(root["read_bytes"]) for root in status["storage"])


def _log_end(home: Path, node: str) -> str:
    return "\n".join((home / f"{node}.log").read_text(errors="replace").splitlines()[-20:])


def _replay(home: Path, options: DemoOptions, out: TextIO) -> dict[str, Any]:
    """Runs the engines' process and shows its progress; its last line is the summary."""
    command = [sys.executable, "-m", "kvmover_client.replay"]
    command += ["--prefill", f"unix://{home / PREFILL}.sock", "--decode", f"unix://{home / DECODE}.sock"]
    command += ["--decode-node", DECODE, "--layers", str(options.layers), "--seed", str(options.seed)]
    command += ["--sessions", str(options.sessions), "--turns", str(options.turns)]
    command += ["--trace", options.trace] if options.trace else []
    summary: dict[str, Any] | None = None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    watchdog = _Watchdog(process, REPLAY_S)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if "paths" in event:
                summary = event
            elif not options.json:
                print(_progress(event), file=out, flush=True)
        process.wait(STOP_S)
    finally:
        watchdog.cancel()
        _end(process)
    if summary is None:
        logs = "\n".join(f"--- {node}\n{_log_end(home, node)}" for node in (PREFILL, DECODE))
        raise DemoFailed(f"the engines' process ended with {process.returncode} and no summary\n{logs}")
    return summary


class _Watchdog(threading.Timer):
    """Ends a process that takes too long."""

    def __init__(self, process: subprocess.Popen[str], timeout_s: float) -> None:
        super().__init__(timeout_s, process.kill)
        self.daemon = True
        self.start()


def _progress(event: dict[str, Any]) -> str:
    if "turn" not in event:
        return str(event.get("message", event))
    wrong = f"  ERROR {event['errors']}" if event.get("errors") else ""
    return (
        f"{event['session']} turn {event['turn']:>2}  {event['path']:<7}  hit {event['hit_tokens']:>6} tokens  "
        f"{event['bytes'] / 1e6:8.1f} MB  first layer {event['first_layer_ms']:7.1f} ms  "
        f"all layers {event['all_layers_ms']:7.1f} ms  verified {event['verified_bytes'] / 1e6:8.1f} MB{wrong}"
    )


def _table(summary: dict[str, Any], options: DemoOptions) -> str:
    head = f"{'path':<9}{'turns':>6}{'hit tokens':>12}{'MB':>10}{'GB/s':>8}{'first layer ms':>16}{'all layers ms':>15}"
    rows = [
        f"{name:<9}{path['turns']:>6}{path['hit_tokens']:>12}{path['bytes'] / 1e6:>10.1f}"
        f"{path['gbytes_per_s']:>8.2f}{path['first_layer_ms']:>16.1f}{path['all_layers_ms']:>15.1f}"
        for name, path in summary["paths"].items()
    ]
    reads = ", ".join(f"{node} {size / 1e6:.1f} MB" for node, size in summary["storage_read_bytes"].items())
    errors = [f"  {error}" for error in summary["errors"][:20]]
    verdict = "every byte was right" if not summary["errors"] else f"{len(summary['errors'])} ERRORS"
    return "\n".join(
        [
            "",
            head,
            *rows,
            "",
            f"read from storage: {reads}",
            f"verified bytes: {summary['verified_bytes']:,} (node to node by {options.transport})",
            f"errors: {len(summary['errors'])}; {verdict}; {summary['seconds']:.1f} s",
            *errors,
        ]
    )
