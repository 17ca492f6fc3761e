"""Hints: blocks that engines expect to want. Which is to be read next, what is kept for them, and what has become of it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmoverd.core.cache import Key
from kvmoverd.core.manifest import Namespace
from kvmoverd.node.counts import HintCounts

GRACE_NS = 30_000_000_000
"""What was read for a hint is kept from other hints so long beyond the time when it was expected to be wanted."""


@dataclass(order=True, slots=True)
class Hint:
    """Blocks of one chain that are still to be read, first block first. The hint that is due first is the smallest."""

    due_ns: int
    number: int
    session_id: str = field(compare=False)
    namespace: Namespace = field(compare=False)
    left: deque[bytes] = field(compare=False)

    @property
    def name(self) -> bytes:
        return self.namespace.fingerprint


@dataclass(slots=True)
class _Kept:
    """A block that takes of the budget: it is to be read, or `there` and not wanted yet; `read`: it was read for a hint."""

    session_id: str
    size_bytes: int
    until_ns: int
    there: bool = False
    read: bool = False


class HintBook:
    """All blocks of hints, in `limit_bytes` together. Of a block in several hints the last session and the latest time count."""

    def __init__(self, limit_bytes: int, counts: HintCounts) -> None:
        self._limit_bytes = limit_bytes
        self._counts = counts
        self._hints: list[Hint] = []
        self._kept: dict[Key, _Kept] = {}
        self._numbers = 0

    def __len__(self) -> int:
        """Hints that have blocks to be read."""
        return len(self._hints)

    def __contains__(self, key: object) -> bool:
        """Is the block kept for a hint?"""
        return key in self._kept

    def add(self, session_id: str, namespace: Namespace, keys: Sequence[bytes], due_ns: int) -> int:
        """Takes leading blocks on, as far as there is room; how many."""
        size_bytes, taken = namespace.layout.record_bytes, 0
        for key in keys:
            name = namespace.fingerprint, key
            kept = self._kept.get(name)
            if kept is not None:
                kept.session_id, kept.until_ns = session_id, max(kept.until_ns, due_ns + GRACE_NS)
            elif self._counts.taken_bytes + size_bytes <= self._limit_bytes:
                self._kept[name] = _Kept(session_id, size_bytes, due_ns + GRACE_NS)
                self._counts.taken_bytes += size_bytes
            else:
                break
            taken += 1
        if taken:
            self._numbers += 1
            heapq.heappush(self._hints, Hint(due_ns, self._numbers, session_id, namespace, deque(keys[:taken])))
        return taken

    def next(self) -> tuple[Hint, bytes] | None:
        """The block that is due first of those that were not read, or wanted, yet; it is in its hint no longer."""
        while self._hints:
            hint = self._hints[0]
            while hint.left:
                key = hint.left.popleft()
                kept = self._kept.get((hint.name, key))
                if kept is not None and not kept.there:
                    return hint, key
            heapq.heappop(self._hints)
        return None

    def is_there(self, key: Key) -> None:
        """It is in the pool, or on its way there for somebody."""
        kept = self._kept.get(key)
        if kept is not None:
            kept.there = True

    def was_read(self, key: Key) -> None:
        """It was read for a hint."""
        self._counts.read_blocks += 1
        kept = self._kept.get(key)
        if kept is not None:
            kept.there = kept.read = True

    def give_up(self, hint: Hint, key: bytes) -> None:
        """The block can't be had, so those behind it are of no use."""
        for left in (key, *hint.left):
            self._refuse((hint.name, left))
        hint.left.clear()

    def _refuse(self, key: Key) -> None:
        kept = self._kept.get(key)
        if kept is not None and not kept.there:
            self._counts.refused_blocks += 1
            self._drop(key)

    def wanted(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """A request asks for these: they are its own affair now."""
        if not self._kept:
            return
        for key in keys:
            kept = self._kept.get((namespace.fingerprint, key))
            if kept is not None:
                self._counts.used_blocks += kept.read
                self._drop((namespace.fingerprint, key))

    def expire(self, now_ns: int) -> None:
        """What was not wanted long after it was expected to be makes room for other hints."""
        for key in [key for key, kept in self._kept.items() if kept.until_ns <= now_ns]:
            self._counts.expired_blocks += self._kept[key].read
            self._counts.refused_blocks += not self._kept[key].there
            self._drop(key)

    def forget_session(self, session_id: str) -> None:
        self._hints = [hint for hint in self._hints if hint.session_id != session_id]
        heapq.heapify(self._hints)
        for key in [key for key, kept in self._kept.items() if kept.session_id == session_id]:
            self._drop(key)

    def forget_namespace(self, fingerprint: bytes) -> None:
        self._hints = [hint for hint in self._hints if hint.name != fingerprint]
        heapq.heapify(self._hints)
        for key in [key for key in self._kept if key[0] == fingerprint]:
            self._drop(key)

    def clear(self) -> None:
        """No hint counts any more."""
        self._hints.clear()
        self._kept.clear()
        self._counts.taken_bytes = 0

    def _drop(self, key: Key) -> None:
        self._counts.taken_bytes -= self._kept.pop(key).size_bytes
