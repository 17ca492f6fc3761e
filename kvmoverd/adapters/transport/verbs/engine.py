"""The one thread that touches queue pairs: it takes commands, polls completions, keeps deadlines, and sleeps in between."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvmoverd.adapters.transport.verbs.connector import Connected, Connector
from kvmoverd.adapters.transport.verbs.end import LinkBroken, LinkEnd, Slots
from kvmoverd.adapters.transport.verbs.fabric import Completion, Fabric, FabricError
from kvmoverd.core.qos import Marks
from kvmoverd.ports.connection import PathEnd

log = logging.getLogger(__name__)

COMPLETIONS_MAX = 256
"""Taken of a CNIC at once."""
COMMANDS_MAX = 256
"""Taken between two polls."""
LOOK_S = 0.01
"""Deadlines are looked at so often at least while there is no time to sleep."""
SLEEP_MAX_S = 60.0
BURY_AGAIN_S = 0.5
CONNECTS_END_S = 2.0
"""The kernel waits a second for the hardware address of a peer."""

Command = Callable[[float], None]
"""Called in the engine's thread with the time now."""


class TooManyEnds(FabricError):
    """As many queue pairs as the config allows."""


class Party(Protocol):
    """Who has a queue pair. What `take`, `pump` and `tick` raise comes back as `broke`, which must not raise."""

    def take(self, done: Completion, now_s: float) -> None: ...

    def pump(self, now_s: float) -> None:
        """Posts what may be posted."""

    def due_s(self) -> float:
        """When `tick` is wanted; infinite while nothing is awaited."""

    def tick(self, now_s: float) -> None: ...

    def broke(self, error: LinkBroken | FabricError, now_s: float) -> None: ...


@dataclass(slots=True)
class _Grave:
    """An end that could not be destroyed yet. Until then its memory is not quiet, and `then` is not called."""

    end: LinkEnd[Any]
    then: Command


