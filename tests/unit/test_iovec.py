"""Walks over slices, and the kernels that move them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c
from markers import needs_compiled_copy, needs_sums

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.memory.iovec import NEVER, Cursor
from kvmoverd.ports.transport import IoVec

Bytes = npt.NDArray[np.uint8]
STEPS = [
    iovec.copy_pinning_source,
    iovec.copy_pinning_destination,
    iovec.copy_by_slices,
    pytest.param(iovec.copy_compiled, marks=needs_compiled_copy),
]


def rows(*pairs: tuple[int, int]) -> IoVec:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def cut(memory: Bytes, rng: np.random.Generator, pieces: int, *, empty: int = 0) -> IoVec:
    """Cuts memory into `pieces` slices in order, `empty` more of them without a byte."""
    inner = np.sort(rng.choice(np.arange(1, len(memory)), pieces - 1, replace=False))
    inner = np.sort(np.concatenate([inner, rng.choice(inner, empty)]))
    edges = np.concatenate([[0], inner, [len(memory)]]).astype(np.uint64)
    found = np.empty((len(edges) - 1, 2), dtype=np.uint64)
    found[:, 0] = edges[:-1] + np.uint64(memory.ctypes.data)
    found[:, 1] = np.diff(edges)
    return found


def noise(rng: np.random.Generator, size_bytes: int) -> Bytes:
    return rng.integers(0, 256, size_bytes, dtype=np.uint8)


def test_a_window_begins_where_the_walk_stands_and_leaves_the_array_alone() -> None:
    slices = rows((1000, 10), (2000, 0), (3000, 5))
    cursor = Cursor(slices)
    cursor.advance(4)
    assert cursor.window().tolist() == [[1004, 6], [2000, 0], [3000, 5]]
    cursor.advance(6)
    assert cursor.window().tolist() == [[3000, 5]]
    assert slices.tolist() == [[1000, 10], [2000, 0], [3000, 5]]
    cursor.advance(5)
    assert cursor.left_bytes == 0 and len(cursor.window()) == 0


def test_a_window_ends_within_a_slice_when_the_bytes_allowed_do() -> None:
    cursor = Cursor(rows((1000, 10), (2000, 10), (3000, 10)))
    cursor.advance(3)
    assert cursor.window(bytes_max=9).tolist() == [[1003, 7], [2000, 2]]
    assert cursor.window(bytes_max=7).tolist() == [[1003, 7]]
    assert cursor.window(bytes_max=2).tolist() == [[1003, 2]]


def test_a_window_has_no_more_slices_than_the_kernel_takes() -> None:
    cursor = Cursor(rows(*[(10 * index, 2) for index in range(3_000)]))
    assert len(cursor.window()) == iovec.SLICES_MAX
    cursor.advance(2 * iovec.SLICES_MAX + 1)
    assert cursor.window()[0].tolist() == [10 * iovec.SLICES_MAX + 1, 1]


def test_a_walk_over_nothing_has_nothing_left() -> None:
    assert Cursor(rows()).left_bytes == 0
    assert len(Cursor(rows()).window()) == 0
    assert Cursor(rows((5, 0))).left_bytes == 0


def test_a_walk_in_any_steps_visits_every_byte_once() -> None:
    rng = np.random.default_rng(1)
    memory = np.zeros(5_000, dtype=np.uint8)
    cursor = Cursor(cut(memory, rng, 300, empty=40))
    visited: list[int] = []
    while cursor.left_bytes:
        step_bytes = int(rng.integers(1, 200))
        for address, length in cursor.window(step_bytes).tolist():
            visited += range(address, address + length)
        cursor.advance(min(step_bytes, cursor.left_bytes))
    assert visited == list(range(memory.ctypes.data, memory.ctypes.data + len(memory)))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("source_pieces", "destination_pieces"), [(1, 1), (7, 900), (2_500, 3), (1_500, 1_499)])
def test_a_copy_moves_every_byte_however_both_sides_are_cut(
    step: iovec.CopyStep, source_pieces: int, destination_pieces: int
) -> None:
    rng = np.random.default_rng(source_pieces)
    source, destination = noise(rng, 100_003), np.zeros(100_003, dtype=np.uint8)
    to_slices, from_slices = cut(destination, rng, destination_pieces), cut(source, rng, source_pieces)
    assert iovec.copy(to_slices, from_slices, step) == len(source)
    assert (destination == source).all()


@pytest.mark.parametrize("step", STEPS)
def test_slices_without_bytes_are_harmless(step: iovec.CopyStep) -> None:
    rng = np.random.default_rng(3)
    source, destination = noise(rng, 10_000), np.zeros(10_000, dtype=np.uint8)
    iovec.copy(cut(destination, rng, 50, empty=30), cut(source, rng, 40, empty=20), step)
    assert (destination == source).all()
    assert iovec.copy(rows(), rows(), step) == 0


@needs_compiled_copy
@pytest.mark.parametrize("seed", range(40))
def test_the_compiled_copy_does_what_the_kernels_does(seed: int) -> None:
    """Cuts at random, some at the same places on both sides, slices of one byte, of none, 1 to 5,000 of them."""
    rng = np.random.default_rng(seed)
    size_bytes = int(rng.integers(5_001, 60_000))
    source = noise(rng, size_bytes)
    twins = [np.zeros(size_bytes, dtype=np.uint8) for _ in range(2)]
    pieces = int(rng.choice([2, 9, 300, 1_024, 1_025, 5_000]))
    from_slices = cut(source, rng, pieces, empty=pieces // 4)
    to_cuts = rng.choice(size_bytes, int(rng.integers(1, 5_000)), replace=True)
    if seed % 2:
        edges = from_slices[:, 0].astype(np.int64) - source.ctypes.data
        to_cuts = np.concatenate([to_cuts[: pieces // 2], rng.choice(edges, pieces // 2)])
    ends = np.concatenate([np.sort(to_cuts), [size_bytes]]).astype(np.uint64)
    starts = np.concatenate([[np.uint64(0)], ends[:-1]])
    for memory, step in zip(twins, (iovec.copy_pinning_source, iovec.copy_compiled), strict=True):
        to_slices = np.column_stack([starts + np.uint64(memory.ctypes.data), ends - starts])
        assert iovec.copy(to_slices, from_slices, step) == size_bytes
    assert (twins[1] == source).all() and (twins[0] == twins[1]).all()


@needs_compiled_copy
def test_slices_of_one_byte_are_copied_in_their_order() -> None:
    rng = np.random.default_rng(8)
    source, destination = noise(rng, 5_000), np.zeros(5_000, dtype=np.uint8)
    order = rng.permutation(5_000)
    singles = rows(*((source.ctypes.data + at, 1) for at in order.tolist()))
    iovec.copy(rows((destination.ctypes.data, 5_000)), singles, iovec.copy_compiled)
    assert (destination == source[order]).all()


@needs_compiled_copy
def test_a_compiled_step_moves_no_more_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iovec, "COMPILED_STEP_BYTES_MAX", 1_000)
    memory = np.ones(1_009, dtype=np.uint8)
    source, destination = Cursor(cut(memory, np.random.default_rng(1), 90)), Cursor(rows((memory.ctypes.data, 1 << 30)))
    assert iovec.copy_compiled(destination, source) == 1_000
    assert iovec.copy_compiled(destination, source) == 9


@needs_compiled_copy
def test_a_compiled_copy_that_is_told_to_stop_stops_soon_and_moves_no_byte_after_that() -> None:
    memory = np.ones(128 << 20, dtype=np.uint8)
    half = len(memory) // 2
    for _ in range(20):
        stop = bytearray(1)
        source, destination = (Cursor(rows((memory.ctypes.data + at, half))) for at in (0, half))
        setter = threading.Timer(0.002, lambda stop=stop: stop.__setitem__(0, 1))  # type: ignore[misc]
        setter.start()
        moved = iovec.copy_compiled(destination, source, stop)
        setter.join()
        assert moved % (1 << 20) == 0 and source.left_bytes == half - moved
        assert iovec.copy_compiled(destination, source, stop) == 0
        # Where the setter's thread waited for a processor, all was copied before it said stop.
        if moved < half:
            assert iovec.copy_compiled(destination, source) == half - moved
            return
    pytest.fail("no copy was stopped before its end")


@needs_compiled_copy
def test_places_that_are_none_are_refused_by_the_compiled_copy() -> None:
    from kvmoverd.adapters.memory import _copy

    here = np.zeros(64, dtype=np.uint8)
    good = rows((here.ctypes.data, 8))
    assert _copy.copy(good, 0, 8, good, 1, 0, 100, NEVER) == 0
    for row, at, words in ((2, 0, "row 2"), (-1, 0, "row -1"), (0, 9, "byte 9"), (0, -1, "byte -1"), (1, 1, "byte 1")):
        with pytest.raises(ValueError, match=words):
            _copy.copy(good, row, at, good, 0, 0, 100, NEVER)
        with pytest.raises(ValueError, match=words):
            _copy.copy(good, 0, 0, good, row, at, 100, NEVER)
    with pytest.raises(ValueError, match="bytes_max is -1, stop has 1 bytes"):
        _copy.copy(good, 0, 0, good, 0, 0, -1, NEVER)
    with pytest.raises(ValueError, match="no aligned rows"):
        _copy.copy(here[1:17], 0, 0, good, 0, 0, 1, NEVER)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no aligned rows"):
        _copy.copy(here[:15], 0, 0, good, 0, 0, 1, NEVER)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not C-contiguous"):
        _copy.copy(np.zeros((4, 4), np.uint64)[:, :2], 0, 0, good, 0, 0, 1, NEVER)


@needs_compiled_copy
def test_other_threads_run_while_the_compiled_copy_does() -> None:
    memory = np.ones(64 << 20, dtype=np.uint8)
    here, there = rows((memory.ctypes.data, 32 << 20)), rows((memory.ctypes.data + (32 << 20), 32 << 20))
    stop, laps = threading.Event(), 0

    def copy_on() -> None:
        while not stop.is_set():
            iovec.copy(there, here, iovec.copy_compiled)

    worker = threading.Thread(target=copy_on)
    worker.start()
    deadline_s = time.monotonic() + 0.2
    while time.monotonic() < deadline_s:
        time.sleep(0)
        laps += 1
    stop.set()
    worker.join()
    assert laps > 60, f"{laps} turns in 0.2 s: the copy keeps the interpreter to itself"


def test_slices_in_any_order_are_gathered_in_that_order() -> None:
    rng = np.random.default_rng(4)
    source, destination = noise(rng, 1_000), np.zeros(1_000, dtype=np.uint8)
    shuffled = rng.permutation(cut(source, rng, 20))
    iovec.copy(cut(destination, rng, 9), shuffled)
    base = source.ctypes.data
    expected = np.concatenate([source[a - base : a - base + n] for a, n in shuffled.tolist()])
    assert (destination == expected).all()


def test_an_address_that_is_not_mapped_is_an_error_not_a_signal() -> None:
    mine = np.zeros(16, dtype=np.uint8)
    unmapped = rows((8, 16))
    for step in (iovec.copy_pinning_source, iovec.copy_pinning_destination):
        with pytest.raises(OSError, match="Bad address"):
            iovec.copy(rows((mine.ctypes.data, 16)), unmapped, step)
        with pytest.raises(OSError, match="Bad address"):
            iovec.copy(unmapped, rows((mine.ctypes.data, 16)), step)


def test_a_copy_of_unequal_totals_is_a_broken_promise() -> None:
    memory = np.zeros(16, dtype=np.uint8)
    with pytest.raises(AssertionError, match="8 bytes for 9 bytes of slices"):
        iovec.copy(rows((memory.ctypes.data, 9)), rows((memory.ctypes.data, 8)))


def test_bytes_gathered_into_a_socket_are_scattered_from_it_in_any_cut() -> None:
    rng = np.random.default_rng(5)
    source, destination = noise(rng, 3_000_000), np.zeros(3_000_000, dtype=np.uint8)
    sending, receiving = Cursor(cut(source, rng, 1_800)), Cursor(cut(destination, rng, 2_100))
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        while receiving.left_bytes:
            if sending.left_bytes:
                iovec.send_step(near.fileno(), sending)
            iovec.receive_step(far.fileno(), receiving)
        assert iovec.send_step(near.fileno(), Cursor(rows((source.ctypes.data, 1)))) == 1
    assert (destination == source).all()


def test_an_empty_socket_gives_nothing_and_a_closed_one_ends() -> None:
    memory = np.zeros(16, dtype=np.uint8)
    near, far = socket.socketpair()
    with far:
        far.setblocking(False)
        with near:
            assert iovec.receive_step(far.fileno(), Cursor(rows((memory.ctypes.data, 16)))) == 0
        with pytest.raises(EOFError):
            iovec.receive_step(far.fileno(), Cursor(rows((memory.ctypes.data, 16))))


def test_a_pull_from_a_process_that_is_gone_says_so() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    memory = np.zeros(16, dtype=np.uint8)
    here = rows((memory.ctypes.data, 16))
    with pytest.raises(OSError, match="No such process"):
        iovec.pull_step(pid, Cursor(here), Cursor(here))


def test_common_cuts_end_with_the_shorter_list() -> None:
    first, second = rows((100, 4), (200, 4)), rows((900, 3), (800, 2))
    assert iovec.common_cuts(first, second) == ([100, 103, 200], [900, 800, 801], [3, 1, 1])


@needs_sums
@pytest.mark.parametrize("seed", range(30))
def test_a_summing_copy_moves_every_byte_and_finds_the_checksum_up_to_each_end(seed: int) -> None:
    """Layers around the sizes where the lanes begin and end, cut at random on both sides."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 7, 8, 9, 767, 768, 769, 6_143, 6_144, 6_145, 41_984, 70_001], int(rng.integers(1, 7)))
    ends, parts = np.cumsum(sizes, dtype=np.uint64), int(rng.integers(1, 4))
    part_bytes = int(ends[-1])
    source, destination = noise(rng, parts * part_bytes + 1), np.zeros(parts * part_bytes + 1, dtype=np.uint8)
    slices = [cut(memory[1:], rng, min(len(memory) - 1, pieces)) for memory, pieces in ((source, 9), (destination, 4))]
    walks, sums = [Cursor(rows) for rows in slices], np.zeros((parts, len(ends)), np.uint32)
    assert iovec.copy_summed(walks[1], walks[0], ends, sums) == parts * part_bytes
    assert (destination[1:] == source[1:]).all() and not walks[0].left_bytes
    for part, found in enumerate(sums.tolist()):
        content = source[1 + part * part_bytes :][:part_bytes].tobytes()
        assert found == [crc32c(content[:end]) for end in ends.tolist()]


