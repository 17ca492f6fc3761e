"""Records: what a header says, which bit flips are seen, and that chained checksums check layers one by one too."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time

import pytest
from crc32c import crc32c

from kvmoverd.core.layout import ALIGN_BYTES, HEADER_BYTES, LAYERS_MAX, Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.record import (
    Header,
    RecordMismatch,
    chained_crcs,
    check_layers,
    decode,
    encode,
    seal,
    verify,
)

LAYOUT = Layout(block_tokens=16, layers=((1000,), (37,), (656 * 64,)))
SPACE = Namespace(Manifest("model", b"w" * 32, b"t" * 32, LAYOUT, "fp8", epoch=7))
KEY, PARENT = b"k" * 32, b"p" * 32


def sealed(payload: bytes | None = None) -> bytearray:
    record = bytearray(b"\xaa" * LAYOUT.record_bytes)
    record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes] = payload or os.urandom(LAYOUT.block_bytes)
    seal(memoryview(record), SPACE, key=KEY, parent=PARENT, depth=3, write_time_ns=12345)
    return record


def header() -> Header:
    return decode(bytes(sealed()[:HEADER_BYTES]))


def test_a_sealed_record_says_everything_about_its_block() -> None:
    record = sealed()
    said = decode(bytes(record[:HEADER_BYTES]))
    assert (said.fingerprint, said.key, said.parent) == (SPACE.fingerprint, KEY, PARENT)
    assert (said.depth, said.generation, said.block_tokens) == (3, 7, 16)
    assert (said.payload_bytes, said.write_time_ns, said.flags) == (LAYOUT.block_bytes, 12345, 0)
    check_layers(memoryview(record), SPACE, KEY, 0, LAYOUT.layer_count)


def test_sealing_zeroes_the_padding_and_leaves_the_payload() -> None:
    payload = os.urandom(LAYOUT.block_bytes)
    record = sealed(payload)
    assert bytes(record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes]) == payload
    assert not any(record[HEADER_BYTES + LAYOUT.block_bytes :]) and len(record) % ALIGN_BYTES == 0


def test_checksums_that_are_known_are_taken_as_they_are() -> None:
    record = sealed()
    known = decode(bytes(record[:HEADER_BYTES])).layer_crcs
    seal(memoryview(record), SPACE, key=KEY, parent=PARENT, depth=3, write_time_ns=1, layer_crcs=known)
    check_layers(memoryview(record), SPACE, KEY, 0, LAYOUT.layer_count)
    seal(memoryview(record), SPACE, key=KEY, parent=PARENT, depth=3, write_time_ns=1, layer_crcs=(1, 2, 3))
    with pytest.raises(RecordMismatch, match="layer_crc32c"):
        check_layers(memoryview(record), SPACE, KEY, 0, LAYOUT.layer_count)


def test_encoding_and_decoding_are_inverse_up_to_the_most_layers() -> None:
    for layers in (1, 61, LAYERS_MAX):
        many = dataclasses.replace(header(), layer_crcs=tuple(range(layers)))
        page = encode(many)
        assert len(page) == HEADER_BYTES and decode(page) == many


def test_any_flipped_bit_of_a_header_page_is_seen() -> None:
    page, chance = bytes(sealed()[:HEADER_BYTES]), random.Random(1)
    for at in [*range(160), *(chance.randrange(HEADER_BYTES) for _ in range(300)), HEADER_BYTES - 1]:
        damaged = bytearray(page)
        damaged[at] ^= 1 << chance.randrange(8)
        with pytest.raises(RecordMismatch):
            decode(bytes(damaged))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"fingerprint": b"f" * 32}, "fingerprint"),
        ({"key": b"K" * 32}, "key"),
        ({"layer_crcs": (1, 2)}, "layer_count"),
        ({"block_tokens": 17}, "block_tokens"),
        ({"payload_bytes": 5}, "payload_bytes"),
    ],
)
def test_a_header_of_something_else_is_refused_by_the_fields_name(change: dict[str, object], field: str) -> None:
    page = encode(dataclasses.replace(header(), **change))  # type: ignore[arg-type]
    with pytest.raises(RecordMismatch, match=f"^{field} is ") as caught:
        verify(page, SPACE, KEY)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("page", "field"),
    [(b"", "header_bytes"), (bytes(HEADER_BYTES - 1), "header_bytes"), (bytes(HEADER_BYTES), "magic")],
)
def test_a_page_that_is_no_header_is_refused(page: bytes, field: str) -> None:
    with pytest.raises(RecordMismatch) as caught:
        decode(page)
    assert caught.value.field == field


def test_a_later_format_is_refused_as_such() -> None:
    page = bytearray(sealed()[:HEADER_BYTES])
    page[12] = 2
    with pytest.raises(RecordMismatch, match="format is 2, expected 1"):
        decode(bytes(page))


def test_chained_checksums_are_those_of_the_prefixes() -> None:
    payload = os.urandom(LAYOUT.block_bytes)
    ends = [*LAYOUT.layer_offsets[1:], LAYOUT.block_bytes]
    assert chained_crcs(memoryview(payload), LAYOUT) == tuple(crc32c(payload[:end]) for end in ends)


@pytest.mark.parametrize("layer", range(3))
def test_a_damaged_layer_is_named_by_every_range_that_has_it_and_by_no_other(layer: int) -> None:
    record = sealed()
    check_layers(memoryview(record), SPACE, KEY, 0, LAYOUT.layer_count)
    record[HEADER_BYTES + LAYOUT.layer_span(layer).stop - 1] ^= 0x80
    for first in range(3):
        for stop in range(first + 1, 4):
            if not first <= layer < stop:
                check_layers(memoryview(record), SPACE, KEY, first, stop)
                continue
            with pytest.raises(RecordMismatch) as caught:
                check_layers(memoryview(record), SPACE, KEY, first, stop)
            assert caught.value.field == f"layer_crc32c[{layer}]"


def test_a_range_under_the_header_of_another_record_is_refused() -> None:
    mine, other = sealed(), sealed()
    mine[HEADER_BYTES + LAYOUT.layer_offsets[1] :] = other[HEADER_BYTES + LAYOUT.layer_offsets[1] :]
    check_layers(memoryview(mine), SPACE, KEY, 0, 1)
    with pytest.raises(RecordMismatch, match="layer_crc32c"):
        check_layers(memoryview(mine), SPACE, KEY, 1, 3)


def test_a_record_of_another_length_is_refused() -> None:
    record = sealed()
    with pytest.raises(RecordMismatch, match=f"record_bytes is {len(record) - 1}, expected {len(record)}"):
        check_layers(memoryview(record)[:-1], SPACE, KEY, 0, LAYOUT.layer_count)


def test_checking_a_block_does_not_wait_for_the_interpreter_lock_once_a_layer() -> None:
    layout = Layout.uniform(layers=61, tokens=64, token_bytes=656)
    space = Namespace(Manifest("model", b"w" * 32, b"t" * 32, layout, "fp8"))
    record = memoryview(bytearray(layout.record_bytes))
    seal(record, space, key=KEY, parent=PARENT, depth=0, write_time_ns=0)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    other = threading.Thread(target=compute)
    other.start()
    try:
        started_s = time.monotonic()
        for _ in range(5):
            check_layers(record, space, KEY, 0, layout.layer_count)
            chained_crcs(record[HEADER_BYTES:], layout)
        took_s = time.monotonic() - started_s
    finally:
        stop.set()
        other.join()
    assert took_s < 0.3, f"{took_s:.3f} s for 5 blocks: with a hand-over per layer it is above 1 s"
