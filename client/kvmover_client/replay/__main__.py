"""python -m kvmover_client.replay: JSON lines on stdout, the last one the summary. Exit code 0 = every byte was right.

With --scheduled the scheduler chooses the nodes of each turn; else there are two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvmover_client import KvmoverError
from kvmover_client.replay import traces_path
from kvmover_client.replay.player import PATHS, NotEnoughMemory, Options, replay
from kvmover_client.replay.report import Json
from kvmover_client.replay.request import ReadPath
from kvmover_client.replay.scheduled import ScheduledOptions, replay_scheduled
from kvmover_client.replay.trace import TraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Replays; what keeps it from starting is one line on stderr."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        summary = _scheduled(given[1:]) if given[:1] == ["--scheduled"] else _of_two(given)
    except (KvmoverError, NotEnoughMemory, TraceError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    _tell(summary)
    return 1 if summary["errors"] else 0


def _of_two(argv: Sequence[str]) -> Json:
    options = _options(argv)
    begun_s = time.monotonic()
    report = asyncio.run(replay(options, _tell))
    return report.summary(time.monotonic() - begun_s)


def _scheduled(argv: Sequence[str]) -> Json:
    parser = argparse.ArgumentParser(
        prog="python -m kvmover_client.replay --scheduled",
        description="Engines on many nodes replay an agent trace; a scheduler says which, and every byte is checked.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=_named, action="append", required=True, metavar="NODE=ENDPOINT", help=f"a {role} node"
        )
    parser.add_argument("--layers", type=_positive, default=8, help="layers of the DeepSeek-V3.2 layout (default 8)")
    parser.add_argument("--agents", type=_positive, default=36, help="who play a session each (default 36)")
    parser.add_argument("--turns", type=_positive, default=4, help="turns of each session at most (default 4)")
    parser.add_argument("--at-once", type=_positive, default=12, help="turns at the same time (default 12)")
    parser.add_argument("--engines", type=_positive, default=1, help="engines of each node (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of token ids and page order (default 0)")
    parser.add_argument("--trace", type=Path, default=traces_path(), metavar="FILE", help="default: the built-in one")
    parser.add_argument(
        "--rate-bytes-per-s", type=int, default=0, help="what each node's storage gives at most (default 0: not known)"
    )
    found = vars(parser.parse_args(argv))
    options = ScheduledOptions(**found | {"prefill": dict(found["prefill"]), "decode": dict(found["decode"])})
    return asyncio.run(replay_scheduled(options, _tell))


def _options(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m kvmover_client.replay",
        description="Two engines replay an agent trace through a prefill and a decode node, every byte checked.",
    )
    parser.add_argument("--prefill", required=True, metavar="ENDPOINT", help="engine API of the prefill node's daemon")
    parser.add_argument("--decode", required=True, metavar="ENDPOINT", help="engine API of the decode node's daemon")
    parser.add_argument(
        "--decode-node", required=True, metavar="NAME", help="the decode node in the prefill node's peers"
    )
    parser.add_argument("--layers", type=_positive, default=61, help="layers of the DeepSeek-V3.2 layout (default 61)")
    parser.add_argument("--sessions", type=_positive, default=2, help="sessions of the trace (default 2)")
    parser.add_argument("--turns", type=_positive, default=4, help="turns of each session (default 4)")
    parser.add_argument("--at-once", type=_positive, default=2, help="sessions that play at the same time (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of token ids and page order (default 0)")
    parser.add_argument("--trace", type=Path, default=traces_path(), metavar="FILE", help="default: the built-in one")
    parser.add_argument(
        "--paths",
        type=_paths,
        default=PATHS,
        metavar="NAME,...",
        help="who reads, turn by turn: pe_read, de_read, auto (default: all three)",
    )
    parser.add_argument(
        "--stored", action="store_true", help="an earlier replay stored the first turns' prompts: all must be found"
    )
    return Options(**vars(parser.parse_args(argv)))


def _paths(text: str) -> tuple[ReadPath, ...]:
    names = {path.value: path for path in ReadPath}
    for name in text.split(","):
        if name not in names:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(names)}")
    return tuple(names[name] for name in text.split(","))


def _named(text: str) -> tuple[str, str]:
    node, equals, endpoint = text.partition("=")
    if not (node and equals and endpoint):
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE=ENDPOINT")
    return node, endpoint


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _tell(event: Json) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main())
