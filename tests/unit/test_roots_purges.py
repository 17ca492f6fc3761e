"""What was purged stays purged: in copies that were away, hung or new, with whatever main root, over restarts."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from node_kit import LAYOUT, MANIFEST, Anonymous, NodeKit
from roots_kit import SPACE, WAIT_S, keys, rig

from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.inspect.place import find_store
from kvmoverd.adapters.storage.inspect.strangers import strangers_of_files, strangers_of_segments
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_absent import AbsentStorage, left_out
from kvmoverd.adapters.storage.roots_marks import DiskMarks, RamMarks
from kvmoverd.adapters.storage.roots_open import Opening
from kvmoverd.adapters.storage.roots_root import RootSettings
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite, Storage, StorageDone, StorageFacts

A, B = keys(2)
SETTINGS = SegmentSettings(segment_bytes=1 << 20, log_pages=16)
LAYOUTS: dict[str, Callable[[Path], Blocks]] = {
    "files": file_blocks,
    "segments": lambda root: open_segment_store(root, node="n", boot_id=f"b{time.monotonic_ns()}", settings=SETTINGS),
}


class Disks:
    """A main root and a copy of it in directories, which can be opened again and again; one may be left out."""

    def __init__(self, place: Path, layout: str) -> None:
        self.near, self.far, self._layout = place / "near", place / "far", layout
        self._memory = Anonymous(2 * LAYOUT.record_bytes)
        self._op_id = 0

    @contextmanager
    def opened(self, *, near: bool = True) -> Iterator[RootSet]:
        main = self._storage(self.far, "far"), RootSettings(base=self.far / "kvm1")
        copy = self._storage(self.near, "near") if near else absent("near", lambda: self._storage(self.near, "near"))
        copied = copy, RootSettings(is_main=False, base=self.near / "kvm1")
        made = RootSet([copied, main], pool_bytes=1 << 30, keeps=False)
        try:
            yield made
        finally:
            assert made.close(WAIT_S)

    def write(self, made: RootSet, key: bytes) -> None:
        start = HEADER_BYTES
        self._memory.bytes[start : start + LAYOUT.block_bytes] = memoryview(NodeKit.content(key))
        self._run(made, lambda op_id: BlockWrite(op_id, SPACE, key, ROOT, 0, self._memory.address))

    def read(self, made: RootSet, key: bytes) -> Reason:
        address = self._memory.address + LAYOUT.record_bytes
        return self._run(made, lambda op_id: BlockRead(op_id, SPACE, key, address))

    def _run(self, made: RootSet, op: Callable[[int], BlockRead | BlockWrite]) -> Reason:
        """Until its slot is home; the first end of it."""
        self._op_id += 1
        made.submit([op(self._op_id)])
        ends, until_s = list[StorageDone](), time.monotonic() + WAIT_S
        while not (ends and ends[-1].quiet):
            assert time.monotonic() < until_s, ends
            ends += made.poll(8)
        return ends[0].reason

    def _storage(self, root: Path, name: str) -> Storage:
        root.mkdir(exist_ok=True)
        return ThreadsStorage(LAYOUTS[self._layout](root), name=name, threads=2, ops_max=8)


class NoMarks(RamMarks):
    """Of a main root that can't be asked."""

    def token(self, fingerprint16: bytes) -> str | None:
        raise OSError(errno.ESTALE, "gone")


def absent(name: str, build: Callable[[], Storage]) -> AbsentStorage:
    facts = StorageFacts(name, "threads", "none", "", {"role": "copy"})
    return AbsentStorage(Opening(name, build), left_out(facts, "it hangs"), stay=threading.Event())


@pytest.fixture(params=["files", pytest.param("segments", marks=pytest.mark.slow)])
def disks(request: pytest.FixtureRequest, tmp_path: Path) -> Disks:
    return Disks(tmp_path, request.param)


def near_read_blocks(made: RootSet) -> int:
    return made.roots[0].storage.counters.read_blocks


def test_a_copy_that_nothing_was_purged_of_is_used_after_a_restart(disks: Disks) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
    with disks.opened() as made:
        made.open_namespace(SPACE)
        assert disks.read(made, A) is Reason.OK and near_read_blocks(made) + made.main.storage.counters.read_blocks == 1
        made.roots[0].storage.index.found(SPACE, [A])
        assert disks.read(made, A) is Reason.OK and near_read_blocks(made) >= 1


def test_the_names_that_say_up_to_where_a_root_was_purged_are_part_of_a_store(disks: Disks) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
    for root in (disks.near, disks.far):
        place = find_store(root)
        strangers = strangers_of_files if disks._layout == "files" else strangers_of_segments
        assert list(strangers(place)) == []


