"""What the benchmark says of its runs: rows, costs, the JSON's names, and who had the CPU."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.bench.dataplane import NAMES
from tests.bench.pairs import Pair, Run, Verdict
from tests.bench.rows import NotRun, cost_of, fraction_row, plain_row, ratio_row
from tests.bench.sampler import kind_of, profile_text, sampled
from tests.bench.suite import COSTS, Found, as_json, as_text

PAIRS = [Pair(Run(2.0, 0.02), Run(1.9, 0.3), bool(number % 2)) for number in range(15)]


def test_a_ratio_row_compares_the_ratio_and_shows_both_sides() -> None:
    row = ratio_row("fetch_over_disk", PAIRS, aim=0.9, seed=1).json()
    assert (row["reference"], row["ours"], row["ratio"], row["verdict"]) == (2.0, 1.9, pytest.approx(0.95), "met")
    assert len(PAIRS) == len(row["runs"]) and row["better"] == "higher"  # type: ignore[arg-type]


def test_a_plain_row_compares_the_figure_itself() -> None:
    row = plain_row("null_us_per_block", "us", [11.0] * 15, aim=10.0, seed=1).json()
    assert (row["ours"], row["low"], row["high"], row["verdict"]) == (11.0, 11.0, 11.0, "missed")
    assert row["reference"] is None and row["ratio"] is None and row["better"] == "lower"


def test_a_fraction_is_of_the_whole_of_its_own_run() -> None:
    row = fraction_row("first_layer_fraction", [(0.01, 0.1), (0.04, 0.4)] * 8, aim=0.25, seed=1).json()
    assert row["ratio"] == pytest.approx(0.1) and row["verdict"] == "met" and row["unit"] == "ms"


def test_every_row_has_a_value_which_is_what_the_aim_is_for() -> None:
    rows = [
        ratio_row("fetch_over_disk", PAIRS, aim=0.9, seed=1),
        plain_row("index_entries_per_s", "1/s", [2.0] * 15, aim=1.0, seed=1, lower_is_better=False),
        fraction_row("first_layer_fraction", [(0.01, 0.1)] * 15, aim=0.25, seed=1),
    ]
    values = [row.json()["value"] for row in rows]
    assert values == [pytest.approx(0.95), 2.0, pytest.approx(0.1)]
    assert [row.json()["verdict"] for row in rows] == ["met"] * 3 and rows[1].json()["better"] == "higher"


def test_the_aim_of_a_cost_holds_for_what_is_left_beside_the_checksums() -> None:
    cost = cost_of("fetch_over_disk", PAIRS, crc=0.1, aim=0.25, seed=1)
    assert cost.verdict is Verdict.MET
    assert cost.json()["beside_crc"] == pytest.approx(0.2) and cost.json()["reference"] == pytest.approx(0.02)


def test_every_name_is_in_the_answer_and_what_was_not_measured_says_why() -> None:
    found = Found([ratio_row("shm_over_memcpy", PAIRS, aim=0.9, seed=1)], [])
    not_run = [NotRun("tcp_over_stream", "there is no C compiler")]
    answer = json.loads(json.dumps(as_json(NAMES, found, not_run)))
    assert set(answer) == {*NAMES, COSTS}
    assert answer["tcp_over_stream"] == {"verdict": "not run", "why": "there is no C compiler"}
    assert answer["fetch_over_disk"]["why"] == "not asked for"
    assert "not run: there is no C compiler" in as_text(found, not_run)
    assert as_text(found, not_run).count("shm_over_memcpy") == len(PAIRS) + 1


def spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def test_the_sampler_books_a_thread_under_what_it_does_and_only_between_begin_and_end(tmp_path: Path) -> None:
    out = tmp_path / "books.json"
    with sampled(out) as sampler:
        thread = threading.Thread(target=spin, args=(time.monotonic() + 0.3,), name="worker-3")
        thread.start()
        thread.join()
        sampler.end()
        spin(time.monotonic() + 0.05)
    books = json.loads(out.read_text())
    spent_s = books["cpu_s"]["worker"]
    assert max(spent_s, key=spent_s.__getitem__).startswith("spin (")
    assert not any(place.startswith("spin (") for place in books["cpu_s"].get("MainThread", {}))
    assert "worker" in profile_text(out)


def test_threads_of_one_kind_are_booked_together() -> None:
    assert {kind_of(f"kvmover-disk-{number}") for number in range(12)} == {"kvmover-disk"}
    assert kind_of("Thread-7 (_run)") == "Thread" and kind_of("plain_3") == "plain"
