"""The trie of stored blocks by the links to their parents: pure, whole columns at a time.

A block is known by the first 8 bytes of its key, its parent by the first 8 of its own. A link counts only between depths that
follow on each other, so no damage can make a circle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tags = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Columns over blocks, each block once, sorted by tag. `parent`: the parent's place in these columns, -1 for none stored.

    `top`: the place of the first block of its chain that is stored; `run`: of the first block of the stretch without a branch
    that it lies in.
    """

    tags: Tags
    depths: Ints
    parent: Ints
    children: Ints
    top: Ints
    run: Ints

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """Blocks that begin a prompt."""
        found: npt.NDArray[np.bool_] = self.depths == 0
        return found

    @property
    def is_orphan(self) -> npt.NDArray[np.bool_]:
        """Blocks whose parent is not stored, though they have one: no look-up gets to them, or to what hangs below."""
        return (self.parent < 0) & (self.depths > 0)

    @property
    def is_leaf(self) -> npt.NDArray[np.bool_]:
        """Blocks that end a chain."""
        found: npt.NDArray[np.bool_] = self.children == 0
        return found

    @property
    def is_reachable(self) -> npt.NDArray[np.bool_]:
        """Blocks whose whole prefix is stored."""
        found: npt.NDArray[np.bool_] = self.depths[self.top] == 0
        return found

    def lengths(self) -> Ints:
        """Stored blocks from the top of its chain to each block, itself among them."""
        return self.depths - self.depths[self.top] + 1

    def per_depth(self) -> tuple[Ints, Ints]:
        """Depths at which there are blocks, and how many."""
        depths, counts = np.unique(self.depths, return_counts=True)
        return depths, counts.astype(np.int64)

    def longest(self, count: int) -> Ints:
        """Places of the ends of the longest chains, the longest first."""
        ends = np.flatnonzero(self.is_leaf)
        lengths = self.lengths()[ends]
        if len(ends) > count:
            some = np.argpartition(-lengths, count - 1)[:count]
            ends, lengths = ends[some], lengths[some]
        found: Ints = ends[np.lexsort((self.tags[ends], -lengths))]
        return found

    def runs(self) -> tuple[Ints, Ints, Ints]:
        """Stretches without a branch: the place of each one's first block, how many blocks it has, and in which stretch the
        first one's parent lies, by that one's first block, -1 for none."""
        firsts, lengths = np.unique(self.run, return_counts=True)
        above = self.parent[firsts]
        return firsts, lengths.astype(np.int64), np.where(above >= 0, self.run[above], -1)


def build(tags: Tags, parents: Tags, depths: npt.NDArray[np.uint32]) -> Trie:
    """Of blocks in any order, some perhaps more than once. `parents`: first 8 bytes of the parent's key, 0 for unknown.

    >>> trie = build(np.array([7, 5, 9], np.uint64), np.array([0, 7, 7], np.uint64), np.array([0, 1, 1], np.uint32))
    >>> trie.tags.tolist(), trie.parent.tolist(), trie.children.tolist(), trie.lengths().tolist()
    ([5, 7, 9], [1, -1, 1], [0, 2, 0], [2, 1, 2])
    """
    # Of copies that one counts whose parent is known.
    order = np.lexsort((parents == 0, tags))
    tags, parents, levels = tags[order], parents[order], depths[order].astype(np.int64)
    once = np.ones(len(tags), np.bool_)
    once[1:] = tags[1:] != tags[:-1]
    tags, parents, levels = tags[once], parents[once], levels[once]
    parent = _places_of(tags, parents, levels)
    children = np.bincount(parent[parent >= 0], minlength=len(tags)).astype(np.int64)
    own = np.arange(len(tags), dtype=np.int64)
    top = _ends(np.where(parent < 0, own, parent))
    only_child = (parent >= 0) & (children[parent] == 1) if len(tags) else np.zeros(0, np.bool_)
    return Trie(tags, levels, parent, children, top, _ends(np.where(only_child, parent, own)))


def _places_of(tags: Tags, parents: Tags, levels: Ints) -> Ints:
    if not len(tags):
        return np.zeros(0, np.int64)
    at = np.minimum(np.searchsorted(tags, parents), len(tags) - 1).astype(np.int64)
    linked = (levels > 0) & (tags[at] == parents) & (levels[at] == levels - 1)
    found: Ints = np.where(linked, at, -1)
    return found


def _ends(step: Ints) -> Ints:
    """Where each gets to by going on until a step leads nowhere else; twice as far with each round."""
    while True:
        further = step[step]
        if np.array_equal(further, step):
            return step
        step = further
