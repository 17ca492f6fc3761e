"""Garbage collection where something fails: the rest of it goes on, and nothing that somebody may read is lost."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gc_kit import GRACE_S, SEGMENT_BYTES, SETTINGS, SPACE, MakeNode, Node, namespace, nodes_over

from kvmoverd.adapters.storage.segments import rooms
from kvmoverd.adapters.storage.segments.budgets import Budgets
from kvmoverd.adapters.storage.segments.graveyard import RETRY_S
from kvmoverd.adapters.storage.segments.settings import Limit
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.store.places import segment_name

pytestmark = pytest.mark.contract


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    with nodes_over(tmp_path) as make:
        yield make


def failing(monkeypatch: pytest.MonkeyPatch, call: str, fails: Callable[[str], bool]) -> None:
    """This call of the filesystem fails for the paths that are so."""
    real = getattr(os, call)

    def maybe(path: str | os.PathLike[str], *args: object, **options: object) -> object:
        if fails(os.fspath(path)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, maybe)


def must_drop_two(one: Node) -> None:
    one.collecting.usage.refresh(one.owned(), one.collector._is_active)
    used = one.collecting.usage.totals()[0]
    one.collector._budgets = Budgets(replace(SETTINGS, bytes_max=round((used - 2 * SEGMENT_BYTES) / SETTINGS.low)))


def victims(one: Node) -> list[str]:
    """Names of the files that wait for the end of their grace."""
    return sorted(segment_name(number) for _, number in one.graveyard._dying)


def test_a_file_that_cant_be_deleted_in_anybodys_trash_takes_no_room_from_the_others(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node()
    one.fill(4)
    one.collect()
    theirs = one.root.trash / "b.1"
    theirs.mkdir()
    for name in ("0.seg", "1.seg"):
        (theirs / name).write_bytes(b"x" * 4096)
    failing(monkeypatch, "unlink", lambda path: path.endswith("b.1/0.seg"))
    assert one.collector.make_room(SEGMENT_BYTES)
    assert [path.name for path in theirs.iterdir()] == ["0.seg"]
    assert one.collector.counters.no_space_segments == 1 and one.collecting.trash.failures >= 1


def test_on_a_full_disk_a_segment_that_cant_be_deleted_is_passed_by(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node()
    one.fill(12)
    must_drop_two(one)
    one.collect()
    stuck, *_ = victims(one)
    failing(monkeypatch, "unlink", lambda path: path.endswith(stuck))
    waiting = one.graveyard.waiting()[0]
    assert one.collector.make_room((waiting - 1) * SEGMENT_BYTES)
    assert stuck in one.segments() and victims(one) == [stuck]
    alive, *_ = [name for name in one.segments() if name != stuck]
    failing(monkeypatch, "unlink", lambda path: path.endswith((stuck, alive)))
    before = len(one.segments())
    assert one.collector.make_room(2 * SEGMENT_BYTES)
    assert before - len(one.segments()) in (1, 2) and {stuck, alive} <= set(one.segments())
    assert one.graveyard.failures >= 3


def test_one_segment_that_cant_be_moved_does_not_keep_the_others_and_goes_later(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node()
    one.fill(8)
    must_drop_two(one)
    one.collect()
    stuck, *rest = victims(one)
    assert rest
    with monkeypatch.context() as broken:
        failing(broken, "rename", lambda path: path.endswith(stuck))
        one.pass_grace()
        assert stuck in one.segments() and not set(rest) & set(one.segments())
        assert one.graveyard.failures >= 1
    one.clock.pass_s(RETRY_S)
    one.collect()
    assert stuck not in one.segments()


def test_directories_that_cant_be_looked_at_or_left_keep_no_victim_alive(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = node("a.1")
    dead.close()
    one = node("a.2", adopted=["a.1"])
    keys = one.fill(6)
    must_drop_two(one)
    failing(monkeypatch, "rename", lambda path: "a.1" in path)
    refresh = one.collecting.usage.refresh

    def fails_late(*args: object) -> None:
        refresh(*args)  # type: ignore[arg-type]
        raise TimeoutError("another thread looks")

    monkeypatch.setattr(one.collecting.usage, "refresh", fails_late)
    one.collect()
    counters = one.collector.counters
    assert counters.evicted_segments >= 2 and sum(one.known(some) == 0 for some in keys) >= 2
    assert counters.failures >= 2 and counters.authors_left == 0
    notes = "; ".join(one.collector.notes())
    assert "looking at segments" in notes and "leaving a.1" in notes and "EIO" in notes
    monkeypatch.undo()
    one.collect()
    assert one.collector.notes() == [] and counters.authors_left == 1


def test_a_trash_that_cant_be_emptied_is_no_room_to_come(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    one = node()
    keys = one.fill(10)
    one.collect()
    failing(monkeypatch, "unlink", lambda path: path.endswith("stuck"))
    size_bytes = 3 * SEGMENT_BYTES
    path = one.collecting.trash.directory.parent / "stuck"
    path.write_bytes(os.urandom(size_bytes))
    one.collecting.trash.throw(path, "stuck")
    deadline_s = time.monotonic() + 10
    while one.collecting.trash.stuck_bytes < size_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    must_drop_two(one)
    one.collect()
    assert sum(one.known(some) == 0 for some in keys) >= 5, "what lies there for good frees nothing"


def test_whoever_needs_room_does_not_wait_for_a_thread_that_hangs(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node()
    one.fill(3)
    one.collect()
    monkeypatch.setattr(rooms, "ROOM_S", 0.2)
    holds, let_go = threading.Event(), threading.Event()

    def hang() -> None:
        with one.graveyard._lock:
            holds.set()
            let_go.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    assert holds.wait(5)
    began_s = time.monotonic()
    made = one.collector.make_room(1)
    took_s = time.monotonic() - began_s
    let_go.set()
    thread.join(5)
    assert not made and took_s < 2.0 and one.collector.counters.rooms_refused == 1
    assert one.collector.make_room(1)


def test_one_who_needs_much_room_gets_a_quarter_of_what_is_kept_at_most(node: MakeNode) -> None:
    one = node()
    one.fill(12)
    one.collect()
    before = len(one.segments())
    assert one.collector.make_room(1 << 40)
    assert 2 <= before - len(one.segments()) <= 4


def test_segments_of_a_namespace_that_is_not_in_ram_are_not_taken_for_unheard(node: MakeNode) -> None:
    one, spaces = node("a.1"), (SPACE, namespace("other"))
    for space in spaces:
        one.open(space)
        one.fill(2, space)
    later = node("a.2", adopted=["a.1"], index_ram_bytes_max=1)
    later.follow()
    (left_out,) = [space for space in spaces if not later.index.wants(space.fingerprint[:16])]
    one.fill(3, left_out)
    names = one.segments()
    one.close()
    later.follow()
    assert None in {later.index.segment_id("a.1", number) for number in range(1, len(names) + 1)}
    for _ in range(3):
        later.clock.pass_s(GRACE_S + 1)
        later.collect()
    assert later.segments("a.1") == names
    assert later.collector.counters.unheard_segments == 0 and later.graveyard.waiting()[0] == 0


def test_a_growing_segment_whose_blocks_are_too_old_ends_and_goes(node: MakeNode) -> None:
    one = node(settings=replace(SETTINGS, limits=(Limit(ttl_s=3_600.0),)))
    keys = [os.urandom(32) for _ in range(3)]
    one.put(keys)
    (name,) = [segment_name(number) for number in one.appender.segments.active()]
    path = one.root.authors / one.own() / "seg" / name
    os.utime(path, (1_000_000_000, 1_000_000_000))
    one.collect()
    assert not one.appender.segments.active(), "it takes no more records"
    os.utime(path, (1_000_000_000, 1_000_000_000))
    one.collect()
    assert one.known(keys) == 0 and one.collector.counters.expired_segments == 1


def test_a_record_whose_payload_was_damaged_is_not_salvaged(node: MakeNode) -> None:
    one = node()
    keys = one.fill(1)[0][:3]
    places = [one.index.find(SPACE.fingerprint[:16], key) for key in keys]
    assert all(places)
    damaged = places[1]
    assert damaged is not None
    with open(one.root.authors / damaged.author / "seg" / segment_name(damaged.segment), "r+b") as file:
        file.seek(damaged.offset_bytes + HEADER_BYTES + 77)
        file.write(b"\xff\xfe\xfd")
    moved = one.collector._writer.move([place for place in places if place], 5.0)
    assert set(moved) == {places[0], places[2]}
