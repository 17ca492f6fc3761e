"""The trie by parent links: against a plain walk over dictionaries, and at the edges."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvmoverd.core.store.trie import Trie, build

Block = tuple[int, int, int]


def trie_of(blocks: list[Block]) -> Trie:
    tags, parents, depths = zip(*blocks, strict=True) if blocks else ((), (), ())
    return build(np.array(tags, np.uint64), np.array(parents, np.uint64), np.array(depths, np.uint32))


def random_blocks(seed: int, count: int) -> list[Block]:
    """A forest; some blocks are taken away, so that others are orphans."""
    rng = np.random.default_rng(seed)
    blocks: list[Block] = []
    for number in range(count):
        above = blocks[rng.integers(len(blocks))] if blocks and rng.random() < 0.9 else None
        blocks.append((1000 + number, above[0], above[2] + 1) if above else (1000 + number, 0, 0))
    kept = [block for block in blocks if rng.random() < 0.9]
    return [kept[at] for at in rng.permutation(len(kept))]


@pytest.mark.parametrize("seed", range(20))
def test_columns_say_what_a_walk_over_dictionaries_says(seed: int) -> None:
    blocks = random_blocks(seed, 300)
    trie = trie_of(blocks + blocks[:20])
    parents = {tag: parent for tag, parent, _ in blocks}
    depths = {tag: depth for tag, _, depth in blocks}
    children: dict[int, list[int]] = {tag: [] for tag in parents}
    for tag, parent in parents.items():
        if parent in children:
            children[parent].append(tag)

    def chain(tag: int) -> list[int]:
        found = [tag]
        while parents[found[-1]] in parents:
            found.append(parents[found[-1]])
        return found

    tags = trie.tags.tolist()
    assert tags == sorted(parents)
    assert trie.children.tolist() == [len(children[tag]) for tag in tags]
    assert trie.lengths().tolist() == [len(chain(tag)) for tag in tags]
    assert trie.tags[trie.top].tolist() == [chain(tag)[-1] for tag in tags]
    assert trie.is_orphan.tolist() == [depths[tag] > 0 and parents[tag] not in parents for tag in tags]
    assert trie.is_reachable.tolist() == [depths[chain(tag)[-1]] == 0 for tag in tags]
    firsts, lengths, above = trie.runs()
    assert lengths.sum() == len(tags)
    for first, length, over in zip(firsts.tolist(), lengths.tolist(), above.tolist(), strict=True):
        tag, walked = tags[first], 1
        parent = parents[tag]
        assert (over < 0) == (parent not in parents) and (over < 0 or len(children[parent]) > 1)
        while len(children[tag]) == 1:
            tag, walked = children[tag][0], walked + 1
        assert walked == length
    ends = [len(chain(tag)) for tag in tags if not children[tag]]
    assert [trie.lengths()[at] for at in trie.longest(5)] == sorted(ends, reverse=True)[:5]
    found, counts = trie.per_depth()
    every = list(depths.values())
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == {
        depth: every.count(depth) for depth in set(every)
    }


def test_nothing_stored_is_an_empty_trie() -> None:
    trie = trie_of([])
    assert len(trie.tags) == len(trie.longest(3)) == len(trie.runs()[0]) == len(trie.per_depth()[0]) == 0


def test_links_between_depths_that_do_not_follow_are_none_so_there_are_no_circles() -> None:
    trie = trie_of([(1, 2, 1), (2, 1, 1), (3, 3, 1), (4, 0, 0), (5, 4, 2)])
    assert trie.parent.tolist() == [-1] * 5 and trie.is_orphan.tolist() == [True, True, True, False, True]


def test_of_copies_that_one_counts_whose_parent_is_known() -> None:
    trie = trie_of([(1, 0, 0), (2, 0, 1), (2, 1, 1)])
    assert trie.tags.tolist() == [1, 2] and trie.parent.tolist() == [-1, 0]


@pytest.mark.slow
def test_a_million_blocks_take_seconds() -> None:
    count = 1_000_000
    rng = np.random.default_rng(1)
    tags = rng.integers(1, 1 << 63, count, dtype=np.uint64)
    depths = np.arange(count) % 500
    parents = np.where(depths > 0, np.roll(tags, 1), 0).astype(np.uint64)
    order = rng.permutation(count)
    began_s = time.perf_counter()
    trie = build(tags[order], parents[order], depths[order].astype(np.uint32))
    assert len(trie.runs()[0]) == trie.is_leaf.sum() == 2000 and trie.lengths().max() == 500
    assert time.perf_counter() - began_s < 10.0
