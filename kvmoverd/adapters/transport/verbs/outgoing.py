"""The end of a link that sends layers: dials, asks, writes what was granted, and repeats what a broken queue pair cut."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from kvmoverd.adapters.transport.sinks import REASONS
from kvmoverd.adapters.transport.verbs.book import Book, NotRegistered
from kvmoverd.adapters.transport.verbs.end import ASKER, SLOTS_MIN, ChainEnd, Heard, LinkBroken, LinkEnd
from kvmoverd.adapters.transport.verbs.engine import Engine, TooManyEnds
from kvmoverd.adapters.transport.verbs.fabric import Completion, FabricError
from kvmoverd.adapters.transport.verbs.frame import Frame, post_some
from kvmoverd.adapters.transport.verbs.link import (
    BREAKS_MAX,
    LINGER_S,
    PROBE_S,
    WINDOW_FRAMES,
    LinkKey,
    LinkSettings,
    Patience,
    RouteHooks,
    State,
    compare_with_peer,
    reason_of,
)
from kvmoverd.adapters.transport.verbs.messages import (
    ASK_BYTES,
    GRANT_BYTES,
    PROTOCOL,
    Abandoned,
    Applied,
    Bye,
    Credit,
    Grant,
    Message,
    OtherCnic,
    Refused,
    Revoke,
)
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.qos import Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Answer, Offer


class OutgoingLink:
    """A `Party`. All frames given to `submit` come back by `RouteHooks.ended`, `moved` or `failed`."""

    def __init__(
        self, key: LinkKey, route: RouteHooks, engine: Engine, book: Book, settings: LinkSettings, marks: Marks
    ) -> None:
        self.key = key
        self.state = State.IDLE
        self.reconnects = self.repeats = 0
        self._route = route
        self._engine = engine
        self._book = book
        self._settings = settings
        self._marks = marks
        self._probe_s = min(PROBE_S, settings.io_timeout_s / 4)
        self._end: LinkEnd[Frame] | None = None
        self._generation = 0
        self._waiting: deque[Frame] = deque()
        self._open: dict[int, Frame] = {}
        self._writing: deque[Frame] = deque()
        self.patience = Patience()
        self._since_s = 0.0
        self._oldest_s = 0.0
        self._said_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._open)

    @property
    def works(self) -> bool:
        """It has a queue pair that is connected."""
        return self.state in (State.READY, State.LEAVING)

    def submit(self, frame: Frame) -> None:
        self._waiting.append(frame)
        self._engine.stir(self)

    def give_up(self, reason: Reason, message: str, now_s: float) -> None:
        """Ends the queue pair, and all frames once their sources are quiet."""
        frames = [*self._open.values(), *self._waiting]
        self._waiting.clear()
        self._leave(now_s, partial(self._end_all, frames, reason, message))

    # Party

    def pump(self, now_s: float) -> None:
        if self.state is State.IDLE and self._waiting and now_s >= self.patience.until_s:
            self._dial(now_s)
        if self.state is State.LEAVING:
            self._ready_end.flush()
        if self.state is not State.READY:
            return
        end = self._ready_end
        while self._waiting and len(self._open) < WINDOW_FRAMES:
            frame = self._waiting.popleft()
            frame.progress_s = now_s
            if not self._open:
                self._oldest_s = now_s
            self._open[frame.sequence] = frame
            end.say(frame.ask)
        said = end.flush()
        if post_some(end, self._writing, tell=True) or said:
            self._said_s = now_s

    def take(self, done: Completion, now_s: float) -> None:
        end = self._end
        if end is None:
            return
        found = end.take(done)
        self._engine.stir(self)
        match found:
            case None:
                if self.state is State.LEAVING and end.drained and not end.unsaid:
                    self._leave(now_s, lambda now_s: self._engine.stir(self))
            case ChainEnd(frame):
                frame.on_way -= 1
                frame.progress_s = now_s
                self._finish(frame, now_s)
            case Heard(message):
                self._hear(message, now_s)
            case _:
                raise LinkBroken("an immediate came to the end that sends layers")

    def due_s(self) -> float:
        match self.state:
            case State.IDLE:
                return self.patience.until_s if self._waiting else math.inf
            case State.DIALLING | State.LEAVING:
                return self._since_s + self._settings.io_timeout_s
            case State.READY if self._open:
                return min(self._overdue_s, self._said_s + self._probe_s)
            case State.READY:
                return max(self._since_s, self._said_s) + LINGER_S

    def tick(self, now_s: float) -> None:
        timeout_s = self._settings.io_timeout_s
        match self.state:
            case State.DIALLING:
                self._dial_failed(f"no answer for {timeout_s:g} s", Reason.PEER_LOST, now_s)
            case State.LEAVING:
                self._leave(now_s, lambda now_s: self._engine.stir(self))
            case State.READY if self._open:
                if now_s >= self._overdue_s:
                    raise LinkBroken(f"nothing moved for {timeout_s:g} s")
                if now_s >= self._said_s + self._probe_s:
                    self._said_s = now_s
                    if not self._ready_end.unsaid:
                        self._ready_end.say(Credit())
            case State.READY if not self._waiting:
                self.state, self._since_s = State.LEAVING, now_s
                self._ready_end.say(Bye())
                self._ready_end.flush()
            case _:
                pass

    def broke(self, error: LinkBroken | FabricError, now_s: float) -> None:
        """Applied frames end; the others are repeated, behind the rest where it was their own chain that failed."""
        culprit = error.token if isinstance(error, LinkBroken) else None
        frames = list(self._open.values())
        self._leave(now_s, partial(self._sort_out, frames, culprit, f"link to {self._route.node}: {error}"))

    def answered(self, generation: int, answer: Answer | KvmoverError, now_s: float) -> None:
        """What the other node says to an offer; to an older one: nothing happens."""
        if self.state is not State.DIALLING or generation != self._generation:
            return
        if isinstance(answer, KvmoverError):
            self._dial_failed(str(answer), reason_of(answer), now_s)
            return
        if answer.receive_slots < SLOTS_MIN or answer.message_bytes < ASK_BYTES:
            text = f"{answer.receive_slots} slots of {answer.message_bytes} bytes, {SLOTS_MIN} of {ASK_BYTES} are the least"
            self._dial_failed(text, Reason.PEER_LOST, now_s)
            return
        compare_with_peer(self._route.node, self.key.kv_class, self._marks, answer.marks)
        end = self._ready_end
        try:
            end.prepare(answer.receive_slots)
        except FabricError as error:
            self._dial_failed(str(error), Reason.PEER_LOST, now_s)
            return
        self._engine.connect(end, answer.end, self._marks, partial(self._connected, end))

    def _connected(self, end: LinkEnd[Frame], error: FabricError | None, now_s: float) -> None:
        if self._end is not end:
            return
        if error is not None:
            self._dial_failed(str(error), Reason.PEER_LOST, now_s)
            return
        self.state = State.READY
        self._since_s = self._said_s = now_s
        self._engine.stir(self)

    # Dialling

    def _dial(self, now_s: float) -> None:
        key = self.key
        try:
            end = self._end = self._engine.make_end(key.cnic, ASKER)
        except FabricError as error:
            text = f"no link to {self._route.node}: {error}"
            if isinstance(error, TooManyEnds) or self._route.pairs == 1:
                self.give_up(Reason.POOL_EXHAUSTED, text, now_s)
            else:
                self._fail(Reason.POOL_EXHAUSTED, text, now_s)
            return
        self._engine.enlist(key.cnic, end, self)
        self.state, self._since_s = State.DIALLING, now_s
        self._generation = generation = self._route.next_generation()
        offer = Offer(
            PROTOCOL,
            key.link_id,
            generation,
            key.kv_class,
            self._marks,
            key.peer_cnic,
            end.path,
            ASKER.receive_slots,
            GRANT_BYTES,
        )
        engine = self._engine

        def answered(answer: Answer | KvmoverError) -> None:
            engine.post(partial(self.answered, generation, answer))

        try:
            self._route.dial(offer, answered)
        except Exception as error:  # noqa: BLE001 - an offer that can't be sent is a node that can't be reached
            self._dial_failed(repr(error), Reason.PEER_LOST, now_s)

    def _dial_failed(self, message: str, reason: Reason, now_s: float) -> None:
        """Nothing was posted on what was dialled, so no source is touched by it."""
        text = f"no link to {self._route.node}: {message}{self.patience.broken_by}"
        self.patience.broken_by = ""
        if reason is Reason.PEER_LOST:
            self._leave(now_s, lambda now_s: None)
            self._fail(reason, text, now_s)
        else:
            self.give_up(reason, text, now_s)
            self.patience.rest(now_s)

    def _fail(self, reason: Reason, message: str, now_s: float) -> None:
        """No queue pair is left of it; its pair of CNICs is out for a while."""
        frames, self._waiting = self._waiting, deque()
        self.patience.rest(now_s, elsewhere=self._route.works_elsewhere(self.key))
        self.patience.doubted = True
        self._route.failed(self.key, frames, reason, message, now_s)

    # Ends

    @property
    def _ready_end(self) -> LinkEnd[Frame]:
        assert self._end is not None, f"link {self.key} is {self.state.value} without an end"
        return self._end

    @property
    def _overdue_s(self) -> float:
        """When the oldest frame has not moved for too long."""
        oldest = next(iter(self._open.values()))
        return max(oldest.progress_s, self._oldest_s) + self._settings.io_timeout_s

    def _leave(self, now_s: float, then: Callable[[float], None]) -> None:
        """No queue pair any more; `then` once nothing of it touches memory."""
        end, self._end = self._end, None
        self.state = State.IDLE
        self._open.clear()
        self._writing.clear()
        if end is None:
            then(now_s)
        else:
            self._engine.bury(self.key.cnic, end, now_s, then)

    def _sort_out(self, frames: list[Frame], culprit: object, message: str, now_s: float) -> None:
        repeated, last = list[Frame](), list[Frame]()
        for frame in frames:
            frame.on_way = 0
            if frame.over:
                self._end_frame(frame)
                continue
            frame.breaks += frame is culprit
            frame.begin_anew()
            frame.again = True
            (last if frame is culprit else repeated).append(frame)
        self.reconnects += 1
        self.patience.broken_by = f"; before that, {message}"
        self.repeats += len(repeated) + len(last)
        self.patience.breaks += bool(repeated or last)
        self._waiting.extendleft(reversed(repeated))
        self._waiting.extend(last)
        if self._engine.stopping:
            self.give_up(Reason.SHUTTING_DOWN, "the transport is closed", now_s)
        elif self.patience.breaks >= BREAKS_MAX:
            self.patience.breaks = 0
            self._fail(Reason.PEER_LOST, message, now_s)
        else:
            self.patience.rest(now_s)
            if last and last[0].breaks >= BREAKS_MAX:
                self._waiting.remove(last[0])
                self._end_all(last, Reason.INTERNAL, message, now_s)
        self._engine.stir(self)

    def _end_all(self, frames: deque[Frame] | list[Frame], reason: Reason, message: str, now_s: float) -> None:
        for frame in frames:
            if frame.verdict is None:
                frame.verdict = (reason, message)
            self._end_frame(frame)

    def _end_frame(self, frame: Frame) -> None:
        assert frame.verdict is not None, f"frame {frame.sequence} ends without a verdict"
        reason, message = frame.verdict
        self._route.ended(frame, reason, frame.payload_bytes if reason is Reason.OK else 0, message)

    def _finish(self, frame: Frame, now_s: float) -> None:
        if not frame.over:
            return
        if next(iter(self._open)) == frame.sequence:
            self._oldest_s = now_s
        del self._open[frame.sequence]
        if frame.verdict is not None and frame.verdict[0] is Reason.OK:
            self.patience.prove()
        self._end_frame(frame)

    # Words

    def _hear(self, message: Message, now_s: float) -> None:
        match message:
            case Credit():
                return
            case Grant() | Applied() | Refused() | OtherCnic() | Revoke():
                frame = self._open.get(message.sequence)
            case _:
                raise LinkBroken(f"{type(message).__name__} came to the end that sends layers")
        if frame is None or frame.verdict is not None:
            raise LinkBroken(f"{type(message).__name__} of frame {message.sequence}, which does not wait for it")
        frame.progress_s = now_s
        match message:
            case Grant():
                self._granted(frame, message)
            case Revoke():
                if not frame.written and not frame.abandoned:
                    self._abandon(frame)
            case Applied():
                if not frame.written and frame.payload_bytes and not frame.again:
                    raise LinkBroken(f"frame {frame.sequence} is said to be applied, it was not written")
                self._judge(frame, Reason.OK, "", now_s)
            case Refused(_, status, _, words):
                reason, text = REASONS[status], f"{self._route.node}: {words}"
                self._judge(frame, Reason.INTERNAL if frame.fault else reason, frame.fault or text, now_s)
            case OtherCnic(_, cnic):
                self._move(frame, cnic, now_s)

    def _granted(self, frame: Frame, grant: Grant) -> None:
        if frame.abandoned:
            return
        try:
            frame.grant(grant, self.key.cnic, self._book)
        except NotRegistered as error:
            frame.fault = f"layer {frame.send.layer} can't be read: {error}"
            self._abandon(frame)
            return
        if frame.chain is not None:
            self._writing.append(frame)

    def _abandon(self, frame: Frame) -> None:
        """What is posted of it lands before this message does."""
        frame.abandon()
        if frame in self._writing:
            self._writing.remove(frame)
        self._ready_end.say(Abandoned(frame.sequence))

    def _judge(self, frame: Frame, reason: Reason, message: str, now_s: float) -> None:
        frame.verdict = (reason, message)
        if frame in self._writing:
            self._writing.remove(frame)
        self._finish(frame, now_s)

    def _move(self, frame: Frame, cnic: int, now_s: float) -> None:
        if frame.chain is not None or frame.settled or not 0 <= cnic < self._route.peer_cnics:
            raise LinkBroken(f"frame {frame.sequence} is sent to CNIC {cnic} of {self._route.peer_cnics}")
        if next(iter(self._open)) == frame.sequence:
            self._oldest_s = now_s
        del self._open[frame.sequence]
        frame.begin_anew()
        frame.settled = True
        self._route.moved(frame, cnic, now_s)
