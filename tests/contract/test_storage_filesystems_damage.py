"""Damage in what is stored: flipped bits, cut and over-long files, lost files. A damaged block is never given out, and what
is not damaged stays."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from files_kit import NAMES, SEGMENTS, SPACE, payload_of, read_back, store
from storage_kit import SHOPS, UNEVEN, Driver, Shop, Slots, open_shop, until

from kvmoverd.core.errors import ManifestMismatch, StorageUnusable
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import ENTRY, Kind, decode_page
from kvmoverd.core.store.places import PAGE_BYTES, number_of

RECORD_PAGES = UNEVEN.record_bytes // PAGE_BYTES
ROUNDS = 12
SWEEPS_MAX = 3
"""A block that is not yet known is a miss; a store then finds its good header and leaves it; the next read, the damage."""
BLOCKS = 12
segments = pytest.mark.parametrize("name", SEGMENTS)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 1)


@pytest.fixture
def keys(name: str, tmp_path: Path, slots: Slots) -> list[bytes]:
    """Stored by a start that has ended."""
    with open_shop(name, tmp_path, SPACE) as shop:
        return store(Driver(shop.storage), slots, BLOCKS)


@pytest.fixture
def running(name: str, tmp_path: Path) -> Iterator[tuple[Shop, Driver]]:
    with open_shop(name, tmp_path, SPACE) as shop:
        yield shop, Driver(shop.storage)


def files_of(root: Path) -> list[Path]:
    """All that may be damaged with the store still to be opened: manifests and the format are refused by name."""
    return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".json")


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def logs_of(root: Path) -> list[Path]:
    return sorted(root.glob("kvm1/authors/*/log.*"))


def places(root: Path) -> dict[bytes, tuple[Path, int, Path, int]]:
    """By key: segment file, page of the record in it, log file, page of the log. What the logs say."""
    found = {}
    for log in logs_of(root):
        raw, number = log.read_bytes(), number_of(log.name, "log")
        assert number is not None
        for at in range(len(raw) // PAGE_BYTES):
            page = decode_page(raw[at * PAGE_BYTES : (at + 1) * PAGE_BYTES], number, at)
            if page is None or page.kind is not Kind.BLOCKS or page.entries is None:
                continue
            segment = log.parent / "seg" / f"{page.segment:08d}.seg"
            for entry in page.entries.astype(ENTRY):
                found[entry["key"].tobytes()] = segment, int(entry["page"]), log, at
    return found


def seen(driver: Driver, keys: list[bytes]) -> None:
    """Waits until what an ended start has stored is known."""
    until(lambda: all(driver.present(SPACE, key) for key in keys))


@pytest.mark.slow
def test_whatever_bits_flip_no_wrong_block_is_given_out_and_the_next_store_repairs(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw, hurt = random.Random(seed), 0
    for _ in range(ROUNDS):
        # Random bits may all miss what is read. This byte does not while a key has one place, and no single bit undoes it.
        told = places(tmp_path) if name in SEGMENTS else keys
        if known := [key for key in keys if key in told]:
            path, offset = spot(name, tmp_path, draw.choice(known), draw.randrange(PAGE_BYTES + UNEVEN.block_bytes))
            if path.exists():
                flip(path, offset, 0xFF)
        for _ in range(3):
            path = draw.choice(files_of(tmp_path))
            # Most of a pre-sized file is zeros that nobody reads: what was written stands at its beginning.
            end = min(path.stat().st_size, 1 + BLOCKS * UNEVEN.record_bytes)
            if end:
                flip(path, draw.randrange(end), 1 << draw.randrange(8))
        with open_shop(name, tmp_path, SPACE) as shop:
            driver = Driver(shop.storage)
            for _ in range(SWEEPS_MAX):
                bad = [key for key in keys if read_back(driver, slots, [key]) != [Reason.OK]]
                hurt += len(bad)
                for key in bad:
                    assert driver.write(SPACE, key, slots.fill(0, payload_of(key))).reason is Reason.OK
            assert not bad, f"{len(bad)} of {len(keys)} blocks could not be repaired"
    assert hurt


@pytest.mark.parametrize("offset", [0, 8, 70, 300, 4095, 4096, 4096 + 999, 4096 + UNEVEN.block_bytes - 1])
def test_a_bit_in_header_or_payload_is_corrupt_once_then_a_miss_and_repaired(
    name: str, tmp_path: Path, running: tuple[Shop, Driver], slots: Slots, offset: int
) -> None:
    shop, driver = running
    keys = store(driver, slots, 5)
    flip(*spot(name, tmp_path, keys[2], offset))
    done = driver.read(SPACE, keys[2], slots.fill(0, b""))
    assert done.reason is Reason.CORRUPT and done.message
    assert shop.storage.counters.corrupt_blocks == 1
    assert read_back(driver, slots, keys) == [Reason.OK, Reason.OK, Reason.MISS, Reason.OK, Reason.OK]
    again = driver.write(SPACE, keys[2], slots.fill(0, payload_of(keys[2])))
    assert (again.reason, again.moved_bytes) == (Reason.OK, UNEVEN.record_bytes)
    assert read_back(driver, slots, keys) == [Reason.OK] * 5
    assert shop.storage.counters.corrupt_blocks == 1


def spot(name: str, root: Path, key: bytes, offset: int) -> tuple[Path, int]:
    """File and byte where byte `offset` of a record lies."""
    if name in SEGMENTS:
        segment, page, _, _ = places(root)[key]
        return segment, page * PAGE_BYTES + offset
    return next(root.rglob(f"{key.hex()}.blk")), offset


def test_a_record_that_was_written_over_another_is_not_taken_for_it(
    name: str, tmp_path: Path, running: tuple[Shop, Driver], slots: Slots
) -> None:
    _, driver = running
    one, two = store(driver, slots, 2)
    (path, at), (other, other_at) = spot(name, tmp_path, one, 0), spot(name, tmp_path, two, 0)
    record = other.read_bytes()[other_at : other_at + UNEVEN.record_bytes]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(record)
    assert read_back(driver, slots, [one]) == [Reason.MISS if name in SEGMENTS else Reason.CORRUPT]
    assert read_back(driver, slots, [one, two]) == [Reason.MISS, Reason.OK]
    driver.write(SPACE, one, slots.fill(0, payload_of(one)))
    assert read_back(driver, slots, [one, two]) == [Reason.OK] * 2


def test_a_damaged_manifest_is_refused(name: str, tmp_path: Path, keys: list[bytes]) -> None:
    manifest = next(tmp_path.rglob("manifest.json"))
    flip(manifest, manifest.stat().st_size // 2)
    shop = SHOPS[name](tmp_path)
    with pytest.raises((ManifestMismatch, StorageUnusable)):
        shop.storage.open_namespace(SPACE)
    assert shop.storage.close(5.0)


# Segments and their logs.


@segments
def test_a_damaged_page_of_a_log_costs_at_most_its_own_blocks(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots
) -> None:
    _, _, log, at = places(tmp_path)[keys[4]]
    its_own = [key for key, (_, _, its_log, its_at) in places(tmp_path).items() if (its_log, its_at) == (log, at)]
    flip(log, at * PAGE_BYTES + 200)
    others = [key for key in keys if key not in its_own]
    assert others and keys[4] in its_own
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        seen(driver, others)
        assert read_back(driver, slots, others) == [Reason.OK] * len(others)
        assert set(read_back(driver, slots, its_own)) <= {Reason.OK, Reason.MISS}
        assert shop.storage.counters.corrupt_blocks == 0


@segments
@pytest.mark.parametrize("how", ["zeros", "garbage"])
def test_logs_and_segments_that_are_too_long_are_read_as_before(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots, how: str
) -> None:
    for path in [*logs_of(tmp_path), *tmp_path.glob("kvm1/authors/*/seg/*.seg")]:
        with path.open("ab") as file:
            file.write(bytes(3 * PAGE_BYTES + 17) if how == "zeros" else os.urandom(3 * PAGE_BYTES + 17))
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        seen(driver, keys)
        assert read_back(driver, slots, keys) == [Reason.OK] * len(keys)


@segments
@pytest.mark.parametrize("cut_bytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES])
def test_logs_that_were_cut_cost_blocks_and_give_no_wrong_one(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots, cut_bytes: int
) -> None:
    for log in logs_of(tmp_path):
        os.truncate(log, cut_bytes)
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        assert set(read_back(driver, slots, keys)) <= {Reason.OK, Reason.MISS}
        for key in keys:
            assert driver.write(SPACE, key, slots.fill(0, payload_of(key))).reason is Reason.OK
        assert read_back(driver, slots, keys) == [Reason.OK] * len(keys)


@segments
def test_of_a_segment_that_was_cut_the_records_before_the_cut_are_read(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots
) -> None:
    segment, page, _, _ = places(tmp_path)[keys[5]]
    where = {key: place for key, (its, place, _, _) in places(tmp_path).items() if its == segment}
    os.truncate(segment, page * PAGE_BYTES + 2 * PAGE_BYTES)
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        seen(driver, [key for key in keys if where.get(key, 0) < page])
        ends = dict(zip(keys, read_back(driver, slots, keys), strict=True))
        assert {reason for key, reason in ends.items() if where.get(key, 0) < page} == {Reason.OK}
        lost = [key for key in keys if where.get(key, 0) >= page]
        assert {ends[key] for key in lost} <= {Reason.SHORT_READ, Reason.CORRUPT, Reason.MISS}
        for key in lost:
            done = driver.write(SPACE, key, slots.fill(0, payload_of(key)))
            assert (done.reason, done.moved_bytes) == (Reason.OK, UNEVEN.record_bytes)
        assert read_back(driver, slots, keys) == [Reason.OK] * len(keys)


@segments
@pytest.mark.parametrize("what", ["seg/*.seg", "log.*", "lease", "seg", "."])
def test_what_was_deleted_by_hand_is_a_miss_and_is_stored_anew(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots, what: str
) -> None:
    for author in (tmp_path / "kvm1/authors").iterdir():
        for path in author.glob(what) if what != "." else [author]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        for key in keys:
            assert read_back(driver, slots, [key])[0] in (Reason.OK, Reason.MISS)
            assert driver.write(SPACE, key, slots.fill(0, payload_of(key))).reason is Reason.OK
        assert read_back(driver, slots, keys) == [Reason.OK] * len(keys)
        assert shop.storage.counters.corrupt_blocks == 0


@segments
def test_a_segment_whose_first_page_is_damaged_is_no_segment(
    name: str, tmp_path: Path, keys: list[bytes], slots: Slots
) -> None:
    segment, _, _, _ = places(tmp_path)[keys[0]]
    inside = [key for key, place in places(tmp_path).items() if place[0] == segment]
    flip(segment, 100)
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        assert read_back(driver, slots, inside) == [Reason.MISS] * len(inside)
        for key in inside:
            assert driver.write(SPACE, key, slots.fill(0, payload_of(key))).reason is Reason.OK
        assert read_back(driver, slots, keys) == [Reason.OK] * len(keys)
