"""Faults that files can show: system calls that do less or fail, damaged names, and workers that never come back."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from storage_kit import UNEVEN, Driver, FileShop, Slots, namespace, new_key, threads_storage, until

from kvmoverd.adapters.storage import block_io
from kvmoverd.adapters.storage.block_io import choose_io, read_into
from kvmoverd.core.keys import ROOT
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockWrite

SPACE = namespace()
PAYLOAD = os.urandom(UNEVEN.block_bytes)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[FileShop]:
    shop = FileShop(tmp_path, direct=False)
    shop.storage.open_namespace(SPACE)
    yield shop
    assert shop.storage.close(5.0)


def test_system_calls_that_move_less_than_asked_are_carried_on(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, slots: Slots
) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    calls: list[int] = []

    def short_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        return preadv(fd, [buffers[0][:5000]], offset)

    def short_write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return pwritev(fd, [buffers[0][:9000]], offset)

    monkeypatch.setattr(os, "preadv", short_read)
    monkeypatch.setattr(os, "pwritev", short_write)
    key = new_key()
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
    assert slots.payload(1) == PAYLOAD
    assert len(calls) > 5 and all(offset % 4096 == 0 for offset in calls), "direct reads must start at a page"


def test_a_write_that_moves_nothing_fails_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    key = new_key()
    done = driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    assert done.reason is Reason.IO_ERROR and f"0 of {UNEVEN.record_bytes} bytes" in done.message
    assert driver.present(SPACE, key) == 0 and list((shop.root / "kvm1/.tmp").iterdir()) == []


def test_a_fault_that_is_gone_at_the_second_look_costs_no_block(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, slots: Slots
) -> None:
    key = new_key()
    looks: list[int] = []

    def flaky(fd: int, record: memoryview, offset_bytes: int) -> int:
        got = read_into(fd, record, offset_bytes)
        record[4096] ^= 1 if not looks else 0
        looks.append(got)
        return got

    driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    monkeypatch.setattr("kvmoverd.adapters.storage.block_files.read_into", flaky)
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
    assert len(looks) == 2 and slots.payload(1) == PAYLOAD and driver.present(SPACE, key) == 1


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOMEM, Reason.IO_ERROR), (errno.ESTALE, Reason.MISS), (errno.EINVAL, Reason.IO_ERROR)],
)
def test_an_errno_of_a_read_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, slots: Slots, number: int, reason: Reason
) -> None:
    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    key = new_key()
    driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    monkeypatch.setattr(os, "preadv", fail)
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is reason and done.message.startswith(errno.errorcode[number])
    assert driver.storage.counters.failed_ops == (reason is Reason.IO_ERROR)
    assert driver.present(SPACE, key) == 1, "such an error says nothing about the block"


def test_a_block_that_the_device_fails_to_read_is_left_alone_until_it_is_stored_anew(
    monkeypatch: pytest.MonkeyPatch, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    preadv, broken = os.preadv, True

    def fail(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    key, other = new_key(), new_key()
    driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    driver.write(SPACE, other, slots.fill(0, PAYLOAD))
    monkeypatch.setattr(os, "preadv", fail)
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.IO_ERROR
    broken = False
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is Reason.MISS and "it could not be read, and is left alone for 30 s more" in done.message
    assert driver.present(SPACE, key) == 0 and "1 blocks could not be read" in driver.storage.facts.note
    assert driver.read(SPACE, other, slots.address(1)).reason is Reason.OK, "others are read"
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).moved_bytes == UNEVEN.record_bytes
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD
    assert driver.present(SPACE, key) == 1 and "could not" not in driver.storage.facts.note


def test_a_damaged_record_that_can_not_be_moved_aside_is_left_alone_until_it_is_stored_anew(
    monkeypatch: pytest.MonkeyPatch, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    key = new_key()
    driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    record = bytearray(shop.stored(SPACE, key) or b"")
    record[5000] ^= 1
    shop.tamper(SPACE, key, bytes(record))
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is Reason.CORRUPT and "still there, and left alone for 30 s" in done.message
    assert driver.present(SPACE, key) == 0 and driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).moved_bytes == UNEVEN.record_bytes
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD


def test_memory_that_the_kernel_may_not_write_is_an_io_error(driver: Driver, slots: Slots) -> None:
    key = new_key()
    driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    where = (ctypes.c_void_p(slots.address(1)), ctypes.c_size_t(UNEVEN.record_bytes))
    assert mprotect(*where, 0) == 0
    done = driver.read(SPACE, key, slots.address(1))
    assert mprotect(*where, 3) == 0
    assert done.reason is Reason.IO_ERROR and "EFAULT" in done.message


@pytest.mark.parametrize("taken", [False, True])
def test_where_hard_links_are_refused_a_rename_publishes(
    monkeypatch: pytest.MonkeyPatch, shop: FileShop, driver: Driver, slots: Slots, taken: bool
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    shop.storage.open_namespace(namespace(model_id="opened without links"))
    key = new_key()
    if taken:
        shop.tamper(SPACE, key, b"damaged")
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.OK
    assert list((shop.root / "kvm1/.tmp").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_where_direct_io_is_refused_it_is_buffered_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slots: Slots, number: int
) -> None:
    plain_open = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return plain_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    driver = Driver(threads_storage(tmp_path))
    assert driver.storage.facts.io_mode == "buffered"
    assert driver.storage.facts.note == f"direct I/O was tried and refused ({errno.errorcode[number]})"
    driver.storage.open_namespace(SPACE)
    assert driver.write(SPACE, new_key(), slots.fill(0, PAYLOAD)).reason is Reason.OK
    assert driver.storage.close(5.0)


def test_the_trial_leaves_no_file(tmp_path: Path) -> None:
    choose_io(str(tmp_path / "trial"), direct=True)
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_exception_is_an_internal_completion_and_the_worker_lives(driver: Driver, slots: Slots) -> None:
    too_deep = BlockWrite(900, SPACE, new_key(), ROOT, 1 << 32, slots.fill(0, PAYLOAD))
    for _ in range(8):
        done = driver.run([too_deep])[0]
        assert done.reason is Reason.INTERNAL and "error: " in done.message
    assert driver.write(SPACE, new_key(), slots.fill(0, PAYLOAD)).reason is Reason.OK


def test_a_directory_in_a_blocks_place_is_an_io_error(shop: FileShop, driver: Driver, slots: Slots) -> None:
    key = new_key()
    shop.path(SPACE, key).mkdir(parents=True)
    done = driver.read(SPACE, key, slots.address(0))
    assert done.reason is Reason.IO_ERROR and "EISDIR" in done.message
    assert driver.present(SPACE, key) == 0


def test_a_fifo_in_a_blocks_place_is_an_io_error_and_holds_no_thread(
    shop: FileShop, driver: Driver, slots: Slots
) -> None:
    key = new_key()
    shop.path(SPACE, key).parent.mkdir(parents=True)
    os.mkfifo(shop.path(SPACE, key))
    done = driver.read(SPACE, key, slots.address(0))
    assert done.reason is Reason.IO_ERROR and "EINVAL" in done.message
    assert driver.present(SPACE, key) == 0


def test_close_gives_up_on_a_worker_that_hangs_and_ends_what_waits(
    tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_io, "open_regular", lambda path, flags=0: (os.open(path, os.O_RDONLY), os.stat(path)))
    storage = threads_storage(tmp_path, threads=1, direct=False)
    storage.open_namespace(SPACE)
    driver, key = Driver(storage), new_key()
    path = FileShop(tmp_path, direct=False).path(SPACE, key)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # a read blocks in the kernel until somebody writes
    hung, waiting = driver.read_op(SPACE, key, slots.address(0)), driver.read_op(SPACE, new_key(), slots.address(1))
    storage.submit([hung])
    time.sleep(0.05)
    storage.submit([waiting])
    started_s = time.monotonic()
    assert not storage.close(0.2), "the worker still has slot 0"
    assert time.monotonic() - started_s < 2.0
    assert [(done.op_id, done.reason) for done in driver.collect(1)] == [(waiting.op_id, Reason.SHUTTING_DOWN)]
    release = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    until(lambda: storage.close(0.1))
    os.close(release)
    assert [done.op_id for done in storage.poll(8)] == [hung.op_id]
