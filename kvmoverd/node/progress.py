"""Progress of a session's calls through shared pages: written for the engine, and what it writes, checked.

Nothing that an engine writes is trusted: a credit counts for a live call only, and goes the way a message would go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvmoverd.core.errors import BadRequest, UnknownSession
from kvmoverd.core.machines.actions import AnnounceLayers, AnnouncePrefix, AnnounceQuiet, Finish, FinishDelivery
from kvmoverd.core.progress import (
    ENTRIES,
    GENERATION_MAX,
    LAYERS_MAX,
    PREFIX_BLOCKS,
    PROGRESS,
    UPDATED_NS,
    CallState,
    credited,
    first_word,
    header_words,
    progress_word,
)
from kvmoverd.core.status import Reason
from kvmoverd.ports.clock import Clock
from kvmoverd.ports.progress import SharedPages

KICKS_MAX = 5
KICK_WINDOW_S = 0.001
"""An engine is listened to so many times in this time; what it kicks beyond that waits for the window's end."""
_NO_GENERATION = np.uint64(1 << 32)


class ProgressEntry:
    """One call's entry, from its claim to the call's last word; what is told afterwards goes nowhere."""

    def __init__(self, book: ProgressBook, number: int, generation: int) -> None:
        self.number = number
        self.generation = generation
        self._book: ProgressBook | None = book
        self._at = first_word(number)
        self._layers = 0
        self._end: Reason | None = None
        self._on_computed: Callable[[int], None] | None = None
        self._write(CallState.RUNNING)

    def tell(self, told: object) -> None:
        """Writes what the page has room for, of the events a call's outbox gets."""
        if self._book is None:
            return
        match told:
            case AnnounceLayers(_, last):
                self._layers = min(last + 1, LAYERS_MAX)
                self._write(CallState.RUNNING)
            case AnnouncePrefix(prefix_blocks):
                self._book.words[self._at + PREFIX_BLOCKS] = prefix_blocks
            case Finish(end) | FinishDelivery(end):
                self._end = end.reason
                self._finish(CallState.ENDED if end.pages_quiet else CallState.UNQUIET)
            case AnnounceQuiet():
                self._finish(CallState.ENDED)
            case _:
                pass

    def drop(self) -> None:
        """The call was refused: the entry is free again."""
        self._end = self._end or Reason.INTERNAL
        self._finish(CallState.ENDED)

    def listen(self, on_computed: Callable[[int], None]) -> None:
        """`on_computed` is told each number that the engine writes, in bounds or not, also one that is there already."""
        self._on_computed = on_computed
        if self._book is not None:
            self._book.take(self)

    def computed(self, layers: int) -> bool:
        """False while nobody listens."""
        if self._on_computed is None:
            return False
        self._on_computed(layers)
        return True

    def forget(self) -> None:
        """The session ended: its pages are about to be unmapped."""
        self._book = None

    def _finish(self, state: CallState) -> None:
        if self._book is None:
            return
        self._write(state)
        if state is CallState.ENDED:
            self._book.free(self)
            self._book = None

    def _write(self, state: CallState) -> None:
        """The word that says so comes last, so whoever sees it finds the others written."""
        book = self._book
        assert book is not None, f"entry {self.number} is written after its session"
        book.words[self._at + UPDATED_NS] = book.now_ns()
        book.words[self._at + PROGRESS] = progress_word(self.generation, self._layers, state, self._end)
        book.wake()


class ProgressBook:
    """The entries of one session."""

    def __init__(self, pages: SharedPages, clock: Clock, boot_id: str) -> None:
        self.words = pages.progress
        self.now_ns = clock.now_ns
        self._pages = pages
        self._credits = pages.credits
        self._entries: dict[int, ProgressEntry] = {}
        self._generations = np.full(ENTRIES, _NO_GENERATION, dtype=np.uint64)
        self._seen = np.zeros(ENTRIES, dtype=np.uint64)
        self._loop = asyncio.get_running_loop()
        self._waking: asyncio.Handle | None = None
        self._changed = False
        self._kicks_left = KICKS_MAX
        self._window: asyncio.TimerHandle | None = None
        self._listening = False
        self._closed = False
        for index, word in enumerate(header_words(boot_id)):
            self.words[index] = word
        self._listen()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def claiming(self, number: int, generation: int) -> Iterator[ProgressEntry]:
        """The entry of a call that begins inside; free again when it is refused there. Raises `BadRequest`, `UnknownSession`."""
        if self._closed:
            raise UnknownSession("the session of this call has ended")
        if not 1 <= number <= ENTRIES:
            raise BadRequest(f"progress_entry is {number}, must be 1 to {ENTRIES}, or 0 for none")
        if not 1 <= generation <= GENERATION_MAX:
            raise BadRequest(f"progress_generation is {generation}, must be 1 to {GENERATION_MAX}")
        if number in self._entries:
            raise BadRequest(f"progress_entry {number} belongs to a call of this session that has not ended")
        entry = ProgressEntry(self, number, generation)
        self._entries[number] = entry
        self._generations[number - 1] = generation
        self._seen[number - 1] = 0
        try:
            yield entry
        except BaseException:
            entry.drop()
            raise

    def free(self, entry: ProgressEntry) -> None:
        """The call's last word is on the page."""
        del self._entries[entry.number]
        self._generations[entry.number - 1] = _NO_GENERATION

    def wake(self) -> None:
        """Wakes the engine at once, and for all that is written after that, once each time the loop comes round."""
        if self._waking is None:
            self._pages.wake()
            self._waking = self._loop.call_soon(self._wake_again)
        else:
            self._changed = True

    def take(self, entry: ProgressEntry) -> None:
        """Reads what the engine wrote for this call, as one word, and hands it on once."""
        word = self._credits[entry.number - 1]
        layers = credited(word, entry.generation)
        if layers is not None and word != self._seen[entry.number - 1] and entry.computed(layers):
            self._seen[entry.number - 1] = word

    def close(self) -> None:
        """Nothing is written any more; the engine's calls end by themselves."""
        if self._closed:
            return
        self._closed = True
        self._deafen()
        for handle in (self._waking, self._window):
            if handle is not None:
                handle.cancel()
        for entry in self._entries.values():
            entry.forget()
        self._entries.clear()
        del self.words, self._credits
        self._pages.close()

    def _wake_again(self) -> None:
        self._waking = None
        if self._changed:
            self._changed = False
            self._pages.wake()
            self._waking = self._loop.call_soon(self._wake_again)

    def _listen(self) -> None:
        self._listening = True
        self._loop.add_reader(self._pages.fileno(), self._kicked)

    def _deafen(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._pages.fileno())

    def _kicked(self) -> None:
        if self._window is None:
            self._window = self._loop.call_later(KICK_WINDOW_S, self._next_window)
        self._kicks_left -= 1
        if not self._pages.take_kicks():
            # The engine closed its end. What it wrote before counts; without more credits its calls end in their time.
            self._window.cancel()
            self._deafen()
        elif not self._kicks_left:
            self._deafen()
        self._scan()

    def _next_window(self) -> None:
        self._window = None
        self._kicks_left = KICKS_MAX
        if not self._listening:
            self._listen()

    def _scan(self) -> None:
        """Finds the words that changed in one pass over all, then reads each of these by itself."""
        words = np.frombuffer(self._credits, dtype=np.uint64)
        changed = (words >> np.uint64(32) == self._generations) & (words != self._seen)
        del words
        for index in np.flatnonzero(changed).tolist():
            entry = self._entries.get(index + 1)
            if entry is not None:
                self.take(entry)
