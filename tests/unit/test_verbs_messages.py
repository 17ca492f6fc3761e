"""Words and rows of RDMA links: what is encoded is decoded, what is out of bounds is refused, chains move every byte once."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.transport.frames import FRAME_BYTES_MAX, SLICES_MAX, Status
from kvmoverd.adapters.transport.verbs.book import Keys
from kvmoverd.adapters.transport.verbs.chain import PLACE_BYTES_MAX, WRITE_BYTES_MAX, places_of, writes_between
from kvmoverd.adapters.transport.verbs.messages import (
    ASK_BYTES,
    GRANT_BYTES,
    PLACE,
    PLACES_PER_MESSAGE,
    WORDS_BYTES_MAX,
    Abandoned,
    Applied,
    Ask,
    Bye,
    Credit,
    Grant,
    Message,
    MessageError,
    OtherCnic,
    Refused,
    Revoke,
    decode,
    with_credits,
)
from kvmoverd.ports.transport import IoVec

U64 = (1 << 64) - 1


def places(*rows: tuple[int, int, int]) -> npt.NDArray[np.void]:
    return np.array(list(rows), PLACE)


@pytest.mark.parametrize(
    "message",
    [
        Ask(U64, U64, 60, 7, FRAME_BYTES_MAX, again=True),
        Ask(1, 2, 3, 4, 0, settled=True),
        Refused(9, Status.MISMATCH, 50_000, "sink 1 has 50000 bytes"),
        OtherCnic(9, 3),
        Applied(10),
        Revoke(11),
        Abandoned(12),
        Credit(),
        Bye(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_out_as_it_went_in_with_its_credits(message: Message) -> None:
    raw = with_credits(message.encode(), 513)
    assert decode(raw) == (513, message)
    assert len(raw) <= (GRANT_BYTES if isinstance(message, Refused) else ASK_BYTES)


def test_a_full_grant_fits_its_slot_and_comes_out_row_by_row() -> None:
    rows = places(*[(U64 - n, n, 7 * n) for n in range(PLACES_PER_MESSAGE)])
    raw = Grant(5, 3_000, 1_000, rows).encode()
    assert len(raw) <= GRANT_BYTES
    slots, found = decode(raw)
    assert isinstance(found, Grant) and (slots, found.sequence, found.total, found.first) == (0, 5, 3_000, 1_000)
    assert (found.places == rows).all()


def test_long_words_are_cut_and_words_that_are_not_utf8_do_no_harm() -> None:
    _, found = decode(Refused(1, Status.REFUSED, 0, "ä" * 1_000).encode())
    assert isinstance(found, Refused) and found.words == "ä" * (WORDS_BYTES_MAX // 2)
    raw = Refused(1, Status.FAILED, 0, "xyz").encode()[:-1] + b"\xff"
    _, found = decode(raw)
    assert isinstance(found, Refused) and found.words == "xy\ufffd"


def head(kind: int, count: int = 0, flags: int = 0) -> bytes:
    return struct.pack("<BBHIQ", kind, flags, 0, count, 1)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "a message of 0 bytes"),
        (b"\x00" * 15, "a message of 15 bytes"),
        (b"\x00" * 16, "a message of kind 0"),
        (b"\xff" * 64, "a message of kind 255"),
        (head(1), "a message of kind 1 with 16 bytes"),
        (head(1) + struct.pack("<QIIQ", 1, 2, 3, FRAME_BYTES_MAX + 1), f"a layer of {FRAME_BYTES_MAX + 1} bytes"),
        (head(2, 1) + struct.pack("<II", 1, 0), "a grant of 1 places with 0 bytes"),
        (head(2, 0) + struct.pack("<II", 1, 0), "a grant of 0 places"),
        (head(2, 1) + struct.pack("<II", 0, 0) + bytes(16), "a grant of places 0 to 1 of 0"),
        (head(2, 1) + struct.pack("<II", 5, 5) + bytes(16), "a grant of places 5 to 6 of 5"),
        (head(2, 1) + struct.pack("<II", SLICES_MAX + 1, 0) + bytes(16), f"at most {SLICES_MAX} are allowed"),
        (head(3, 4) + struct.pack("<IIQ", 3, 0, 0) + b"abc", "3 bytes of words, 4 are told"),
        (head(3, 0) + struct.pack("<IIQ", 2, 0, 0), "a refusal with status 2"),
        (head(3, 0) + struct.pack("<IIQ", 99, 0, 0), "a refusal with status 99"),
        (head(4), "a message of kind 4 with 16 bytes"),
        (head(5) + b"x", "a message of kind 5 with 1 bytes behind its head"),
        (head(8) + b"xx", "a message of kind 8 with 2 bytes behind its head"),
    ],
)
def test_nonsense_is_refused_with_words(raw: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode(raw)


def test_no_bytes_whatever_raise_anything_else() -> None:
    rng = np.random.default_rng(3)
    for _ in range(3_000):
        raw = bytearray(rng.integers(0, 256, int(rng.integers(0, 80)), dtype=np.uint8).tobytes())
        if raw:
            raw[0] = int(rng.integers(0, 11))
        try:
            decode(bytes(raw))
        except MessageError:
            continue


def slices_of(rng: np.random.Generator, total_bytes: int, count: int, key: int, *, gaps: bool) -> tuple[IoVec, Keys]:
    """Slices that add up to a total, some without a byte, some that touch, under keys that change now and then."""
    edges = np.sort(rng.integers(0, total_bytes + 1, count - 1))
    sizes = np.diff(np.concatenate([[0], edges, [total_bytes]]))
    skips = rng.integers(0, 2, count) * rng.integers(0, 50, count) if gaps else np.zeros(count, np.int64)
    found = np.empty((count, 2), np.uint64)
    found[:, 0] = 1_000 + np.cumsum(sizes + skips) - sizes
    found[:, 1] = sizes
    keys = np.empty((count, 2), np.uint32)
    keys[:, 0] = key + np.cumsum(rng.integers(0, 8, count) == 0)
    keys[:, 1] = keys[:, 0] + 1_000
    return found, keys


def bytes_of(slices: IoVec) -> npt.NDArray[np.uint64]:
    """Address of each byte, in order."""
    return np.concatenate([np.arange(int(at), int(at + size), dtype=np.uint64) for at, size in slices])


def test_a_chain_takes_each_byte_from_its_place_to_its_place_under_its_keys() -> None:
    rng = np.random.default_rng(5)
    for gaps in (True, False):
        for _ in range(200):
            total_bytes, counts = int(rng.integers(1, 4_000)), rng.integers(1, 60, 2)
            source, source_keys = slices_of(rng, total_bytes, int(counts[0]), 10, gaps=gaps)
            destination, keys = slices_of(rng, total_bytes, int(counts[1]), 500, gaps=gaps)
            if rng.random() < 0.3:
                # Cut alike at both ends, which is what engines and pools of one layout are.
                destination, keys = np.stack([source[:, 0] + np.uint64(9_000), source[:, 1]], axis=1), source_keys + 7
            granted = places_of(destination, keys)
            rows = writes_between(source, source_keys, granted)
            sizes = rows["size_bytes"].astype(np.uint64)
            assert (sizes > 0).all() and int(sizes.sum()) == total_bytes
            for side, slices, side_keys, name in (
                ("local", source, source_keys[:, 0], "local_key"),
                ("remote", destination, keys[:, 1], "remote_key"),
            ):
                got = bytes_of(np.stack([rows[side], sizes], axis=1))
                assert (got == bytes_of(slices)).all()
                key_of_bytes = np.repeat(rows[name], sizes.astype(np.int64))
                assert (key_of_bytes == np.repeat(side_keys, slices[:, 1].astype(np.int64))).all()


def test_rows_that_touch_at_both_ends_are_one_and_long_ones_are_cut() -> None:
    size_bytes = 2 * WRITE_BYTES_MAX + 5
    cuts = np.array([0, 1_000, 70_000, size_bytes], np.uint64)
    source = np.stack([cuts[:-1] + np.uint64(4_096), np.diff(cuts)], axis=1)
    rows = writes_between(source, np.full((3, 2), 9, np.uint32), places((1 << 40, size_bytes, 4)))
    assert rows["size_bytes"].tolist() == [WRITE_BYTES_MAX, WRITE_BYTES_MAX, 5]
    assert rows["local"].tolist() == [4_096 + n * WRITE_BYTES_MAX for n in range(3)]
    assert rows["remote"].tolist() == [(1 << 40) + n * WRITE_BYTES_MAX for n in range(3)]


def test_places_of_much_memory_fit_their_fields() -> None:
    slices = np.array([[1 << 40, 5 * PLACE_BYTES_MAX + 3]], np.uint64)
    granted = places_of(slices, np.array([[1, 2]], np.uint32))
    assert granted["size_bytes"].tolist() == [PLACE_BYTES_MAX] * 5 + [3]
    assert all(int(b["address"]) - int(a["address"]) == PLACE_BYTES_MAX for a, b in pairwise(granted))


def test_nothing_is_no_row() -> None:
    nothing, no_keys = np.zeros((0, 2), np.uint64), np.zeros((0, 2), np.uint32)
    granted = places_of(nothing, no_keys)
    assert len(granted) == 0 and len(writes_between(nothing, no_keys, granted)) == 0
