"""A suite of benchmarks as a command: families of rows are asked for, measured, printed, and kept as lines of JSON."""

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
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvmover_client import KvmoverError
from tests.bench import ROOT
from tests.bench.cpu import Neighbours
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import PAIRS_MIN, Side, run_pairs
from tests.bench.rows import HEAD, Cost, Json, NotRun, Row, cost_of, cost_text, ratio_row, row_text, runs_text

COSTS = "cpu_s_per_gb"
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Options:
    """What was asked for. `storage`: a kind, or "" for the daemon's default; `small`: sizes of a trial, not of a benchmark;
    `transport`: between nodes, of suites with several."""

    rows: Collection[str]
    pairs: int
    seed: int
    directory: Path
    storage: str
    small: bool
    profile: bool
    transport: str = "tcp"


@dataclass(frozen=True)
class Found:
    rows: list[Row]
    costs: list[Cost]


@dataclass(frozen=True)
class Aims:
    """Of a row that moves bytes: its ratio, and core-seconds per GB beside the checksums."""

    ratio: float
    cpu: float


Family = Callable[[Options], Awaitable[Found]]
"""Measures those of its rows that were asked for: they share a set-up."""


@dataclass(frozen=True)
class Suite:
    """`families`: each with the rows it can give. `profiled`: rows that the sampler can look into. `has_nodes`: several."""

    name: str
    doc: str
    families: Mapping[Family, tuple[str, ...]]
    profiled: tuple[str, ...]
    disk_gb: int
    has_nodes: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for names in self.families.values() for name in names)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """0 when all that was asked for was measured, whatever the verdicts; 1 when a row could not be."""
        arguments = _parser(self).parse_args(argv)
        options = Options(
            rows=(arguments.profile,) if arguments.profile else arguments.only,
            pairs=1 if arguments.small else arguments.pairs,
            seed=arguments.seed,
            directory=arguments.directory,
            storage=arguments.storage,
            small=arguments.small,
            profile=bool(arguments.profile),
            transport=arguments.transport if self.has_nodes else "tcp",
        )
        # Whatever ends this process ends those that it has started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            found, not_run = asyncio.run(_measure(self, options))
        except KeyboardInterrupt:
            say("interrupted; what was started has ended")
            return 130
        if not options.profile:
            self._answer(arguments, options, found, not_run)
        return 1 if not_run else 0

    def _answer(self, arguments: argparse.Namespace, options: Options, found: Found, not_run: list[NotRun]) -> None:
        answer = as_json(self.names, found, not_run)
        if arguments.results:
            _append(arguments.results, options, answer)
        print(json.dumps(answer) if arguments.json else as_text(found, not_run))


async def _measure(suite: Suite, options: Options) -> tuple[Found, list[NotRun]]:
    """Family after family; one that can't be measured says why and costs only its own rows."""
    found, not_run = Found([], []), []
    for measure, names in suite.families.items():
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


async def compare(
    found: Found,
    options: Options,
    name: str,
    reference: Side,
    ours: Side,
    *,
    aims: Aims,
    pids: Sequence[int],
    crc: float,
    notes: Json,
) -> None:
    """Pairs; or, for a profile, only our side, so that shares of the time are shares of ours."""
    if options.profile:
        for number in range(options.pairs):
            run = await ours(number)
            say(f"{name} {number}: {run.amount:.3f} GB/s, {run.cpu_s_per_gb:.3f} s of CPU per GB, sampled")
        return
    neighbours = Neighbours(*pids)
    pairs = await run_pairs(options.pairs, options.seed, reference, ours)
    notes = {**notes, "others_cores": neighbours.cores()}
    found.rows.append(ratio_row(name, pairs, aim=aims.ratio, seed=options.seed, notes=notes))
    found.costs.append(cost_of(name, pairs, crc=crc, aim=aims.cpu, seed=options.seed))


def as_json(names: Sequence[str], found: Found, not_run: Sequence[NotRun]) -> Json:
    """Every name, measured or not, and the costs."""
    rows = {row.name: row.json() for row in _all(found, not_run)}
    answer: Json = {name: rows.get(name) or NotRun(name, "not asked for").json() for name in names}
    answer[COSTS] = {cost.name: cost.json() for cost in found.costs}
    return answer


def as_text(found: Found, not_run: Sequence[NotRun]) -> str:
    """All runs, then the table."""
    lines = [runs_text(row) for row in found.rows]
    lines += ["", HEAD, *map(row_text, _all(found, not_run))]
    if found.costs:
        lines += ["", "core-seconds per GB of our processes", *map(cost_text, found.costs)]
    return "\n".join(lines)


def scratch(stack: ExitStack, directory: Path | None) -> Path:
    """A directory that goes with the row. Sockets need short paths: theirs is where temporary files are."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmbench-", dir=directory)))


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for the answer."""
    print(line, file=sys.stderr, flush=True)


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
        "transport": options.transport,
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


def _parser(suite: Suite) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{suite.name}", description=suite.doc)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--pairs", type=_count, default=PAIRS_MIN, metavar="N", help="pairs per row; fewer than 15 decide nothing"
    )
    parser.add_argument(
        "--only",
        type=lambda text: _names(suite, text),
        default=suite.names,
        metavar="NAME,...",
        help=f"some of: {', '.join(suite.names)}",
    )
    parser.add_argument(
        "--profile", choices=suite.profiled, metavar="NAME", help="say where one row's time goes instead of measuring"
    )
    if suite.has_nodes:
        parser.add_argument(
            "--transport", choices=("tcp", "shm"), default="tcp", help="from node to node (default: tcp, over loopback)"
        )
    parser.add_argument("--seed", type=int, default=1, help="of the pairs' order and the bootstrap")
    parser.add_argument(
        "--storage", default="", metavar="KIND", help="storage.kind of the daemon; its default if left out"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help=f"for {suite.disk_gb} GB of blocks, on the disk to measure (default: the system's temporary directory)",
    )
    parser.add_argument(
        "--results",
        type=_file,
        default=RESULTS / f"{suite.name}.jsonl",
        metavar="FILE",
        help="gets a line of JSON; '' for none",
    )
    parser.add_argument(
        "--small", action="store_true", help="one run of each, tiny: tries the benchmark, measures nothing"
    )
    return parser


def _names(suite: Suite, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in suite.names]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(unknown)}; there are {', '.join(suite.names)}")
    return names


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= 1000:
        raise argparse.ArgumentTypeError(f"{count} pairs, must be 1 to 1000")
    return count


def _file(text: str) -> Path | None:
    return Path(text) if text else None
