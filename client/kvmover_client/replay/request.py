"""One turn as the engines see it: tokens, keys, the bytes that belong to them; and the paths to take."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmover_client.replay.kv import Span, spans
from kvmover_client.replay.mixing import Words
from kvmover_client.scheduling import ReadChoice
from kvmover_client.words import Path


class ReadPath(enum.Enum):
    """Whose storage NIC reads the hit blocks; AUTO: the nodes decide. The values are the names in reports."""

    PE = "pe_read"
    DE = "de_read"
    AUTO = "auto"

    @property
    def choice(self) -> ReadChoice:
        return ReadChoice({ReadPath.PE: Path.PE, ReadPath.DE: Path.DE, ReadPath.AUTO: Path.AUTO}[self])


class AttemptFailed(Exception):
    """An attempt ended before its time. `retryable`: the same request may succeed under a higher attempt."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A prompt and the reply that will follow it.

    `keys` and `chain` cover both: one key per full block, one word per token.
    """

    request_id: str
    keys: Sequence[bytes]
    chain: Words
    prompt_tokens: int
    block_tokens: int

    @property
    def prompt_blocks(self) -> int:
        """Full blocks of the prompt."""
        return self.prompt_tokens // self.block_tokens

    @property
    def tail_tokens(self) -> int:
        return self.prompt_tokens % self.block_tokens

    @property
    def prompt_pages(self) -> int:
        """Pages of the prompt, its partial last block included."""
        return -(-self.prompt_tokens // self.block_tokens)

    @property
    def all_pages(self) -> int:
        return -(-len(self.chain) // self.block_tokens)

    @property
    def hit_blocks_max(self) -> int:
        """Blocks that may be loaded: at least one token must be computed, or there is nothing to sample from."""
        return (self.prompt_tokens - 1) // self.block_tokens

    def spans(self, pages: Sequence[int], first: int, end: int) -> list[Span]:
        """Rows of tokens [first, end) in these pages."""
        return spans(pages, self.block_tokens, first, end)


class StoredBlocks:
    """What must be in the store: keys of all blocks that the daemons called durable. The replay's own oracle."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        self._keys.update(keys)

    def prefix_blocks(self, keys: Sequence[bytes]) -> int:
        """Leading keys that must be found."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))
