"""Progress port: two pages and two wake-ups that this daemon shares with one engine."""

from __future__ import annotations

from typing import Protocol


class SharedPages(Protocol):
    """Owned by one session. The engine reads `progress` and writes `credits`, whatever it likes and whenever."""

    @property
    def progress(self) -> memoryview:
        """Words of the progress page, which only this daemon can write."""

    @property
    def credits(self) -> memoryview:
        """Words of the credit page, read-only here."""

    def fileno(self) -> int:
        """Readable when the engine has kicked."""

    def wake(self) -> None:
        """Wakes the engine; never blocks, and an engine that does not listen is no error."""

    def take_kicks(self) -> bool:
        """Takes all kicks so far, never blocks; False when no more can come."""

    def engine_fds(self) -> tuple[int, ...]:
        """The engine's ends, to be passed and then closed with `close_engine_fds`: progress, credits, wake-up, kick."""

    def close_engine_fds(self) -> None:
        """A second call does nothing."""

    def close(self) -> None:
        """Unmaps and closes everything; nothing else refers to the words any more."""
