"""The progress and credit pages of a session: how far its calls are, without a message. `companion.proto` has the layout."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvmover_client.errors import KvmoverError

MAGIC = int.from_bytes(b"KVMPROGR", "little")
VERSION = 1
WORD_BYTES = 8
HEADER_BYTES = 4096
ENTRY_BYTES_MAX = 4096
ENTRIES_MAX = 65_536
BOOT_ID_BYTES = 32
GENERATION_MAX = (1 << 32) - 1
FDS = 4
DRAIN_BYTES = 4096
ENDED = 3


class ProgressEntry:
    """One call's words. `number` and `generation` go into its request."""

    def __init__(self, pages: ProgressPages, words: memoryview, at: int, number: int, generation: int) -> None:
        """`words`: the progress page; `at`: where this entry's begin."""
        self.number = number
        self.generation = generation
        self.words = words
        self.at = at
        self.on_change: Callable[[], None] = _nobody
        self.seen = 0
        self._pages: ProgressPages | None = pages
        self._layers = 0

    @property
    def layers(self) -> int:
        """Layers [0, n) are done; it does not shrink, also when the entry has gone on to another call. For any thread."""
        if self._pages is not None:
            try:
                word = self.words[self.at]
            except ValueError:
                # The session is being closed, by the loop's thread.
                return self._layers
            if word >> 32 == self.generation:
                self._layers = max(self._layers, word >> 16 & 0xFFFF)
        return self._layers

    @property
    def stamp_ns(self) -> int:
        """When the daemon wrote the entry last, in nanoseconds of CLOCK_MONOTONIC; 0 when it is not this call's any more."""
        return self.words[self.at + 2] if self._pages is not None else 0

    def credit(self, layers: int) -> bool:
        """Says that layers [0, layers) are computed; False when the pages are gone, and nobody was told."""
        if self._pages is None:
            return False
        return self._pages.credit(self.number, self.generation << 32 | layers)

    def release(self) -> None:
        """The call is over, for this side. A second call does nothing."""
        if self._pages is not None:
            self._layers = self.layers
            pages, self._pages = self._pages, None
            pages.take_back(self)


class ProgressPages:
    """The pages of one session; closed with it."""

    def __init__(self, fds: Sequence[int], entries: int, boot_id: str) -> None:
        """Takes the descriptors, also when it raises `KvmoverError`: these are not the pages that the daemon promised."""
        progress_fd, credit_fd, self._wake, self._kick = fds
        self._open = True
        self._live: dict[int, ProgressEntry] = {}
        self._generation = 0
        self._loop = asyncio.get_running_loop()
        try:
            if not 1 <= entries <= ENTRIES_MAX:
                raise KvmoverError(f"a progress page of {entries} entries, 1 to {ENTRIES_MAX} are taken")
            self._progress = mmap.mmap(progress_fd, os.fstat(progress_fd).st_size, prot=mmap.PROT_READ)
            self._credits = mmap.mmap(credit_fd, entries * WORD_BYTES)
            self._words = memoryview(self._progress).cast("Q")
            self._entry_words = _entry_words(self._words, entries, boot_id)
        except (OSError, ValueError, KvmoverError) as error:
            os.close(self._wake)
            os.close(self._kick)
            raise KvmoverError(f"the progress pages of the daemon are not usable: {error}") from error
        finally:
            os.close(progress_fd)
            os.close(credit_fd)
        self._credit_words = memoryview(self._credits).cast("Q")
        self._free = deque(range(1, entries + 1))
        for fd in (self._wake, self._kick):
            os.set_blocking(fd, False)
        self._loop.add_reader(self._wake, self._woken)

    def take(self) -> ProgressEntry | None:
        """An entry for a new call; None when all are in use, or still the daemon's, and after `close`.

        The longest unused one comes first.
        """
        for _ in range(len(self._free) if self._open else 0):
            number = self._free.popleft()
            at = HEADER_BYTES // WORD_BYTES + (number - 1) * self._entry_words
            word = self._words[at]
            if word >> 32 == 0 or word >> 8 & 0xFF == ENDED:
                self._generation = self._generation % GENERATION_MAX + 1
                entry = ProgressEntry(self, self._words, at, number, self._generation)
                self._live[number] = entry
                return entry
            self._free.append(number)
        return None

    def take_back(self, entry: ProgressEntry) -> None:
        self._live.pop(entry.number, None)
        self._free.append(entry.number)

    def credit(self, number: int, word: int) -> bool:
        self._credit_words[number - 1] = word
        try:
            os.write(self._kick, b"\1")
        except BlockingIOError:
            # Full of kicks that the daemon has not read: it reads the page after them.
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._wake)
        for entry in list(self._live.values()):
            entry.release()
        self._words.release()
        self._credit_words.release()
        self._progress.close()
        self._credits.close()
        os.close(self._wake)
        os.close(self._kick)

    def _woken(self) -> None:
        try:
            gone = not os.read(self._wake, DRAIN_BYTES)
        except BlockingIOError:
            return
        if gone:
            # The daemon ended the session; the companion socket says so, too.
            self._loop.remove_reader(self._wake)
        words = self._words
        for entry in list(self._live.values()):
            word = words[entry.at]
            if word != entry.seen:
                entry.seen = word
                entry.on_change()


@contextmanager
def an_entry(pages: ProgressPages | None) -> Iterator[ProgressEntry | None]:
    """An entry for the call that begins inside, which releases it; unless it does not begin."""
    entry = pages.take() if pages is not None else None
    try:
        yield entry
    except BaseException:
        if entry is not None:
            entry.release()
        raise


def _entry_words(words: memoryview, entries: int, boot_id: str) -> int:
    """Words of one entry, out of the header. Raises `KvmoverError` when this is another page, or of another daemon."""
    magic, version, entries_there, entry_bytes = words[:4]
    text = boot_id.encode()[:BOOT_ID_BYTES].ljust(BOOT_ID_BYTES, b"\0")
    if magic != MAGIC or version != VERSION or words[4:8].tobytes() != text:
        raise KvmoverError(f"its magic is {magic:#x}, its version {version}, or its boot id is not {boot_id!r}")
    whole = WORD_BYTES * 3 <= entry_bytes <= ENTRY_BYTES_MAX and entry_bytes % WORD_BYTES == 0
    if not whole or entries_there != entries or len(words) * WORD_BYTES < HEADER_BYTES + entries * entry_bytes:
        raise KvmoverError(f"{entries_there} entries of {entry_bytes} bytes in {len(words) * WORD_BYTES} bytes")
    return int(entry_bytes) // WORD_BYTES


def _nobody() -> None:
    """A call that does not look yet."""
