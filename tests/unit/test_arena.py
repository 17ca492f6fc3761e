"""The pool's arena."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kvmoverd.adapters.memory.arena import HUGE_PAGE_BYTES, Arena, available_bytes
from kvmoverd.adapters.memory.scratch import PART_BYTES, Scratch
from kvmoverd.core.errors import ConfigError, StorageUnusable

KINDS = ("2 MiB (hugetlb)", "2 MiB (transparent)", "4 KiB")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_an_arena_is_aligned_zeroed_and_writable_to_its_last_byte() -> None:
    arena = Arena(5 << 20, 1 << 20)
    try:
        arena.touch()
        memory = (ctypes.c_uint8 * arena.size_bytes).from_address(arena.address)
        assert arena.size_bytes == 5 << 20
        assert arena.address % HUGE_PAGE_BYTES == 0
        assert memory[0] == 0 and memory[arena.size_bytes - 1] == 0
        memory[arena.size_bytes - 1] = 7
        assert memory[arena.size_bytes - 1] == 7
    finally:
        arena.close()


def test_touching_backs_every_page_and_tells_what_backs_it() -> None:
    arena = Arena(64 << 20, 8 << 20)
    try:
        before = resident_bytes()
        arena.touch()
        grown = resident_bytes() - before
        assert arena.page_kind.startswith(KINDS)
        assert arena.page_kind == "2 MiB (hugetlb)" or grown > 60 << 20
    finally:
        arena.close()
    assert resident_bytes() - before < 4 << 20


def test_closing_twice_is_harmless() -> None:
    arena = Arena(2 << 20, 1 << 20)
    arena.close()
    arena.close()


def test_an_arena_smaller_than_a_piece_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"pool\.bytes is 100, must hold at least one piece of 4096 bytes"):
        Arena(100, 4096)


def take_all(size_bytes: int) -> None:
    arena = Arena(size_bytes, 1 << 20)
    try:
        arena.touch()
    finally:
        arena.close()


def test_more_memory_than_there_is_is_refused_before_a_page_is_taken() -> None:
    """By the kernel where it counts what it promises, else by the arena."""
    available = available_bytes()
    assert available is not None and available > 0
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"pool\.bytes is \d+, (only \d+ bytes of memory are available|the system)"):
        take_all(2 * available)
    assert resident_bytes() - before < 4 << 20


def test_more_memory_than_addresses_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"pool\.bytes is \d+, the system does not map it"):
        Arena(1 << 50, 1 << 20)


def test_the_pool_is_neither_dumped_nor_inherited() -> None:
    arena = Arena(2 << 20, 1 << 20)
    try:
        smaps = Path("/proc/self/smaps").read_text()
        entry = smaps[smaps.index(f"{arena.address:x}-") :]
        flags = entry[entry.index("VmFlags:") :].splitlines()[0].split()
        assert "dd" in flags and "dc" in flags
    finally:
        arena.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size_bytes", [5 << 20, 8 << 20, (8 << 20) + 4096])
def test_memory_for_trials_lies_in_the_mapping_behind_the_pool(size_bytes: int, *, shared: bool) -> None:
    arena = Arena(size_bytes, 1 << 20, shared=shared)
    try:
        arena.touch()
        parts = sorted(arena.scratch.take() for _ in range(arena.scratch.parts_total))
        assert len(parts) == len(set(parts)) == HUGE_PAGE_BYTES // PART_BYTES
        assert parts[0] >= arena.address + arena.size_bytes
        assert parts[-1] + PART_BYTES == arena.address + arena.mapped_bytes
        memory = (ctypes.c_uint8 * arena.mapped_bytes).from_address(arena.address)
        memory[arena.mapped_bytes - 1] = 7
    finally:
        arena.close()


def test_a_part_that_a_hanging_read_holds_is_nobody_elses_and_the_last_refusal_says_how_many() -> None:
    scratch = Scratch(1 << 20, 2 * PART_BYTES)
    held, other = scratch.take(), scratch.take()
    assert {held, other} == {1 << 20, (1 << 20) + PART_BYTES}
    with pytest.raises(StorageUnusable, match="all 2 parts of the memory for trials are held"):
        scratch.take()
    scratch.give_back(other)
    assert scratch.take() == other
