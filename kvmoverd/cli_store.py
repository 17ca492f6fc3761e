"""Command line of stores: `kvmoverd store probe|fsck|ls|tree|gc PATH`. Exit codes: 0 fine, 1 something is wrong, 2 refused."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvmoverd.adapters.storage.inspect.text import field_lines, fsck_sentence, gc_lines, tree_lines
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.core.errors import ConfigError, KvmoverError
from kvmoverd.toml_table import DURATION_UNITS_S, SIZE_UNITS

if TYPE_CHECKING:
    from kvmoverd.adapters.storage.inspect.pool_trial import PoolAsked
    from kvmoverd.config import Config
    from kvmoverd.config_storage import StorageConfig

FINE, WRONG, REFUSED = 0, 1, 2
_PROGRESS_S = 0.2
_LINE_CHARACTERS = 100


def add_to(commands: Any) -> None:
    """Adds `store` and what it can do."""
    store = commands.add_parser("store", help="look at a storage root from outside: probe, fsck, ls, tree, gc")
    tools = store.add_subparsers(required=True, metavar="TOOL")
    probe = _add(tools, "probe", _probe, "what a filesystem can do, and how a daemon would use it")
    probe.add_argument(
        "--config", type=Path, metavar="FILE", help="of a daemon that is to use this root: tries its whole pool"
    )
    fsck = _add(tools, "fsck", _fsck, "read every block and say what is damaged")
    fsck.add_argument(
        "--repair", action="store_true", help="have nobody find damaged blocks any more; else it only reads"
    )
    fsck.add_argument("--threads", type=_positive, default=0, metavar="N", help="that read (default: by this machine)")
    ls = _add(tools, "ls", _ls, "namespaces, and on demand authors and segments")
    ls.add_argument("--authors", action="store_true", help="each start of each node, and who adopted it")
    ls.add_argument("--segments", action="store_true", help="each segment that is alive")
    tree = _add(tools, "tree", _tree, "the trie of blocks: chains, where they branch, what has lost its parent")
    tree.add_argument(
        "--namespace", metavar="FP", default="", help="only namespaces whose fingerprint begins so, in hex"
    )
    tree.add_argument(
        "--depth", type=_positive, default=16, metavar="N", help="show runs down to this depth (default 16)"
    )
    gc = _add(tools, "gc", _gc, "what a daemon would drop now, and why")
    gc.add_argument("--dry-run", action="store_true", help="needed: only daemons delete")
    gc.add_argument("--config", type=Path, metavar="FILE", help="of a daemon: its node, and its budgets for this root")
    gc.add_argument("--node", default="", help="what this node would drop (default: each node what is its own)")
    gc.add_argument("--bytes-max", type=_size, default=0, metavar="SIZE", help="budget of each node, e.g. 1TiB")
    gc.add_argument("--inodes-max", type=_positive, default=0, metavar="N", help="budget of each node")
    gc.add_argument("--high", type=_part, default=0.90, metavar="PART", help="of the budget, above it (default 0.90)")
    gc.add_argument("--low", type=_part, default=0.80, metavar="PART", help="of the budget, down to it (default 0.80)")
    gc.add_argument("--ttl", type=_duration_s, default=0.0, metavar="DURATION", help="how long blocks live, e.g. 24h")


def _add(tools: Any, name: str, run: Callable[[argparse.Namespace], int], what: str) -> Any:
    tool = tools.add_parser(name, help=what)
    tool.add_argument("path", type=Path, metavar="PATH", help="a storage root: the directory that holds kvm1")
    tool.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    tool.set_defaults(run=lambda arguments: _guarded(run, arguments))
    return tool


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Errors of the user are one line."""
    try:
        return run(arguments)
    except KvmoverError as error:
        print(f"kvmoverd: {error}", file=sys.stderr)
    except BrokenPipeError:
        # Whoever read this has seen enough; the interpreter must not try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    except OSError as error:
        print(f"kvmoverd: {arguments.path}: {error.strerror or error}", file=sys.stderr)
    return REFUSED


def _fsck(arguments: argparse.Namespace) -> int:
    from kvmoverd.adapters.storage.inspect.fsck import fsck

    with _Progress(sys.stderr) as progress:
        report = fsck(arguments.path, repair=arguments.repair, threads=arguments.threads, progress=progress.say)
    found = report.plain()
    if arguments.json:
        print(json.dumps(found))
    else:
        _print_lines(report.problems, report.problems_left_out)
        _print_fields({name: value for name, value in found.items() if not name.startswith("problems")})
        print(fsck_sentence(found, repair=arguments.repair))
    return FINE if report.is_fine else WRONG


def _probe(arguments: argparse.Namespace) -> int:
    from kvmoverd.adapters.storage.inspect.probe import probe

    found = probe(arguments.path, asked=_pool_of(arguments))
    if arguments.json:
        print(json.dumps(found))
    else:
        _print_fields(found)
    return FINE if found["usable"] else WRONG


