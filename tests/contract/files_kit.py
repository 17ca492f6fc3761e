"""What the suites of bad cases share: the storages over files that they run with, and blocks whose bytes follow from keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from storage_kit import UNEVEN, Driver, Slots, namespace, new_key

from kvmoverd.core.layout import Layout
from kvmoverd.core.status import Reason

NAMES = ("direct", "uring", "segments threads", "segments uring")
"""Of `SHOPS`: both layouts, each with both engines."""
SEGMENTS = NAMES[2:]
SPACE = namespace()


def payload_of(key: bytes, layout: Layout = UNEVEN) -> bytes:
    return hashlib.shake_128(key).digest(layout.block_bytes)


def store(driver: Driver, slots: Slots, count: int) -> list[bytes]:
    """Writes so many new blocks, each of which must succeed."""
    keys = [new_key() for _ in range(count)]
    for key in keys:
        done = driver.write(SPACE, key, slots.fill(0, payload_of(key)))
        assert done.reason is Reason.OK, done
    return keys


def read_back(driver: Driver, slots: Slots, keys: Sequence[bytes]) -> list[Reason]:
    """How each read ended; what is OK has the right bytes."""
    reasons = []
    for key in keys:
        reasons.append(driver.read(SPACE, key, slots.fill(0, b"")).reason)
        assert reasons[-1] is not Reason.OK or slots.payload(0) == payload_of(key)
    return reasons
