"""Work stealing between the readers of one request: what moves, when, and that it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kvmoverd.core.balance import ASK_AGAIN_NS, Going, Move, Pace, choose_move
from kvmoverd.core.remains import Remains
from kvmoverd.core.shares import Depth
from kvmoverd.core.split import Reader

MS = 1_000_000
BLOCK = 1_000_000
RATE = 1_000_000_000
"""A block a millisecond."""
FLOOR_S = 0.002
WINDOW_BLOCKS = 8
"""What a simulated reader has begun before it is read."""


def going(part: int, node: str, blocks: int, begun: int = 0, read: int = 0, age_ms: int = 0, **more: object) -> Going:
    found = Going(part, node, blocks, begun, read * BLOCK, -age_ms * MS, False, True, True, Depth(0, RATE))
    return replace(found, **more)  # type: ignore[arg-type]


def move(*parts: Going, idle: tuple[Reader, ...] = (), floor_s: float = FLOOR_S, **more: dict[str, int]) -> Move | None:
    return choose_move(parts, idle=idle, block_bytes=BLOCK, now_ns=0, floor_s=floor_s, **more)


def idle(node: str, queue_blocks: int = 0, *, starved: bool = False) -> Reader:
    return Reader(node, Depth(queue_blocks * BLOCK, RATE), starved=starved)


def test_who_is_done_takes_half_of_what_is_left() -> None:
    found = move(going(1, "p", 50, 50, 50, 50, done=True), going(2, "d", 150, 58, 50, 50))
    assert found == Move(2, 100, "p", "late")


def test_two_that_end_together_are_left_alone() -> None:
    assert move(going(1, "p", 100, 58, 50, 50), going(2, "d", 104, 58, 50, 50)) is None


def test_a_node_without_a_part_takes_its_share_after_what_it_has_to_do() -> None:
    assert move(going(1, "d", 100, 8, 0, 0), idle=(idle("h", 20),)) == Move(1, 60, "h", "late")
    assert move(going(1, "d", 100, 8, 0, 0), idle=(idle("h", 99),)) is None


def test_of_several_takers_the_one_with_which_most_is_gained() -> None:
    found = move(going(1, "d", 100, 8, 0, 0), idle=(idle("g", 60), idle("h", 10), idle("i", 30)))
    assert found is not None and found.to_node == "h"


def test_what_was_begun_stays() -> None:
    assert move(going(1, "d", 100, 92, 10, 10), idle=(idle("h"),)) is None, "8 ms of 90 are too little to be moved"
    assert move(going(1, "d", 100, 70, 10, 10), idle=(idle("h"),)) == Move(1, 70, "h", "late")
    assert move(going(1, "d", 100, 100, 10, 10), idle=(idle("h"),)) is None


def test_nothing_moves_for_less_than_the_floor_the_age_of_news_or_a_tenth_of_what_is_left() -> None:
    assert move(going(1, "d", 40), idle=(idle("h"),)) is None, "20 ms are not known of other nodes"
    assert move(going(1, "d", 42), idle=(idle("h"),)) == Move(1, 21, "h", "late")
    assert move(going(1, "d", 42), idle=(idle("h"),), floor_s=0.025) is None
    assert move(going(1, "p", 1000), going(2, "d", 1100)) is None


def test_who_may_not_be_asked_or_take_is_left_alone() -> None:
    late, done = going(1, "d", 150, 58, 50, 50), going(2, "p", 50, 50, 50, 50, done=True)
    assert move(replace(late, may_give=False), done) is None
    assert move(late, replace(done, may_take=False)) is None
    assert move(late) is None


def test_a_reader_whose_lane_starves_gives_all_that_it_has_not_begun() -> None:
    found = move(going(1, "d", 100, 30, 25, 50, starved=True), going(2, "p", 100, 58, 50, 50))
    assert found == Move(1, 30, "p", "starved")
    assert move(going(1, "d", 100, 58, 50, 50), idle=(idle("h", starved=True),)) is None


def test_where_all_lanes_starve_they_are_equal_again() -> None:
    late = going(1, "d", 150, 58, 50, 50, starved=True), going(2, "p", 50, 50, 50, 50, starved=True, done=True)
    assert move(*late) == Move(1, 100, "p", "late")


def test_a_reader_that_stands_still_gives_all_that_it_has_not_begun_and_takes_nothing() -> None:
    still = Pace(-400 * MS)
    still.heard(20 * BLOCK, -300 * MS)
    stuck = going(1, "d", 100, 28, 20, 400, pace=still)
    assert move(stuck, going(2, "p", 500, 408, 400, 400)) == Move(1, 28, "p", "stopped")
    assert move(going(2, "p", 900, 408, 400, 400), replace(stuck, may_give=False)) is None


def test_who_waits_for_his_turn_does_not_stand_still() -> None:
    waiting = going(1, "d", 100, 8, 0, 150, depth=Depth(200 * BLOCK, RATE))
    found = move(waiting, going(2, "p", 300, 158, 150, 150))
    assert found is None, "50 ms to wait and 100 to read, as the other"


def test_a_part_that_waits_for_others_on_its_nic_is_neither_late_nor_stopped() -> None:
    """Both have read nothing for 400 ms; the one's storage NIC reads for other requests, the other's reads nothing at all."""
    other = going(2, "p", 500, 408, 400, 400)
    still = Pace(-900 * MS)
    still.heard(20 * BLOCK, -400 * MS)
    stuck = going(1, "d", 100, 28, 20, 900, pace=still)
    assert move(replace(stuck, nic=Depth(3000 * BLOCK, RATE)), other) is None
    assert move(replace(stuck, nic=Depth(3000 * BLOCK, RATE, 390 * MS)), other) == Move(1, 28, "p", "stopped")
    still.heard(21 * BLOCK, -300 * MS)
    found = choose_move(
        [replace(stuck, nic=Depth(3000 * BLOCK, RATE)), other],
        idle=(),
        block_bytes=BLOCK,
        now_ns=2000 * MS,
        floor_s=0.0,
    )
    assert found == Move(1, 28, "p", "stopped"), "nobody waits for his turn for ever"


def test_who_takes_reads_it_after_all_that_its_nic_has_to_read_for_others() -> None:
    late, done = going(1, "d", 150, 58, 50, 50), going(2, "p", 50, 50, 50, 50, done=True)
    assert move(late, done) == Move(1, 100, "p", "late")
    assert move(late, replace(done, nic=Depth(40 * BLOCK, RATE))) == Move(1, 120, "p", "late")
    assert move(late, replace(done, nic=Depth(90 * BLOCK, RATE))) is None
    assert move(late, replace(done, nic=Depth(20 * BLOCK, RATE, 300 * MS))) is None, "nothing comes from it"
    assert move(late, idle=(Reader("h", Depth(20 * BLOCK, RATE, 300 * MS)),)) is None


def test_a_few_milliseconds_of_reading_are_no_rate() -> None:
    """One block more or less in the first 20 ms: of a window of 100 ms the rest is what was known before."""
    first, second = Pace(-30 * MS), Pace(-30 * MS)
    for pace, ends in ((first, (-25, -20, -15, -10, -5)), (second, (-20, -12, -3))):
        for count, at_ms in enumerate(ends, 1):
            pace.heard(5 * count * BLOCK, at_ms * MS)
    assert move(going(1, "p", 500, 40, 25, 30, pace=first), going(2, "d", 500, 30, 15, 30, pace=second)) is None


def test_nothing_moves_while_another_reader_would_keep_the_request_waiting_all_the_same() -> None:
    bound = going(1, "h", 400, 400, 50, 50)
    assert move(bound, going(2, "d", 200, 58, 50, 50), idle=(idle("p"),)) is None
    found = move(going(1, "h", 240, 240, 50, 50), going(2, "d", 450, 58, 50, 50), idle=(idle("p"),))
    assert found is not None and found.part == 2


def test_parts_of_one_node_share_its_storage_nic() -> None:
    """The thief has a part of its own to read before the one it took: it does not look idle."""
    first, second = going(1, "p", 200, 108, 100, 100), going(3, "p", 100, 0, 0, 10)
    assert move(first, second, going(2, "d", 300, 108, 100, 100)) is None
    assert move(first, going(2, "d", 300, 108, 100, 100)) == Move(2, 250, "p", "late")


def test_rates_are_those_of_late() -> None:
    pace = Pace(0)
    for ms in range(1, 501):
        pace.heard(ms * BLOCK, ms * MS)
    assert pace.read_by(500 * MS) == 500 * BLOCK == pace.read_by(900 * MS)
    assert pace.read_by(450 * MS) == pytest.approx(450 * BLOCK, rel=0.01)
    for ms in range(510, 801, 10):
        pace.heard(500 * BLOCK + (ms - 500) * BLOCK // 10, ms * MS)
    assert pace.read_by(800 * MS) - pace.read_by(700 * MS) == pytest.approx(10 * BLOCK, rel=0.1)


def test_what_was_read_between_two_marks_was_read_evenly() -> None:
    pace = Pace(0)
    pace.heard(BLOCK, 300 * MS)
    assert [pace.read_by(ms * MS) for ms in (0, 75, 150, 300, 400)] == [0, BLOCK / 4, BLOCK / 2, BLOCK, BLOCK]
    pace.heard(BLOCK, 900 * MS)
    assert pace.heard_ns == 300 * MS, "no more than before is no progress"


def sends(part: int, node: str, left: int, *gifts: tuple[int, int], read: int = 100, **more: object) -> Going:
    """A part of 100 blocks that sends, and has read a megabyte a millisecond; megabytes."""
    found = Remains(left * BLOCK, tuple((blocks, size * BLOCK) for blocks, size in gifts))
    return going(part, node, 100, 100, read, read, remains=found, **more)


def test_the_rest_of_a_part_goes_by_what_its_blocks_have_left_to_read() -> None:
    done = going(2, "p", 50, 50, 50, 50, done=True)
    assert move(sends(1, "d", 300, (100, 3)), done) == Move(1, 50, "p", "late")
    assert move(sends(1, "d", 300, (40, 4), (100, 2)), done) == Move(1, 63, "p", "late"), "37 of 4 MB are 148"
    assert move(sends(1, "d", 300, (30, 4), (100, 2)), done) == Move(1, 25, "p", "late"), "75 of 2 MB, and not 30 of 4"
    assert move(sends(1, "d", 300), done) is None


def test_a_rest_is_given_once_so_it_has_to_gain_more() -> None:
    assert move(sends(1, "p", 190, (100, 1)), sends(2, "d", 250, (100, 2))) is None
    assert move(sends(1, "p", 100, (100, 1)), sends(2, "d", 250, (100, 2))) == Move(2, 63, "p", "late")
    assert move(sends(1, "d", 38, (38, 1)), idle=(idle("h"),)) is None, "20 ms are not known of other nodes"


def test_a_part_that_sends_and_stands_still_is_asked_for_all_that_it_can_give() -> None:
    """How far its device is, it knows better than those who ask."""
    still = Pace(-400 * MS)
    still.heard(100 * BLOCK, -300 * MS)
    stuck = replace(sends(1, "d", 300, (60, 4), (100, 2)), pace=still)
    assert move(stuck, sends(2, "p", 100)) == Move(1, 0, "p", "stopped")
    assert move(stuck, sends(2, "p", 100), room_blocks={"p": 30}) == Move(1, 70, "p", "stopped")
    assert move(replace(stuck, starved=True), sends(2, "p", 100)) == Move(1, 0, "p", "starved")


def test_nobody_takes_more_than_he_has_room_for() -> None:
    late, done = sends(1, "d", 300, (100, 3)), going(2, "p", 50, 50, 50, 50, done=True)
    assert move(late, done, room_blocks={"p": 0}) is None
    assert move(late, done, room_blocks={"p": 20}) is None, "60 of 300 ms"
    assert move(late, done, room_blocks={"p": 21}) == Move(1, 79, "p", "late")
    assert move(late, done, idle=(idle("h"),), room_blocks={"p": 10, "h": 50}) == Move(1, 50, "h", "late")


def test_who_has_no_rest_to_give_keeps_the_others_from_moving_in_vain() -> None:
    assert move(sends(1, "h", 400), sends(2, "d", 300, (100, 3)), idle=(idle("p"),)) is None
    assert move(sends(1, "h", 100), sends(2, "d", 300, (100, 3)), idle=(idle("p"),)) == Move(2, 50, "p", "late")


def test_an_empty_request_moves_nothing() -> None:
    assert move() is None and move(idle=(idle("h"),)) is None
    assert choose_move([going(1, "d", 9)], idle=[idle("h")], block_bytes=0, now_ns=0, floor_s=0.0) is None


@dataclass
class Part:
    """Of the simulation: blocks read in order, `WINDOW_BLOCKS` of them begun ahead."""

    number: int
    node: str
    blocks: int
    since_ns: int
    read: float = 0.0
    asked_ns: int | None = None
    pace: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(self.since_ns)

    @property
    def begun(self) -> int:
        return min(self.blocks, int(self.read) + WINDOW_BLOCKS)


class Request:
    """Readers with rates over time (blocks per ms), balanced every 10 ms with progress that is up to 20 ms old."""

    def __init__(
        self, shares: dict[str, int], rates: dict[str, Callable[[int], float]], seed_idle: tuple[str, ...] = ()
    ) -> None:
        self.rates = rates
        self.parts = [Part(number, node, blocks, 0) for number, (node, blocks) in enumerate(shares.items())]
        self.idle = seed_idle
        self.moves: list[Move] = []
        self.ms = 0

    def run(self, *, balanced: bool = True, until_ms: int = 20_000) -> int:
        """Milliseconds until all blocks are read."""
        while any(part.read < part.blocks for part in self.parts):
            assert self.ms < until_ms, f"not over after {until_ms} ms: {self.parts}"
            self.ms += 1
            self._read()
            if self.ms % 20 == 0:
                for part in self.parts:
                    part.pace.heard(int(part.read) * BLOCK, self.ms * MS)
            if balanced and self.ms % 10 == 0:
                self._balance()
        return self.ms

    def _read(self) -> None:
        """A node reads its parts one after the other."""
        for node, rate in self.rates.items():
            budget = rate(self.ms)
            for part in self.parts:
                if part.node == node and part.read < part.blocks:
                    taken = min(budget, part.blocks - part.read)
                    part.read, budget = part.read + taken, budget - taken

    def _balance(self) -> None:
        now_ns = self.ms * MS
        busy = {part.node for part in self.parts}
        found = choose_move(
            [
                Going(
                    part.number,
                    part.node,
                    part.blocks,
                    part.begun,
                    part.pace.read_bytes,
                    part.since_ns,
                    False,
                    part.asked_ns is None or now_ns - part.asked_ns >= ASK_AGAIN_NS,
                    True,
                    Depth(0, RATE),
                    pace=part.pace,
                    done=part.read >= part.blocks,
                )
                for part in self.parts
            ],
            idle=[Reader(node, Depth(0, RATE)) for node in self.idle if node not in busy],
            block_bytes=BLOCK,
            now_ns=now_ns,
            floor_s=FLOOR_S,
        )
        if found is None:
            return
        self.moves.append(found)
        giver = self.parts[found.part]
        assert giver.begun <= found.kept_blocks < giver.blocks and found.to_node != giver.node
        self.parts.append(Part(len(self.parts), found.to_node, giver.blocks - found.kept_blocks, now_ns))
        giver.blocks, giver.asked_ns = found.kept_blocks, now_ns


def steady(rate: float) -> Callable[[int], float]:
    return lambda ms: rate


def falls(at_ms: int, to: float) -> Callable[[int], float]:
    return lambda ms: 1.0 if ms < at_ms else to


def test_equal_readers_with_a_wrong_split_end_nearly_together() -> None:
    request = Request({"p": 100, "d": 900}, {"p": steady(1), "d": steady(1)})
    took = request.run()
    assert took <= 500 * 1.02 and len(request.moves) == 1


def test_equal_readers_with_the_right_split_are_left_alone() -> None:
    request = Request({"p": 500, "d": 500}, {"p": steady(1), "d": steady(1)})
    assert request.run() == 500 and not request.moves


@pytest.mark.parametrize("at_ms", [0, 50, 100, 300])
def test_a_reader_that_slows_to_a_tenth_gives_what_the_other_reads_sooner(at_ms: int) -> None:
    request = Request({"p": 500, "d": 500}, {"p": steady(1), "d": falls(at_ms, 0.1)})
    took, ideal = request.run(), at_ms + (1000 - 2 * at_ms) / 1.1
    assert took <= ideal * 1.1 and len(request.moves) <= 8


@pytest.mark.parametrize("at_ms", [0, 100, 300])
def test_a_reader_that_stops_keeps_only_what_it_has_begun(at_ms: int) -> None:
    request = Request({"p": 500, "d": 500}, {"p": steady(1), "d": falls(at_ms, 0.0)})
    with pytest.raises(AssertionError, match="not over"):
        request.run(until_ms=2000)
    left = {part.node: part.blocks - part.read for part in request.parts if part.read < part.blocks}
    assert left == {"d": WINDOW_BLOCKS}
    assert len(request.moves) <= 6


def test_readers_that_are_all_slow_in_the_same_way_keep_what_they_have() -> None:
    request = Request({"p": 200, "d": 200, "h": 200}, dict.fromkeys("pdh", steady(0.1)))
    assert request.run() == pytest.approx(2000, abs=3) and not request.moves


def test_readers_that_all_stop_for_a_while_move_nothing() -> None:
    def pausing(ms: int) -> float:
        return 0.0 if 100 <= ms < 900 else 1.0

    request = Request({"p": 300, "d": 300}, {"p": pausing, "d": pausing})
    assert request.run() == pytest.approx(1100, abs=3) and not request.moves


def test_rates_that_swing_do_not_make_parts_swing() -> None:
    """Each follows the other's rate for 200 ms: with 50 ms between two questions to a part that is as much as it may move."""

    def swings(phase: int) -> Callable[[int], float]:
        return lambda ms: 1.5 if (ms + phase) % 400 < 200 else 0.5

    request = Request({"p": 1000, "d": 1000}, {"p": swings(0), "d": swings(200)})
    took = request.run()
    assert took <= 1000 * 1.02 and len(request.moves) <= 30


def test_a_third_node_that_gets_free_takes_its_share() -> None:
    request = Request({"p": 500, "d": 500}, dict.fromkeys("pdh", steady(1)), seed_idle=("h",))
    took = request.run()
    assert took <= 334 * 1.05 and len(request.moves) <= 8
