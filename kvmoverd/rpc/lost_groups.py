"""Groups whose leaders pulled through this daemon, and those whose leader is gone, until the scheduler has heard of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

GROUPS_MAX = 4096
"""Beyond so many the scheduler finds out by their silence that leaders of the first ones are gone."""
TOLD_MAX = 1024
"""In one report."""
GRACE_S = 0.25
"""A leader that only makes its connection to the daemon anew pulls again within this time."""


@dataclass(frozen=True, slots=True)
class PulledFor:
    """A group as a boot of its leader names it."""

    name: str
    boot_id: str


class LostGroups:
    """Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._sessions: dict[PulledFor, str] = {}
        """The session that pulled last for each."""
        self._lost: dict[PulledFor, None] = {}
        self._leaving: dict[PulledFor, asyncio.TimerHandle] = {}

    @property
    def count(self) -> int:
        """Of groups that the scheduler has to hear of."""
        return len(self._lost)

    def pulled(self, group: PulledFor, session_id: str) -> None:
        """Its leader lives, in this session."""
        self._sessions.pop(group, None)
        self._sessions[group] = session_id
        self._lost.pop(group, None)
        self._stay(group)
        while len(self._sessions) > GROUPS_MAX:
            first = next(iter(self._sessions))
            del self._sessions[first]
            self._stay(first)

    def session_ended(self, session_id: str) -> None:
        """Groups that nobody else pulls for within the grace are lost."""
        loop = asyncio.get_running_loop()
        for group, owner in self._sessions.items():
            if owner == session_id and group not in self._leaving:
                self._leaving[group] = loop.call_later(GRACE_S, self._lose, group)

    def told(self) -> list[PulledFor]:
        """Those of which the next report tells, the first lost first."""
        return list(self._lost)[:TOLD_MAX]

    def heard(self, groups: Sequence[PulledFor]) -> None:
        """The scheduler has answered a report that told of these."""
        for group in groups:
            self._lost.pop(group, None)

    def close(self) -> None:
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()

    def _stay(self, group: PulledFor) -> None:
        timer = self._leaving.pop(group, None)
        if timer is not None:
            timer.cancel()

    def _lose(self, group: PulledFor) -> None:
        del self._leaving[group]
        self._sessions.pop(group, None)
        self._lost[group] = None
        while len(self._lost) > GROUPS_MAX:
            del self._lost[next(iter(self._lost))]
