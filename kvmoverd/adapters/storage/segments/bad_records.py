"""Records of which somebody said in his log that they are damaged: nobody here finds them, whatever is read first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.storage.segments.log_reader import Run
from kvmoverd.core.store.places import Place

BAD_MAX = 1 << 20
"""Records: beyond it what is told is applied to what is known already, and not remembered for what comes later."""


class BadRecords:
    """For one thread. `mark_bad`: of the index, as in `SegmentIndex`."""

    def __init__(self, mark_bad: Callable[..., None]) -> None:
        self._mark_bad = mark_bad
        self._pages: dict[bytes, dict[int, set[int]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, author: str | None, owner16: bytes, run: Run) -> None:
        """These are bad. `author`: whose segment it is, where his name is known."""
        pages: list[int] = run.entries["page"].tolist()
        if self._count < BAD_MAX:
            known = self._pages.setdefault(owner16, {}).setdefault(run.segment, set())
            before = len(known)
            known.update(pages)
            self._count += len(known) - before
        if author is not None:
            for key, page in zip(run.entries["key"], pages, strict=True):
                self._mark_bad(run.fingerprint16, key.tobytes(), Place(author, run.segment, page), for_s=None)

    def others(self, owner16: bytes, run: Run) -> npt.NDArray[np.void]:
        """Those entries of the run that are not bad."""
        pages = self._pages.get(owner16, {}).get(run.segment)
        if not pages:
            return run.entries
        return run.entries[~np.isin(run.entries["page"], list(pages))]

    def forget(self, owner16: bytes) -> None:
        """The author is gone, with his segments."""
        gone = self._pages.pop(owner16, {})
        self._count -= sum(map(len, gone.values()))