def _ls(arguments: argparse.Namespace) -> int:
    from kvmoverd.adapters.storage.inspect.listing import ls

    with _Progress(sys.stderr) as progress:
        found = ls(arguments.path, authors=arguments.authors, segments=arguments.segments, progress=progress.say)
    if arguments.json:
        print(json.dumps(found))
    else:
        _print_fields(found)
    return FINE


def _tree(arguments: argparse.Namespace) -> int:
    from kvmoverd.adapters.storage.inspect.tree import tree

    with _Progress(sys.stderr) as progress:
        found: dict[str, Any] = tree(
            arguments.path, namespace=arguments.namespace, depth=arguments.depth, progress=progress.say
        )
    if arguments.json:
        print(json.dumps(found))
        return FINE
    for space in found["namespaces"]:
        print("\n".join(tree_lines(space)))
        print()
    return FINE


def _gc(arguments: argparse.Namespace) -> int:
    from kvmoverd.adapters.storage.inspect.planning import plan

    if not arguments.dry_run:
        message = (
            "only a daemon deletes what is in a store, and does so when a budget asks for it: add --dry-run to see what"
        )
        print(f"kvmoverd: {message}", file=sys.stderr)
        return REFUSED
    settings, node = _settings_of(arguments)
    with _Progress(sys.stderr) as progress:
        found: dict[str, Any] = plan(arguments.path, settings, node=arguments.node or node, progress=progress.say)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(gc_lines(found)))
    return FINE


def _settings_of(arguments: argparse.Namespace) -> tuple[SegmentSettings, str]:
    """Budgets and limits, and the node whose they are where a config says so. Raises `KvmoverError`."""
    if arguments.config is None:
        limits = (Limit(ttl_s=arguments.ttl),) if arguments.ttl else ()
        settings = SegmentSettings(
            bytes_max=arguments.bytes_max,
            inodes_max=arguments.inodes_max,
            high=arguments.high,
            low=min(arguments.low, arguments.high),
            limits=limits,
        )
        return settings, ""
    loaded, root = _configured(arguments)
    return root.segments, loaded.node.name


def _pool_of(arguments: argparse.Namespace) -> PoolAsked | None:
    """What a config asks for its pool, None without one. Raises `KvmoverError`."""
    if arguments.config is None:
        return None
    from kvmoverd.adapters.storage.inspect.pool_trial import PoolAsked
    from kvmoverd.devices_storage import needs_shared_pool

    loaded, root = _configured(arguments)
    shared = needs_shared_pool(loaded)
    return PoolAsked(
        loaded.pool.bytes, loaded.pool.piece_bytes, shared, root.kind, root.ops_max, root.segments.segment_bytes
    )


def _configured(arguments: argparse.Namespace) -> tuple[Config, StorageConfig]:
    """The config, and its root at this path. Raises `KvmoverError`."""
    from kvmoverd import config

    loaded = config.load(arguments.config)
    for root in loaded.storage:
        if root.is_on_disk and root.path.resolve() == arguments.path.resolve():
            return loaded, root
    raise ConfigError(f"{arguments.config} has no [[storage]] whose path is {arguments.path}: name a path that it has")


class _Progress:
    """A line that is written again and again, where somebody can see it; it is gone in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._due_s = stream, 0.0
        self._shown = stream.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._due_s:
            self._write("")

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        if self._shown and now_s >= self._due_s:
            self._due_s = now_s + _PROGRESS_S
            self._write(text)

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text[:_LINE_CHARACTERS]}")
        self._stream.flush()


def _print_fields(found: Mapping[str, object]) -> None:
    print("\n".join(field_lines(found)))


def _print_lines(lines: Iterable[str], left_out: int) -> None:
    for line in lines:
        print(line)
    if left_out:
        print(f"and {left_out} more")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _part(text: str) -> float:
    if not re.fullmatch(r"[01](\.\d{1,6})?", text) or not 0.0 < float(text) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of one: above 0 and at most 1, e.g. 0.9")
    return float(text)


def _size(text: str) -> int:
    """Bytes of a number with a unit, as a config has it; a bare number is bytes.

    >>> _size("2GiB"), _size("512")
    (2147483648, 512)
    """
    match = re.fullmatch(rf"(\d{{1,15}}) ?({'|'.join(SIZE_UNITS)})?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a number and one of {', '.join(SIZE_UNITS)}")
    return int(match[1]) * SIZE_UNITS[match[2] or "B"]


def _duration_s(text: str) -> float:
    """Seconds of a number with a unit, as a config has it.

    >>> _duration_s("24h"), _duration_s("1.5m")
    (86400.0, 90.0)
    """
    match = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,6}})?) ?({'|'.join(DURATION_UNITS_S)})", text)
    length_s = float(match[1]) * DURATION_UNITS_S[match[2]] if match else 0.0
    if not length_s:
        units = ", ".join(DURATION_UNITS_S)
        raise argparse.ArgumentTypeError(f"{text!r} is no duration above 0: a number and one of {units}")
    return length_s
