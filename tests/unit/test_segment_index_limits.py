"""The RAM index within its limit, against a model that tells everything again when it is asked to."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from markers import slow_only

from kvmoverd.adapters.storage.segments import index_spaces
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.index_lock import TurnLock
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store import key_table
from kvmoverd.core.store.key_table import KeyTable, Rules
from kvmoverd.core.store.log_pages import ENTRY

RAM_BYTES_MAX = 400_000
SLACK = 1.1


class Logs:
    """What authors' logs would say, and an index that is told of it."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.now_ns = 10**9
        self.wanted: list[bytes] = []
        self.index = SegmentIndex(
            ram_bytes_max=RAM_BYTES_MAX,
            touches=Touches(now_ns=lambda: self.now_ns),
            now_ns=lambda: self.now_ns,
            on_wanted=self.wanted.append,
        )
        self.spaces = [bytes([number]) * 16 for number in range(6)]
        self.said: dict[bytes, list[tuple[int, np.ndarray]]] = {space: [] for space in self.spaces}
        self.number = 0

    def say(self, space: bytes) -> None:
        self.number += 1
        tags = np.frombuffer(self.chance.randbytes(8 * self.chance.choice([10, 300, 1500])), np.uint64)
        self.said[space].append((self.number, tags))
        self.tell(space, self.number, tags)

    def tell(self, space: bytes, number: int, tags: np.ndarray) -> None:
        segment_id = self.index.add_segment("a", number, fingerprint16=space, generation=1, purge=0, record_pages=2)
        assert (segment_id >= 0) == self.index.wants(space)
        if segment_id >= 0:
            entries = np.zeros(len(tags), ENTRY)
            entries["key"][:, 0], entries["page"] = tags, 1 + 2 * np.arange(len(tags))
            self.index.add_blocks(segment_id, entries)

    def drop(self, space: bytes) -> None:
        if self.said[space]:
            number, _ = self.said[space].pop(self.chance.randrange(len(self.said[space])))
            self.index.drop_segments("a", [number])

    def look(self, space: bytes) -> None:
        found = 0
        for number, tags in self.said[space]:
            keys = np.zeros((len(tags), 4), np.uint64)
            keys[:, 0] = tags
            ids, records, hits = self.index.locate(space, keys.tobytes())
            found += np.count_nonzero(hits)
            assert all(self.index.segment(int(each)).number == number for each in np.unique(ids[hits]))
            assert (records[hits] == np.arange(len(tags))[hits]).all()
        if self.wanted:
            assert self.wanted == [space]
            self.wanted.clear()
            for number, tags in self.said[space]:
                self.tell(space, number, tags)
        elif not self.index.wants(space):
            assert found == 0

    def step(self) -> None:
        self.now_ns += self.chance.choice([10**6, 10**9, index_spaces.DWELL_NS])
        space = self.chance.choice(self.spaces)
        self.chance.choices([self.say, self.look, self.drop], [5, 4, 2])[0](space)
        self.index.tidy()
        assert self.index.load_state().ram_bytes <= RAM_BYTES_MAX * SLACK


@pytest.mark.parametrize("seed", [0, *slow_only(range(1, 4))])
def test_a_walk_beyond_the_limit_finds_all_of_what_is_loaded_and_nothing_of_the_rest(seed: int) -> None:
    logs = Logs(Random(seed))
    for _ in range(250):
        logs.step()
    state = logs.index.load_state()
    assert state.namespaces_dropped > 3
    assert state.namespaces + state.namespaces_left_out == len(logs.spaces)
    assert state.ram_bytes > RAM_BYTES_MAX / 3


def test_a_namespace_that_is_loaded_again_has_new_numbers_and_all_of_its_keys() -> None:
    logs = Logs(Random(5))
    first, second = logs.spaces[:2]
    logs.say(first)
    number, tags = logs.said[first][0]
    before = logs.index.segment_id("a", number)
    logs.index.opened(second)
    while logs.index.wants(first):
        logs.say(second)
    assert not logs.index.segment(before or 0).alive
    logs.now_ns += 2 * index_spaces.DWELL_NS
    logs.look(first)
    logs.index.tidy()
    after = logs.index.segment_id("a", number)
    assert after not in (None, before)
    assert logs.index.blocks(first) == len(tags)
    assert logs.index.segment(after or 0).keys == len(tags)


@pytest.mark.slow
def test_keys_that_come_while_a_table_shrinks_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "_SMALL_HOMES", 256)
    monkeypatch.setattr(key_table, "_STEP_SLOTS", 64)
    dead: set[int] = set()
    rules = Rules(
        alive=lambda words: ~np.isin(words, list(dead)),
        wins=lambda old, new: np.zeros(len(old), np.bool_),
        gone=lambda words: None,
    )
    table = KeyTable(rules, mixer=0x9E3779B97F4A7C15)
    chance = np.random.default_rng(11)
    for _ in range(200):
        table.put(chance.integers(0, 1 << 64, 500, np.uint64), np.full(500, 1, np.uint64))
    table.step(1 << 20)
    lively = int(table._now.homes / 8 * key_table.FILL)
    kept = [chance.integers(0, 1 << 64, lively, np.uint64)]
    table.put(kept[0], np.full(lively, 2, np.uint64))
    table.step(1 << 20)
    dead.add(1)
    assert table.tidy(len(table) - lively, 100), (
        "the table can become so small that it is as full as can be in one move"
    )
    monkeypatch.setattr(KeyTable, "_rebuild", None)
    for turn in range(200):
        kept.append(chance.integers(0, 1 << 64, 100, np.uint64))
        table.put(kept[-1], np.full(100, 2, np.uint64))
        assert (table.find(np.concatenate(kept)) == 2).all(), turn
    assert len(table) == lively + 20_000


def test_bulk_work_sleeps_only_after_somebody_had_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvmoverd.adapters.storage.segments.index_lock.time.sleep", slept.append)
    lock = TurnLock()
    with lock:
        pass
    lock.give_way()
    assert not slept
    lock._wanted = True
    lock.give_way()
    lock.give_way()
    assert len(slept) == 1
