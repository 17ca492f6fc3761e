"""Write book: blocks that are on their way to storage, so that nobody writes one of them a second time beside it."""

from __future__ import annotations

from collections.abc import Callable

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason

OnWritten = Callable[[Reason], None]

Name = tuple[bytes, bytes, int]
"""Fingerprint and key of a block, and how often its namespace had been purged when its write was queued."""


class WriteBook:
    """Each write and who waits for its end, the one who asked for it first. Bounded by the desk's queue and its places."""

    def __init__(self) -> None:
        self._waiters: dict[Name, list[OnWritten]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def begin(self, name: Name, told: OnWritten) -> None:
        assert name not in self._waiters, f"block {name[1].hex()} is being written already"
        self._waiters[name] = [told]

    def join(self, name: Name, told: OnWritten) -> bool:
        """`told` hears the end of the write of this block, as its writer does; False when nobody writes it."""
        waiters = self._waiters.get(name)
        if waiters is None:
            return False
        waiters.append(told)
        return True

    def end(self, name: Name) -> list[OnWritten]:
        """Everybody who is to be told."""
        return self._waiters.pop(name)


def name_of(namespace: Namespace, key: bytes, purges: int) -> Name:
    return namespace.fingerprint, key, purges
