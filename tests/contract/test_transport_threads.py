"""A system without more threads or descriptors: sends are refused, connections closed, and all goes on when it has some again."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from markers import needs_vm_readv
from transport_kit import WAIT_S, End, RawSender, cut, make_pair, noise, shm, tcp, untouched

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.core.errors import TransportRefused
from kvmoverd.core.status import Reason

STACK_BYTES = 1 << 47
"""A stack that no address space has room for."""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    before_bytes = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before_bytes)


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open so many more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("count", range(3))
@pytest.mark.parametrize("kind", [pytest.param("shm-remote", marks=needs_vm_readv), "tcp4"])
def test_a_send_that_no_descriptor_can_be_had_for_ends_and_the_next_one_goes(
    kind: str, count: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = make_pair(kind, tmp_path)
    source, destination = noise(rng, 10_000), untouched(10_000)
    slices = cut(destination, rng, 3)
    pair.receiver.expect(1, lambda layer, first_block: slices)
    with descriptors_left(count):
        done = pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(source, rng, 4)))
        assert done.reason in (Reason.POOL_EXHAUSTED, Reason.PEER_LOST)
    assert (destination == untouched(10_000)).all()
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(source, rng, 4))).reason is Reason.OK
    assert (destination == source).all()
    pair.close()


@pytest.mark.parametrize("kind", ["shm-local", pytest.param("shm-remote", marks=needs_vm_readv), "tcp4"])
def test_a_send_that_no_thread_can_be_had_for_is_refused_and_the_next_one_goes(
    kind: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pair = make_pair(kind, tmp_path)
    source, destination = noise(rng, 10_000), untouched(10_000)
    slices = cut(destination, rng, 3)
    pair.receiver.expect(1, lambda layer, first_block: slices)
    descriptors = set(os.listdir("/proc/self/fd"))
    with no_more_threads():
        for layer in range(3):
            done = pair.sender.sent(pair.sender.send(pair.route, 1, layer, cut(source, rng, 4)))
            assert done.reason is Reason.POOL_EXHAUSTED and "no more threads" in done.message
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert (destination == untouched(10_000)).all()
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 0, cut(source, rng, 4))).reason is Reason.OK
    assert (destination == source).all()
    pair.close()


def test_copies_go_on_with_the_threads_there_are(rng: np.random.Generator) -> None:
    end = End(shm(None, copy_threads=2), None)
    memory = untouched(100)
    slices = cut(memory, rng, 2)
    end.expect(1, lambda layer, first_block: slices)
    source = cut(noise(rng, 100), rng, 2)
    assert end.sent(end.send(None, 1, 0, source)).reason is Reason.OK
    with no_more_threads():
        assert end.sent(end.send(None, 1, 1, source)).reason is Reason.OK
    assert end.transport.close(WAIT_S)


def test_a_connection_that_no_thread_can_be_had_for_is_closed_and_the_listener_lives(rng: np.random.Generator) -> None:
    end = End(tcp("boot-2", inbound_max=1))
    memory = untouched(3)
    slices = cut(memory, rng, 1)
    end.expect(1, lambda layer, first_block: slices)
    with no_more_threads():
        for _ in range(3):
            with contextlib.suppress(ConnectionError):
                shut_out = RawSender(end.transport.endpoint)  # type: ignore[attr-defined]
                assert shut_out.closed_by_peer()
                shut_out.close()
    raw = RawSender(end.transport.endpoint).accepted()  # type: ignore[attr-defined]
    raw.header(1, 3)
    raw.sock.sendall(b"abc")
    assert raw.ack().status is Status.APPLIED
    raw.close()
    assert end.transport.close(WAIT_S)


def test_a_transport_that_cannot_listen_for_want_of_a_thread_is_refused_and_leaves_nothing_open(tmp_path: Path) -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    with no_more_threads():
        with pytest.raises(TransportRefused, match="no more threads"):
            tcp()
        with pytest.raises(TransportRefused, match="no more threads"):
            shm(tmp_path / "data.sock")
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert shm(tmp_path / "data.sock").close(WAIT_S)
