"""The scheduler's bench says what others read of it, under the names that they know."""

from __future__ import annotations

import json

import pytest

from tests.bench import scheduler


def test_its_json_is_a_list_of_rows_with_five_numbers_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "WARM_INTERVALS", 3)
    monkeypatch.setattr("sys.argv", ["bench", "--json", "--size", "2P4D", "--policy", "paper", "--seconds", "0.02"])
    assert scheduler.main() == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row.keys() == {"engines", "agents", "policy", "decisions_per_s", "p99_us"}
    assert (row["engines"], row["agents"], row["policy"]) == (48, 2_000, "paper")
    assert row["decisions_per_s"] > 0 and row["p99_us"] > 0
