"""Block keys, computed by the engine: 32 bytes each, chained from the namespace's fingerprint.

Format: key = BLAKE2b-256(person="kvmover-block-1", fingerprint[32] || parent[32] || token ids as little-endian uint32);
the parent of the first block is 32 zero bytes. An engine's own chained hash h is wrapped as
BLAKE2b-256(person="kvmover-wrap-1", fingerprint[32] || h).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmover_client.errors import BadKeys

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
ENGINE_HASH_BYTES_MIN = 16
TOKEN_BYTES = 4

_BLOCK = b"kvmover-block-1"
_WRAP = b"kvmover-wrap-1"

Tokens = Sequence[int] | npt.NDArray[np.integer]


def block_keys(fingerprint: bytes, tokens: Tokens, block_tokens: int, parent: bytes = ROOT) -> list[bytes]:
    """Keys of the full blocks of `tokens`, the first of which follows `parent`; a partial last block has none.

    Raises `BadKeys` for token ids outside 0 to 2^32 - 1, or a fingerprint or parent that has not 32 bytes.
    """
    chain = KeyChain(fingerprint, block_tokens, parent)
    return chain.append(tokens)


def wrapped_key(fingerprint: bytes, engine_hash: bytes) -> bytes:
    """Key from an engine's own chained hash. Raises `BadKeys` for one too short to be collision-free."""
    _check_size("fingerprint", fingerprint)
    if len(engine_hash) < ENGINE_HASH_BYTES_MIN:
        raise BadKeys(f"an engine hash of {len(engine_hash)} bytes is refused, {ENGINE_HASH_BYTES_MIN} are the least")
    return hashlib.blake2b(fingerprint + engine_hash, digest_size=KEY_BYTES, person=_WRAP).digest()


def packed(keys: Sequence[bytes]) -> bytes:
    """Keys as one field of a message. Raises `BadKeys` for a key that has not 32 bytes."""
    for index, key in enumerate(keys):
        if len(key) != KEY_BYTES:
            raise BadKeys(f"key {index} has {len(key)} bytes, must have {KEY_BYTES}")
    return b"".join(keys)


class KeyChain:
    """Keys of a growing sequence of tokens: each block's key is known as soon as it is full.

    >>> chain = KeyChain(bytes(32), block_tokens=2)
    >>> len(chain.append([1, 2, 3])), chain.tail_tokens
    (1, 1)
    """

    def __init__(self, fingerprint: bytes, block_tokens: int, parent: bytes = ROOT) -> None:
        _check_size("fingerprint", fingerprint)
        _check_size("parent", parent)
        if block_tokens < 1:
            raise BadKeys(f"block_tokens is {block_tokens}, must be 1 or more")
        self.keys: list[bytes] = []
        self._seed = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=_BLOCK)
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._parent = parent
        self._tail = b""

    @property
    def parent(self) -> bytes:
        """Key that the next block follows."""
        return self._parent

    @property
    def tail_tokens(self) -> int:
        """Tokens that fill no block yet."""
        return len(self._tail) // TOKEN_BYTES

    def append(self, tokens: Tokens) -> list[bytes]:
        """Adds tokens; the keys of the blocks that they filled, which are also added to `keys`."""
        data = memoryview(self._tail + _token_bytes(tokens))
        whole_bytes = len(data) - len(data) % self._block_bytes
        filled = [self._next(data[at : at + self._block_bytes]) for at in range(0, whole_bytes, self._block_bytes)]
        self._tail = bytes(data[whole_bytes:])
        self.keys += filled
        return filled

    def _next(self, block: memoryview) -> bytes:
        digest = self._seed.copy()
        digest.update(self._parent)
        digest.update(block)
        self._parent = digest.digest()
        return self._parent


def _token_bytes(tokens: Tokens) -> bytes:
    """Checked before the cast: numpy wraps ids that don't fit, and a wrapped id would name another text's block."""
    if not len(tokens):
        return b""
    try:
        ids = np.asarray(tokens)
        fits = np.issubdtype(ids.dtype, np.integer) and int(ids.min()) >= 0 and int(ids.max()) < 1 << 32
    except OverflowError:
        fits = False
    if not fits:
        raise BadKeys(f"{len(tokens)} tokens are not all whole numbers from 0 to {(1 << 32) - 1}")
    return ids.astype("<u4").tobytes()


def _check_size(name: str, value: bytes) -> None:
    if len(value) != KEY_BYTES:
        raise BadKeys(f"{name} has {len(value)} bytes, must have {KEY_BYTES}")
