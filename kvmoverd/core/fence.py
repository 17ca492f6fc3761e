"""Fence of attempts: of each request, only the highest attempt may go on, and each kind of call opens once an attempt."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvmoverd.core.errors import StaleAttempt


@dataclass(slots=True)
class _Known:
    """`is_over`: the attempt itself is refused, too."""

    attempt: int = 0
    kinds: set[str] = field(default_factory=set)
    holds: int = 0
    is_over: bool = False


class AttemptFence:
    """Remembers every request that is held, and of the others the last `remembered_max`."""

    def __init__(self, remembered_max: int) -> None:
        self.remembered_max = remembered_max
        self._held: dict[str, _Known] = {}
        self._quiet: OrderedDict[str, _Known] = OrderedDict()

    def enter(self, kind: str, request_id: str, attempt: int) -> bool:
        """Admits a call; True when the attempt is new, so that lower ones must be stopped.

        Raises `StaleAttempt` for a lower attempt, for one that is over, and for a kind of call that this attempt has made
        already.
        """
        known = self._known(request_id) or _Known()
        if attempt < known.attempt or (attempt == known.attempt and (known.is_over or kind in known.kinds)):
            raise StaleAttempt(request_id=request_id, attempt=attempt, known=known.attempt)
        fresh = attempt > known.attempt
        if fresh:
            known.attempt, known.is_over = attempt, False
            known.kinds.clear()
        known.kinds.add(kind)
        self._remember(request_id, known)
        return fresh

    def fence_off(self, request_id: str, attempt: int) -> bool:
        """This attempt and lower ones are over: refused from here on. False when that was known.

        A request that nothing is known of is remembered by it, too: its calls may still be on their way here.
        """
        known = self._known(request_id) or _Known()
        if attempt < known.attempt or (attempt == known.attempt and known.is_over):
            return False
        known.attempt, known.is_over = attempt, True
        known.kinds.clear()
        self._remember(request_id, known)
        return True

    def hold(self, request_id: str) -> None:
        """A call of this request is live: it must not be forgotten. The caller bounds how many are."""
        known = self._known(request_id) or _Known()
        known.holds += 1
        self._quiet.pop(request_id, None)
        self._held[request_id] = known

    def let_go(self, request_id: str) -> None:
        """Ends one hold; after the last one the request may be forgotten, later than those that were quiet before."""
        known = self._held[request_id]
        known.holds -= 1
        if known.holds == 0:
            del self._held[request_id]
            self._remember(request_id, known)

    def is_current(self, request_id: str, attempt: int) -> bool:
        """Is this the highest attempt known of the request, and not over?"""
        known = self._known(request_id)
        return known is not None and known.attempt == attempt and not known.is_over

    def withdraw(self, kind: str, request_id: str, attempt: int) -> None:
        """A call that was admitted took nothing after all."""
        known = self._known(request_id)
        if known is not None and known.attempt == attempt:
            known.kinds.discard(kind)

    def __len__(self) -> int:
        return len(self._held) + len(self._quiet)

    def _known(self, request_id: str) -> _Known | None:
        return self._held.get(request_id) or self._quiet.get(request_id)

    def _remember(self, request_id: str, known: _Known) -> None:
        if known.holds:
            return
        self._quiet[request_id] = known
        self._quiet.move_to_end(request_id)
        while len(self._quiet) > self.remembered_max:
            self._quiet.popitem(last=False)
