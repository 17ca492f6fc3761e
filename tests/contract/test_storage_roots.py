"""Real roots behind one port: two directories, one of which hangs in the kernel, fails, or holds another layout."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fuse_kit import FuseMount, fuse_mount
from storage_kit import SMALL_SEGMENTS, UNEVEN, Driver, Slots, namespace, new_key, until

from kvmoverd.adapters.storage import roots_namespaces
from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.layout_choice import choose_layout, filesystem_type
from kvmoverd.adapters.storage.root_format import publish_format, stored_format
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_root import RootSettings
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.status import Reason

SPACE = namespace()
DEADLINE_S = 0.5
PAYLOAD = b"x" * UNEVEN.block_bytes
LAYOUTS: dict[str, Callable[[Path], Blocks]] = {
    "files": file_blocks,
    "segments": lambda root: open_segment_store(root, node="node", boot_id="boot", settings=SMALL_SEGMENTS),
}


def storage(root: Path, layout: str, name: str) -> ThreadsStorage:
    root.mkdir(exist_ok=True)
    return ThreadsStorage(LAYOUTS[layout](root), name=name, threads=4, ops_max=8)


@contextmanager
def roots(near: Path, far: Path, layout: str = "files") -> Iterator[Driver]:
    """`near` holds copies, `far` is main."""
    made = RootSet(
        [
            (
                storage(near, layout, "near"),
                RootSettings(is_main=False, ops_max=8, io_deadline_s=DEADLINE_S, fill=False),
            ),
            (storage(far, layout, "far"), RootSettings(ops_max=8, io_deadline_s=DEADLINE_S)),
        ],
        pool_bytes=1 << 30,
    )
    made.open_namespace(SPACE)
    try:
        yield Driver(made)
    finally:
        made.close(2.0)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    with fuse_mount(tmp_path / "near", tmp_path / "backing") as mount:
        yield mount


def write_both(driver: Driver, slots: Slots, count: int) -> list[bytes]:
    keys = [new_key() for _ in range(count)]
    for key in keys:
        driver.storage.submit([driver.write_op(SPACE, key, slots.fill(0, PAYLOAD))])
        assert [done.quiet for done in driver.collect(2)] == [False, True]
    return keys


def details(driver: Driver, name: str) -> dict[str, int | str]:
    assert isinstance(driver.storage, RootSet)
    return next(dict(facts.details) for facts, _ in driver.storage.parts() if facts.root == name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_durable_in_the_main_root_and_read_from_its_copy(layout: str, tmp_path: Path, slots: Slots) -> None:
    with roots(tmp_path / "near", tmp_path / "far", layout) as driver:
        (key,) = write_both(driver, slots, 1)
        assert driver.read(SPACE, key, slots.address(1)).reason is Reason.OK
        assert slots.payload(1) == PAYLOAD
        assert isinstance(driver.storage, RootSet)
        near, far = (counters for _, counters in driver.storage.parts())
        assert (near.read_blocks, far.read_blocks) == (1, 0)
        assert (near.written_blocks, far.written_blocks) == (1, 1)
        assert {details(driver, name)["layout"] for name in ("near", "far")} == {layout}


def test_while_a_root_hangs_in_the_kernel_its_blocks_fail_then_come_from_the_other(
    fuse: FuseMount, tmp_path: Path, slots: Slots
) -> None:
    with roots(fuse.place, tmp_path / "far") as driver:
        keys = write_both(driver, slots, 12)
        fuse.hang()
        began_s = time.monotonic()
        reads = [driver.read_op(SPACE, key, slots.address(slot)) for slot, key in enumerate(keys[:8])]
        driver.storage.submit(reads)
        ended = driver.collect(8)
        assert DEADLINE_S * 0.9 < time.monotonic() - began_s < 3 * DEADLINE_S
        assert {(done.reason, done.quiet) for done in ended} == {(Reason.IO_ERROR, False)}
        assert all(done.message.startswith("near has not answered for 0.") for done in ended)
        assert details(driver, "near")["state"] == "open"
        began_s = time.monotonic()
        spare = Slots(UNEVEN, 4)
        again = [driver.read(SPACE, key, spare.address(n)) for n, key in enumerate(keys[8:])]
        assert [done.reason for done in again] == [Reason.OK] * 4 and spare.payload(3) == PAYLOAD
        assert time.monotonic() - began_s < DEADLINE_S, "nobody waits for a root that is known to hang"
        assert driver.storage.index.known(SPACE, keys).all(), "the other root has them"
        fuse.resume()
        late = driver.collect(8)
        assert {done.op_id for done in late} == {op.op_id for op in reads} and all(done.quiet for done in late)
        assert details(driver, "near")["quarantined_bytes"] == 0
        assert driver.read(SPACE, keys[0], slots.address(0)).reason is Reason.OK
        assert driver.storage.parts()[0][1].read_blocks > 0, "the root is asked again"  # type: ignore[attr-defined]
        assert driver.storage.close(5.0)


def test_a_set_with_a_root_that_hangs_is_closed_in_time(fuse: FuseMount, tmp_path: Path, slots: Slots) -> None:
    with roots(fuse.place, tmp_path / "far") as driver:
        keys = write_both(driver, slots, 4)
        fuse.hang()
        driver.storage.submit([driver.read_op(SPACE, key, slots.address(slot)) for slot, key in enumerate(keys)])
        until(lambda: fuse.held >= 4)
        began_s = time.monotonic()
        assert not driver.storage.close(0.5), "the kernel still has slots"
        assert time.monotonic() - began_s < 2.0
        fuse.resume()
        until(lambda: driver.storage.close(0.5))


def test_a_main_root_that_hangs_drops_writes_and_reads_go_on_from_copies(
    fuse: FuseMount, tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roots_namespaces, "CALL_S", 0.2)
    with roots(tmp_path / "copy", fuse.place) as driver:
        (key,) = write_both(driver, slots, 1)
        fuse.hang()
        writes = [driver.write_op(SPACE, new_key(), slots.fill(slot, PAYLOAD)) for slot in range(4)]
        driver.storage.submit(writes)
        assert driver.read(SPACE, key, slots.address(5)).reason is Reason.OK
        assert {(done.reason, done.quiet) for done in driver.collect(4)} == {(Reason.IO_ERROR, False)}
        assert details(driver, "far")["state"] == "open"
        assert driver.write(SPACE, new_key(), slots.fill(6, PAYLOAD)).reason is Reason.DROPPED
        assert details(driver, "far")["dropped_writes"] == 1
        with pytest.raises(StorageUnusable, match="far: opening a namespace has not ended in time"):
            driver.storage.open_namespace(SPACE)
        fuse.resume()
        assert all(done.quiet for done in driver.collect(4))


def test_a_root_that_gives_only_errors_is_left_alone(fuse: FuseMount, tmp_path: Path, slots: Slots) -> None:
    with roots(fuse.place, tmp_path / "far") as driver:
        keys = write_both(driver, slots, 8)
        fuse.fail("READ", number=errno.EIO)
        fuse.fail("OPEN", number=errno.EIO)
        for key in keys:
            assert driver.read(SPACE, key, slots.address(1)).reason is Reason.OK, "the other root has it"
        assert details(driver, "near")["state"] == "open"
        assert "EIO" in str(details(driver, "near")["why"])


def test_the_layout_is_what_lies_there_else_what_suits_the_filesystem(tmp_path: Path) -> None:
    assert choose_layout(tmp_path) == "segments"
    assert choose_layout(tmp_path, "files") == "files"
    for layout in LAYOUTS:
        made = storage(tmp_path / layout, layout, "root")
        made.open_namespace(SPACE)
        assert made.close(5.0)
        assert choose_layout(tmp_path / layout) == layout
        other = next(name for name in LAYOUTS if name != layout)
        with pytest.raises(StorageUnusable, match=f"holds layout '{layout}', not '{other}'"):
            choose_layout(tmp_path / layout, other)


def test_an_empty_root_on_fuse_gets_files_unless_it_is_3fs(tmp_path: Path) -> None:
    with fuse_mount(tmp_path / "place", tmp_path / "backing") as mount:
        assert filesystem_type(mount.place) == 0x65735546
        assert choose_layout(mount.place) == "files"
    with fuse_mount(tmp_path / "3fs", tmp_path / "backing3", kind="fuse.hf3fs") as mount:
        assert choose_layout(mount.place) == "segments"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"layout": "segments", "version": 9}', "is of version 9 of layout 'segments', this build reads 1"),
        (b'{"layout": "tape", "version": 1}', "holds layout 'tape', which this build does not know"),
        (b"{", "can't be understood"),
    ],
)
def test_a_format_of_another_build_is_refused_by_name(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "kvm1").mkdir()
    (tmp_path / "kvm1" / "format.json").write_bytes(content)
    with pytest.raises(StorageUnusable) as refusal:
        choose_layout(tmp_path)
    assert words in str(refusal.value)


def test_a_format_is_published_once(tmp_path: Path) -> None:
    publish_format(tmp_path, "segments", tmp_path / "temp")
    assert json.loads((tmp_path / "format.json").read_bytes()) == {"layout": "segments", "version": 1}
    with pytest.raises(StorageUnusable, match="holds layout 'segments', not 'files'"):
        publish_format(tmp_path, "files", tmp_path / "temp")


def test_what_took_the_place_of_the_format_file_hangs_nobody(tmp_path: Path) -> None:
    (tmp_path / "kvm1").mkdir()
    os.mkfifo(tmp_path / "kvm1" / "format.json")
    with pytest.raises(OSError, match="not a regular file"):
        stored_format(tmp_path / "kvm1")


def test_a_store_that_lost_its_format_file_keeps_its_layout(tmp_path: Path) -> None:
    (tmp_path / "kvm1" / "ab").mkdir(parents=True)
    assert stored_format(tmp_path / "kvm1") == ("files", 1)
    (tmp_path / "kvm1" / "authors").mkdir()
    assert stored_format(tmp_path / "kvm1") == ("segments", 1)
