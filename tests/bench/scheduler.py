"""Decisions per second of the scheduler's pure code, in one process, for clusters of three sizes and each policy.

    python -m tests.bench.scheduler --json

A decision is a request with prefill engine, decode engine, readers and the reasons of all three. Its cost, in processor time,
holds all that comes with it: the submit, its share of every leader's pull with the numbers of 8 engines, and of every node's
report, the finish on both sides, and garbage collection, which comes seldom: what ends leaves no cycles. Making reports (they
check themselves) and the agents are out of the time. Leaders pull and nodes report every 100 ms; agents come again as soon as
they are served, so that the prefill engines are full.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from pathlib import Path

import numpy as np

from kvmoverd.core.scheduling.policies import POLICIES
from tests.bench.scheduler_town import Size, Town

RESULTS = Path(__file__).parent / "results" / "scheduler.jsonl"
SIZES = {
    "2P4D": Size(2, 4, 2_000),
    "48P96D": Size(48, 96, 48_000),
    "480P960D": Size(480, 960, 480_000),
}
WARM_INTERVALS = 20
SECONDS = 5.0
GARBAGE_OBJECTS = 50_000
"""New ones between two looks for garbage; Python's own setting, 700, costs a third of the time, with 50,000 requests alive."""
AIM_PER_S = 20_000
JSON_KEYS = ("engines", "agents", "policy", "decisions_per_s", "p99_us")
"""What programs read; people have more in the table, and `--keep` has all."""
Row = dict[str, object]


def measure(name: str, policy: str, seconds: float) -> Row:
    """Runs until the scheduler alone has taken so many seconds of processor time, after a warm-up."""
    town = Town(SIZES[name], policy)
    gc.set_threshold(GARBAGE_OBJECTS, 50, 50)
    for _ in range(WARM_INTERVALS):
        town.interval()
    gc.freeze()
    town.forget_spent()
    ends_s = time.monotonic() + 6 * seconds
    while town.spent.total_ns < seconds * 1e9 and time.monotonic() < ends_s:
        town.interval()
    spent = town.spent
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    costs = np.repeat([us for us, _ in spent.decision_us], [count for _, count in spent.decision_us])
    per_s = spent.decisions / (spent.total_ns / 1e9)
    return {
        "engines": SIZES[name].engines,
        "agents": SIZES[name].agents,
        "policy": policy,
        "decisions_per_s": round(per_s),
        "p99_us": round(float(np.percentile(costs, 99)), 1),
        "p50_us": round(float(np.percentile(costs, 50)), 1),
        "pull_p99_us": round(float(np.percentile(spent.pull_us, 99)), 1),
        "decisions": spent.decisions,
        "cluster_decisions_per_s": round(spent.decisions / (spent.virtual_ns / 1e9)),
        "snic_max_over_avg": round(float(np.mean(spent.snic_max_over_avg)), 3),
    }


def words(rows: list[Row]) -> str:
    """The table."""
    lines = [
        "policy        engines   agents  decisions/s   p50 us   p99 us  pull p99 us  the cluster's/s  SNIC max/avg",
    ]
    lines += [
        f"{row['policy']:<12} {row['engines']:>8} {row['agents']:>8} {row['decisions_per_s']:>12} {row['p50_us']:>8} "
        f"{row['p99_us']:>8} {row['pull_p99_us']:>12} {row['cluster_decisions_per_s']:>16} {row['snic_max_over_avg']:>13}"
        for row in rows
    ]
    return "\n".join([*lines, f"aim: {AIM_PER_S} decisions/s at 1152 engines"])


def main() -> int:
    """0 when all was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scheduler", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument(
        "--json", action="store_true", help=f"a list of objects of {', '.join(JSON_KEYS)}, instead of the table"
    )
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="only this one; may be repeated")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each row (default %(default)s)")
    parser.add_argument(
        "--keep", action="store_true", help=f"append the rows to {RESULTS.name} beside the other results"
    )
    arguments = parser.parse_args()
    rows = [
        measure(size, policy, arguments.seconds)
        for size in arguments.size or list(SIZES)
        for policy in arguments.policy or sorted(POLICIES)
    ]
    told = [{key: row[key] for key in JSON_KEYS} for row in rows]
    print(json.dumps(told) if arguments.json else words(rows))
    if arguments.keep:
        where = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        with RESULTS.open("a") as results:
            results.write(json.dumps({"bench": "scheduler", "unix_s": int(time.time()), **where, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
