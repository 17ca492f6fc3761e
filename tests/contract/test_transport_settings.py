"""Lanes, listening places, frames' bounds: what the settings of a transport do, and what is refused at start."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from markers import needs_compiled_copy, needs_huge_pages, needs_ipv6, needs_sums, needs_vm_readv
from transport_kit import KEY, LANE, WAIT_S, End, check_key, cut, make_pair, noise, shm, tcp, untouched

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.frames import (
    FRAME_BYTES,
    FRAME_BYTES_MAX,
    PREFACE_BYTES,
    SLICES_MAX,
    Ack,
    BodyKind,
    Frame,
    FrameError,
    Preface,
    Status,
)
from kvmoverd.adapters.transport.lane import Lane, set_lane
from kvmoverd.adapters.transport.shm import ShmTransport
from kvmoverd.adapters.transport.tcp import TcpTransport, split_endpoint
from kvmoverd.adapters.transport.unix import PATH_BYTES_MAX
from kvmoverd.core.errors import ConfigError
from kvmoverd.core.layout import Layout
from kvmoverd.core.record import chained_crcs, memory_view
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Send, Sink

MADV_REMOVE = 9


def lane_of(sock: socket.socket) -> tuple[int, int]:
    if sock.family == socket.AF_INET6:
        field = sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
    else:
        field = sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)
    return field >> 2, sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)


def own_connections(port: int) -> list[socket.socket]:
    """Copies of this process's connected TCP sockets that have `port` at either end."""
    found: dict[object, socket.socket] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        ends: tuple[object, ...] = ()
        with contextlib.suppress(OSError):
            ends = sock.getsockname(), sock.getpeername()
        # The number of the descriptor that listed the directory is listed too, and taken by the first copy.
        if any(isinstance(end, tuple) and port == end[1] for end in ends) and ends not in found:
            found[ends] = sock
        else:
            sock.close()
    return list(found.values())


@pytest.mark.parametrize("kind", ["tcp4", pytest.param("tcp6", marks=needs_ipv6)])
def test_both_ends_of_a_connection_ride_on_the_lane(kind: str, tmp_path: Path) -> None:
    pair = make_pair(kind, tmp_path)
    memory = untouched(10)
    slices = cut(memory, np.random.default_rng(1), 2)
    pair.receiver.expect(1, lambda layer, first_block: slices)
    assert pair.route is not None
    assert pair.sender.sent(pair.sender.send(pair.route, 1, 0, slices)).reason is Reason.OK
    ends = own_connections(split_endpoint(pair.route.endpoint)[1])
    assert [lane_of(sock) for sock in ends] == [(LANE.dscp, LANE.so_priority)] * 2
    assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in ends)
    assert all(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for sock in ends)
    assert {sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in ends} == {5_000}
    for sock in ends:
        sock.close()
    for end in (pair.sender, pair.receiver):
        assert end.transport.lane_text == "DSCP 8, SO_PRIORITY 1"  # type: ignore[attr-defined]
    pair.close()


def test_shared_memory_says_that_it_has_no_lane(tmp_path: Path) -> None:
    pair = make_pair("shm-remote", tmp_path)
    assert pair.sender.transport.lane_text == "shared memory: no network, no lane"  # type: ignore[attr-defined]
    pair.close()


def test_a_lane_that_the_kernel_does_not_set_is_told() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        assert set_lane(sock, LANE).startswith("DSCP 8 can't be set: ")


@pytest.mark.parametrize(("dscp", "so_priority"), [(64, 0), (-1, 0), (0, 7), (0, -1)])
def test_a_class_that_does_not_exist_is_a_config_error(dscp: int, so_priority: int) -> None:
    with pytest.raises(ConfigError, match=r"transport\.(dscp|so_priority) is "):
        Lane(dscp, so_priority)


def test_port_0_is_any_port_and_the_endpoint_says_which() -> None:
    transport = tcp()
    host, port = split_endpoint(transport.endpoint)
    assert host == "127.0.0.1" and port > 0
    with pytest.raises(ConfigError, match=rf"transport\.listen is 127\.0\.0\.1:{port}: .*in use"):
        tcp(port=port)
    assert transport.close(WAIT_S)


