"""The queues of `config/fabric/tcp/tc.sh` for real: two TCP streams over a slow link between two network namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from kvmoverd.adapters.transport.lane import Lane, set_lane
from kvmoverd.core.qos import KV_LANE
from tests.markers import skip_no_queue

pytestmark = pytest.mark.contract

SCRIPT = Path(__file__).resolve().parents[2] / "config" / "fabric" / "tcp" / "tc.sh"
CLONE_NEWNET = 0x40000000
RATE_MBIT = 40
SECONDS = 0.5
SETTLE_S = 0.3
ROUNDS = 2
KV, MODEL = Lane(dscp=KV_LANE.dscp, so_priority=1), Lane(dscp=26, so_priority=6)
T = TypeVar("T")


class Namespace:
    """A network of its own, for as long as its one thread lives; what it makes, sockets and processes, belongs to it."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.thread_id = self.call(threading.get_native_id)
        if self.call(lambda: ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET)):
            pytest.skip(skip_no_queue("unshare refuses"))

    def call(self, step: Callable[[], T]) -> T:
        return self.thread.submit(step).result(timeout=20.0)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.call(lambda: subprocess.run(command, capture_output=True, text=True, check=False, timeout=10))

    def must(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def ends() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces and a cable: 10.99.0.1 and fd99::1 on `near`, .2 and ::2 on `far`. Gone with the threads."""
    if os.geteuid():
        pytest.skip(skip_no_queue("not root"))
    near, far = Namespace(), Namespace()
    made = near.run("ip", "link", "add", "near", "type", "veth", "peer", "name", "far")
    if made.returncode:
        pytest.skip(skip_no_queue(made.stderr.strip()))
    near.must("ip", "link", "set", "far", "netns", str(far.thread_id))
    for end, name, number in ((near, "near", 1), (far, "far", 2)):
        end.must("ip", "address", "add", f"10.99.0.{number}/24", "dev", name)
        end.must("ip", "address", "add", f"fd99::{number}/64", "dev", name, "nodad")
        end.must("ip", "link", "set", name, "up")
    yield near, far
    near.thread.shutdown()
    far.thread.shutdown()


class Stream:
    """One TCP stream from `near` to `far`, as fast as it goes; what arrives is counted."""

    def __init__(self, ends: tuple[Namespace, Namespace], lane: Lane, host: str) -> None:
        near, far = ends
        server = far.call(lambda: socket.create_server((host, 0), family=self._family(host)))
        port = server.getsockname()[1]
        self.sender = near.call(lambda: socket.socket(self._family(host)))
        set_lane(self.sender, lane)
        self.sender.settimeout(20.0)
        near.call(lambda: self.sender.connect((host, port)))
        server.settimeout(10.0)
        self.receiver, _ = server.accept()
        self.receiver.settimeout(20.0)
        server.close()
        self.arrived_bytes = 0
        self.threads = [threading.Thread(target=step) for step in (self._send, self._receive)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    @staticmethod
    def _family(host: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in host else socket.AF_INET

    def _send(self) -> None:
        piece = bytes(1 << 16)
        with contextlib.suppress(OSError):
            while True:
                self.sender.sendall(piece)

    def _receive(self) -> None:
        room = bytearray(1 << 16)
        with contextlib.suppress(OSError):
            while taken := self.receiver.recv_into(room):
                self.arrived_bytes += taken

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(20.0)
            assert not thread.is_alive()
        self.sender.close()
        self.receiver.close()


def rates(ends: tuple[Namespace, Namespace], *lanes: Lane, host: str = "10.99.0.2") -> list[float]:
    """Mbit/s of one stream for each lane, all at once."""
    # All connect first: a handshake of KV's would wait for as long as the model fills the link.
    streams = [Stream(ends, lane, host) for lane in lanes]
    for stream in streams:
        stream.start()
    try:
        time.sleep(SETTLE_S)
        before = [stream.arrived_bytes for stream in streams]
        began_s = time.monotonic()
        time.sleep(SECONDS)
        span_s = time.monotonic() - began_s
        return [(stream.arrived_bytes - was) * 8e-6 / span_s for stream, was in zip(streams, before, strict=True)]
    finally:
        for stream in streams:
            stream.close()


def set_up(near: Namespace, kind: str) -> None:
    done = near.run(str(SCRIPT), "near", f"{RATE_MBIT}mbit", kind)
    if "Specified qdisc kind is unknown" in done.stderr:
        pytest.skip(skip_no_queue(f"none of kind {kind}"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("host", ["10.99.0.2", "fd99::2"])
@pytest.mark.parametrize("kind", ["prio", "ets", "htb"])
def test_model_traffic_keeps_its_share_beside_saturating_kv(
    ends: tuple[Namespace, Namespace], kind: str, host: str
) -> None:
    set_up(ends[0], kind)
    # A busy machine spoils a round; a queue that does not sort spoils them all.
    found = [spared(ends, host) for _ in range(ROUNDS)]
    assert any(kept >= 0.8 * alone and kv <= 0.2 * kv_alone for alone, kept, kv, kv_alone in found), found


def spared(ends: tuple[Namespace, Namespace], host: str) -> tuple[float, float, float, float]:
    """Mbit/s of the model alone and beside KV, and of KV beside the model and alone."""
    (alone,) = rates(ends, MODEL, host=host)
    kept, kv = rates(ends, MODEL, KV, host=host)
    (kv_alone,) = rates(ends, KV, host=host)
    return alone, kept, kv, kv_alone


def test_without_the_profile_kv_takes_a_good_part_of_the_link(ends: tuple[Namespace, Namespace]) -> None:
    shaper = ("tc", "qdisc", "add", "dev", "near", "root", "tbf", "rate", f"{RATE_MBIT}mbit", "burst", "40000")
    done = ends[0].run(*shaper, "latency", "50ms")
    if done.returncode:
        pytest.skip(skip_no_queue(done.stderr.strip()))
    kept, kv = rates(ends, MODEL, KV)
    # TCP is not fair over a second; with the profile it is a hundredth.
    assert kv > 0.06 * (kept + kv)


def test_a_floor_keeps_kv_moving_while_the_model_fills_the_link(ends: tuple[Namespace, Namespace]) -> None:
    set_up(ends[0], "htb")
    _, kv = rates(ends, MODEL, KV)
    assert kv > 0.002 * RATE_MBIT


def test_undo_leaves_no_queue_behind_and_may_be_said_twice(ends: tuple[Namespace, Namespace]) -> None:
    near = ends[0]
    before = near.must("tc", "qdisc", "show", "dev", "near")
    set_up(near, "htb")
    assert "htb" in near.must(str(SCRIPT), "near", "show")
    for _ in range(2):
        near.must(str(SCRIPT), "near", "undo")
        assert near.must("tc", "qdisc", "show", "dev", "near") == before


def test_a_queue_that_can_not_be_made_whole_is_not_left_half(ends: tuple[Namespace, Namespace], tmp_path: Path) -> None:
    near = ends[0]
    before = near.must("tc", "qdisc", "show", "dev", "near")
    # A tc that refuses filters: as on a kernel without u32.
    fake = tmp_path / "tc"
    fake.write_text('#!/bin/sh\n[ "$1" = filter ] && exit 2\nexec /usr/sbin/tc "$@"\n')
    fake.chmod(0o755)
    done = near.run("env", f"PATH={tmp_path}:{os.environ['PATH']}", str(SCRIPT), "near", "80mbit", "htb")
    assert done.returncode
    assert near.must("tc", "qdisc", "show", "dev", "near") == before
