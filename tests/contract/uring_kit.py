"""Storage over a real ring whose completions pass through a test's hand. Where there is no io_uring its tests are skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, FileShop, Slots, namespace, new_key, uring_storage

from kvmoverd.adapters.storage.uring_probe import uring_refusal
from kvmoverd.core.layout import Layout
from kvmoverd.core.status import Reason

if uring_refusal():
    pytest.skip(f"io_uring can't be used here: {uring_refusal()}", allow_module_level=True)


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


def stored_key(driver: Driver, slots: Slots) -> bytes:
    key = new_key()
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    return key


def read_all(driver: Driver, slots: Slots, key: bytes) -> set[Reason]:
    done = driver.run([driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot in range(8)])
    assert all(slots.payload(slot) == PAYLOAD for slot in range(8))
    return {completion.reason for completion in done}


def rings() -> int:
    """Open descriptors of rings and eventfds; files may be open for a moment in threads that tidy up."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).rpartition("/")[2].startswith("anon_inode:") for link in links)


def same_modules() -> dict[str, str]:
    """An environment in which a child finds the modules of this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
