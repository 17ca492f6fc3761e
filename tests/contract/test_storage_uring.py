"""What only the ring does: its hygiene when completions misbehave, its end when it misbehaves, and where it can't be had."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, FileShop, Slots, namespace, new_key, until, uring_storage

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.block_files import BlockFiles
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.adapters.storage.uring_probe import PROBE, uring_refusal
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import Layout
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead

if uring_refusal():
    pytest.skip(f"io_uring can't be used here: {uring_refusal()}", allow_module_level=True)

import liburing

from kvmoverd.adapters.storage import uring_reads
from kvmoverd.adapters.storage.uring import UringStorage
from kvmoverd.adapters.storage.uring_reads import SHORT_DEPTH_DIVISOR, SUBMIT_NS_MAX, TRIES_MAX
from kvmoverd.adapters.storage.uring_ring import Ring

SPACE = namespace()
PAYLOAD = os.urandom(UNEVEN.block_bytes)
LARGE = Layout(block_tokens=64, layers=((41_984,),) * 20)


class BadRing(Ring):
    """A real ring whose entries pass through a hand that may change, double or keep them."""

    def __init__(self, entries: int) -> None:
        super().__init__(entries)
        self.hand: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = lambda entries: entries
        self.refuse: Callable[[], int] = lambda: 0
        self.sizes: list[int] = []

    def read(self, fd: int, address: int, size_bytes: int, offset_bytes: int) -> int:
        self.sizes.append(size_bytes)
        return super().read(fd, address, size_bytes, offset_bytes)

    def _take_entries(self) -> list[tuple[int, int]]:
        return self.hand(super()._take_entries())

    def _enter(self) -> None:
        number = self.refuse()
        if number:
            raise OSError(number, os.strerror(number))
        super()._enter()


class UringShop(FileShop):
    def __init__(self, root: Path) -> None:
        self.ring = BadRing(OPS_MAX)
        self.uring = uring_storage(root, ring=lambda entries: self.ring)
        super().__init__(root, direct=True, make=lambda root, direct: self.uring)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[UringShop]:
    shop = UringShop(tmp_path)
    shop.storage.open_namespace(SPACE)
    yield shop
    assert shop.storage.close(5.0)


@pytest.fixture
def driver(shop: UringShop) -> Driver:
    return Driver(shop.storage)


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 8)


def stored_key(driver: Driver, slots: Slots) -> bytes:
    key = new_key()
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    return key


def read_all(driver: Driver, slots: Slots, key: bytes) -> set[Reason]:
    done = driver.run([driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(8)])
    assert all(slots.payload(slot) == PAYLOAD for slot in range(8))
    return {completion.reason for completion in done}


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


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, Reason.IO_ERROR), (errno.ESTALE, Reason.MISS)])
def test_an_errno_of_a_completion_is_named(
    shop: UringShop, driver: Driver, slots: Slots, number: int, reason: Reason
) -> None:
    key = stored_key(driver, slots)
    shop.ring.hand = lambda entries: [(entry, -number) for entry, _ in entries]
    done = driver.read(SPACE, key, slots.address(1))
    assert done.reason is reason and done.message.startswith(errno.errorcode[number])
    shop.ring.hand = lambda entries: entries
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.OK, "an I/O error says nothing about the block"


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
    opened = BlockFiles.open

    def open_pipe(files: BlockFiles, op: BlockRead) -> tuple[int, int]:
        return (reader, UNEVEN.record_bytes) if op.op_id == hung.op_id else opened(files, op)

    hung, other = (driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in (1, 2))
    monkeypatch.setattr(BlockFiles, "open", open_pipe)
    storage.submit([hung, other])
    assert [done.op_id for done in driver.collect(1)] == [other.op_id], "others pass it"
    assert not storage.close(0.2), "the kernel still owns slot 1"
    assert storage.poll(8) == []
    os.write(writer, b"late")
    os.close(writer)
    until(lambda: storage.close(0.2))
    assert [done.op_id for done in storage.poll(8)] == [hung.op_id]


def rings() -> int:
    """Open descriptors of rings and eventfds; files may be open for a moment in threads that tidy up."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).rpartition("/")[2].startswith("anon_inode:") for link in links)


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


