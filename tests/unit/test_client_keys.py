"""Block keys as the client computes them: fixed vectors, and agreement with the daemon's own."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvmover_client import ROOT, BadKeys, KeyChain, block_keys, wrapped_key
from kvmover_client.keys import packed
from kvmoverd.core import keys as daemon_keys

FINGERPRINT = bytes(range(32))
TOKENS = [1, 2, 3, 4, 5, 6, 7, 0xFFFF_FFFF]
FIRST = "cbb52e0185ec1d48975133a370337a069fb116200b582be706a60ba84eadd66f"
SECOND = "2b63c92a115f674e0ae136bae6d64af352653cfa70d4d76adcc4dee3054d210f"
WRAPPED = "cd9263decd1c9a2a333d525695a00751098977923a6ca4bda50a25acfd4b2d5e"


def test_keys_are_those_of_the_format_for_ever() -> None:
    assert [key.hex() for key in block_keys(FINGERPRINT, TOKENS, 4)] == [FIRST, SECOND]
    assert wrapped_key(FINGERPRINT, bytes(range(16))).hex() == WRAPPED


def test_a_chain_goes_on_from_its_parent_as_if_it_had_never_been_cut() -> None:
    first, second = block_keys(FINGERPRINT, TOKENS, 4)
    assert block_keys(FINGERPRINT, TOKENS[4:], 4, first) == [second]
    assert block_keys(FINGERPRINT, TOKENS[4:], 4, ROOT) != [second]


@pytest.mark.parametrize("seed", range(5))
def test_client_and_daemon_agree_on_every_key(seed: int) -> None:
    rng = Random(seed)
    fingerprint, block_tokens = rng.randbytes(32), rng.choice([1, 3, 16, 64])
    tokens = [rng.randrange(1 << 32) for _ in range(block_tokens * 9 + rng.randrange(block_tokens))]
    expected, parent = [], daemon_keys.ROOT
    for start in range(0, block_tokens * 9, block_tokens):
        parent = daemon_keys.block_key(fingerprint, parent, tokens[start : start + block_tokens])
        expected.append(parent)
    assert block_keys(fingerprint, tokens, block_tokens) == expected
    assert daemon_keys.split_keys(packed(expected)) == tuple(expected)
    engine_hash = rng.randbytes(rng.randrange(16, 65))
    assert wrapped_key(fingerprint, engine_hash) == daemon_keys.wrapped_key(fingerprint, engine_hash)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_appended_in_any_portions_give_the_same_chain(seed: int) -> None:
    rng = Random(seed)
    tokens = [rng.randrange(200_000) for _ in range(500)]
    chain, told, at = KeyChain(FINGERPRINT, 16), [], 0
    while at < len(tokens):
        size = rng.randrange(40)
        told += chain.append(tokens[at : at + size])
        at += size
    assert told == chain.keys == block_keys(FINGERPRINT, tokens, 16)
    assert chain.tail_tokens == 500 % 16 and chain.parent == chain.keys[-1]


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, np.uint16])
def test_tokens_may_be_an_array_of_any_whole_type(kind: type[np.integer]) -> None:
    assert block_keys(FINGERPRINT, np.asarray([1, 2, 3, 4], dtype=kind), 4)[0].hex() == FIRST


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [1 << 70], [1.5], np.asarray([-1], dtype=np.int32)])
def test_ids_that_do_not_fit_are_refused_instead_of_wrapped(tokens: list[int]) -> None:
    with pytest.raises(BadKeys, match="1 tokens are not all whole numbers from 0 to 4294967295"):
        block_keys(FINGERPRINT, tokens, 1)


def test_a_refused_append_changes_nothing() -> None:
    chain = KeyChain(FINGERPRINT, 2)
    chain.append([1, 2, 3])
    with pytest.raises(BadKeys):
        chain.append([4, -1])
    assert chain.append([4]) == block_keys(FINGERPRINT, [1, 2, 3, 4], 2)[1:]


def test_wrong_sizes_are_refused_with_the_size() -> None:
    with pytest.raises(BadKeys, match="fingerprint has 31 bytes"):
        block_keys(bytes(31), [1], 1)
    with pytest.raises(BadKeys, match="parent has 33 bytes"):
        block_keys(FINGERPRINT, [1], 1, bytes(33))
    with pytest.raises(BadKeys, match="15 bytes is refused"):
        wrapped_key(FINGERPRINT, bytes(15))
    with pytest.raises(BadKeys, match="block_tokens is 0"):
        KeyChain(FINGERPRINT, 0)
    with pytest.raises(BadKeys, match="key 1 has 31 bytes"):
        packed([bytes(32), bytes(31), bytes(33)])
