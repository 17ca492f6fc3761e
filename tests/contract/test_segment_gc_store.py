"""Garbage collection in whole stores that run: under a budget, on a small filesystem, and killed at any moment."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gc_ordeal import run as ordeal
from gc_writer import BATCH, BUDGET_BYTES, MIB, SEGMENT_BYTES, SPACE, TIGHT, Filling
from loop_kit import loop_filesystem

from kvmover_proto import engine_pb2
from kvmoverd.adapters.storage.segments.background import StoreBackground
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place

pytestmark = [pytest.mark.contract, pytest.mark.timeout(120)]
WAIT_S = 30.0


def wait_for(what: Callable[[], bool], why: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s, why
        time.sleep(0.05)


def disk_bytes(root: Path) -> int:
    """What all files below take."""
    found = 0
    for place, _, names in os.walk(root):
        for name in names:
            try:
                found += os.lstat(f"{place}/{name}").st_blocks * 512
            except FileNotFoundError:
                continue
    return found


def test_a_store_under_a_budget_forgets_the_old_and_keeps_what_is_used(tmp_path: Path) -> None:
    filling = Filling(tmp_path, "1")
    collector = filling.store.background.collecting.collector  # type: ignore[attr-defined]
    try:
        batches = [filling.write()[0] for _ in range(8)]
        used = batches[2]
        for _ in range(70):
            batches.append(filling.write()[0])
            filling.storage.index.touch(SPACE, used)
            collector.hurry()
            time.sleep(0.02)
        wait_for(lambda: disk_bytes(tmp_path) <= BUDGET_BYTES, "the budget is exceeded for long")
        assert len(batches) * SEGMENT_BYTES > 2 * BUDGET_BYTES, "more than twice of it was written"
        ends = [[filling.reads(key).reason for key in keys] for keys in batches]
        assert {reason for some in ends for reason in some} == {Reason.OK, Reason.MISS}
        assert ends[2] == [Reason.OK] * BATCH, "used at every batch"
        assert ends[-1] == [Reason.OK] * BATCH and ends[0] == [Reason.MISS] * BATCH
        assert collector.counters.evicted_segments > 20 and collector.counters.no_space_segments == 0
    finally:
        assert filling.storage.close(10.0)


def test_a_full_filesystem_makes_room_for_what_is_new(tmp_path: Path) -> None:
    # A grace that does not end here: only a full disk frees anything.
    settings = replace(TIGHT, bytes_max=0, grace_s=3_600.0)
    with loop_filesystem(tmp_path / "small", 64 * MIB) as place:
        filling = Filling(place, "1", settings)
        try:
            ended: list[Reason] = []
            failed: list[str] = []
            keys: list[bytes] = []
            while len(keys) * SEGMENT_BYTES / BATCH < 160 * MIB:
                some, done = filling.write()
                keys += some
                ended += [one.reason for one in done]
                failed += [one.message for one in done if one.reason is not Reason.OK]
                assert filling.reads(some[-1]).reason in (Reason.OK, Reason.MISS)
            collector = filling.store.background.collecting.collector  # type: ignore[attr-defined]
            assert collector.counters.no_space_bytes > 64 * MIB
            assert not failed, f"{len(failed)} of {len(ended)} found no room: {failed[:3]}, {collector.counters}"
            found = [filling.reads(key).reason for key in keys]
            assert set(found) == {Reason.OK, Reason.MISS} and found[-1] is Reason.OK
            assert found.count(Reason.OK) * SEGMENT_BYTES / BATCH > 16 * MIB, "not all was thrown away"
        finally:
            assert filling.storage.close(10.0)


def test_another_node_never_reads_wrong_bytes_while_segments_go(tmp_path: Path) -> None:
    owner, reader = Filling(tmp_path, "1"), Filling(tmp_path, "1", node="node-1")
    try:
        keys: list[bytes] = []
        chance = random.Random(3)
        ends = []
        for _ in range(60):
            keys += owner.write()[0]
            time.sleep(0.02)
            ends += [reader.reads(chance.choice(keys[-800:])).reason for _ in range(4)]
        assert set(ends) <= {Reason.OK, Reason.MISS} and ends.count(Reason.OK) > 40
    finally:
        assert owner.storage.close(10.0) and reader.storage.close(10.0)


@pytest.mark.slow
def test_killed_at_any_moment_the_next_start_finishes_what_was_begun(tmp_path: Path) -> None:
    chance = random.Random(1)
    keys: list[bytes] = []
    for boot_id in range(3):
        writer = Path(__file__).with_name("gc_writer.py")
        command = [sys.executable, str(writer), str(tmp_path), str(boot_id)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as child:
            assert child.stdout is not None
            # From its first batch on: a busy machine may take as long to start it.
            keys += [bytes.fromhex(key) for key in child.stdout.readline().split()[1:]]
            deadline_s = time.monotonic() + 0.7 + chance.random()
            while time.monotonic() < deadline_s and (line := child.stdout.readline()):
                keys += [bytes.fromhex(key) for key in line.split()[1:]]
            child.kill()
            for line in child.stdout:
                keys += [bytes.fromhex(key) for key in line.split()[1:] if len(key) == 64]
    last = Filling(tmp_path, "last")
    try:
        authors = tmp_path / "kvm1" / "authors"
        trash = tmp_path / "kvm1" / ".trash"
        own = last.store.appender.author.name
        wait_for(lambda: disk_bytes(tmp_path) <= 1.25 * BUDGET_BYTES, f"{disk_bytes(tmp_path)} bytes are left")
        wait_for(lambda: {path.name for path in trash.iterdir()} <= {own}, f"{list(trash.iterdir())} are left")
        ends = [last.reads(key).reason for key in keys]
        assert set(ends) == {Reason.OK, Reason.MISS}, "no block is wrong"
        assert ends.count(Reason.OK) > 100
        # All that the former starts left goes, and their directories with it, once it is old.
        collector = last.store.background.collecting.collector  # type: ignore[attr-defined]

        def push_out() -> bool:
            for _ in range(10):
                last.write()
            collector.hurry()
            return len(list(authors.iterdir())) == 1

        wait_for(push_out, f"{list(authors.iterdir())} are left")
    finally:
        assert last.storage.close(10.0)


def test_neither_heartbeats_nor_following_wait_for_a_slow_salvage(tmp_path: Path) -> None:
    filling = Filling(tmp_path, "1")
    background = filling.store.background
    collector = background.collecting.collector  # type: ignore[attr-defined]
    moving, go_on = threading.Event(), threading.Event()

    class Slow:
        active, retire = collector._writer.active, collector._writer.retire

        def move(self, places: Sequence[Place], timeout_s: float) -> Mapping[Place, Place]:
            moving.set()
            go_on.wait(timeout_s)
            return {}

    collector._writer = Slow()
    try:

        def begun() -> bool:
            filling.storage.index.pin(SPACE, filling.write()[0][:1], 600.0)
            collector.hurry()
            return moving.is_set()

        wait_for(begun, "nothing is salvaged")
        runs = background.keeper.stats()["follow"].runs  # type: ignore[attr-defined]
        beats = background.pulse.stats()["heartbeat"].runs  # type: ignore[attr-defined]
        time.sleep(1.5)
        assert background.keeper.stats()["follow"].runs - runs >= 4  # type: ignore[attr-defined]
        assert background.pulse.stats()["heartbeat"].runs > beats  # type: ignore[attr-defined]
    finally:
        go_on.set()
        assert filling.storage.close(10.0)


def test_a_heart_beats_on_while_others_are_followed_slowly_and_what_fails_is_told(tmp_path: Path) -> None:
    filling = Filling(tmp_path, "1", replace(TIGHT, heartbeat_s=0.1))
    background = filling.store.background
    assert isinstance(background, StoreBackground)
    hangs, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        hangs.set()
        go_on.wait(WAIT_S)

    def fails() -> None:
        raise OSError(errno.EIO, "made to fail")

    try:
        background.collector.every(60.0, "made to fail", fails)
        background.keeper.every(60.0, "slow", slow)
        assert hangs.wait(WAIT_S)
        beats = background.pulse.stats()["heartbeat"].runs
        wait_for(lambda: background.pulse.stats()["heartbeat"].runs > beats + 5, "the heart has stopped")
        wait_for(lambda: bool(background.collector.stats()["made to fail"].runs), "the job was not run")
        assert any(note.startswith("made to fail failed: OSError: [Errno 5]") for note in filling.store.notes())
        details = filling.store.details()
        assert (
            int(details["job_failures"]) >= 1
            and details["open_segments"] == 0
            and details["uncounted_directories"] == 0
        )
        assert set(details) - {"refusal"} <= {field.name for field in engine_pb2.StorageStatus.DESCRIPTOR.fields}
    finally:
        go_on.set()
        assert filling.storage.close(10.0)


@pytest.mark.slow
def test_two_nodes_that_collect_and_are_killed_again_and_again_never_read_wrong_bytes(tmp_path: Path) -> None:
    found = ordeal(tmp_path, 6.0)
    assert found["wrong"] == found["died"] == found["lost"] == 0
    assert found["starts"] >= 2 and found["own_OK"] > 50 and found["other_OK"] > 10 and found["evicted"] > 5
    assert {name for name in found if name.startswith(("own_", "other_"))} <= {
        f"{whose}_{reason}" for whose in ("own", "other") for reason in ("OK", "MISS")
    }