class Engine:
    """`post` and `stop` may be called from any thread, all else from the engine's own, which is who calls `run`."""

    def __init__(self, fabrics: Sequence[Fabric], *, ends_max: int) -> None:
        self.fabrics = fabrics
        self.ends = 0
        self.ends_max = ends_max
        self._serials = itertools.count(1)
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._stopping = False
        self._parties: dict[tuple[int, int], Party] = {}
        self._stirred: dict[Party, None] = {}
        self._timed: set[Party] = set()
        self._graves: list[_Grave] = []
        self._connector = Connector(self.post)
        self._look_s = 0.0
        self._out_of_use: dict[int, str] = {}

    # From any thread

    def post(self, command: Command) -> bool:
        """False when the engine is stopping: the command is never called. As many wait as sends, sinks and dials there are."""
        with self._lock:
            if self._stopping:
                return False
            self._commands.append(command)
            self._wake()
            return True

    def stop(self) -> None:
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self._wake()

    # From the engine's thread

    @property
    def stopping(self) -> bool:
        """Nothing new is begun, and what is left ends."""
        return self._stopping

    def make_end(self, cnic: int, slots: Slots) -> LinkEnd[Any]:
        """An end that `enlist` gives to its party. Raises `FabricError`, `TooManyEnds`."""
        if self.ends >= self.ends_max:
            raise TooManyEnds(f"{self.ends} queue pairs are there, transport.verbs.qps_max is {self.ends_max}")
        if cnic in self._out_of_use:
            raise FabricError(f"{self.fabrics[cnic].name} is out of use: {self._out_of_use[cnic]}")
        end = LinkEnd[Any](self.fabrics[cnic], slots, next(self._serials))
        self.ends += 1
        return end

    def enlist(self, cnic: int, end: LinkEnd[Any], party: Party) -> None:
        """From now on the party gets the end's completions; until `bury`."""
        self._parties[cnic, end.number] = party

    def connect(self, end: LinkEnd[Any], peer: PathEnd, marks: Marks, then: Connected) -> None:
        """Beside this thread, since it may take a second; `then` follows, unless the end is buried before its turn."""
        self._connector.start(end, peer, marks, then)

    def bury(self, cnic: int, end: LinkEnd[Any], now_s: float, then: Command) -> None:
        """Ends an end; `then` is called, mostly at once, when nothing of it reads or writes memory any more."""
        self._parties.pop((cnic, end.number), None)
        end.fail()
        self._graves.append(_Grave(end, then))
        self._dig(now_s)

    def stir(self, party: Party) -> None:
        """It has something to post, or a deadline: `pump` follows soon."""
        self._stirred[party] = None
        self._timed.add(party)

    def run(self, close: Command) -> bool:
        """The thread's whole life; `close` ends all parties at its end. True when every end was destroyed.

        What fails in a command ends only that; what fails here ends all links, as `stop` does, so that nobody waits for them.
        """
        poller = select.poll()
        for fd in (self._wake_fd, *(fabric.fileno() for fabric in self.fabrics)):
            poller.register(fd, select.POLLIN)
        try:
            while not self._stopping:
                if not self._turn():
                    self._arm()
                    if not self._turn() and not self._stopping:
                        poller.poll(self._sleep_s() * 1000)
        except Exception:
            log.exception("RDMA: no link works any more, restart the daemon")
        self.stop()
        # What was taken is begun first, so that it ends like all the rest.
        while self._run_commands(time.monotonic()):
            pass
        _call(close, time.monotonic())
        if self._graves:
            self._connector.join(CONNECTS_END_S)
            self._dig(time.monotonic())
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
        return not self._graves

    def _turn(self) -> bool:
        """Commands, completions, deadlines, and what follows from them; False when there was nothing."""
        now_s = time.monotonic()
        worked = self._run_commands(now_s)
        for cnic in range(len(self.fabrics)):
            worked = self._take_completions(cnic, now_s) or worked
        if now_s >= self._look_s:
            self._look(now_s)
        stirred, self._stirred = self._stirred, {}
        for party in stirred:
            self._guard(party, now_s, lambda party=party: party.pump(now_s))  # type: ignore[misc]
        return worked or bool(self._stirred)

    def _run_commands(self, now_s: float) -> bool:
        with self._lock:
            count = min(COMMANDS_MAX, len(self._commands))
            if self._woken and count == len(self._commands) and not self._stopping:
                self._woken = False
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
        for _ in range(count):
            _call(self._commands.popleft(), now_s)
        return count > 0

    def _take_completions(self, cnic: int, now_s: float) -> bool:
        if cnic in self._out_of_use:
            return False
        try:
            found = self.fabrics[cnic].poll(COMPLETIONS_MAX)
        except Exception as error:  # noqa: BLE001 - whatever a driver does: the other CNICs go on
            self._give_up(cnic, error, now_s)
            return False
        for done in found:
            party = self._parties.get((cnic, done.qp_number))
            if party is not None:
                self._guard(party, now_s, lambda party=party, done=done: party.take(done, now_s))  # type: ignore[misc]
        return bool(found)

    def _guard(self, party: Party, now_s: float, call: Callable[[], None]) -> None:
        try:
            call()
        except (LinkBroken, FabricError) as error:
            party.broke(error, now_s)
        except Exception as error:
            log.exception("RDMA: a link failed, the others go on")
            party.broke(LinkBroken(repr(error)), now_s)

    def _give_up(self, cnic: int, error: Exception, now_s: float) -> None:
        """A CNIC that can't be polled is of no more use: nobody would hear of what it does."""
        said = error if isinstance(error, FabricError) else FabricError(repr(error))
        self._out_of_use[cnic] = str(said)
        log.error("RDMA: %s is out of use: %s", self.fabrics[cnic].name, said)
        for (at, _), party in list(self._parties.items()):
            if at == cnic:
                party.broke(said, now_s)

    def _arm(self) -> None:
        for cnic, fabric in enumerate(self.fabrics):
            if cnic not in self._out_of_use:
                try:
                    fabric.arm()
                except Exception as error:  # noqa: BLE001 - as for `poll`
                    self._give_up(cnic, error, time.monotonic())

    def _look(self, now_s: float) -> None:
        """Deadlines that have come, and ends that could not be destroyed before."""
        for party in list(self._timed):
            if party.due_s() <= now_s:
                self._guard(party, now_s, lambda party=party: party.tick(now_s))  # type: ignore[misc]
                self._stirred[party] = None
        self._dig(now_s)
        self._look_s = min(self._next_due_s(), now_s + LOOK_S)

    def _next_due_s(self) -> float:
        due_s = {party: party.due_s() for party in self._timed}
        self._timed = {party for party, at_s in due_s.items() if at_s < math.inf}
        return min(due_s.values(), default=math.inf)

    def _sleep_s(self) -> float:
        self._look_s = self._next_due_s()
        if self._graves:
            self._look_s = min(self._look_s, time.monotonic() + BURY_AGAIN_S)
        # A hair more than is left: poll counts in milliseconds, and must not wake up just before.
        return min(max(self._look_s - time.monotonic() + 0.001, 0.0), SLEEP_MAX_S)

    def _dig(self, now_s: float) -> None:
        graves, self._graves = self._graves, []
        for grave in graves:
            if grave.end.destroy():
                self.ends -= 1
                _call(grave.then, now_s)
            else:
                self._graves.append(grave)

    def _wake(self) -> None:
        if not self._woken and self._wake_fd >= 0:
            self._woken = True
            os.eventfd_write(self._wake_fd, 1)


def _call(command: Command, now_s: float) -> None:
    """One that fails must not take the links along; whoever it stood for may wait for ever, so the log says which it was."""
    try:
        command(now_s)
    except Exception:
        log.exception("RDMA: %r failed", command)
