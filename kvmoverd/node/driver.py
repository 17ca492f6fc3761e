"""Driver: runs one machine. Completions go in, its actions are carried out in order; timers are its only clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from kvmoverd.core.machines.actions import Action, Finish
from kvmoverd.core.status import End, Reason
from kvmoverd.node.outbox import Outbox
from kvmoverd.node.services import Services
from kvmoverd.node.sessions import Region

QUIESCE_S = 5.0
"""How long what is under way may take after a stop before the caller is told that its pages are not quiet."""


class Machine(Protocol):
    @property
    def state(self) -> Enum: ...

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]: ...

    def on_quiesce_timeout(self) -> list[Action]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """Who asked for what, and until when."""

    request_id: str
    attempt: int
    session_id: str
    timeout_s: float


class Driver:
    """Base of all drivers. Subclasses carry out their machine's actions in `do`, and free what they hold in `gone`."""

    kind: ClassVar[str]

    def __init__(self, services: Services, call: Call) -> None:
        self.services = services
        self.call = call
        self.outbox = Outbox()
        self.moved_bytes = 0
        self.read_bytes = 0
        self.ended: End | None = None
        self.on_gone: list[Callable[[], None]] = []
        self._todo: deque[Action] = deque()
        self._running = False
        self._is_gone = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._deadline_in(call.timeout_s)
        self._quiesce: asyncio.TimerHandle | None = None

    @property
    def machine(self) -> Machine:
        raise NotImplementedError

    def do(self, action: Action) -> None:
        """Carries out one action; announcements go to the outbox."""
        self.outbox.put(action)

    def uses_region(self, region: Region) -> bool:
        """Does this request read or write the region's pages?"""
        return False

    def gone(self) -> None:
        """The machine has ended and nothing is under way: free what is held beside the slots."""

    def run(self, actions: Sequence[Action]) -> None:
        """Carries out actions in order, also those that follow from them."""
        self._todo.extend(actions)
        if self._running:
            return
        self._running = True
        try:
            while self._todo:
                self._carry_out(self._todo.popleft())
        finally:
            self._running = False
        self._bound_the_drain()
        self._leave_if_over()

    def stop(self, reason: Reason, message: str = "") -> None:
        """Cancel, deadline, death or shutdown; harmless when over."""
        self.run(self.machine.on_stop(reason, message))

    def due_within(self, timeout_s: float) -> None:
        """Brings the deadline forward; one that is sooner stays."""
        if self._loop.time() + timeout_s < self._deadline.when():
            self._deadline.cancel()
            self._deadline = self._deadline_in(timeout_s)

    def _deadline_in(self, timeout_s: float) -> asyncio.TimerHandle:
        return self._loop.call_later(timeout_s, self.stop, Reason.DEADLINE, f"{timeout_s:g} s passed")

    def _bound_the_drain(self) -> None:
        """What is under way may take a while after a stop or a failure, not for ever."""
        if self.machine.state.name == "DRAINING" and self._quiesce is None:
            self._quiesce = self._loop.call_later(QUIESCE_S, self._quiesce_timeout)

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Finish):
            self._deadline.cancel()
            action = Finish(self._counted(action.end))
            self.ended = action.end
            self.services.observer.request_ended(self.kind, self.call.request_id, action.end.reason, action.end.message)
        self.do(action)

    def _counted(self, end: End) -> End:
        return End(end.reason, end.message, end.pages_quiet, end.prefix_blocks, self.moved_bytes, self.read_bytes)

    def _quiesce_timeout(self) -> None:
        self.run(self.machine.on_quiesce_timeout())

    def _leave_if_over(self) -> None:
        if self._is_gone or self.machine.state.name != "ENDED":
            return
        self._is_gone = True
        self._deadline.cancel()
        if self._quiesce is not None:
            self._quiesce.cancel()
        self.gone()
        for told in self.on_gone:
            told()
