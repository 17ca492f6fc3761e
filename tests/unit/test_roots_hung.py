"""A root that hangs or fails: who is told what and when, and how it comes back."""

from __future__ import annotations

import threading
import time

import pytest
from roots_kit import DEADLINE_S, RECORD, SPACE, WAIT_S, keys, refusing, rig

from kvmoverd.adapters.storage import roots_namespaces, roots_root
from kvmoverd.adapters.storage.roots_root import FAILURES_MAX
from kvmoverd.core.errors import ManifestMismatch, StaleEpoch, StorageUnusable
from kvmoverd.core.status import Reason

A, B, C = keys(3)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_root, "PAUSE_S", 0.1)


def test_an_op_past_its_deadline_fails_with_the_roots_name_and_ends_again_when_the_device_lets_go() -> None:
    with rig("disk") as made:
        made.main.holds = True
        read, began_s = made.read_op(A), time.monotonic()
        (done,) = made.run(read)
        assert DEADLINE_S <= time.monotonic() - began_s < DEADLINE_S + 0.5
        assert (done.reason, done.quiet) == (Reason.IO_ERROR, False)
        assert done.message.startswith("disk has not answered for 0.1 s")
        details = made.details("disk")
        assert (details["quarantined_bytes"], details["late_completions"]) == (RECORD, 1)
        assert int(details["oldest_op_ms"]) >= 80
        made.main.release()
        made.until(lambda: len(made.ends(read)) == 2)
        assert made.ends(read)[1] == (Reason.MISS, True)
        assert made.details("disk")["quarantined_bytes"] == 0


def test_a_late_write_that_lands_is_not_told_twice_as_an_end() -> None:
    with rig("near", "far") as made:
        made.main.holds = True
        write = made.write_op(A)
        made.run(write)
        made.main.release()
        made.until(lambda: len(made.ends(write)) == 2)
        assert made.ends(write) == [(Reason.IO_ERROR, False), (Reason.OK, True)]
        assert made.roots[0].seen == [], "nobody copies what its owner was told has failed"


def test_a_probe_that_hangs_has_one_end_and_no_slot() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(far, A)
        near.holds = True
        probe = made.probe_op(A)
        assert made.run(probe)[0].present == 1
        near.release()
        made.until(lambda: not made.set.roots[0].late)
        assert made.ends(probe) == [(Reason.OK, True)]
        assert made.details("near")["quarantined_bytes"] == 0


def test_a_copy_that_hangs_keeps_the_slot_and_fails_nobody() -> None:
    with rig("near", "far") as made:
        near = made.roots[0]
        near.holds = True
        write = made.write_op(A)
        made.run(write)
        made.until(lambda: made.details("near")["late_completions"] == 1)
        assert made.ends(write) == [(Reason.OK, False)]
        near.release()
        made.until(lambda: len(made.ends(write)) == 2)


def test_failures_in_a_row_open_the_root_and_one_good_op_after_the_pause_closes_it() -> None:
    with rig("disk") as made:
        made.store(made.main, A)
        made.main.fails = lambda op: Reason.IO_ERROR
        for _ in range(FAILURES_MAX):
            assert made.run(made.read_op(A))[0].message == "IO_ERROR in disk"
        asked = len(made.main.seen)
        (done,) = made.run(made.read_op(A))
        assert done.reason is Reason.IO_ERROR and done.quiet
        assert (
            done.message.startswith("disk is left alone for 0.")
            and "it failed 5 times: IO_ERROR in disk" in done.message
        )
        assert made.run(made.write_op(B))[0].reason is Reason.DROPPED
        assert len(made.main.seen) == asked, "the device was left alone"
        details = made.details("disk")
        assert (details["state"], details["dropped_writes"]) == ("open", 1)
        made.main.fails = lambda op: None
        made.live(0.12)
        assert made.run(made.read_op(A))[0].reason is Reason.OK
        assert made.details("disk")["state"] == "ok" and made.details("disk")["why"] == ""


