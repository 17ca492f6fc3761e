"""Block keys: the format is a promise to other nodes, other languages and what is stored already."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvmoverd.core.errors import BadKeys
from kvmoverd.core.keys import KEY_BYTES, KEYS_MAX, ROOT, block_key, split_keys, wrapped_key

FINGERPRINT = bytes(range(32))


def test_a_key_is_the_digest_that_the_format_says() -> None:
    raw = FINGERPRINT + ROOT + struct.pack("<3I", 7, 8, 1 << 31)
    expected = hashlib.blake2b(raw, digest_size=32, person=b"kvmover-block-1").digest()
    assert block_key(FINGERPRINT, ROOT, [7, 8, 1 << 31]) == expected


def test_a_wrapped_key_is_the_digest_that_the_format_says() -> None:
    expected = hashlib.blake2b(FINGERPRINT + b"h" * 20, digest_size=32, person=b"kvmover-wrap-1").digest()
    assert wrapped_key(FINGERPRINT, b"h" * 20) == expected


def test_fingerprint_parent_and_each_token_change_the_key() -> None:
    keys = {
        block_key(FINGERPRINT, ROOT, [1, 2]),
        block_key(bytes(32), ROOT, [1, 2]),
        block_key(FINGERPRINT, bytes([1]) * 32, [1, 2]),
        block_key(FINGERPRINT, ROOT, [2, 1]),
        block_key(FINGERPRINT, ROOT, [1]),
        wrapped_key(FINGERPRINT, ROOT),
    }
    assert len(keys) == 6


def test_an_engine_hash_too_short_to_be_free_of_collisions_is_refused() -> None:
    with pytest.raises(BadKeys, match="15 bytes is refused, 16 are the least"):
        wrapped_key(FINGERPRINT, bytes(15))


def test_packed_keys_are_split_in_order_with_their_duplicates() -> None:
    first, second = b"a" * KEY_BYTES, b"b" * KEY_BYTES
    assert split_keys(first + second + first) == (first, second, first)
    assert split_keys(b"") == ()


def test_a_packed_field_of_a_broken_length_is_refused() -> None:
    with pytest.raises(BadKeys, match="block_keys has 33 bytes, must be a multiple of 32"):
        split_keys(bytes(33))


def test_one_key_too_many_is_refused_and_the_most_allowed_are_taken() -> None:
    assert len(split_keys(bytes(KEYS_MAX * KEY_BYTES))) == KEYS_MAX
    with pytest.raises(BadKeys, match="block_keys has 65537 keys, at most 65536"):
        split_keys(bytes((KEYS_MAX + 1) * KEY_BYTES))
