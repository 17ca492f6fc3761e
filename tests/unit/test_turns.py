"""How long a third node may take for layers that are granted, on a clock that the tests turn."""

from __future__ import annotations

from stream_kind import split

from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.node.turns import Turns

TOLD = "start; reserved pe=0-2 h1=2-4 de=4-6; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 2 -"
HELPER = 2
STALL_MS = 1_000


class Clock:
    """Looks every quarter of a stall, in milliseconds."""

    def __init__(self, *, layers: int = 8, ring_sets: int = 0, reads_ms: int = 0) -> None:
        self.bench = split(layers=layers, ring_sets=ring_sets)
        self.bench.run(TOLD)
        self.reads_ms = reads_ms
        self.turns = Turns(self.bench.machine, stall_ns=STALL_MS * 1_000_000, reads_ns=self._reads_ns)
        self.now_ms = 0
        self.buffer_is_open = True
        assert not self.look(), "it has only just begun"

    def _reads_ns(self, known: StreamPart) -> int:
        return self.reads_ms * 1_000_000

    def look(self) -> list[int]:
        return self.turns.stalled(self.now_ms * 1_000_000, buffer_is_open=self.buffer_is_open)

    def passes(self, ms: int) -> list[int]:
        """Parts that are told to stand still within that time."""
        stalled: list[int] = []
        for _ in range(ms // (STALL_MS // 4)):
            self.now_ms += STALL_MS // 4
            stalled += [part for part in self.look() if part not in stalled]
        return stalled

    def layer(self, layer: int, *parts: int) -> None:
        for part in parts or (1, HELPER, 3):
            self.bench.run(f"part_layer {part} {layer}")


def test_nothing_for_as_long_as_a_stall_is_too_long_and_every_layer_begins_it_anew() -> None:
    clock = Clock()
    clock.layer(0, HELPER)
    assert clock.passes(250) == []
    clock.layer(1, HELPER)
    assert clock.passes(1_000) == []
    assert clock.passes(250) == [HELPER]
    assert Clock().passes(1_000) == [HELPER]


def test_a_layer_that_overtakes_is_progress_too() -> None:
    clock = Clock()
    clock.passes(750)
    clock.layer(3, HELPER)
    assert clock.passes(750) == []


def test_who_needed_long_for_each_layer_may_need_as_long_for_the_next() -> None:
    clock = Clock(reads_ms=10_000)
    clock.passes(3_000)
    clock.layer(0, HELPER)
    clock.passes(250)
    clock.reads_ms = 0
    assert clock.passes(12_750) == []
    assert clock.passes(1_000) == [HELPER]


def test_reads_that_wait_behind_those_of_others_do_not_stand_still() -> None:
    clock = Clock(reads_ms=2_000)
    assert clock.passes(4_750) == []
    assert clock.passes(500) == [HELPER]


def test_who_waits_for_grants_owes_nothing_and_has_its_time_from_the_next_grant_on() -> None:
    clock = Clock(ring_sets=1)
    clock.layer(0)
    assert clock.passes(10_000) == []
    clock.bench.run("computed 1; pushed 1")
    assert clock.passes(1_000) == []
    assert clock.passes(500) == [HELPER]


def test_one_that_ended_has_nothing_more_to_read_and_a_stall_for_what_is_on_its_way() -> None:
    clock = Clock(reads_ms=60_000)
    clock.passes(750)
    clock.bench.run(f"part_ended {HELPER}")
    assert clock.passes(1_000) == []
    assert clock.passes(250) == [HELPER]


def test_the_decode_nodes_buffer_may_take_twice_as_long_as_the_pages_once_it_is_open() -> None:
    clock = Clock(layers=4)
    clock.buffer_is_open = False
    for layer in range(4):
        clock.passes(750)
        clock.layer(layer)
    assert clock.passes(20_000) == [], "nobody has told it where to"
    clock.buffer_is_open = True
    assert clock.passes(5_000) == []
    assert clock.passes(2_000) == [HELPER]


def test_without_third_nodes_that_count_there_is_nothing_to_look_at() -> None:
    clock = Clock()
    assert not clock.turns.are_over
    clock.bench.run(f"part_stalled {HELPER}")
    assert clock.turns.are_over and clock.passes(5_000) == []
