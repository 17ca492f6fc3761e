"""The progress page and the credit page: where a call's words lie, and how they are packed. See `companion.proto`.

All words are 64 bits, in the machine's own order. What a reader acts on is one word, stored and loaded whole: it is never torn.
"""

from __future__ import annotations

import enum

from kvmoverd.core.status import Reason

MAGIC = int.from_bytes(b"KVMPROGR", "little")
VERSION = 1
WORD_BYTES = 8
HEADER_BYTES = 4096
ENTRY_BYTES = 64
ENTRIES = 1024
"""Calls of one session that can have an entry at once; those beyond it get messages."""
PROGRESS_BYTES = HEADER_BYTES + ENTRIES * ENTRY_BYTES
CREDIT_BYTES = ENTRIES * WORD_BYTES
BOOT_ID_BYTES = 32
GENERATION_MAX = (1 << 32) - 1
LAYERS_MAX = (1 << 16) - 1

PROGRESS, PREFIX_BLOCKS, UPDATED_NS = range(3)
"""Words of an entry. The first is written last."""


class CallState(enum.Enum):
    """How far a call is. UNQUIET: it ended, and its pages may still be written."""

    RUNNING = 1
    UNQUIET = 2
    ENDED = 3


def progress_word(generation: int, layers: int, state: CallState, reason: Reason | None = None) -> int:
    """Word 0 of an entry: generation (32 bits), layers ready (16), state (8), reason (8, 0 while it runs).

    >>> hex(progress_word(5, 61, CallState.ENDED, Reason.OK))
    '0x5003d0301'
    """
    assert 0 < generation <= GENERATION_MAX and 0 <= layers <= LAYERS_MAX, f"generation {generation}, layers {layers}"
    return generation << 32 | layers << 16 | state.value << 8 | (reason.value if reason is not None else 0)


def credit_word(generation: int, layers: int) -> int:
    """What an engine says of one call: generation (32 bits), layers computed (32).

    >>> hex(credit_word(5, 61))
    '0x50000003d'
    """
    return generation << 32 | layers


def credited(word: int, generation: int) -> int | None:
    """Layers that a credit word says are computed; None for the word of another generation.

    >>> credited(credit_word(5, 61), 5), credited(credit_word(4, 61), 5)
    (61, None)
    """
    return word & 0xFFFF_FFFF if word >> 32 == generation else None


def first_word(entry: int) -> int:
    """Index of the first word of an entry, 1 to `ENTRIES`, in the progress page."""
    return (HEADER_BYTES + (entry - 1) * ENTRY_BYTES) // WORD_BYTES


def header_words(boot_id: str) -> list[int]:
    """The page's first words: magic, version, entries, bytes of an entry, then the boot id in 32 bytes, cut or padded.

    >>> header_words("0123456789abcdef")[1:4]
    [1, 1024, 64]
    """
    text = boot_id.encode()[:BOOT_ID_BYTES].ljust(BOOT_ID_BYTES, b"\0")
    words = [text[start : start + WORD_BYTES] for start in range(0, BOOT_ID_BYTES, WORD_BYTES)]
    return [MAGIC, VERSION, ENTRIES, ENTRY_BYTES, *(int.from_bytes(word, "little") for word in words)]