def same_modules() -> dict[str, str]:
    """An environment in which a child finds the modules of this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# The pool, registered.


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 << 20, 2 << 20)
    arena.touch()
    yield arena
    arena.close()


def pool_storage(root: Path, arena: Arena, ring: Ring) -> UringStorage:
    return UringStorage(
        root, ring, name="root", threads=2, ops_max=OPS_MAX, direct=True, memory=arena, piece_bytes=2 << 20
    )


def test_a_registered_pool_is_read_into_and_says_so(tmp_path: Path, arena: Arena) -> None:
    storage, space = pool_storage(tmp_path, arena, Ring(OPS_MAX)), namespace(LARGE)
    assert storage.facts.note == "registered pool"
    storage.open_namespace(space)
    driver, payload, outside = Driver(storage), os.urandom(LARGE.block_bytes), Slots(LARGE, 1)
    key = new_key()
    assert driver.write(space, key, outside.fill(0, payload)).reason is Reason.OK
    straddling = arena.address + (2 << 20) - 4096
    for address in (arena.address, arena.address + (6 << 20), straddling, outside.address(0)):
        assert driver.read(space, key, address).reason is Reason.OK
    assert storage.close(5.0)


def test_a_pool_that_can_not_be_registered_is_read_into_plainly(tmp_path: Path, arena: Arena) -> None:
    class Poor(Ring):
        def register(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    storage = pool_storage(tmp_path, arena, Poor(OPS_MAX))
    assert storage.facts.kind == "uring" and "plain reads" in storage.facts.note and "ulimit -l" in storage.facts.note
    assert storage.close(5.0)


def test_a_pool_whose_trial_fails_is_read_into_plainly(tmp_path: Path, arena: Arena) -> None:
    ring = BadRing(OPS_MAX)
    ring.hand = lambda entries: [(number, -errno.ENOTSUP) for number, _ in entries]
    storage = pool_storage(tmp_path, arena, ring)
    assert "plain reads: one into registered memory was tried and failed (ENOTSUP)" in storage.facts.note
    assert list((tmp_path / "kvm1/.tmp").iterdir()) == []
    ring.hand = lambda entries: entries
    storage.open_namespace(SPACE)
    driver, outside = Driver(storage), Slots(UNEVEN, 1)
    key = stored_key(driver, outside)
    assert driver.read(SPACE, key, arena.address).reason is Reason.OK
    assert storage.close(5.0)


# Where io_uring can't be had.


def test_a_trial_that_is_killed_by_an_illegal_instruction_is_a_refusal() -> None:
    command = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert "signal 4 (Illegal instruction)" in uring_refusal(command)


def test_a_trial_that_fails_says_its_last_line() -> None:
    command = (sys.executable, "-c", "raise ModuleNotFoundError(\"No module named 'liburing'\")")
    refusal = uring_refusal(command)
    assert "No module named 'liburing'" in refusal and "extra [uring]" in refusal


def test_a_trial_that_hangs_is_given_up() -> None:
    assert "not done within 0.2 s" in uring_refusal(("sleep", "60"), 0.2)


def test_a_trial_that_can_not_be_run_is_a_refusal() -> None:
    assert "could not be run" in uring_refusal(("/absent/python",))


def test_a_trial_is_made_once_in_a_process(tmp_path: Path) -> None:
    command = ("sh", "-c", f"echo >> {tmp_path}/trials")
    assert (uring_refusal(command), uring_refusal(command)) == ("", "")
    assert (tmp_path / "trials").read_text() == "\n"


SECCOMP = """
    import ctypes, json, struct, sys
    libc = ctypes.CDLL(None, use_errno=True)
    IO_URING_SETUP, EPERM = 425, 1
    program = b"".join(struct.pack("<HBBI", *line) for line in (
        (0x20, 0, 0, 0),                      # load the number of the system call
        (0x15, 0, 1, IO_URING_SETUP),         # is it this one?
        (0x06, 0, 0, 0x00050000 | EPERM),     # then it fails
        (0x06, 0, 0, 0x7FFF0000),             # all others pass
    ))
    held = ctypes.create_string_buffer(program)
    filter = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(held))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
        print(json.dumps(None))
        sys.exit()
    from pathlib import Path
    from kvmoverd.adapters.memory.arena import Arena
    from kvmoverd.adapters.storage.uring_open import open_uring
    arena = Arena(2 << 20, 2 << 20)
    storage = open_uring(Path(sys.argv[1]), arena, 2 << 20, name="root", threads=1, ops_max=8, direct=True)
    facts = storage.facts
    print(json.dumps([facts.kind, facts.note, storage.close(5.0)]))
"""


def test_where_a_filter_of_system_calls_forbids_io_uring_threads_do_the_work_and_say_so(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SECCOMP), tmp_path],
        capture_output=True,
        text=True,
        env=same_modules(),
        check=False,
        timeout=30,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    if found is None:
        pytest.skip("no filter of system calls can be set here")
    kind, note, quiet = found
    assert kind == "threads" and "io_uring can't be used" in note and "Operation not permitted" in note and quiet


def test_where_the_trial_says_no_threads_do_the_work_and_say_so(tmp_path: Path, arena: Arena, slots: Slots) -> None:
    storage = open_uring(
        tmp_path, arena, 2 << 20, name="root", threads=2, ops_max=8, direct=True, refusal=lambda: "of the weather"
    )
    assert (storage.facts.kind, storage.facts.note) == ("threads", "io_uring can't be used: of the weather")
    storage.open_namespace(SPACE)
    driver = Driver(storage)
    assert driver.read(SPACE, stored_key(driver, slots), slots.address(1)).reason is Reason.OK
    assert storage.close(5.0)


def test_a_root_that_can_not_be_used_is_refused_and_its_ring_closed(tmp_path: Path, arena: Arena) -> None:
    before = rings()
    with pytest.raises(StorageUnusable, match="no directory"):
        open_uring(tmp_path / "absent", arena, 2 << 20, name="root", threads=1, ops_max=8, direct=True)
    assert rings() == before


@pytest.mark.parametrize("call", ["io_uring_queue_init", "io_uring_register_eventfd"])
def test_where_no_ring_can_be_had_after_all_threads_do_the_work_and_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arena: Arena, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = rings()
    monkeypatch.setattr(liburing, call, refuse)
    storage = open_uring(tmp_path, arena, 2 << 20, name="root", threads=1, ops_max=8, direct=True)
    assert storage.facts.kind == "threads" and "no ring can be had: ENOMEM" in storage.facts.note
    assert storage.close(5.0) and rings() == before


def test_the_trial_runs_what_the_storage_runs() -> None:
    assert PROBE[0] == sys.executable and "try_ring" in PROBE[-1]
