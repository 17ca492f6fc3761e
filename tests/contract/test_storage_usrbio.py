"""What the rings of 3FS may do to reads: short, failed, refused, late, doubled, in any order, or never."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_kit import UNEVEN, Driver, Slots, namespace, new_key
from usrbio_kit import (
    PIECE_BYTES,
    Shim,
    UsrbioShop,
    compile_shim,
    links,
    mounted,
    pool_names,
    same_modules,
    shared_arena,
)

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.usrbio_fds import RegisteredFds
from kvmoverd.adapters.storage.usrbio_iov import is_left_over, pool_name, reclaim_pools
from kvmoverd.adapters.storage.usrbio_library import PRIORITY_NORMAL, CqeStruct, IorStruct, Library
from kvmoverd.adapters.storage.usrbio_ring import UsrbioRing
from kvmoverd.adapters.storage.usrbio_rings import URGENT_RINGS, UsrbioRings
from kvmoverd.core.status import Reason

SPACE = namespace()
PAYLOAD = os.urandom(UNEVEN.block_bytes)
SILENCE_S = 0.3


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    with shared_arena(monkeypatch) as arena:
        yield arena


@pytest.fixture
def root(shim: Shim, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with mounted(shim, tmp_path, monkeypatch) as root:
        yield root


@pytest.fixture
def shop(shim: Shim, root: Path, arena: Arena) -> Iterator[UsrbioShop]:
    shop = UsrbioShop(shim, root, arena, silence_s=SILENCE_S)
    shop.storage.open_namespace(SPACE)
    yield shop
    shim.do(hang=0, wait_error=0)
    assert shop.storage.close(5.0)


@pytest.fixture
def slots(arena: Arena) -> Slots:
    return Slots(UNEVEN, 8)


@pytest.fixture
def key(driver: Driver, slots: Slots) -> bytes:
    """Of a stored block."""
    key = new_key()
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    return key


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5.0
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def read_all(driver: Driver, slots: Slots, key: bytes) -> list[Reason]:
    done = driver.run([driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(8)])
    return [completion.reason for completion in done]


def all_whole(slots: Slots) -> bool:
    return all(slots.payload(slot) == PAYLOAD for slot in range(8))


def test_a_read_that_stops_short_goes_on_where_it_stopped(shim: Shim, driver: Driver, slots: Slots, key: bytes) -> None:
    shim.do(short_bytes=9_973)
    assert read_all(driver, slots, key) == [Reason.OK] * 8 and all_whole(slots)
    assert shim.count("reads") == 8 * -(-UNEVEN.record_bytes // 9_973)


def test_a_read_that_creeps_is_left_to_threads(shim: Shim, driver: Driver, slots: Slots, key: bytes) -> None:
    shim.do(short_bytes=16)
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
    assert slots.payload(1) == PAYLOAD and 64 <= shim.count("reads") <= 66


def test_an_error_of_the_device_is_named(shim: Shim, driver: Driver, slots: Slots, key: bytes) -> None:
    shim.do(error=errno.EIO, error_times=-1)
    done = driver.read(SPACE, key, slots.fill(1, b""))
    assert done.reason is Reason.IO_ERROR and "EIO" in done.message


def test_a_file_that_went_away_under_a_read_is_a_miss(shim: Shim, driver: Driver, slots: Slots, key: bytes) -> None:
    shim.do(error=errno.ESTALE, error_times=-1)
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.MISS


def test_a_read_that_is_to_be_tried_again_is_and_not_for_ever(
    shim: Shim, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(error=errno.EAGAIN, error_times=20)
    assert read_all(driver, slots, key) == [Reason.OK] * 8 and all_whole(slots)
    shim.do(error=errno.EAGAIN, error_times=-1)
    done = driver.read(SPACE, key, slots.fill(1, b""))
    assert done.reason is Reason.IO_ERROR and "EAGAIN" in done.message


def test_a_full_ring_takes_the_reads_later(
    shim: Shim, shop: UsrbioShop, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(full_times=6)
    assert read_all(driver, slots, key) == [Reason.OK] * 8 and all_whole(slots)
    assert shim.count("reads") == 8 and shop.usrbio.reads.refused == ""


def test_what_the_library_does_not_take_goes_by_threads_and_is_counted(
    shim: Shim, shop: UsrbioShop, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(refuse_fd=errno.EBADF)
    assert read_all(driver, slots, key) == [Reason.OK] * 8 and all_whole(slots)
    assert shim.count("reads") == 0
    assert shop.storage.facts.note.startswith("8 reads went by threads, ") and "hf3fs_reg_fd" in shop.storage.facts.note


def test_memory_outside_the_pool_is_read_into_by_threads(
    shim: Shim, shop: UsrbioShop, driver: Driver, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    private = Slots(UNEVEN, 1)
    assert driver.read(SPACE, key, private.fill(0, b"")).reason is Reason.OK
    assert private.payload(0) == PAYLOAD and "1 reads went by threads" in shop.storage.facts.note


def test_completions_that_nobody_waits_for_are_dropped_and_counted(
    shim: Shim, shop: UsrbioShop, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(strays=3)
    assert read_all(driver, slots, key) == [Reason.OK] * 8 and all_whole(slots)
    until(lambda: shop.usrbio.reads.strays == 3 - shim.knob("strays"))
    assert shop.usrbio.reads.strays > 0 and "stray completions" in shop.storage.facts.note


def test_reads_that_nobody_waits_for_go_through_the_ring_of_low_priority(
    shim: Shim, driver: Driver, slots: Slots, key: bytes
) -> None:
    hints = [driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(4)]
    for op in hints:
        op.low = True
    urgent = [driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(4, 8)]
    assert {done.reason for done in driver.run([*hints, *urgent])} == {Reason.OK} and all_whole(slots)
    assert (shim.count("low_reads"), shim.count("reads")) == (4, 8)


def test_a_ring_that_hangs_delays_no_close_and_keeps_its_slot(
    shim: Shim, shop: UsrbioShop, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(hang=1)
    shop.storage.submit([driver.read_op(SPACE, key, slots.fill(1, b""))])
    until(lambda: shim.count("submits") > 0)
    began_s = time.monotonic()
    assert not shop.storage.close(0.3)
    assert time.monotonic() - began_s < 1.0 and shop.storage.poll(8) == []
    assert len(links(shop.root)) == URGENT_RINGS + 2, "the daemon may still write: neither rings nor pool go away"
    shim.do(hang=0)
    assert [done.reason for done in driver.collect(1)] == [Reason.OK] and slots.payload(1) == PAYLOAD
    assert shop.storage.close(5.0) and links(shop.root) == []


def test_after_a_long_silence_reads_go_by_threads_and_the_late_one_still_ends_once(
    shim: Shim, shop: UsrbioShop, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(hang=1)
    shop.storage.submit([driver.read_op(SPACE, key, slots.fill(1, b""))])
    until(lambda: "none has ended for 0.3 s" in shop.usrbio.reads.poisoned)
    assert driver.read(SPACE, key, slots.fill(2, b"")).reason is Reason.OK
    assert "the ring is out of use" in shop.storage.facts.note
    shim.do(hang=0)
    assert [done.reason for done in driver.collect(1)] == [Reason.OK]
    assert slots.payload(1) == slots.payload(2) == PAYLOAD


def test_a_ring_that_says_errors_is_asked_for_what_it_has_and_gets_no_more(
    shim: Shim, shop: UsrbioShop, driver: Driver, slots: Slots, key: bytes
) -> None:
    shim.do(wait_error=errno.EINVAL)
    shop.storage.submit([driver.read_op(SPACE, key, slots.fill(1, b""))])
    until(lambda: "hf3fs_wait_for_ios" in shop.usrbio.reads.poisoned)
    assert driver.read(SPACE, key, slots.fill(2, b"")).reason is Reason.OK
    shim.do(wait_error=0)
    assert [done.reason for done in driver.collect(1)] == [Reason.OK]
    assert slots.payload(1) == slots.payload(2) == PAYLOAD


def test_a_descriptor_is_registered_once_and_its_number_may_come_again(shim: Shim, root: Path) -> None:
    library = Library(shim.path)
    fds = RegisteredFds(library)
    (root / "first").write_bytes(b"1")
    (root / "second").write_bytes(b"2")
    first = os.open(root / "first", os.O_RDONLY)
    for _ in range(2):
        fds.register(first)
    assert shim.count("registered") == 1
    fds.forget(first)
    os.close(first)
    second = os.open(root / "second", os.O_RDONLY)
    assert second == first, "the lowest free number is given"
    fds.register(second)
    with pytest.raises(OSError, match="hf3fs_reg_fd") as refused:
        library.register(second)
    assert refused.value.errno == errno.EINVAL
    fds.forget(second)
    fds.forget(second)
    os.close(second)
    assert shim.count("twice") == 1
    shim.reset()


def test_a_file_that_is_not_on_3fs_can_not_be_registered(shim: Shim, root: Path, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="hf3fs_reg_fd") as refused:
        RegisteredFds(Library(shim.path)).register(fd)
    assert refused.value.errno == errno.EBADF
    os.close(fd)


def test_an_idle_ring_says_so_after_its_time(shim: Shim, root: Path) -> None:
    ring = UsrbioRing(Library(shim.path), str(root.parent), reads_max=4, priority=PRIORITY_NORMAL)
    began_s = time.monotonic()
    assert ring.reap(0.05) == [] and 0.04 < time.monotonic() - began_s < 1.0
    ring.close()


def test_the_pool_is_published_in_pieces_and_has_no_name_of_its_own(shop: UsrbioShop) -> None:
    published = [name for name in links(shop.root) if ".b" in name]
    assert len(published) == 1
    assert int(published[0].rpartition(".b")[2]) == PIECE_BYTES and pool_names() == []


_KILLED = """
import os, signal
from kvmoverd.adapters.memory.arena import Arena
arena = Arena(8 << 20, 2 << 20, shared=True)
arena.touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_memory_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    killed = subprocess.run([sys.executable, "-c", _KILLED], env=same_modules(), check=False, timeout=30)
    assert killed.returncode == -signal.SIGKILL
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvmover")}


