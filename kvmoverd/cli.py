"""Command line: serve, check, demo, status, doctor, store, scheduler, version. Exit codes: 0 done, 1 failed, 2 refused."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmoverd import __version__, cli_demo, cli_scheduler, cli_store, config
from kvmoverd.cli_text import print_tree
from kvmoverd.core.errors import KvmoverError
from kvmoverd.toml_table import size_text

FAILED, REFUSED = 1, 2
WATCH_S_MAX = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; errors of the user are one line on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read this has seen enough; the interpreter must not try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KvmoverError as error:
        remedy = f"\n  {error.remedy}" if error.remedy else ""
        print(f"kvmoverd: {error}{remedy}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvmoverd", description="Moves KV cache between storage, nodes and engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_check(commands)
    cli_demo.add_to(commands)
    _add_status(commands)
    _add_doctor(commands)
    cli_store.add_to(commands)
    cli_scheduler.add_to(commands)
    version = commands.add_parser("version", help="print the version")
    version.add_argument("--json", action="store_true", help="as one JSON object")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser("serve", help="run this node's daemon until SIGTERM")
    serve.add_argument("--config", type=Path, required=True, metavar="FILE", help="TOML, e.g. config/laptop.toml")
    serve.add_argument(
        "--until-eof", action="store_true", help="stop also when standard input ends: with whoever holds it"
    )
    serve.set_defaults(run=_serve)


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="say what `serve` would build from a config, and what is wrong with it; exits 1 when it would refuse here",
    )
    check.add_argument("--config", type=Path, required=True, metavar="FILE")
    check.add_argument("--json", action="store_true", help="as one JSON object")
    check.set_defaults(run=_check)


def _add_status(commands: Any) -> None:
    status = commands.add_parser("status", help="what a running daemon says of itself")
    status.add_argument(
        "--socket", default=config.DEFAULT_SOCKET, help=f"engine socket (default {config.DEFAULT_SOCKET})"
    )
    status.add_argument("--json", action="store_true", help="as one JSON object")
    status.set_defaults(run=_status)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="say what of this node works, what does not, and what to do; exits 1 when something fails"
    )
    doctor.add_argument("--config", type=Path, metavar="FILE", help="of the daemon that is to run here")
    doctor.add_argument("--json", action="store_true", help="a list of check, status, found, remedy")
    doctor.add_argument(
        "--watch",
        type=_watch_s,
        default=0.0,
        metavar="SECONDS",
        help="say how counters grow in this time, up to an hour",
    )
    doctor.add_argument("--quiet", action="store_true", help="only what fails or warns")
    doctor.set_defaults(run=_doctor)


def _watch_s(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= WATCH_S_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 0 and {WATCH_S_MAX:g}")
    return number


def _serve(arguments: argparse.Namespace) -> int:
    from kvmoverd import serve

    return serve.run(config.load(arguments.config), until_eof=arguments.until_eof)


def _check(arguments: argparse.Namespace) -> int:
    from kvmoverd import devices, devices_storage, devices_transport

    loaded = config.load(arguments.config)
    found: dict[str, Any] = loaded.describe()
    if loaded.transport.kind != "verbs":
        del found["transport"]["verbs"]  # not read; all it would show are defaults
    found["transport"].update(devices_transport.transport_here(loaded))
    missing = devices.missing_here(loaded)
    for section, what in missing.items():
        found[section]["not here"] = what
    refused, absent = list(missing), list[str]()
    here = devices_storage.all_on_this_machine(loaded.storage)
    for root, told, more in zip(loaded.storage, found["storage"], here, strict=True):
        told.update(more)
        if "not here" in told:
            (refused if root.is_main else absent).append(f"storage {root.name}")
    if arguments.json:
        print(json.dumps(found))
    else:
        print_tree(found)
        print(_verdict(refused, absent))
    return FAILED if refused else 0


def _verdict(refused: list[str], absent: list[str]) -> str:
    if refused:
        return "not ok, serve would refuse on this machine as it is: " + ", ".join(refused)
    return "ok, but left out until it comes: " + ", ".join(absent) if absent else "ok"


def _doctor(arguments: argparse.Namespace) -> int:
    from kvmoverd import cli_doctor

    return cli_doctor.run(arguments.config, as_json=arguments.json, watch_s=arguments.watch, quiet=arguments.quiet)


def _status(arguments: argparse.Namespace) -> int:
    from kvmoverd.rpc.status_client import node_status

    found = node_status(arguments.socket, timeout_s=5.0)
    if found is None:
        kept_out = Path(arguments.socket).exists() and not os.access(arguments.socket, os.W_OK)
        why = "you may not write to it, see engine_api.mode" if kept_out else "is the daemon running?"
        print(f"kvmoverd: nobody answers at {arguments.socket}; {why}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found))
    else:
        print_tree(found)
        for line in (*_waiting(found), *_starving(found), *_unscheduled(found), *_unseen(found)):
            print(line)
    return 0


def _waiting(status: dict[str, Any]) -> list[str]:
    """Which shares of the pool are too small for what is asked of them now."""
    return [
        f"warning: {room['waiting']} requests wait for {size_text(room['waiting_bytes'])} of pool.{room['purpose']}_bytes, "
        f"the first for {room['oldest_wait_ms'] / 1000:.1f} s; {size_text(room['taken_bytes'])} of "
        f"{size_text(room['limit_bytes'])} are taken"
        for room in status["rooms"]
        if room["waiting"]
    ]


def _unscheduled(status: dict[str, Any]) -> list[str]:
    """Whether the scheduler that this node belongs to answers."""
    scheduler = status.get("scheduler")
    if scheduler is None or scheduler["state"] == "reports":
        return []
    return [f"warning: no scheduler answers: {scheduler['why']}; see [scheduler] in the daemon's config"]


def _unseen(status: dict[str, Any]) -> list[str]:
    """Whether nodes that come and go are seen, and this one by the others."""
    state = status.get("membership")
    if state is None:
        return []
    found = []
    if state["silent_ms"]:
        found.append(f"warning: other nodes are known as they were {state['silent_ms'] / 1000:.1f} s ago")
    if not state["told"]:
        found.append("warning: other nodes can't find this one")
    return [f"{line}: {state['why']}; see [membership] in the daemon's config" for line in found]


def _starving(status: dict[str, Any]) -> list[str]:
    """The last words: which KV lanes get less than the config says they must."""
    found = [
        f"warning: KV lane {marks} has been below transport.lane_floor for {starved_ms / 1000:.1f} s, to all nodes together"
        for marks, starved_ms in {lane["marks"]: lane["starved_ms"] for lane in status["lanes"]}.items()
        if starved_ms
    ]
    for way, field in (("to", "lane_starved"), ("from", "lane_starved_from")):
        nodes = [peer["node"] for peer in status["peers"] if peer[field]]
        found += [f"warning: KV is below transport.lane_floor {way} {', '.join(nodes)}"] if nodes else []
    return found


def _version(arguments: argparse.Namespace) -> int:
    print(json.dumps({"version": __version__}) if arguments.json else f"kvmoverd {__version__}")
    return 0
