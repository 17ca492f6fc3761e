"""Memory of the RAM index: mappings of their own, in huge pages where the kernel has them, given back from the front."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from kvmoverd.adapters.memory import libc
from kvmoverd.core.store.slot_table import Words

_HUGE_PAGE_BYTES = 2 << 20
_WORD_BYTES = 8
_MAPPED_BYTES_MIN = 2 * _HUGE_PAGE_BYTES
"""Smaller tables lie in the heap: a mapping each would be too many for the kernel."""


class MappedMemory:
    """Implements `Memory`. In huge pages a look-up in a table of gigabytes waits once for each key, not twice.

    A mapping is not in dumps and not in children. It takes memory as it is written, 2 MiB at a time, and goes with the last
    array over it.
    """

    def words(self, count: int) -> Words:
        size_bytes = count * _WORD_BYTES
        if size_bytes < _MAPPED_BYTES_MIN:
            return np.zeros(count, np.uint64)
        # As long again as a huge page, so that the array can begin with one.
        mapping = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                mapping.madvise(advice)
        return np.frombuffer(mapping, np.uint64, count, _skip_bytes(mapping))

    def populate(self, words: Words, start: int, stop: int) -> None:
        if len(words) * _WORD_BYTES < _MAPPED_BYTES_MIN:
            return
        # Whole pages, or the kernel refuses; before Linux 5.14 it refuses all, and pages come when they are written.
        first_bytes = start * _WORD_BYTES // mmap.PAGESIZE * mmap.PAGESIZE
        length_bytes = min(stop, len(words)) * _WORD_BYTES - first_bytes
        with contextlib.suppress(OSError):
            libc.advise(words.ctypes.data + first_bytes, length_bytes, libc.MADV_POPULATE_WRITE)

    def release(self, words: Words, stop: int) -> int:
        mapping = getattr(words.base, "obj", None)
        whole_bytes = stop * _WORD_BYTES // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if not isinstance(mapping, mmap.mmap) or not whole_bytes:
            return 0
        mapping.madvise(mmap.MADV_DONTNEED, _skip_bytes(mapping), whole_bytes)
        return whole_bytes // _WORD_BYTES


def _skip_bytes(mapping: mmap.mmap) -> int:
    """From the mapping's first byte to its first whole huge page."""
    return -int(np.frombuffer(mapping, np.uint8).ctypes.data) % _HUGE_PAGE_BYTES
