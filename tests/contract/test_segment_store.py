"""The segment store through the storage port, over real files: what holds for segments beside what holds for every storage."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, namespace, new_key, until

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.reads import BAD_S
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import READY_WAIT_S, SegmentStore
from kvmoverd.adapters.storage.segments.writes import Append, Appended
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.errors import ManifestMismatch, StorageUnusable
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place, segment_name
from kvmoverd.ports.storage import BlockRead, StorageDone

pytestmark = pytest.mark.contract

SPACE = namespace()
PAYLOAD = bytes(range(256)) * (UNEVEN.block_bytes // 256 + 1)
PAYLOAD = PAYLOAD[: UNEVEN.block_bytes]
RECORDS = 8
SMALL = SegmentSettings(segment_bytes=HEADER_BYTES + RECORDS * UNEVEN.record_bytes, log_pages=16)


class Node:
    """One node's store, and a driver for it."""

    def __init__(self, root: Path, boot_id: str = "0001", *, node: str = "node-0") -> None:
        self.store: SegmentStore = open_segment_store(root, node=node, boot_id=boot_id, settings=SMALL)
        self.storage = ThreadsStorage(self.store, name="root", threads=4, ops_max=OPS_MAX)
        self.driver = Driver(self.storage)
        self.storage.open_namespace(SPACE)

    def path(self, place: Place) -> Path:
        return Path(self.store.trial_path()).parents[1] / "authors" / place.author / "seg" / segment_name(place.segment)

    def poke(self, place: Place, at: int, content: bytes) -> None:
        with open(self.path(place), "r+b") as file:
            file.seek(place.offset_bytes + at)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    assert made.storage.close(5.0)


def stored(node: Node, slots: Slots) -> tuple[bytes, Place]:
    key = new_key()
    done = node.driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    assert (done.reason, done.moved_bytes) == (Reason.OK, UNEVEN.record_bytes) and done.place is not None
    return key, done.place


def read_at(node: Node, key: bytes, slots: Slots, place: Place | None, layers: range = range(0)) -> StorageDone:
    op = node.driver.read_op(SPACE, key, slots.address(1), layers)
    op.place = place
    return node.driver.run([op])[0]


