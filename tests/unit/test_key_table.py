"""The key table against a dictionary: what is put is found, through growth, moves, sweeps and full arrays."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from markers import slow_only

from kvmoverd.core.store import key_table
from kvmoverd.core.store.key_table import KeyTable, Rules, raw_tags
from kvmoverd.core.store.slot_table import PlainMemory, SlotTable, Words

MIXER = 0x9E3779B97F4A7C15
SEEDS = [0, *slow_only(range(1, 3))]


def words(*numbers: int) -> Words:
    return np.array(numbers, np.uint64)


class Model:
    """A table beside a dictionary. A word is group << 32 | number: dead groups count no more, higher numbers win."""

    def __init__(self, mixer: int = MIXER) -> None:
        self.known: dict[int, int] = {}
        self.dead: set[int] = set()
        self.gone: list[int] = []
        rules = Rules(alive=self._alive, wins=self._wins, gone=lambda gone: self.gone.extend(gone.tolist()))
        self.table = KeyTable(rules, mixer=mixer)

    def _alive(self, found: Words) -> np.ndarray:
        return ~np.isin(found >> 32, list(self.dead))

    def _wins(self, old: Words, new: Words) -> np.ndarray:
        return ~self._alive(old) | (old & 0xFFFFFFFF < new & 0xFFFFFFFF)

    def put(self, tags: list[int], new: list[int]) -> None:
        taken = self.table.put(words(*tags), words(*new))
        last = dict(zip(tags, new, strict=True))
        won = []
        for tag, word in last.items():
            old = self.known.get(tag)
            if old is None or old >> 32 in self.dead or old & 0xFFFFFFFF < word & 0xFFFFFFFF:
                self.known[tag] = word
                won.append(word)
        assert sorted(taken.tolist()) == sorted(won)

    def check(self, strangers: list[int]) -> None:
        tags = list(self.known)
        found = self.table.find(words(*tags)).tolist()
        for tag, word in zip(tags, found, strict=True):
            if self.known[tag] >> 32 in self.dead:
                assert word in (0, self.known[tag])
            else:
                assert word == self.known[tag]
                assert self.table.find_one(tag) == word
        unknown = [tag for tag in strangers if tag not in self.known]
        assert not self.table.find(words(*unknown)).any()
        assert not any(self.table.find_one(tag) for tag in unknown)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk_of_puts_deaths_sweeps_and_moves_finds_what_a_dictionary_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables that move from the beginning, and a few slots at a time."""
    monkeypatch.setattr(key_table, "_SMALL_HOMES", 512)
    monkeypatch.setattr(key_table, "_STEP_SLOTS", 64)
    monkeypatch.setattr(key_table, "_SLOTS_PER_KEY", 4)
    chance, model, moves = Random(seed), Model(), 0
    for turn in range(250):
        group = turn // 12
        count = chance.choice([1, 3, 62, 200])
        tags = [chance.getrandbits(64) for _ in range(count)]
        tags += chance.sample(list(model.known), min(len(model.known), count // 3))
        model.put(tags, [group << 32 | chance.randrange(1, 1 << 20) for _ in tags])
        if chance.random() < 0.02 and group:
            model.dead.add(chance.randrange(group))
        if chance.random() < 0.2:
            dead = sum(word >> 32 in model.dead for word in model.known.values())
            model.table.tidy(dead, chance.choice([10, 1000, 100_000]))
        moves += model.table.moving
        if turn % 40 == 0:
            model.check([chance.getrandbits(64) for _ in range(50)])
    assert moves > 20
    model.check([chance.getrandbits(64) for _ in range(500)])


@pytest.mark.parametrize("mixer", [MIXER, 1])
def test_keys_that_lie_as_close_together_as_can_be_are_found_all_the_same(mixer: int) -> None:
    model = Model(mixer)
    for base in (1, 5 << 60, (1 << 64) - 700):
        model.put(list(range(base, base + 700)), [1 << 32 | number for number in range(1, 701)])
    model.check([0 if mixer > 1 else 800, (5 << 60) - 1, (1 << 64) - 701])


def test_a_look_up_finds_tags_far_behind_their_homes_and_knows_what_is_not_there() -> None:
    table = SlotTable(4096, PlainMemory())
    crowd = words(*range(1, 200))
    assert not len(table.insert(crowd, crowd))
    rows, slots = table.find(words(*range(1, 260)))
    assert sorted(rows.tolist()) == list(range(199))
    assert (table.words[slots] == words(*range(1, 260))[rows]).all()


def test_an_array_that_is_full_at_its_end_says_which_tags_found_no_room() -> None:
    table = SlotTable(16, PlainMemory())
    top = words(*range((1 << 64) - 300, 1 << 64))
    homeless = table.insert(top, top)
    assert len(homeless) == 300 - table.used
    assert not table.append(top, top)
    found, _ = table.find(np.delete(top, homeless))
    assert len(found) == table.used


def test_a_batch_that_finds_no_room_in_one_array_of_a_move_is_there_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "_SMALL_HOMES", 128)
    monkeypatch.setattr(key_table, "_STEP_SLOTS", 16)
    model, chance = Model(mixer=1), Random(3)
    before = [chance.getrandbits(64) for _ in range(180)]
    model.put(before, [1] * len(before))
    model.table.tidy(100, 16)
    while model.table._bound < 15 << 60:
        model.table.step(16)
    assert model.table.moving
    bound = model.table._bound
    crowd = [*range(bound - 900, bound), *range(bound + 1, bound + 100)]
    model.put(crowd, [1] * len(crowd))
    model.check([bound - 901, bound])


def test_a_walk_by_cursor_meets_every_key_once_while_others_come_and_the_table_moves() -> None:
    chance, model = Random(7), Model()
    before = [chance.getrandbits(64) for _ in range(40_000)]
    for first in range(0, len(before), 1000):
        part = before[first : first + 1000]
        model.put(part, [1 << 32 | 1] * len(part))
    seen: list[int] = []
    cursor, turns = 0, 0
    while turns == 0 or cursor:
        tags, found, cursor = model.table.above(cursor, 500)
        assert len(tags) == len(found)
        seen += tags.tolist()
        more = [chance.getrandbits(64) for _ in range(200)]
        model.put(more, [1 << 32 | 1] * len(more))
        turns += 1
    assert len(seen) == len(set(seen))
    assert set(before) <= set(seen)
    assert turns > 50


def test_a_table_takes_at_most_32_bytes_a_key_before_during_and_after_moves() -> None:
    model = Model()
    chance = np.random.default_rng(3)
    most = 0.0
    for _ in range(250):
        model.table.put(chance.integers(1, 1 << 64, 1000, np.uint64), np.full(1000, 1 << 32 | 1, np.uint64))
        if not model.table.moving and len(model.table) > 10_000:
            most = max(most, model.table.ram_bytes / len(model.table))
    assert 20 < most <= 32


def test_what_is_dead_is_swept_and_a_table_that_became_empty_becomes_small() -> None:
    model = Model()
    tags = np.random.default_rng(4).integers(1, 1 << 64, 60_000, np.uint64)
    for first in range(0, len(tags), 1000):
        model.table.put(tags[first : first + 1000], np.full(1000, (first >= 1000) + 1 << 32 | 1, np.uint64))
    large_bytes = model.table.ram_bytes
    model.dead.add(2)
    while model.table.tidy(len(model.table) - 1000, 10_000):
        pass
    assert len(model.table) == 1000
    assert len(model.gone) == 59_000
    assert model.table.ram_bytes < large_bytes / 20
    assert (model.table.find(tags[:1000]) != 0).all()


def test_a_key_is_known_by_its_first_8_bytes() -> None:
    keys = bytes(range(64))
    assert raw_tags(keys).tolist() == [int.from_bytes(keys[0:8], "little"), int.from_bytes(keys[32:40], "little")]
    assert len(raw_tags(b"")) == 0
