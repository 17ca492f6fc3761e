"""Mixing of 64-bit words: deterministic, vectorised, equal on every machine. Not cryptographic."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mixed(words: Words) -> Words:
    """Each word through the finaliser of splitmix64: one changed bit changes half of the bits."""
    out = words + _GOLDEN
    out ^= out >> np.uint64(30)
    out *= _FIRST
    out ^= out >> np.uint64(27)
    out *= _SECOND
    out ^= out >> np.uint64(31)
    return out


def named(*what: object) -> np.uint64:
    """A word that stands for these values, in this order."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def sequence(start: np.uint64, first: int, count: int) -> Words:
    """Words [first, first + count) of the sequence that `start` names."""
    return mixed(np.arange(first, first + count, dtype=np.uint64) * _GOLDEN + start)
