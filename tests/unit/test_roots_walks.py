"""Random walks over several roots that hold, fail, hang and come back: every op ends once, and no slot is given twice."""

from __future__ import annotations

import random

import pytest
from markers import slow_only
from roots_kit import Rig, keys

from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageOp

STEPS = 300
KEYS = keys(12)
FAILURES = [Reason.MISS, Reason.CORRUPT, Reason.IO_ERROR, Reason.NO_SPACE, Reason.SHORT_READ]


class Walk:
    """`slots`: which op has each slot, from its submission to its quiet end."""

    def __init__(self, seed: int, names: tuple[str, ...], *, fill: bool) -> None:
        self.fill = fill
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.rig = Rig(*names, deadline_s=1.0, ops_max=3, fill=fill, clock_s=lambda: self.now_s)
        self.slots: dict[int, StorageOp] = {}
        self.ops: dict[int, StorageOp] = {}
        self.seen = 0

    def step(self) -> None:
        getattr(self, self.random.choice(["submit", "submit", "toggle", "fail", "release", "pass_time"]))()
        self.collect()

    def submit(self) -> None:
        free = [slot for slot in range(8) if slot not in self.slots]
        in_hand = sum(len(root.under_way) + len(root.waiting) for root in self.rig.set.roots)
        if not free or in_hand >= self.rig.set.ops_max:
            return
        slot, key = self.random.choice(free), self.random.choice(KEYS)
        kind = self.random.randrange(4)
        if kind == 0:
            op: StorageOp = self.rig.probe_op(*self.random.sample(KEYS, 3))
        else:
            op = self.rig.write_op(key, slot) if kind == 1 else self.rig.read_op(key, slot)
            self.slots[slot] = op
        self.ops[op.op_id] = op
        self.rig.set.submit([op])

    def toggle(self) -> None:
        root = self.random.choice(self.rig.roots)
        root.holds = not root.holds
        if not root.holds:
            root.release()

    def fail(self) -> None:
        reason = self.random.choice([None, None, *FAILURES])
        self.random.choice(self.rig.roots).fails = lambda op: None if isinstance(op, BlockProbe) else reason

    def release(self) -> None:
        self.random.choice(self.rig.roots).release()

    def pass_time(self) -> None:
        for _ in range(self.random.randrange(1, 24)):
            self.now_s += self.rig.set._timer.beat_s
            self.collect()
            self.rig.set._beat()

    def collect(self) -> None:
        while found := self.rig.set.poll(self.random.randrange(1, 9)):
            self.rig.done += found
        for done in self.rig.done[self.seen :]:
            if done.quiet:
                self.slots = {slot: op for slot, op in self.slots.items() if op.op_id != done.op_id}
        self.seen = len(self.rig.done)
        for root in self.rig.set.roots:
            assert len(root.under_way) + len(root.late) <= root.settings.ops_max
            assert root.quarantined_bytes >= 0

    def finish(self) -> None:
        for root in self.rig.roots:
            root.holds, root.fails = False, lambda op: None
        for _ in range(50):
            for root in self.rig.roots:
                root.release()
            self.pass_time()
        for op_id, op in self.ops.items():
            ends = self.rig.ends(op)
            assert [quiet for _, quiet in ends] in ([True], [False, True]), (op_id, op, ends)
            assert not isinstance(op, BlockProbe) or len(ends) == 1
            if ends[0] == (Reason.OK, True) and isinstance(op, BlockWrite):
                assert len(self.rig.roots) == 1 or self.rig.main.stored(op.namespace, op.key)
            if isinstance(op, BlockRead) and ends[0][0] is Reason.OK:
                filled = [[(Reason.OK, False), (Reason.OK, True)]] if self.fill else []
                assert ends in [[(Reason.OK, True)], *filled], "a read that is late has failed"
        assert not self.slots
        books = self.rig.set
        assert not (books.copying or books._routes._asked or books._routes._served or books._ended)
        assert all(root.quarantined_bytes == 0 and not root.late and not root.waiting for root in books.roots)
        assert books.close(1.0)


@pytest.mark.parametrize("names", [("disk",), ("near", "far"), ("near", "nearer", "far")])
@pytest.mark.parametrize("seed", [*range(6), *slow_only(range(6, 20))])
def test_every_op_ends_once_and_every_slot_comes_home(seed: int, names: tuple[str, ...]) -> None:
    walk = Walk(seed, names, fill=bool(seed % 2))
    for _ in range(STEPS):
        walk.step()
    walk.finish()
