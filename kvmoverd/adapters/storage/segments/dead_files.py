"""Descriptors of dead segments are closed: on one filesystem their bytes are free only when nobody has them open any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvmoverd.adapters.storage.segments.index_segments import SegmentInfo
from kvmoverd.adapters.storage.segments.segment_files import SegmentFiles

STEP_S = 2.0
"""Period of `DeadFiles.step`."""
ASKED_MAX = 64
"""Files of which one step asks the filesystem whether they were deleted."""


class KnownSegments(Protocol):
    """The index, as far as it is asked here."""

    def segment_id(self, author: str, number: int) -> int | None:
        """A segment's number in RAM; None for one that is not known, or not any more."""

    def segment(self, segment_id: int) -> SegmentInfo | None:
        """What is known of it."""


class DeadFiles:
    """A keeper's job, beside what the node's own garbage collection closes: of other authors, living and gone, as well.

    A segment that is dead stays open for a grace, as its file does: who was told of a place may still read there. One that is
    in no index, as that of an author who is gone or of a namespace that is not kept in RAM, is opened again when it is wanted.
    """

    def __init__(self, files: SegmentFiles, index: KnownSegments, *, grace_s: float, now_ns: Callable[[], int]) -> None:
        self._files, self._index, self._now_ns = files, index, now_ns
        self._grace_ns = round(grace_s * 1e9)
        self._since_ns: dict[tuple[str, int], int] = {}
        self._unasked: deque[tuple[str, int]] = deque()

    def step(self) -> None:
        now_ns, names = self._now_ns(), self._files.names()
        since_ns = {name: self._since_ns.get(name, now_ns) for name in names if not self._is_alive(*name)}
        for name in [name for name, dead_ns in since_ns.items() if now_ns - dead_ns >= self._grace_ns]:
            del since_ns[name]
            self._files.drop(name[0], [name[1]])
        self._since_ns = since_ns
        if not self._unasked:
            self._unasked.extend(names)
        self._files.drop_deleted([self._unasked.popleft() for _ in range(min(ASKED_MAX, len(self._unasked)))])

    def _is_alive(self, author: str, number: int) -> bool:
        segment_id = self._index.segment_id(author, number)
        segment = None if segment_id is None else self._index.segment(segment_id)
        return segment is not None and segment.alive
