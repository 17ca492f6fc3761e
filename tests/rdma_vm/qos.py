"""Does the lane protect model traffic? In the VM: a slow link with queues, a model's stand-in, saturating KV cache.

`python -m tests.rdma_vm.qos [--seconds 2.5]` prints a table, and as its last line the same as JSON. Exit code 1: it does not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.core.qos import KV_LANE
from tests.rdma_vm import flows
from tests.rdma_vm.flows import Flow, Moved, Window
from tests.rdma_vm.kv import Layers
from tests.rdma_vm.model import MODEL, Writes

PROFILE = Path(__file__).resolve().parents[2] / "config" / "fabric" / "tcp" / "tc.sh"
DEVICE, RATE = "veth0", "40mbit"
PERIOD_S = 0.04
"""64 KiB each 40 ms: 1.6 MB/s of a link that takes 5."""
KEEPS_AT_LEAST = 0.95
LATENCY_AT_MOST = 0.5
COLUMNS = ("model_mb_per_s", "model_p50_ms", "model_p99_ms", "kv_mb_per_s")
WIDTH = 48
ALONE, LANE, FIFO = "model alone", "lane on (prio)", "lane off: no queues (fifo)"
TRIES = 2
"""A window in which the emulator stood still says nothing about lanes."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is run at once on which queue. `kv`: name of its flow, or none; `period_s`: the model's, None: no model."""

    name: str
    queue: str
    kv: str | None
    period_s: float | None


def cases() -> list[Case]:
    """Those that are asserted first."""
    found = [Case(f"{ALONE}, greedy", "prio", None, 0.0), Case(f"{ALONE}, paced", "prio", None, PERIOD_S)]
    for label, queue, kv in (
        (LANE, "prio", "kv"),
        (FIFO, "fifo", "kv"),
        ("lane off: KV marked as the model (prio)", "prio", "unmarked"),
        ("ets", "ets", "kv"),
        ("htb", "htb", "kv"),
    ):
        found += [Case(f"{label}, greedy", queue, kv, 0.0), Case(f"{label}, paced", queue, kv, PERIOD_S)]
    return [*found, Case("KV alone (prio)", "prio", "kv", None)]


def set_queue(kind: str) -> None:
    """The profile of `config/fabric`, its shaper with one queue for all ("fifo"), or none."""
    shaper = ["tc", "qdisc", "add", "dev", DEVICE, "root", "handle", "1:", "tbf", "rate", RATE, "burst", "20000"]
    subprocess.run([PROFILE, DEVICE, "undo"], check=True, capture_output=True, timeout=60)
    if kind == "fifo":
        subprocess.run([*shaper, "limit", "4000000"], check=True, timeout=60)
    elif kind != "none":
        subprocess.run([PROFILE, DEVICE, RATE, kind], check=True, capture_output=True, timeout=60)


def measure(case: Case, made: dict[str, Flow], seconds: float) -> dict[str, Moved]:
    """What model and KV moved in the same window."""
    begin_s = time.monotonic() + flows.SETTLE_S + 0.1
    running = {}
    if case.period_s is not None:
        running["model"] = made["model"]
        running["model"].begin(Window(begin_s, begin_s + seconds, case.period_s))
    if case.kv:
        running["kv"] = made[case.kv]
        running["kv"].begin(Window(begin_s, begin_s + seconds))
    return {name: flow.end() for name, flow in running.items()}


Rows = dict[str, dict[str, float]]


def row(found: dict[str, Moved]) -> dict[str, float]:
    figures = {}
    for name, moved in found.items():
        figures[f"{name}_mb_per_s"] = round(moved.mb_per_s, 3)
    if "model" in found and found["model"].latencies_s:
        figures["model_p50_ms"] = round(found["model"].latency_ms(0.5), 1)
        figures["model_p99_ms"] = round(found["model"].latency_ms(0.99), 1)
    return figures


def verdict(rows: Rows) -> dict[str, float]:
    """The two figures that are asserted."""
    kept = rows[f"{LANE}, greedy"]["model_mb_per_s"] / rows[f"{ALONE}, greedy"]["model_mb_per_s"]
    lane, fifo = (rows[f"{name}, paced"].get("model_p50_ms", math.inf) for name in (LANE, FIFO))
    return {"model_keeps": round(kept, 3), "latency_over_fifo": round(lane / fifo, 3)}


def good(found: dict[str, float]) -> bool:
    return found["model_keeps"] >= KEEPS_AT_LEAST and found["latency_over_fifo"] <= LATENCY_AT_MOST


def show(name: str, figures: dict[str, float]) -> None:
    cells = [f"{figures[key]:8.2f}" if key in figures else " " * 8 for key in COLUMNS]
    print(f"{name:{WIDTH}} {' '.join(cells)}", flush=True)


def measured(seconds: float, names: Sequence[str], made: dict[str, Flow]) -> Rows:
    rows = {}
    for case in cases():
        if case.name.startswith(tuple(names)):
            set_queue(case.queue)
            rows[case.name] = row(measure(case, made, seconds))
            show(case.name, rows[case.name])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.5, help="length of each window (2.5)")
    seconds = parser.parse_args().seconds
    print(f"{RATE} on {DEVICE}, windows of {seconds:g} s; MB/s, and ms from post to completion of the model's 64 KiB")
    print(f"{'':{WIDTH}} {'model':>8} {'p50 ms':>8} {'p99 ms':>8} {'KV':>8}")
    wanted = {"model": (Writes,), "kv": (Layers, KV_LANE), "unmarked": (Layers, MODEL)}
    with flows.flows(**wanted) as made:
        rows = measured(seconds, [""], made)
        for _ in range(1, TRIES):
            if not good(verdict(rows)):
                print("not so; once more")
                rows |= measured(seconds, [ALONE, LANE, FIFO], made)
    set_queue("none")
    found = verdict(rows)
    print(json.dumps({"rate": RATE, "seconds": seconds, "rows": rows, **found, "ok": good(found)}))
    return 0 if good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
