"""Block keys: 32 bytes, chained from the namespace's fingerprint. The chain is the trie: a look-up walks keys, not tokens.

Format: key = BLAKE2b-256(person="kvmover-block-1", fingerprint[32] || parent[32] || token ids as little-endian uint32);
the parent of the first block is 32 zero bytes. An engine's own chained hash h is wrapped as
BLAKE2b-256(person="kvmover-wrap-1", fingerprint[32] || h).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvmoverd.core.errors import BadKeys

KEY_BYTES = 32
KEYS_MAX = 65_536
ROOT = bytes(KEY_BYTES)
ENGINE_HASH_BYTES_MIN = 16


def block_key(fingerprint: bytes, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of one block of token ids after `parent`."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvmover-block-1")
    digest.update(fingerprint + parent + np.asarray(tokens, dtype="<u4").tobytes())
    return digest.digest()


def wrapped_key(fingerprint: bytes, engine_hash: bytes) -> bytes:
    """Key from an engine's own chained hash. Raises `BadKeys` for one too short to be collision-free."""
    if len(engine_hash) < ENGINE_HASH_BYTES_MIN:
        raise BadKeys(f"an engine hash of {len(engine_hash)} bytes is refused, {ENGINE_HASH_BYTES_MIN} are the least")
    return hashlib.blake2b(fingerprint + engine_hash, digest_size=KEY_BYTES, person=b"kvmover-wrap-1").digest()


def split_keys(packed: bytes) -> tuple[bytes, ...]:
    """Keys of a packed field, in order. Raises `BadKeys` for a broken length or too many."""
    if len(packed) % KEY_BYTES:
        raise BadKeys(f"block_keys has {len(packed)} bytes, must be a multiple of {KEY_BYTES}")
    if len(packed) > KEYS_MAX * KEY_BYTES:
        raise BadKeys(f"block_keys has {len(packed) // KEY_BYTES} keys, at most {KEYS_MAX} are taken")
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
