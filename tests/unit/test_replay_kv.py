"""KV bytes: whatever is misplaced, swapped, stale or flipped is found; what is right is not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvmover_client.replay.kv import SPAN_TOKENS_MAX, KvPattern, Mismatch, Rows, Span, spans
from kvmover_client.replay.tokens import chain

PAGE_TOKENS, LAYERS, PAGES, TOKENS = 64, 3, 12, 64 * 7 + 13
TAKEN = (5, 6, 7, 2, 0, 11, 10, 3)
CHAIN = chain(np.arange(TOKENS, dtype=np.uint32))
WHERE = spans(TAKEN, PAGE_TOKENS, 0, TOKENS)
RIGHT = Mismatch()


def _pattern(token_bytes: int, layers: int = LAYERS) -> KvPattern:
    return KvPattern(layers=layers, token_bytes=token_bytes, page_tokens=PAGE_TOKENS, model="m")


def _filled(pattern: KvPattern) -> list[Rows]:
    layers = [np.full((PAGES * PAGE_TOKENS, pattern.token_bytes), 0xEE, dtype=np.uint8) for _ in range(pattern.layers)]
    for layer, rows in enumerate(layers):
        pattern.fill(rows, layer, WHERE, CHAIN)
    return layers


def _page(rows: Rows, index: int) -> Rows:
    """Rows of the request's block `index`."""
    return rows[TAKEN[index] * PAGE_TOKENS : (TAKEN[index] + 1) * PAGE_TOKENS]


@pytest.mark.parametrize("token_bytes", [656, 8, 37, 5])
def test_what_was_filled_is_right_and_nothing_else_was_touched(token_bytes: int) -> None:
    pattern = _pattern(token_bytes)
    for layer, rows in enumerate(_filled(pattern)):
        assert pattern.verify(rows, layer, WHERE, CHAIN) == RIGHT
        taken = np.zeros(len(rows), dtype=bool)
        for span in WHERE:
            taken[span.row : span.row + span.count] = True
        assert taken.sum() == TOKENS
        assert (rows[~taken] == 0xEE).all()


