"""Memory in pieces without a device: what is registered, found, refused with words, and given back."""

from __future__ import annotations

import errno
import resource
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.registration import Pieces, piece_size, register

MIB = 1 << 20
START = 1 << 40


@dataclass
class BookPiece:
    pins: BookPins
    number: int

    @property
    def keys(self) -> tuple[int, int]:
        return 10 + self.number, 20 + self.number

    def close(self) -> None:
        if self.number in self.pins.kept:
            raise FabricError(f"piece {self.number} is kept")
        self.pins.open.remove(self.number)


@dataclass
class BookPins:
    """Numbers pieces; refuses the one of number `refused` with `code`; can't take back those that are `kept`."""

    refused: int = -1
    code: int = errno.ENOMEM
    open: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    asked: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __call__(self, address: int, size_bytes: int, dmabuf_fd: int, offset_bytes: int) -> BookPiece:
        number = len(self.asked)
        self.asked.append((address, size_bytes, dmabuf_fd, offset_bytes))
        if number == self.refused:
            raise OSError(self.code, "no")
        self.open.append(number)
        return BookPiece(self, number)


def keys_of(memory: Pieces, *slices: tuple[int, int]) -> list[list[int]]:
    found = np.array(slices, np.uint64)
    return [list(map(int, row)) for row in memory.keys(found[:, 0], found[:, 1])]


def test_the_last_piece_is_what_is_left() -> None:
    pins = BookPins()
    memory = register(pins, START, 2 * MIB + 5, MIB, dmabuf_fd=9)
    assert pins.asked == [(START, MIB, 9, 0), (START + MIB, MIB, 9, MIB), (START + 2 * MIB, 5, 9, 2 * MIB)]
    assert memory.cuts.tolist() == [START + MIB, START + 2 * MIB]


def test_keys_come_by_arrays_in_any_order() -> None:
    memory = register(BookPins(), START, 3 * MIB, MIB)
    slices = (START + 2 * MIB, 7), (START, MIB), (START + 3 * MIB - 1, 1), (START + MIB, 0)
    assert keys_of(memory, *slices) == [[12, 22], [10, 20], [12, 22], [11, 21]]
    assert keys_of(register(BookPins(), START, 5, MIB), (START, 5)) == [[10, 20]]
    assert memory.keys(np.empty(0, np.uint64), np.empty(0, np.uint64)).shape == (0, 2)


@pytest.mark.parametrize(
    ("at", "size_bytes"),
    [(-1, 1), (0, MIB + 1), (3 * MIB, 1), (3 * MIB - 1, 2), (MIB, (1 << 64) - MIB), (-START, 1)],
)
def test_a_slice_that_is_in_no_piece_is_refused_with_its_numbers(at: int, size_bytes: int) -> None:
    memory = register(BookPins(), START, 3 * MIB, MIB)
    with pytest.raises(
        FabricError, match=rf"slice 1, {size_bytes} bytes at {START + at:#x}, is in none of the 3 pieces"
    ):
        keys_of(memory, (START, 1), (START + at, size_bytes))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOMEM, r"the limit for locked memory.*ENOMEM; memlock is .*set LimitMEMLOCK=infinity"),
        (errno.EFAULT, r"not all of it is mapped and writable \(EFAULT"),
        (errno.EOPNOTSUPP, r"can't register a dmabuf \(E(OP)?NOTSUPP?.*leave GPU memory to copies"),
        (errno.ENODEV, r"No such device \(ENODEV"),
    ],
)
def test_a_piece_that_is_refused_takes_those_before_it_along_and_says_why(code: int, words: str) -> None:
    pins, closed = BookPins(refused=2, code=code), []
    with pytest.raises(FabricError, match=rf"piece 2 of 4, {MIB} bytes at {START + 2 * MIB:#x}, can't .*{words}"):
        register(pins, START, 4 * MIB, MIB, closed=lambda: closed.append(1))
    assert not pins.open and not closed and len(pins.asked) == 3


def test_the_limit_for_locked_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    with pytest.raises(FabricError, match=rf"memlock is {8 * MIB} bytes"):
        register(BookPins(refused=0), START, MIB, MIB)


def test_closing_again_goes_on_where_the_device_kept_a_piece() -> None:
    pins, closed = BookPins(kept={1}), []
    memory = register(pins, START, 3 * MIB, MIB, closed=lambda: closed.append(1))
    with pytest.raises(FabricError, match=r"piece 1 is kept"):
        memory.close()
    assert (pins.open, closed) == ([0, 1], [])
    pins.kept.clear()
    memory.close()
    memory.close()
    assert (pins.open, closed) == ([], [1])


@pytest.mark.parametrize(("size_bytes", "piece_bytes"), [(0, MIB), (MIB, 0), (-1, MIB)])
def test_no_memory_is_refused(size_bytes: int, piece_bytes: int) -> None:
    with pytest.raises(FabricError, match=r"are no memory"):
        register(BookPins(), START, size_bytes, piece_bytes)


def test_a_piece_is_a_part_of_what_was_asked_so_that_its_cuts_stay() -> None:
    for most in (5 * MIB, 8 * MIB, 3 * MIB + 1):
        size = piece_size(12 * MIB, most)
        assert size <= most and 12 * MIB % size == 0 and size % 4096 == 0
    with pytest.raises(FabricError, match=r"can't be cut at pages for a device that takes 4095"):
        piece_size(8 * MIB, 4_095)
