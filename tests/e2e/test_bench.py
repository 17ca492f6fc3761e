"""The benchmark still runs: every row once, tiny, as a person would start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.dataplane import NAMES

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 50.0
pytestmark = pytest.mark.e2e


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.bench.dataplane", "--small", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)


def test_every_row_gives_a_figure_and_the_results_keep_it(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = run("--json", "--directory", str(tmp_path), "--results", str(results))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {*NAMES, "cpu_s_per_gb"}
    verdicts = {name: row["verdict"] for name, row in answer.items() if name in NAMES}
    assert verdicts == dict.fromkeys(NAMES, "too few runs") | {"layer_wakeup_us_p99": "no aim"}
    assert all(len(answer[name]["runs"]) == 1 for name in NAMES)
    assert set(answer["cpu_s_per_gb"]) == {
        "fetch_over_disk",
        "whole_way_over_disk",
        "shm_over_memcpy",
        "tcp_over_stream",
    }
    (line,) = results.read_text().splitlines()
    assert json.loads(line)["rows"] == answer
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_a_profile_names_the_threads_that_had_the_time(tmp_path: Path) -> None:
    done = run("--profile", "fetch_over_disk", "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "MainThread" in done.stderr and "waited for a core" in done.stderr


def test_a_row_that_does_not_exist_is_refused() -> None:
    done = run("--only", "warp_speed")
    assert done.returncode == 2 and "no such row: warp_speed" in done.stderr
