"""Pages of touch logs: runs in, the same records out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvmoverd.core.store.places import PAGE_BYTES
from kvmoverd.core.store.touch_pages import (
    ENTRIES_MAX,
    PIN_S_MAX,
    PINNED,
    TOUCH,
    USED,
    author_tag,
    decode_page,
    encode_pages,
    runs,
    unrolled,
)


def u32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_neighbours_that_were_used_alike_are_one_entry() -> None:
    found = runs(author_tag("b.1"), 7, u32(3, 4, 5, 9, 10), u32(2, 2, 1, 1, 999), kind=USED)
    assert found[["record", "records", "count"]].tolist() == [(3, 2, 2), (5, 1, 1), (9, 1, 1), (10, 1, 255)]
    assert set(found["author"].tolist()) == {author_tag("b.1")} and set(found["segment"].tolist()) == {7}
    pinned = runs(1, 7, u32(0), u32(10**6), kind=PINNED)
    assert pinned["pin_s"].tolist() == [PIN_S_MAX] and pinned["count"].tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_is_read_again(seed: int) -> None:
    chance = random.Random(seed)
    records = u32(*sorted(chance.sample(range(3_000), 1_000)))
    values = u32(*[chance.randrange(1, 4) for _ in records])
    entries = runs(5, 7, records, values, kind=USED)
    pages = list(encode_pages(entries, 3, 11))
    assert len(pages) == -(-len(entries) // ENTRIES_MAX) and {len(page) for page in pages} == {PAGE_BYTES}
    back = [decode_page(page, 3, 11 + number) for number, page in enumerate(pages)]
    assert all(part is not None for part in back)
    found, counts = unrolled(np.concatenate([part for part in back if part is not None]), "count")
    assert (found == records).all() and (counts == values).all()


def test_a_page_without_entries_is_a_page() -> None:
    (page,) = encode_pages(np.empty(0, TOUCH), 1, 0)
    entries = decode_page(page, 1, 0)
    assert entries is not None and len(entries) == 0


def test_zeros_damage_and_another_pages_bytes_are_no_page() -> None:
    (page,) = encode_pages(runs(5, 7, u32(1), u32(1), kind=USED), 1, 4)
    assert decode_page(page, 1, 4) is not None
    assert decode_page(page, 1, 5) is None and decode_page(page, 2, 4) is None
    assert decode_page(bytes(PAGE_BYTES), 1, 4) is None
    for at in range(0, PAGE_BYTES, 97):
        damaged = bytearray(page)
        damaged[at] ^= 0x10
        assert decode_page(bytes(damaged), 1, 4) is None


def test_a_run_that_no_segment_holds_is_refused() -> None:
    entries = runs(5, 7, u32(1), u32(1), kind=USED)
    entries["records"] = (1 << 32) - 1
    assert decode_page(next(encode_pages(entries, 1, 4)), 1, 4) is None
