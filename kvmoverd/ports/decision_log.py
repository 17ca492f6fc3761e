"""Where the scheduler's decisions are written down."""

from __future__ import annotations

from typing import Protocol

from kvmoverd.core.scheduling.numbers import JournalNumbers


class DecisionLog(Protocol):
    """Takes lines without ever keeping the caller waiting. What it can't take is dropped, counted, and told in the log itself."""

    def begin(self) -> None:
        """What comes from here on is another log: its first line is that of a beginning."""

    def write(self, line: str) -> None:
        """One line, without its end."""

    def numbers(self) -> JournalNumbers: ...
