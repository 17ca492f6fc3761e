"""The segment store's pages: what is written is read back, and nothing else passes."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from kvmoverd.core.record import RecordMismatch
from kvmoverd.core.store.log_pages import (
    ENTRIES_MAX,
    SEGMENTS_MAX,
    Kind,
    LogPage,
    decode_page,
    encode_page,
    entries_of,
)
from kvmoverd.core.store.places import PAGE_BYTES
from kvmoverd.core.store.segment_header import SegmentHeader, decode_segment, encode_segment, records_in

HEADER = SegmentHeader(b"f" * 32, "node-0.0123456789abcdef", 7, 99, 2, 627, 418, 1 << 30, 1_700_000_000_000_000_000)


def blocks_page(count: int) -> LogPage:
    blocks = [(os.urandom(32), os.urandom(32), 1 + 627 * number, number) for number in range(count)]
    return LogPage(Kind.BLOCKS, 3, 5, 7, 99, 2, 627, b"f" * 16, 1_700_000_000, b"o" * 16, entries=entries_of(blocks))


@pytest.mark.parametrize("count", [0, 1, ENTRIES_MAX])
def test_a_page_of_blocks_is_read_back(count: int) -> None:
    page = blocks_page(count)
    raw = encode_page(page)
    back = decode_page(raw, 3, 5)
    assert len(raw) == PAGE_BYTES and back is not None and back.entries is not None and page.entries is not None
    assert back.entries.tobytes() == page.entries.tobytes()
    assert (back.segment, back.generation, back.purge, back.record_pages) == (7, 99, 2, 627)
    assert (back.fingerprint16, back.time_s, back.owner16) == (b"f" * 16, 1_700_000_000, b"o" * 16)
    bad = decode_page(encode_page(dataclasses.replace(page, kind=Kind.BAD)), 3, 5)
    assert bad is not None and bad.kind is Kind.BAD and bad.entries is not None and len(bad.entries) == count


def test_an_entry_holds_key_parent_page_and_depth() -> None:
    key, parent = os.urandom(32), os.urandom(32)
    entry = entries_of([(key, parent, 628, 9)])[0]
    assert entry["key"].tobytes() == key and int(entry["parent"]).to_bytes(8, "little") == parent[:8]
    assert (entry["page"], entry["depth"]) == (628, 9)


def test_tombstones_seals_and_heads_are_read_back() -> None:
    for page in (
        LogPage(Kind.TOMBSTONE, 1, 2, segments=tuple(range(SEGMENTS_MAX))),
        LogPage(Kind.SEAL, 1, 2),
        LogPage(Kind.HEAD, 1, 2, author="node-0.0123456789abcdef"),
    ):
        assert decode_page(encode_page(page), 1, 2) == page


def test_zeros_and_pages_of_another_place_are_no_page() -> None:
    raw = encode_page(blocks_page(3))
    assert decode_page(bytes(PAGE_BYTES), 3, 5) is None
    assert decode_page(raw, 3, 6) is None and decode_page(raw, 4, 5) is None


def test_no_flipped_bit_passes_in_a_page_or_a_segment_header() -> None:
    raw, head = encode_page(blocks_page(3)), encode_segment(HEADER)
    for at in np.random.default_rng(1).integers(0, PAGE_BYTES, 200).tolist():
        bad, bad_head = bytearray(raw), bytearray(head)
        bad[at] ^= 1 << at % 8
        bad_head[at] ^= 1 << at % 8
        assert decode_page(bytes(bad), 3, 5) is None
        with pytest.raises(RecordMismatch):
            decode_segment(bytes(bad_head))


def test_a_segment_header_is_read_back_and_finds_its_records() -> None:
    assert decode_segment(encode_segment(HEADER)) == HEADER
    assert [HEADER.index_of(HEADER.page_of(index)) for index in (0, 1, 417)] == [0, 1, 417]
    assert (HEADER.index_of(2), HEADER.index_of(0), HEADER.index_of(HEADER.page_of(418))) == (-1, -1, -1)


def test_a_segment_that_is_too_small_for_one_record_takes_none() -> None:
    assert (records_in(4096, 4096), records_in(8191, 4096), records_in(8192, 4096)) == (0, 0, 1)
