"""The RAM index against a model of dictionaries: segments, tombstones, purges, bad places, the limit of RAM."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.storage.segments import index_spaces
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.index_memory import MappedMemory
from kvmoverd.adapters.storage.segments.index_segments import REUSE_NS
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.core.store.log_pages import ENTRY, entries_of
from kvmoverd.core.store.places import Place

ONE, TWO, THREE = b"1" * 16, b"2" * 16, b"3" * 16
PAGES = 3
SECOND_NS = 10**9


@dataclass
class Clock:
    ns: int = SECOND_NS

    def __call__(self) -> int:
        return self.ns


@dataclass
class Shop:
    """An index with a clock, and short words for what its tests do."""

    ram_bytes_max: int = 1 << 30
    clock: Clock = field(default_factory=Clock)
    wanted: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.touches = Touches(now_ns=self.clock)
        self.index = SegmentIndex(
            ram_bytes_max=self.ram_bytes_max, touches=self.touches, now_ns=self.clock, on_wanted=self.wanted.append
        )

    def segment(self, author: str = "a", number: int = 1, space: bytes = ONE, purge: int = 0) -> int:
        return self.index.add_segment(
            author, number, fingerprint16=space, generation=7, purge=purge, record_pages=PAGES
        )

    def add(self, segment_id: int, keys: list[bytes], first_record: int = 0) -> None:
        self.index.add_blocks(segment_id, self.entries(keys, first_record))

    def entries(self, keys: list[bytes], first_record: int = 0) -> npt.NDArray[np.void]:
        records = range(first_record, first_record + len(keys))
        places = zip(keys, records, strict=True)
        return entries_of([(key, bytes(32), 1 + record * PAGES, depth) for depth, (key, record) in enumerate(places)])

    def found(self, keys: list[bytes], space: bytes = ONE) -> list[bool]:
        return self.index.locate(space, b"".join(keys))[2].tolist()


def some_keys(count: int, seed: int = 1) -> list[bytes]:
    chance = Random(seed)
    return [chance.randbytes(32) for _ in range(count)]


def entries_at(tags: npt.NDArray[np.uint64], pages: npt.NDArray[np.uint32]) -> npt.NDArray[np.void]:
    """Entries of which no more is known than the first 8 bytes of their keys."""
    entries = np.zeros(len(tags), ENTRY)
    entries["key"][:, 0], entries["page"] = tags, pages
    return entries


def test_what_was_added_is_found_where_it_lies_and_nothing_else() -> None:
    shop = Shop()
    keys = some_keys(100)
    segment_id = shop.segment()
    shop.add(segment_id, keys[:62])
    ids, records, found = shop.index.locate(ONE, b"".join(keys))
    assert found.tolist() == [True] * 62 + [False] * 38
    assert ids[:62].tolist() == [segment_id] * 62
    assert records[:62].tolist() == list(range(62))
    assert shop.index.find(ONE, keys[5]) == Place("a", 1, 1 + 5 * PAGES)
    assert shop.index.find(ONE, keys[70]) is None
    assert shop.index.find(TWO, keys[5]) is None
    assert not any(shop.found(keys, TWO))
    assert shop.found([]) == []


def test_a_segment_has_one_number_and_what_is_known_of_it() -> None:
    shop = Shop()
    segment_id = shop.segment()
    assert shop.segment() == segment_id
    assert shop.segment(number=2) != segment_id
    shop.add(segment_id, some_keys(3))
    info = shop.index.segment(segment_id)
    assert (info.author, info.number, info.fingerprint16, info.generation, info.record_pages) == ("a", 1, ONE, 7, PAGES)
    assert (info.alive, info.keys, info.depth_mean) == (True, 3, 1.0)
    assert shop.index.segment_id("a", 1) == segment_id
    assert shop.index.segment_id("b", 1) is None
    assert shop.index.segment_id("a", 2) not in (None, segment_id)


def test_a_key_keeps_its_place_until_that_is_dead_or_a_later_segment_has_it() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    for number in (5, 4, 5):
        shop.add(shop.segment(number=number), [key])
        assert shop.index.find(ONE, key) == Place("a", 5, 1)
    shop.add(shop.segment(number=6), [key])
    shop.index.drop_segments("a", [5])
    assert shop.index.find(ONE, key) == Place("a", 6, 1), "what is stored again outlives its old segment"
    shop.index.drop_segments("a", [6])
    assert shop.index.find(ONE, key) is None
    shop.add(shop.segment(number=4), [key])
    assert shop.index.find(ONE, key) == Place("a", 4, 1)


def test_an_adopter_who_stores_a_block_again_keeps_it_when_he_drops_the_dead_authors_segment() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    shop.add(shop.segment("dead", 9), [key])
    shop.add(shop.segment("adopter", 1), [key])
    shop.index.drop_segments("dead", [9])
    assert shop.index.find(ONE, key) == Place("adopter", 1, 1)


def test_an_adopter_may_store_a_block_again_in_a_segment_that_he_began_before_the_dead_author_did() -> None:
    shop = Shop()
    key, other = some_keys(2)
    growing = shop.segment("adopter", 1)
    shop.add(growing, [other])
    shop.add(shop.segment("dead", 9), [key])
    shop.add(growing, [key], first_record=1)
    shop.index.drop_segments("dead", [9])
    assert shop.index.find(ONE, key) == Place("adopter", 1, 1 + PAGES)


def test_a_number_that_is_used_again_does_not_make_a_segment_an_old_one() -> None:
    shop = Shop()
    first, key = some_keys(2)
    swept = shop.segment("dead", 1)
    shop.add(swept, [first])
    shop.add(shop.segment("dead", 2), [key])
    shop.index.drop_segments("dead", [1])
    while shop.index.tidy():
        pass
    shop.clock.ns += REUSE_NS + 1
    again = shop.segment("adopter", 1)
    assert again == swept
    shop.add(again, [key])
    shop.index.drop_segments("dead", [2])
    assert shop.index.find(ONE, key) == Place("adopter", 1, 1)


def test_of_two_authors_whose_logs_are_old_the_one_that_was_read_first_counts() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    for author in ("first", "second"):
        shop.index.add_many([(shop.segment(author), shop.entries([key]))], old=True)
    assert shop.index.find(ONE, key) == Place("first", 1, 1)


def test_authors_and_namespaces_that_come_and_go_take_no_more_ram() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    ram_bytes = []
    for turn in range(300):
        space = turn.to_bytes(16, "little")
        shop.add(shop.segment(f"author-{turn}", 1, space), [key])
        shop.index.drop_author(f"author-{turn}")
        shop.clock.ns += REUSE_NS + 1
        while shop.index.tidy():
            pass
        ram_bytes.append(shop.index.load_state().ram_bytes)
    assert shop.index.load_state().segments == 0
    assert ram_bytes[-1] == ram_bytes[20]


def test_an_author_who_comes_again_is_himself() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    shop.add(shop.segment("gone"), [key])
    shop.index.drop_author("gone")
    while shop.index.tidy():
        pass
    shop.add(shop.segment("other"), [key])
    shop.add(shop.segment("gone", 2), [key])
    assert shop.index.find(ONE, key) == Place("gone", 2, 1)
    shop.clock.ns += REUSE_NS + 1
    shop.add(shop.segment("third"), [key])
    assert shop.index.segment(shop.index.segment_id("gone", 2)).author == "gone"
    assert shop.index.find(ONE, key) == Place("third", 1, 1)


def test_a_segment_that_is_heard_of_after_its_tombstone_stays_dead() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    shop.index.drop_segments("a", [1, 1 << 31])
    segment_id = shop.segment()
    shop.add(segment_id, [key])
    assert not shop.index.segment(segment_id).alive
    assert shop.index.find(ONE, key) is None


def test_a_purge_hides_older_segments_at_once_and_for_ever() -> None:
    shop = Shop()
    keys = some_keys(3)
    shop.add(shop.segment(number=1), keys[:1])
    shop.index.set_purge(ONE, 2)
    shop.index.set_purge(ONE, 1)
    shop.add(shop.segment(number=2, purge=1), keys[1:2])
    shop.add(shop.segment(number=3, purge=2), keys[2:])
    assert shop.found(keys) == [False, False, True]


def test_all_that_an_author_has_is_gone_with_him() -> None:
    shop = Shop()
    keys = some_keys(4)
    shop.add(shop.segment("a", 1), keys[:1])
    shop.add(shop.segment("a", 2), keys[1:2])
    shop.add(shop.segment("b", 1), keys[2:3])
    shop.index.drop_author("a")
    shop.index.drop_author("nobody")
    assert shop.found(keys) == [False, False, True, False]


def test_a_bad_place_is_not_found_until_the_block_is_stored_elsewhere() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    segment_id = shop.segment()
    shop.add(segment_id, [key])
    shop.index.mark_bad(ONE, key, Place("a", 1, 1 + PAGES), for_s=None)
    assert shop.found([key]) == [True], "another record's place says nothing of this one"
    shop.index.mark_bad(ONE, key, Place("a", 1, 1), for_s=None)
    shop.index.mark_bad(ONE, key, Place("a", 1, 1), for_s=1)
    shop.clock.ns += 10 * SECOND_NS
    shop.add(segment_id, [key])
    assert shop.found([key]) == [False], "told again of the same place, it is as bad as before"
    shop.add(segment_id, [key], first_record=4)
    assert shop.index.find(ONE, key) == Place("a", 1, 1 + 4 * PAGES)


def test_a_place_that_is_bad_for_a_while_is_found_again_when_its_time_is_over() -> None:
    shop = Shop()
    keys = some_keys(2)
    shop.add(shop.segment(), keys)
    for key in keys:
        shop.index.mark_bad(ONE, key, Place("a", 1, 1 + PAGES * keys.index(key)), for_s=30)
    assert shop.found(keys) == [False, False]
    assert shop.index.find(ONE, keys[0]) is None
    shop.add(shop.segment(number=2), keys[1:])
    shop.clock.ns += 30 * SECOND_NS
    assert shop.index.find(ONE, keys[0]) == Place("a", 1, 1)
    assert shop.index.find(ONE, keys[1]) == Place("a", 2, 1)
    assert shop.index.load_state().bad_for_a_while == 0


def test_an_entry_where_no_record_begins_is_ignored_and_counted() -> None:
    shop = Shop()
    keys = some_keys(3)
    pages = [2, 0, 1]
    blocks = [(key, bytes(32), page, 0) for key, page in zip(keys, pages, strict=True)]
    shop.index.add_blocks(shop.segment(), entries_of(blocks))
    shop.index.add_blocks(-1, entries_of(blocks))
    shop.index.add_blocks(99, entries_of(blocks))
    assert shop.found(keys) == [False, False, True]
    assert shop.index.load_state().entries_odd == 2


def test_many_small_parts_are_told_of_in_one_call_each_with_its_segments_numbers() -> None:
    shop = Shop()
    keys = some_keys(40)
    ids = [shop.segment(number=1), shop.segment(number=2), shop.segment(number=3, space=TWO)]
    parts = [(ids[at % 3], shop.entries([key], at)) for at, key in enumerate(keys)]
    shop.index.add_many([*parts, (-1, parts[0][1]), (99, parts[0][1])])
    assert shop.found(keys) == [at % 3 != 2 for at in range(40)]
    assert shop.found(keys, TWO) == [at % 3 == 2 for at in range(40)]
    assert shop.index.find(TWO, keys[5]) == Place("a", 3, 1 + 5 * PAGES)
    assert [shop.index.segment(number).keys for number in ids] == [14, 13, 13]
    shop.index.add_many([])


def test_use_and_pins_go_to_the_records_where_the_keys_lie() -> None:
    shop = Shop()
    keys = some_keys(4)
    segment_id = shop.segment()
    shop.add(segment_id, keys[:3])
    ids, records, found = shop.index.locate(ONE, b"".join(keys))
    shop.touches.touch(ids[found], records[found])
    assert shop.touches.heat(segment_id, 4).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(more, marks=pytest.mark.slow) for more in range(2, 20))])
def test_a_walk_finds_what_a_model_of_dictionaries_finds(seed: int) -> None:
    walk = Walk(Random(seed))
    for _ in range(250):
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


def test_what_is_dead_is_swept_and_its_number_used_again_only_much_later() -> None:
    shop = Shop()
    segment_id = shop.segment()
    shop.add(segment_id, some_keys(5000))
    shop.touches.touch(np.array([segment_id], np.uint32), np.array([3], np.uint32))
    kept = shop.segment(number=2)
    shop.add(kept, some_keys(10, seed=2))
    shop.index.drop_segments("a", [1])
    while shop.index.tidy():
        pass
    state = shop.index.load_state()
    assert (state.keys, state.keys_dead, state.segments) == (10, 0, 1)
    assert shop.index.segment_id("a", 1) is None
    assert not shop.touches.heat(segment_id).any()
    assert shop.segment(number=3) != segment_id
    shop.clock.ns += REUSE_NS
    assert shop.segment(number=4) == segment_id
    assert not shop.index.segment(shop.segment(number=1)).alive


def test_a_namespace_of_which_nothing_is_left_takes_no_ram() -> None:
    shop = Shop()
    shop.index.opened(TWO)
    shop.add(shop.segment(), some_keys(100))
    shop.index.drop_segments("a", [1])
    shop.index.tidy()
    shop.clock.ns += 2 * index_spaces.DWELL_NS
    assert shop.index.load_state().namespaces == 2
    while shop.index.tidy():
        pass
    state = shop.index.load_state()
    assert (state.namespaces, state.segments, state.namespaces_left_out) == (0, 0, 0)
    assert state.ram_bytes < 4096
    shop.add(shop.segment(number=2), some_keys(100))
    assert all(shop.found(some_keys(100)))


def test_beyond_the_limit_the_coldest_namespaces_are_left_out_until_they_are_wanted() -> None:
    shop = Shop(ram_bytes_max=950_000)
    keys = {space: some_keys(15_000, seed) for seed, space in enumerate([ONE, TWO, THREE])}
    for space in (ONE, TWO):
        shop.add(shop.segment(space=space, number=space[0]), keys[space])
    shop.index.opened(TWO)
    shop.clock.ns += 1
    shop.index.opened(THREE)
    shop.add(shop.segment(space=THREE, number=3), keys[THREE])
    state = shop.index.load_state()
    assert (state.namespaces, state.namespaces_left_out, state.namespaces_dropped) == (2, 1, 1)
    assert state.ram_bytes <= shop.ram_bytes_max
    assert [shop.index.wants(space) for space in keys] == [False, True, True]
    assert shop.segment(space=ONE, number=50) == -1
    assert not any(shop.found(keys[ONE][:10]))
    assert not shop.wanted, "what was just left out is not loaded again at once"
    shop.clock.ns += index_spaces.DWELL_NS
    assert not any(shop.found(keys[ONE][:10]))
    assert shop.wanted == [ONE]
    assert shop.index.wants(ONE)
    shop.add(shop.segment(space=ONE, number=49), keys[ONE])
    assert all(shop.found(keys[ONE], ONE))
    assert shop.index.wants(THREE)
    assert not shop.index.wants(TWO)


def test_the_coldest_namespace_is_left_out_itself_and_the_only_one_keeps_what_fits() -> None:
    shop = Shop(ram_bytes_max=600_000)
    keys = some_keys(15_000)
    shop.add(shop.segment(), keys)
    shop.index.opened(ONE)
    shop.clock.ns += 2 * index_spaces.DWELL_NS
    shop.add(shop.segment(space=TWO, number=2), keys)
    assert (shop.index.wants(ONE), shop.index.wants(TWO)) == (True, False)
    assert all(shop.found(keys))
    shop.add(shop.segment(), some_keys(60_000, seed=2), 15_000)
    state = shop.index.load_state()
    assert state.keys_refused > 10_000
    assert state.ram_bytes <= shop.ram_bytes_max
    assert all(shop.found(keys))


def test_a_walk_over_the_records_gives_what_can_be_put_into_another_index() -> None:
    shop, other = Shop(), Shop()
    keys = some_keys(40_000)
    shop.add(shop.segment(), keys)
    shop.index.mark_bad(ONE, keys[0], Place("a", 1, 1), for_s=None)
    other.segment("z", 1)
    segment_id = other.segment()
    cursor, walks = 0, 0
    while walks == 0 or cursor:
        tags, ids, records, cursor = shop.index.records(ONE, cursor)
        other.index.add_blocks(segment_id, entries_at(tags, 1 + PAGES * records))
        assert set(ids.tolist()) <= {shop.segment()}
        walks += 1
    assert walks > 2
    assert other.found(keys) == [False] + [True] * (len(keys) - 1)
    assert other.index.find(ONE, keys[77]) == Place("a", 1, 1 + 77 * PAGES)
    assert len(shop.index.records(THREE, 0)[0]) == 0


def test_look_ups_go_on_while_another_thread_adds_and_a_third_sweeps() -> None:
    shop = Shop()
    keys = some_keys(30_000)
    joined = b"".join(keys[:500])
    shop.add(shop.segment(number=99), keys[:500])
    stop = threading.Event()

    def add() -> None:
        for number in range(1, 60):
            shop.add(shop.segment(number=number), keys[number * 500 : number * 500 + 500])
            if number > 10:
                shop.index.drop_segments("a", [number - 10])
        stop.set()

    def sweep() -> None:
        while not stop.is_set():
            shop.index.tidy()

    threads = [threading.Thread(target=run) for run in (add, sweep)]
    for thread in threads:
        thread.start()
    looks = 0
    while not stop.is_set():
        assert shop.index.locate(ONE, joined)[2].all()
        looks += 1
    for thread in threads:
        thread.join(20)
    assert looks
    assert shop.found([keys[50 * 500], keys[45 * 500]]) == [True, False]


def test_memory_of_large_tables_is_mapped_and_given_back_from_the_front() -> None:
    memory = MappedMemory()
    small, large = memory.words(100), memory.words(1 << 21)
    assert (small.ctypes.data % 64, large.ctypes.data % (2 << 20)) == (0, 0) or large.ctypes.data % (2 << 20) == 0
    large[:] = 7
    assert memory.release(small, 100) == 0
    assert memory.release(large, (1 << 18) + 5) == 1 << 18
    assert not large[: 1 << 18].any()
    assert (large[1 << 18 :] == 7).all()
