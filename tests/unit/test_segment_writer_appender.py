"""The appender: order of what becomes durable, groups, what fails with what."""

from __future__ import annotations

import dataclasses
import errno
import threading
import time
from pathlib import Path

import pytest
from segment_writer_kit import LAYOUT, SMALL, SPACE, WAIT_S, Rig, namespace, new_keys, payload_of, rig

from kvmoverd.adapters.storage.segments import appender, writes_segments
from kvmoverd.adapters.storage.segments.writes_segments import IDLE_NS
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.record import decode
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import Kind
from kvmoverd.core.store.places import PAGE_BYTES, Place
from kvmoverd.core.store.segment_header import decode_segment

LARGE = dataclasses.replace(SMALL, segment_bytes=(1 + 3 * 64) * PAGE_BYTES, commit_wait_s=5.0)
"""64 records a segment; a group is waited for as long as anything is under way."""


def hold_writes(made: Rig, count: int) -> None:
    """Lets no record be written before `count` threads want to: so they are one group."""
    barrier = threading.Barrier(count)

    def before(call: str, name: str, offset_bytes: int) -> None:
        if call == "write" and name.endswith(".seg") and offset_bytes:
            barrier.wait(WAIT_S)

    made.io.before = before


def fail_once(made: Rig, call: str, suffix: str, code: int, *, after: int = 0) -> None:
    left = [after]

    def before(its_call: str, name: str, offset_bytes: int) -> None:
        if its_call == call and suffix in name and (offset_bytes or call != "write"):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(code, "made to fail")

    made.io.before = before


