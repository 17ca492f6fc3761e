"""A throttled root: reads at its rate, in their order, and nothing else held up. The clock is the test's."""

from __future__ import annotations

import random
import select
from collections.abc import Iterator

import pytest

from kvmoverd.adapters.storage.null import NullStorage
from kvmoverd.adapters.storage.throttled import CATCH_UP_S, ThrottledStorage
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageOp

LAYOUT = Layout(block_tokens=64, layers=((1 << 18,),) * 4)
MANIFEST = Manifest(
    model_id="model", weights_digest=b"w" * 32, tokenizer_digest=b"t" * 32, layout=LAYOUT, dtype="fp8", epoch=0
)
SPACE = Namespace(MANIFEST)
RECORD_BYTES = LAYOUT.record_bytes
RECORD_S = 0.01
RATE = round(RECORD_BYTES / RECORD_S)


class Pipe:
    """A throttled storage that does nothing, on a clock that only the test moves, and which of its ops ended when."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.storage = ThrottledStorage(NullStorage("null"), RATE, clock_s=lambda: self.now_s)
        self.ended: list[tuple[int, float]] = []

    def submit(self, *ops: StorageOp) -> None:
        self.storage.submit(ops)
        self._look()

    def pass_time(self, seconds: float, step_s: float = 0.001) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s = min(until_s, self.now_s + step_s)
            self._look()

    def ids(self) -> list[int]:
        return [op_id for op_id, _ in self.ended]

    def _look(self) -> None:
        self.ended += [(done.op_id, self.now_s) for done in self.storage.poll(1000) if done.reason is Reason.OK]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    assert pipe.storage.close(1.0)


def read(op_id: int, first_layer: int = 0, stop_layer: int = 0) -> BlockRead:
    return BlockRead(op_id, SPACE, op_id.to_bytes(32, "big"), 0, first_layer, stop_layer)


def test_a_read_takes_the_time_of_its_bytes_and_the_next_one_begins_when_it_is_over(pipe: Pipe) -> None:
    pipe.submit(*map(read, range(1, 6)))
    pipe.pass_time(0.06)
    took_s = [at_s - 1000.0 for _, at_s in pipe.ended]
    assert pipe.ids() == [1, 2, 3, 4, 5]
    assert took_s == pytest.approx([n * RECORD_S for n in range(1, 6)], abs=0.0011)


def test_a_range_costs_its_own_bytes_and_goes_in_its_turn(pipe: Pipe) -> None:
    pipe.submit(read(1), read(2, 0, 1), read(3), read(4, 1, 2))
    pipe.pass_time(RECORD_S + 0.001)
    assert pipe.ids() == [1]
    pipe.pass_time(RECORD_S / 4 + 0.001)
    assert pipe.ids() == [1, 2]
    pipe.pass_time(1.5 * RECORD_S)
    assert pipe.ids() == [1, 2, 3, 4]


def test_a_pipe_that_was_idle_has_saved_nothing_up(pipe: Pipe) -> None:
    pipe.pass_time(10.0, step_s=1.0)
    pipe.submit(read(1), read(2))
    assert pipe.ids() == []
    pipe.pass_time(RECORD_S * 1.5)
    assert pipe.ids() == [1]


def test_who_comes_late_catches_up_a_little_and_no_more(pipe: Pipe) -> None:
    pipe.submit(*map(read, range(1, 101)))
    pipe.pass_time(0.5, step_s=0.5)
    at_once = 1 + int(CATCH_UP_S / RECORD_S)
    assert len(pipe.ended) == at_once
    pipe.pass_time(0.105)
    assert len(pipe.ended) == at_once + 10


def test_lateness_within_the_catching_up_costs_nothing(pipe: Pipe) -> None:
    pipe.submit(*map(read, range(1, 101)))
    pipe.pass_time(1.0, step_s=CATCH_UP_S)
    assert len(pipe.ended) == 100


def test_probes_and_writes_pass_the_reads_that_wait(pipe: Pipe) -> None:
    pipe.submit(read(1), read(2))
    pipe.submit(BlockWrite(3, SPACE, b"k" * 32, ROOT, 0, 0), BlockProbe(4, SPACE, (b"k" * 32,)))
    assert pipe.ids() == [3, 4]
    assert pipe.storage.counters.queued_bytes == 2 * RECORD_BYTES


def test_closing_ends_what_waits_at_once_and_takes_nothing_more(pipe: Pipe) -> None:
    pipe.submit(read(1), read(2))
    assert pipe.storage.close(1.0)
    assert [(done.op_id, done.reason) for done in pipe.storage.poll(10)] == [
        (1, Reason.SHUTTING_DOWN),
        (2, Reason.SHUTTING_DOWN),
    ]
    pipe.submit(read(3))
    assert pipe.ids() == [] and pipe.storage.fileno() == -1


def test_a_loop_sleeps_until_a_read_is_due() -> None:
    """On the real clock: the descriptor is silent while nothing is due, and wakes the loop when something is."""
    storage = ThrottledStorage(NullStorage("null"), RATE)
    storage.submit([read(1), read(2)])
    looks = ended = 0
    while ended < 2:
        readable, _, _ = select.select([storage.fileno()], [], [], 5.0)
        assert readable, "nothing came within 5 s"
        ended += len(storage.poll(64))
        looks += 1
    assert looks <= 6
    assert not select.select([storage.fileno()], [], [], 0)[0]
    assert storage.close(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_in_no_stretch_of_time_more_passes_than_the_rate_and_a_burst(seed: int) -> None:
    chance, pipe = random.Random(seed), Pipe()
    sizes = dict[int, int]()
    for op_id in range(1, 200):
        first, stop = sorted(chance.sample(range(5), 2))
        op = read(op_id, first, stop % 4)
        sizes[op_id] = len(op.span)
        pipe.submit(op)
        if chance.random() < 0.3:
            pipe.pass_time(chance.random() * 0.05, step_s=chance.choice((0.001, 0.01, 0.05)))
    pipe.pass_time(5.0)
    assert pipe.ids() == sorted(sizes)
    for begin in range(len(pipe.ended)):
        moved_bytes = 0
        for op_id, at_s in pipe.ended[begin:]:
            moved_bytes += sizes[op_id]
            stretch_s = at_s - pipe.ended[begin][1]
            assert moved_bytes <= RATE * (stretch_s + CATCH_UP_S + 1e-6) + sizes[pipe.ended[begin][0]]
    assert pipe.storage.close(1.0)