def test_a_block_is_read_back_from_the_place_that_its_write_named(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    done = node.driver.read(SPACE, key, slots.fill(1, b""))
    assert (done.reason, done.place) == (Reason.OK, place) and slots.payload(1) == PAYLOAD
    assert place.author == "node-0.0001" and node.store.index.places(SPACE, [key]) == [place]


def test_64_writes_of_one_key_at_once_store_it_once(node: Node) -> None:
    slots, key = Slots(UNEVEN, 64), new_key()
    dones = node.driver.run(node.driver.write_op(SPACE, key, slots.fill(slot, PAYLOAD)) for slot in range(64))
    assert {done.reason for done in dones} == {Reason.OK}
    assert sum(done.moved_bytes for done in dones) == UNEVEN.record_bytes
    assert node.store.appender.counters.appended_blocks == 1 and len({done.place for done in dones}) == 1


def test_a_duplicate_is_left_when_its_header_is_there_and_written_anew_when_it_is_not(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    again = node.driver.write(SPACE, key, slots.fill(1, PAYLOAD))
    assert (again.reason, again.moved_bytes, again.place) == (Reason.OK, 0, place)
    node.poke(place, 100, b"\xff" * 8)
    anew = node.driver.write(SPACE, key, slots.fill(1, PAYLOAD))
    assert (anew.reason, anew.moved_bytes) == (Reason.OK, UNEVEN.record_bytes) and anew.place != place
    assert read_at(node, key, slots, None).place == anew.place


@pytest.mark.parametrize("at", [HEADER_BYTES + 5, HEADER_BYTES + 1030, 300])
def test_damage_is_corrupt_once_then_a_miss_and_the_next_write_repairs_it(node: Node, slots: Slots, at: int) -> None:
    key, place = stored(node, slots)
    node.poke(place, at, b"\xff\xfe\xfd")
    done = node.driver.read(SPACE, key, slots.address(1))
    assert done.reason is Reason.CORRUPT and "not used any more" in done.message
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert node.driver.present(SPACE, key) == 0
    assert node.driver.write(SPACE, key, slots.fill(0, PAYLOAD)).moved_bytes == UNEVEN.record_bytes
    assert node.driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD


def test_a_place_that_holds_nothing_is_a_miss(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    node.poke(place, 0, bytes(UNEVEN.record_bytes))
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert node.store.index.places(SPACE, [key]) == [None]


def test_a_segment_that_was_cut_is_a_short_read_then_a_miss(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    os.truncate(node.path(place), place.offset_bytes + 8192)
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.SHORT_READ
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS


def test_a_segment_that_is_gone_is_a_miss(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    node.path(place).unlink()
    node.store.files.drop(place.author, [place.segment])
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert node.store.index.places(SPACE, [key]) == [None]


def test_a_hint_counts_where_the_index_knows_nothing_and_is_held_to_the_header(node: Node, slots: Slots) -> None:
    (key, place), (other, its_place) = stored(node, slots), stored(node, slots)
    node.store.index.mark_bad(SPACE.fingerprint[:16], key, place, for_s=None)
    assert read_at(node, key, slots, None).reason is Reason.MISS
    assert read_at(node, key, slots, place).reason is Reason.OK and slots.payload(1) == PAYLOAD
    for wrong in (
        its_place,
        dataclasses.replace(place, page=place.page + 1),
        dataclasses.replace(place, page=10**6),
        dataclasses.replace(place, segment=place.segment + 1),
        Place("node-1.0001", 1, 1),
        Place("../authors/node-0.0001", 1, 1),
        Place("", 1, 1),
    ):
        assert read_at(node, key, slots, wrong).reason is Reason.MISS, wrong
    assert read_at(node, other, slots, None).reason is Reason.OK


def test_a_hint_counts_where_the_place_that_was_known_is_gone(node: Node, slots: Slots) -> None:
    key, first = stored(node, slots)
    for _ in range(RECORDS):
        stored(node, slots)
    node.store.index.mark_bad(SPACE.fingerprint[:16], key, first, for_s=None)
    second = node.driver.write(SPACE, key, slots.fill(0, PAYLOAD)).place
    assert second is not None and second.segment != first.segment
    node.path(second).unlink()
    node.store.files.drop(second.author, [second.segment])
    done = read_at(node, key, slots, first)
    assert (done.reason, done.place) == (Reason.OK, first)


def test_until_it_is_known_what_is_kept_one_write_waits_and_the_others_are_dropped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(UNEVEN, 4)
    asked: list[float] = []

    def wait_ready(timeout_s: float) -> bool:
        asked.append(timeout_s)
        time.sleep(min(timeout_s, 0.2))
        return timeout_s > 0

    monkeypatch.setattr(node.store.background, "wait_ready", wait_ready)
    dones = node.driver.run(node.driver.write_op(SPACE, new_key(), slots.fill(slot, PAYLOAD)) for slot in range(4))
    assert sorted(done.reason.name for done in dones) == ["DROPPED"] * 3 + ["OK"]
    assert sorted(asked) == [0.0] * 4 + [READY_WAIT_S]


def test_a_later_range_is_read_where_the_first_one_was(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    first = read_at(node, key, slots, None, range(2))
    assert (first.reason, first.place) == (Reason.OK, place)
    node.store.index.mark_bad(SPACE.fingerprint[:16], key, place, for_s=None)
    rest = read_at(node, key, slots, first.place, range(2, 3))
    assert (rest.reason, rest.place) == (Reason.OK, place) and slots.payload(1) == PAYLOAD


def test_a_later_range_of_another_record_is_corrupt_and_blames_nobody(node: Node, slots: Slots) -> None:
    (key, _), (other, its_place) = stored(node, slots), stored(node, slots)
    assert read_at(node, key, slots, None, range(2)).reason is Reason.OK
    node.poke(its_place, HEADER_BYTES + 30_000, b"\xff\xfe\xfd")
    assert read_at(node, key, slots, its_place, range(2, 3)).reason is Reason.CORRUPT
    assert node.driver.present(SPACE, key) == 1 and node.driver.present(SPACE, other) == 1


def test_a_block_that_the_device_failed_to_read_is_left_alone_for_a_while(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    op = BlockRead(1, SPACE, key, slots.address(1))
    node.store.failed(op, place, OSError(errno.EIO, "made to fail"))
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert node.driver.write(SPACE, key, slots.fill(0, PAYLOAD)).moved_bytes == UNEVEN.record_bytes
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.OK


@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT])
def test_what_a_device_could_not_read_is_tried_again_after_30_seconds(
    node: Node, slots: Slots, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    key, place = stored(node, slots)
    op = BlockRead(1, SPACE, key, slots.address(1))
    node.store.failed(op, place, OSError(error, "made to fail"))
    began_ns = time.monotonic_ns()
    for after_s, known in ((BAD_S - 5, None), (BAD_S + 1, place)):
        monkeypatch.setattr(node.store.index, "_now_ns", lambda after_s=after_s: began_ns + round(after_s * 1e9))
        assert node.store.index.places(SPACE, [key]) == [known]
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.OK


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_block_that_could_not_be_looked_at_when_it_was_written_again_is_found_later(
    node: Node, slots: Slots, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    key, place = stored(node, slots)

    def fail(*args: object) -> None:
        raise OSError(error, os.strerror(error))

    def full(append: Append) -> None:
        append.end(Appended(Reason.NO_SPACE, "full"))

    with monkeypatch.context() as broken:
        broken.setattr(node.store.files, "take", fail)
        broken.setattr(node.store.appender, "append", full)
        assert node.driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.NO_SPACE
    later_ns = time.monotonic_ns() + round((BAD_S + 1) * 1e9)
    monkeypatch.setattr(node.store.index, "_now_ns", lambda: later_ns)
    assert node.store.index.places(SPACE, [key]) == [place]
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.OK


def test_more_blocks_than_a_segment_takes_are_all_read_back(node: Node, slots: Slots) -> None:
    keys = [stored(node, slots)[0] for _ in range(3 * RECORDS)]
    for key in keys:
        assert node.driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK
        assert slots.payload(1) == PAYLOAD
    assert len({place.segment for place in node.store.index.places(SPACE, keys) if place}) == 3


def test_a_restarted_store_knows_what_was_stored(tmp_path: Path, slots: Slots) -> None:
    first = Node(tmp_path)
    keys = [stored(first, slots)[0] for _ in range(2 * RECORDS)]
    assert first.storage.close(5.0)
    again = Node(tmp_path, "0002")
    until(lambda: again.driver.present(SPACE, *keys) == len(keys))
    for key in keys:
        assert again.driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK and slots.payload(1) == PAYLOAD
    assert again.storage.close(5.0)


def test_another_node_finds_a_block_within_a_second_and_a_hint_at_once(node: Node, slots: Slots) -> None:
    other = Node(Path(node.store.trial_path()).parents[2], "0009", node="node-1")
    key, place = stored(node, slots)
    assert read_at(other, key, slots, place).reason is Reason.OK
    until(lambda: other.driver.present(SPACE, key) == 1)
    other.storage.heard(*node.storage.signature())
    assert other.storage.close(5.0)


def test_a_purge_hides_all_at_once_and_what_is_stored_later_is_found(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    stored(node, slots)
    assert node.storage.purge(SPACE) == (2, 2 * UNEVEN.record_bytes)
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.MISS
    assert read_at(node, key, slots, place).reason is Reason.MISS
    assert node.driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason is Reason.IO_ERROR
    assert node.storage.purge(SPACE) == (0, 0)
    node.storage.open_namespace(SPACE)
    again = node.driver.write(SPACE, key, slots.fill(0, PAYLOAD))
    assert again.reason is Reason.OK and again.place is not None and again.place.segment > place.segment
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.OK


def test_a_tenants_purge_takes_its_namespaces_only(node: Node, slots: Slots) -> None:
    theirs = dataclasses.replace(SPACE.manifest, tenant="acme")
    space = dataclasses.replace(SPACE, manifest=theirs)
    node.storage.open_namespace(space)
    mine, its = stored(node, slots)[0], new_key()
    assert node.driver.write(space, its, slots.fill(0, PAYLOAD)).reason is Reason.OK
    assert node.storage.purge_tenant("acme") == (1, UNEVEN.record_bytes)
    assert node.driver.read(space, its, slots.address(1)).reason is Reason.MISS
    assert node.driver.read(SPACE, mine, slots.address(1)).reason is Reason.OK


def test_a_stored_manifest_that_differs_is_refused_by_the_fields_name(node: Node) -> None:
    manifest = Path(node.store.trial_path()).parents[1] / SPACE.fingerprint[:16].hex() / "manifest.json"
    manifest.write_bytes(SPACE.manifest.canonical().replace(b"fp8_e4m3", b"bf16"))
    with pytest.raises(ManifestMismatch, match="differs in dtype"):
        node.storage.open_namespace(SPACE)


def test_a_store_of_another_layout_or_version_is_refused_by_name(tmp_path: Path) -> None:
    base = tmp_path / "kvm1"
    base.mkdir()
    for content, words in (
        ({"layout": "files", "version": 1}, "layout 'files'"),
        ({"layout": "segments", "version": 99}, "version 99"),
        ({"layout": "segments"}, "can't be understood"),
    ):
        (base / "format.json").write_text(json.dumps(content))
        with pytest.raises(StorageUnusable, match=words):
            open_segment_store(tmp_path, node="node-0", boot_id="1")
    (base / "format.json").unlink()
    (base / ("ab" * 16)).mkdir()
    with pytest.raises(StorageUnusable, match="layout 'files'"):
        open_segment_store(tmp_path, node="node-0", boot_id="1")


def test_two_starts_under_one_name_write_into_directories_of_their_own(tmp_path: Path, slots: Slots) -> None:
    first, second = Node(tmp_path), Node(tmp_path)
    assert {node.storage.signature()[0] for node in (first, second)} == {"node-0.0001", "node-0.0001-1"}
    assert stored(first, slots)[1].author != stored(second, slots)[1].author
    assert first.storage.close(5.0) and second.storage.close(5.0)


def test_writes_that_are_stuck_leave_reads_at_full_speed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.storage.ops_max = 66
    slots = Slots(UNEVEN, 66)
    key, _ = stored(node, slots)
    go_on = threading.Event()
    append = node.store.appender.append

    def stuck(one: Append) -> None:
        assert go_on.wait(10.0)
        append(one)

    monkeypatch.setattr(node.store.appender, "append", stuck)
    node.storage.submit([node.driver.write_op(SPACE, new_key(), slots.fill(2 + at, PAYLOAD)) for at in range(64)])
    try:
        began_s = time.monotonic()
        for _ in range(20):
            assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.OK
        assert time.monotonic() - began_s < 2.0, "no read waits for a write"
    finally:
        go_on.set()
    ended: list[StorageDone] = []

    def all_ended() -> bool:
        ended.extend(node.storage.poll(64))
        return len(ended) == 64

    until(all_ended)
    assert {done.reason for done in ended} == {Reason.OK}


def test_a_record_that_was_let_go_is_still_held_to_its_segments_generation(node: Node, slots: Slots) -> None:
    key, place = stored(node, slots)
    op = BlockRead(1, SPACE, key, slots.address(1))
    opened = node.store.open(op)
    assert node.driver.read(SPACE, key, slots.address(1)).reason is Reason.OK
    node.store.let_go(opened)
    node.store.files.drop(place.author, [place.segment])
    node.store.check(op, opened)
    with pytest.raises(RecordMismatch, match="generation"):
        node.store.check(op, dataclasses.replace(opened, generation=opened.generation + 1))


def test_a_segment_takes_little_room_before_it_is_filled(tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, segment_bytes=1 << 30)
    store = open_segment_store(tmp_path, node="node-0", boot_id="0001", settings=settings)
    storage = ThreadsStorage(store, name="root", threads=4, ops_max=OPS_MAX)
    driver, slots = Driver(storage), Slots(UNEVEN, 16)
    storage.open_namespace(SPACE)
    try:
        for written in range(16, 400, 16):
            ops = [driver.write_op(SPACE, new_key(), slots.fill(slot, PAYLOAD)) for slot in range(16)]
            assert {done.reason for done in driver.run(ops)} == {Reason.OK}
            taken = sum(file.stat().st_blocks * 512 for file in (store.appender.author.segments).iterdir())
            assert taken <= 3 * max(4 << 20, (written + 16) * UNEVEN.record_bytes) + (1 << 20)
    finally:
        assert storage.close(5.0)
