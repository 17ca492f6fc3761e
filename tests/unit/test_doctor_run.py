"""How checks are run, and what becomes of one that hangs, fails or dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvmoverd import cli_doctor, config, devices
from kvmoverd.adapters.doctor.finding import Check, Findings, Look, Status, Wanted, ok, warn
from kvmoverd.adapters.doctor.run import findings_of, run_checks
from kvmoverd.adapters.doctor.text import finding_lines, summary
from kvmoverd.adapters.sysfs.tree import Tree, UnreadableError
from kvmoverd.cli import main

LOOK = Look(Tree(Path("/nowhere")), Wanted())


def fine(look: Look) -> Findings:
    yield ok("as it should be")


def hangs(look: Look) -> Findings:
    time.sleep(60)
    yield ok("never said")


def dies(look: Look) -> Findings:
    os.kill(os.getpid(), signal.SIGKILL)
    yield ok("never said")


def raises(look: Look) -> Findings:
    yield ok("half of it")
    raise ValueError("of the weather")


def hidden(look: Look) -> Findings:
    raise UnreadableError("/proc/secret can't be read: Permission denied")


def test_findings_stand_in_the_order_of_the_checks_however_long_each_takes() -> None:
    def slow(look: Look) -> Findings:
        time.sleep(0.1)
        yield ok("at last")

    rows = run_checks([Check("slow", slow), Check("fine", fine)], LOOK)
    assert [(name, finding.found) for name, finding in rows] == [("slow", "at last"), ("fine", "as it should be")]


def test_a_check_that_hangs_is_a_failure_within_its_deadline_and_holds_up_no_other() -> None:
    began_s = time.monotonic()
    rows = dict(run_checks([Check("hangs", hangs, 0.2), Check("fine", fine)], LOOK, at_once=2))
    assert time.monotonic() - began_s < 5.0
    assert rows["hangs"].status is Status.FAIL and "no answer within 0.2 s" in rows["hangs"].found
    assert rows["fine"].status is Status.OK


def test_a_check_that_dies_is_a_failure_that_names_the_signal() -> None:
    ((_, finding), (_, other)) = run_checks([Check("dies", dies), Check("fine", fine)], LOOK)
    assert finding.status is Status.FAIL and "signal 9 (Killed)" in finding.found
    assert other.status is Status.OK


def test_an_error_is_a_finding_in_its_own_words() -> None:
    before, finding = findings_of(Check("raises", raises), LOOK)
    assert before.found == "half of it" and finding.status is Status.FAIL
    assert finding.found == "the check itself failed: ValueError: of the weather"


def test_what_may_not_be_read_is_skipped_and_says_which_file() -> None:
    (finding,) = findings_of(Check("hidden", hidden), LOOK)
    assert finding.status is Status.SKIP and "/proc/secret" in finding.found


def test_a_check_says_nothing_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(look: Look) -> Findings:
        os.write(1, b"noise")
        os.write(2, b"noise")
        yield ok("quiet")

    assert [finding.found for _, finding in run_checks([Check("loud", loud)], LOOK)] == ["quiet"]
    out, err = capfd.readouterr()
    # If a test before this one has spoken gRPC, that says of each fork here, in this process, that it has threads.
    said = [line for line in err.splitlines() if "skipping fork() handlers" not in line]
    assert (out, said) == ("", [])


def test_a_process_that_is_lost_takes_no_check_along_that_came_before_or_comes_after() -> None:
    checks = [Check("a", fine), Check("dies", dies), Check("b", fine), Check("hangs", hangs, 0.2), Check("c", fine)]
    rows = [(name, finding.status.value) for name, finding in run_checks(checks, LOOK, at_once=1)]
    assert rows == [("a", "ok"), ("dies", "fail"), ("b", "ok"), ("hangs", "fail"), ("c", "ok")]


def test_what_a_check_has_started_ends_with_it(tmp_path: Path) -> None:
    def starts(look: Look) -> Findings:
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pid").write_text(str(child.pid))
        child.wait()
        yield ok("never said")

    run_checks([Check("starts", starts, 0.5)], LOOK)
    pid, until_s = int((tmp_path / "pid").read_text()), time.monotonic() + 10.0
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until_s, "still there"
        time.sleep(0.01)


def test_only_so_many_run_at_once(tmp_path: Path) -> None:
    def crowded(look: Look) -> Findings:
        mine = tmp_path / str(os.getpid())
        mine.touch()
        time.sleep(0.05)
        count = len(list(tmp_path.iterdir()))
        mine.unlink()
        yield ok(str(count))

    rows = run_checks([Check(f"{at}", crowded) for at in range(6)], LOOK, at_once=2)
    assert max(int(finding.found) for _, finding in rows) <= 2


def test_only_checks_that_watch_are_given_the_time_for_it() -> None:
    look = Look(LOOK.tree, LOOK.wanted, watch_s=30.0)
    began_s = time.monotonic()
    ((_, finding),) = run_checks([Check("hangs", hangs, 0.2)], look)
    assert finding.status is Status.FAIL and time.monotonic() - began_s < 5.0


def test_a_remedy_stands_under_its_finding_and_lines_are_wrapped() -> None:
    rows = [("kernel", ok("Linux 6.1")), ("memlock", warn("locked memory " * 10, "LimitMEMLOCK=infinity " * 6))]
    lines = list(finding_lines(rows, width=80))
    assert lines[0] == "ok    kernel   Linux 6.1"
    assert lines[1].startswith("warn  memlock  locked memory") and lines[2].startswith(" " * 15 + "memory locked")
    assert any(line.startswith(" " * 15 + "-> LimitMEMLOCK") for line in lines)
    assert max(map(len, lines)) <= 80
    assert summary(rows) == "2 findings: 0 fail, 1 warn, 1 ok, 0 skip"


def test_doctor_needs_no_config_and_prints_a_list_of_findings(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {frozenset(row) for row in rows} == {frozenset({"check", "status", "found", "remedy"})}
    assert {row["status"] for row in rows} <= {"ok", "warn", "fail", "skip"}
    assert not [row for row in rows if "the check itself failed" in row["found"]]
    assert all(row["remedy"] for row in rows if row["status"] in ("warn", "fail"))
    assert code == int(any(row["status"] == "fail" for row in rows))
    assert len({row["check"] for row in rows}) >= 25


CONFIG = """\
[node]
name = "n"
[engine_api]
socket = "n.sock"
[node_api]
listen = "127.0.0.1:0"
[pool]
bytes = "8MiB"
piece_bytes = "2MiB"
[[storage]]
name = "s"
kind = "threads"
path = "store"
create = {create}
[transport]
listen = "127.0.0.1:0"
"""


def test_doctor_says_what_check_says_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "n.toml"
    path.write_text(CONFIG.format(create="true"))
    main(["doctor", "--config", str(path), "--json"])
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["config"]["status"] == "ok", rows["config"]
    assert rows["storage"]["status"] == "ok", rows["storage"]
    assert not (tmp_path / "store").exists(), "doctor writes nothing"


def test_doctor_fails_where_serve_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "n.toml"
    path.write_text(CONFIG.format(create="false"))
    assert main(["doctor", "--config", str(path), "--quiet"]) == 1
    out = capsys.readouterr().out
    assert (
        "fail  storage" in out
        and "is no directory" in out
        and "ok  " not in out.rpartition("\n2")[0].split("findings")[0]
    )


def test_what_a_machine_lacks_for_a_config_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "n.toml"
    path.write_text(re.sub(r'(\[pool\]\nbytes = )"\w+"', r'\1"60TiB"', CONFIG.format(create="true")))
    monkeypatch.setattr(devices, "transport_here", lambda config: {"not here": "no port can be used"})
    found = {
        each.found: each.remedy for each in cli_doctor.check_config(config.load(path), Look(Tree(tmp_path), Wanted()))
    }
    transport, pool = found
    assert transport == "[transport]: no port can be used" and "rdma_ports" in found[transport]
    assert pool.startswith("[pool]: only") and "lower pool.bytes" in found[pool]


def test_doctor_refuses_a_config_that_does_not_parse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "n.toml"
    path.write_text("[node")
    assert main(["doctor", "--config", str(path)]) == 2
    assert "is no TOML" in capsys.readouterr().err


def test_doctor_refuses_to_watch_for_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--watch", "86400"])
    assert stopped.value.code == 2 and "not within 0 and 3600" in capsys.readouterr().err
