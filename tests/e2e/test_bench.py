"""The benchmarks still run: every row once, tiny, as a person would start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import dataplane, paths, store
from tests.bench.suite import COSTS

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 240.0
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(RUN_S + 10)]


NO_AIM = {"layer_wakeup_us_p99", "index_entries_per_s", "index_entries_per_s_warm"} | {
    name for name in paths.NAMES if "throughput" in name or name.startswith("snic_max_over_avg_")
}
COSTS_OF = {
    "dataplane": {"fetch_over_disk", "whole_way_over_disk", "shm_over_memcpy", "tcp_over_stream"},
    "store": {name for name in store.NAMES if "_over_disk" in name},
    "paths": set(),
}


def run(suite: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tests.bench.{suite}", "--small", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)


@pytest.mark.parametrize(
    ("suite", "names"), [("dataplane", dataplane.NAMES), ("store", store.NAMES), ("paths", paths.NAMES)]
)
def test_every_row_gives_a_figure_and_the_results_keep_it(suite: str, names: tuple[str, ...], tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = run(suite, "--json", "--directory", str(tmp_path), "--results", str(results))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {*names, COSTS}
    verdicts = {name: answer[name]["verdict"] for name in names}
    assert verdicts == {name: "no aim" if name in NO_AIM else "too few runs" for name in names}
    assert all(len(answer[name]["runs"]) == 1 for name in names)
    assert all(answer[name]["low"] <= answer[name]["value"] <= answer[name]["high"] for name in names)
    assert set(answer[COSTS]) == COSTS_OF[suite]
    (line,) = results.read_text().splitlines()
    assert json.loads(line)["rows"] == answer
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_the_names_that_others_read_are_there() -> None:
    assert {
        "cold_get_over_disk",
        "durable_put_over_disk",
        "lookup_500_us",
        "ram_bytes_per_key",
        "index_entries_per_s",
        "restart_to_first_hit_s",
    } < set(store.NAMES)


@pytest.mark.parametrize("kind", ["threads", "uring"])
def test_another_engine_may_be_measured(kind: str, tmp_path: Path) -> None:
    rows = "cold_get_over_disk,durable_put_over_disk"
    done = run("store", "--only", rows, "--storage", kind, "--directory", str(tmp_path), "--results", "")
    assert done.returncode == 0, done.stderr


def test_a_profile_names_the_threads_that_had_the_time(tmp_path: Path) -> None:
    done = run("dataplane", "--profile", "fetch_over_disk", "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "MainThread" in done.stderr and "waited for a core" in done.stderr


def test_a_row_that_does_not_exist_is_refused() -> None:
    done = run("dataplane", "--only", "warp_speed")
    assert done.returncode == 2 and "no such row: warp_speed" in done.stderr
