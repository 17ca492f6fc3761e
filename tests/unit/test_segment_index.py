"""The RAM index: where a key is found when segments, tombstones, purges and bad places are told of."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.index_segments import REUSE_NS
from kvmoverd.core.store.log_pages import ENTRY, entries_of
from kvmoverd.core.store.places import Place
from tests.unit.index_kit import ONE, PAGES, SECOND_NS, THREE, TWO, Shop, some_keys


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