def test_a_record_is_durable_before_its_index_page_and_visible_before_anyone_is_told(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.io.calls.clear()
        assert made.put(new_keys(1)[0])[0].reason is Reason.OK
        assert made.io.names() == [
            "create 00000001.seg",
            "write 00000001.seg",
            "sync_whole 00000001.seg",
            "sync_names seg",
            "write 00000001.seg",
            "sync 00000001.seg",
            "write log.00000001",
            "sync log.00000001",
            "show 1",
            "end OK",
        ]


def test_a_record_is_found_where_the_index_says_with_all_that_its_header_names(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        key, parent = new_keys(2)
        made.append(key, parent=parent, depth=7)
        place = made.wait(key)[0].place
        assert place is not None and made.index.blocks[key] == (place.author, place.segment, place.page)
        record = made.record(place)
        header = decode(record[:HEADER_BYTES])
        segment = decode_segment((made.directory / "seg" / "00000001.seg").read_bytes())
        assert record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes] == payload_of(key)
        assert (header.key, header.parent, header.depth) == (key, parent, 7)
        assert header.generation == segment.generation and segment.fingerprint == SPACE.fingerprint
        page = next(page for page in made.pages() if page.kind is Kind.BLOCKS)
        assert (page.segment, page.generation, page.record_pages) == (1, segment.generation, 3)
        assert page.entries is not None and int(page.entries[0]["depth"]) == 7


def test_32_blocks_are_one_group_with_one_sync_of_each_file(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        hold_writes(made, 32)
        made.io.calls.clear()
        ends = made.put(*new_keys(32))
        assert {done.reason for done in ends} == {Reason.OK}
        assert made.io.names("sync") == ["sync 00000001.seg", "sync log.00000001"]
        assert made.io.names("show") == ["show 32"] and made.appender.counters.commits == 1


def test_a_block_that_comes_alone_waits_for_nobody(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        for key in new_keys(3):
            assert made.put(key)[0].reason is Reason.OK
        assert made.appender.counters.commits == 3


def test_a_group_does_not_wait_for_a_slow_write_longer_than_the_setting(tmp_path: Path) -> None:
    with rig(tmp_path, dataclasses.replace(LARGE, commit_wait_s=0.01)) as made:
        slow, quick = new_keys(2)
        go_on = threading.Event()
        made.io.before = lambda call, name, at: (
            go_on.wait(WAIT_S) if call == "write" and at == PAGE_BYTES and ".seg" in name else None
        )
        thread = threading.Thread(target=made.append, args=(slow,))
        thread.start()
        while not made.io.names("create")[-1].endswith(".seg"):
            pass
        made.append(quick)
        assert made.wait(quick)[0].reason is Reason.OK
        assert [key for key, _ in made.ends] == [quick]
        go_on.set()
        assert made.wait(slow)[0].reason is Reason.OK
        thread.join(WAIT_S)


def test_a_failed_write_fails_its_block_only(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        fail_once(made, "write", ".seg", errno.EIO)
        keys = new_keys(8)
        ends = made.put(*keys)
        assert sorted(done.reason.name for done in ends) == ["IO_ERROR"] + ["OK"] * 7
        assert {key for key, done in zip(keys, ends, strict=True) if done.reason is Reason.OK} == set(made.logged())


def test_a_failed_sync_of_a_segment_fails_the_group_and_ends_the_segment(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        fail_once(made, "sync", ".seg", errno.EIO)
        assert made.put(new_keys(1)[0])[0].reason is Reason.IO_ERROR
        assert made.logged() == [] and made.index.blocks == {}
        key = new_keys(1)[0]
        done = made.put(key)[0]
        assert done.reason is Reason.OK and done.place is not None and done.place.segment == 2
        assert made.logged() == [key]


def test_a_record_written_into_a_segment_whose_sync_failed_meanwhile_fails_too(tmp_path: Path) -> None:
    with rig(tmp_path, dataclasses.replace(LARGE, commit_blocks=1)) as made:
        hold_writes(made, 2)
        first, second = new_keys(2)
        inner, failed = made.io.before, []

        def before(call: str, name: str, offset_bytes: int) -> None:
            inner(call, name, offset_bytes)
            if call == "sync" and name.endswith(".seg"):
                failed.append(name)
                raise OSError(errno.EIO, "made to fail")

        made.io.before = before
        assert {done.reason for done in made.put(first, second)} == {Reason.IO_ERROR}
        assert failed == ["00000001.seg"] and made.logged() == []


def test_a_failed_index_page_is_given_up_with_its_number(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        fail_once(made, "write", "log.", errno.EIO)
        assert made.put(new_keys(1)[0])[0].reason is Reason.IO_ERROR
        key = new_keys(1)[0]
        assert made.put(key)[0].reason is Reason.OK
        assert [page.number for page in made.pages() if page.kind is Kind.BLOCKS] == [2]
        assert made.logged() == [key] and list(made.index.blocks) == [key]


def test_a_failed_sync_of_the_log_fails_the_group_and_nothing_is_shown(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        fail_once(made, "sync", "log.", errno.EIO)
        assert made.put(new_keys(1)[0])[0].reason is Reason.IO_ERROR
        assert made.index.blocks == {}
        assert made.put(new_keys(1)[0])[0].reason is Reason.OK


def test_a_full_disk_is_asked_for_room_once_and_written_to_again(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        asked: list[int] = []
        made.appender.make_room = lambda bytes_wanted: asked.append(bytes_wanted) is None
        fail_once(made, "write", ".seg", errno.ENOSPC)
        assert made.put(new_keys(1)[0])[0].reason is Reason.OK
        assert asked == [64 << 20] and made.appender.counters.full_disks == 1


@pytest.mark.parametrize("made_room", [False, True])
def test_a_disk_that_stays_full_is_no_space_after_one_retry(tmp_path: Path, made_room: bool) -> None:
    with rig(tmp_path, LARGE) as made:
        tries: list[str] = []

        def before(call: str, name: str, offset_bytes: int) -> None:
            if call == "write" and offset_bytes and ".seg" in name:
                tries.append(name)
                raise OSError(errno.EDQUOT, "made to fail")

        made.io.before, made.appender.make_room = before, lambda bytes_wanted: made_room
        assert made.put(new_keys(1)[0])[0].reason is Reason.NO_SPACE
        assert len(tries) == 1 + made_room


def test_many_writers_that_meet_a_full_disk_have_room_made_once(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        barrier, asked, full = threading.Barrier(4), [], [True]

        def before(call: str, name: str, offset_bytes: int) -> None:
            if call == "write" and offset_bytes and ".seg" in name and full[0]:
                barrier.wait(WAIT_S)
                raise OSError(errno.ENOSPC, "made to fail")

        def make_room(bytes_wanted: int) -> bool:
            asked.append(bytes_wanted)
            full[0] = False
            return True

        made.io.before, made.appender.make_room = before, make_room
        assert {done.reason for done in made.put(*new_keys(4))} == {Reason.OK}
        assert len(asked) == 1


def test_segments_and_logs_follow_each_other_and_every_block_is_named_once(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        keys = new_keys(40)
        for key in keys:
            assert made.put(key)[0].reason is Reason.OK
        assert made.logged() == keys
        assert {place[1] for place in made.index.blocks.values()} == {1, 2, 3, 4, 5}
        pages = made.pages()
        seals = [(page.log, page.number) for page in pages if page.kind is Kind.SEAL]
        assert seals == [(log, 7) for log in range(1, len(seals) + 1)] and len(seals) == 6
        assert [page.author for page in pages if page.kind is Kind.HEAD] == [made.appender.author.name] * 8
        for key in keys:
            assert decode(made.record(Place(*made.index.blocks[key]))[:HEADER_BYTES]).key == key


def test_the_next_segment_is_there_before_it_is_needed(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        for key in new_keys(6):
            made.put(key)
        made.appender.segments.prepare()
        assert sorted(path.name for path in (made.directory / "seg").iterdir()) == ["00000001.seg", "00000002.seg"]
        made.io.calls.clear()
        for key in new_keys(3):
            made.put(key)
        assert [name for name in made.io.names("create") if name.endswith(".seg")] == []


def test_namespaces_have_segments_of_their_own_and_share_a_group(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        hold_writes(made, 2)
        first, second = new_keys(2)
        threads = [
            threading.Thread(target=made.append, args=(key, space))
            for key, space in ((first, SPACE), (second, namespace("other")))
        ]
        for thread in threads:
            thread.start()
        places = [done.place for done in made.wait(first, second)]
        for thread in threads:
            thread.join(WAIT_S)
        assert {place.segment for place in places if place} == {1, 2}
        assert made.appender.counters.commits == 1 and made.appender.counters.log_syncs == 1
        assert made.appender.counters.segment_syncs == 2


def test_a_namespace_that_is_not_written_to_keeps_no_segment_growing(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.put(*new_keys(1))
        segments = made.appender.segments
        segments.retire_idle(time.monotonic_ns())
        assert segments.active() == {1}
        segments.retire_idle(time.monotonic_ns() + IDLE_NS)
        assert segments.active() == set()
        done = made.put(*new_keys(1))[0]
        assert done.place is not None and done.place.segment == 2


def test_of_many_namespaces_the_one_written_to_last_keeps_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes_segments, "NAMESPACES_MAX", 2)
    with rig(tmp_path) as made:
        spaces = [namespace(f"model-{number}") for number in range(3)]
        for space in (spaces[0], spaces[1], spaces[0], spaces[2]):
            assert made.put(*new_keys(1), space=space)[0].reason is Reason.OK
        assert made.appender.segments.active() == {1, 3}


def test_more_blocks_than_may_wait_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender, "WAIT_S", 0.05)
    with rig(tmp_path, dataclasses.replace(LARGE, commit_blocks=1)) as made:
        go_on = threading.Event()
        made.io.before = lambda call, name, at: go_on.wait(WAIT_S) if call == "sync" and ".seg" in name else None
        keys = new_keys(1 + appender.QUEUE_GROUPS_MAX + 1)
        for key in keys:
            made.append(key)
        assert made.wait(keys[-1])[0].reason is Reason.DROPPED
        go_on.set()
        assert {done.reason for done in made.wait(*keys[:-1])} == {Reason.OK}


def test_a_purge_ends_the_segment_and_fails_what_waits_for_its_commit(tmp_path: Path) -> None:
    with rig(tmp_path, LARGE) as made:
        late, early = new_keys(2)
        assert made.put(early)[0].reason is Reason.OK

        def before(call: str, name: str, offset_bytes: int) -> None:
            if call == "sync" and name.endswith(".seg"):
                made.purges[SPACE.fingerprint[:16]] = 1

        made.io.before = before
        assert made.put(late)[0].reason is Reason.IO_ERROR
        again = made.put(*new_keys(1))[0]
        assert again.reason is Reason.OK and again.place is not None and again.place.segment == 2
        assert late not in made.logged()
        assert decode_segment((made.directory / "seg" / "00000002.seg").read_bytes()).purge == 1


def test_an_adopted_author_goes_on_under_a_fresh_name_and_leaves_the_old_directory_alone(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        first, second = new_keys(2)
        assert made.put(first)[0].reason is Reason.OK
        old = made.appender.author
        (old.directory / "adopt.1").touch()
        made.now_ns += int(SMALL.dead_s * 1e9)
        before = {path: path.read_bytes() for path in sorted(old.directory.glob("l*"))}
        done = made.put(second)[0]
        assert done.reason is Reason.OK and done.place is not None
        assert done.place.author == f"{old.name}-1" == made.appender.author.name
        assert made.logged() == [second]
        assert {path: path.read_bytes() for path in sorted(old.directory.glob("l*"))} == before


def test_a_heartbeat_finds_an_adoption_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        old = made.appender.author
        (old.directory / "adopt.1").touch()
        made.appender.heartbeat()
        assert made.appender.author.name == f"{old.name}-1" and made.appender.counters.renewals == 1


def test_a_close_commits_what_is_written_and_refuses_what_comes_later(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        key, late = new_keys(2)
        made.append(key)
        assert made.appender.close(WAIT_S) and made.wait(key)[0].reason is Reason.OK
        made.append(late)
        assert made.wait(late)[0].reason is Reason.SHUTTING_DOWN
        assert made.io.names("write", "sync")[-2:] == ["write lease", "sync lease"] and made.logged() == [key]


def test_a_close_is_bounded_while_a_write_hangs_and_true_once_it_is_over(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        key = new_keys(1)[0]
        go_on = threading.Event()
        made.io.before = lambda call, name, at: (
            go_on.wait(WAIT_S) if call == "write" and ".seg" in name and at else None
        )
        thread = threading.Thread(target=made.append, args=(key,))
        thread.start()
        while not any(name.endswith(".seg") for name in made.io.names("sync_whole")):
            pass
        assert not made.appender.close(0.05) and made.ends == []
        go_on.set()
        assert made.appender.close(WAIT_S) and made.wait(key)[0].reason is Reason.OK
        thread.join(WAIT_S)


def test_an_error_that_nobody_thought_of_ends_the_group_and_the_next_is_served(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.index.add_segment = None  # type: ignore[method-assign, assignment]
        assert made.put(*new_keys(1))[0].reason is Reason.INTERNAL
        del made.index.add_segment
        assert made.put(*new_keys(1))[0].reason is Reason.OK


def test_direct_writes_are_the_same(tmp_path: Path) -> None:
    with rig(tmp_path, direct=True) as made:
        key = new_keys(1)[0]
        place = made.append(key, parent=ROOT) or made.wait(key)[0].place
        assert place is not None and made.record(place)[HEADER_BYTES : HEADER_BYTES + 100] == payload_of(key)[:100]
