"""The companion socket's server, over real sockets, with the loops that a daemon may run on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from companion_kit import (
    HELLO,
    REGION_FD,
    WAIT_S,
    Hooks,
    RawEngine,
    frame,
    is_there,
    make,
    new_file,
    open_fds,
    serving,
    start_child,
    until,
)

from kvmover_proto.companion_pb2 import CompanionHello, CompanionRequest
from kvmoverd.adapters.memory.shared_page import EnginePages
from kvmoverd.core.errors import BadRegion, ConfigError, QueueFull
from kvmoverd.rpc.companion import SILENT_MAX, SessionPeer
from kvmoverd.rpc.companion_frames import FRAME_BYTES_MAX

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(scenario, 20))

    return run_scenario


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock.companion"


def test_hello_is_answered_with_the_session_and_the_daemon_knows_who_asked(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            welcome = (await engine.ask(HELLO)).welcome
            assert (welcome.session_id, welcome.boot_id, welcome.version) == ("s1", "boot", "1.2")
            assert (welcome.session_token, welcome.engine_endpoint) == (bytes(32), "unix:///x")
            assert hooks.peers == [SessionPeer(os.getpid(), os.getuid(), os.getgid(), "engine")]
            assert os.stat(path).st_mode & 0o777 == 0o600

    run(scenario())


def test_a_session_ends_once_when_the_engine_closes_its_socket(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)
            engine.sock.close()
            await until(lambda: hooks.closed_sessions)
        assert hooks.closed_sessions == [("s1", "it closed its socket")]

    run(scenario())


def test_a_stopping_daemon_ends_every_session_and_removes_its_socket(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (server, hooks, engine):
            other = RawEngine(path)
            await engine.ask(HELLO)
            await other.ask(HELLO)
            await server.stop()
            assert [why for _, why in hooks.closed_sessions] == ["the daemon stops"] * 2
            assert await engine.at_end() and await other.at_end()
            assert not is_there(path)
            other.sock.close()

    run(scenario())


def test_a_killed_engine_is_noticed_although_its_socket_lives_on_elsewhere(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, _engine):
            child, fd = await asyncio.to_thread(start_child, path)
            assert hooks.peers[0].pid == child.pid and not hooks.closed_sessions
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: hooks.closed_sessions)
            assert hooks.closed_sessions == [("s1", f"process {child.pid} ended")]
            child.wait(WAIT_S)
            os.close(fd)

    run(scenario())


def test_each_descriptor_gets_its_ticket_and_the_server_keeps_none(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)
            before = open_fds()
            for size in (100, 200):
                fd = new_file(size)
                assert (await engine.ask(REGION_FD, [fd])).fd_ticket.fd_ticket == size
                os.close(fd)
            assert hooks.labels == ["kv", "kv"]
            assert open_fds() == before

    run(scenario())


def test_descriptors_sent_ahead_reach_the_message_they_came_with(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, _hooks, engine):
            socket.send_fds(engine.sock, [frame(HELLO)], [])
            sizes = [10, 20, 30]
            for size in sizes:
                fd = new_file(size)
                socket.send_fds(engine.sock, [frame(REGION_FD)[:3]], [fd])
                engine.sock.send(frame(REGION_FD)[3:])
                os.close(fd)
            assert (await engine.reply()).welcome.session_id == "s1"
            assert [(await engine.reply()).fd_ticket.fd_ticket for _ in sizes] == sizes

    run(scenario())


@pytest.mark.parametrize("count", [0, 2, 8, 12])
def test_any_number_of_descriptors_but_one_is_refused_and_closed(run: Run, path: Path, count: int) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)
            before = open_fds()
            fds = [new_file() for _ in range(count)]
            refused = (await engine.ask(REGION_FD, fds)).error.message
            assert refused.startswith("BAD_REQUEST: ") and f"{min(count, 8)} descriptors" in refused
            for fd in fds:
                os.close(fd)
            assert open_fds() == before and not hooks.labels
            fd = new_file(7)
            assert (await engine.ask(REGION_FD, [fd])).fd_ticket.fd_ticket == 7
            os.close(fd)

    run(scenario())


def test_a_descriptor_that_the_node_refuses_leaves_the_session_alive(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)
            hooks.refusal = BadRegion("the file is not sealed")
            fd = new_file(7)
            assert (await engine.ask(REGION_FD, [fd])).error.message == "BAD_REGION: the file is not sealed"
            hooks.refusal = None
            assert (await engine.ask(REGION_FD, [fd])).fd_ticket.fd_ticket == 7
            os.close(fd)
            assert not hooks.closed_sessions

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (struct.pack("<I", FRAME_BYTES_MAX + 1), f"at most {FRAME_BYTES_MAX}"),
        (struct.pack("<I", 5) + b"\xff" * 5, "no CompanionRequest"),
        (struct.pack("<I", 0), "expected Hello, got an unknown kind"),
        (frame(REGION_FD), "expected Hello, got region_fd"),
        (frame(CompanionRequest(hello=CompanionHello(protocol=2))), "protocol 2 is refused, this daemon speaks 1"),
    ],
    ids=["oversized", "garbage", "empty", "no hello", "other protocol"],
)
def test_what_is_no_hello_is_told_why_and_cut_off(run: Run, path: Path, sent: bytes, said: str) -> None:
    async def scenario() -> None:
        async with serving(path) as (server, hooks, engine):
            engine.sock.send(sent)
            assert said in (await engine.reply()).error.message
            assert await engine.at_end()
            assert server.connections == 0 and not hooks.peers and not hooks.closed_sessions

    run(scenario())


@pytest.mark.parametrize("second", [frame(HELLO), struct.pack("<I", 4) + b"\xff" * 4], ids=["hello again", "garbage"])
def test_nonsense_inside_a_session_ends_it(run: Run, path: Path, second: bytes) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)
            engine.sock.send(second)
            said = (await engine.reply()).error.message
            assert await engine.at_end()
            ((session_id, why),) = hooks.closed_sessions
            assert session_id == "s1" and said == f"BAD_REQUEST: {why}"

    run(scenario())


@pytest.mark.parametrize("greeted", [False, True])
def test_a_message_that_is_never_finished_ends_at_the_deadline(run: Run, path: Path, greeted: bool) -> None:
    async def scenario() -> None:
        async with serving(path, frame_timeout_s=0.05) as (server, hooks, engine):
            if greeted:
                await engine.ask(HELLO)
                await asyncio.sleep(0.1)
                assert server.connections == 1, "a silent session may stay"
            engine.sock.send(frame(REGION_FD)[:5])
            assert "no whole message within 0.05 s" in (await engine.reply()).error.message
            assert await engine.at_end()
            assert len(hooks.closed_sessions) == greeted

    run(scenario())


def test_connections_beyond_the_limit_are_refused_until_one_goes(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path, connections_max=1) as (server, _, first):
            await first.ask(HELLO)
            second = RawEngine(path)
            refused = (await second.reply()).error.message
            assert refused == "QUEUE_FULL: 1 companion connections are open, at most 1 may be"
            assert await second.at_end()
            first.sock.close()
            await until(lambda: server.connections == 0)
            third = RawEngine(path)
            assert (await third.ask(HELLO)).welcome.session_id == "s2"
            for engine in (second, third):
                engine.sock.close()

    run(scenario())


def test_a_session_that_the_node_refuses_is_told_why(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            hooks.refusal = QueueFull("8 sessions are open, at most 8 may be")
            assert (await engine.ask(HELLO)).error.message == "QUEUE_FULL: 8 sessions are open, at most 8 may be"
            assert await engine.at_end()
            assert not hooks.closed_sessions

    run(scenario())


def test_a_fault_of_the_node_is_answered_and_ends_the_session(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)
            hooks.refusal = RuntimeError("broken")
            fd = new_file()
            assert (await engine.ask(REGION_FD, [fd])).error.message == "INTERNAL: RuntimeError: broken"
            assert hooks.closed_sessions == [("s1", "RuntimeError: broken")]
            os.close(fd)

    run(scenario())


def test_an_engine_that_reads_no_replies_is_dropped(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, hooks, engine):
            await engine.ask(HELLO)

            def flooded() -> bool:
                with suppress(OSError):
                    while True:
                        engine.sock.send(frame(REGION_FD))
                return bool(hooks.closed_sessions)

            await until(flooded)
            assert hooks.closed_sessions == [("s1", "it does not read its replies")]

    run(scenario())


def test_the_socket_of_a_dead_daemon_is_replaced_and_that_of_a_live_one_refused(run: Run, path: Path) -> None:
    async def scenario() -> None:
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(path))
        dead.close()
        async with serving(path) as (_, _hooks, engine):
            with pytest.raises(ConfigError, match="taken by a live daemon"):
                await make(path, Hooks()).start()
            assert (await engine.ask(HELLO)).welcome.session_id == "s1"

    run(scenario())


def test_a_path_that_can_not_be_had_is_a_config_error_that_names_it(run: Run, path: Path) -> None:
    path.write_text("not a socket")

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="exists and is no socket"):
            await make(path, Hooks()).start()
        for impossible in (path.parent / "none" / "x", path.parent / ("x" * 120)):
            with pytest.raises(ConfigError, match="can't listen at"):
                await make(impossible, Hooks()).start()

    run(scenario())


def test_a_stopping_server_leaves_the_socket_of_its_successor(run: Run, path: Path) -> None:
    async def scenario() -> None:
        first, second = make(path, Hooks()), make(path, Hooks())
        await first.start()
        os.unlink(path)
        await second.start()
        await first.stop()
        assert is_there(path)
        await second.stop()
        assert not is_there(path)

    run(scenario())


async def several(path: Path, count: int) -> list[RawEngine]:
    found = []
    for _ in range(count):
        found.append(RawEngine(path))
        await asyncio.sleep(0.001)
    return found


def test_silent_connections_keep_nobody_out(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path, connections_max=2) as (server, hooks, first):
            silent = await several(path, 3 * SILENT_MAX)
            await until(lambda: server.connections == SILENT_MAX)
            assert "have not said Hello" in (await first.reply()).error.message
            late = RawEngine(path)
            assert (await late.ask(HELLO)).welcome.session_id == "s1"
            assert (await silent[-1].ask(HELLO)).welcome.session_id == "s2"
            refused = (await silent[-2].ask(HELLO)).error.message
            assert refused == "QUEUE_FULL: 2 companion connections are open, at most 2 may be"
            for engine in (*silent, late):
                engine.sock.close()
            await until(lambda: server.connections == 0)
            assert len(hooks.closed_sessions) == 2

    run(scenario())


def test_the_oldest_silent_connection_of_the_user_who_has_most_of_them_goes_first(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (server, _, first):
            await until(lambda: server.connections == 1)
            (honest,) = server._silent
            honest.uid = 12345
            silent = await several(path, SILENT_MAX)
            assert "have not said Hello" in (await silent[0].reply()).error.message
            assert (await first.ask(HELLO)).welcome.session_id == "s1"
            for engine in silent:
                engine.sock.close()

    run(scenario())


PAGED = CompanionRequest(hello=CompanionHello(client="engine", protocol=1, progress_page=True))


def test_an_engine_that_asks_gets_four_descriptors_with_its_welcome_and_the_server_keeps_none(
    run: Run, path: Path
) -> None:
    async def scenario() -> None:
        async with serving(path) as (server, hooks, engine):
            hooks.open_pages = EnginePages
            await until(lambda: server.connections == 1)
            before = open_fds()
            await asyncio.get_running_loop().sock_sendall(engine.sock, frame(PAGED))
            await until(lambda: hooks.pages)
            found, fds, _, _ = socket.recv_fds(engine.sock, 65_536, 8)
            assert len(fds) == 4 and b"s1" in found
            (pages,) = hooks.pages
            assert open_fds() == before + 4 + 2, "our four, and the daemon's ends of the pipes"
            pages.wake()
            assert os.read(fds[2], 10) == b"\1"
            for fd in fds:
                os.close(fd)
            pages.close()

    run(scenario())


def test_without_pages_the_welcome_says_so(run: Run, path: Path) -> None:
    async def scenario() -> None:
        async with serving(path) as (_, _, engine):
            welcome = (await engine.ask(PAGED)).welcome
            assert (welcome.session_id, welcome.progress_entries) == ("s1", 0)

    run(scenario())
