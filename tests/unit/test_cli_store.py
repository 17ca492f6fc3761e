"""`kvmoverd store`: what it refuses, in one line, with which exit code, and that `--json` prints one object and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from resource import RLIM_INFINITY

import pytest

from kvmoverd import cli_store
from kvmoverd.adapters.memory import arena
from kvmoverd.adapters.storage.inspect import place, probe
from kvmoverd.cli import main
from kvmoverd.cli_store import FINE, REFUSED, WRONG
from kvmoverd.config import load
from kvmoverd.core.errors import ConfigError
from tests.contract.tools_kit import FILES, RECORDS, SEGMENTS, namespace, store

TOOLS = (["fsck"], ["ls"], ["tree"], ["gc", "--dry-run"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that it says."""
    assert main(["store", *arguments]) == REFUSED
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvmoverd: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("json_too", [False, True])
def test_what_is_no_store_is_refused_in_one_line(
    tool: list[str], json_too: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--json"] if json_too else []
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    assert "name a directory that is there" in refused(capsys, *tool, str(tmp_path / "gone"), *more)
    assert "is no directory" in refused(capsys, *tool, str(tmp_path / "file"), *more)
    assert "holds no store" in refused(capsys, *tool, str(tmp_path / "empty"), *more)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"layout": "segments", "version": 9}', "version 9 of layout 'segments', this build reads 1"),
        ('{"layout": "clay", "version": 1}', "layout 'clay', which this build does not know"),
        ("{", "can't be understood"),
    ],
)
def test_a_store_that_this_build_can_not_read_is_refused_by_name(
    tool: list[str], content: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kvm1").mkdir()
    (tmp_path / "kvm1/format.json").write_text(content)
    assert word in refused(capsys, *tool, str(tmp_path))


def test_probe_says_that_no_daemon_would_take_a_store_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kvm1").mkdir()
    (tmp_path / "kvm1/format.json").write_text('{"layout": "segments", "version": 9}')
    assert main(["store", "probe", str(tmp_path), "--json"]) == WRONG
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is False and "version 9" in found["why"]


def test_a_store_that_may_not_be_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvm1").mkdir()

    def denied(where: Path) -> None:
        raise PermissionError(13, "Permission denied", str(where))

    monkeypatch.setattr(place, "stored_format", denied)
    assert "no permission to read" in refused(capsys, "fsck", str(tmp_path))


@pytest.mark.parametrize("layout", [FILES, SEGMENTS])
def test_each_tool_prints_one_object_or_text_for_people(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with store(tmp_path, layout) as one:
        one.chain(3)
    for tool in (
        ["probe"],
        ["fsck"],
        ["fsck", "--repair", "--threads", "1"],
        ["ls", "--authors", "--segments"],
        ["tree"],
    ):
        assert main(["store", *tool, str(tmp_path), "--json"]) == FINE
        out, err = capsys.readouterr()
        assert isinstance(json.loads(out), dict) and out.count("\n") == 1 and err == ""
        assert main(["store", *tool, str(tmp_path)]) == FINE
        out, err = capsys.readouterr()
        assert len(out.splitlines()) > 2 and not out.startswith("{") and err == ""


def test_fsck_ends_with_one_while_something_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store(tmp_path, FILES) as one:
        one.chain(3)
    os.truncate(one.path(one.keys[1])[0], 100)
    assert main(["store", "fsck", str(tmp_path), "--json"]) == WRONG
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("blocks", "corrupt", "repaired", "bytes")} == {
        "blocks": 3,
        "corrupt": 1,
        "repaired": 0,
        "bytes": 2 * (one.path(one.keys[0])[0].stat().st_size) + 100,
    }
    for more, code, said in (
        ([], WRONG, "1 of 3 blocks is damaged; run with --repair to have them forgotten"),
        (["--repair"], FINE, "1 of 3 blocks is damaged; 1 block is lost, and found by nobody any more"),
        ([], FINE, "fine: 2 blocks, 0 damaged"),
    ):
        assert main(["store", "fsck", str(tmp_path), *more]) == code
        assert capsys.readouterr().out.splitlines()[-1] == said


def test_whoever_names_the_store_instead_of_its_root_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with store(tmp_path, FILES) as one:
        one.chain(1)
    for tool in ("ls", "probe"):
        assert f"name the directory above, {tmp_path}" in refused(capsys, tool, str(tmp_path / "kvm1"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a directory away")
def test_repairs_are_for_the_user_whose_the_store_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(1)
    os.chown(tmp_path / "kvm1", 65_534, 65_534)
    assert "belongs to user 65534, and this runs as user 0" in refused(capsys, "fsck", "--repair", str(tmp_path))
    assert main(["store", "fsck", str(tmp_path)]) == FINE


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
path = "root"
bytes_max = "4GiB"
[transport]
kind = "tcp"
listen = "127.0.0.1:0"
"""


def test_gc_goes_by_the_budgets_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store(tmp_path / "root", SEGMENTS, node="n") as one:
        one.chain(5 * RECORDS)
    config = tmp_path / "n.toml"
    config.write_text(CONFIG)
    assert main(["store", "gc", str(tmp_path / "root"), "--dry-run", "--config", str(config), "--json"]) == FINE
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["node"] == "n" and node["segments"] == 5 and node["drop"] == []
    assert main(["store", "gc", str(tmp_path / "root"), "--dry-run", "--bytes-max", "300KiB", "--json"]) == FINE
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["budget_used"] > 1 and len(node["drop"]) == 5
    said = refused(capsys, "gc", str(tmp_path / "root"), "--dry-run", "--config", str(tmp_path / "gone.toml"))
    assert "gone.toml" in said
    (tmp_path / "another").mkdir()
    config.write_text(CONFIG.replace('"root"', '"another"'))
    said = refused(capsys, "gc", str(tmp_path / "root"), "--dry-run", "--config", str(config))
    assert "has no [[storage]] whose path is" in said


@pytest.mark.parametrize(
    ("kind", "said"), [("auto", "registered pool"), ("threads", "not tried: storage.kind is 'threads'")]
)
def test_probe_tries_the_whole_pool_of_a_config(
    kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "root").mkdir()
    config = tmp_path / "n.toml"
    config.write_text(CONFIG.replace('kind = "threads"', f'kind = "{kind}"'))
    assert main(["store", "probe", str(tmp_path / "root"), "--config", str(config), "--json"]) == FINE
    found = json.loads(capsys.readouterr().out)
    pool = found["pool"]
    assert pool["bytes"] == load(config).pool.bytes and pool["memory"] == "ok" and pool["pages"]
    assert pool["pages"] == found["direct"]["pool_pages"] and found["direct"]["record"] == "ok"
    if kind == "threads" or found["io_uring"] == "ok":
        assert pool["registered"] == said or "registering the pool was refused" in pool["registered"]
    assert os.listdir(tmp_path / "root") == []


def test_probe_says_that_there_is_no_memory_for_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    config = tmp_path / "n.toml"
    config.write_text(CONFIG)
    pool_bytes, real = load(config).pool.bytes, arena.Arena.touch

    def touch(one: arena.Arena) -> None:
        if one.size_bytes == pool_bytes:
            raise ConfigError("pool.bytes asks for more memory than there is")
        real(one)

    monkeypatch.setattr(arena.Arena, "touch", touch)
    assert main(["store", "probe", str(tmp_path / "root"), "--config", str(config), "--json"]) == FINE
    pool = json.loads(capsys.readouterr().out)["pool"]
    assert pool == {
        "bytes": pool_bytes,
        "memory": "pool.bytes asks for more memory than there is",
        "pages": None,
        "registered": "not tried",
    }
    config.write_text(CONFIG.replace('"root"', '"another"'))
    assert "has no [[storage]]" in refused(capsys, "probe", str(tmp_path / "root"), "--config", str(config))


def test_only_daemons_delete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --dry-run" in refused(capsys, "gc", str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [["gc", "--bytes-max", "many"], ["gc", "--high", "1.5"], ["fsck", "--threads", "0"], ["burn"], ["fsck", "--no"]],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["store", *arguments, "/"])
    assert ended.value.code == REFUSED and "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gc", "--ttl", "24x"], "'24x' is no duration above 0: a number and one of ms, s, m, h"),
        (["gc", "--ttl", "3600"], "'3600' is no duration"),
        (["gc", "--ttl", "0s"], "'0s' is no duration above 0"),
        (["gc", "--bytes-max", "1TB"], "'1TB' is no size: a number and one of B, KiB, MiB, GiB, TiB"),
        (["gc", "--inodes-max", "many"], "'many' is no number above 0"),
        (["gc", "--low", "nan"], "'nan' is no part of one"),
    ],
)
def test_refused_numbers_are_named_with_what_they_may_be(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["store", *arguments, "/"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last and "_" not in last


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(["store", *arguments]) == FINE
    return capsys.readouterr().out.splitlines()


def test_gc_prints_a_table_of_what_would_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(2 * RECORDS)
    lines = lines_of(capsys, "gc", str(tmp_path), "--dry-run", "--bytes-max", "100 KiB")
    assert lines[0].startswith("node: 2 segments of 1 author") and "the budget" in lines[1]
    assert lines[2].strip().startswith("2 segments would go, ")
    assert lines[3].split()[:4] == ["segment", "bytes", "why", "salvaged_blocks"]
    assert [line.split()[0] for line in lines[4:]] == [f"{one.author}/2", f"{one.author}/1"]
    assert not any("{" in line for line in lines)
    lines = lines_of(capsys, "gc", str(tmp_path), "--dry-run", "--ttl", "24h")
    assert "no budget is given" in lines[1] and lines[2].strip() == "nothing would go"


def test_tree_prints_depths_in_ranges_and_tells_all_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(40)
    (space,) = json.loads(lines_of(capsys, "tree", str(tmp_path), "--json")[0])["namespaces"]
    assert space["per_depth"] == [[depth, 1] for depth in range(40)]
    lines = lines_of(capsys, "tree", str(tmp_path))
    at = lines.index("blocks by depth:")
    assert [line.split() for line in lines[at + 2 : at + 10]] == [[f"{n}-{n + 4}", "5"] for n in range(0, 40, 5)]
    assert lines[at + 10] == "longest chains:" and "tenant" not in "".join(lines)


def test_ls_prints_columns_without_those_that_are_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(3)
    lines = lines_of(capsys, "ls", str(tmp_path), "--authors", "--segments")
    assert "tenant" not in "".join(lines) and "adopted_by" not in "".join(lines)
    for title, name in (("namespaces:", "namespace"), ("authors:", "author"), ("segments:", "author")):
        head, row = lines[lines.index(title) + 1 : lines.index(title) + 3]
        assert head.split()[0] == name and len(head) >= len(row) - 3
    (shown,) = json.loads(lines_of(capsys, "ls", str(tmp_path), "--json")[0])["namespaces"]
    assert shown["bytes"] == 3 * shown["record_bytes"] and shown["tenant"] == ""
    with store(tmp_path, SEGMENTS) as one:
        one.chain(1, namespace("model", "anna"))
    lines = lines_of(capsys, "ls", str(tmp_path))
    assert lines[4].split()[2] == "tenant" and {line.split()[2] for line in lines[5:7]} == {"-", "anna"}


def test_progress_is_told_to_terminals_only_and_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_store._Progress(sys.stderr) as progress:
        progress.say("1 of 2")
    assert capsys.readouterr().err == ""

    class Terminal:
        def __init__(self) -> None:
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    terminal = Terminal()
    with cli_store._Progress(terminal) as progress:  # type: ignore[arg-type]
        progress.say("1 of 2")
        progress.say("2 of 2")
    assert terminal.text == "\r\x1b[K1 of 2\r\x1b[K"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_stranger_is_told_that_he_may_not_read(
    tool: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kvm1").mkdir(mode=0o750)
    refused(capfd, *tool, str(tmp_path))  # all modules are loaded then
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setgid(65_534)
        os.setuid(65_534)
        try:
            os._exit(main(["store", *tool, str(tmp_path)]))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == REFUSED
    out, err = capfd.readouterr()
    # gRPC, if tests before this one have used it, says on stderr that it leaves the fork alone.
    said = [line for line in err.splitlines() if "fork_posix" not in line]
    assert out == "" and len(said) == 1 and "no permission to read" in said[0]


def test_whoever_stops_reading_ends_the_tool_quietly(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(3)
    command = f"{sys.executable} -m kvmoverd store ls {tmp_path} --segments | true"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=environment, timeout=30)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("limit", "capabilities", "said"),
    [(8 << 20, 0, "8388608 bytes at most; raise it"), (8 << 20, 1 << 14, "any size"), (RLIM_INFINITY, 0, "any size")],
)
def test_probe_says_how_much_may_be_locked(
    limit: int, capabilities: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe.resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(probe, "_capabilities", lambda: capabilities)
    assert said in str(probe._memory()["may_register"])