@pytest.mark.parametrize("whole_tenant", [False, True])
def test_a_copy_that_was_away_during_a_purge_never_gives_the_blocks_again(disks: Disks, whole_tenant: bool) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
    with disks.opened(near=False) as made:
        made.open_namespace(SPACE)
        purged = made.purge_tenant(MANIFEST.tenant) if whole_tenant else made.purge(SPACE)
        assert purged[0] >= (0 if whole_tenant else 1)
        made.open_namespace(SPACE)
        assert disks.read(made, A) is Reason.MISS
    with disks.opened() as made:
        made.open_namespace(SPACE)
        made.roots[0].storage.index.found(SPACE, [A])
        assert disks.read(made, A) is Reason.MISS
        disks.write(made, B)
        assert disks.read(made, B) is Reason.OK


def test_a_copy_is_emptied_when_the_main_root_was_replaced_by_an_empty_directory(disks: Disks) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
    shutil.rmtree(disks.far)
    with disks.opened() as made:
        made.open_namespace(SPACE)
        made.roots[0].storage.index.found(SPACE, [A])
        assert disks.read(made, A) is Reason.MISS


def test_a_copy_that_comes_back_while_the_node_runs_is_purged_before_it_is_asked(disks: Disks) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
        disks.write(made, B)
    with disks.opened(near=False) as made:
        made.open_namespace(SPACE)
        made.purge(SPACE)
        made.open_namespace(SPACE)
        disks.write(made, B)
        near = made.roots[0]
        until(lambda: made.keeper.step() or SPACE.fingerprint in near.opened)
        near.storage.index.found(SPACE, [A])
        assert disks.read(made, A) is Reason.MISS, "it was purged while the copy was away"
        disks.write(made, A)
        assert near.storage.counters.written_blocks == 1, "it gets copies again"


def test_what_a_copy_has_of_namespaces_that_nobody_opens_goes_when_the_main_root_has_it_no_more(disks: Disks) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
    with disks.opened(near=False) as made:
        made.open_namespace(SPACE)
        made.purge(SPACE)
    marks = DiskMarks(disks.near / "kvm1")
    before = marks.mark(SPACE.fingerprint[:16])
    assert before is not None
    with disks.opened() as made:
        until(lambda: made.keeper.step() or marks.mark(SPACE.fingerprint[:16]) != before)
        if made.roots[0].storage.index.complete:
            until(lambda: not made.roots[0].storage.index.known(SPACE, [A])[0])


def test_a_purge_by_another_node_is_heard_of_though_nobody_tells(disks: Disks) -> None:
    with disks.opened() as made:
        made.open_namespace(SPACE)
        disks.write(made, A)
        other = LAYOUTS[disks._layout](disks.far)
        other.open_namespace(SPACE)
        other.purge(SPACE)
        assert other.close(WAIT_S)
        before = made.main.opened[SPACE.fingerprint].token
        made.keeper.step()
        until(lambda: made.keeper.step() or SPACE.fingerprint in made.roots[0].opened)
        assert made.main.opened[SPACE.fingerprint].token != before
        made.roots[0].storage.index.found(SPACE, [A])
        assert disks.read(made, A) is Reason.MISS


def test_while_the_main_root_cannot_be_asked_a_copy_gives_what_it_knows_to_be_up_to_date_and_no_more() -> None:
    with rig("near", "far") as made:
        near = made.roots[0]
        made.run(made.write_op(A))
        made.until(lambda: not made.set.copying)
        made.set.main.marks = NoMarks()
        made.main.fails = lambda op: Reason.IO_ERROR
        made.set.keeper.step()
        assert made.run(made.read_op(A))[0].reason is Reason.OK
        made.set.index.forget(SPACE)
        near.index.found(SPACE, [A])
        made.set.keeper.step()
        assert made.run(made.read_op(A))[0].reason is Reason.IO_ERROR, "somebody said that it was purged"


def test_what_was_read_or_written_before_a_purge_is_not_copied_after_it() -> None:
    with rig("near", "far", fill=True, deadline_s=WAIT_S) as made:
        near, far = made.roots
        made.store(far, A)
        far.index.found(SPACE, [A])
        far.holds = True
        read, write = made.read_op(A), made.write_op(B, 2)
        made.set.submit([read, write])
        made.set.doubt(SPACE.fingerprint)
        made.set.open_namespace(SPACE)
        far.release()
        made.until(lambda: bool(made.ends(read) and made.ends(write)))
        assert made.ends(read) == made.ends(write) == [(Reason.OK, True)]
        assert near.stored(SPACE, A) is None and near.stored(SPACE, B) is None


def test_a_purge_of_a_copy_waits_for_what_is_just_being_copied() -> None:
    with rig("near", "far", deadline_s=WAIT_S) as made:
        near = made.roots[0]
        near.holds = True
        write = made.write_op(A)
        made.run(write)
        purge = threading.Thread(target=made.set.purge, args=(SPACE,))
        purge.start()
        time.sleep(0.05)
        assert purge.is_alive()
        near.release()
        made.until(lambda: len(made.ends(write)) == 2)
        purge.join(WAIT_S)
        assert not purge.is_alive() and near.stored(SPACE, A) is None


def until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"still not so after {WAIT_S} s"
        time.sleep(0.01)
