"""A session's pages with both ends in hand: the daemon's book over real files and pipes, and an engine that may do anything."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvmoverd.adapters.clock import MonotonicClock
from kvmoverd.adapters.memory.shared_page import EnginePages
from kvmoverd.core.progress import CREDIT_BYTES, PROGRESS, PROGRESS_BYTES, CallState, credit_word, first_word
from kvmoverd.node.progress import ProgressBook

BOOT_ID = "0123456789abcdef"


class Hands:
    """The engine's ends of a session's pages: its own descriptors and mappings."""

    def __init__(self, fds: Sequence[int]) -> None:
        """Owns the descriptors."""
        self.fds = list(fds)
        self._open = True
        self.progress_fd, self.credit_fd, self.wake_fd, self.kick_fd = self.fds
        self._progress = mmap.mmap(self.progress_fd, PROGRESS_BYTES, prot=mmap.PROT_READ)
        self._credits = mmap.mmap(self.credit_fd, CREDIT_BYTES)
        self.words = memoryview(self._progress).cast("Q")
        self.credits = memoryview(self._credits).cast("Q")

    @classmethod
    def of(cls, pages: EnginePages) -> Hands:
        """As if the descriptors had come over the socket."""
        fds = [os.dup(fd) for fd in pages.engine_fds()]
        pages.close_engine_fds()
        return cls(fds)

    def state(self, number: int) -> tuple[int, int, CallState | None, int]:
        """Generation, layers, state and reason of an entry; state None before its first use."""
        word = self.words[first_word(number) + PROGRESS]
        return word >> 32, word >> 16 & 0xFFFF, CallState(word >> 8 & 0xFF) if word else None, word & 0xFF

    def credit(self, number: int, generation: int, layers: int) -> None:
        self.credits[number - 1] = credit_word(generation, layers)
        self.kick()

    def kick(self) -> None:
        os.write(self.kick_fd, b"\1")

    def wakes(self) -> int:
        """Wake-ups since the last look."""
        try:
            return len(os.read(self.wake_fd, 4096))
        except BlockingIOError:
            return 0

    def close_pipes(self) -> None:
        os.close(self.fds.pop())
        os.close(self.fds.pop())

    def close(self) -> None:
        """A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self.words.release()
        self.credits.release()
        self._progress.close()
        self._credits.close()
        for fd in self.fds:
            os.close(fd)


@contextmanager
def shared() -> Iterator[tuple[ProgressBook, Hands]]:
    """A book on the running loop, and its engine; both are gone afterwards."""
    pages = EnginePages()
    book = ProgressBook(pages, MonotonicClock(), BOOT_ID)
    hands = Hands.of(pages)
    try:
        yield book, hands
    finally:
        book.close()
        hands.close()
