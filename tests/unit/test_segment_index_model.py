"""The RAM index against a model of dictionaries, on random walks."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.core.store.places import Place
from tests.unit.index_kit import ONE, PAGES, TWO, Shop


@pytest.mark.parametrize(
    ("seed", "turns"), [(0, 80), *(pytest.param(n, 250, marks=pytest.mark.slow) for n in range(10))]
)
def test_a_walk_finds_what_a_model_of_dictionaries_finds(seed: int, turns: int) -> None:
    walk = Walk(Random(seed))
    for _ in range(turns):
        walk.step()
    walk.check()
    assert walk.shop.index.load_state().keys > 50


class Walk:
    """Random deeds on an index and on plain dictionaries."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.shop = Shop()
        self.keys = [chance.randbytes(32) for _ in range(3000)]
        self.places: dict[tuple[bytes, bytes], Place] = {}
        self.bad: set[tuple[bytes, bytes]] = set()
        self.spaces: dict[tuple[str, int], tuple[bytes, int]] = {}
        self.dead: set[tuple[str, int]] = set()
        self.purges = {ONE: 0, TWO: 0}
        self.ids: set[int] = set()
        self.said: set[tuple[str, int]] = set()
        self.turn = 0

    def step(self) -> None:
        self.turn += 1
        deed = self.chance.choices(
            [self.add, self.drop, self.mark_bad, self.purge, self.tidy, self.check], [60, 6, 10, 0.5, 10, 2]
        )[0]
        deed()

    def add(self) -> None:
        """A part of one segment, or parts of several in one call: that must be as one call after the other."""
        old = self.chance.random() < 0.5
        parts = [self.part(old=old) for _ in range(self.chance.choice([1, 1, 8]))]
        if len(parts) == 1 and not old:
            self.shop.index.add_blocks(*parts[0])
        else:
            self.shop.index.add_many(parts, old=old)

    def part(self, *, old: bool) -> tuple[int, npt.NDArray[np.void]]:
        name = (self.chance.choice("abc"), 1 + self.turn // 6 + self.chance.randrange(20))
        space, purge = self.spaces.setdefault(name, (self.chance.choice([ONE, TWO]), 0))
        if name not in self.said:
            purge = self.purges[space] - self.chance.randrange(2)
            self.spaces[name] = (space, max(0, purge))
            self.said.add(name)
        segment_id = self.shop.segment(*name, space=space, purge=self.spaces[name][1])
        self.ids.add(segment_id)
        assert self.shop.index.segment(segment_id).alive == self.alive(name)
        keys = self.chance.sample(self.keys, self.chance.choice([1, 30, 400]))
        first = self.chance.randrange(1000)
        for record, key in enumerate(keys, first):
            self.believe(space, key, Place(*name, 1 + record * PAGES), old=old)
        return segment_id, self.shop.entries(keys, first)

    def believe(self, space: bytes, key: bytes, place: Place, *, old: bool) -> None:
        new, known = (place.author, place.segment), self.places.get((space, key))
        if not self.alive(new):
            return
        if known is not None:
            was = (known.author, known.segment)
            later = was[1] < new[1] if was[0] == new[0] else not old
            if self.alive(was) and not later and not ((space, key) in self.bad and known != place):
                return
        self.places[space, key] = place
        self.bad.discard((space, key))

    def alive(self, name: tuple[str, int]) -> bool:
        space, purge = self.spaces[name]
        return name not in self.dead and purge >= self.purges[space]

    def drop(self) -> None:
        author = self.chance.choice("abc")
        numbers = self.chance.sample(range(1, 40 + self.turn // 6), self.chance.choice([1, 5]))
        self.shop.index.drop_segments(author, numbers)
        self.dead |= {(author, number) for number in numbers}

    def mark_bad(self) -> None:
        if self.places:
            space, key = self.chance.choice(list(self.places))
            place = self.places[space, key]
            if self.alive((place.author, place.segment)):
                self.shop.index.mark_bad(space, key, place, for_s=None)
                self.bad.add((space, key))

    def purge(self) -> None:
        space = self.chance.choice([ONE, TWO])
        self.purges[space] += 1
        self.shop.index.set_purge(space, self.purges[space])

    def tidy(self) -> None:
        self.shop.index.tidy(self.chance.choice([1, 1 << 20]))

    def check(self) -> None:
        for space in (ONE, TWO):
            ids, records, found = self.shop.index.locate(space, b"".join(self.keys))
            for key, segment_id, record, there in zip(self.keys, ids, records, found, strict=True):
                place = self.places.get((space, key))
                good = place is not None and (space, key) not in self.bad and self.alive((place.author, place.segment))
                assert there == good
                if there:
                    assert self.shop.index.segment(int(segment_id)).number == place.segment
                    assert 1 + int(record) * PAGES == place.page
        counted = sum(self.shop.index.segment(n).keys for n in self.ids if self.shop.index.segment(n))
        state = self.shop.index.load_state()
        assert counted == state.keys
        assert 0 <= state.keys_dead <= state.keys
