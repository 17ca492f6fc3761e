"""Filesystems that do less than asked, fail, hang or lose power, under every layout and engine over files."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from files_kit import NAMES, SEGMENTS, SPACE, payload_of, read_back, store
from fuse_kit import FuseMount, fuse_mount
from storage_kit import SHOPS, UNEVEN, Driver, Shop, Slots, new_key, open_shop, until

from kvmoverd.core.status import Reason


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 1)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    with fuse_mount(tmp_path / "place", tmp_path / "backing") as fuse:
        yield fuse


@pytest.fixture
def shop(name: str, fuse: FuseMount) -> Iterator[Shop]:
    with open_shop(name, fuse.place, SPACE) as shop:
        yield shop
        fuse.clear()
        fuse.resume()


def records(name: str) -> str:
    """Paths of what holds records."""
    return "*.seg" if name in SEGMENTS else "*.blk"


def test_reads_that_give_less_than_asked_are_carried_on(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver, slots: Slots
) -> None:
    keys = store(driver, slots, 3)
    fuse.shorten("READ", records(name), 5000)
    assert read_back(driver, slots, keys) == [Reason.OK] * 3
    assert shop.storage.counters.read_bytes == 3 * UNEVEN.record_bytes, "what came twice is counted once"


def test_a_read_that_gives_nothing_is_no_block(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver, slots: Slots
) -> None:
    keys = store(driver, slots, 1)
    assert read_back(driver, slots, keys) == [Reason.OK]
    fuse.shorten("READ", records(name), 0)
    done = driver.read(SPACE, keys[0], slots.fill(0, b""))
    assert done.reason in (Reason.SHORT_READ, Reason.CORRUPT)
    assert f"of {UNEVEN.record_bytes} bytes" in done.message
    fuse.clear()
    assert store_again(driver, slots, keys[0]) == UNEVEN.record_bytes
    assert read_back(driver, slots, keys) == [Reason.OK]


def store_again(driver: Driver, slots: Slots, key: bytes) -> int:
    """Writes a block once more; bytes that moved."""
    done = driver.write(SPACE, key, slots.fill(0, payload_of(key)))
    assert done.reason is Reason.OK, done
    return done.moved_bytes


def test_writes_that_take_less_than_asked_are_carried_on(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver, slots: Slots
) -> None:
    fuse.shorten("WRITE", bytes_max=9000)
    keys = store(driver, slots, 3)
    assert fuse.counts["WRITE"] >= 3 * UNEVEN.record_bytes // 9000
    fuse.clear()
    assert read_back(driver, slots, keys) == [Reason.OK] * 3
    with open_shop(name, fuse.place, SPACE) as again:
        until(lambda: Driver(again.storage).present(SPACE, *keys) == 3)
        assert read_back(Driver(again.storage), slots, keys) == [Reason.OK] * 3


def test_a_block_that_can_not_be_read_is_an_error_then_a_miss_until_it_is_stored_anew(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver, slots: Slots
) -> None:
    bad, good = store(driver, slots, 2)
    fuse.fail("READ", records(name), errno.EIO)
    done = driver.read(SPACE, bad, slots.fill(0, b""))
    assert done.reason is Reason.IO_ERROR and "EIO" in done.message
    assert shop.storage.counters.failed_ops == 1 and shop.storage.counters.corrupt_blocks == 0
    fuse.clear()
    assert read_back(driver, slots, [bad]) == [Reason.MISS], "it is left alone"
    assert driver.present(SPACE, bad) == 0
    assert read_back(driver, slots, [good]) == [Reason.OK], "what lies beside it is not held against it"
    assert store_again(driver, slots, bad) == UNEVEN.record_bytes
    assert read_back(driver, slots, [bad, good]) == [Reason.OK] * 2


@pytest.mark.parametrize("op", ["OPEN", "READ"])
def test_a_stale_file_is_a_miss_and_is_repaired_by_the_next_store(
    name: str, fuse: FuseMount, op: str, slots: Slots
) -> None:
    with open_shop(name, fuse.place, SPACE) as shop:
        keys = store(Driver(shop.storage), slots, 1)
    with open_shop(name, fuse.place, SPACE) as shop:  # nothing is open yet
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *keys) == 1)
        fuse.fail(op, records(name), errno.ESTALE)
        assert read_back(driver, slots, keys) == [Reason.MISS]
        fuse.clear()
        assert (shop.storage.counters.failed_ops, shop.storage.counters.missed_blocks) == (0, 1)
        store_again(driver, slots, keys[0])
        assert read_back(driver, slots, keys) == [Reason.OK]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_without_room_is_no_space_and_leaves_no_block(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver, slots: Slots, number: int
) -> None:
    stored = store(driver, slots, 2)
    fuse.fail("WRITE", number=number)
    key = new_key()
    done = driver.write(SPACE, key, slots.fill(0, payload_of(key)))
    assert done.reason is Reason.NO_SPACE and errno.errorcode[number] in done.message
    assert read_back(driver, slots, [key]) == [Reason.MISS]
    fuse.clear()
    # Segments may have dropped their own blocks to make room.
    assert set(read_back(driver, slots, stored)) <= ({Reason.OK, Reason.MISS} if name in SEGMENTS else {Reason.OK})
    assert store_again(driver, slots, key) == UNEVEN.record_bytes
    assert read_back(driver, slots, [key]) == [Reason.OK]


@pytest.mark.parametrize("op", ["WRITE", "FSYNC"])
def test_a_write_that_fails_or_can_not_be_synced_is_never_seen(
    name: str, fuse: FuseMount, op: str, slots: Slots
) -> None:
    with open_shop(name, fuse.place, SPACE) as shop:
        driver = Driver(shop.storage)
        good = store(driver, slots, 1)
        fuse.fail(op, number=errno.EIO)
        bad = new_key()
        done = driver.write(SPACE, bad, slots.fill(0, payload_of(bad)))
        assert done.reason is Reason.IO_ERROR and "EIO" in done.message
        assert shop.storage.counters.failed_ops == 1 and shop.storage.counters.written_blocks == 1
        assert read_back(driver, slots, [bad]) == [Reason.MISS] and driver.present(SPACE, bad) == 0
        fuse.clear()
        good += store(driver, slots, 1)
        assert read_back(driver, slots, good) == [Reason.OK] * 2, "one failure stops nothing"
    with open_shop(name, fuse.place, SPACE) as shop:
        until(lambda: Driver(shop.storage).present(SPACE, *good) == 2)
        assert read_back(Driver(shop.storage), slots, [*good, bad])[:2] == [Reason.OK] * 2


def test_where_links_are_refused_blocks_and_manifests_are_published_all_the_same(
    name: str, fuse: FuseMount, slots: Slots
) -> None:
    fuse.fail("LINK", number=errno.EPERM)
    with open_shop(name, fuse.place, SPACE) as shop:
        driver = Driver(shop.storage)
        keys = store(driver, slots, 2)
        assert read_back(driver, slots, keys) == [Reason.OK] * 2
    with open_shop(name, fuse.place, SPACE) as shop:
        until(lambda: Driver(shop.storage).present(SPACE, *keys) == 2)


def test_a_filesystem_as_poor_as_3fs_will_do(tmp_path: Path, name: str, slots: Slots) -> None:
    """No locks, no fallocate, no sync of directories, no extended attributes, no flags of rename, no hard links."""
    with fuse_mount(tmp_path / "place", tmp_path / "backing", locks=False, kind="fuse.hf3fs") as fuse:
        fuse.fail("LINK", number=errno.ENOSYS)
        for _ in range(2):
            with open_shop(name, fuse.place, SPACE) as shop:
                driver = Driver(shop.storage)
                assert shop.storage.facts.io_mode == "direct"
                assert read_back(driver, slots, store(driver, slots, 3)) == [Reason.OK] * 3


def test_a_read_that_hangs_holds_its_slot_and_neither_other_reads_nor_the_stop(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver
) -> None:
    slots = Slots(UNEVEN, 2)
    hung, other = store(driver, slots, 2)
    fuse.hang("READ", records(name), times=1)
    first, second = driver.read_op(SPACE, hung, slots.fill(0, b"")), driver.read_op(SPACE, other, slots.fill(1, b""))
    shop.storage.submit([first])
    until(lambda: fuse.held == 1)
    shop.storage.submit([second])
    done = driver.collect(1)
    assert [(d.op_id, d.reason) for d in done] == [(second.op_id, Reason.OK)] and slots.payload(1) == payload_of(other)
    started_s = time.monotonic()
    assert not shop.storage.close(0.2), "the kernel still has slot 0"
    assert time.monotonic() - started_s < 2.0
    fuse.resume()
    until(lambda: shop.storage.close(0.1))
    late = [d for d in shop.storage.poll(8) if d.op_id == first.op_id]
    assert len(late) == 1 and late[0].reason in (Reason.OK, Reason.SHUTTING_DOWN)


def test_writes_that_hang_leave_reads_alone(name: str, fuse: FuseMount, shop: Shop, driver: Driver) -> None:
    slots = Slots(UNEVEN, 2)
    stored = store(driver, slots, 1)
    fuse.hang("WRITE", times=1)
    key = new_key()
    write = driver.write_op(SPACE, key, slots.fill(1, payload_of(key)))
    shop.storage.submit([write])
    until(lambda: fuse.held == 1)
    assert read_back(driver, slots, stored) == [Reason.OK]
    fuse.resume()
    assert [(d.op_id, d.reason) for d in driver.collect(1)] == [(write.op_id, Reason.OK)]
    assert read_back(driver, slots, [key]) == [Reason.OK]


def test_a_stop_does_not_wait_for_a_filesystem_in_which_everything_hangs(
    name: str, fuse: FuseMount, shop: Shop, driver: Driver
) -> None:
    slots = Slots(UNEVEN, 2)
    keys = store(driver, slots, 2)
    fuse.hang()
    shop.storage.submit([driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot, key in enumerate(keys)])
    until(lambda: fuse.held > 0)
    started_s = time.monotonic()
    assert not shop.storage.close(0.5), "the kernel still has a slot, or a thread of the store hangs"
    assert time.monotonic() - started_s < 3.0
    fuse.resume()
    until(lambda: shop.storage.close(0.1))


@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("op", ["WRITE", "FSYNC"])
def test_a_page_of_a_log_that_fails_is_given_up_and_the_log_goes_on(
    name: str, fuse: FuseMount, op: str, slots: Slots
) -> None:
    with open_shop(name, fuse.place, SPACE) as shop:
        driver = Driver(shop.storage)
        good = store(driver, slots, 2)
        fuse.fail(op, "*log.*", errno.EIO, times=1)
        bad = new_key()
        done = driver.write(SPACE, bad, slots.fill(0, payload_of(bad)))
        assert done.reason is Reason.IO_ERROR and "EIO" in done.message
        assert read_back(driver, slots, [bad]) == [Reason.MISS]
        good += store(driver, slots, 2)
        assert read_back(driver, slots, good) == [Reason.OK] * 4
    with open_shop(name, fuse.place, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *good) == 4)
        assert read_back(driver, slots, good) == [Reason.OK] * 4, "what stands behind the gap is read"


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_after_a_power_cut_all_that_was_durable_is_there_and_nothing_is_wrong(
    tmp_path: Path, name: str, keep: float
) -> None:
    count = 24
    slots = Slots(UNEVEN, count)
    with fuse_mount(tmp_path / "place", tmp_path / "backing", volatile=True) as fuse:
        shop = SHOPS[name](fuse.place)
        shop.storage.open_namespace(SPACE)
        driver = Driver(shop.storage)
        durable = store(driver, slots, 4)
        late = [new_key() for _ in range(count)]
        # Files: six more become durable. Segments are synced in groups: it stops at the first's, of records or log.
        fuse.hang("FSYNC", after=int(keep != 0.5) if name in SEGMENTS else 6)
        ops = [driver.write_op(SPACE, key, slots.fill(slot, payload_of(key))) for slot, key in enumerate(late)]
        shop.storage.submit(ops)
        until(lambda: fuse.held > 0)
        time.sleep(0.1)
        keys = dict(zip((op.op_id for op in ops), late, strict=True))
        durable += [keys[d.op_id] for d in shop.storage.poll(64) if d.reason is Reason.OK]
        assert fuse.unsynced_pages > 0
        assert fuse.power_cut(keep=keep, seed=len(durable)) > 0 or keep
        until(lambda: shop.storage.close(0.5))
        with open_shop(name, fuse.place, SPACE) as again:
            reader = Driver(again.storage)
            until(lambda: reader.present(SPACE, *durable) == len(durable))
            assert read_back(reader, slots, durable) == [Reason.OK] * len(durable)
            rest = [key for key in late if key not in durable]
            assert set(read_back(reader, slots, rest)) <= {Reason.MISS, Reason.CORRUPT, Reason.OK}
            for key in rest:
                store_again(reader, slots, key)
            assert read_back(reader, slots, late) == [Reason.OK] * count


def test_a_slow_filesystem_is_only_slow(name: str, fuse: FuseMount, shop: Shop, driver: Driver) -> None:
    slots = Slots(UNEVEN, 8)
    keys = store(driver, slots, 8)
    fuse.delay("READ", records(name), 0.2)
    started_s = time.monotonic()
    done = driver.run(driver.read_op(SPACE, key, slots.fill(slot, b"")) for slot, key in enumerate(keys))
    took_s = time.monotonic() - started_s
    assert {d.reason for d in done} == {Reason.OK} and 0.2 <= took_s < 8 * 0.2, "they waited at the same time"
    assert [slots.payload(slot) for slot in range(8)] == [payload_of(key) for key in keys]
