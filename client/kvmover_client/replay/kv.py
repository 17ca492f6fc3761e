"""KV bytes as a function of (model, layer, token chain): whoever knows the tokens knows every byte of a page.

The row of a token in a layer is its chain word, XORed with one constant word for each layer and place in the row. A
slice that lies in the wrong place, belongs to another token or layer, or is left from before, differs in nearly every byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmover_client.replay.mixing import Words, named, sequence

Rows: TypeAlias = NDArray[np.uint8]
"""One layer of an engine's memory, [pages x page_tokens, token_bytes]: row p x page_tokens + t is token t of page p."""

WORD_BYTES = 8
SPAN_TOKENS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [token, token + count) of a request lie in rows [row, row + count)."""

    row: int
    token: int
    count: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How many bytes are wrong, and the first of them: token of the request, byte in its row. (-1, -1) when none is."""

    wrong_bytes: int = 0
    token: int = -1
    byte: int = -1


def spans(pages: Sequence[int], page_tokens: int, first: int, end: int) -> list[Span]:
    """Where tokens [first, end) of a request with these pages lie, in runs of adjacent rows.

    Runs are at most 1,024 tokens long, so that the scratch memory of `KvPattern` stays in a core's cache.

    >>> spans([5, 6, 2], 4, 2, 10)
    [Span(row=22, token=2, count=6), Span(row=8, token=8, count=2)]
    """
    found: list[Span] = []
    token = first
    while token < end:
        block, offset = divmod(token, page_tokens)
        row, count = pages[block] * page_tokens + offset, min(page_tokens - offset, end - token)
        last = found[-1] if found else None
        if last and last.row + last.count == row and last.count + count <= SPAN_TOKENS_MAX:
            found[-1] = Span(last.row, last.token, last.count + count)
        else:
            found.append(Span(row, token, count))
        token += count
    return found


class KvPattern:
    """The bytes of one model's KV, `token_bytes` a token and layer.

    Not for several threads at once: calls share scratch memory.
    """

    def __init__(self, *, layers: int, token_bytes: int, page_tokens: int, model: str) -> None:
        assert page_tokens <= SPAN_TOKENS_MAX, f"pages of {page_tokens} tokens, spans hold {SPAN_TOKENS_MAX}"
        self.layers = layers
        self.token_bytes = token_bytes
        self.page_tokens = page_tokens
        row_words = -(-token_bytes // WORD_BYTES)
        constants = sequence(named("layers", model), 0, layers * row_words)
        self._constants = constants.reshape(layers, row_words)
        self._scratch: Words = np.empty((SPAN_TOKENS_MAX, row_words), dtype=np.uint64)

    def fill(self, rows: Rows, layer: int, where: Sequence[Span], chain: Words) -> None:
        """Writes the rows of the spans' tokens; `chain` holds the words of the whole request."""
        for span in where:
            target = rows[span.row : span.row + span.count]
            hashes = chain[span.token : span.token + span.count, None]
            if self.token_bytes % WORD_BYTES:
                target[:] = self._expected(layer, hashes).view(np.uint8)[:, : self.token_bytes]
            else:
                np.bitwise_xor(hashes, self._constants[layer], out=target.view(np.uint64))

    def verify(self, rows: Rows, layer: int, where: Sequence[Span], chain: Words) -> Mismatch:
        """Compares the rows of the spans' tokens, byte by byte, with what they must be."""
        wrong_bytes, first = 0, Mismatch()
        for span in where:
            found = rows[span.row : span.row + span.count]
            difference = self._difference(layer, chain[span.token : span.token + span.count, None], found)
            if not difference.any():
                continue
            wrong = difference.view(np.uint8)[:, : self.token_bytes] != 0
            if not wrong_bytes:
                row, byte = divmod(int(wrong.argmax()), self.token_bytes)
                first = Mismatch(0, span.token + row, byte)
            wrong_bytes += int(np.count_nonzero(wrong))
        return Mismatch(wrong_bytes, first.token, first.byte)

    def _expected(self, layer: int, hashes: Words) -> Words:
        expected = self._scratch[: len(hashes)]
        np.bitwise_xor(hashes, self._constants[layer], out=expected)
        return expected

    def _difference(self, layer: int, hashes: Words, found: Rows) -> Words:
        """Zero where the bytes are right; in the scratch memory."""
        difference = self._expected(layer, hashes)
        if self.token_bytes % WORD_BYTES:
            there = difference.view(np.uint8)
            np.bitwise_xor(there[:, : self.token_bytes], found, out=there[:, : self.token_bytes])
            there[:, self.token_bytes :] = 0
        else:
            np.bitwise_xor(difference, found.view(np.uint64), out=difference)
        return difference
