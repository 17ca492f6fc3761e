"""Blocks that are read from the main root are copied into a copy that is read before it, and cost nobody anything."""

from __future__ import annotations

import pytest
from node_kit import NodeKit
from roots_kit import SPACE, keys, rig

from kvmoverd.adapters.storage import roots_copies
from kvmoverd.adapters.storage.roots_copies import FILLS_MAX
from kvmoverd.core.keys import ROOT
from kvmoverd.core.record import decode
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, BlockWrite

A, B = keys(2)


def test_a_whole_block_that_is_read_from_the_main_root_is_copied_and_then_read_from_the_copy() -> None:
    with rig("near", "far", fill=True) as made:
        near, far = made.roots
        made.store(far, A)
        far.index.found(SPACE, [A])
        read = made.read_op(A)
        made.set.submit([read])
        made.until(lambda: len(made.ends(read)) == 2)
        assert made.ends(read) == [(Reason.OK, False), (Reason.OK, True)], "the slot comes home with the copy"
        stored = near.stored(SPACE, A)
        assert stored is not None and (decode(stored).parent, decode(stored).depth) == (ROOT, 0)
        assert made.payload() == NodeKit.content(A)
        assert made.details("near")["filled_blocks"] == 1
        assert made.run(made.read_op(A, 2))[0].quiet and made.payload(2) == NodeKit.content(A)
        assert [type(op) for op in near.seen] == [BlockWrite, BlockRead] and len(far.seen) == 1


def test_a_block_that_is_read_in_ranges_is_copied_with_its_last() -> None:
    with rig("near", "far", fill=True) as made:
        near, far = made.roots
        made.store(far, A)
        far.index.found(SPACE, [A])
        for layers in ((0, 1), (1, 2)):
            assert made.run(made.read_op(A, layers=layers))[0].quiet
            assert near.seen == []
        last = made.read_op(A, layers=(2, 0))
        made.set.submit([last])
        made.until(lambda: len(made.ends(last)) == 2)
        assert near.stored(SPACE, A) is not None and made.run(made.read_op(A, 2))[0].reason is Reason.OK
        assert made.payload(2) == NodeKit.content(A) and type(near.seen[-1]) is BlockRead


@pytest.mark.parametrize("why", ["off", "low", "layers", "behind", "copy is open"])
def test_nothing_is_copied_where_nobody_wants_it(why: str) -> None:
    with rig("near", "far", fill=why != "off") as made:
        near, far = made.roots
        made.store(far, A)
        far.index.found(SPACE, [A])
        read = made.read_op(A, layers=(0, 2) if why == "layers" else (0, 0))
        read.low = why == "low"
        if why == "behind":
            made.set.copying._filled.clear()
        if why == "copy is open":
            made.set.roots[0].trip("the test wants it", made.set._now_s())
        made.run(read)
        if why == "layers":
            rest = made.read_op(A, layers=(2, 0))
            rest.low = True
            made.run(rest)
        assert made.ends(read) == [(Reason.OK, True)] and near.seen == []


def test_a_copy_behind_the_main_root_is_not_filled_as_nobody_would_read_it() -> None:
    with rig("far", fill=True) as made:
        assert not made.set.copying.fills


def test_of_many_reads_at_once_a_few_are_copied_and_the_others_counted() -> None:
    with rig("near", "far", fill=True, ops_max=32, deadline_s=5.0) as made:
        near, far = made.roots
        made.main.holds = near.holds = True
        wanted = keys(8, salt=3)
        made.store(far, *wanted)
        far.index.found(SPACE, wanted)
        reads = [made.read_op(key, slot) for slot, key in enumerate(wanted)]
        made.set.copying._fills = FILLS_MAX - 2
        made.set.submit(reads)
        far.release()
        made.until(lambda: all(made.ends(op) for op in reads))
        assert sum(not made.ends(op)[0][1] for op in reads) == 2
        assert made.details("near")["skipped_fills"] == 6
        made.set.copying._fills -= FILLS_MAX - 2
        near.release()
        made.until(lambda: not made.set.copying)


def test_of_many_writes_at_once_so_many_are_copied_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots_copies, "COPIES_MAX", 3)
    with rig("near", "far", ops_max=32, deadline_s=5.0) as made:
        near = made.roots[0]
        near.holds = True
        writes = [made.write_op(key, slot) for slot, key in enumerate(keys(8, salt=4))]
        assert {done.reason for done in made.run(*writes)} == {Reason.OK}
        assert len(made.set.copying) == 3 and made.details("near")["dropped_copies"] == 5
        assert [made.ends(op) for op in writes].count([(Reason.OK, True)]) == 5, "their slots come home at once"
        near.release()
        made.until(lambda: not made.set.copying)
        assert sum(near.stored(SPACE, op.key) is not None for op in writes) == 3


def test_a_copy_that_fails_or_hangs_fails_no_read_and_keeps_the_slot() -> None:
    with rig("near", "far", fill=True) as made:
        near, far = made.roots
        made.store(far, A, B)
        far.index.found(SPACE, [A, B])
        near.fails = lambda op: Reason.NO_SPACE
        read = made.read_op(A)
        made.set.submit([read])
        made.until(lambda: len(made.ends(read)) == 2)
        assert made.ends(read) == [(Reason.OK, False), (Reason.OK, True)]
        assert made.details("near")["dropped_copies"] == 1 and made.details("near")["filled_blocks"] == 0
        near.fails, near.holds = lambda op: None, True
        late = made.read_op(B, 2)
        made.run(late)
        made.until(lambda: made.details("near")["late_completions"] == 1)
        assert made.ends(late) == [(Reason.OK, False)] and int(made.details("near")["quarantined_bytes"]) > 0
        near.release()
        made.until(lambda: len(made.ends(late)) == 2)
