"""Fence of attempts: of each request, only the highest attempt may go on, and each kind of call opens once an attempt."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvmoverd.core.errors import StaleAttempt


@dataclass(slots=True)
class _Known:
    attempt: int
    kinds: set[str] = field(default_factory=set)


class AttemptFence:
    """Remembers the last `remembered_max` requests."""

    def __init__(self, remembered_max: int) -> None:
        self.remembered_max = remembered_max
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def enter(self, kind: str, request_id: str, attempt: int) -> bool:
        """Admits a call; True when the attempt is new, so that lower ones must be stopped.

        Raises `StaleAttempt` for a lower attempt, and for a kind of call that this attempt has made already.
        """
        known = self._known.get(request_id)
        if known is not None and (attempt < known.attempt or (attempt == known.attempt and kind in known.kinds)):
            raise StaleAttempt(request_id=request_id, attempt=attempt, known=known.attempt)
        fresh = known is None or attempt > known.attempt
        if known is None or fresh:
            known = self._known[request_id] = _Known(attempt)
        known.kinds.add(kind)
        self._known.move_to_end(request_id)
        while len(self._known) > self.remembered_max:
            self._known.popitem(last=False)
        return fresh

    def is_current(self, request_id: str, attempt: int) -> bool:
        """Is this the highest attempt known of the request?"""
        known = self._known.get(request_id)
        return known is not None and known.attempt == attempt

    def withdraw(self, kind: str, request_id: str, attempt: int) -> None:
        """A call that was admitted took nothing after all."""
        known = self._known.get(request_id)
        if known is not None and known.attempt == attempt:
            known.kinds.discard(kind)

    def __len__(self) -> int:
        return len(self._known)