@pytest.mark.parametrize("token_bytes", [656, 37, 5])
def test_one_flipped_bit_is_found_where_it_is(token_bytes: int) -> None:
    pattern = _pattern(token_bytes)
    rows = _filled(pattern)[1]
    chance = np.random.default_rng(1)
    for token in (0, 63, 64, TOKENS - 1, *chance.integers(0, TOKENS, 40)):
        byte = int(chance.integers(0, token_bytes))
        row = TAKEN[token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS
        rows[row, byte] ^= 1 << int(chance.integers(0, 8))
        assert pattern.verify(rows, 1, WHERE, CHAIN) == Mismatch(1, int(token), byte)
        pattern.fill(rows, 1, WHERE, CHAIN)


@pytest.mark.parametrize("token_bytes", [656, 37])
def test_two_swapped_pages_are_found(token_bytes: int) -> None:
    pattern = _pattern(token_bytes)
    rows = _filled(pattern)[0]
    kept = _page(rows, 2).copy()
    _page(rows, 2)[:] = _page(rows, 4)
    _page(rows, 4)[:] = kept
    found = pattern.verify(rows, 0, WHERE, CHAIN)
    assert found.token == 2 * PAGE_TOKENS
    assert found.wrong_bytes > 0.9 * 2 * PAGE_TOKENS * token_bytes


@pytest.mark.parametrize("token_bytes", [656, 37])
def test_two_swapped_layers_are_found(token_bytes: int) -> None:
    pattern = _pattern(token_bytes)
    layers = _filled(pattern)
    assert pattern.verify(layers[1], 0, WHERE, CHAIN).wrong_bytes > 0.9 * TOKENS * token_bytes
    assert pattern.verify(layers[0], 1, WHERE, CHAIN).wrong_bytes > 0.9 * TOKENS * token_bytes


def test_a_slice_one_row_or_one_word_off_is_found() -> None:
    pattern = _pattern(656)
    rows = _filled(pattern)[0]
    first = _page(rows, 0)
    first[1:] = first[:-1].copy()
    assert pattern.verify(rows, 0, WHERE, CHAIN).wrong_bytes > 0.9 * (PAGE_TOKENS - 1) * 656
    pattern.fill(rows, 0, WHERE, CHAIN)
    first.reshape(-1)[8:] = first.reshape(-1)[:-8].copy()
    found = pattern.verify(rows, 0, WHERE, CHAIN)
    assert (found.token, found.byte) == (0, 8)
    assert found.wrong_bytes > 0.9 * PAGE_TOKENS * 656


def test_a_tail_left_from_another_turn_is_found() -> None:
    pattern = _pattern(656)
    rows = _filled(pattern)[2]
    tokens = np.arange(TOKENS, dtype=np.uint32)
    tokens[TOKENS - 5] += 1
    found = pattern.verify(rows, 2, WHERE, chain(tokens))
    assert (found.token, found.byte) == (TOKENS - 5, 0)
    assert 0.9 * 5 * 656 < found.wrong_bytes <= 5 * 656


def test_another_model_has_other_bytes() -> None:
    rows = _filled(_pattern(656))[0]
    other = KvPattern(layers=LAYERS, token_bytes=656, page_tokens=PAGE_TOKENS, model="n")
    assert other.verify(rows, 0, WHERE, CHAIN).wrong_bytes > 0.9 * TOKENS * 656


def test_a_part_of_a_request_can_be_filled_and_checked_alone() -> None:
    pattern = _pattern(656)
    rows = np.zeros((PAGES * PAGE_TOKENS, 656), dtype=np.uint8)
    pattern.fill(rows, 0, spans(TAKEN, PAGE_TOKENS, 100, 300), CHAIN)
    assert pattern.verify(rows, 0, spans(TAKEN, PAGE_TOKENS, 100, 300), CHAIN) == RIGHT
    assert pattern.verify(rows, 0, spans(TAKEN, PAGE_TOKENS, 99, 300), CHAIN).token == 99
    assert pattern.verify(rows, 0, spans(TAKEN, PAGE_TOKENS, 100, 301), CHAIN).token == 300


def test_spans_join_adjacent_pages_and_cut_long_runs() -> None:
    assert spans([5, 6, 2], 4, 2, 10) == [Span(22, 2, 6), Span(8, 8, 2)]
    assert spans([1], 4, 3, 3) == []
    long = spans(range(40), 64, 0, 64 * 40)
    assert {span.count for span in long[:-1]} == {SPAN_TOKENS_MAX}
    assert sum(span.count for span in long) == 64 * 40


def test_spans_cover_each_token_once_wherever_the_pages_lie() -> None:
    chance = np.random.default_rng(3)
    for _ in range(50):
        pages = [int(page) for page in chance.permutation(30)[:12]]
        first, end = sorted(int(token) for token in chance.integers(0, 12 * 16 + 1, 2))
        found = [(span.row + at, span.token + at) for span in spans(pages, 16, first, end) for at in range(span.count)]
        assert found == [(pages[token // 16] * 16 + token % 16, token) for token in range(first, end)]


def test_filling_and_checking_keep_up_with_the_disk() -> None:
    pattern = _pattern(656, layers=1)
    pages = [int(page) for page in np.random.default_rng(0).permutation(400)]
    rows = np.zeros((400 * PAGE_TOKENS, 656), dtype=np.uint8)
    words = chain(np.arange(400 * PAGE_TOKENS, dtype=np.uint32))
    where = spans(pages, PAGE_TOKENS, 0, 400 * PAGE_TOKENS)
    fastest_fill = fastest_verify = float("inf")
    for _ in range(5):
        begun_s = time.perf_counter()
        pattern.fill(rows, 0, where, words)
        filled_s = time.perf_counter()
        assert pattern.verify(rows, 0, where, words) == RIGHT
        fastest_verify = min(fastest_verify, time.perf_counter() - filled_s)
        fastest_fill = min(fastest_fill, filled_s - begun_s)
    # Both run at 5 to 10 GB/s on an idle core; far less than that would hide what is being measured.
    assert rows.nbytes / fastest_fill > 0.5e9
    assert rows.nbytes / fastest_verify > 0.5e9
