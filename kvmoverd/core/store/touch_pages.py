"""Pages of a touch log: what a node used of others' segments, and what it has pinned there. 4096 bytes each, as of an index log.

    0   magic "KVTL", crc32c of all after it, format u16, count u16, 0 u32
    16  log number u32, page number u32 (the page's own place in the log), 40 bytes of zeros
    64  entries of 24 bytes each, at most 168

All numbers are little-endian. An entry is a run of neighbouring records of one segment, which were used equally often, or
are pinned equally long. A page without entries says that the node is there and used nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from kvmoverd.core.store.log_pages import author16
from kvmoverd.core.store.places import PAGE_BYTES

MAGIC = b"KVTL"
FORMAT = 1
HEADER_BYTES = 64
_HEADER = struct.Struct("<4sIHHIII40x")
_CRC = struct.Struct("<I")
_COVERED_FROM = 8

TOUCH = np.dtype(
    [
        ("author", "<u8"),
        ("segment", "<u4"),
        ("record", "<u4"),
        ("records", "<u4"),
        ("pin_s", "<u2"),
        ("count", "u1"),
        ("kind", "u1"),
    ]
)
"""`author`: `author_tag` of the segment's; `count` for USED; `pin_s` for PINNED: seconds from when the page is read, 0: no
longer."""
USED, PINNED = 1, 2
ENTRIES_MAX = (PAGE_BYTES - HEADER_BYTES) // TOUCH.itemsize
COUNT_MAX = 255
PIN_S_MAX = (1 << 16) - 1
RECORDS_MAX = 1 << 20
"""Of a segment: more than fit into any."""

assert _HEADER.size == HEADER_BYTES and TOUCH.itemsize == 24


def author_tag(author: str) -> int:
    """8 bytes that stand for an author's name in a touch log."""
    return int.from_bytes(author16(author)[:8], "little")


def runs(
    author_tag: int, segment: int, records: npt.NDArray[np.uint32], values: npt.NDArray[np.uint32], *, kind: int
) -> npt.NDArray[np.void]:
    """Entries of `TOUCH` for these records of one segment, which are in ascending order; values above the maximum are cut."""
    values = np.minimum(values, PIN_S_MAX if kind == PINNED else COUNT_MAX)
    breaks = np.flatnonzero((np.diff(records) != 1) | (np.diff(values) != 0)) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    found = np.zeros(len(starts), TOUCH)
    found["author"], found["segment"], found["kind"] = author_tag, segment, kind
    found["record"] = records[starts]
    found["records"] = np.diff(np.append(starts, len(records)))
    found["pin_s" if kind == PINNED else "count"] = values[starts]
    return found


def unrolled(entries: npt.NDArray[np.void], value: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Records of these runs, one by one, and the field `value` of each."""
    lengths = entries["records"].astype(np.int64)
    firsts = np.repeat(entries["record"].astype(np.int64) - np.cumsum(lengths) + lengths, lengths)
    records = (firsts + np.arange(lengths.sum())).astype(np.uint32)
    return records, np.repeat(entries[value].astype(np.uint32), lengths)


def encode_pages(entries: npt.NDArray[np.void], log: int, number: int) -> Iterator[bytes]:
    """Pages from `number` on that hold these entries; one page at least."""
    for start in range(0, max(1, len(entries)), ENTRIES_MAX):
        some = entries[start : start + ENTRIES_MAX]
        raw = bytearray(PAGE_BYTES)
        _HEADER.pack_into(raw, 0, MAGIC, 0, FORMAT, len(some), 0, log, number)
        raw[HEADER_BYTES : HEADER_BYTES + some.nbytes] = some.tobytes()
        _CRC.pack_into(raw, 4, crc32c(memoryview(raw)[_COVERED_FROM:]))
        yield bytes(raw)
        number += 1


def decode_page(raw: bytes | memoryview, log: int, number: int) -> npt.NDArray[np.void] | None:
    """The entries, or None when these are not the bytes of page `number` of touch log `log`."""
    magic, crc, version, count, _, its_log, its_number = _HEADER.unpack_from(raw)
    if magic != MAGIC or version != FORMAT or (its_log, its_number) != (log, number) or count > ENTRIES_MAX:
        return None
    if crc32c(memoryview(raw)[_COVERED_FROM:PAGE_BYTES]) != crc:
        return None
    entries = np.frombuffer(raw, TOUCH, count, HEADER_BYTES)
    ends = entries["record"].astype(np.uint64) + entries["records"]
    return entries if (ends <= RECORDS_MAX).all() else None
