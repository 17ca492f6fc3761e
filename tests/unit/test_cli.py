"""The command line without a daemon: what it prints, what it refuses, with which exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvmoverd import __version__, devices, devices_storage
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.cli import main

PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
CONFIG = """\
[node]
name = "n"
[engine_api]
socket = "n.sock"
[node_api]
listen = "127.0.0.1:{port}"
[pool]
bytes = "{pool}"
piece_bytes = "2MiB"
[[storage]]
name = "s"
kind = "memory"
[transport]
kind = "{transport}"
listen = "127.0.0.1:0"
"""


def config_file(directory: Path, *, port: int = 0, pool: str = "8MiB", transport: str = "tcp", more: str = "") -> str:
    path = directory / "n.toml"
    path.write_text(CONFIG.format(port=port, pool=pool, transport=transport) + more)
    return str(path)


def one_line(text: str) -> str:
    """What a refusal says first; a remedy may follow, a traceback may not."""
    assert "Traceback" not in text, text
    return text.splitlines()[0]


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"kvmoverd {__version__}\n"
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": __version__}


def test_the_command_line_loads_what_a_command_needs_and_no_more() -> None:
    heavy = ("numpy", "grpc", "pyverbs", "kvmoverd.adapters.transport", "kvmoverd.node")
    code = (
        f"import sys; from kvmoverd.cli import main; main(['version']); print([n for n in {heavy} if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=PATHS, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == [f"kvmoverd {__version__}", "[]"]


def test_check_says_what_would_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", config_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "bytes: 8MiB" in out and out.endswith("ok\n")
    assert main(["check", "--config", config_file(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"] == {"name": "n"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["doctor", "--watch", "10s"], "'10s' is not within 0 and 3600"),
        (["doctor", "--watch", "nan"], "'nan' is not within 0 and 3600"),
        (["demo", "--layers", "many"], "'many' is no whole number above 0"),
        (["demo", "--turns", "0"], "'0' is no whole number above 0"),
    ],
)
def test_a_number_that_is_none_is_refused_with_its_bounds(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_check_shows_the_keys_of_rdma_where_they_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "--config", config_file(tmp_path), "--json"])
    assert "verbs" not in json.loads(capsys.readouterr().out)["transport"]
    main(["check", "--config", config_file(tmp_path, transport="verbs"), "--json"])
    assert json.loads(capsys.readouterr().out)["transport"]["verbs"]["qps_max"] == 4096


def test_check_says_when_threads_will_do_what_io_uring_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_storage, "uring_refusal", lambda: "of the weather")
    path = config_file(tmp_path)
    assert main(["check", "--config", path]) == 0 and "note" not in capsys.readouterr().out
    (tmp_path / "store").mkdir()
    Path(path).write_text(Path(path).read_text().replace('kind = "memory"', 'kind = "auto"\npath = "store"'))
    assert main(["check", "--config", path]) == 0
    assert "note: threads will read: io_uring can't be used: of the weather" in capsys.readouterr().out


def test_check_says_that_a_file_which_etcd_needs_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path)
    etcd = '[membership]\nkind = "etcd"\n[membership.etcd]\nendpoints = ["127.0.0.1:1"]\nca = "nope.pem"\n'
    Path(path).write_text(Path(path).read_text() + etcd)
    assert main(["check", "--config", path]) == 1
    out = capsys.readouterr().out
    assert f"not here: membership.etcd.ca: can't read {tmp_path}/nope.pem: No such file" in out
    assert out.endswith("not ok, serve would refuse on this machine as it is: membership\n")


def test_check_says_what_this_machine_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(tmp_path)
    monkeypatch.setattr(devices, "available_bytes", lambda: 6 << 20)
    assert main(["check", "--config", path]) == 1
    out = capsys.readouterr().out
    assert "not here: only 6MiB of memory" in out
    assert out.endswith("not ok, serve would refuse on this machine as it is: pool\n")
    monkeypatch.setattr(devices, "available_bytes", lambda: None)
    Path(path).write_text(Path(path).read_text().replace('kind = "memory"', 'kind = "threads"\npath = "store"'))
    assert main(["check", "--config", path, "--json"]) == 1
    assert "store is no directory" in json.loads(capsys.readouterr().out)["storage"][0]["not here"]
    (tmp_path / "store").mkdir()
    assert main(["check", "--config", path]) == 0
    assert capsys.readouterr().out.endswith("\nok\n")


def test_check_says_of_a_path_that_no_filesystem_takes_that_it_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path)
    root = f'kind = "threads"\npath = "{"x" * 300}"\ncreate = true'
    Path(path).write_text(Path(path).read_text().replace('kind = "memory"', root))
    assert main(["check", "--config", path, "--json"]) == 1
    (said,) = json.loads(capsys.readouterr().out)["storage"]
    assert said["not here"].endswith("xx: ENAMETOOLONG (File name too long); serve refuses")


def test_check_says_of_a_copy_that_is_not_here_that_it_is_left_out_and_serve_does_not_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, more='[[storage]]\nname = "near"\nrole = "copy"\nkind = "threads"\npath = "near"\n')
    assert main(["check", "--config", path]) == 0
    out = capsys.readouterr().out
    assert "near is no directory: create it, or mount it; serve leaves it out until it comes" in out
    assert out.endswith("\nok, but left out until it comes: storage near\n")


def test_check_says_that_a_root_is_mounted_read_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_file(tmp_path)
    (tmp_path / "store").mkdir()
    Path(path).write_text(Path(path).read_text().replace('kind = "memory"', 'kind = "threads"\npath = "store"'))
    mounted = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*mounted[:8], mounted.f_flag | os.ST_RDONLY, *mounted[9:]))
    monkeypatch.setattr(os, "statvfs", lambda place: read_only)
    assert main(["check", "--config", path]) == 1
    assert "store is on a filesystem that is mounted read-only; serve refuses" in capsys.readouterr().out


def test_check_and_serve_warn_of_segments_too_large_for_the_filesystem(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = os.statvfs(tmp_path)
    blocks = (2 << 30) // there.f_frsize
    small = os.statvfs_result((*there[:2], blocks, blocks // 2, blocks // 2, *there[5:]))
    monkeypatch.setattr(os, "statvfs", lambda place: small)
    path = config_file(tmp_path)
    (tmp_path / "store").mkdir()
    root = 'kind = "threads"\npath = "store"\nlayout = "segments"'
    Path(path).write_text(Path(path).read_text().replace('kind = "memory"', root))
    assert main(["check", "--config", path]) == 0
    said = "the filesystem has 2048 MiB, less than 3 segments of 1024 MiB: when it is full nothing can be dropped"
    assert said in capsys.readouterr().out
    store = open_segment_store(tmp_path / "store", node="n", boot_id="1")
    assert store.close(5.0) and said in store.io.note
    assert [said in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]


def test_without_rdma_verbs_are_refused_at_once_and_check_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvmoverd.devices_verbs.list_ports", list)
    path = config_file(tmp_path, transport="verbs")
    assert main(["serve", "--config", path]) == 2
    refusal = one_line(capsys.readouterr().err)
    assert 'transport.kind = "verbs": no port can be used: there is no RDMA device; see kvmoverd doctor' in refusal
    assert main(["check", "--config", path]) == 1
    out = capsys.readouterr().out
    assert "not here: transport.kind" in out and out.endswith(
        "serve would refuse on this machine as it is: transport\n"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["n.toml"]


def test_a_reader_that_has_seen_enough_of_check_is_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvmoverd", "check", "--config", config_file(tmp_path)]
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with open(write_fd, "wb") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, timeout=30, check=False, env=PATHS)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"pool": "9 elephants"}, "pool.bytes"),
        ({"pool": "7MiB"}, "pool.bytes"),
        ({"transport": "pigeon"}, "transport.kind"),
        ({"more": "\n[log]\nlevle = 'info'\n"}, "log.levle"),
        ({"more": "\n[node\n"}, "is no TOML"),
    ],
)
@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_bad_config_is_refused_by_the_name_of_its_key(
    command: str, changed: dict[str, str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", config_file(tmp_path, **changed)]) == 2  # type: ignore[arg-type]
    out = capsys.readouterr()
    assert named in one_line(out.err) and out.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["n.toml"]


def test_a_config_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in one_line(capsys.readouterr().err)


def test_a_taken_port_and_a_taken_socket_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--config", config_file(tmp_path, port=port)]) == 2
        line = one_line(capsys.readouterr().err)
        assert f"127.0.0.1:{port}" in line and "in use" in line
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(tmp_path / "n.sock.companion"))
        live.listen()
        assert main(["serve", "--config", config_file(tmp_path)]) == 2
        assert "is taken by a live daemon" in one_line(capsys.readouterr().err)


def test_a_file_where_the_socket_should_be_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "n.sock").write_text("precious")
    assert main(["serve", "--config", config_file(tmp_path)]) == 2
    assert "n.sock: it exists and is no socket" in one_line(capsys.readouterr().err)
    assert (tmp_path / "n.sock").read_text() == "precious"


def test_status_says_when_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", str(tmp_path / "none.sock"), "--json"]) == 1
    out = capsys.readouterr()
    assert "nobody answers" in one_line(out.err) and out.out == ""


def test_status_says_when_the_socket_lets_nobody_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n.sock").touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["status", "--socket", str(tmp_path / "n.sock")]) == 1
    assert "you may not write to it" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fly"], "fly"),
        ([], "COMMAND"),
        (["serve"], "--config"),
        (["demo", "--layers", "0"], "--layers"),
        (["demo", "--transport", "pigeon"], "--transport"),
    ],
)
def test_what_is_no_command_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--transport", "verbs"], "transport.kind"),
        (["--pool", "much"], "pool.bytes"),
        (["--read-rate", "1KiB"], "read_rate_max"),
    ],
)
def test_a_demo_that_can_not_run_is_refused_before_anything_starts(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.Popen", _unexpected)
    monkeypatch.setattr("kvmoverd.devices_verbs.list_ports", list)
    assert main(["demo", *arguments]) == 2
    assert named in one_line(capsys.readouterr().err)


def _unexpected(*arguments: object, **_: object) -> None:
    raise AssertionError(f"started {arguments}")
