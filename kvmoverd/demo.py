"""The demo: a prefill and a decode node as processes on this machine, others that help, and two engines that replay a trace.

The daemons are started as an operator would start them, each with a config file, a socket and a pool of its own; they share
one storage directory, as they would a cluster filesystem. The engines run in a third process that sees only the client
library. Every byte that reaches an engine's pages is checked there.

Then all daemons start anew, with empty pools over the same directory, and the first turns come once more: now the hit
blocks lie in storage alone, whose speed is bounded, so that it pays to read from several nodes at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvmoverd.config import POOL_BYTES_MAX
from kvmoverd.demo_table import cold_line, progress, summed, table
from kvmoverd.devices_verbs import ports_up
from kvmoverd.rpc.status_client import node_status
from kvmoverd.toml_table import Table

PREFILL, DECODE, HELPER = "prefill-0", "decode-0", "helper-{}"
START_S = 180.0
STOP_S = 15.0
AT_ONCE = 3
"""Sessions that play at the same time: more than the decode node's buffers hold, so that it, too, reads from storage."""
REPLAY_S = 900.0
LOG_LINES = 20
SUMMARY_NAMES = ("paths", "storage_read_bytes", "verified_bytes", "errors", "seconds")
"""What `--json` prints: these names and no other."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `kvmoverd demo` was asked for."""

    layers: int
    sessions: int
    turns: int
    seed: int
    trace: str | None
    transport: str
    local: str
    pool: str
    json: bool
    helpers: int = 0
    read_rate: str = "128MiB"


class DemoFailed(Exception):
    """A process of the demo did not do its part; the message says which, and holds the end of its log."""


@dataclass
class _Node:
    """A daemon of the demo, or one to be. It ends with its standard input, whose other end dies with this process."""

    name: str
    home: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.home / f"{self.name}.toml"

    @property
    def socket(self) -> Path:
        return self.home / f"{self.name}.sock"

    @property
    def log(self) -> Path:
        return self.home / f"{self.name}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "kvmoverd", "serve", "--until-eof", "--config", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE)

    def status(self) -> dict[str, Any] | None:
        return node_status(str(self.socket), timeout_s=2.0) if self.socket.exists() else None

    def wait(self) -> None:
        """Until the daemon answers on its socket. Raises `DemoFailed`."""
        until = time.monotonic() + START_S
        while self.status() is None:
            self.check()
            if time.monotonic() > until:
                raise DemoFailed(f"{self.name} did not answer within {START_S:g} s:\n{_end_of(self.log)}")
            time.sleep(0.05)

    def check(self) -> None:
        """Raises `DemoFailed` when the daemon has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise DemoFailed(f"{self.name} ended with {self.process.returncode}:\n{_end_of(self.log)}")

    def last_status(self) -> dict[str, Any]:
        """Raises `DemoFailed`."""
        status = self.status()
        if status is None:
            raise DemoFailed(f"{self.name} does not answer any more:\n{_end_of(self.log)}")
        return status


def run(options: DemoOptions, out: TextIO, check: Callable[[Path], object]) -> int:
    """Runs the demo; 0 when every byte was right, 1 otherwise. Nothing is left behind, also after SIGINT and SIGTERM.

    `check` raises `KvmoverError` for a config file that `serve` would refuse; nothing has been started then.
    """
    with _sigterm_as_sigint(), tempfile.TemporaryDirectory(prefix="kvmoverd-demo-") as scratch:
        home = Path(scratch)
        names = [PREFILL, DECODE, *(HELPER.format(number) for number in range(options.helpers))]
        nodes = [_Node(name, home, port) for name, port in zip(names, _free_ports(len(names)), strict=True)]
        cnics = _cnics(nodes) if options.transport == "verbs" else {}
        for node in nodes:
            node.config.write_text(_config(node, nodes, options, cnics.get(node.name, ())))
            check(node.config)
        (home / "store").mkdir()
        warm = _act(home, nodes, _replay_command(nodes, options), options.read_rate, None if options.json else out)
        cold = None if warm["errors"] else _cold_act(home, nodes, options, warm, out)
    summary = summed(warm, cold)
    if options.json:
        print(json.dumps({name: summary[name] for name in SUMMARY_NAMES}), file=out)
    else:
        rate_bytes_per_s = _read_rate_bytes(options.read_rate)
        words = table(warm, cold, rate_bytes_per_s=rate_bytes_per_s, pool=options.pool, transport=options.transport)
        print(words, file=out)
    return 1 if summary["errors"] else 0


def _act(
    home: Path, nodes: Sequence[_Node], command: Sequence[str], read_rate: str, out: TextIO | None
) -> dict[str, Any]:
    """All daemons from start to end, and one replay. Progress goes to `out`, if any. Raises `DemoFailed`."""
    with _running(nodes):
        summary = _replay(home, nodes, command, out)
        told = {node.name: node.last_status() for node in nodes}
    summary["storage_read_bytes"] = {
        name: sum(int(root["read_bytes"]) for root in status["storage"]) for name, status in told.items()
    }
    summary["plans"] = told[PREFILL].get("read_plans", {})
    summary["moved"] = told[PREFILL].get("moved_parts", {})
    (root,) = told[PREFILL]["storage"]
    bound = f", {read_rate} a second at most for each node" if _read_rate_bytes(read_rate) else ""
    summary["ways"] = (
        f"storage by {root['kind']}, {root['io_mode']}{bound}; copies within a node: {told[PREFILL]['local_copies']}"
    )
    return summary


def _cold_act(
    home: Path, nodes: Sequence[_Node], options: DemoOptions, warm: Mapping[str, Any], out: TextIO
) -> dict[str, Any]:
    """The first turns once more, one after the other, read as the nodes decide. Raises `DemoFailed`."""
    once = dataclasses.replace(options, turns=1)
    command = [*_replay_command(nodes, once, at_once=1), "--paths", "auto"]
    if not warm["dropped_blocks"]:
        # Blocks that storage could not take in time are no error, but then they can't be found either.
        command.append("--stored")
    if not options.json:
        print(cold_line(options.read_rate if _read_rate_bytes(options.read_rate) else None), file=out, flush=True)
    return _act(home, nodes, command, options.read_rate, None if options.json else out)


@contextlib.contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """Whoever ends the demo ends its processes: by default SIGTERM would leave them behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _cnics(nodes: Sequence[_Node]) -> dict[str, tuple[str, ...]]:
    """Each node has ports of its own where there are enough, as on machines of their own. Raises `TransportRefused`."""
    names = [port.name for port in ports_up()]
    shares = [tuple(names[number :: len(nodes)]) or tuple(names) for number in range(len(nodes))]
    return {node.name: share for node, share in zip(nodes, shares, strict=True)}


