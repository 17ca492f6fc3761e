"""What only files do: direct I/O, sharing a root, crashes, full and broken filesystems."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import (
    UNEVEN,
    Driver,
    FileShop,
    Slots,
    mounted,
    namespace,
    new_key,
    threads_storage,
    until,
    uring_storage,
)
from storage_writer import LAYOUT, payload_of

from kvmoverd.adapters.storage.layout_a import QUARANTINE_FILES_MAX
from kvmoverd.adapters.storage.owners import ORPHAN_AGE_S, TempNames, reclaim_orphans
from kvmoverd.core.errors import ManifestMismatch, StorageUnusable
from kvmoverd.core.layout import Layout
from kvmoverd.core.status import Reason

SPACE = namespace()
PAYLOAD = b"\x5a" * UNEVEN.block_bytes


@pytest.fixture(params=[threads_storage, uring_storage])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileShop]:
    shop = FileShop(tmp_path, direct=True, make=request.param)
    shop.storage.open_namespace(SPACE)
    yield shop
    assert shop.storage.close(5.0)


def test_a_root_that_was_replaced_is_made_anew_with_the_namespaces_that_are_open(
    tmp_path: Path, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    shop.storage.open_namespace(SPACE)
    shutil.rmtree(tmp_path / "kvm1")
    key = new_key()
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD
    shutil.rmtree(tmp_path / "kvm1")
    shop.storage.open_namespace(namespace(model_id="another"))
    assert len(list((tmp_path / "kvm1").glob("*/manifest.json"))) == 2
    assert shop.storage.facts.details["refusal"] == ""


def test_an_empty_root_on_another_filesystem_is_refused_until_its_own_is_back(
    tmp_path: Path, shop: FileShop, driver: Driver, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kvm1").rename(tmp_path.parent / f"{tmp_path.name}.away")
    shop.storage.blocks._layout._device += 1
    said = f"{tmp_path} is empty, is it mounted? It is on device "

    def is_told() -> bool:
        assert driver.read(SPACE, new_key(), slots.address(1)).reason is Reason.MISS
        return str(shop.storage.facts.details["refusal"]).startswith(said)

    until(is_told)
    why = str(shop.storage.facts.details["refusal"])
    done = driver.write(SPACE, new_key(), slots.fill(0, PAYLOAD))
    assert done.reason is Reason.IO_ERROR and why in done.message
    with pytest.raises(StorageUnusable, match="is empty, is it mounted"):
        shop.storage.open_namespace(SPACE)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert why in line
    (tmp_path.parent / f"{tmp_path.name}.away").rename(tmp_path / "kvm1")
    shop.storage.open_namespace(SPACE)
    assert shop.storage.facts.details["refusal"] == ""


def test_direct_io_is_what_the_descriptor_really_has(
    tmp_path: Path, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    key = new_key()
    driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    for storage in (shop.storage, threads_storage(tmp_path, direct=False)):
        fd, _ = storage.blocks.io.open_read(str(shop.path(SPACE, key)))
        try:
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        finally:
            os.close(fd)
        assert is_direct == (storage.facts.io_mode == "direct")
        assert is_direct or storage.facts.note, "buffered I/O says why"
    assert storage.facts.note == "direct I/O is switched off"
    assert storage.close(5.0)


def test_two_adapters_on_one_root_see_each_others_blocks_at_once(
    tmp_path: Path, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    other = Driver(threads_storage(tmp_path))
    other.storage.open_namespace(SPACE)
    key = new_key()
    assert other.present(SPACE, key) == 0
    assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
    assert other.present(SPACE, key) == 1
    assert other.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
    assert slots.payload(1) == PAYLOAD
    assert other.storage.purge(SPACE)[0] == 1
    assert driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert other.storage.close(5.0)


def test_two_adapters_that_write_one_key_at_once_both_succeed(
    tmp_path: Path, shop: FileShop, driver: Driver, slots: Slots
) -> None:
    other = Driver(threads_storage(tmp_path))
    for _ in range(20):
        key = new_key()
        mine, its = (d.write_op(SPACE, key, slots.fill(n, PAYLOAD)) for n, d in enumerate((driver, other)))
        shop.storage.submit([mine])
        other.storage.submit([its])
        assert {driver.collect(1)[0].reason, other.collect(1)[0].reason} == {Reason.OK}
        assert driver.read(SPACE, key, slots.address(2)).reason is Reason.OK
    assert list((tmp_path / "kvm1/.tmp").iterdir()) == []
    assert other.storage.close(5.0)


def test_a_stored_manifest_that_differs_is_refused_by_the_fields_name(tmp_path: Path, shop: FileShop) -> None:
    manifest = shop.root / "kvm1" / SPACE.fingerprint[:16].hex() / "manifest.json"
    assert manifest.read_bytes() == SPACE.manifest.canonical()
    manifest.write_bytes(SPACE.manifest.canonical().replace(b"fp8_e4m3", b"bf16"))
    with pytest.raises(ManifestMismatch, match="differs in dtype"):
        shop.storage.open_namespace(SPACE)


def test_files_and_directories_have_their_modes_whatever_the_umask(tmp_path: Path, slots: Slots) -> None:
    before = os.umask(0o077)
    try:
        storage = threads_storage(tmp_path)
        storage.open_namespace(SPACE)
        assert Driver(storage).write(SPACE, new_key(), slots.fill(0, PAYLOAD)).reason is Reason.OK
        assert storage.close(5.0)
    finally:
        os.umask(before)
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "kvm1").rglob("*")}
    assert modes == {(True, 0o750), (False, 0o640)}


def test_a_damaged_record_is_kept_in_quarantine_and_only_so_many(shop: FileShop, driver: Driver) -> None:
    layout = Layout(block_tokens=1, layers=((8,),))
    space, slots = namespace(layout), Slots(layout, 1)
    shop.storage.open_namespace(space)
    for _ in range(QUARANTINE_FILES_MAX + 3):
        key = new_key()
        shop.tamper(space, key, b"?" * layout.record_bytes)
        assert driver.read(space, key, slots.address(0)).reason is Reason.CORRUPT
        assert driver.present(space, key) == 0
    kept = list((shop.root / "kvm1/.quarantine").iterdir())
    assert len(kept) == QUARANTINE_FILES_MAX and kept[0].read_bytes() == b"?" * layout.record_bytes


def test_purged_bytes_are_freed_in_the_background(shop: FileShop, driver: Driver, slots: Slots) -> None:
    driver.run(driver.write_op(SPACE, new_key(), slots.fill(slot, PAYLOAD)) for slot in range(8))
    assert shop.storage.purge(SPACE) == (8, 8 * UNEVEN.record_bytes)
    until(lambda: not any((shop.root / "kvm1/.trash").iterdir()))


def test_temporary_files_of_dead_owners_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    alive = TempNames().new()
    host, _, random = alive.rsplit(".", 2)
    names = {
        "dead": f"{host}.{int(child.stdout)}-1.{random}",
        "young": f"{host}.{int(child.stdout)}-2.{random}",
        "alive": alive,
        "later process of that number": f"{host}.{os.getpid()}-1.{random}",
        "other host": f"other.example.1-1.{random}",
    }
    now_s = time.time()
    for what, name in names.items():
        (tmp_path / name).touch()
        age_s = 0.0 if what == "young" else ORPHAN_AGE_S + 1
        os.utime(tmp_path / name, (now_s - age_s, now_s - age_s))
    assert reclaim_orphans(tmp_path, now_s=now_s) == 2
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == {"young", "alive", "other host"}
    assert reclaim_orphans(tmp_path, now_s=now_s + 86_400) == 2


def test_a_killed_writer_leaves_only_whole_blocks_and_its_temporary_files_are_reclaimed(tmp_path: Path) -> None:
    checked = 0
    for round_number in range(4):
        _write_until_killed(tmp_path, after_s=0.03 * (round_number + 1))
        for temp in (tmp_path / "kvm1/.tmp").iterdir():
            os.utime(temp, (0, 0))
        storage, slots = threads_storage(tmp_path), Slots(LAYOUT, 1)
        driver, space = Driver(storage), namespace(LAYOUT)
        assert list((tmp_path / "kvm1/.tmp").iterdir()) == []
        for path in (tmp_path / "kvm1").rglob("*.blk"):
            key = bytes.fromhex(path.stem)
            assert driver.read(space, key, slots.address(0)).reason is Reason.OK
            assert slots.payload(0) == payload_of(key)
            path.unlink()
            checked += 1
        assert storage.counters.corrupt_blocks == 0
        assert storage.close(5.0)
    assert checked >= 8


def _write_until_killed(root: Path, *, after_s: float) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = Path(__file__).parent / "storage_writer.py"
    with subprocess.Popen([sys.executable, script, root], stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"0\n", "the first batch was written"
            time.sleep(after_s)
        finally:
            child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL


def test_a_missing_root_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageUnusable, match="no directory: create it, or mount it"):
        threads_storage(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_file_as_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnusable, match="no directory"):
        threads_storage(tmp_path / "file")


@pytest.mark.parametrize("prepared", [False, True])
def test_a_read_only_root_is_refused(tmp_path: Path, prepared: bool) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        if prepared:
            assert threads_storage(tmp_path).close(5.0)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with pytest.raises(StorageUnusable, match="EROFS"):
            threads_storage(tmp_path)


@pytest.mark.parametrize("limit", ["size=1m", "size=64m,nr_inodes=50"])
def test_a_full_filesystem_is_no_space_and_leaves_nothing_behind(tmp_path: Path, limit: str, slots: Slots) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", limit, "tmpfs"):
        driver = Driver(threads_storage(tmp_path))
        driver.storage.open_namespace(SPACE)
        written: list[bytes] = []
        reason = Reason.OK
        while reason is Reason.OK and len(written) < 100:
            written.append(new_key())
            done = driver.write(SPACE, written[-1], slots.fill(0, PAYLOAD))
            reason = done.reason
        assert reason is Reason.NO_SPACE and "ENOSPC" in done.message
        assert list((tmp_path / "kvm1/.tmp").iterdir()) == []
        assert driver.read(SPACE, written[0], slots.address(1)).reason is Reason.OK
        assert driver.storage.close(5.0)
        again = threads_storage(tmp_path)
        assert again.close(5.0), "a full disk can still be read: the root opens"


@pytest.mark.slow
def test_direct_io_works_on_a_device_with_sectors_of_4096_bytes(tmp_path: Path, slots: Slots) -> None:
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if os.getuid() or not shutil.which("losetup"):
        pytest.skip("making a loop device needs root and losetup")
    made = subprocess.run(
        ["losetup", "--find", "--show", "--sector-size", "4096", image], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device can be had: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted(place, device):
            driver = Driver(threads_storage(place))
            driver.storage.open_namespace(SPACE)
            key = new_key()
            assert driver.storage.facts.io_mode == "direct"
            assert driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.OK
            assert driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
            assert slots.payload(1) == PAYLOAD
            assert driver.storage.close(5.0)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
