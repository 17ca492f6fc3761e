"""Two nodes on one filesystem, each with caches of its own, as 3FS and NFS have them; and clocks that were set wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from files_kit import NAMES, SEGMENTS, SPACE, payload_of, read_back, store
from fuse_kit import AS_3FS, NO_CACHE, Caching, fuse_mount
from storage_kit import UNEVEN, Driver, Slots, new_key, open_shop, until

from kvmoverd.core.status import Reason

DAY_S = 86_400.0


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 1)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [NO_CACHE, AS_3FS], ids=["no cache", "as 3FS"])
def test_two_nodes_see_each_others_blocks_whatever_their_kernels_remember(
    tmp_path: Path, name: str, slots: Slots, caching: Caching
) -> None:
    if caching is AS_3FS and name == "uring":
        pytest.skip("waits as long as the other engine over the same layout, for the same names")
    backing = tmp_path / "backing"
    with (
        fuse_mount(tmp_path / "one", backing, caching=caching) as one,
        fuse_mount(tmp_path / "two", backing, caching=caching) as two,
        open_shop(name, one.place, SPACE) as first,
        open_shop(name, two.place, SPACE) as second,
    ):
        writer, reader = Driver(first.storage), Driver(second.storage)
        is_quick = caching is NO_CACHE or name in SEGMENTS
        for round_number in range(3 if is_quick else 1):
            keys = [new_key() for _ in range(3)]
            assert [reader.present(SPACE, key) for key in keys] == [0] * 3, "that there is no such block is remembered"
            for key in keys:
                assert writer.write(SPACE, key, slots.fill(0, payload_of(key))).reason is Reason.OK
            asked_s = time.monotonic()
            until(lambda keys=keys: reader.present(SPACE, *keys) == 3)
            waited_s = time.monotonic() - asked_s
            # Names of files are asked for again after 5 s at most; logs that are open are read past all caches.
            limit_s = 3.0 if is_quick and (round_number or caching is NO_CACHE) else 8.0
            assert waited_s < limit_s, f"round {round_number}: seen after {waited_s:.1f} s"
            assert read_back(reader, slots, keys) == [Reason.OK] * 3
        assert second.storage.counters.corrupt_blocks == 0


@pytest.mark.slow
def test_a_block_that_one_node_purges_is_a_miss_at_the_other_and_never_another_block(
    tmp_path: Path, name: str, slots: Slots
) -> None:
    backing = tmp_path / "backing"
    with (
        fuse_mount(tmp_path / "one", backing, caching=AS_3FS) as one,
        fuse_mount(tmp_path / "two", backing, caching=AS_3FS) as two,
        open_shop(name, one.place, SPACE) as first,
        open_shop(name, two.place, SPACE) as second,
    ):
        writer, reader = Driver(first.storage), Driver(second.storage)
        keys = store(writer, slots, 3)
        until(lambda: reader.present(SPACE, *keys) == 3)
        assert first.storage.purge(SPACE)[0] == 3
        assert read_back(writer, slots, keys) == [Reason.MISS] * 3, "at once where it was asked for"
        first.storage.open_namespace(SPACE)
        again = store(writer, slots, 3)
        assert set(read_back(reader, slots, keys)) <= {Reason.OK, Reason.MISS}
        assert read_back(writer, slots, again) == [Reason.OK] * 3
        assert read_back(writer, slots, keys) == [Reason.MISS] * 3


@pytest.mark.parametrize("shift_s", [-30 * DAY_S, 30 * DAY_S], ids=["set back", "set forward"])
def test_a_clock_that_is_set_back_or_forward_costs_no_block(
    tmp_path: Path, name: str, slots: Slots, monkeypatch: pytest.MonkeyPatch, shift_s: float
) -> None:
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        keys = store(driver, slots, 4)
        true_s, true_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: true_s() + shift_s)
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() + int(shift_s * 1e9))
        keys += store(driver, slots, 4)
        assert read_back(driver, slots, keys) == [Reason.OK] * 8
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *keys) == 8)
        assert read_back(driver, slots, keys) == [Reason.OK] * 8
        assert read_back(driver, slots, store(driver, slots, 2)) == [Reason.OK] * 2
        done = driver.write(SPACE, keys[0], slots.fill(0, payload_of(keys[0])))
        assert (done.reason, done.moved_bytes) == (Reason.OK, 0), "it is known to be stored"


@pytest.mark.parametrize("when_s", [0.0, 4e9], ids=["1970", "2096"])
def test_times_of_files_decide_nothing(tmp_path: Path, name: str, slots: Slots, when_s: float) -> None:
    with open_shop(name, tmp_path, SPACE) as shop:
        keys = store(Driver(shop.storage), slots, 4)
    for path in sorted(tmp_path.rglob("*")):
        os.utime(path, (when_s, when_s))
    with open_shop(name, tmp_path, SPACE) as shop:
        driver = Driver(shop.storage)
        until(lambda: driver.present(SPACE, *keys) == 4)
        assert read_back(driver, slots, keys + store(driver, slots, 2)) == [Reason.OK] * 6
