"""`kvmoverd scheduler`: what it would run, and decision logs played again."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvmoverd import cli_scheduler
from kvmoverd.adapters.journal_file import JournalFile
from kvmoverd.cli import main
from kvmoverd.core.scheduling.journal import Recorded
from kvmoverd.core.scheduling.reports import EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import Request
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth

CONFIG = """
[[models]]
name = "m"
kv_bytes_per_token = 1000
alpha_tokens = 1000000
beta_tokens = 800000
"""
STOP_S = 5.0
REQUESTS = 30


def record(path: Path, *, bytes_max: int = 1 << 30) -> None:
    """A log of requests over two prefill and two decode engines, of which one side reads slowly."""
    made = JournalFile(path, bytes_max=bytes_max, queue_max=100_000)
    made.begin()
    cluster = Recorded([Model("m", 1000, 1_000_000, 800_000)], made.write)
    now_ns = 1_000_000_000
    cluster.node_reported(NodeReport("p0", "b", 1, Depth(queue_bytes=1 << 40)), now_ns)
    for number in range(REQUESTS):
        now_ns += 1_000_000
        cluster.submit(Request(f"r{number}", "m", 1000 + number, 500), now_ns)
        for role in (Role.DECODE, Role.PREFILL):
            engines = tuple(
                EngineReport(f"{role.value}{rank}", f"{role.value[0]}{rank}", 0, 0, 1 << 30) for rank in (0, 1)
            )
            cluster.pull(GroupReport(role.value, "m", role, "b", number, engines), now_ns)
    assert made.stop(STOP_S)


def test_what_would_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(CONFIG)
    assert main(["scheduler", "--config", str(path), "--check"]) == 0
    out = capsys.readouterr().out
    assert "  pull_interval: 20ms\n" in out
    assert out.endswith("ok\n")
    assert main(["scheduler", "--config", str(path), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["name"] == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "models is missing"), (CONFIG + "[limits]\nlive_max = 0\n", "limits.live_max is 0, must be 1 to")],
)
def test_a_config_that_is_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(text)
    assert main(["scheduler", "--config", str(path)]) == 2
    assert f"kvmoverd: {message}" in capsys.readouterr().err


def test_check_says_that_a_file_which_etcd_needs_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    etcd = 'endpoints = ["127.0.0.1:1"]\nuser = "u"\npassword_file = "nope"\n'
    listen = '[scheduler]\nlisten = "127.0.0.1:0"\n'
    path.write_text(f'{CONFIG}{listen}[membership]\nkind = "etcd"\n[membership.etcd]\n{etcd}')
    assert main(["scheduler", "--config", str(path), "--check"]) == 2
    assert f"membership.etcd.password_file: can't read {tmp_path}/nope: No such file" in capsys.readouterr().err


def test_without_a_config_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler"]) == 2
    assert "--config FILE is missing" in capsys.readouterr().err


@pytest.mark.parametrize("files", [1, 2])
def test_a_log_played_again_decides_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str], files: int) -> None:
    path = tmp_path / "log"
    record(path)
    if files == 2:
        record(path, bytes_max=path.stat().st_size * 2 // 3)
        assert "continues" in path.read_text()
    assert main(["scheduler", "--replay", str(path)]) == 0
    assert capsys.readouterr().out == f"same: decisions {REQUESTS}, differs 0\n"
    assert main(["scheduler", "--replay", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"decisions": REQUESTS, "differs": 0}


def test_under_another_policy_it_says_what_would_have_gone_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    record(path)
    assert main(["scheduler", "--replay", str(path), "--policy", "prefill-only"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("differs: policy prefill-only, differs ")
    assert lines
    assert all(line.startswith("r") and " -> " in line for line in lines)
    assert main(["scheduler", "--replay", str(path), "--policy", "paper"]) == 0
    assert capsys.readouterr().out == "same: policy paper, differs 0\n"
    assert main(["scheduler", "--replay", str(path), "--policy", "best"]) == 2


def test_a_log_that_was_changed_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    record(path)
    lines = path.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"out":"assigned"' in line)
    lines[place] = lines[place].replace('"decode":"decode0"', '"decode":"decode9"', 1)
    path.write_text("\n".join(lines) + "\n")
    assert main(["scheduler", "--replay", str(path)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("r0: ")
    assert "/decode9 by" in first
    assert last == f"differs: decisions {REQUESTS}, differs 1"


def test_a_log_with_missing_lines_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    record(path, bytes_max=4_000)
    assert main(["scheduler", "--replay", str(path)]) == 2
    assert "goes on where" in capsys.readouterr().err
    record(path)
    with path.open("a") as log:
        log.write('{"dropped": 7}\n')
    assert main(["scheduler", "--replay", str(path)]) == 2
    assert "the scheduler dropped so many lines here" in capsys.readouterr().err


def test_where_no_scheduler_runs_nothing_is_shown_but_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_scheduler, "STATUS_S", 0.5)
    assert main(["scheduler", "--status", "127.0.0.1:1"]) == 1
    told = capsys.readouterr().err
    assert "kvmoverd: no scheduler answers at 127.0.0.1:1: " in told
    assert "Connection refused" in told
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert main(["scheduler", "--status", f"127.0.0.1:{port}"]) == 1
        assert f"no scheduler answers at 127.0.0.1:{port} within 0.5 s" in capsys.readouterr().err
    assert main(["scheduler", "--status", "here"]) == 2
    assert "kvmoverd: --status is 'here', must be HOST:PORT" in capsys.readouterr().err


def test_who_answers_and_is_no_scheduler_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        assert main(["scheduler", "--status", f"127.0.0.1:{port}"]) == 1
    finally:
        other.stop(None).wait(STOP_S)
    assert f"what answers at 127.0.0.1:{port} is no scheduler, or one of another version" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--check"], ["--status", "127.0.0.1:1"]])
def test_a_policy_without_a_log_is_refused_and_not_left_out_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(CONFIG)
    assert main(["scheduler", "--config", str(path), "--policy", "paper", *more]) == 2
    assert "--policy goes with --replay: a scheduler that runs has scheduler.policy" in capsys.readouterr().err


def test_a_file_that_is_no_log_is_refused_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(CONFIG)
    for more in ([], ["--policy", "paper"]):
        assert main(["scheduler", "--replay", str(path), *more]) == 2
        assert f"kvmoverd: {path}: line 1 is no JSON" in capsys.readouterr().err
