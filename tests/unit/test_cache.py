"""Block cache: one read per block however many ask, references, eviction of what nobody holds."""

from __future__ import annotations

import pytest

from kvmoverd.core.cache import BlockCache, Key, Wanted
from kvmoverd.core.errors import PoolExhausted
from kvmoverd.core.slots import SlotPool, SlotState

FINGERPRINT = b"f" * 32
ALICE, BOB, CAROL = 1, 2, 3


def cache_of(slots: int) -> BlockCache:
    pool = SlotPool()
    pool.grow(range(slots))
    return BlockCache(pool)


def keys(names: str, fingerprint: bytes = FINGERPRINT) -> list[Key]:
    return [(fingerprint, name.encode() * 32) for name in names]


def read(cache: BlockCache, slot: int, *, ok: bool = True) -> list[tuple[int, list[int]]]:
    """The device has filled the slot, or failed to."""
    return cache.read_done(slot, cache.slots.generation(slot), ok=ok)


def fill(cache: BlockCache, names: str, waiter: int) -> Wanted:
    wanted = cache.want(keys(names), waiter)
    for index in wanted.to_read:
        read(cache, wanted.slots[index])
    return wanted


def known(cache: BlockCache, names: str) -> str:
    return "".join(name for name, key in zip(names, keys(names), strict=True) if cache.is_clean(key))


def count(cache: BlockCache, state: str) -> int:
    return cache.slots.counts()[state]


def test_blocks_not_there_get_slots_to_be_read_and_equal_keys_share_one() -> None:
    cache = cache_of(4)
    wanted = cache.want(keys("abab"), ALICE)
    assert wanted.slots[0] == wanted.slots[2] != wanted.slots[1] == wanted.slots[3]
    assert (wanted.ready, wanted.to_read) == ((), (0, 1))
    assert count(cache, "filling") == 2


def test_no_keys_take_nothing() -> None:
    cache = cache_of(0)
    assert cache.want([], ALICE) == Wanted((), (), ())
    assert cache.drop(ALICE) == []


def test_a_block_that_is_being_read_is_joined_and_each_waiter_is_told_once_with_its_indexes() -> None:
    cache = cache_of(4)
    first = cache.want(keys("ab"), ALICE)
    second = cache.want(keys("xaa"), BOB)
    assert second.slots[1] == second.slots[2] == first.slots[0]
    assert second.to_read == (0,)
    assert read(cache, first.slots[0]) == [(ALICE, [0]), (BOB, [1, 2])]
    assert read(cache, first.slots[0]) == []


def test_a_whole_block_is_shared_and_stays_clean_when_the_last_one_lets_go() -> None:
    cache = cache_of(4)
    fill(cache, "a", ALICE)
    wanted = cache.want(keys("ba"), BOB)
    assert (wanted.ready, wanted.to_read) == ((1,), (0,))
    assert cache.drop(ALICE) == []
    assert count(cache, "clean") == 0
    cache.drop(BOB)
    assert known(cache, "ab") == "a"
    assert count(cache, "clean") == 1


def test_a_failed_read_is_told_to_every_waiter_and_forgotten() -> None:
    cache = cache_of(2)
    wanted = cache.want(keys("a"), ALICE)
    cache.want(keys("a"), BOB)
    assert read(cache, wanted.slots[0], ok=False) == [(ALICE, [0]), (BOB, [0])]
    assert count(cache, "free") == 2
    assert cache.want(keys("a"), CAROL).to_read == (0,)
    assert cache.drop(ALICE) == []


def test_a_read_that_nobody_waits_for_any_more_can_be_taken_back_before_it_began() -> None:
    cache = cache_of(2)
    wanted = cache.want(keys("ab"), ALICE)
    cache.want(keys("a"), BOB)
    assert cache.drop(ALICE) == [wanted.slots[1]]
    cache.read_dropped(wanted.slots[1])
    assert (count(cache, "free"), count(cache, "filling")) == (1, 1)
    with pytest.raises(AssertionError, match=f"slot {wanted.slots[0]} is waited for"):
        cache.read_dropped(wanted.slots[0])


def test_a_read_that_had_begun_ends_as_clean_when_its_waiters_have_gone() -> None:
    cache = cache_of(1)
    [slot] = cache.want(keys("a"), ALICE).slots
    cache.slots.device_begin(slot)
    assert cache.drop(ALICE) == [slot]
    cache.device_end(slot)
    assert read(cache, slot) == []
    assert known(cache, "a") == "a"
    assert count(cache, "clean") == 1


def test_a_late_completion_of_an_earlier_use_changes_nothing() -> None:
    cache = cache_of(1)
    [slot] = cache.want(keys("a"), ALICE).slots
    stale = cache.slots.generation(slot)
    cache.drop(ALICE)
    cache.read_dropped(slot)
    assert cache.want(keys("b"), BOB).slots == (slot,)
    assert cache.read_done(slot, stale, ok=True) == []
    assert known(cache, "ab") == ""
    assert read(cache, slot) == [(BOB, [0])]


def test_a_request_takes_all_slots_or_none() -> None:
    cache = cache_of(3)
    fill(cache, "a", ALICE)
    fill(cache, "c", BOB)
    cache.drop(BOB)
    with pytest.raises(PoolExhausted, match="asked for 3 slots, 2 can be had"):
        cache.want(keys("xyz"), CAROL)
    assert known(cache, "ac") == "ac"
    with pytest.raises(PoolExhausted, match="asked for 2 slots, 1 can be had"):
        cache.want(keys("cxy"), CAROL)
    assert known(cache, "ac") == "ac"
    assert count(cache, "clean") == 1


