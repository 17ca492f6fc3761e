"""`kvmoverd demo --scheduler` as a user runs it: every request done once, every byte right, and storage read more evenly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import children_of, environment

from kvmover_client.replay import trace, traces_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(190)]

RUN_S = 170.0
END_S = 20.0
LAYERS, AGENTS, TURNS = 2, 24, 3
SMALL = ("--scheduler", "--layers", str(LAYERS), "--pool", "64MiB", "--read-rate", "12MiB")
TOKEN_BYTES = LAYERS * 656
NODES = {f"{role}-{number}" for role in ("prefill", "decode") for number in range(3)}
NAMES = {
    "policy",
    "snic_max_over_avg",
    "snic_max_over_avg_round_robin",
    "policies",
    "verified_bytes",
    "errors",
    "seconds",
}


@pytest.fixture
def home() -> Iterator[Path]:
    """Where the demo puts its files; nothing may be left there, nor in shared memory."""
    made = Path(tempfile.mkdtemp(prefix="kvmdemo-", dir="/tmp"))
    try:
        yield made
        assert list(made.iterdir()) == [], "the demo left files behind"
    finally:
        shutil.rmtree(made)


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvmoverd", "demo", *SMALL, *arguments]
    environ = environment() | {"TMPDIR": str(home)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def prompts_bytes() -> int:
    """Of all prompts of all agents, in one engine."""
    sessions = trace.read_sessions(traces_path(), sessions_max=AGENTS, turns_max=TURNS)
    each = [sum(turn.prompt_tokens for turn in session.turns) for session in sessions]
    return TOKEN_BYTES * sum(each[number % len(each)] for number in range(AGENTS))


def test_joint_reads_more_evenly_than_round_robin_and_every_request_is_done_once(home: Path) -> None:
    with start(home, "--sessions", str(AGENTS), "--turns", str(TURNS), "--json") as process:
        out, err = process.communicate(timeout=RUN_S)
    assert (process.returncode, err) == (0, ""), out
    summary = json.loads(out)
    assert set(summary) == NAMES and summary["policy"] == "joint" and summary["errors"] == []
    assert list(summary["policies"]) == ["joint", "round-robin"]
    for act in summary["policies"].values():
        assert act["done"] == act["requests"] == AGENTS * TURNS
        assert act["assigned"] == sum(act["by_rule"].values()) == AGENTS * TURNS, "each was given out once"
        assert (act["failed_tries"], act["revoked"], act["dropped_blocks"]) == (0, 0, 0)
        assert set(act["storage_read_bytes"]) == NODES and all(act["storage_read_bytes"].values())
        assert act["loaded_bytes"] == act["hit_tokens"] * TOKEN_BYTES > 0
        assert act["verified_bytes"] == act["loaded_bytes"] + prompts_bytes(), "every byte was looked at, on both sides"
        assert 0 < act["ttft_ms"]["p50"] <= act["ttft_ms"]["p99"]
        assert act["snic_busy_windows"] > 0
    assert all("/turn/" in rule for rule in summary["policies"]["round-robin"]["by_rule"])
    joint, baseline = summary["snic_max_over_avg"], summary["snic_max_over_avg_round_robin"]
    assert 1 <= joint < baseline <= len(NODES), f"joint {joint}, round robin {baseline}"


def test_the_plain_run_shows_turns_and_a_table_and_a_policy_alone_is_played_once(home: Path) -> None:
    with start(home, "--sessions", "2", "--turns", "2", "--policy", "round-robin", "--engines", "2") as process:
        out, err = process.communicate(timeout=RUN_S)
    assert (process.returncode, err) == (0, ""), out
    lines = out.splitlines()
    assert lines[0].startswith("round-robin: 2 agents, 4 turns of ")
    assert sum(" turn " in line for line in lines) == 4
    (row,) = [
        line.split() for line in lines if line.startswith("round-robin ") and " of " in line and "turn" not in line
    ]
    assert row[1:4] == ["4", "of", "4"]
    assert lines[-1] == "errors: 0; every byte was right"


def test_a_signal_in_mid_run_ends_all_processes_and_leaves_nothing(home: Path) -> None:
    with start(home, "--sessions", "6", "--turns", "3") as process:
        assert process.stdout is not None
        while " turn " not in process.stdout.readline():
            assert process.poll() is None
        children = children_of(process.pid)
        assert len(children) == 8, "a scheduler, six daemons and the engines"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=END_S)
    assert process.returncode == 130
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("wrong", [("--helpers", "1"), ("--transport", "verbs")])
def test_what_the_scheduled_demo_has_not_is_refused(home: Path, wrong: tuple[str, str]) -> None:
    with start(home, *wrong) as process:
        _, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 2 and "--scheduler is for " in err
