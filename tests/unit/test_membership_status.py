"""How well a daemon knows the other nodes, as it and the command line tell it; with etcd over a real one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from rpc_kit import rpc_kit

from kvmoverd import cli
from kvmoverd.rpc.status_client import plain_status
from tests.contract.etcd_kit import PREFIX, Recorder, joined, needs_etcd, running, until

QUIET = {"kind": "static", "members": 1, "silent_ms": 0, "told": True, "why": ""}


async def test_a_fixed_list_is_known_for_good(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        found = plain_status(await kit.status())["membership"]
        assert found == QUIET | {"members": len(kit.daemon.config.peers)}


async def test_the_command_line_says_nothing_of_members_that_are_well_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with rpc_kit(tmp_path) as kit:
        assert await asyncio.to_thread(cli.main, ["status", "--socket", str(kit.socket)]) == 0
        printed = capsys.readouterr().out
        assert "membership:" in printed
        assert "warning: other nodes" not in printed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        (
            {"silent_ms": 12_345, "why": "no answer"},
            [
                "warning: other nodes are known as they were 12.3 s ago: no answer; see [membership] in the daemon's config"
            ],
        ),
        (
            {"told": False, "why": "no answer"},
            ["warning: other nodes can't find this one: no answer; see [membership] in the daemon's config"],
        ),
    ],
)
def test_the_command_line_warns_of_members_that_are_not_seen(changed: dict[str, Any], words: list[str]) -> None:
    assert cli._unseen({"membership": QUIET | changed}) == words


def test_a_daemon_of_an_earlier_version_says_nothing_of_members() -> None:
    assert cli._unseen({}) == []


@pytest.mark.contract
@needs_etcd
async def test_status_says_for_how_long_etcd_was_not_seen_and_why(tmp_path: Path) -> None:
    with running(tmp_path) as etcd:
        section = {"endpoints": [etcd.endpoint], "prefix": PREFIX, "ttl": "2s", "timeout": "300ms"}
        async with rpc_kit(tmp_path, membership={"kind": "etcd", "etcd": section}) as kit:
            found = plain_status(await kit.status())["membership"]
            assert found == {"kind": "etcd", "members": 1, "silent_ms": 0, "told": True, "why": ""}
            etcd.signal(signal.SIGSTOP)
            try:
                state = kit.daemon._membership.state
                await until(lambda: state().silent_s > 0 and not state().is_told, "well known", 12.0)
                found = plain_status(await kit.status())["membership"]
                assert found["silent_ms"] > 1_000
                assert (found["members"], found["told"]) == (1, False)
                assert etcd.endpoint in found["why"] or "does not answer" in found["why"]
            finally:
                etcd.signal(signal.SIGCONT)
            await until(lambda: not state().why, state, 12.0)
            assert (state().silent_s, state().is_told) == (0.0, True)


@pytest.mark.contract
@needs_etcd
async def test_a_daemon_whose_key_was_deleted_by_hand_tells_the_others_of_itself_again(tmp_path: Path) -> None:
    recorder = Recorder()
    with running(tmp_path) as etcd:
        section = {"endpoints": [etcd.endpoint], "prefix": PREFIX, "ttl": "60s"}
        async with (
            rpc_kit(tmp_path, membership={"kind": "etcd", "etcd": section}) as kit,
            joined(etcd.endpoint, told=recorder) as other,
        ):
            name = kit.daemon.config.node.name
            before = other.member(name)
            assert before is not None
            for told in (3, 5, 7):
                await asyncio.to_thread(etcd.ctl, "del", f"{PREFIX}/nodes/{name}")
                await until(lambda told=told: len(recorder.told) >= told, recorder.told)  # type: ignore[misc]
                assert other.member(name) == before
            await asyncio.sleep(0.5)
            assert len(recorder.told) == 7, "it has come back once for each time"