def test_an_address_of_another_machine_is_refused_and_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"transport\.listen is 192\.0\.2\.1:0"):
        TcpTransport("a", "boot-1", "192.0.2.1", 0, lane=LANE, check_key=check_key)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_data_socket_belongs_to_its_owner_and_goes_with_its_transport(tmp_path: Path) -> None:
    path = tmp_path / "data.sock"
    transport = shm(path)
    assert transport.endpoint == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="another process listens there"):
        shm(path)
    assert transport.close(WAIT_S)
    assert not path.exists()


def test_a_dead_daemons_socket_is_replaced_but_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "data.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert shm(path).close(WAIT_S)
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is no socket"):
        shm(path)
    assert path.read_text() == "precious"


def test_a_successors_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data.sock"
    first = shm(path)
    path.rename(tmp_path / "moved.sock")
    second = shm(path)
    assert first.close(WAIT_S)
    assert path.exists()
    assert second.close(WAIT_S)


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"more than {PATH_BYTES_MAX} bytes"):
        shm(tmp_path / ("x" * PATH_BYTES_MAX))


@needs_vm_readv
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled_copy), False])
@pytest.mark.parametrize("from_arena", [True, False])
def test_copies_into_and_out_of_the_arena_are_both_right(from_arena: bool, compiled: bool) -> None:
    arena = Arena(4 << 20, 4 << 20)
    arena.touch()
    rng = np.random.default_rng(2)
    end = End(ShmTransport("a", "boot-1", None, check_key=check_key, arena=arena, compiled=compiled), None)
    inside = np.frombuffer(memory_view(arena.address, arena.size_bytes), dtype=np.uint8)
    outside = noise(rng, arena.size_bytes)
    inside[:] = noise(rng, arena.size_bytes)
    source, destination = (inside, outside) if from_arena else (outside, inside)
    slices = cut(destination, rng, 70)
    end.expect(1, lambda layer, first_block: slices)
    assert end.sent(end.send(None, 1, 0, cut(source, rng, 90))).reason is Reason.OK
    assert (inside == outside).all()
    said = "compiled, process_vm_readv for hugetlb regions" if compiled else "process_vm_readv"
    assert end.transport.copy_text == said  # type: ignore[attr-defined]
    assert end.transport.close(WAIT_S)
    arena.close()


@needs_vm_readv
@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_sums), False])
def test_a_sink_that_wants_sums_has_them_before_its_layer_is_told_or_never(compiled: bool) -> None:
    layout = Layout(1, ((41_984,), (13,), (100_000,)))
    source = noise(np.random.default_rng(3), 2 * layout.block_bytes)
    destination, told = untouched(len(source)), list[tuple[int, bool, list[list[int]]]]()
    end = End(ShmTransport("a", "boot-1", None, check_key=check_key, compiled=compiled), None)

    def summed(layer: int, sums: npt.NDArray[np.uint32]) -> None:
        told.append((layer, bool((destination == source).all()), sums.tolist()))

    slices, ends = cut(destination, np.random.default_rng(4), 9), np.cumsum(layout.layer_bytes, dtype=np.uint64)
    end.transport.expect(Sink(1, lambda layer, first_block: slices, None, ends, summed))
    assert end.sent(end.send(None, 1, 5, cut(source, np.random.default_rng(5), 7))).reason is Reason.OK
    assert (destination == source).all()
    blocks = source.reshape(2, -1)
    expected = [list(chained_crcs(memoryview(block.tobytes()), layout)) for block in blocks]
    assert told == ([(5, True, expected)] if compiled else [])
    assert end.transport.close(WAIT_S)


