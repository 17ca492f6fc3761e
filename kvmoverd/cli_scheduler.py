"""Command line of the scheduler: run it, say what would run, or play one of its decision logs again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvmoverd.cli_text import print_tree
from kvmoverd.core.errors import ConfigError, SchedulerUnreachable
from kvmoverd.toml_table import Table

SAME, DIFFERS, FAILED = 0, 1, 1
STATUS_S = 5.0
SHOWN_MAX = 20


def add_to(commands: Any) -> None:
    """Adds `scheduler`."""
    scheduler = commands.add_parser("scheduler", help="run the cluster's scheduler until SIGTERM")
    scheduler.add_argument("--config", type=Path, metavar="FILE", help="TOML, e.g. config/scheduler.toml")
    scheduler.add_argument(
        "--until-eof", action="store_true", help="stop also when standard input ends: with whoever holds it"
    )
    instead = scheduler.add_mutually_exclusive_group()
    instead.add_argument("--check", action="store_true", help="only say what would run")
    instead.add_argument(
        "--replay", type=Path, metavar="FILE", help="play a decision log again; exits 1 when it decides otherwise"
    )
    instead.add_argument("--status", metavar="HOST:PORT", help="show the books of the scheduler that runs there")
    scheduler.add_argument("--policy", default="", help="with --replay: under this policy, not the log's own")
    scheduler.add_argument("--json", action="store_true", help="with --check, --status or --replay: as one JSON object")
    scheduler.set_defaults(run=_scheduler)


def _scheduler(arguments: argparse.Namespace) -> int:
    if arguments.policy and arguments.replay is None:
        raise ConfigError("--policy goes with --replay: a scheduler that runs has scheduler.policy of its config")
    if arguments.replay is not None:
        return _replay(arguments.replay, arguments.policy, as_json=arguments.json)
    if arguments.status is not None:
        return _status(arguments.status, as_json=arguments.json)
    if arguments.config is None:
        raise ConfigError("--config FILE is missing: the scheduler has no settings")
    from kvmoverd import config_scheduler, process

    config = config_scheduler.load(arguments.config)
    if arguments.check:
        config.membership.check_files()
        return _check(config.describe(), as_json=arguments.json)
    from kvmoverd.scheduler_daemon import SchedulerDaemon

    return process.run(lambda: SchedulerDaemon(config), "scheduler", config.log, until_eof=arguments.until_eof)


def _check(found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
    else:
        print_tree(found)
        print("ok")
    return 0


def _status(address: str, *, as_json: bool) -> int:
    from kvmoverd.rpc.scheduler_status_client import scheduler_status

    where = Table({"--status": address}, "").address("--status", None, port_min=1)
    try:
        found = scheduler_status(str(where), timeout_s=STATUS_S)
    except SchedulerUnreachable as error:
        print(f"kvmoverd: {error}", file=sys.stderr)
        return FAILED
    if as_json:
        print(json.dumps(found))
    else:
        print_tree(found)
    return 0


def _replay(path: Path, policy: str, *, as_json: bool) -> int:
    """Prints `same`, or what differs."""
    from kvmoverd.core.scheduling.journal import BadJournal

    try:
        words, shown = _compared(path, policy) if policy else _played(path)
    except BadJournal as error:
        raise error if str(path) in str(error) else BadJournal(f"{path}: {error}") from error
    if as_json:
        print(json.dumps(words))
    else:
        _print_replay(words, shown)
    return DIFFERS if words["differs"] else SAME


def _compared(path: Path, policy: str) -> tuple[dict[str, Any], list[str]]:
    """What another policy would have decided. Raises `BadJournal`."""
    from kvmoverd.adapters.journal_reading import lines_of
    from kvmoverd.core.scheduling import journal, policies

    policies.maker(policy)  # refuses what is none before a long log is read
    found = journal.diff(lines_of(path), policy)
    shown = [
        f"{each.was.request_id}: {', '.join(each.words)}: {_choice(each.was)} -> "
        f"{_choice(each.now) if each.now is not None else 'no engine'}"
        for each in found
    ]
    return {"policy": policy, "differs": len(found)}, shown


def _played(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What the same policy decides now. Raises `BadJournal`."""
    from kvmoverd.adapters.journal_reading import lines_of
    from kvmoverd.core.scheduling import journal

    played = journal.replay(lines_of(path))
    pairs = list(zip(played.was, played.now, strict=False))
    differs = sum(was != now for was, now in pairs) + abs(len(played.was) - len(played.now))
    shown = [f"{was.request_id}: {_choice(was)} -> {_choice(now)}" for was, now in pairs if was != now]
    return {"decisions": len(played.was), "differs": differs}, shown


def _choice(choice: Any) -> str:
    return f"{choice.prefill or '-'}/{choice.decode or '-'} by {choice.path or '-'}, attempt {choice.attempt}"


def _print_replay(words: dict[str, Any], shown: list[str]) -> None:
    for line in shown[:SHOWN_MAX]:
        print(line)
    if len(shown) > SHOWN_MAX:
        print(f"... and {len(shown) - SHOWN_MAX} more")
    facts = ", ".join(f"{name} {value}" for name, value in words.items())
    print(f"{'differs' if words['differs'] else 'same'}: {facts}")
