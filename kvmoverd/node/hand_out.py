"""Hands completions to their owners: one that fails does not take those of the others with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Event = TypeVar("Event")


class HandOut:
    """One batch. A broken invariant ends the daemon, but only after everyone else was told."""

    def __init__(self) -> None:
        self._broken: Exception | None = None

    def out(self, take: Callable[[Event], None], event: Event) -> None:
        try:
            take(event)
        except Exception as error:  # noqa: BLE001 raised by `check`
            self._broken = self._broken or error

    def check(self) -> None:
        """Raises the first failure of the batch."""
        if self._broken is not None:
            raise self._broken
