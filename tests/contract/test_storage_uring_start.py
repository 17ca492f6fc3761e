"""How the ring begins: the pool registered, the trial in a child process, and who reads where no ring can be had."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import liburing
import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, namespace, new_key
from uring_kit import LARGE, SPACE, BadRing, rings, same_modules, stored_key

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage import uring_pool
from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.roots_open import Opening, begin_each
from kvmoverd.adapters.storage.uring import UringStorage
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.adapters.storage.uring_probe import PROBE, uring_refusal
from kvmoverd.adapters.storage.uring_ring import Ring
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.record import memory_view
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import Storage


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 << 20, 2 << 20)
    arena.touch()
    yield arena
    arena.close()


def pool_storage(root: Path, arena: Arena, ring: Ring) -> UringStorage:
    blocks = file_blocks(root)
    return UringStorage(blocks, ring, name="root", threads=2, ops_max=OPS_MAX, memory=arena, piece_bytes=2 << 20)


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


def open_pool_root(root: Path, arena: Arena) -> Storage:
    root.mkdir()
    return open_uring(file_blocks(root), arena, 2 << 20, name=root.name, threads=1, ops_max=8)


@pytest.mark.parametrize("broken", [False, True])
def test_a_root_that_is_opened_while_others_work_changes_not_a_byte_of_the_pool(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    first = open_pool_root(tmp_path / "first", arena)
    pool, content = memory_view(arena.address, 8 << 20), os.urandom(8 << 20)
    pool[:] = content
    if broken:
        monkeypatch.setattr(uring_pool, "read_and_wait", lambda *_: 4096)
    second = open_pool_root(tmp_path / "second", arena)
    assert ("4096 of 8192" in second.facts.note or "EIO" in second.facts.note) == broken
    assert bytes(pool) == content
    assert arena.scratch.parts_free == arena.scratch.parts_total
    assert first.close(5.0) and second.close(5.0)


def test_roots_that_open_beside_each_other_all_have_the_registered_pool(tmp_path: Path, arena: Arena) -> None:
    pool, content = memory_view(arena.address, 8 << 20), os.urandom(8 << 20)
    pool[:] = content
    for turn in range(20):
        roots = [tmp_path / f"{turn}.{name}" for name in ("near", "far")]
        openings = [Opening(root.name, partial(open_pool_root, root, arena)) for root in roots]
        attempts = begin_each(openings, stay=threading.Event())
        found = [attempt.result(time.monotonic() + 10.0) for attempt in attempts]
        storages = [storage for storage in found if not isinstance(storage, Exception)]
        assert [storage.facts.note for storage in storages] == ["registered pool"] * 2, f"{found} in turn {turn}"
        assert all(storage.close(5.0) for storage in storages)
    assert bytes(pool) == content


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
    from kvmoverd.adapters.storage.block_files import file_blocks
    from kvmoverd.adapters.storage.uring_open import open_uring
    arena = Arena(2 << 20, 2 << 20)
    storage = open_uring(file_blocks(Path(sys.argv[1])), arena, 2 << 20, name="root", threads=1, ops_max=8)
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
    blocks = file_blocks(tmp_path)
    storage = open_uring(blocks, arena, 2 << 20, name="root", threads=2, ops_max=8, refusal=lambda: "of the weather")
    assert (storage.facts.kind, storage.facts.note) == ("threads", "io_uring can't be used: of the weather")
    storage.open_namespace(SPACE)
    driver = Driver(storage)
    assert driver.read(SPACE, stored_key(driver, slots), slots.address(1)).reason is Reason.OK
    assert storage.close(5.0)


def test_a_root_whose_trial_hangs_is_refused_and_its_ring_closed(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(ring: Ring, fd: int, address: int, size_bytes: int) -> int:
        raise TimeoutError("not read within 10 s")

    monkeypatch.setattr(uring_pool, "read_and_wait", hang)
    before, blocks = rings(), file_blocks(tmp_path)
    with pytest.raises(StorageUnusable, match="a read into the pool's memory hangs: not read within 10 s"):
        open_uring(blocks, arena, 2 << 20, name="root", threads=1, ops_max=8)
    assert rings() == before
    assert blocks.close(0.0)


def test_a_trial_read_that_is_still_under_way_keeps_its_memory(tmp_path: Path, arena: Arena) -> None:
    ring = BadRing(OPS_MAX)
    kept: list[tuple[int, int]] = []

    def keep(entries: list[tuple[int, int]]) -> list[tuple[int, int]]:
        kept.extend(entries)
        return []

    ring.hand = keep
    storage = pool_storage(tmp_path, arena, ring)
    assert "plain reads" in storage.facts.note and len(kept) == 1
    assert arena.scratch.parts_free == arena.scratch.parts_total - 1
    ring.hand = lambda entries: kept
    assert len(ring.reap()) == 1 and storage.close(5.0)


@pytest.mark.parametrize("call", ["io_uring_queue_init", "io_uring_register_eventfd"])
def test_where_no_ring_can_be_had_after_all_threads_do_the_work_and_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arena: Arena, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = rings()
    monkeypatch.setattr(liburing, call, refuse)
    storage = open_uring(file_blocks(tmp_path), arena, 2 << 20, name="root", threads=1, ops_max=8)
    assert storage.facts.kind == "threads" and "no ring can be had: ENOMEM" in storage.facts.note
    assert storage.close(5.0) and rings() == before


def test_the_trial_runs_what_the_storage_runs() -> None:
    assert PROBE[0] == sys.executable and "try_ring" in PROBE[-1]
