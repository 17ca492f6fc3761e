"""Prefix index: what is known to be stored, within a limit."""

from __future__ import annotations

from itertools import takewhile
from random import Random

import pytest
from markers import slow_only

from kvmoverd.core.index import PrefixIndex

ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def index_of(keys_max: int, *known: tuple[bytes, range]) -> PrefixIndex:
    index = PrefixIndex(keys_max=keys_max)
    for fingerprint, numbers in known:
        for number in numbers:
            index.add(fingerprint, [key(number)])
    return index


def prefix(index: PrefixIndex, fingerprint: bytes, numbers: range) -> int:
    """Leading keys that are known."""
    return sum(takewhile(bool, index.known(fingerprint, [key(number) for number in numbers])))


def test_the_prefix_ends_at_the_first_key_that_is_not_known() -> None:
    index = index_of(100, (ONE, range(3)), (ONE, range(4, 6)))
    assert prefix(index, ONE, range(6)) == 3
    assert prefix(index, ONE, range(2)) == 2
    assert prefix(index, ONE, range(4, 9)) == 2
    assert prefix(index, ONE, range(0)) == 0


def test_namespaces_do_not_know_each_others_keys() -> None:
    index = index_of(100, (ONE, range(3)))
    assert prefix(index, TWO, range(3)) == 0
    index.remove(TWO, key(0))
    assert prefix(index, ONE, range(3)) == 3


def test_a_key_that_is_removed_cuts_the_prefix() -> None:
    index = index_of(100, (ONE, range(5)))
    index.remove(ONE, key(2))
    index.remove(ONE, key(2))
    assert (prefix(index, ONE, range(5)), len(index)) == (2, 4)


def test_a_namespace_is_dropped_whole() -> None:
    index = index_of(100, (ONE, range(5)), (TWO, range(2)))
    index.drop_namespace(ONE)
    index.drop_namespace(ONE)
    assert (prefix(index, ONE, range(5)), prefix(index, TWO, range(2)), len(index)) == (0, 2, 2)


def test_a_key_added_twice_counts_once() -> None:
    assert len(index_of(100, (ONE, range(5)), (ONE, range(5)))) == 5


def test_the_namespace_used_longest_ago_is_forgotten_first() -> None:
    index = index_of(10, (ONE, range(4)), (TWO, range(4)))
    assert prefix(index, ONE, range(4)) == 4
    for number in range(3):
        index.add(THREE, [key(number)])
    assert (prefix(index, ONE, range(4)), prefix(index, TWO, range(4)), len(index)) == (4, 0, 7)


def test_a_namespace_that_would_fill_the_index_alone_keeps_its_younger_keys() -> None:
    index = index_of(10, (ONE, range(1000)))
    assert 5 <= len(index) <= 10
    assert prefix(index, ONE, range(995, 1000)) == 5


def test_an_index_too_small_to_be_one_stops_its_builder() -> None:
    with pytest.raises(AssertionError, match="keys_max is 1, must be 2 or more"):
        PrefixIndex(keys_max=1)


@pytest.mark.parametrize("seed", [*range(3), *slow_only(range(3, 10))])
def test_it_knows_nothing_that_was_not_added_and_stays_within_its_limit(seed: int) -> None:
    random = Random(seed)
    keys_max = random.choice([2, 3, 20, 61])
    index, stored = PrefixIndex(keys_max=keys_max), set[tuple[bytes, int]]()
    for step in range(2000):
        fingerprint, number = random.choice([ONE, TWO, THREE]), random.randrange(40)
        match random.randrange(12):
            case 0:
                index.remove(fingerprint, key(number))
                stored.discard((fingerprint, number))
            case 1 if not random.randrange(5):
                index.drop_namespace(fingerprint)
                stored = {known for known in stored if known[0] != fingerprint}
            case _:
                index.add(fingerprint, [key(number)])
                stored.add((fingerprint, number))
                assert prefix(index, fingerprint, range(number, number + 1)) == 1
        if step % 5:
            continue
        found = {
            (space, number)
            for space in (ONE, TWO, THREE)
            for number in range(40)
            if prefix(index, space, range(number, number + 1))
        }
        assert found <= stored
        assert len(found) == len(index) <= keys_max
