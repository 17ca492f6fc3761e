"""The demo with a scheduler: prefill and decode nodes, one scheduler process, and agents whose every turn it places.

Then everything starts anew over the same storage, and as many other agents play the same turns by a policy to compare with. Their
words are others, so that nothing of theirs is stored before: each policy reads what its own agents have written.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvmoverd.demo_nodes import (
    Node,
    NodeSettings,
    Service,
    free_ports,
    node_config,
    run_engines,
    running,
    sigterm_as_sigint,
)
from kvmoverd.demo_scheduled_table import compared, line_of, table

BASELINE = "round-robin"
TOKEN_LAYER_BYTES = 656
"""KV of a token in one layer of the replay's model, whose name follows."""
MODEL = "DeepSeek-V3.2"
ALPHA_S, BETA_S = 3, 5
GPU_OF_SNIC = 4
"""An engine is said to do so many times the tokens that its node's storage gives it: storage is what limits."""
UNBOUND_BYTES_PER_S = 1 << 30
"""What storage is said to give where it has no bound."""
AT_ONCE = 8
"""Turns: enough for all storage NICs, and fewer than agents, so that what pools hold of one is gone when it comes again."""
PLAY_S = 1200.0
SEEDS_APART = 1 << 20


@dataclass(frozen=True, slots=True)
class ScheduledOptions:
    """What `kvmoverd demo --scheduler` was asked for. `engines`: of each node; `agents` play a session each."""

    layers: int
    agents: int
    turns: int
    seed: int
    trace: str | None
    transport: str
    pool: str
    read_rate: str
    json: bool
    policy: str = "joint"
    prefill_nodes: int = 3
    decode_nodes: int = 3
    engines: int = 1

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.policy, BASELINE)))


def run(
    options: ScheduledOptions,
    out: TextIO,
    check: Callable[[Path], object],
    check_scheduler: Callable[[Path], object],
) -> int:
    """Runs the demo; 0 when every byte was right, 1 otherwise. Nothing is left behind, also after SIGINT and SIGTERM.

    `check` and `check_scheduler` raise `KvmoverError` for a config file that would be refused; nothing runs then.
    """
    with sigterm_as_sigint(), tempfile.TemporaryDirectory(prefix="kvmoverd-demo-") as scratch:
        home = Path(scratch)
        (home / "store").mkdir()
        acts: dict[str, dict[str, Any]] = {}
        for number, policy in enumerate(options.policies):
            services = _written(home, options, policy, check, check_scheduler)
            acts[policy] = _act(home, services, options, policy, options.seed + number * SEEDS_APART, out)
            if acts[policy]["errors"]:
                break
    if options.json:
        print(json.dumps(compared(acts, options.policy, BASELINE)), file=out)
    else:
        print(table(acts, _settings(options, "").rate_bytes_per_s), file=out)
    return 1 if any(act["errors"] for act in acts.values()) else 0


@dataclass(frozen=True, slots=True)
class _Services:
    """The processes of one act, not started yet."""

    scheduler: Service
    prefill: Sequence[Node]
    decode: Sequence[Node]

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode]


def _written(
    home: Path,
    options: ScheduledOptions,
    policy: str,
    check: Callable[[Path], object],
    check_scheduler: Callable[[Path], object],
) -> _Services:
    """Config files of all processes. Raises `KvmoverError` for one that would be refused."""
    scheduler_port, *ports = free_ports(1 + options.prefill_nodes + options.decode_nodes)
    scheduler = Service(f"scheduler-{policy}", home, scheduler_port, "scheduler")
    prefill = [
        Node(f"prefill-{number}", home, port, share="read_bytes")
        for number, port in enumerate(ports[: options.prefill_nodes])
    ]
    decode = [
        Node(f"decode-{number}", home, port, share="de_buffer_bytes")
        for number, port in enumerate(ports[options.prefill_nodes :])
    ]
    services = _Services(scheduler, prefill, decode)
    settings = _settings(options, scheduler.address)
    scheduler.config.write_text(scheduler_config(scheduler, options, policy))
    check_scheduler(scheduler.config)
    for node in services.nodes:
        node.config.write_text(node_config(node, services.nodes, settings))
        check(node.config)
    return services


def _settings(options: ScheduledOptions, scheduler: str) -> NodeSettings:
    """Every node reads for others, too, and may read what its own engines get: so the other shares of its pool are larger."""
    return NodeSettings(
        options.pool,
        options.read_rate,
        options.transport,
        own_share=0.55,
        other_share=0.15,
        scheduler=scheduler,
    )


def scheduler_config(scheduler: Service, options: ScheduledOptions, policy: str) -> str:
    """Raises `ConfigError` for a rate that is no size.

    Leaders pull seldom, and nobody is taken for dead soon: all processes share one machine, which is busy. These engines keep
    no pages of a turn that is over, so that nothing follows from where a session was; what pools have the router says.
    """
    token_bytes = options.layers * TOKEN_LAYER_BYTES
    rate_bytes_per_s = _settings(options, "").rate_bytes_per_s or UNBOUND_BYTES_PER_S
    tokens_per_s = max(1, rate_bytes_per_s // token_bytes)
    return f"""\
[scheduler]
listen = "{scheduler.address}"
policy = "{policy}"
report_interval = "100ms"
pull_interval = "50ms"

[[models]]
name = "{MODEL}"
kv_bytes_per_token = {token_bytes}
alpha_tokens = {ALPHA_S * tokens_per_s}
beta_tokens = {BETA_S * GPU_OF_SNIC * tokens_per_s}

[limits]
group_silent = "30s"
node_silent = "10s"

[joint]
sessions_max = 0
"""


def _act(
    home: Path, services: _Services, options: ScheduledOptions, policy: str, seed: int, out: TextIO
) -> dict[str, Any]:
    """All processes from start to end, and one replay. Raises `DemoFailed`."""

    def tell(event: Mapping[str, Any]) -> None:
        if not options.json:
            print(line_of(policy, event), file=out, flush=True)

    everyone = [services.scheduler, *services.nodes]
    with running(everyone):
        return run_engines(home, everyone, _command(services, options, seed), PLAY_S, tell)


def _command(services: _Services, options: ScheduledOptions, seed: int) -> list[str]:
    command = [sys.executable, "-m", "kvmover_client.replay", "--scheduled"]
    for role, nodes in (("prefill", services.prefill), ("decode", services.decode)):
        for node in nodes:
            command += [f"--{role}", f"{node.name}={node.endpoint}"]
    command += ["--layers", str(options.layers), "--agents", str(options.agents), "--turns", str(options.turns)]
    command += ["--at-once", str(AT_ONCE), "--engines", str(options.engines), "--seed", str(seed)]
    command += ["--rate-bytes-per-s", str(_settings(options, "").rate_bytes_per_s)]
    return command + (["--trace", options.trace] if options.trace else [])
