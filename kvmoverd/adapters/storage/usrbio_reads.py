"""Reads through rings of 3FS: urgent ones in rings of normal priority, all others in one of low priority."""

from __future__ import annotations

from kvmoverd.adapters.storage.blocks import Opened
from kvmoverd.adapters.storage.read_engine import Ends
from kvmoverd.adapters.storage.usrbio_fds import RegisteredFds
from kvmoverd.adapters.storage.usrbio_lane import SILENCE_S, UsrbioLane
from kvmoverd.adapters.storage.usrbio_ring import UsrbioRing
from kvmoverd.adapters.storage.usrbio_rings import UsrbioRings
from kvmoverd.ports.storage import BlockRead


class UsrbioReads:
    """`ReadEngine`. Takes over the rings, and closes them.

    A ring out of use puts all out of use: one daemon stands behind them.
    """

    def __init__(
        self, rings: UsrbioRings, fds: RegisteredFds, ends: Ends, *, name: str, silence_s: float = SILENCE_S
    ) -> None:
        self._rings = rings
        self._fds = fds
        self._ends = ends
        self._refused_fds = 0
        self._fd_refusal = ""
        own = Ends(self._came, self._failed, self._given_up)

        def lane(ring: UsrbioRing, number: str) -> UsrbioLane:
            return UsrbioLane(ring, own, name=f"{name}-{number}", depth=rings.depth, silence_s=silence_s)

        self._urgent = [lane(ring, str(number)) for number, ring in enumerate(rings.urgent)]
        self._low = lane(rings.low, "low")
        self._lanes = [*self._urgent, self._low]

    @property
    def poisoned(self) -> str:
        return next((lane.poisoned for lane in self._lanes if lane.poisoned), "")

    @property
    def strays(self) -> int:
        return sum(lane.strays for lane in self._lanes)

    @property
    def refused(self) -> str:
        """How many reads went by threads, since the library would not take them, and why the last one; empty when none."""
        count = self._refused_fds + sum(lane.refused for lane in self._lanes)
        why = next((lane.refusal for lane in self._lanes if lane.refusal), "")
        return f"{count} reads went by threads, {self._fd_refusal or why}" if count else ""

    def put(self, op: BlockRead, opened: Opened) -> None:
        if self.poisoned:
            self._ends.given_up(op, opened)
            return
        try:
            self._fds.register(opened.fd)
        except OSError as error:
            self._refused_fds += 1
            self._fd_refusal = str(error)
            self._given_up(op, opened)
            return
        lane = self._low if op.low else min(self._urgent, key=lambda lane: lane.load)
        lane.put(op, opened)

    def stop(self) -> None:
        for lane in self._lanes:
            lane.stop()

    def join(self, deadline_s: float) -> bool:
        return all(lane.join(deadline_s) for lane in self._lanes)

    def close(self) -> None:
        self._rings.close()

    def _came(self, op: BlockRead, opened: Opened) -> None:
        self._release(opened)
        self._ends.came(op, opened)

    def _failed(self, op: BlockRead, opened: Opened, error: OSError) -> None:
        self._release(opened)
        self._ends.failed(op, opened, error)

    def _given_up(self, op: BlockRead, opened: Opened) -> None:
        self._release(opened)
        self._ends.given_up(op, opened)

    def _release(self, opened: Opened) -> None:
        """A descriptor that will be closed now: a request to the daemon for each read, which lasting ones spare."""
        if not opened.lasting:
            self._fds.forget(opened.fd)
