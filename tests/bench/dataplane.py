"""The data plane's figures, each beside its reference of the same round: docs/benchmarks.md says how to read them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvmover_client import KvmoverError
from tests.bench import ROOT
from tests.bench.daemon import BenchFailed
from tests.bench.families import FAMILIES, Found, Options, say, wakeup
from tests.bench.pairs import PAIRS_MIN
from tests.bench.rows import HEAD, Json, NotRun, Row, cost_text, row_text, runs_text

PROFILED = tuple(name for measure, names in FAMILIES.items() if measure is not wakeup for name in names)
NAMES = tuple(name for names in FAMILIES.values() for name in names)
COSTS = "cpu_s_per_gb"
RESULTS = Path(__file__).with_name("results") / "dataplane.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all that was asked for was measured, whatever the verdicts; 1 when a row could not be."""
    arguments = _parser().parse_args(argv)
    options = Options(
        rows=(arguments.profile,) if arguments.profile else arguments.only,
        pairs=1 if arguments.small else arguments.pairs,
        seed=arguments.seed,
        directory=arguments.directory,
        storage=arguments.storage,
        small=arguments.small,
        profile=bool(arguments.profile),
    )
    # Whatever ends this process ends those that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found, not_run = asyncio.run(_measure(options))
    except KeyboardInterrupt:
        say("interrupted; what was started has ended")
        return 130
    if options.profile:
        return 1 if not_run else 0
    answer = as_json(found, not_run)
    if arguments.results:
        _append(arguments.results, options, answer)
    if arguments.json:
        print(json.dumps(answer))
    else:
        print(as_text(found, not_run))
    return 1 if not_run else 0


async def _measure(options: Options) -> tuple[Found, list[NotRun]]:
    """Family after family; one that can't be measured says why and costs only its own rows."""
    found, not_run = Found([], []), []
    for measure, names in FAMILIES.items():
        asked = [name for name in names if name in options.rows]
        if not asked:
            continue
        say(f"measuring {', '.join(asked)}")
        try:
            more = await measure(options)
        except* (BenchFailed, KvmoverError, OSError) as errors:
            why = "; ".join(sorted(set(_reasons(errors))))
            not_run += [NotRun(name, why) for name in asked]
            say(f"not measured: {why}")
        else:
            found.rows.extend(more.rows)
            found.costs.extend(more.costs)
    return found, not_run


def as_json(found: Found, not_run: Sequence[NotRun]) -> Json:
    """Every name, measured or not, and the costs."""
    rows = {row.name: row.json() for row in _all(found, not_run)}
    answer: Json = {name: rows.get(name) or NotRun(name, "not asked for").json() for name in NAMES}
    answer[COSTS] = {cost.name: cost.json() for cost in found.costs}
    return answer


def as_text(found: Found, not_run: Sequence[NotRun]) -> str:
    """All runs, then the table."""
    lines = [runs_text(row) for row in found.rows]
    lines += ["", HEAD, *map(row_text, _all(found, not_run))]
    if found.costs:
        lines += ["", "core-seconds per GB of our processes", *map(cost_text, found.costs)]
    return "\n".join(lines)


def _all(found: Found, not_run: Sequence[NotRun]) -> list[Row | NotRun]:
    return [*found.rows, *not_run]


def _reasons(errors: BaseExceptionGroup[Exception]) -> Iterator[str]:
    """What the errors say, those of tasks among them."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _reasons(error)
        else:
            yield f"{error}"


def _append(path: Path, options: Options, answer: Json) -> None:
    """One line more in the file of results, with what one must know to compare it with others."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "pairs": options.pairs,
        "seed": options.seed,
        "storage": options.storage or "default",
        "rows": answer,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _commit() -> str:
    """The commit of this checkout, "" where there is none."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dataplane", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--pairs", type=_count, default=PAIRS_MIN, metavar="N", help="pairs per row; fewer than 15 decide nothing"
    )
    parser.add_argument("--only", type=_names, default=NAMES, metavar="NAME,...", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument(
        "--profile", choices=PROFILED, metavar="NAME", help="say where one row's time goes instead of measuring"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the pairs' order and the bootstrap")
    parser.add_argument(
        "--storage", default="", metavar="KIND", help="storage.kind of the daemon; its default if left out"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="for 8 GB of blocks, on the disk to measure (default: the system's temporary directory)",
    )
    parser.add_argument(
        "--results", type=_file, default=RESULTS, metavar="FILE", help="gets a line of JSON; '' for none"
    )
    parser.add_argument(
        "--small", action="store_true", help="one run of each, tiny: tries the benchmark, measures nothing"
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return names


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1000:
        raise argparse.ArgumentTypeError(f"{count} pairs, must be 1 to 1000")
    return count


def _file(text: str) -> Path | None:
    return Path(text) if text else None


if __name__ == "__main__":
    sys.exit(main())
