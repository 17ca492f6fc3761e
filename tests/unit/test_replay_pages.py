"""The pages of a replay engine: lent once, scattered, scrubbed, given back."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvmover_client.replay.kv import KvPattern, Mismatch, spans
from kvmover_client.replay.pages import SCRUB_BYTE, OutOfPages, PageAllocator, PagedKv
from kvmover_client.replay.request import Request, StoredBlocks
from kvmover_client.replay.tokens import chain


def test_no_page_is_lent_twice_and_none_is_lost() -> None:
    allocator = PageAllocator(50, seed=1)
    chance = random.Random(2)
    held: list[tuple[int, ...]] = []
    for _ in range(500):
        if held and chance.random() < 0.5:
            allocator.give_back(held.pop(chance.randrange(len(held))))
        elif (count := chance.randint(1, 12)) <= allocator.free:
            held.append(allocator.take(count))
        lent = [page for pages in held for page in pages]
        assert len(lent) == len(set(lent)) == 50 - allocator.free
        assert set(lent) <= set(range(50))


def test_too_many_pages_are_refused_whole() -> None:
    allocator = PageAllocator(10, seed=1)
    allocator.take(7)
    with pytest.raises(OutOfPages, match="asked for 4 pages, 3 of 10 are free"):
        allocator.take(4)
    assert allocator.free == 3
    assert len(allocator.take(3)) == 3
    assert allocator.take(0) == ()


def test_pages_that_are_not_lent_can_not_be_given_back() -> None:
    allocator = PageAllocator(10, seed=1)
    pages = allocator.take(4)
    allocator.give_back(pages)
    with pytest.raises(AssertionError, match="were not lent"):
        allocator.give_back(pages)
    again = allocator.take(2)
    with pytest.raises(AssertionError, match="given back twice"):
        allocator.give_back((again[0], again[0]))


def test_pages_lie_scattered_and_as_the_seed_says() -> None:
    first, again, other = (PageAllocator(100, seed=seed).take(100) for seed in (1, 1, 2))
    assert first == again != other
    assert sum(b == a + 1 for a, b in itertools.pairwise(first)) < 10


def test_a_scrubbed_page_holds_nothing_of_before_and_its_neighbours_all() -> None:
    pattern = KvPattern(layers=2, token_bytes=24, page_tokens=4, model="m")
    layers = [np.zeros((8 * 4, 24), dtype=np.uint8) for _ in range(2)]
    kv = PagedKv(layers, PageAllocator(8, seed=0), pattern)
    words = chain(np.arange(12, dtype=np.uint32))
    where = spans((1, 2, 5), 4, 0, 12)
    kv.fill(range(2), where, words)
    kv.scrub([2])
    for layer, rows in enumerate(layers):
        assert (rows[8:12] == SCRUB_BYTE).all()
        found = kv.verify(layer, where, words)
        assert found.token == 4
        assert found.wrong_bytes > 80
        assert kv.verify(layer, spans((1, 2, 5), 4, 0, 4), words) == Mismatch()
        assert kv.verify(layer, spans((1, 2, 5), 4, 8, 12), words) == Mismatch()


@pytest.mark.parametrize(
    ("prompt", "reply", "blocks", "tail", "prompt_pages", "all_pages", "hit_max"),
    [
        (130, 10, 2, 2, 3, 3, 2),
        (128, 10, 2, 0, 2, 3, 1),
        (129, 0, 2, 1, 3, 3, 2),
        (1, 64, 0, 1, 1, 2, 0),
        (64, 0, 1, 0, 1, 1, 0),
    ],
)
def test_a_request_counts_its_blocks(
    prompt: int, reply: int, blocks: int, tail: int, prompt_pages: int, all_pages: int, hit_max: int
) -> None:
    request = Request("r", (), chain(np.zeros(prompt + reply, dtype=np.uint32)), prompt, 64)
    assert (request.prompt_blocks, request.tail_tokens) == (blocks, tail)
    assert (request.prompt_pages, request.all_pages) == (prompt_pages, all_pages)
    assert request.hit_blocks_max == hit_max


def test_the_oracle_expects_the_leading_blocks_that_were_stored() -> None:
    stored = StoredBlocks()
    keys = [bytes([number]) * 32 for number in range(5)]
    assert stored.prefix_blocks(keys) == 0
    stored.add([keys[0], keys[1], keys[3]])
    assert stored.prefix_blocks(keys) == 2
    assert stored.prefix_blocks(keys[:1]) == 1
    stored.add(keys)
    assert (stored.prefix_blocks(keys), len(stored)) == (5, 5)
