"""One root or several behind one port: which is asked, what a failure of one means, and what never waits for another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from node_kit import LAYOUT, NodeKit
from roots_kit import SPACE, keys, rig

from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.ports.storage import BlockRead, BlockWrite

A, B, C = keys(3)


def test_a_single_root_does_what_it_is_asked_and_its_completions_pass_as_they_are() -> None:
    with rig("disk") as made:
        write, read, miss = made.write_op(A), made.read_op(A), made.read_op(B, 2)
        assert [made.run(op)[0].reason for op in (write, read, miss)] == [Reason.OK, Reason.OK, Reason.MISS]
        assert made.payload() == NodeKit.content(A)
        assert made.run(made.probe_op(A, B))[0].present == 1
        assert all(done.quiet for done in made.done) and len(made.done) == 4
        assert made.set.counters is made.main.counters
        assert made.set.facts.root == "disk" and made.set.facts.details["state"] == "ok"


def test_a_read_goes_to_the_first_root_that_knows_the_block() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(far, A, B)
        made.store(near, A)
        for root, known in ((near, [A]), (far, [A, B])):
            root.index.found(SPACE, known)
        assert [done.reason for done in made.run(made.read_op(A), made.read_op(B, 2))] == [Reason.OK, Reason.OK]
        assert [[op.key for op in root.seen if isinstance(op, BlockRead)] for root in made.roots] == [[A], [B]]
        assert made.set.index.known(SPACE, [A, B, C]).tolist() == [True, True, False]


def test_a_block_that_one_root_has_lost_or_damaged_is_read_from_the_next() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(far, A, B)
        made.store(near, B)
        damaged = bytearray(near.stored(SPACE, B) or b"")
        damaged[HEADER_BYTES] ^= 1
        near.tamper(SPACE, B, bytes(damaged))
        near.index.found(SPACE, [A, B])
        for slot, key in enumerate((A, B), 1):
            assert made.run(made.read_op(key, slot))[0].reason is Reason.OK
            assert made.payload(slot) == NodeKit.content(key)
        assert near.index.known(SPACE, [A, B]).tolist() == [False, False], "it is not asked for them again"
        assert far.index.known(SPACE, [A, B]).tolist() == [True, True]
        assert (near.counters.missed_blocks, near.counters.corrupt_blocks, made.set.counters.read_blocks) == (1, 1, 2)


def test_of_all_failures_the_first_that_is_no_miss_is_told() -> None:
    with rig("near", "far") as made:
        near, _ = made.roots
        near.fails = lambda op: Reason.IO_ERROR
        near.index.found(SPACE, [A])
        (done,) = made.run(made.read_op(A))
        assert (done.reason, done.message, done.quiet) == (Reason.IO_ERROR, "IO_ERROR in near", True)
        assert made.run(made.read_op(B))[0].reason is Reason.IO_ERROR, "nobody knows it: all that may have it are asked"
        near.fails = lambda op: None
        assert made.run(made.read_op(C))[0].reason is Reason.MISS


def test_later_ranges_come_from_where_the_first_came_from() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(near, A)
        made.store(far, A)
        far.index.found(SPACE, [A])
        assert made.run(made.read_op(A, layers=(0, 1)))[0].reason is Reason.OK
        near.index.found(SPACE, [A])
        assert [made.run(made.read_op(A, layers=(n, n + 1)))[0].reason for n in (1, 2)] == [Reason.OK, Reason.OK]
        assert [len(root.seen) for root in made.roots] == [0, 3]
        assert made.payload() == NodeKit.content(A)


def test_a_rest_comes_from_the_root_that_gave_the_header_and_is_copied_nowhere() -> None:
    with rig("near", "far", fill=True) as made:
        near, far = made.roots
        made.store(far, A)
        far.index.found(SPACE, [A])
        for layers in ((0, 1), (1, 2), (2, 0)):
            read = replace(made.read_op(A, layers=layers), rest_from=1)
            (done,) = made.run(read)
            assert (done.reason, done.quiet) == (Reason.OK, True), layers
        assert near.seen == [] and len(far.seen) == 3
        begins_at = LAYOUT.layer_offsets[1]
        assert made.payload()[begins_at:] == NodeKit.content(A)[begins_at:]


def test_a_rest_whose_header_one_root_has_lost_comes_from_the_next() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(far, A)
        near.index.found(SPACE, [A])
        for layers in ((0, 1), (1, 0)):
            assert made.run(replace(made.read_op(A, layers=layers), rest_from=1))[0].reason is Reason.OK
        assert [len(root.seen) for root in made.roots] == [1, 2]


def test_a_later_range_that_fails_ends_the_block_there() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(near, A)
        made.store(far, A)
        near.index.found(SPACE, [A])
        made.run(made.read_op(A, layers=(0, 1)))
        near.fails = lambda op: Reason.IO_ERROR
        assert made.run(made.read_op(A, layers=(1, 0)))[0].reason is Reason.IO_ERROR
        assert far.seen == []


def test_a_probe_goes_on_in_the_next_root_behind_what_was_found() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(near, A)
        made.store(far, B)
        near.index.found(SPACE, [C])
        made.store(near, C)
        assert made.run(made.probe_op(A, B, C))[0].present == 3
        assert made.run(made.probe_op(A, bytes(32)))[0].present == 1
        near.fails = lambda op: Reason.IO_ERROR
        assert made.run(made.probe_op(bytes(32)))[0].present == 0
        assert made.run(made.probe_op(B))[0].present == 1


def test_a_look_is_for_the_main_root_alone() -> None:
    with rig("near", "far") as made:
        near, far = made.roots
        made.store(near, A)
        made.store(far, B)
        for root, known in ((near, [A]), (far, [B])):
            root.index.found(SPACE, known)
        near.seen.clear()
        assert made.run(made.look_op(A))[0].present == 0, "a copy does not make it durable"
        assert made.run(made.look_op(B, A))[0].present == 1
        assert near.seen == []
        far.fails = lambda op: Reason.IO_ERROR
        assert made.run(made.look_op(B))[0].reason is Reason.IO_ERROR
        assert not made.set._routes._asked


def test_a_write_is_durable_in_the_main_root_and_its_slot_comes_home_when_it_is_copied() -> None:
    with rig("near", "nearer", "far") as made:
        near, nearer, far = made.roots
        near.holds = True
        write = made.write_op(A)
        (done,) = made.run(write)
        assert (done.reason, done.quiet) == (Reason.OK, False) and done.moved_bytes > 0
        assert far.stored(SPACE, A) and nearer.seen == [], "copies are made one after another"
        near.release()
        made.until(lambda: len(made.ends(write)) == 2)
        assert made.ends(write) == [(Reason.OK, False), (Reason.OK, True)]
        assert near.stored(SPACE, A) and nearer.stored(SPACE, A)
        assert made.details("far")["last_good_write_ms_ago"] != -1


@pytest.mark.parametrize("fails", [True, False])
def test_a_copy_that_fails_is_counted_and_nobodys_error(fails: bool) -> None:
    with rig("near", "far") as made:
        made.roots[0].fails = lambda op: Reason.NO_SPACE if fails else None
        write = made.write_op(A)
        made.set.submit([write])
        made.until(lambda: len(made.ends(write)) == 2)
        assert made.ends(write) == [(Reason.OK, False), (Reason.OK, True)]
        assert made.details("near")["dropped_copies"] == int(fails)


def test_a_write_that_fails_in_the_main_root_is_copied_nowhere() -> None:
    with rig("near", "far") as made:
        made.main.fails = lambda op: Reason.NO_SPACE
        write = made.write_op(A)
        made.run(write)
        assert made.ends(write) == [(Reason.NO_SPACE, True)]
        assert made.roots[0].seen == []


def test_a_root_never_has_more_than_its_places_and_the_rest_waits_in_order() -> None:
    with rig("near", "far", ops_max=4, deadline_s=5.0) as made:
        made.main.holds = True
        ops = [made.write_op(key, slot) for slot, key in enumerate(keys(8))]
        made.set.submit(ops)
        assert made.main.seen == ops[:4]
        made.main.holds = False
        made.main.release()
        made.until(lambda: all(len(made.ends(op)) == 2 for op in ops))
        assert made.main.seen == ops
        with pytest.raises(AssertionError, match="9 storage ops are under way, at most 8 may be"):
            made.set.submit([made.probe_op(A)] * 9)


def test_a_hint_lets_a_root_be_asked_that_knows_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig("near", "far") as made:
        far = made.main
        for root in made.roots:
            monkeypatch.setattr(root.index, "complete", True, raising=False)
        made.store(far, A)
        assert made.run(made.read_op(A))[0].reason is Reason.MISS
        assert [len(root.seen) for root in made.roots] == [1, 0], "one says so, without a look"
        hinted = made.read_op(A)
        hinted.place = Place("there.1", 1, 0)
        assert made.run(hinted)[0].reason is Reason.OK
        assert [len(root.seen) for root in made.roots] == [2, 1]


def test_places_that_others_are_told_are_those_of_the_main_root() -> None:
    with rig("near", "far") as made:
        assert made.set.index.places(SPACE, [A]) == [None]
        assert made.set.signature() == ("", 0)
        assert made.set.ops_max == 8 and LAYOUT.layer_count == 3


def test_writes_go_to_the_main_root_only_whatever_order_the_roots_have() -> None:
    with rig("near", "far") as made:
        made.run(*(made.write_op(key, slot) for slot, key in enumerate(keys(3))))
        made.until(lambda: not made.set.copying)
        first = [op.op_id for op in made.main.seen]
        assert [op.op_id for op in made.roots[0].seen if isinstance(op, BlockWrite)] == first
