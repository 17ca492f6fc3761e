"""Engines' regions: what is mapped, what is refused and why."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from markers import needs_huge_pages

from kvmoverd.adapters.memory import libc
from kvmoverd.adapters.memory.region import Regions, map_region
from kvmoverd.core.errors import BadRegion

MADV_REMOVE = 9
SIZE_BYTES = 3 * mmap.PAGESIZE + 100


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE_BYTES)
    yield fd
    os.close(fd)


def seal(fd: int, seals: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def test_a_sealed_memfd_is_mapped_and_both_see_the_same_bytes(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK)
    region = map_region(memfd)
    try:
        memory = (ctypes.c_uint8 * region.size_bytes).from_address(region.address)
        os.pwrite(memfd, b"\x5a", SIZE_BYTES - 1)
        assert region.size_bytes == SIZE_BYTES
        assert memory[SIZE_BYTES - 1] == 0x5A
        memory[0] = 9
        assert os.pread(memfd, 1, 0) == b"\x09"
        assert region.page_kind == "4 KiB"
    finally:
        region.close()


def test_the_mapping_outlives_the_descriptor_and_ends_with_close(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    descriptor = os.dup(memfd)
    region = map_region(descriptor)
    os.close(descriptor)
    assert (ctypes.c_uint8 * 1).from_address(region.address)[0] == 0
    assert f"{region.address:x}-" in Path("/proc/self/maps").read_text()
    region.close()
    region.close()
    assert f"{region.address:x}-" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("refused_advice", [libc.MADV_DONTDUMP, libc.MADV_DONTFORK])
def test_a_mapping_that_takes_no_advice_is_refused_and_unmapped(
    memfd: int, monkeypatch: pytest.MonkeyPatch, refused_advice: int
) -> None:
    advise, mapped = libc.advise, []

    def refusing(address: int, size_bytes: int, advice: int) -> None:
        mapped.append(address)
        advise(address, size_bytes, -1 if advice == refused_advice else advice)

    monkeypatch.setattr(libc, "advise", refusing)
    seal(memfd, fcntl.F_SEAL_SHRINK)
    with pytest.raises(BadRegion, match=f"{SIZE_BYTES} mapped bytes can't be kept out of core dumps.*madvise"):
        map_region(memfd)
    assert f"{mapped[0]:x}-" not in Path("/proc/self/maps").read_text()


def test_a_memfd_that_may_shrink_is_refused_with_the_way_to_seal_it(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_GROW)
    with pytest.raises(BadRegion, match=r"seals 0x4, F_SEAL_SHRINK is missing; .*MFD_ALLOW_SEALING.*F_ADD_SEALS"):
        map_region(memfd)


def test_a_memfd_that_nobody_may_write_is_refused(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    with pytest.raises(BadRegion, match="F_SEAL_WRITE lets nobody write it"):
        map_region(memfd)


def test_a_read_only_descriptor_is_refused(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK)
    reading = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY)
    try:
        with pytest.raises(BadRegion, match=f"{SIZE_BYTES} bytes of the memory file can't be mapped"):
            map_region(reading)
    finally:
        os.close(reading)


def test_a_file_on_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with path.open("r+b") as file, pytest.raises(BadRegion, match="seal"):
        map_region(file.fileno())


def test_an_empty_memfd_is_refused() -> None:
    fd = os.memfd_create("empty", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(BadRegion, match="has 0 bytes"):
            map_region(fd)
    finally:
        os.close(fd)


def test_a_pipe_is_refused() -> None:
    near, far = os.pipe()
    try:
        with pytest.raises(BadRegion, match="is no memory file"):
            map_region(near)
    finally:
        os.close(near)
        os.close(far)


def test_an_ordinary_region_gives_zeros_for_a_hole_and_cannot_vanish(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK)
    regions = Regions()
    region = regions.map(memfd)
    memory = (ctypes.c_uint8 * SIZE_BYTES).from_address(region.address)
    memory[5] = 7
    libc.advise(region.address, mmap.PAGESIZE, MADV_REMOVE)
    assert memory[5] == 0
    assert not regions.may_vanish(np.array([[region.address, 1]], dtype=np.uint64))
    region.close()


@needs_huge_pages
def test_a_region_in_huge_pages_is_known_to_vanish_until_it_is_closed() -> None:
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, 2 << 20)
    seal(fd, fcntl.F_SEAL_SHRINK)
    regions = Regions()
    region = regions.map(fd)
    os.close(fd)
    assert region.page_kind == "2 MiB (hugetlb)"
    last, beyond = region.address + region.size_bytes - 1, region.address + region.size_bytes
    assert regions.may_vanish(np.array([[1, 1], [last, 1]], dtype=np.uint64))
    assert not regions.may_vanish(np.array([[1, 1], [beyond, 1]], dtype=np.uint64))
    region.close()
    assert not regions.may_vanish(np.array([[last, 1]], dtype=np.uint64))


def test_a_large_region_is_unmapped_in_pieces_in_the_background_to_its_last_byte() -> None:
    size_bytes = (65 << 20) + 4096
    fd = os.memfd_create("region", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    region = map_region(fd)
    os.close(fd)
    region.close()
    deadline_s = time.monotonic() + 5
    while _mapped_between(region.address, region.address + size_bytes) and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert not _mapped_between(region.address, region.address + size_bytes)


def _mapped_between(start: int, stop: int) -> list[str]:
    """Mappings of the memory file in this range; the addresses may be given to others once they are free."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low < stop and high > start and "memfd:region" in line:
            found.append(line)
    return found


def test_who_asks_to_be_told_of_a_close_is_told_even_when_it_is_over(memfd: int) -> None:
    seal(memfd, fcntl.F_SEAL_SHRINK)
    region, told = map_region(memfd), list[str]()
    region.on_close(lambda: told.append("first"))
    region.on_close(lambda: told.append("second"))
    region.close()
    region.close()
    assert told == ["first", "second"]
    region.on_close(lambda: told.append("late"))
    assert told == ["first", "second", "late"]
