"""What this node keeps already is counted before its first write, a bit at a time: big stores take minutes to look at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from kvmoverd.adapters.storage.block_io import errno_name

COUNT_WITHOUT_S = 30.0
"""How long writes wait for directories that are not counted; also how often those that could not be are tried again then."""
_COUNT_WITHOUT_NS = round(COUNT_WITHOUT_S * 1e9)


class Counted(Protocol):
    """Bytes and inodes of directories."""

    def look(self, author: str, is_active: Callable[[str, int], bool]) -> Iterator[None]:
        """Looks at this author's directory, with a pause whenever that took a while. Raises `OSError`."""


class Accounting:
    """`step` is for the keeper's thread; all else is for any.

    `accountable`: authors whose bytes count as this node's; `listed`: whether all authors were seen by now.
    """

    def __init__(
        self,
        authors: Path,
        counted: Counted,
        *,
        accountable: Callable[[], list[str]],
        is_active: Callable[[str, int], bool],
        listed: Callable[[], bool],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._authors, self._counted, self._accountable = authors, counted, accountable
        self._is_active, self._listed, self._now_ns = is_active, listed, now_ns
        self._ready = threading.Event()
        self._since_ns: int | None = None
        self._begun_ns = 0
        self._pass: Iterator[None] | None = None
        self._failed: dict[str, OSError] = {}
        self._uncounted: dict[str, str] = {}
        self.account_s = 0.0
        """How long the last count took."""

    @property
    def uncounted(self) -> int:
        """Directories without which writes were let in."""
        return len(self._uncounted)

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until it was counted what this node keeps; False when that took too long."""
        return self._ready.wait(timeout_s)

    def notes(self) -> list[str]:
        """What a person should know."""
        return list(self._uncounted.values())

    def step(self, deadline_ns: int) -> bool:
        """Counts until then, if that was not done; True when there is more to count. Raises `OSError` for what can't be."""
        now_ns = self._now_ns()
        if self._since_ns is None:
            self._since_ns = now_ns
        late = now_ns - self._since_ns >= _COUNT_WITHOUT_NS
        if self._pass is None:
            if not self._must_begin(late=late):
                return False
            self._pass, self._begun_ns = self._count(), now_ns
        while next(self._pass, self) is not self:
            if self._now_ns() >= deadline_ns:
                if late and not self._ready.is_set():
                    self._uncounted[""] = f"{self._authors} is still being counted after {COUNT_WITHOUT_S:g} s"
                    self._ready.set()
                return True
        self._pass = None
        self._end(late=late)
        return False

    def _must_begin(self, *, late: bool) -> bool:
        if self._ready.is_set():
            return bool(self._uncounted) and late
        return late or self._listed()

    def _count(self) -> Iterator[None]:
        self._failed = {}
        for author in self._accountable():
            try:
                yield from self._counted.look(author, self._is_active)
            except OSError as error:
                self._failed[author] = error
            yield

    def _end(self, *, late: bool) -> None:
        """What can't be counted is done without after a while. Raises `OSError` until then."""
        now_ns = self._now_ns()
        self.account_s = (now_ns - self._begun_ns) / 1e9
        if self._failed and not late and not self._ready.is_set():
            raise next(iter(self._failed.values()))
        said_s = f"for {COUNT_WITHOUT_S:g} s"
        self._uncounted = {
            author: f"{self._authors / author} could not be counted {said_s}: {errno_name(error)}: {error}"
            for author, error in self._failed.items()
        }
        if not self._listed():
            self._uncounted[""] = f"{self._authors} could not be listed {said_s}: former starts are not counted"
        self._since_ns = now_ns
        self._ready.set()
