"""Seeded histories of a DE buffer whose parts give rests at any moment: pushed and read layers meet in the same slots."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from de_parts_kit import came_right, opens, sends_all
from de_rig import LAYERS, DeRig, Part
from node_kit import WAIT_S, end_of, told, until
from node_net import Net, node_net

from kvmoverd.core.runs import Runs
from kvmoverd.core.status import Reason

HISTORIES, QUICK, PER_TEST = 2_000, 80, 40


class Owner:
    """The prefill node: it lets layers be sent, computes those that it has of all blocks, and pushes what was computed."""

    def __init__(self, rig: DeRig, rng: Random, spans: list[tuple[int, int]]) -> None:
        self.rig, self.rng = rig, rng
        self.spans = spans
        self.parts: list[Part] = []
        self.prefix_set = False
        self.disk_pace = rng.choice((0.03, 0.1, 0.5))
        self.in_order = rng.random() < 0.8
        self.computed = 0
        self.answers: list[tuple[int, list[Reason]]] = []
        self.asked: set[int] = set()
        self.has_told: set[int] = set()

    async def begin(self) -> None:
        for span in self.spans:
            self.parts.append(self.rig.part(span, holds=len(self.spans) > 1 or self.rng.random() < 0.5))

    def step(self) -> None:
        """One thing that may happen now."""
        disk, fars = self.rig.there.disk, self.rig.net.fars
        if disk.held and self.rng.random() < self.disk_pace and not (self.in_order and disk.release_first_range()):
            disk.held.rotate(-self.rng.randrange(len(disk.held)))
            disk.release_one()
        may = [fars["d"].release_one, fars["p"].release_one, self._give, self._push, self._hear]
        self.rng.choice(may)()

    async def agree(self) -> None:
        """With all parts' prefixes the buffer hears of its own, sooner or later; parts that hold send from then on."""
        if not self.prefix_set and all(part.prefix for part in self.parts) and self.rng.random() < 0.5:
            self.prefix_set = True
            await self.rig.set_prefix(self.rig.hit)
            for part in self.parts:
                sends_all(part, part.blocks.count)

    def _give(self) -> None:
        place = self.rng.randrange(len(self.parts))
        driver = self.parts[place].driver
        assert driver is not None
        if place not in self.asked and self.rng.random() < (0.6 if driver.machine.may_give_rest else 0.02):
            self.asked.add(place)
            driver.give_rest(self.rng.randrange(self.parts[place].blocks.count + 1))

    def _hear(self) -> None:
        """An answer came: later layers are granted for what is kept."""
        for place, part in enumerate(self.parts):
            if part.rests and part.rests[0][1] and place not in self.has_told:
                self.has_told.add(place)
                if part.rests[0][0] and part.driver is not None:
                    part.driver.credit(part.rests[0][0], LAYERS)

    def _push(self) -> None:
        layer = self.computed
        if layer == LAYERS or not self.prefix_set:
            return
        for part in self.parts:
            if layer not in part.landed and part.blocks_of(layer):
                return
        self.computed += 1
        rig = self.rig
        mine = Runs.of((0, rig.blocks + (rig.tail > 0))).minus(Runs.of(*self.spans))
        rests = [part.blocks.tail(kept) for part in self.parts for kept, first in part.rests if 0 < first <= layer]
        if blocks := Runs.union([mine, *rests]).indexes().tolist():
            self.answers.append((layer, rig.push(layer, *blocks)))


def some_spans(rng: Random, hit: int) -> list[tuple[int, int]]:
    """One to three ranges of the hits that the decode node reads."""
    edges = sorted(rng.sample(range(hit + 1), k=min(hit + 1, rng.choice((2, 4, 4, 6)))))
    return list(zip(edges[::2], edges[1::2], strict=False))


async def one_history(net: Net, rng: Random) -> bool:
    """Was a rest given?"""
    hit = rng.randint(4, 24)
    rig = DeRig(net, hit=hit, blocks=hit + rng.choice((0, 0, 1, 2)), tail=rng.choice((0, 0, 2)))
    owner = Owner(rig, rng, some_spans(rng, hit))
    rig.there.disk.closed = True
    await rig.reserve(owner.spans[0])
    net.fars["d"].closed = net.fars["p"].closed = True
    await owner.begin()
    goes_wrong = rng.choice((None, None, None, "cancelled", "owner lost", "block lost"))
    for _ in range(20_000 if goes_wrong is None else rng.randrange(500)):
        owner.step()
        await owner.agree()
        await asyncio.sleep(0)
        if rig.assembly.buffer.whole(hit) and owner.computed == LAYERS and all(part.end for part in owner.parts):
            break
    was_given = any(first for part in owner.parts for _, first in part.rests)
    if goes_wrong is not None:
        end_it(rig, goes_wrong, rng)
    net.fars["d"].closed = net.fars["p"].closed = False
    while net.fars["p"].release_one() or net.fars["d"].release_one():
        pass
    opens(rig)
    if goes_wrong is None:
        await all_is_right(rig, owner)
    elif goes_wrong == "block lost":
        await asyncio.sleep(0)
        rig.side.release_ticket(rig.ticket, Reason.DEADLINE)
    await rig.over()
    return was_given


def end_it(rig: DeRig, how: str, rng: Random) -> None:
    match how:
        case "cancelled":
            rig.side.release_ticket(rig.ticket, Reason.CANCELLED)
        case "owner lost":
            rig.side.peer_lost("p", "boot-p", "no word")
            rig.side.release_ticket(rig.ticket, Reason.PEER_LOST)
        case "block lost":
            rig.there.storage.tamper(rig.kit.namespace, rng.choice(rig.keys[: rig.hit]), None)


async def all_is_right(rig: DeRig, owner: Owner) -> None:
    await until(lambda: all(answer for _, answer in owner.answers), "all frames are answered")
    assert all(answer == [Reason.OK] for _, answer in owner.answers), owner.answers
    for part in owner.parts:
        assert part.end is not None and part.end.reason is Reason.OK, part.words
        came_right(rig, part)
    twice = {place: count for place, count in rig.net.layer_reads().items() if count > 1}
    assert not twice, twice
    assembled = rig.attach()
    async with asyncio.timeout(WAIT_S):
        await until(lambda: rig.assembly.machine.was_whole, "the buffer is whole")
    assert end_of(await told(rig.deliver())).reason is Reason.OK
    assert end_of(await told(assembled)).reason is Reason.OK
    rig.delivered_right()


async def play(first: int) -> None:
    given = 0
    for seed in range(first, first + PER_TEST):
        async with node_net(2) as net:
            try:
                given += await one_history(net, Random(seed))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    assert given >= PER_TEST // 20, f"a rest was given in {given} of {PER_TEST} histories"


@pytest.mark.parametrize("first", range(0, QUICK, PER_TEST))
async def test_whenever_parts_give_their_rests_every_byte_is_right_and_no_slot_is_lost(first: int) -> None:
    await play(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, HISTORIES, PER_TEST))
async def test_the_same_in_many_more_histories(first: int) -> None:
    await play(first)