def test_pools_of_ended_processes_are_taken_away_and_those_of_live_ones_stay(root: Path) -> None:
    mine = pool_name()
    pid, _, start = mine.split(".")[2].partition("-")
    earlier = mine.replace(f"{pid}-{start}", f"{pid}-{int(start) - 1}")
    elsewhere = earlier.replace(mine.split(".")[1], "1")
    assert [is_left_over(name) for name in (mine, earlier, elsewhere, "sem.other", "kvmover-pool")] == [
        False,
        True,
        False,
        False,
        False,
    ]
    directory = root.parent / "3fs-virt" / "iovs"
    for number, name in enumerate((mine, earlier, elsewhere)):
        os.symlink(f"/dev/shm/{name}", directory / f"link-{number}")
    Path("/dev/shm", earlier).write_bytes(b"")
    assert reclaim_pools(str(root.parent)) == 2
    assert links(root) == ["link-0", "link-2"] and pool_names() == []
    for name in links(root):
        (directory / name).unlink()


def test_a_read_across_two_pieces_is_what_the_daemon_refuses(
    shim: Shim, shop: UsrbioShop, driver: Driver, arena: Arena, key: bytes
) -> None:
    """The node's slots never lie so: the check shows that the pieces are known to the daemon."""
    across = driver.read_op(SPACE, key, arena.address + PIECE_BYTES - 4096)
    done = driver.run([across])[0]
    assert done.reason is Reason.IO_ERROR and "EINVAL" in done.message and shim.count("bad_memory") == 1
    shim.reset()


def test_a_depth_above_zero_would_wait_for_exactly_so_many_reads(shim: Shim, root: Path, arena: Arena) -> None:
    """Why rings are made with depth 0."""
    rings = UsrbioRings(Library(shim.path), arena, root, PIECE_BYTES, depth=4)
    (root / "file").write_bytes(b"1" * 4096)
    fd = os.open(root / "file", os.O_RDONLY)
    rings.library.register(fd)
    ring = rings.low
    library = rings.library
    exact = IorStruct()
    assert library._calls.hf3fs_iorcreate3(exact, os.fsencode(root.parent), 8, True, 2, 0, 0, -1) == 0
    ended = (CqeStruct * 8)()
    for number, found in ((1, 0), (2, 2)):
        library.prepare(exact, ring._iov, fd, arena.address, 4096, 0, number)
        library.submit(exact)
        assert library.wait(exact, ended, 0.05) == found, "the ends of a batch come together"
    library.destroy_ring(exact)
    library.deregister(fd)
    os.close(fd)
    rings.close()