def test_the_blocks_used_longest_ago_are_evicted_and_never_one_that_is_asked_for() -> None:
    cache = cache_of(3)
    for waiter, name in enumerate("abc"):
        fill(cache, name, waiter)
        cache.drop(waiter)
    wanted = cache.want(keys("xa"), ALICE)
    assert wanted.ready == (1,)
    assert known(cache, "abc") == "ac"
    cache.drop(ALICE)
    cache.want(keys("y"), BOB)
    assert known(cache, "abc") == "a"


def test_a_chain_is_evicted_from_its_end() -> None:
    cache = cache_of(4)
    fill(cache, "abcd", ALICE)
    cache.drop(ALICE)
    fill(cache, "x", BOB)
    assert known(cache, "abcd") == "abc"
    fill(cache, "y", BOB)
    assert known(cache, "abcd") == "ab"


def test_a_block_that_a_device_still_reads_is_not_evicted_though_nobody_holds_it() -> None:
    cache = cache_of(2)
    [slot] = fill(cache, "a", ALICE).slots
    cache.slots.device_begin(slot)
    cache.drop(ALICE)
    with pytest.raises(PoolExhausted, match="asked for 2 slots, 1 can be had"):
        cache.want(keys("xy"), BOB)
    assert cache.want(keys("a"), BOB).ready == (0,)
    cache.drop(BOB)
    cache.device_end(slot)
    assert count(cache, "clean") == 1
    assert cache.want(keys("xy"), BOB).to_read == (0, 1)


def test_private_slots_are_held_by_their_owner_and_free_afterwards() -> None:
    cache = cache_of(3)
    fill(cache, "a", ALICE)
    cache.drop(ALICE)
    slots = cache.private(3, BOB)
    assert len(set(slots)) == 3
    assert count(cache, "leased") == 3
    with pytest.raises(PoolExhausted):
        cache.private(1, CAROL)
    assert cache.drop(BOB) == []
    assert count(cache, "free") == 3


def test_private_slots_under_a_device_are_quarantined_until_it_lets_go() -> None:
    cache = cache_of(1)
    [slot] = cache.private(1, ALICE)
    cache.slots.device_begin(slot)
    cache.drop(ALICE)
    assert count(cache, "quarantined") == 1
    cache.publish(slot, keys("a")[0])
    cache.device_end(slot)
    assert count(cache, "free") == 1
    assert known(cache, "a") == ""


def test_a_private_block_that_became_durable_is_shared_and_stays_clean() -> None:
    cache = cache_of(2)
    slots = cache.private(2, ALICE)
    cache.publish(slots[0], keys("a")[0])
    assert cache.want(keys("a"), BOB).slots == (slots[0],)
    cache.drop(ALICE)
    cache.drop(BOB)
    assert (count(cache, "clean"), count(cache, "free")) == (1, 1)


def test_a_key_stays_with_the_slot_that_has_it() -> None:
    cache = cache_of(2)
    [held] = fill(cache, "a", ALICE).slots
    [slot] = cache.private(1, BOB)
    cache.publish(slot, keys("a")[0])
    cache.drop(BOB)
    assert count(cache, "free") == 1
    assert cache.want(keys("a"), BOB).slots == (held,)


def test_a_slot_keeps_the_first_key_it_was_published_under() -> None:
    cache = cache_of(1)
    [slot] = cache.private(1, ALICE)
    cache.publish(slot, keys("a")[0])
    cache.publish(slot, keys("b")[0])
    assert known(cache, "ab") == "a"


def test_a_forgotten_namespace_is_not_found_and_its_blocks_in_use_live_until_given_back() -> None:
    cache = cache_of(6)
    other = keys("k", b"g" * 32)
    fill(cache, "ab", ALICE)
    fill(cache, "c", BOB)
    cache.drop(BOB)
    reading = cache.want(keys("d"), CAROL)
    [kept] = cache.want(other, CAROL).slots
    read(cache, kept)
    cache.forget_namespace(FINGERPRINT)
    assert known(cache, "abcd") == ""
    assert cache.is_clean(other[0])
    assert (count(cache, "leased"), count(cache, "filling"), count(cache, "free")) == (3, 1, 2)
    assert cache.want(keys("a"), BOB).to_read == (0,)
    assert read(cache, reading.slots[0]) == [(CAROL, [0])]
    for waiter in (ALICE, CAROL):
        cache.drop(waiter)
    assert (count(cache, "clean"), count(cache, "filling"), count(cache, "free")) == (1, 1, 4)


def test_a_read_of_a_forgotten_namespace_that_nobody_waits_for_frees_its_slot() -> None:
    cache = cache_of(1)
    [slot] = cache.want(keys("a"), ALICE).slots
    cache.drop(ALICE)
    cache.forget_namespace(FINGERPRINT)
    read(cache, slot)
    assert count(cache, "free") == 1


def test_slots_are_given_up_only_when_none_of_them_is_in_use() -> None:
    cache = cache_of(4)
    fill(cache, "a", ALICE)
    cache.drop(ALICE)
    [held] = cache.private(1, BOB)
    assert not cache.shrink(range(4))
    assert known(cache, "a") == "a"
    cache.drop(BOB)
    assert cache.slots.state(held) is SlotState.FREE
    assert cache.shrink(range(4))
    assert cache.slots.counts()["total"] == 0
    assert known(cache, "a") == ""


def test_who_is_refused_leaves_nothing_behind() -> None:
    cache = cache_of(2)
    fill(cache, "ab", ALICE)
    for waiter in range(100, 110):
        with pytest.raises(PoolExhausted):
            cache.want(keys("c"), waiter)
    assert list(cache._held) == [ALICE]