@needs_sums
def test_a_summing_copy_that_is_told_to_stop_moves_nothing_and_ends_that_are_none_are_refused() -> None:
    from kvmoverd.adapters.memory import _copy

    here, sums = np.ones(64, dtype=np.uint8), np.zeros((1, 2), np.uint32)
    slices, ends = rows((here.ctypes.data, 64)), np.array([8, 64], np.uint64)
    assert iovec.copy_summed(Cursor(slices), Cursor(slices), ends, sums, bytearray(b"\x01")) == 0
    with pytest.raises(AssertionError, match="64 of 64 bytes are left, 128 are to be summed"):
        iovec.copy_summed(Cursor(slices), Cursor(slices), ends, np.zeros((2, 2), np.uint32))
    for wrong in ([], [0, 64], [64, 64], [64, 8]):
        with pytest.raises(ValueError, match="no rising aligned numbers"):
            _copy.copy_summed(slices, slices, np.array(wrong, np.uint64), sums, NEVER)


def test_cuts_of_many_slices_hold_nobody_up() -> None:
    """Next to a sort of what is sorted already; numpy's own sets take a hundred times as long."""
    rng = np.random.default_rng(5)
    count = 32_000
    ends = [np.append(np.sort(rng.choice(10 * count, count, replace=False)), 10 * count) for _ in range(2)]

    def least_s(work: Callable[[], object]) -> float:
        took_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            work()
            took_s.append(time.perf_counter() - began_s)
        return min(took_s)

    assert (iovec.merged_ends(*ends) == np.union1d(*ends)[np.union1d(*ends) > 0]).all()
    assert least_s(lambda: iovec.merged_ends(*ends)) < 10 * least_s(lambda: np.concatenate(ends).sort(kind="stable"))
