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
DEVICE = "veth0"
RATES_MBIT = (40, 20)
"""The second when the first found nothing: on a busy machine the emulated processor is slower than the link."""
BURST_BYTES = 20_000
LOAD = 0.33
"""Part of the link that a paced model asks for."""
KEEPS_AT_LEAST = 0.95
LATENCY_AT_MOST = 0.5
"""The aims: what the model has alone that it keeps with the lane on, and its median latency over fifo's."""
COLUMNS = ("model_mb_per_s", "model_p50_ms", "model_p99_ms", "kv_mb_per_s")
WIDTH = 48
ASSERTED = ALONE, LANE, FIFO = "model alone", "lane on (prio)", "lane off: no queues (fifo)"
PIECE_BYTES = 64 << 10
BEGAN_S = time.monotonic()
SATURATED = 0.8
"""Part of the link that the model alone must fill, else what it keeps of it says nothing."""
REPORT_S = 100.0
"""Since the start: later on, cases that are only reported are left out."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is run at once on which queue. `kv`: name of its flow, or none; `greedy`: else the model is paced; None: no model."""

    name: str
    queue: str
    kv: str | None
    greedy: bool | None


def cases() -> list[Case]:
    found = [Case(f"{ALONE}, greedy", "prio", None, True), Case(f"{ALONE}, paced", "prio", None, False)]
    for label, queue, kv in (
        (LANE, "prio", "kv"),
        (FIFO, "fifo", "kv"),
        ("lane off: KV marked as the model (prio)", "prio", "unmarked"),
        ("ets", "ets", "kv"),
        ("htb", "htb", "kv"),
    ):
        found += [Case(f"{label}, greedy", queue, kv, True), Case(f"{label}, paced", queue, kv, False)]
    return [*found, Case("KV alone (prio)", "prio", "kv", None)]


def set_queue(kind: str, rate_mbit: int = RATES_MBIT[0]) -> None:
    """The profile of `config/fabric`, its shaper with one queue for all ("fifo"), or none."""
    rate = f"{rate_mbit}mbit"
    shaper = ["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", str(BURST_BYTES)]
    subprocess.run([PROFILE, DEVICE, "undo"], check=True, capture_output=True, timeout=60)
    if kind == "fifo":
        subprocess.run([*shaper, "limit", "4000000"], check=True, timeout=60)
    elif kind != "none":
        subprocess.run([PROFILE, DEVICE, rate, kind], check=True, capture_output=True, timeout=60)


def measure(case: Case, made: dict[str, Flow], seconds: float, rate_mbit: int) -> dict[str, Moved]:
    """What model and KV moved in the same window."""
    begin_s = time.monotonic() + flows.SETTLE_S + 0.1
    paced_s = 0.0 if case.greedy else PIECE_BYTES * 8e-6 / (LOAD * rate_mbit)
    running = {}
    if case.greedy is not None:
        running["model"] = made["model"]
        running["model"].begin(Window(begin_s, begin_s + seconds, paced_s))
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


def verdict(rows: Rows, rate_mbit: int) -> dict[str, float]:
    """What the aims are of, and the part of the link that the model alone filled."""
    alone = rows[f"{ALONE}, greedy"]["model_mb_per_s"]
    lane, fifo = (rows[f"{name}, paced"].get("model_p50_ms", math.inf) for name in (LANE, FIFO))
    return {
        "model_filled": round(alone / (rate_mbit / 8), 3),
        "model_keeps": round(rows[f"{LANE}, greedy"]["model_mb_per_s"] / alone, 3) if alone else 0.0,
        "latency_over_fifo": round(lane / fifo, 3) if lane < math.inf else math.inf,
    }


def good(found: dict[str, float]) -> bool:
    kept = found["model_filled"] >= SATURATED and found["model_keeps"] >= KEEPS_AT_LEAST
    return kept and found["latency_over_fifo"] <= LATENCY_AT_MOST


def show(name: str, figures: dict[str, float]) -> None:
    cells = [f"{figures[key]:8.2f}" if key in figures else " " * 8 for key in COLUMNS]
    print(f"{name:{WIDTH}} {' '.join(cells)}", flush=True)


def measured(cases_: Sequence[Case], made: dict[str, Flow], seconds: float, rate_mbit: int) -> Rows:
    print(f"{rate_mbit} Mbit/s on {DEVICE}, windows of {seconds:g} s; MB/s, and ms that 64 KiB of the model take")
    print(f"{'':{WIDTH}} {'model':>8} {'p50 ms':>8} {'p99 ms':>8} {'KV':>8}")
    rows = {}
    for case in cases_:
        if not case.name.startswith(ASSERTED) and time.monotonic() > BEGAN_S + REPORT_S:
            print(f"{case.name:{WIDTH}} left out: {REPORT_S:g} s are over")
            continue
        set_queue(case.queue, rate_mbit)
        rows[case.name] = row(measure(case, made, seconds, rate_mbit))
        show(case.name, rows[case.name])
    return rows


def main() -> int:
    """0 when all was measured, whatever it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.5, help="length of each window (2.5)")
    seconds = parser.parse_args().seconds
    asserted = [case for case in cases() if case.name.startswith(ASSERTED)]
    reported = [case for case in cases() if case not in asserted]
    wanted = {"model": (Writes,), "kv": (Layers, KV_LANE), "unmarked": (Layers, MODEL)}
    with flows.flows(**wanted) as made:
        for rate_mbit in RATES_MBIT:
            rows = measured(asserted, made, seconds, rate_mbit)
            found = verdict(rows, rate_mbit)
            if good(found):
                break
            print(f"not so: {found}")
        rows |= measured(reported, made, seconds, rate_mbit)
    set_queue("none")
    print(json.dumps({"rate_mbit": rate_mbit, "seconds": seconds, "rows": rows, **found, "aims_met": good(found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
