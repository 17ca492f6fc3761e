"""Command line of the demo, with a scheduler or without."""

from __future__ import annotations

import argparse
import sys
from typing import Any

FAILED = 1
DEFAULTS: dict[str, Any] = {"layers": 61, "sessions": 3, "turns": 7, "read_rate": "128MiB", "pool": "960MiB"}


def add_to(commands: Any) -> None:
    """Adds `demo`."""
    demo = commands.add_parser(
        "demo", help="replay a real agent trace over a prefill and a decode node on this machine, every byte checked"
    )
    demo.add_argument("--layers", type=_positive, help="layers of the DeepSeek-V3.2 layout (default 61)")
    demo.add_argument("--sessions", type=_positive, help="sessions of the trace to replay (default 3)")
    demo.add_argument("--turns", type=_positive, help="turns of each session at most (default 7)")
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
        help="what storage gives each node in a second at most; 0B: as fast as it can (default 128MiB)",
    )
    demo.add_argument("--pool", help="DRAM pool of each node, e.g. 4GiB (default 960MiB)")
    demo.add_argument("--json", action="store_true", help="one JSON object at the end instead of the table")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from kvmoverd import demo
    from kvmoverd.demo_nodes import DemoFailed

    given: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name in DEFAULTS and value is not None
    }
    asked = {name: getattr(arguments, name) for name in ("seed", "trace", "transport", "local", "json", "helpers")}
    try:
        return demo.run(demo.DemoOptions(**DEFAULTS | given | asked), sys.stdout, _check_node)
    except DemoFailed as error:
        print(f"kvmoverd: {error}", file=sys.stderr)
        return FAILED


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
