"""A part that sends is asked for the rest of its last blocks: what it sends from then on, and how much of it when."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from machines_kit import Bench
from machines_part_kind import helping_part, part

from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AnnouncePrefix,
    Finish,
    GaveRest,
    Release,
    SendLayer,
)
from kvmoverd.core.machines.part import PartMachine, PartState
from kvmoverd.core.status import End, Reason

LAYERS = 4
SCHEDULES = 3000


def sending(blocks: int = 3, script: str = "layers 0=2 1=2 2=2", *, credit_layers: int = LAYERS) -> Bench:
    """The first range of all blocks is there, the rest is not."""
    bench = part(blocks, LAYERS, credit_layers, window_layers=LAYERS)
    bench.run(f"start; slots; {script}")
    assert bench.machine.state is PartState.SENDING
    return bench


def over(prefix_blocks: int, reason: Reason = Reason.OK, message: str = "") -> list[Action]:
    return [Release(), Finish(End(reason, message, prefix_blocks=prefix_blocks))]


def test_layers_before_the_rest_go_with_all_blocks_and_the_others_with_those_that_are_kept() -> None:
    bench = sending()
    assert bench.run("give_rest 1 2") == [GaveRest(1, 2)]
    assert [bench.machine.blocks_at(layer) for layer in range(LAYERS)] == [3, 3, 1, 1]
    assert bench.run("credit 1 4") == [], "the block that it kept has two layers"
    assert bench.run("blocks 0=OK") == [SendLayer(2), SendLayer(3)]
    assert bench.run("sent 2 OK; sent 0 OK; sent 1 OK; sent 3 OK") == [AnnounceLayers(3, 3), *over(3)]
    bench.check_over()


def test_a_block_that_is_given_is_still_brought_to_where_its_rest_begins() -> None:
    bench = sending(2, "layers 0=1 1=1")
    assert bench.run("give_rest 1 2") == [GaveRest(1, 2)]
    assert bench.run("credit 1 4; blocks 0=OK") == [], "block 1 has one layer of two"
    assert bench.run("layers 1=2") == [SendLayer(1), SendLayer(2), SendLayer(3)]


def test_layers_of_the_rest_wait_for_a_credit_of_the_blocks_that_are_left() -> None:
    """Its owner must have heard of it before such a layer comes: he expects other blocks then."""
    bench = sending()
    bench.run("give_rest 1 2; blocks 0=OK")
    assert bench.run("credit 3 4") == [], "granted before its owner heard of the rest"
    assert bench.run("credit 2 4") == [] and bench.run("credit 0 4") == []
    assert bench.run("credit 1 3") == [SendLayer(2)]
    assert bench.run("credit 3 4; credit 1 2") == []
    assert bench.run("credit 1 4") == [SendLayer(3)]


def test_old_credits_go_on_counting_for_the_layers_before_the_rest() -> None:
    bench = sending(credit_layers=1)
    assert bench.run("give_rest 2 3") == [GaveRest(2, 3)]
    assert bench.run("credit 3 2") == [SendLayer(1)]
    assert bench.run("layers 0=3 1=3 2=3") == []
    assert bench.run("credit 3 4") == [SendLayer(2)]


def test_a_credit_of_the_blocks_that_are_left_counts_for_the_layers_before_too() -> None:
    bench = sending(credit_layers=0)
    bench.run("give_rest 1 2; blocks 0=OK")
    assert bench.run("credit 1 3") == [SendLayer(0), SendLayer(1), SendLayer(2)]


def test_a_part_that_keeps_no_block_is_over_after_the_layers_that_are_begun() -> None:
    bench = sending()
    assert bench.run("give_rest 0 3") == [GaveRest(0, 3)]
    assert bench.run("sent 0 OK; sent 1 OK; layers 0=3 1=3") == []
    assert bench.run("layers 2=3") == [SendLayer(2)]
    assert bench.run("sent 2 OK") == [AnnounceLayers(2, 2), *over(3)]
    bench.check_over()


def test_a_part_that_keeps_no_block_and_has_sent_its_layers_is_over_at_once() -> None:
    bench = sending()
    bench.run("sent 0 OK; sent 1 OK")
    assert bench.run("give_rest 0 2") == [GaveRest(0, 2), *over(3)]
    bench.check_over()


def test_a_part_that_keeps_no_block_still_waits_for_credits() -> None:
    bench = sending(credit_layers=1)
    bench.run("give_rest 0 2")
    assert bench.run("sent 0 OK") == [AnnounceLayers(0, 0)]
    assert bench.run("credit 3 4") == [SendLayer(1)]
    assert bench.run("sent 1 OK")[-1] == over(3)[-1]


def test_a_rest_is_given_once() -> None:
    bench = sending()
    bench.run("give_rest 2 2")
    assert not bench.machine.may_give_rest
    assert bench.run("give_rest 0 2") == [GaveRest(3, 0)]
    assert bench.machine.given == (2, 2)


@pytest.mark.parametrize("script", ["start", "start; slots", "start; slots; layers 0=1"])
def test_before_the_prefix_is_told_nothing_but_blocks_can_be_given(script: str) -> None:
    bench = part(3, LAYERS, LAYERS)
    bench.run(script)
    state = bench.machine.state
    assert bench.run("give_rest 1 1") == [GaveRest(3, 0)]
    assert bench.machine.state is state and bench.machine.given is None


def test_a_part_that_holds_or_began_later_or_helps_gives_nothing() -> None:
    held = part(2, LAYERS, holds=True)
    held.run("start; slots; layers 0=1 1=1")
    later = part(2, LAYERS, first_layer=1)
    later.run("start; slots; layers 0=2 1=2")
    helping = helping_part()
    helping.run("start; slots; layers 0=1 1=1; credit 2 3")
    for bench in (held, later, helping):
        assert not bench.machine.may_give_rest
        assert bench.run("give_rest 0 2") == [GaveRest(2, 0)]


def test_a_part_that_was_cut_counts_the_blocks_of_its_prefix() -> None:
    bench = part(4, LAYERS, LAYERS, window_layers=LAYERS)
    bench.run("start; slots; layers 0=1 1=1 2=1; blocks 3=CORRUPT; credit 3 4")
    assert bench.run("give_rest 3 2") == [GaveRest(3, 0)], "all that count are to be kept"
    assert bench.run("give_rest 2 1") == [GaveRest(2, 1)]
    assert bench.machine.blocks_at(0) == 3 and bench.machine.blocks_at(1) == 2


def test_a_part_that_is_stopped_answers_with_its_end_alone() -> None:
    bench = sending()
    assert bench.run("stop CANCELLED; give_rest 0 0") == []
    bench.run("sent 0 OK; sent 1 OK")
    assert bench.run("give_rest 0 0") == []
    bench.check_over()


@pytest.mark.parametrize("block", [0, 2])
def test_a_block_that_is_lost_before_it_is_where_it_was_to_be_brought_to_cuts_the_part(block: int) -> None:
    bench = sending()
    bench.run("give_rest 1 3; sent 0 OK; sent 1 OK")
    text = f"block {block} was lost after its first layers: CORRUPT"
    assert bench.run(f"blocks {block}=CORRUPT") == over(block, Reason.PREFIX_CUT, text)
    bench.check_over()


def test_what_becomes_of_a_given_block_after_its_last_layer_here_is_another_readers_affair() -> None:
    bench = sending()
    bench.run("give_rest 1 2; credit 1 4")
    assert bench.run("blocks 1=CORRUPT 2=CORRUPT") == []
    assert bench.run("blocks 0=OK") == [SendLayer(2), SendLayer(3)]


# ---- seeded: a reader, an owner, and words that travel


class Travels:
    """A part, its reader and its owner; layers and answers overtake each other, words of one kind don't.

    The owner's sink knows how many blocks a layer has to have: those that are left, from where he has heard of it.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.blocks, self.layers = rng.randint(1, 5), rng.randint(2, 8)
        self.machine = PartMachine(
            blocks=self.blocks,
            layers=self.layers,
            credit_layers=rng.randint(0, self.layers),
            window_layers=rng.randint(1, 4),
        )
        self.range_layers = rng.randint(1, self.layers)
        self.unbegun = deque(
            (block, min(first + self.range_layers, self.layers))
            for first in range(0, self.layers, self.range_layers)
            for block in range(self.blocks)
        )
        self.device: list[tuple[int, int]] = []
        self.begun, self.there = [0] * self.blocks, [0] * self.blocks
        self.credits: deque[tuple[int, int]] = deque()
        self.answers: deque[GaveRest] = deque()
        self.sends: list[tuple[int, int]] = []
        self.heard: GaveRest | None = None
        self.landed: set[tuple[int, int]] = set()
        self.in_order = 0
        self.asked = False
        self.end: End | None = None

    def run(self) -> None:
        self.did([*self.machine.start(), *self.machine.on_slots()])
        steps = (self.begin, self.begin, self.come, self.come, self.grant, self.credit, self.ask, self.hear, self.land)
        for _ in range(2000):
            if self.end is not None and not self.answers:
                break
            self.rng.choice(steps)()
        assert self.end is not None and self.end.reason is Reason.OK, f"{self.machine.state}, {self.landed}"
        self.check()

    def did(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendLayer(layer):
                    blocks = self.machine.blocks_at(layer)
                    assert min(self.there[:blocks]) > layer, f"layer {layer} is sent before it was read"
                    self.sends.append((layer, blocks))
                case GaveRest():
                    self.answers.append(action)
                case Finish(end):
                    assert not self.sends
                    self.end = end
                case AnnouncePrefix(prefix_blocks):
                    assert prefix_blocks == self.blocks

    def begin(self) -> None:
        if self.unbegun and len(self.device) < 3:
            block, stop = self.unbegun.popleft()
            self.begun[block] = stop
            self.device.append((block, stop))

    def come(self) -> None:
        if not self.device:
            return
        block, stop = self.device.pop(self.rng.randrange(len(self.device)))
        self.there[block] = max(self.there[block], stop)
        whole = stop == self.layers
        self.did(self.machine.on_blocks([(block, Reason.OK)]) if whole else self.machine.on_layers([(block, stop)]))

    def grant(self) -> None:
        """The owner's pages for layers become free as he computes."""
        layers = min(self.layers, self.in_order + self.rng.randint(1, self.layers))
        kept = self.heard.kept_blocks if self.heard is not None and self.heard.first_layer else 0
        self.credits.append((kept or self.blocks, layers))

    def credit(self) -> None:
        if self.credits:
            self.did(self.machine.on_credit(*self.credits.popleft()))

    def ask(self) -> None:
        if self.asked or self.rng.random() < 0.8:
            return
        kept_blocks = self.rng.randint(0, self.blocks)
        given = self.stop_reading(kept_blocks)
        self.asked = self.asked or bool(given[1])
        self.did(self.machine.on_give_rest(*given))

    def stop_reading(self, kept_blocks: int) -> tuple[int, int]:
        first_layer = self.begun[-1]
        if not self.machine.may_give_rest or not 0 < first_layer < self.layers:
            return self.blocks, 0
        enough = (block for block in range(self.blocks) if max(self.begun[block:]) <= first_layer)
        kept_blocks = max(kept_blocks, next(enough))
        if kept_blocks >= self.blocks:
            return self.blocks, 0
        self.unbegun = deque(
            (block, stop) for block, stop in self.unbegun if block < kept_blocks or stop <= first_layer
        )
        return kept_blocks, first_layer

    def hear(self) -> None:
        if self.answers:
            answer = self.answers.popleft()
            if answer.first_layer:
                assert self.in_order <= answer.first_layer
                self.heard = answer
                self.grant()

    def land(self) -> None:
        if not self.sends:
            return
        layer, blocks = self.sends.pop(self.rng.randrange(len(self.sends)))
        heard = self.heard
        expected = heard.kept_blocks if heard is not None and layer >= heard.first_layer else self.blocks
        assert blocks == expected, f"layer {layer} came with {blocks} blocks, {expected} are expected"
        new = {(block, layer) for block in range(blocks)}
        assert not new & self.landed, f"layer {layer} came twice"
        self.landed |= new
        self.did(self.machine.on_sent(layer, Reason.OK))
        self.in_order = self.machine.window.arrived.in_order

    def check(self) -> None:
        kept, first = (self.blocks, self.layers) if self.heard is None else self._heard()
        wanted = {
            (block, layer) for block in range(self.blocks) for layer in range(self.layers if block < kept else first)
        }
        assert self.landed == wanted
        assert all(self.begun[block] == first for block in range(kept, self.blocks)), "it reads no further"

    def _heard(self) -> tuple[int, int]:
        assert self.heard is not None
        return self.heard.kept_blocks, self.heard.first_layer


def test_whatever_overtakes_what_every_layer_comes_once_and_with_the_blocks_that_are_expected() -> None:
    kept: set[bool] = set()
    given = 0
    for seed in range(SCHEDULES):
        travels = Travels(seed)
        try:
            travels.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        if travels.heard is not None:
            given += 1
            kept.add(travels.heard.kept_blocks > 0)
    assert kept == {True, False} and given > SCHEDULES / 10
