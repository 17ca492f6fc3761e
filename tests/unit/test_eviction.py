"""Which segments go, in what order, and what is salvaged."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvmoverd.core.store.eviction import SegmentUse, Victim, Watermark, Why, choose, expired

MIB = 1 << 20


def use(
    number: int,
    heat: list[int] | int = 0,
    *,
    idle_s: float = 3_600.0,
    age_s: float = 7_200.0,
    depth: float = 0.0,
    active: bool = False,
    pinned: int = 0,
    unknown: bool = False,
) -> SegmentUse:
    counts = np.zeros(100, np.uint8)
    if isinstance(heat, int):
        counts[:heat] = 5
    else:
        counts[: len(heat)] = heat
    return SegmentUse("node.1", number, bytes(16), 100 * MIB, counts, idle_s, age_s, depth, 1, active, pinned, unknown)


def numbers(victims: list[Victim]) -> list[int]:
    return [victim.use.number for victim in victims]


def wanted(uses: list[SegmentUse], segments: float, **options: object) -> list[Victim]:
    return choose(uses, why=Why.WATERMARK, bytes_wanted=round(segments * 100 * MIB), **options)  # type: ignore[arg-type]


def test_as_many_go_as_are_needed_and_the_longest_idle_first() -> None:
    uses = [use(1, idle_s=600), use(2, idle_s=9_000), use(3, idle_s=3_000)]
    assert numbers(wanted(uses, 1.5)) == [2, 3]
    assert numbers(wanted(uses, 1)) == [2]
    assert wanted(uses, 0) == []


def test_of_equal_heat_the_deeper_goes_first() -> None:
    uses = [use(1, depth=3, idle_s=3_610), use(2, depth=90), use(3, depth=40)]
    assert numbers(wanted(uses, 3)) == [2, 3, 1]


def test_active_and_pinned_ones_never_go() -> None:
    uses = [use(1, active=True), use(2, pinned=1), use(3)]
    assert numbers(wanted(uses, 100)) == [3]


def test_what_others_use_without_saying_so_goes_only_when_asked_for() -> None:
    uses = [use(1, unknown=True), use(2, unknown=True)]
    assert wanted(uses, 1) == []
    assert numbers(wanted(uses, 1, even_unknown=True)) == [1]


def test_a_few_hot_blocks_are_salvaged_and_counted_against_what_is_freed() -> None:
    victims = wanted([use(1, 9), use(2, 10)], 0.9)
    assert numbers(victims) == [1] and victims[0].salvage.tolist() == list(range(9))
    assert victims[0].freed_bytes == 91 * MIB


def test_a_segment_with_many_hot_blocks_is_passed_over_for_a_colder_one() -> None:
    assert numbers(wanted([use(1, 60, idle_s=0), use(2, 5, idle_s=0), use(3, 0, idle_s=0)], 1.9)) == [3, 2]


def test_under_need_the_level_of_what_is_cold_rises_no_further_than_it_must() -> None:
    lukewarm, hot = use(1, [1] * 50 + [200] * 4), use(2, [200] * 50)
    victims = wanted([hot, lukewarm], 0.5)
    assert numbers(victims) == [1] and victims[0].level == 1 and victims[0].salvage.tolist() == [50, 51, 52, 53]
    assert numbers(wanted([hot, lukewarm], 2)) == [1, 2]
    assert wanted([hot, lukewarm], 2, level_max=0) == []


def test_a_full_disk_salvages_nothing_and_still_spares_the_hot() -> None:
    victims = wanted([use(1, 4), use(2, [1] * 50), use(3)], 3, salvage_below=0.0)
    assert numbers(victims) == [3, 2, 1]
    assert not any(len(victim.salvage) for victim in victims)


def test_inodes_are_freed_as_well_as_bytes() -> None:
    uses = [use(number) for number in range(10)]
    assert len(choose(uses, why=Why.WATERMARK, bytes_wanted=0, inodes_wanted=4)) == 4
    assert len(choose(uses, why=Why.WATERMARK, bytes_wanted=600 * MIB, inodes_wanted=4)) == 6


def test_time_to_live_takes_the_oldest_first_whatever_their_heat() -> None:
    uses = [use(1, 100, age_s=50), use(2, 100, age_s=500), use(3, age_s=900), use(4, age_s=999, active=True)]
    assert numbers(expired(uses, 100.0)) == [3, 2]


@pytest.mark.parametrize("now", [0, 10**18])
def test_no_limit_is_never_exceeded(now: int) -> None:
    mark = Watermark(0, 0.9, 0.8)
    assert mark.excess(now) == 0 and mark.beyond(now, 0.95) == 0


def test_dropping_begins_above_the_high_mark_and_ends_at_the_low_one() -> None:
    mark = Watermark(1_000, high=0.9, low=0.8)
    assert [mark.excess(now) for now in (850, 950, 870, 801, 800, 899)] == [0, 150, 70, 1, 0, 0]
    assert mark.beyond(960, 0.95) == 10


@dataclass
class Tree:
    """Blocks with parents, packed into segments in the order of their writing; requests touch whole prefixes."""

    chance: random.Random
    parents: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    records: int = 50

    def grow(self, blocks: int) -> None:
        for block in range(blocks):
            self.parents.append(-1 if self.chance.random() < 0.02 or not block else self.chance.randrange(block))
            self.counts.append(0)

    def prefix(self, block: int) -> list[int]:
        found = []
        while block >= 0:
            found.append(block)
            block = self.parents[block]
        return found

    def use(self, requests: int) -> None:
        favoured = [self.chance.randrange(len(self.parents)) for _ in range(20)]
        for _ in range(requests):
            block = (
                self.chance.choice(favoured) if self.chance.random() < 0.7 else self.chance.randrange(len(self.parents))
            )
            for number in self.prefix(block):
                self.counts[number] = min(255, self.counts[number] + 1)
            if self.chance.random() < 0.05:
                self.counts = [count >> 1 for count in self.counts]

    def segments(self) -> list[SegmentUse]:
        uses = []
        for start in range(0, len(self.parents), self.records):
            heat = np.array(self.counts[start : start + self.records], np.uint8)
            depth = max(len(self.prefix(block)) for block in range(start, start + len(heat)))
            uses.append(
                SegmentUse(
                    "node.1",
                    start // self.records,
                    bytes(16),
                    len(heat) * MIB,
                    heat,
                    self.chance.choice([5.0, 1e4]),
                    0.0,
                    depth,
                )
            )
        return uses


@pytest.mark.parametrize("seed", range(40))
def test_no_hot_descendant_loses_its_parent_unless_that_is_salvaged(seed: int) -> None:
    tree = Tree(random.Random(seed))
    tree.grow(2_000)
    tree.use(tree.chance.choice([0, 30, 300, 3_000]))
    uses = tree.segments()
    salvage_below = tree.chance.choice([0.0, 0.1, 0.3])
    victims = choose(
        uses,
        why=Why.WATERMARK,
        bytes_wanted=tree.chance.randrange(1, 1_500) * MIB,
        salvage_below=salvage_below,
    )
    lost: set[int] = set()
    level = 0
    for victim in victims:
        start = victim.use.number * tree.records
        salvaged = {start + record for record in victim.salvage.tolist()}
        lost |= set(range(start, start + len(victim.use.heat))) - salvaged
        level = max(level, victim.level)
    assert all(tree.counts[block] <= level for block in lost), "nothing hot is lost"
    for block in set(range(len(tree.parents))) - lost:
        if tree.counts[block] > level:
            assert not lost.intersection(tree.prefix(block)), f"seed {seed}: block {block} lost an ancestor"
    ranks = [victim.level for victim in victims]
    assert ranks == sorted(ranks)


def test_a_few_pinned_records_are_salvaged_at_every_level_and_keep_their_segment_on_a_full_disk() -> None:
    few = dataclasses.replace(use(1), pins=np.array([7, 50], np.uint32))
    many = dataclasses.replace(use(2), pins=np.arange(30, dtype=np.uint32))
    victims = wanted([few, many], 100)
    assert numbers(victims) == [1] and victims[0].salvage.tolist() == [7, 50]
    assert wanted([few, many], 100, salvage_below=0.0) == []
