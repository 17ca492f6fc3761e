"""Pages shared with an engine: sealed against it, and nothing left of them. Real memory files and pipes."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest
from companion_kit import open_fds
from progress_kit import Hands

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.memory.shared_page import EnginePages
from kvmoverd.core.errors import QueueFull
from kvmoverd.core.progress import CREDIT_BYTES, PROGRESS_BYTES


@pytest.fixture
def pages() -> EnginePages:
    return EnginePages()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("kvmoverd-")


def test_what_the_daemon_writes_the_engine_reads_and_the_other_way_round(pages: EnginePages) -> None:
    hands = Hands.of(pages)
    pages.progress[17] = 42
    hands.credits[3] = 43
    assert hands.words[17] == 42 and pages.credits[3] == 43
    hands.close()
    pages.close()


def test_the_engine_can_not_make_the_progress_page_writable(pages: EnginePages) -> None:
    progress_fd = pages.engine_fds()[0]
    with pytest.raises(PermissionError):
        mmap.mmap(progress_fd, PROGRESS_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(progress_fd, b"x", 0)
    anew = os.open(f"/proc/self/fd/{progress_fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(anew, PROGRESS_BYTES)
    os.close(anew)
    pages.progress[17] = 1
    pages.close()


def test_a_read_only_mapping_can_not_be_made_writable(pages: EnginePages) -> None:
    address = libc.map_memory(PROGRESS_BYTES, mmap.PROT_READ, mmap.MAP_SHARED, pages.engine_fds()[0])
    done = ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ | mmap.PROT_WRITE)
    assert done == -1
    libc.unmap_memory(address, PROGRESS_BYTES)
    pages.close()


@pytest.mark.parametrize(("which", "size_bytes"), [(0, PROGRESS_BYTES), (1, CREDIT_BYTES)])
def test_neither_file_can_be_cut_grown_or_sealed_further(pages: EnginePages, which: int, size_bytes: int) -> None:
    fd = pages.engine_fds()[which]
    for wrong in (0, size_bytes - 1, size_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, wrong)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(fd).st_size == size_bytes
    pages.close()


def test_the_daemon_does_not_write_credits(pages: EnginePages) -> None:
    with pytest.raises(TypeError):
        pages.credits[0] = 1
    pages.close()


def test_an_engine_that_clears_the_flags_of_its_ends_and_reads_nothing_blocks_nobody(pages: EnginePages) -> None:
    _, _, wake, kick = pages.engine_fds()
    for fd in (wake, kick):
        os.set_blocking(fd, True)

    def daemon() -> None:
        for _ in range(10_000):
            pages.wake()
        assert pages.take_kicks()

    thread = threading.Thread(target=daemon, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    pages.close()


def test_closed_ends_of_the_engine_are_no_error(pages: EnginePages) -> None:
    os.write(pages.engine_fds()[3], b"\1")
    pages.close_engine_fds()
    pages.wake()
    assert pages.take_kicks() and not pages.take_kicks()
    pages.close()


def test_nothing_is_left_of_closed_pages() -> None:
    fds, mapped = open_fds(), mappings()
    for _ in range(3):
        pages = EnginePages()
        pages.close()
    assert (open_fds(), mappings()) == (fds, mapped)


def test_without_descriptors_there_are_no_pages_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fds, mapped = open_fds(), mappings()
    made = iter([os.pipe2(os.O_CLOEXEC)])

    def pipe2(flags: int) -> tuple[int, int]:
        try:
            return next(made)
        except StopIteration:
            raise OSError(24, "Too many open files") from None

    monkeypatch.setattr(os, "pipe2", pipe2)
    with pytest.raises(QueueFull, match="Too many open files"):
        EnginePages()
    assert (open_fds(), mappings()) == (fds, mapped)
