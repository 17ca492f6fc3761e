"""The demo: a prefill and a decode node as processes on this machine, others that help, and two engines that replay a trace.

The daemons are started as an operator would start them, each with a config file, a socket and a pool of its own; they share
one storage directory, as they would a cluster filesystem. The engines run in a third process that sees only the client
library. Every byte that reaches an engine's pages is checked there.

Then all daemons start anew, with empty pools over the same directory, and the first turns come once more: now the hit
blocks lie in storage alone, whose speed is bounded, so that it pays to read from several nodes at once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvmoverd.demo_nodes import Node, NodeSettings, free_ports, node_config, run_engines, running, sigterm_as_sigint
from kvmoverd.demo_table import cold_line, progress, summed, table
from kvmoverd.devices_verbs import ports_up

PREFILL, DECODE, HELPER = "prefill-0", "decode-0", "helper-{}"
SHARE_OF = {PREFILL: "read_bytes", DECODE: "de_buffer_bytes"}
AT_ONCE = 3
"""Sessions that play at the same time: more than the decode node's buffers hold, so that it, too, reads from storage."""
REPLAY_S = 900.0
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

    @property
    def nodes(self) -> NodeSettings:
        return NodeSettings(self.pool, self.read_rate, self.transport, self.local)


def run(options: DemoOptions, out: TextIO, check: Callable[[Path], object]) -> int:
    """Runs the demo; 0 when every byte was right, 1 otherwise. Nothing is left behind, also after SIGINT and SIGTERM.

    `check` raises `KvmoverError` for a config file that `serve` would refuse; nothing has been started then.
    """
    with sigterm_as_sigint(), tempfile.TemporaryDirectory(prefix="kvmoverd-demo-") as scratch:
        home = Path(scratch)
        names = [PREFILL, DECODE, *(HELPER.format(number) for number in range(options.helpers))]
        ports = free_ports(len(names))
        nodes = [
            Node(name, home, port, share=SHARE_OF.get(name, "help_bytes"))
            for name, port in zip(names, ports, strict=True)
        ]
        cnics = _cnics(nodes) if options.transport == "verbs" else {}
        for node in nodes:
            node.config.write_text(node_config(node, nodes, options.nodes, cnics.get(node.name, ())))
            check(node.config)
        (home / "store").mkdir()
        warm = _act(home, nodes, _replay_command(nodes, options), options, out)
        cold = None if warm["errors"] else _cold_act(home, nodes, options, warm, out)
    summary = summed(warm, cold)
    if options.json:
        print(json.dumps({name: summary[name] for name in SUMMARY_NAMES}), file=out)
    else:
        rate_bytes_per_s = options.nodes.rate_bytes_per_s
        words = table(warm, cold, rate_bytes_per_s=rate_bytes_per_s, pool=options.pool, transport=options.transport)
        print(words, file=out)
    return 1 if summary["errors"] else 0


def _act(
    home: Path, nodes: Sequence[Node], command: Sequence[str], options: DemoOptions, out: TextIO
) -> dict[str, Any]:
    """All daemons from start to end, and one replay. Progress goes to `out`, unless it is to be JSON. Raises `DemoFailed`."""

    def tell(event: Mapping[str, Any]) -> None:
        if not options.json:
            print(progress(event), file=out, flush=True)

    with running(nodes):
        summary = run_engines(home, nodes, command, REPLAY_S, tell)
        told = {node.name: node.last_status() for node in nodes}
    summary["storage_read_bytes"] = {
        name: sum(int(root["read_bytes"]) for root in status["storage"]) for name, status in told.items()
    }
    summary["plans"] = told[PREFILL].get("read_plans", {})
    summary["moved"] = told[PREFILL].get("moved_parts", {})
    (root,) = told[PREFILL]["storage"]
    bound = f", {options.read_rate} a second at most for each node" if options.nodes.rate_bytes_per_s else ""
    summary["ways"] = (
        f"storage by {root['kind']}, {root['io_mode']}{bound}; copies within a node: {told[PREFILL]['local_copies']}"
    )
    return summary


def _cold_act(
    home: Path, nodes: Sequence[Node], options: DemoOptions, warm: Mapping[str, Any], out: TextIO
) -> dict[str, Any]:
    """The first turns once more, one after the other, read as the nodes decide. Raises `DemoFailed`."""
    once = dataclasses.replace(options, turns=1)
    command = [*_replay_command(nodes, once, at_once=1), "--paths", "auto"]
    if not warm["dropped_blocks"]:
        # Blocks that storage could not take in time are no error, but then they can't be found either.
        command.append("--stored")
    if not options.json:
        print(cold_line(options.read_rate if options.nodes.rate_bytes_per_s else None), file=out, flush=True)
    return _act(home, nodes, command, options, out)


def _cnics(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """Each node has ports of its own where there are enough, as on machines of their own. Raises `TransportRefused`."""
    names = [port.name for port in ports_up()]
    shares = [tuple(names[number :: len(nodes)]) or tuple(names) for number in range(len(nodes))]
    return {node.name: share for node, share in zip(nodes, shares, strict=True)}


def _replay_command(nodes: Sequence[Node], options: DemoOptions, at_once: int = AT_ONCE) -> list[str]:
    prefill, decode, *_ = nodes
    command = [sys.executable, "-m", "kvmover_client.replay"]
    command += ["--prefill", prefill.endpoint, "--decode", decode.endpoint]
    command += ["--decode-node", decode.name, "--layers", str(options.layers), "--seed", str(options.seed)]
    command += ["--sessions", str(options.sessions), "--turns", str(options.turns), "--at-once", str(at_once)]
    return command + (["--trace", options.trace] if options.trace else [])
