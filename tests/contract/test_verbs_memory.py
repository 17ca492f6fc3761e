"""The book of registered memory: found by arrays, cut where pieces end, near to a CNIC, and gone before its owner is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from verbs_kit import FakeFabric, FakeRegistration, FakeWire
from verbs_region_kit import GpuRegion, Region, first_cnic, iov

from kvmoverd.adapters.transport.verbs import memory as verbs_memory
from kvmoverd.adapters.transport.verbs.book import Book, NotRegistered
from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.memory import MemoryBook
from kvmoverd.core.errors import BadRegion, QueueFull
from kvmoverd.ports.memory import Near
from kvmoverd.ports.transport import IoVec

MIB = 1 << 20
POOL = 0x10_0000_0000


@pytest.fixture
def fabrics() -> Iterator[list[FakeFabric]]:
    with FakeWire() as wire:
        found = [FakeFabric(wire, f"fake{cnic}:1", cnic=cnic, piece_bytes_max=1 << 32) for cnic in range(2)]
        yield found
        for fabric in found:
            fabric.close()


@pytest.fixture
def book(fabrics: list[FakeFabric]) -> Iterator[MemoryBook]:
    made = MemoryBook(fabrics, lambda near, users: (near.numa_node or 0, "as it says"))
    yield made
    made.close()


def check_keys(fabric: FakeFabric, slices: IoVec, keys: Any) -> None:
    """Each slice is whole in the piece that its keys open."""
    assert len(slices) == len(keys)
    for (address, size_bytes), (local, remote) in zip(slices.tolist(), keys.tolist(), strict=True):
        assert fabric.book.may_read(local, address, size_bytes)
        assert fabric.book.may_be_written(remote, address, size_bytes)


def test_the_book_is_what_the_links_ask_for(book: MemoryBook) -> None:
    as_port: Book = book
    assert as_port.preferred(iov()) == -1


def test_the_pool_is_registered_with_every_cnic_in_pieces_that_no_slot_straddles(
    book: MemoryBook, fabrics: list[FakeFabric]
) -> None:
    book.add_pool(Region(POOL, 5 << 30), 192 * MIB)
    step = 5 * 192 * MIB
    for fabric in fabrics:
        assert [len(fabric.book), fabric.book.registered_bytes] == [6, 5 << 30]
    slots = iov(*((POOL + at, 64 * MIB) for at in range(0, 5 << 30, 64 * MIB)))
    for cnic, fabric in enumerate(fabrics):
        found, keys = book.keyed(cnic, slots)
        assert found is slots
        check_keys(fabric, found, keys)
    assert len(np.unique(book.keyed(0, slots)[1][:, 0])) == 6
    before, after = book.keyed(0, iov((POOL + step - 1, 1), (POOL + step, 1)))[1][:, 1]
    assert before != after
    assert book.preferred(slots) == -1 and book.registered_bytes == 5 << 30


def test_slices_are_cut_where_a_piece_ends_and_keep_their_order(book: MemoryBook, fabrics: list[FakeFabric]) -> None:
    region = Region(POOL, 200 * MIB)
    book.adopt(region, Near())
    cut = POOL + 64 * MIB
    asked = iov((POOL + 130 * MIB, 10), (cut - 10, 30), (POOL, 200 * MIB), (cut, 5), (cut - 5, 5))
    found, keys = book.keyed(1, asked)
    wanted = [(POOL + 130 * MIB, 10), (cut - 10, 10), (cut, 20)]
    wanted += [(POOL + at * MIB, size * MIB) for at, size in ((0, 64), (64, 64), (128, 64), (192, 8))]
    assert found.tolist() == [list(row) for row in [*wanted, (cut, 5), (cut - 5, 5)]]
    check_keys(fabrics[1], found, keys)
    region.close()


def test_slices_without_a_byte_are_left_out(book: MemoryBook) -> None:
    region = Region(POOL, MIB)
    book.adopt(region, Near())
    assert book.keyed(0, iov((1, 0), (POOL, 8), (2, 0)))[0].tolist() == [[POOL, 8]]
    assert [len(part) for part in book.keyed(0, iov((1, 0)))] == [0, 0]
    assert [len(part) for part in book.keyed(0, iov())] == [0, 0]
    region.close()


@pytest.mark.parametrize("slice_", [(POOL - 1, 2), (POOL + MIB - 1, 2), (POOL + MIB, 1), (8, 8), (POOL - MIB, 3 * MIB)])
def test_what_lies_outside_is_refused_with_address_and_size(book: MemoryBook, slice_: tuple[int, int]) -> None:
    with pytest.raises(NotRegistered, match="no registered memory"):
        book.keyed(0, iov(slice_))
    region = Region(POOL, MIB)
    book.adopt(region, Near())
    with pytest.raises(NotRegistered, match=rf"{slice_[1]} bytes at {slice_[0]:#x} lie in no .* 1 slices of 2"):
        book.keyed(0, iov((POOL, 8), slice_))
    region.close()


def test_a_gap_between_two_regions_is_no_memory(book: MemoryBook) -> None:
    regions = [Region(POOL, MIB), Region(POOL + 2 * MIB, MIB)]
    for region in regions:
        book.adopt(region, Near())
    with pytest.raises(NotRegistered, match="lie in no registered memory"):
        book.keyed(0, iov((POOL + MIB - 8, MIB + 16)))
    for region in regions:
        region.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_regions_of_one_allocation_may_overlap_and_each_stays_whole_when_others_go(
    book: MemoryBook, fabrics: list[FakeFabric], order: tuple[int, ...]
) -> None:
    """CUDA opens an allocation once: whoever registers it, or parts of it, has the same addresses."""
    spans = [(0, 8 * MIB), (0, 2 * MIB), (4 * MIB, 8 * MIB), (5 * MIB, MIB)]
    regions = [Region(POOL + start, size_bytes) for start, size_bytes in spans]
    for at in order:
        book.adopt(regions[at], Near(numa_node=1))
    for gone in order:
        for region in (region for region in regions if not region.closed):
            whole = iov((region.address, region.size_bytes), (region.address + region.size_bytes - 8, 8))
            found, keys = book.keyed(1, whole)
            check_keys(fabrics[1], found, keys)
            assert found[:, 1].sum() == region.size_bytes + 8 and book.preferred(whole[1:]) == 1
        regions[gone].close()
    with pytest.raises(NotRegistered):
        book.keyed(1, iov((POOL, 1)))


def test_a_closed_region_is_known_to_nobody_and_another_may_have_its_addresses(
    book: MemoryBook, fabrics: list[FakeFabric]
) -> None:
    for size in (MIB, 100 * MIB, 30 * MIB):
        region = Region(POOL, size)
        book.adopt(region, Near(numa_node=1))
        assert book.preferred(iov((POOL + size - 1, 1))) == 1 and book.users() == [0, 1]
        check_keys(fabrics[0], *book.keyed(0, iov((POOL, size))))
        region.close()
        assert book.preferred(iov((POOL, 1))) == -1 and book.users() == [0, 0] and book.registered_bytes == 0
        with pytest.raises(NotRegistered):
            book.keyed(0, iov((POOL, 1)))
    book.close()
    assert [len(fabric.book) for fabric in fabrics] == [0, 0]


def test_a_region_that_is_adopted_again_stays_as_it_is(book: MemoryBook, fabrics: list[FakeFabric]) -> None:
    region = Region(POOL, MIB)
    book.adopt(region, Near())
    keys = book.keyed(0, iov((POOL, 1)))[1].tolist()
    book.adopt(region, Near(numa_node=1))
    assert book.keyed(0, iov((POOL, 1)))[1].tolist() == keys and len(fabrics[0].book) == 1
    region.close()
    assert len(fabrics[0].book) == 0


def test_a_region_that_one_cnic_refuses_is_registered_with_none(book: MemoryBook, fabrics: list[FakeFabric]) -> None:
    fabrics[1].register_fails = True
    region = Region(POOL, MIB)
    with pytest.raises(BadRegion, match=r"not taken by the CNICs: fake1:1: can't register 1048576 B: ENOMEM"):
        book.adopt(region, Near())
    assert [len(fabric.book) for fabric in fabrics] == [0, 0] and book.users() == [0, 0]
    fabrics[1].register_fails = False
    book.adopt(region, Near())
    assert [len(fabric.book) for fabric in fabrics] == [1, 1]
    region.close()
    fabrics[0].register_fails = True
    with pytest.raises(FabricError, match="fake0:1"):
        book.add_pool(Region(POOL, MIB), MIB)


def test_gpu_memory_goes_by_its_descriptor_which_begins_before_it() -> None:
    seen: list[tuple[int, int, int, int]] = []

    class Gpuish(FakeFabric):
        def register(self, address: int, size_bytes: int, *, piece_bytes: int, dmabuf_fd: int = -1) -> Any:
            seen.append((address, size_bytes, piece_bytes, dmabuf_fd))
            return super().register(address, size_bytes, piece_bytes=piece_bytes)

    with FakeWire() as wire:
        fabric = Gpuish(wire)
        book = MemoryBook([fabric], first_cnic)
        region = GpuRegion(POOL + 4096, 1 << 33, 77)
        book.adopt(region, Near())
        assert seen == [(POOL, (1 << 33) + 4096, (1 << 33) + 4096, 77)]
        check_keys(fabric, *book.keyed(0, iov((POOL + 4096, 1 << 33))))
        with pytest.raises(NotRegistered):
            book.keyed(0, iov((POOL, 8)))
        region.close()
        assert len(fabric.book) == 0, "its descriptor is closed next"
        with pytest.raises(BadRegion, match=r"8192 bytes of GPU memory without a dmabuf: the driver is too old"):
            book.adopt(GpuRegion(POOL, 8192, -1, "the driver is too old"), Near())
        fabric.close()


class Slow:
    """Registers when it is told to."""

    def __init__(self, fabric: FakeFabric) -> None:
        self.fabric = fabric
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.name = fabric.name
        self.calls = 0

    def register(self, address: int, size_bytes: int, *, piece_bytes: int, dmabuf_fd: int = -1) -> Any:
        self.calls += 1
        made = self.fabric.register(address, size_bytes, piece_bytes=piece_bytes, dmabuf_fd=dmabuf_fd)
        self.begun.set()
        assert self.go_on.wait(5.0)
        return made


def adopt_in_vain(book: MemoryBook, region: Region) -> None:
    with pytest.raises(BadRegion, match="went away meanwhile"):
        book.adopt(region, Near())


@pytest.mark.parametrize("ends", ["the region", "the book"])
def test_what_goes_while_it_is_registered_leaves_nothing_behind(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_memory, "CLOSE_S", 0.05)
    with FakeWire() as wire:
        fabric = FakeFabric(wire)
        slow = Slow(fabric)
        book = MemoryBook([slow, fabric], first_cnic)  # type: ignore[list-item]
        region, refused = Region(POOL, MIB), list[BadRegion]()

        def adopt() -> None:
            try:
                book.adopt(region, Near())
            except BadRegion as error:
                refused.append(error)

        thread = threading.Thread(target=adopt)
        thread.start()
        assert slow.begun.wait(5.0)
        region.close() if ends == "the region" else book.close()
        slow.go_on.set()
        thread.join(5.0)
        assert "went away meanwhile" in str(refused[0]) and len(fabric.book) == 0
        book.close()
        fabric.close()


def test_a_region_that_is_still_being_registered_is_not_taken_for_registered() -> None:
    with FakeWire() as wire:
        fabric = FakeFabric(wire)
        slow = Slow(fabric)
        book = MemoryBook([slow], first_cnic)  # type: ignore[list-item]
        region = Region(POOL, MIB)
        thread = threading.Thread(target=book.adopt, args=(region, Near()))
        thread.start()
        assert slow.begun.wait(5.0)
        with pytest.raises(QueueFull, match="still being registered"):
            book.adopt(region, Near())
        slow.go_on.set()
        thread.join(5.0)
        book.adopt(region, Near())
        assert len(book.keyed(0, iov((POOL, 10)))[0]) == 1
        assert book.close()
        fabric.close()


def test_a_device_that_keeps_memory_is_not_closed(fabrics: list[FakeFabric], monkeypatch: pytest.MonkeyPatch) -> None:
    close = FakeRegistration.close

    def keeps(registration: FakeRegistration) -> None:
        close(registration)
        raise FabricError("a memory region can't be taken back: EBUSY")

    book, region = MemoryBook(fabrics, first_cnic), Region(POOL, MIB)
    book.adopt(region, Near())
    monkeypatch.setattr(FakeRegistration, "close", keeps)
    assert not book.close()


def test_a_region_that_went_before_its_turn_is_not_registered(book: MemoryBook, fabrics: list[FakeFabric]) -> None:
    region = Region(POOL, MIB)
    region.close()
    with pytest.raises(BadRegion, match="went away meanwhile"):
        book.adopt(region, Near())
    assert [len(fabric.book) for fabric in fabrics] == [0, 0] and book.users() == [0, 0]


def test_a_large_region_that_goes_is_not_registered_to_its_end() -> None:
    with FakeWire() as wire:
        fabric = FakeFabric(wire)
        slow = Slow(fabric)
        book = MemoryBook([slow], first_cnic)  # type: ignore[list-item]
        region = Region(POOL, 8 << 30)
        thread = threading.Thread(target=adopt_in_vain, args=(book, region))
        thread.start()
        assert slow.begun.wait(5.0)
        region.close()
        slow.go_on.set()
        thread.join(5.0)
        assert slow.calls == 1 and len(fabric.book) == 0
        fabric.close()


def test_a_close_waits_for_what_is_deregistered_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeWire() as wire:
        fabric = FakeFabric(wire)
        book = MemoryBook([fabric], first_cnic)
        region = Region(POOL, 1 << 30)
        book.adopt(region, Near())
        held = threading.Event()
        close_all = verbs_memory._close_all
        monkeypatch.setattr(verbs_memory, "_close_all", lambda each: (held.wait(0.2), close_all(each)))
        region.close()
        assert len(fabric.book) == 16, "the loop does not wait"
        book.close()
        assert len(fabric.book) == 0
        fabric.close()


def test_lookups_go_on_while_regions_come_and_go(book: MemoryBook, fabrics: list[FakeFabric]) -> None:
    book.add_pool(Region(POOL, 1 << 30), 64 * MIB)
    slices = iov(*((POOL + at * 4096, 4096) for at in range(1000)))
    stop, failures = threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not stop.is_set():
                assert book.keyed(0, slices)[0] is slices
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(200):
        region = Region(POOL + (2 + number % 3 << 30), 100 * MIB)
        book.adopt(region, Near())
        region.close()
    stop.set()
    thread.join(5.0)
    assert not failures and book.registered_bytes == 1 << 30


def test_random_slices_of_random_memory_are_found_as_one_by_one(book: MemoryBook, fabrics: list[FakeFabric]) -> None:
    random = np.random.default_rng(5)
    regions = [Region(POOL + number * (256 * MIB), int(random.integers(1, 256 * MIB))) for number in range(8)]
    for region in regions:
        book.adopt(region, Near(numa_node=int(random.integers(2))))
    rows = []
    for _ in range(500):
        region = regions[int(random.integers(8))]
        start = int(random.integers(region.size_bytes))
        rows.append((region.address + start, int(random.integers(0, region.size_bytes - start + 1))))
    asked = iov(*rows)
    found, keys = book.keyed(0, asked)
    check_keys(fabrics[0], found, keys)
    at = 0
    for address, size_bytes in rows:
        done_bytes = 0
        while done_bytes < size_bytes:
            assert found[at, 0] == address + done_bytes and found[at, 1] > 0
            done_bytes, at = done_bytes + int(found[at, 1]), at + 1
        assert done_bytes == size_bytes
    assert at == len(found)
    for region in regions:
        region.close()
