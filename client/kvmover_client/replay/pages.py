"""An engine's KV memory: which pages are free, and the rows of each layer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvmover_client.replay.kv import KvPattern, Mismatch, Rows, Span
from kvmover_client.replay.mixing import Words

SCRUB_BYTE = 0xEE


class OutOfPages(Exception):
    """More pages asked for than are free."""


class PageAllocator:
    """Page numbers 0 to total - 1, each lent once at a time.

    The first ones come in a shuffled order and later ones in that of their return, so that the pages of a request lie
    scattered, as they do in an engine that has run for a while.
    """

    def __init__(self, total: int, *, seed: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._lent: set[int] = set()
        random.Random(seed).shuffle(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """All or nothing. Raises `OutOfPages`."""
        if count > len(self._free):
            raise OutOfPages(f"asked for {count} pages, {len(self._free)} of {self.total} are free")
        kept = len(self._free) - count
        taken = tuple(self._free[kept:])
        del self._free[kept:]
        self._lent.update(taken)
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        assert self._lent.issuperset(pages), f"pages {sorted(set(pages) - self._lent)} were not lent"
        self._lent.difference_update(pages)
        self._free.extend(pages)
        assert len(self._free) + len(self._lent) == self.total, (
            f"{len(self._free)} free + {len(self._lent)} lent of {self.total} pages: a page was given back twice"
        )


class PagedKv:
    """The pages of one engine and what must be in them. `layers` are views into memory that the engine owns."""

    def __init__(self, layers: Sequence[Rows], allocator: PageAllocator, pattern: KvPattern) -> None:
        assert len(layers) == pattern.layers, f"{len(layers)} views for {pattern.layers} layers"
        self.allocator = allocator
        self.pattern = pattern
        self._layers: Sequence[Rows] = layers

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    def forget_memory(self) -> None:
        """Drops the views, so that the memory can be unmapped."""
        self._layers = ()

    def scrub(self, pages: Sequence[int]) -> None:
        """Overwrites pages in all layers: what an earlier turn left there can't pass for what this one was given."""
        tokens = self.pattern.page_tokens
        for rows in self._layers:
            for page in pages:
                rows[page * tokens : (page + 1) * tokens] = SCRUB_BYTE

    def fill(self, layers: range, where: Sequence[Span], chain: Words) -> None:
        for layer in layers:
            self.pattern.fill(self._layers[layer], layer, where, chain)

    def verify(self, layer: int, where: Sequence[Span], chain: Words) -> Mismatch:
        return self.pattern.verify(self._layers[layer], layer, where, chain)
