"""Command line of the demo, with a scheduler or without."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kvmoverd.core.errors import ConfigError

FAILED = 1
DEFAULTS: dict[str, Any] = {"layers": 61, "sessions": 3, "turns": 7, "read_rate": "128MiB", "pool": "960MiB"}
SCHEDULED: dict[str, Any] = {"layers": 4, "sessions": 36, "turns": 4, "read_rate": "12MiB", "pool": "192MiB"}


def add_to(commands: Any) -> None:
    """Adds `demo`."""
    demo = commands.add_parser(
        "demo", help="replay a real agent trace over a prefill and a decode node on this machine, every byte checked"
    )
    demo.add_argument(
        "--scheduler", action="store_true", help="a scheduler chooses among three prefill and three decode nodes"
    )
    demo.add_argument(
        "--policy",
        choices=("joint", "paper", "round-robin", "prefill-only"),
        default="joint",
        help="with --scheduler: by which it chooses; then all plays again by round-robin (default joint)",
    )
    demo.add_argument(
        "--engines", type=_positive, default=1, metavar="N", help="with --scheduler: engines of each node (default 1)"
    )
    demo.add_argument("--layers", type=_positive, help=_default("layers of the DeepSeek-V3.2 layout", "layers"))
    demo.add_argument("--sessions", type=_positive, help=_default("sessions of the trace to replay", "sessions"))
    demo.add_argument("--turns", type=_positive, help=_default("turns of each session at most", "turns"))
    demo.add_argument("--seed", type=int, default=0, help="seed of token ids and KV (default 0)")
    demo.add_argument("--trace", metavar="FILE", help="a trace of your own (default: the built-in cut of a real one)")
    demo.add_argument("--transport", choices=("tcp", "shm", "verbs"), default="tcp", help="node to node (default tcp)")
    demo.add_argument(
        "--local",
        choices=("shm", "verbs"),
        default="shm",
        help="within a node; verbs: by its RDMA NIC, with --transport verbs only (default shm)",
    )
    demo.add_argument(
        "--helpers", type=_helpers, default=0, metavar="N", help="further nodes that read for both, 0 to 8 (default 0)"
    )
    demo.add_argument(
        "--read-rate",
        metavar="SIZE",
        help=_default("what storage gives each node in a second at most; 0B: as fast as it can", "read_rate"),
    )
    demo.add_argument("--pool", help=_default("DRAM pool of each node, e.g. 4GiB", "pool"))
    demo.add_argument("--json", action="store_true", help="one JSON object at the end instead of the table")
    demo.set_defaults(run=_demo)


def _default(what: str, name: str) -> str:
    return f"{what} (default {DEFAULTS[name]}, with --scheduler {SCHEDULED[name]})"


def _demo(arguments: argparse.Namespace) -> int:
    from kvmoverd.demo_nodes import DemoFailed

    try:
        return _scheduled(arguments) if arguments.scheduler else _of_two(arguments)
    except DemoFailed as error:
        print(f"kvmoverd: {error}", file=sys.stderr)
        return FAILED


def _of_two(arguments: argparse.Namespace) -> int:
    from kvmoverd import demo

    asked = {name: getattr(arguments, name) for name in ("seed", "trace", "transport", "local", "json", "helpers")}
    return demo.run(demo.DemoOptions(**_sizes(arguments, DEFAULTS), **asked), sys.stdout, _check_node)


def _scheduled(arguments: argparse.Namespace) -> int:
    from kvmoverd import config_scheduler, demo_scheduled

    if arguments.helpers or arguments.transport == "verbs":
        raise ConfigError("--scheduler is for --transport tcp or shm, without --helpers: any of its nodes may help")
    asked = {name: getattr(arguments, name) for name in ("seed", "trace", "transport", "json", "policy", "engines")}
    sizes = _sizes(arguments, SCHEDULED)
    options = demo_scheduled.ScheduledOptions(agents=sizes.pop("sessions"), **sizes, **asked)
    return demo_scheduled.run(options, sys.stdout, _check_node, config_scheduler.load)


def _sizes(arguments: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _check_node(path: Any) -> None:
    """Raises `KvmoverError` for a config that `serve` would refuse."""
    from kvmoverd import config, devices_transport

    devices_transport.check_buildable(config.load(path))


def _helpers(text: str) -> int:
    if len(text) != 1 or text not in "012345678":
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 8")
    return int(text)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number
