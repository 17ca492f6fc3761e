"""What only the ring does: its hygiene when completions misbehave, and its end when it misbehaves itself."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, until, uring_storage
from uring_kit import PAYLOAD, SPACE, UringShop, read_all, rings, same_modules, stored_key

from kvmoverd.adapters.storage import uring_reads
from kvmoverd.adapters.storage.block_files import FileBlocks
from kvmoverd.adapters.storage.blocks import Opened
from kvmoverd.adapters.storage.uring_reads import SHORT_DEPTH_DIVISOR, SUBMIT_NS_MAX, TRIES_MAX
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[UringShop]:
    shop = UringShop(tmp_path)
    shop.storage.open_namespace(SPACE)
    yield shop
    assert shop.storage.close(5.0)


def test_reads_go_through_the_ring(shop: UringShop, driver: Driver, slots: Slots) -> None:
    key = stored_key(driver, slots)
    assert read_all(driver, slots, key) == {Reason.OK}
    assert shop.ring.sizes == [UNEVEN.record_bytes] * 8
    assert shop.storage.facts.kind == "uring" and not shop.uring.reads.poisoned


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(("short_bytes", "depth"), [(0, OPS_MAX // 2), (1 << 20, OPS_MAX // 2 // SHORT_DEPTH_DIVISOR)])
def test_half_of_the_reads_are_in_the_ring_fewer_if_they_are_short_and_the_others_stand_ready(
    shop: UringShop, driver: Driver, short_bytes: int, depth: int, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring_reads, "SHORT_READ_BYTES", short_bytes)
    slots = Slots(UNEVEN, OPS_MAX)
    key, held, in_ring = stored_key(driver, slots), list[tuple[int, int]](), list[int]()

    def hold_the_first_half(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        held.extend(entries)
        if not in_ring and len(held) < depth:
            return []
        in_ring.append(len(shop.ring.sizes))
        shop.ring.refuse = lambda: errno.EBADF if breaks else 0
        ended = list(held)
        held.clear()
        return ended

    shop.ring.hand = hold_the_first_half
    done = driver.run([driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(OPS_MAX)])
    assert {completion.reason for completion in done} == {Reason.OK}
    assert all(slots.payload(slot) == PAYLOAD for slot in range(OPS_MAX))
    assert in_ring[0] == depth and bool(shop.uring.reads.poisoned) == breaks


def test_a_submit_that_takes_long_hands_later_reads_to_workers_of_the_kernel(
    shop: UringShop, driver: Driver, slots: Slots
) -> None:
    key = stored_key(driver, slots)

    def work() -> int:
        until_ns = time.thread_time_ns() + 2 * SUBMIT_NS_MAX
        while time.thread_time_ns() < until_ns:
            pass
        return 0

    assert not shop.ring.by_workers
    shop.ring.refuse = work
    assert read_all(driver, slots, key) == {Reason.OK}
    assert shop.ring.by_workers and not shop.uring.reads.poisoned
    shop.ring.refuse = lambda: 0
    assert read_all(driver, slots, key) == {Reason.OK}


def test_completions_that_come_twice_or_belong_to_nobody_are_dropped_and_counted(
    shop: UringShop, driver: Driver, slots: Slots
) -> None:
    key = stored_key(driver, slots)
    shop.ring.hand = lambda entries: [*entries, *entries, (1 << 60, 4096)]
    assert read_all(driver, slots, key) == {Reason.OK}
    until(lambda: shop.uring.reads.strays >= 9)
    assert not shop.uring.reads.poisoned and "stray completions were dropped" in shop.storage.facts.note


def test_a_short_completion_is_carried_on_from_the_last_whole_page(
    shop: UringShop, driver: Driver, slots: Slots
) -> None:
    key = stored_key(driver, slots)
    shop.ring.hand = lambda entries: [(number, min(result, 9000)) for number, result in entries]
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD
    whole = UNEVEN.record_bytes
    assert shop.ring.sizes == list(range(whole, 0, -8192))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.EBUSY])
def test_a_read_that_the_kernel_could_not_do_now_is_done_again(
    shop: UringShop, driver: Driver, slots: Slots, number: int
) -> None:
    key, left = stored_key(driver, slots), [3]

    def refuse_some(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        taken = []
        for entry, result in entries:
            left[0] -= 1
            taken.append((entry, -number if left[0] >= 0 else result))
        return taken

    shop.ring.hand = refuse_some
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD
    assert len(shop.ring.sizes) == 4


def test_a_read_is_not_repeated_for_ever(shop: UringShop, driver: Driver, slots: Slots) -> None:
    key = stored_key(driver, slots)
    shop.ring.hand = lambda entries: [(number, -errno.EAGAIN) for number, _ in entries]
    done = driver.read(SPACE, key, slots.fill(1, b""))
    assert done.reason is Reason.IO_ERROR and done.message.startswith("EAGAIN")
    assert len(shop.ring.sizes) == TRIES_MAX + 1


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOMEM, Reason.IO_ERROR), (errno.ESTALE, Reason.MISS)])
def test_an_errno_of_a_completion_is_named(
    shop: UringShop, driver: Driver, slots: Slots, number: int, reason: Reason
) -> None:
    key = stored_key(driver, slots)
    shop.ring.hand = lambda entries: [(entry, -number) for entry, _ in entries]
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is reason and done.message.startswith(errno.errorcode[number])
    shop.ring.hand = lambda entries: entries
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.OK, "such an error says nothing about the block"


def test_what_the_ring_could_not_read_from_the_device_is_left_alone_until_it_is_stored_anew(
    shop: UringShop, driver: Driver, slots: Slots
) -> None:
    key = stored_key(driver, slots)
    shop.ring.hand = lambda entries: [(entry, -errno.EIO) for entry, _ in entries]
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.IO_ERROR
    shop.ring.hand = lambda entries: entries
    read_before = len(shop.ring.sizes)
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is Reason.MISS and "it could not be read, and is left alone for 30 s more" in done.message
    assert len(shop.ring.sizes) == read_before and driver.present(SPACE, key) == 0
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).moved_bytes == UNEVEN.record_bytes
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD


def test_memory_that_the_kernel_may_not_write_is_an_io_error(driver: Driver, slots: Slots) -> None:
    key = stored_key(driver, slots)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    where = (ctypes.c_void_p(slots.address(1)), ctypes.c_size_t(UNEVEN.record_bytes))
    assert mprotect(*where, 0) == 0
    done = driver.read(SPACE, key, slots.address(1))
    assert mprotect(*where, 3) == 0
    assert done.reason is Reason.IO_ERROR and "EFAULT" in done.message


def test_a_file_that_is_cut_while_it_is_read_is_a_short_read(shop: UringShop, driver: Driver, slots: Slots) -> None:
    key = stored_key(driver, slots)

    def cut(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        os.truncate(shop.path(SPACE, key), 8192)
        return [(entry, 100) for entry, _ in entries]

    shop.ring.hand = cut
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.SHORT_READ


def test_a_submit_that_is_refused_for_a_while_is_repeated(shop: UringShop, driver: Driver, slots: Slots) -> None:
    key, left = stored_key(driver, slots), [3]

    def refuse() -> int:
        left[0] -= 1
        return errno.EBUSY if left[0] >= 0 else 0

    shop.ring.refuse = refuse
    assert read_all(driver, slots, key) == {Reason.OK}
    assert not shop.uring.reads.poisoned and len(shop.ring.sizes) == 8


@pytest.mark.parametrize("number", [errno.EBADF, errno.EAGAIN])
def test_a_ring_that_refuses_for_good_is_left_and_its_reads_go_by_threads(
    shop: UringShop, driver: Driver, slots: Slots, number: int
) -> None:
    key = stored_key(driver, slots)
    shop.ring.refuse = lambda: number
    assert read_all(driver, slots, key) == {Reason.OK}
    put = len(shop.ring.sizes)
    assert shop.uring.reads.poisoned and put <= 8
    assert "reads go by threads, the ring is out of use" in shop.storage.facts.note
    assert read_all(driver, slots, key) == {Reason.OK} and len(shop.ring.sizes) == put, "nothing goes in any more"


def test_a_ring_that_breaks_waits_for_what_the_kernel_has(shop: UringShop, driver: Driver, slots: Slots) -> None:
    key, kept = stored_key(driver, slots), list[tuple[int, int]]()
    keep = threading.Event()
    keep.set()

    def keep_all(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        kept.extend(entries)
        entries = [] if keep.is_set() else list(kept)
        if entries:
            kept.clear()
        return entries

    shop.ring.hand = keep_all
    first = driver.read_op(SPACE, key, slots.fill(1, b""))
    shop.storage.submit([first])
    until(lambda: len(kept) == 1)
    shop.ring.refuse = lambda: errno.EBADF
    second = driver.read(SPACE, key, slots.fill(2, b""))
    assert second.reason is Reason.OK and shop.uring.reads.poisoned
    assert shop.storage.poll(8) == [], "the first still belongs to the kernel"
    assert not shop.storage.close(0.1), "and so does its slot"
    keep.clear()
    until(lambda: shop.storage.close(0.5))
    assert [done.op_id for done in shop.storage.poll(8)] == [first.op_id]


def test_an_overflow_of_completions_ends_the_ring(
    monkeypatch: pytest.MonkeyPatch, shop: UringShop, driver: Driver, slots: Slots
) -> None:
    key = stored_key(driver, slots)
    monkeypatch.setattr(shop.ring, "overflowed", lambda: True)
    assert read_all(driver, slots, key) == {Reason.OK}
    until(lambda: "overflowed" in shop.uring.reads.poisoned)
    assert read_all(driver, slots, key) == {Reason.OK}


def test_a_read_that_hangs_in_the_kernel_holds_its_slot_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slots: Slots
) -> None:
    """The file is a pipe: the kernel has the buffer until somebody writes."""
    storage = uring_storage(tmp_path)
    storage.open_namespace(SPACE)
    driver = Driver(storage)
    key, reader, writer = stored_key(driver, slots), *os.pipe()
    opened = FileBlocks.open

    def open_pipe(files: FileBlocks, op: BlockRead) -> Opened:
        return Opened(reader, 0, whole=True) if op.op_id == hung.op_id else opened(files, op)

    hung, other = (driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in (1, 2))
    monkeypatch.setattr(FileBlocks, "open", open_pipe)
    storage.submit([hung, other])
    assert [done.op_id for done in driver.collect(1)] == [other.op_id], "others pass it"
    assert not storage.close(0.2), "the kernel still owns slot 1"
    assert storage.poll(8) == []
    os.write(writer, b"late")
    os.close(writer)
    until(lambda: storage.close(0.2))
    assert [done.op_id for done in storage.poll(8)] == [hung.op_id]


def test_nothing_of_the_ring_is_left_open_in_the_end(tmp_path: Path, slots: Slots) -> None:
    uring_storage(tmp_path).close(5.0)
    before = rings()
    storage = uring_storage(tmp_path)
    storage.open_namespace(SPACE)
    driver = Driver(storage)
    key = stored_key(driver, slots)
    assert read_all(driver, slots, key) == {Reason.OK}
    assert storage.close(5.0) and storage.close(0.0)
    assert rings() == before


READER = """
    import sys
    from pathlib import Path
    from storage_kit import UNEVEN, Driver, Slots, namespace, uring_storage
    storage, slots = uring_storage(Path(sys.argv[1])), Slots(UNEVEN, 32)
    driver, key = Driver(storage), bytes.fromhex(sys.argv[2])
    while True:
        driver.run([driver.read_op(namespace(), key, slots.address(slot)) for slot in range(32)])
        print("read", flush=True)
"""


def test_a_process_that_is_killed_while_it_reads_ends_and_leaves_the_blocks_whole(
    tmp_path: Path, shop: UringShop, driver: Driver, slots: Slots
) -> None:
    key = stored_key(driver, slots)
    command = [sys.executable, "-c", textwrap.dedent(READER), tmp_path, key.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=same_modules()) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"read\n"
        finally:
            child.kill()
        assert child.wait(10.0) == -signal.SIGKILL
    assert read_all(driver, slots, key) == {Reason.OK}
