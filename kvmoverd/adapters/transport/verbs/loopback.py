"""Sends within this process, by queue pairs that are connected to themselves: the CNIC copies, the processor does not."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import Protocol

from kvmoverd.adapters.transport.sinks import REASONS
from kvmoverd.adapters.transport.verbs.book import Book
from kvmoverd.adapters.transport.verbs.chain import Chain, writes_between
from kvmoverd.adapters.transport.verbs.claims import Claims, Granted
from kvmoverd.adapters.transport.verbs.end import LOOPED, ChainEnd, LinkBroken, LinkEnd
from kvmoverd.adapters.transport.verbs.engine import Engine
from kvmoverd.adapters.transport.verbs.fabric import Completion, FabricError
from kvmoverd.adapters.transport.verbs.frame import Frame, post_some
from kvmoverd.adapters.transport.verbs.link import PAUSE_MAX_S, PAUSE_MIN_S, WINDOW_FRAMES, LinkSettings
from kvmoverd.adapters.transport.verbs.messages import Applied, OtherCnic
from kvmoverd.core.qos import Marks
from kvmoverd.core.status import Reason


class LoopHooks(Protocol):
    """What a loop tells of its frames."""

    def ended(self, frame: Frame, reason: Reason, moved_bytes: int, message: str) -> None:
        """Once for each frame; source and sink are quiet."""

    def moved(self, frame: Frame, cnic: int) -> None:
        """The frame belongs to the loop of another CNIC, which is nearer to its sink."""


class Loop:
    """A `Party`: the loopback of one CNIC and one class. Nobody speaks on it: sinks and sources are known here."""

    def __init__(
        self,
        cnic: int,
        engine: Engine,
        claims: Claims,
        book: Book,
        settings: LinkSettings,
        marks: Marks,
        hooks: LoopHooks,
    ) -> None:
        self.breaks = 0
        self._cnic = cnic
        self._engine = engine
        self._claims = claims
        self._book = book
        self._settings = settings
        self._marks = marks
        self._hooks = hooks
        self._end: LinkEnd[Frame] | None = None
        self._waiting: deque[Frame] = deque()
        self._open: dict[Frame, Granted] = {}
        self._writing: deque[Frame] = deque()
        self._fences_s: dict[Frame, float] = {}
        self._pause_s = 0.0
        self._pause_until_s = 0.0
        self._oldest_s = 0.0

    def submit(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self._engine.stir(self)

    def revoke_forgotten(self, now_s: float) -> None:
        """Posts no more to sinks that were forgotten; what is posted must end within the fence's time."""
        for frame, granted in list(self._open.items()):
            if granted.forgotten and frame not in self._fences_s:
                frame.abandon()
                if frame in self._writing:
                    self._writing.remove(frame)
                self._fences_s[frame] = now_s + self._settings.fence_s
                self._finish(frame, now_s)

    def give_up(self, reason: Reason, message: str, now_s: float) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._break(now_s, reason, message)
        for frame in waiting:
            self._hooks.ended(frame, reason, 0, message)

    # Party

    def pump(self, now_s: float) -> None:
        if self._end is None and self._waiting and now_s >= self._pause_until_s:
            self._connect(now_s)
        if self._end is None:
            return
        while self._waiting and len(self._open) < WINDOW_FRAMES:
            self._enter(self._waiting.popleft(), now_s)
        post_some(self._end, self._writing, tell=False)

    def take(self, done: Completion, now_s: float) -> None:
        if self._end is None:
            return
        found = self._end.take(done)
        self._engine.stir(self)
        if isinstance(found, ChainEnd):
            frame = found.token
            frame.on_way -= 1
            self._oldest_s = now_s
            self._finish(frame, now_s)

    def due_s(self) -> float:
        if self._end is None:
            return self._pause_until_s if self._waiting else math.inf
        if not self._open:
            return math.inf
        return min(self._oldest_s + self._settings.io_timeout_s, *self._fences_s.values(), math.inf)

    def tick(self, now_s: float) -> None:
        if self._end is not None:
            raise LinkBroken("what was posted did not end in time")

    def broke(self, error: LinkBroken | FabricError, now_s: float) -> None:
        self.breaks += 1
        self._break(now_s, Reason.INTERNAL, f"loopback of {self._engine.fabrics[self._cnic].name}: {error}")
        self._pause_s = min(max(2 * self._pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
        self._pause_until_s = now_s + self._pause_s
        self._engine.stir(self)

    def _connect(self, now_s: float) -> None:
        """A new queue pair; all that waits ends where none can be had."""
        end: LinkEnd[Frame] | None = None
        try:
            end = self._engine.make_end(self._cnic, LOOPED)
            end.connect(end.path, self._marks, peer_slots=0)
        except FabricError as error:
            if end is not None:
                self._engine.bury(self._cnic, end, now_s, lambda now_s: None)
            waiting, self._waiting = self._waiting, deque()
            for frame in waiting:
                self._hooks.ended(frame, Reason.POOL_EXHAUSTED, 0, f"no loopback: {error}")
            return
        self._end = end
        self._engine.enlist(self._cnic, end, self)

    def _enter(self, frame: Frame, now_s: float) -> None:
        found = self._claims.enter(None, self._cnic, frame.ask)
        if isinstance(found, Granted):
            if not self._open:
                self._oldest_s = now_s
            self._open[frame] = found
            try:
                frame.chain = Chain(writes_between(*self._book.keyed(self._cnic, frame.send.source), found.places))
            except FabricError as error:
                frame.fault = f"layer {frame.send.layer} can't be read: {error}"
                self._finish(frame, now_s)
                return
            self._writing.append(frame)
        elif isinstance(found, Applied):
            self._hooks.ended(frame, Reason.OK, 0, "")
        elif isinstance(found, OtherCnic):
            frame.settled = True
            self._hooks.moved(frame, found.cnic)
        else:
            self._hooks.ended(frame, REASONS[found.status], 0, found.words)

    def _finish(self, frame: Frame, now_s: float) -> None:
        """When nothing of it is on its way any more, and nothing more will be."""
        if frame.on_way or (frame.chain is not None and frame.chain.left):
            return
        granted = self._open.pop(frame)
        self._fences_s.pop(frame, None)
        if frame.fault:
            self._claims.drop(granted)
            self._hooks.ended(frame, Reason.INTERNAL, 0, frame.fault)
            return
        if frame.abandoned:
            self._claims.drop(granted)
            sink_id = frame.send.sink_id
            self._hooks.ended(frame, Reason.CANCELLED, 0, f"sink {sink_id} was closed while the frame came")
            return
        self._pause_s = 0.0
        answer = self._claims.end(granted, frame.sequence)
        if isinstance(answer, Applied):
            self._hooks.ended(frame, Reason.OK, frame.payload_bytes, "")
        else:
            self._hooks.ended(frame, REASONS[answer.status], 0, answer.words)

    def _break(self, now_s: float, reason: Reason, message: str) -> None:
        end, self._end = self._end, None
        opened = dict(self._open)
        self._open.clear()
        self._writing.clear()
        self._fences_s.clear()
        if end is None:
            return
        self._engine.bury(self._cnic, end, now_s, partial(self._quiet, opened, reason, message))

    def _quiet(self, opened: dict[Frame, Granted], reason: Reason, message: str, now_s: float) -> None:
        for frame, granted in opened.items():
            forgotten = granted.forgotten
            self._claims.drop(granted)
            self._hooks.ended(frame, Reason.CANCELLED if forgotten else reason, 0, message)
