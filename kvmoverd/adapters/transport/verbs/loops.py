"""The loopbacks of all CNICs and classes, made when they are needed: sends within this process find theirs here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmoverd.adapters.transport.verbs.book import Book
from kvmoverd.adapters.transport.verbs.claims import Claims
from kvmoverd.adapters.transport.verbs.engine import Engine
from kvmoverd.adapters.transport.verbs.frame import Frame
from kvmoverd.adapters.transport.verbs.link import LinkSettings
from kvmoverd.adapters.transport.verbs.loopback import Loop
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Send


class Loops:
    """Implements `LoopHooks`. Called in the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        claims: Claims,
        book: Book,
        settings: LinkSettings,
        marks: Mapping[KvClass, Marks],
        ended: Callable[[Send, Reason, int, str], None],
    ) -> None:
        self._engine = engine
        self._claims = claims
        self._book = book
        self._settings = settings
        self._marks = marks
        self._ended = ended
        self._loops: dict[tuple[int, KvClass], Loop] = {}

    @property
    def breaks(self) -> int:
        return sum(loop.breaks for loop in self._loops.values())

    def submit(self, frame: Frame) -> None:
        """Over the CNIC that is nearest to the source; the sink may name a nearer one."""
        near = self._book.preferred(frame.send.source)
        self._start(frame, near if near >= 0 else frame.send.sink_id % len(self._engine.fabrics))

    def forgot(self, now_s: float) -> None:
        """A sink was."""
        for loop in self._loops.values():
            loop.revoke_forgotten(now_s)

    def close(self, now_s: float) -> None:
        for loop in self._loops.values():
            loop.give_up(Reason.SHUTTING_DOWN, "the transport is closed", now_s)

    def ended(self, frame: Frame, reason: Reason, moved_bytes: int, message: str) -> None:
        self._ended(frame.send, reason, moved_bytes, message)

    def moved(self, frame: Frame, cnic: int) -> None:
        self._start(frame, cnic)

    def _start(self, frame: Frame, cnic: int) -> None:
        name = (cnic, frame.send.kv_class)
        loop = self._loops.get(name)
        if loop is None:
            marks = self._marks[frame.send.kv_class]
            loop = Loop(cnic, self._engine, self._claims, self._book, self._settings, marks, self)
            self._loops[name] = loop
        loop.submit(frame)