def _pool(node: _Node, options: DemoOptions) -> str:
    """Each pool is cut for its node's role: one reads for its own engine, one holds DE buffers, the others read for both.

    Raises `ConfigError`.
    """
    pool_bytes = _size_bytes("bytes", options.pool, "pool", 1)
    sizes = dict.fromkeys(("read_bytes", "de_buffer_bytes", "help_bytes"), pool_bytes // 20)
    sizes[{PREFILL: "read_bytes", DECODE: "de_buffer_bytes"}.get(node.name, "help_bytes")] = pool_bytes * 8 // 10
    return "\n".join([f"bytes = {json.dumps(options.pool)}", *(f"{key} = {size}" for key, size in sizes.items())])


def _read_rate_bytes(read_rate: str) -> int:
    """0: no bound. Raises `ConfigError`."""
    return _size_bytes("read_rate_max", read_rate, "storage", 0)


def _size_bytes(name: str, text: str, table_name: str, low: int) -> int:
    """Raises `ConfigError`."""
    return Table({name: text}, table_name).size_bytes(name, None, low, POOL_BYTES_MAX)


def _config(node: _Node, nodes: Sequence[_Node], options: DemoOptions, cnics: Sequence[str]) -> str:
    """Raises `ConfigError` for a pool that is no size."""
    peers = "".join(
        f'\n[[peers]]\nname = "{peer.name}"\naddress = "127.0.0.1:{peer.port}"\n' for peer in nodes if peer is not node
    )
    return f"""\
[node]
name = "{node.name}"

[engine_api]
socket = "{node.socket}"

[node_api]
listen = "127.0.0.1:{node.port}"

[pool]
{_pool(node, options)}

[[storage]]
name = "shared"
kind = "auto"
path = "{node.home / "store"}"
read_rate_max = {json.dumps(options.read_rate)}

[transport]
kind = "{options.transport}"
listen = "127.0.0.1:0"
local = "{options.local}"
socket = "{node.home / node.name}.data"

[transport.verbs]
devices = {json.dumps(list(cnics))}
{peers}"""


@contextlib.contextmanager
def _running(nodes: Sequence[_Node]) -> Iterator[None]:
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait()
        yield
    finally:
        _end([node.process for node in nodes if node.process is not None])


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


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _replay(home: Path, nodes: Sequence[_Node], command: Sequence[str], out: TextIO | None) -> dict[str, Any]:
    """Runs the engines' process and shows its progress; its last line is the summary. Raises `DemoFailed`."""
    summary: dict[str, Any] | None = None
    log_path = home / "engines.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True)
    watchdog = _Watchdog(process, REPLAY_S)
    try:
        assert process.stdout is not None, "it was opened as a pipe"
        for line in process.stdout:
            event = json.loads(line)
            if "paths" in event:
                summary = event
            elif out is not None:
                print(progress(event), file=out, flush=True)
        process.wait(STOP_S)
    finally:
        watchdog.cancel()
        _end([process])
    if summary is None:
        for node in nodes:
            node.check()
        raise DemoFailed(f"the engines' process ended with {process.returncode}:\n{_end_of(log_path)}")
    return summary


def _replay_command(nodes: Sequence[_Node], options: DemoOptions, at_once: int = AT_ONCE) -> list[str]:
    prefill, decode, *_ = nodes
    command = [sys.executable, "-m", "kvmover_client.replay"]
    command += ["--prefill", f"unix://{prefill.socket}", "--decode", f"unix://{decode.socket}"]
    command += ["--decode-node", decode.name, "--layers", str(options.layers), "--seed", str(options.seed)]
    command += ["--sessions", str(options.sessions), "--turns", str(options.turns), "--at-once", str(at_once)]
    return command + (["--trace", options.trace] if options.trace else [])


class _Watchdog(threading.Timer):
    """Ends a process that takes too long."""

    def __init__(self, process: subprocess.Popen[str], timeout_s: float) -> None:
        super().__init__(timeout_s, process.kill)
        self.daemon = True
        self.start()
