"""The matrix as a command: cells one after another on a stage that is kept as long as it is sound, then the report."""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fault_cells import Cell, all_cells
from fault_pure import WALKS_PER_CELL, PureCell, pure_cells, run_pure
from fault_run import Verdict, run_cell, summed
from fault_scene import Stage, begin_stage, stage_home

CELLS_PER_STAGE = 120
"""So that neither the store nor what the daemons remember grows without end."""


def chosen(only: str, sample: int, seed: int, *, all_paths: bool) -> list[Cell]:
    """Cells whose name contains `only`, or matches it as a pattern; so many of them by chance, 0 for all."""
    cells = [
        cell
        for cell in all_cells(all_paths=all_paths)
        if only.lower() in cell.name.lower() or fnmatch.fnmatch(cell.name, only)
    ]
    return random.Random(seed).sample(cells, min(sample, len(cells))) if sample else cells


async def run_cells(cells: Sequence[Cell], *, transport: str = "tcp", say: bool = False) -> list[Verdict]:
    """All cells, on as many stages as needed: one that an incident has spoilt is left for a new one."""
    left, verdicts = deque(cells), []
    while left:
        with stage_home() as home:
            verdicts += await _run_some(home, left, transport, say=say)
    return verdicts


async def _run_some(home: Path, left: deque[Cell], transport: str, *, say: bool) -> list[Verdict]:
    """As many cells as one stage can bear."""
    made, verdicts = await begin_stage(home, transport), []
    try:
        while left and len(verdicts) < CELLS_PER_STAGE and all(verdict.is_sound for verdict in verdicts[-1:]):
            verdicts.append(await _run_reached(made, left.popleft()))
            if say:
                print(line(verdicts[-1]), file=sys.stderr, flush=True)
    finally:
        problems = await made.end(is_sound=bool(verdicts) and verdicts[-1].is_sound)
    for problem in problems:
        verdicts[-1].failures.append(f"at the end of the stage: {problem}")
    return verdicts


async def _run_reached(made: Stage, cell: Cell) -> Verdict:
    """A state that a request has passed through before it could be held there is tried once more."""
    verdict = await run_cell(made, cell)
    return await run_cell(made, cell) if verdict.may_be_reached and verdict.is_sound else verdict


def line(verdict: Verdict) -> str:
    ends = " ".join(f"{call}={end}" for call, end in verdict.ends.items())
    problems = "".join(f"\n    {text}" for text in verdict.problems())
    mark = "ok  " if verdict.is_clean else "    " if verdict.reason.startswith("unreachable") else "FAIL"
    return f"{mark} {verdict.took_s:5.2f} s  {verdict.cell.name}  {ends}{problems}"


def chosen_pure(only: str) -> list[PureCell]:
    return [cell for cell in pure_cells() if only.lower() in cell.name.lower() or fnmatch.fnmatch(cell.name, only)]


def report(verdicts: Sequence[Verdict], pure: int = 0, pure_failed: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """The numbers first, then what was found, by cell; `pure`: how many cells of machines alone were walked."""
    unreachable = [verdict for verdict in verdicts if verdict.reason.startswith("unreachable")]
    failed = [verdict for verdict in verdicts if not verdict.is_clean and verdict not in unreachable]
    numbers = summed(list(verdicts))
    numbers["cells"] += pure
    return dict(numbers) | {
        "cells_by_kind": {"real": len(verdicts), "pure": pure},
        "failures": [
            *({"cell": verdict.cell.name, "problems": verdict.problems()} for verdict in failed),
            *({"cell": name, "problems": [text]} for name, text in pure_failed),
        ],
        "unreachable": [{"cell": verdict.cell.name, "reason": verdict.reason} for verdict in unreachable],
    }


def main() -> int:
    """0 when every cell that can be reached was, and nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--only", default="", help="cells whose name contains this, or matches it as a pattern")
    parser.add_argument("--sample", type=int, default=0, help="so many cells by chance; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--all-paths", action="store_true", help="every state on every path")
    parser.add_argument("--transport", choices=("tcp", "shm"), default="tcp", help="between the nodes")
    parser.add_argument("--kind", choices=("real", "pure", "all"), default="all", help="real processes, machines alone")
    parser.add_argument("--walks", type=int, default=WALKS_PER_CELL, help="seeded walks of each pure cell")
    parser.add_argument("--list", action="store_true", help="print the cells' names only")
    asked = parser.parse_args()
    cells = chosen(asked.only, asked.sample, asked.seed, all_paths=asked.all_paths) if asked.kind != "pure" else []
    pure = chosen_pure(asked.only) if asked.kind != "real" and not asked.sample else []
    if asked.list:
        print("\n".join(cell.name for cell in [*cells, *pure]))
        return 0
    pure_failed = run_pure(pure, asked.seed, asked.walks)
    verdicts = asyncio.run(run_cells(cells, transport=asked.transport, say=True))
    found = report(verdicts, len(pure), pure_failed)
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        print(", ".join(f"{name}: {count}" for name, count in found.items() if isinstance(count, int)))
        for failure in found["failures"]:
            print(f"{failure['cell']}\n    " + "\n    ".join(failure["problems"]))
    return 1 if found["failures"] else 0