@needs_huge_pages
@needs_vm_readv
def test_a_hole_that_an_engine_makes_in_huge_pages_fails_a_copy_and_nothing_else() -> None:
    """By the time of the copy there is no page left to fill the hole with: a touch would be a SIGBUS."""
    huge_bytes = 2 << 20
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, huge_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    regions, slices = Regions(), cut(noise(np.random.default_rng(1), 1_000), np.random.default_rng(2), 3)
    region = regions.map(fd)
    os.close(fd)
    end = End(ShmTransport("a", "boot-1", None, check_key=check_key, regions=regions), None)
    end.expect(1, lambda layer, first_block: np.array([[region.address, 1_000]], dtype=np.uint64))
    assert end.sent(end.send(None, 1, 0, slices)).reason is Reason.OK
    libc.advise(region.address, huge_bytes, MADV_REMOVE)
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_HUGETLB
    taken = libc.map_memory(free * huge_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags)
    libc.advise(taken, free * huge_bytes, libc.MADV_POPULATE_WRITE)
    done = end.sent(end.send(None, 1, 1, slices))
    libc.unmap_memory(taken, free * huge_bytes)
    assert done.reason is Reason.INTERNAL and "Bad address" in done.message
    assert end.sent(end.send(None, 1, 1, slices)).reason is Reason.OK
    assert end.transport.close(WAIT_S)
    region.close()


def test_a_send_without_the_means_to_move_it_is_a_broken_promise() -> None:
    nothing = np.zeros((0, 2), dtype=np.uint64)
    network, local = tcp(), shm(None)
    with pytest.raises(AssertionError, match="has no route"):
        network.submit([Send(1, None, 1, 0, 0, nothing)])
    assert local.endpoint == "" and local.sent_bytes() == {}
    assert network.close(WAIT_S) and local.close(WAIT_S)


def test_headers_have_one_size_and_say_the_same_when_read_back() -> None:
    preface = Preface("ü" * 128, "b" * 64, KEY, 2**64 - 1)
    assert len(preface.encode()) == PREFACE_BYTES and Preface.decode(preface.encode()) == preface
    frame = Frame(BodyKind.ADDRESSES, 7, 2**64 - 1, 60, 2**32 - 1, FRAME_BYTES_MAX, SLICES_MAX)
    assert len(frame.encode()) == FRAME_BYTES and Frame.decode(frame.encode()) == frame
    ack = Ack(7, Status.MISMATCH, 0, 12)
    assert Ack.decode(ack.encode()) == ack


@pytest.mark.parametrize(
    "frame",
    [
        Frame(BodyKind.PAYLOAD, 1, 1, 0, 0, FRAME_BYTES_MAX + 1),
        Frame(BodyKind.PAYLOAD, 1, 1, 0, 0, 10, slices=1),
        Frame(BodyKind.ADDRESSES, 1, 1, 0, 0, 10, slices=SLICES_MAX + 1),
        Frame(BodyKind.PAYLOAD, 1, 1, 2**32, 0, 10),
        Frame(BodyKind.PAYLOAD, 1, 1, 0, 2**32, 10),
        Frame(BodyKind.PAYLOAD, 1, 2**64, 0, 0, 10),
    ],
    ids=["bytes", "rows of a payload", "rows", "layer", "block", "sink"],
)
def test_a_frame_out_of_its_bounds_is_not_written(frame: Frame) -> None:
    with pytest.raises(FrameError):
        frame.encode()


@pytest.mark.parametrize(
    "preface",
    [
        Preface("", "b", KEY, 1),
        Preface("a" * 129, "b", KEY, 1),
        Preface("a", "", KEY, 1),
        Preface("a", "b" * 65, KEY, 1),
    ],
    ids=["no name", "long name", "no boot", "long boot"],
)
def test_a_preface_out_of_its_bounds_is_not_written(preface: Preface) -> None:
    with pytest.raises(FrameError, match="1 to 128 characters"):
        preface.encode()


def test_a_preface_of_another_protocol_or_with_bad_names_is_not_believed() -> None:
    good = Preface("a", "b", KEY, 1).encode()
    for at, value in ((0, b"X"), (8, b"\x01"), (52, b"\xff\xff"), (56, b"\xff")):
        with pytest.raises(FrameError):
            Preface.decode(good[:at] + value + good[at + len(value) :])
    with pytest.raises(FrameError, match="the key has 3 bytes"):
        Preface("a", "b", b"key", 1).encode()
    with pytest.raises(FrameError, match="ack with status 9"):
        Ack.decode(b"KVMA\x09" + bytes(27))
