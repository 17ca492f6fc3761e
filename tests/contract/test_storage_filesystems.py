"""Real filesystems that are small, full, of large sectors or turned read-only, under every layout and engine over files."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from files_kit import NAMES, SEGMENTS, SPACE, payload_of, read_back, store
from fuse_kit import fuse_mount
from loop_kit import fill, fill_inodes, loop_filesystem, turn_read_only
from storage_kit import SHOPS, SMALL_SEGMENTS, UNEVEN, Driver, Slots, namespace, new_key, open_shop, until

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import Layout
from kvmoverd.core.status import Reason

V32 = Layout(block_tokens=64, layers=((656 * 64,),) * 61)
"""A Full Block of 2,561,024 bytes: 1024 more than a multiple of 4096."""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 1)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with loop_filesystem(tmp_path / "small", 32 << 20) as place:
        yield place


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_whole_blocks_go_directly_to_a_device_whatever_its_sectors(
    tmp_path: Path, name: str, sector_bytes: int
) -> None:
    space, slots, key = namespace(V32), Slots(V32, 2), new_key()
    assert V32.block_bytes % 4096 == 1024
    with (
        loop_filesystem(tmp_path / "place", 128 << 20, sector_bytes=sector_bytes) as place,
        open_shop(name, place, space) as shop,
    ):
        driver = Driver(shop.storage)
        assert shop.storage.facts.io_mode == "direct" and "refused" not in shop.storage.facts.note
        assert driver.write(space, key, slots.fill(0, payload_of(key, V32))).reason is Reason.OK
        done = driver.read(space, key, slots.fill(1, b""))
        assert (done.reason, done.moved_bytes) == (Reason.OK, V32.record_bytes)
        assert slots.payload(1) == payload_of(key, V32)
        assert driver.read(space, key, slots.fill(1, b""), range(2)).reason is Reason.OK


def test_a_disk_that_others_have_filled_is_no_space_and_its_blocks_are_still_read(
    name: str, small: Path, slots: Slots
) -> None:
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        ballast = small / "ballast"
        fill(ballast)
        refused = new_key()
        done = driver.write(SPACE, refused, slots.fill(0, payload_of(refused)))
        assert done.reason is Reason.NO_SPACE and "ENOSPC" in done.message
        assert read_back(driver, slots, [refused]) == [Reason.MISS]
        assert shop.storage.counters.corrupt_blocks == 0
        ballast.unlink()
        stored = store(driver, slots, 3)
        assert read_back(driver, slots, stored) == [Reason.OK] * 3
        assert shop.storage.counters.written_blocks == 3


def test_blocks_on_a_disk_that_was_filled_later_are_right_or_missing(name: str, small: Path, slots: Slots) -> None:
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        keys = store(driver, slots, 8)
        fill(small / "ballast")
        assert read_back(driver, slots, keys) == [Reason.OK] * 8, "to read takes no room"
        late = new_key()
        reason = driver.write(SPACE, late, slots.fill(0, payload_of(late))).reason
        # A file per block has nothing that it may drop; segments make room by dropping their own.
        assert reason is Reason.NO_SPACE or name in SEGMENTS
        assert read_back(driver, slots, keys) == [Reason.OK] * 8
    if name in SEGMENTS:
        fill(small / "ballast")  # what a stop gives back of its last segment, too
        with open_shop(name, small, SPACE) as shop:
            driver = Driver(shop.storage)
            until(lambda: driver.present(SPACE, *keys) == len(keys))
            assert read_back(driver, slots, keys) == [Reason.OK] * 8
            assert "nothing can be written until there is room" in shop.storage.facts.note
        (small / "ballast").unlink()
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *keys) == len(keys))
        assert read_back(driver, slots, keys) == [Reason.OK] * 8
        assert shop.storage.counters.corrupt_blocks == 0


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_that_open_on_a_full_disk_write_as_soon_as_there_is_room(name: str, small: Path, slots: Slots) -> None:
    with open_shop(name, small, SPACE) as shop:
        keys = store(Driver(shop.storage), slots, 8)
    fill(small / "ballast")
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *keys) == len(keys))
        (small / "ballast").unlink()
        late = store(driver, slots, 1)
        assert read_back(driver, slots, [*keys, *late]) == [Reason.OK] * 9
        assert "nothing can be written" not in shop.storage.facts.note
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *keys, *late) == 9)
        assert read_back(driver, slots, [*keys, *late]) == [Reason.OK] * 9


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_that_filled_the_disk_make_room_at_the_next_start(name: str, small: Path, slots: Slots) -> None:
    with open_shop(name, small, SPACE) as shop:
        # The store is most of what there is, so that a quarter of it is enough to begin in.
        keys = store(Driver(shop.storage), slots, 400)
    # Somebody has deleted one: that it is dead can be said in no log as long as there is no room for a log.
    min((small / "kvm1" / "authors").glob("*/seg/*.seg")).unlink()
    fill(small / "ballast")
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, keys[-1]) == 1)

        def stored() -> bool:
            key = new_key()
            done = driver.write(SPACE, key, slots.fill(0, payload_of(key)))
            assert done.reason in (Reason.OK, Reason.NO_SPACE), done.message
            return done.reason is Reason.OK

        until(stored)
        assert set(read_back(driver, slots, keys)) == {Reason.OK, Reason.MISS}, "some made room for what is new"
        assert shop.storage.counters.corrupt_blocks == 0


def test_a_disk_without_inodes_but_with_room_is_no_space_or_needs_none(tmp_path: Path, name: str, slots: Slots) -> None:
    with (
        loop_filesystem(tmp_path / "place", 32 << 20, inodes=256) as place,
        open_shop(name, place, SPACE) as shop,
    ):
        driver = Driver(shop.storage)
        keys = store(driver, slots, 2)
        empty = place / "others"
        empty.mkdir()
        fill_inodes(empty)
        room = os.statvfs(place)
        assert room.f_favail == 0 and room.f_bavail * room.f_frsize > 16 << 20
        late = new_key()
        done = driver.write(SPACE, late, slots.fill(0, payload_of(late)))
        if name in SEGMENTS:
            assert done.reason is Reason.OK, "a block in a segment that is there takes no inode"
        else:
            assert done.reason is Reason.NO_SPACE and "ENOSPC" in done.message
        assert read_back(driver, slots, keys) == [Reason.OK] * 2
        for file in empty.iterdir():
            file.unlink()
        assert read_back(driver, slots, store(driver, slots, 1)) == [Reason.OK]


def test_a_disk_that_turns_read_only_refuses_writes_and_serves_reads(name: str, small: Path, slots: Slots) -> None:
    with open_shop(name, small, SPACE) as shop:
        driver = Driver(shop.storage)
        keys = store(driver, slots, 4)
        turn_read_only(small)
        failed_ops = shop.storage.counters.failed_ops
        for _ in range(3):
            refused = new_key()
            done = driver.write(SPACE, refused, slots.fill(0, payload_of(refused)))
            assert done.reason is Reason.IO_ERROR and ("EROFS" in done.message or "EIO" in done.message)
            assert read_back(driver, slots, [refused]) == [Reason.MISS]
        assert shop.storage.counters.failed_ops == failed_ops + 3
        assert read_back(driver, slots, keys) == [Reason.OK] * 4
        assert driver.present(SPACE, *keys) == 4
    with pytest.raises(StorageUnusable, match="EROFS"):
        SHOPS[name](small)


def test_names_longer_than_a_filesystem_takes_are_refused_as_a_root(tmp_path: Path, name: str) -> None:
    for root in (tmp_path / ("n" * 256), tmp_path.joinpath(*["d" * 200] * 22)):
        with pytest.raises(StorageUnusable, match="ENAMETOOLONG"):
            SHOPS[name](root)


@pytest.mark.parametrize("node", ["n" * 300, "", "../n", "n/n", ".n"])
def test_a_node_whose_name_can_be_no_directory_is_refused_with_the_limit(tmp_path: Path, node: str) -> None:
    with pytest.raises(StorageUnusable, match=r"is no name of an author: .* at most"):
        open_segment_store(tmp_path, node=node, boot_id="boot", settings=SMALL_SEGMENTS)
    assert list((tmp_path / "kvm1/authors").iterdir()) == []


def test_memory_that_the_kernel_may_not_write_is_an_io_error_and_no_fault_of_the_block(
    tmp_path: Path, name: str, slots: Slots
) -> None:
    with open_shop(name, tmp_path, SPACE) as shop:
        driver, mprotect = Driver(shop.storage), ctypes.CDLL(None, use_errno=True).mprotect
        keys, closed = store(driver, slots, 2), Slots(UNEVEN, 1)
        where = (ctypes.c_void_p(closed.address(0)), ctypes.c_size_t(UNEVEN.record_bytes))
        assert mprotect(*where, 0) == 0
        done = driver.read(SPACE, keys[0], closed.address(0))
        assert mprotect(*where, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        assert done.reason is Reason.IO_ERROR and "EFAULT" in done.message
        assert read_back(driver, slots, keys) == [Reason.OK] * 2
        assert (shop.storage.counters.failed_ops, shop.storage.counters.corrupt_blocks) == (1, 0)


def test_a_root_whose_filesystem_has_died_is_an_error_and_never_a_block(
    tmp_path: Path, name: str, slots: Slots
) -> None:
    with fuse_mount(tmp_path / "place", tmp_path / "backing") as fuse, open_shop(name, fuse.place, SPACE) as shop:
        driver = Driver(shop.storage)
        keys = store(driver, slots, 3)
        fuse.kill()
        assert set(read_back(driver, slots, keys)) <= {Reason.IO_ERROR, Reason.MISS}
        done = driver.write(SPACE, new_key(), slots.fill(0, b""))
        assert done.reason is Reason.IO_ERROR
        assert "ENOTCONN" in done.message or "ECONNABORTED" in done.message
