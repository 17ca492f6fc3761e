"""Which blocks are stored: what the index knows, and a look at each record's header, as an index may be late or wrong.

A block that is told as stored was there when its header was looked at; whoever reads it checks its layers. All others are to
be written: a write looks once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.node.services import Services
from kvmoverd.ports.storage import StorageDone

KEYS_MAX = 2048
"""Keys that the index is asked for: some 0.3 ms. Of a longer call the others are not found."""
LOOK_KEYS_MAX = 256
"""Headers that one op looks at: some 25 ms of one device thread."""
LOOKS_MAX = 16
"""Looks of one call: each ends at a block that is not there. Behind so many the index is wrong, and writes are the better way."""
LOOK_S = 5.0
"""A device that says nothing for so long is not waited for: its writes have deadlines of their own."""

Found = Callable[[frozenset[int]], None]


def known_stored(services: Services, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
    """Indexes of the keys that the index knows: the only ones that may be found to be stored."""
    return services.reader.catalog.known(namespace, keys[:KEYS_MAX])


def find_stored(
    services: Services, namespace: Namespace, keys: Sequence[bytes], known: list[int], found: Found
) -> None:
    """Calls `found` once with those of the indexes `known` that are stored: now, when there are none."""
    if known:
        _Look(services, namespace, keys, known, found).next()
    else:
        found(frozenset())


class _Look:
    """Looks at the headers of blocks that the index knows, one op at a time."""

    def __init__(
        self, services: Services, namespace: Namespace, keys: Sequence[bytes], known: list[int], found: Found
    ) -> None:
        self._desk, self._catalog = services.desk, services.reader.catalog
        self._namespace, self._keys, self._found = namespace, keys, found
        self._left = known
        self._stored: set[int] = set()
        self._purges = self._catalog.purges(namespace)
        self._looks = 0
        self._op_id = 0
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._late)

    def next(self) -> None:
        if not self._left or self._looks == LOOKS_MAX:
            self._tell()
            return
        self._looks += 1
        asked = self._left[:LOOK_KEYS_MAX]
        try:
            self._op_id = self._desk.probe(
                self._namespace, tuple(self._keys[index] for index in asked), self._looked, looks=True
            )
        except QueueFull:
            self._tell()
            return
        self._desk.submit()

    def _looked(self, done: StorageDone) -> None:
        if self._timer.cancelled():
            return
        if done.reason is not Reason.OK:
            self._tell()
            return
        asked = self._left[:LOOK_KEYS_MAX]
        self._stored.update(asked[: done.present])
        self._left = self._left[min(done.present + 1, len(asked)) :]
        self.next()

    def _late(self) -> None:
        self._desk.drop_probe(self._op_id)
        self._tell()

    def _tell(self) -> None:
        """What was there before a purge is not there after it."""
        self._timer.cancel()
        purged = self._purges != self._catalog.purges(self._namespace)
        self._found(frozenset() if purged else frozenset(self._stored))
