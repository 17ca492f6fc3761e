"""Turns: third nodes of one stream that owe layers, and for how long nothing has come from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvmoverd.core.machines.stream import StreamMachine
from kvmoverd.core.machines.stream_part import StreamPart

LAYERS_PATIENCE = 4
"""So many times as long as its slowest layer yet may a part take for the next one."""
BUFFER_PATIENCE = 2
"""The DE buffer may take so many times as long as the engine's pages took: nobody tells here how far that is."""


@dataclass(eq=False, slots=True)
class _Turn:
    """One part. `since_ns`: since when it has owed something of which nothing came; None: it owed nothing at the last look.

    `slowest_ns`: what its slowest layer took; `owed_ns`: for how long it has owed layers, all together.
    """

    since_ns: int | None = None
    arrived: int = 0
    ended: bool = False
    slowest_ns: int = 0
    owed_ns: int = 0

    def look(self, known: StreamPart, now_ns: int, *, owes: bool) -> None:
        """Waits begin anew with every layer, and when the part ends."""
        came = known.arrived.count > self.arrived
        if self.since_ns is not None and came:
            waited_ns = now_ns - self.since_ns
            self.slowest_ns = max(self.slowest_ns, waited_ns)
            self.owed_ns += waited_ns
        is_news = came or known.ended is not self.ended
        self.arrived, self.ended = known.arrived.count, known.ended
        if not owes:
            self.since_ns = None
        elif self.since_ns is None or is_news:
            self.since_ns = now_ns

    def patience_ns(self, known: StreamPart, stall_ns: int) -> int:
        """How long it may take for what it owes, reads that have to wait aside."""
        took_ns = BUFFER_PATIENCE * self.owed_ns if known.arrived.complete else LAYERS_PATIENCE * self.slowest_ns
        return max(stall_ns, took_ns)


class Turns:
    """To be looked at a few times within `stall_ns`: what comes is counted at the looks, which costs the layers nothing."""

    def __init__(self, machine: StreamMachine, *, stall_ns: int, reads_ns: Callable[[StreamPart], int]) -> None:
        """`reads_ns`: how long a part's storage NIC needs for what has to be read first."""
        self._machine = machine
        self._stall_ns = stall_ns
        self._reads_ns = reads_ns
        self._turns: dict[int, _Turn] = {}

    @property
    def are_over(self) -> bool:
        """Is there no third node's part, or none that counts?"""
        return not any(True for _ in self._helpers())

    def stalled(self, now_ns: int, *, buffer_is_open: bool) -> list[int]:
        """Parts of which nothing came for too long since their prefix was told, which comes with their first layers.

        `buffer_is_open`: they know where the decode node wants their layers.
        """
        return [known.part for known in self._helpers() if self._stands_still(known, now_ns, buffer_is_open)]

    def _stands_still(self, known: StreamPart, now_ns: int, buffer_is_open: bool) -> bool:
        if known.prefix is None:
            return False
        turn = self._turns.setdefault(known.part, _Turn())
        owes = self._machine.awaits(known.part) and (buffer_is_open or not known.arrived.complete)
        turn.look(known, now_ns, owes=owes)
        if turn.since_ns is None or now_ns - turn.since_ns < turn.patience_ns(known, self._stall_ns):
            return False
        reads_ns = 0 if known.ended else self._reads_ns(known)
        return now_ns - turn.since_ns >= turn.patience_ns(known, self._stall_ns) + 2 * reads_ns

    def _helpers(self) -> Iterator[StreamPart]:
        return (
            known
            for known in self._machine.parts.values()
            if known.granted_blocks and not known.fenced and self._machine.is_helper(known.share.node)
        )