def test_the_log_says_when_a_root_fails_is_left_alone_and_answers_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="kvmoverd.events")
    with rig("disk") as made:
        made.store(made.main, A)
        made.main.fails = lambda op: Reason.IO_ERROR
        for _ in range(2 * FAILURES_MAX):
            made.run(made.read_op(A))
        made.live(0.12)
        assert "one op at a time tries it again: IO_ERROR in disk" in str(made.details("disk")["why"])
        made.main.fails = lambda op: None
        made.run(made.read_op(A))
    said = [(record.levelname, record.getMessage(), record.fields) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [
        ("WARNING", "root_failed", {"root": "disk", "why": "IO_ERROR in disk"}),
        ("WARNING", "root_changed", {"root": "disk", "state": "open", "why": "IO_ERROR in disk"}),
        ("INFO", "root_changed", {"root": "disk", "state": "ok", "why": "it answers again"}),
    ]


@pytest.mark.parametrize("reason", [Reason.MISS, Reason.CORRUPT, Reason.NO_SPACE])
def test_a_miss_damage_and_a_full_disk_open_nothing(reason: Reason) -> None:
    with rig("disk") as made:
        made.main.fails = lambda op: reason
        for _ in range(3 * FAILURES_MAX):
            assert made.run(made.read_op(A))[0].reason is reason
        assert made.details("disk")["state"] == "ok"


def test_a_miss_between_failures_says_nothing_of_the_device_and_a_good_read_does() -> None:
    with rig("disk") as made:
        made.store(made.main, A)
        made.main.fails = lambda op: Reason.IO_ERROR if op.key == B else Reason.MISS if op.key == C else None  # type: ignore[union-attr]
        for _ in range(FAILURES_MAX - 1):
            made.run(made.read_op(B))
            made.run(made.read_op(A))
        assert made.details("disk")["state"] == "ok"
        for _ in range(FAILURES_MAX):
            made.run(made.read_op(B))
            made.run(made.read_op(C))
        assert made.details("disk")["state"] == "open"


def test_only_one_op_tries_a_root_whose_pause_is_over() -> None:
    with rig("disk", deadline_s=1.0) as made:
        made.store(made.main, A)
        made.set.roots[0].trip("the test wants it", made.set._now_s())
        assert made.set.index.known(SPACE, [A]).tolist() == [False]
        made.live(0.12)
        made.main.index.found(SPACE, [A, B, C])
        assert made.set.index.known(SPACE, [bytes(32), A, B, C]).tolist() == [False, True, False, False]
        made.main.holds = True
        trial, other = made.read_op(A), made.read_op(A, 2)
        made.set.submit([trial, other])
        made.until(lambda: made.ends(other) == [(Reason.IO_ERROR, True)])
        assert made.main.seen == [trial]
        made.main.holds = False
        made.main.release()
        made.until(lambda: made.ends(trial) == [(Reason.OK, True)])
        assert made.run(made.read_op(A))[0].reason is Reason.OK


def test_while_a_root_is_open_its_blocks_come_from_the_next_and_look_ups_promise_none_of_them() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(far, A)
        near.index.found(SPACE, [A, B])
        far.index.found(SPACE, [A])
        made.set.roots[0].trip("the test wants it", made.set._now_s())
        assert made.set.index.known(SPACE, [A, B]).tolist() == [True, False]
        assert made.run(made.read_op(A))[0].reason is Reason.OK
        assert near.seen == []
        assert made.run(made.read_op(B))[0].reason is Reason.IO_ERROR, "it may be in the root that is left alone"
        write = made.write_op(C)
        made.set.submit([write])
        made.until(lambda: len(made.ends(write)) == 2)
        assert made.details("near")["dropped_copies"] == 1


def test_half_of_its_places_lost_opens_a_root_and_what_waits_goes_on_at_once() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        wanted = keys(8, salt=2)
        made.store(far, *wanted)
        near.index.found(SPACE, wanted)
        near.holds = True
        reads = [made.read_op(key, slot) for slot, key in enumerate(wanted)]
        made.set.submit(reads)
        began_s = time.monotonic()
        made.until(lambda: all(made.ends(op) for op in reads))
        assert time.monotonic() - began_s < WAIT_S / 2
        ends = [made.ends(op)[0] for op in reads]
        assert ends[4:] == [(Reason.OK, True)] * 4, "they had no place at the device that hangs"
        assert made.details("near")["state"] == "open"
        near.holds = False
        near.release()
        made.until(lambda: not made.set.roots[0].late)


def test_a_root_that_stands_still_with_others_waiting_fails_before_its_deadline() -> None:
    with rig("near", "far", deadline_s=1.0) as made:
        near, far = made.roots
        wanted = keys(5, salt=2)
        made.store(far, *wanted)
        near.index.found(SPACE, wanted)
        near.holds = True
        reads = [made.read_op(key, slot) for slot, key in enumerate(wanted)]
        began_s = time.monotonic()
        made.set.submit(reads)
        made.until(lambda: bool(made.ends(reads[4])))
        assert 0.2 < time.monotonic() - began_s < 0.9
        assert made.ends(reads[4]) == [(Reason.OK, True)]
        assert "all 4 places are taken" in str(made.details("near")["why"])


def test_a_root_that_has_too_much_of_the_pool_is_refused_until_it_comes_back() -> None:
    with rig("disk", pool_slots=10) as made:
        made.store(made.main, A)
        made.main.holds = True
        reads = [made.read_op(A, slot) for slot in range(2)]
        made.run(*reads)
        assert made.details("disk")["state"] == "refused"
        time.sleep(0.25)
        (done,) = made.run(made.read_op(A, 4))
        assert f"disk still has {2 * RECORD} bytes of the pool" in done.message
        made.main.holds = False
        made.main.release()
        made.until(lambda: all(len(made.ends(op)) == 2 for op in reads))
        assert made.run(made.read_op(A))[0].reason is Reason.OK, "what came back well is trusted again"


def test_time_in_which_this_process_stood_still_counts_for_no_op() -> None:
    with rig("disk") as made:
        made.main.holds = True
        read = made.read_op(A)
        made.set.submit([read])
        time.sleep(3 * DEADLINE_S)
        made.done += made.set.poll(8)
        assert made.ends(read) == [], "nobody was there to hear an answer"
        made.main.release()
        made.until(lambda: bool(made.ends(read)))
        assert made.ends(read) == [(Reason.MISS, True)]


def test_a_root_that_hangs_delays_no_other_roots_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_namespaces, "CALL_S", 0.1)
    monkeypatch.setattr(roots_namespaces, "COPIES_S", 0.1)
    let_go = threading.Event()
    with rig("near", "far") as made:
        near, _ = made.roots
        near.calls = lambda: let_go.wait(WAIT_S) and None
        made.set.roots[0].opened.clear()
        made.set.open_namespace(SPACE)
        assert SPACE.fingerprint not in made.set.roots[0].opened
        near.index.found(SPACE, [A])
        assert made.set.index.known(SPACE, [A]).tolist() == [False], "its manifest was not compared"
        for _ in range(5):
            made.set.open_namespace(SPACE)
        let_go.set()
        made.wait(lambda: made.set.roots[0].calls.running == 0)
        let_go.clear()
        assert made.set.purge(SPACE) == (0, 0), "the main root has done it"
        assert SPACE.fingerprint not in made.set.roots[0].opened
        let_go.set()
        made.wait(lambda: made.set.roots[0].calls.running == 0)


def test_what_a_copy_could_not_purge_it_purges_before_it_is_asked_again() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(near, A)
        made.store(far, A)
        near.calls = refusing(StorageUnusable("near can't be written"))
        assert made.set.purge(SPACE)[0] == 1, "what the main root had; the copy is not asked any more"
        assert far.stored(SPACE, A) is None and near.stored(SPACE, A)
        made.set.open_namespace(SPACE)
        assert made.run(made.read_op(A))[0].reason is Reason.MISS
        assert near.seen == []
        near.calls = lambda: None
        made.set.open_namespace(SPACE)
        assert near.stored(SPACE, A) is None
        assert made.set.purge(SPACE) == (0, 0)


def test_what_a_copy_could_not_purge_of_a_tenant_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(near, A)
        made.store(far, A)
        with monkeypatch.context() as patch:
            patch.setattr(near, "purge_tenant", lambda tenant: refusing(StorageUnusable("near can't be written"))())
            patch.setattr(near, "calls", refusing(StorageUnusable("near can't be written")))
            assert made.set.purge_tenant("")[0] == 1
            made.set.open_namespace(SPACE)
        assert made.run(made.read_op(A))[0].reason is Reason.MISS and near.seen == []
        made.set.open_namespace(SPACE)
        assert near.stored(SPACE, A) is None


@pytest.mark.parametrize("error", [ManifestMismatch("layout differs"), StaleEpoch("epoch 1 is below 2")])
def test_another_manifest_or_epoch_is_refused_wherever_it_lies(error: ManifestMismatch | StaleEpoch) -> None:
    with rig("near", "far") as made:
        made.roots[0].calls = refusing(error)
        made.set.doubt(SPACE.fingerprint)
        with pytest.raises(type(error)):
            made.set.open_namespace(SPACE)


def test_the_main_root_must_open_a_namespace() -> None:
    with rig("near", "far") as made:
        made.main.calls = refusing(StorageUnusable("far is read-only"))
        with pytest.raises(StorageUnusable, match="far is read-only"):
            made.set.open_namespace(SPACE)


def test_closing_ends_what_waits_and_is_not_held_up_by_a_root_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig("near", "far", deadline_s=5.0) as made:
        near = made.roots[0]
        let_go = threading.Event()
        closes = near.close
        monkeypatch.setattr(near, "close", lambda timeout_s: let_go.wait(timeout_s) and closes(timeout_s))
        near.holds = True
        near.index.found(SPACE, keys(8))
        reads = [made.read_op(key, slot) for slot, key in enumerate(keys(8))]
        made.set.submit(reads)
        began_s = time.monotonic()
        assert not made.set.close(0.1)
        assert time.monotonic() - began_s < 1.0
        made.until(lambda: bool(made.ends(reads[7])))
        assert [made.ends(op) for op in reads[4:]] == [[(Reason.SHUTTING_DOWN, True)]] * 4
        late = made.read_op(A)
        assert made.run(late)[0].reason is Reason.SHUTTING_DOWN
        let_go.set()


def test_an_op_that_is_begun_before_it_is_known_that_this_process_stood_still_has_its_own_age_and_deadline() -> None:
    now_s = 1000.0
    with rig("disk", clock_s=lambda: now_s) as made:
        made.main.holds = True
        before, after = made.read_op(A), made.read_op(B, 2)
        made.set.submit([before])
        now_s += 100.0
        made.main.release()
        made.set.submit([after])
        made.until(lambda: bool(made.ends(before)))
        made.set._beat()
        assert 0 <= int(made.details("disk")["oldest_op_ms"]) <= 1000 * DEADLINE_S, (
            "status has no words for a negative age"
        )
        for _ in range(5):
            now_s += made.set._timer.beat_s
            made.set._beat()
        assert 5 * made.set._timer.beat_s > DEADLINE_S
        made.until(lambda: bool(made.ends(after)))
        assert made.ends(after) == [(Reason.IO_ERROR, False)]
