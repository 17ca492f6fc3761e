"""The end of a link that is written to: grants places of its sinks, hears that they are filled, and fences who can't be trusted.

A frame that was granted is a writer of its sink until its immediate came, or its sender gave it up on the same queue pair,
or this end was destroyed. A dead or stopped sender's CNIC goes on with what is posted: only the last of these stops it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from kvmoverd.adapters.transport.frames import U32_MAX, Status
from kvmoverd.adapters.transport.verbs.claims import Claims, Granted
from kvmoverd.adapters.transport.verbs.end import ChainEnd, Heard, LinkBroken, LinkEnd, Told
from kvmoverd.adapters.transport.verbs.engine import Engine
from kvmoverd.adapters.transport.verbs.fabric import Completion, FabricError
from kvmoverd.adapters.transport.verbs.link import SILENCE_S, WINDOW_FRAMES, LinkSettings
from kvmoverd.adapters.transport.verbs.messages import (
    PLACES_PER_MESSAGE,
    Abandoned,
    Applied,
    Ask,
    Bye,
    Credit,
    Grant,
    Message,
    Refused,
    Revoke,
)
from kvmoverd.adapters.transport.verbs.pasts import LinkPast
from kvmoverd.core.errors import KvmoverError, PeerUnreachable
from kvmoverd.ports.connection import Answer, Answered
from kvmoverd.ports.transport import Sender

LinkName: TypeAlias = tuple[Sender, int]
"""Who holds the link, and its id there."""


class Siblings(Protocol):
    """All links that others hold here, to one of them."""

    def gone(self, link: IncomingLink, *, fenced: bool) -> None:
        """`fenced`: frames were open, and their sender did not let go of them."""

    def told(self, sender: Sender, sequence: int) -> bool:
        """Was that frame applied and told, over whatever link?"""

    def take_over(self, link: IncomingLink, sequence: int, now_s: float) -> None:
        """The frame comes over `link` now: another one that it is open on is fenced. Raises `LinkBroken` if that takes time."""


@dataclass(slots=True)
class _Open:
    """A frame that was granted. `said`: places that were; `fence_s`: when its sender must have let go."""

    sequence: int
    granted: Granted
    said: int = 0
    fence_s: float = math.inf

    @property
    def wholly_granted(self) -> bool:
        return self.said == len(self.granted.places)


class IncomingLink:
    """A `Party`. `siblings.gone` is called once, when nothing can land through it any more.

    `answered` is called once, by `opened` or `fence`.
    """

    def __init__(
        self,
        name: LinkName,
        cnic: int,
        end: LinkEnd[object],
        past: LinkPast,
        claims: Claims,
        engine: Engine,
        settings: LinkSettings,
        siblings: Siblings,
        answered: Answered,
        now_s: float,
    ) -> None:
        self.name = name
        self.cnic = cnic
        self._end: LinkEnd[object] | None = end
        self._past = past
        self._claims = claims
        self._engine = engine
        self._settings = settings
        self._siblings = siblings
        self._answered: Answered | None = answered
        self._open: dict[int, _Open] = {}
        self._heard_s = now_s

    @property
    def open_frames(self) -> int:
        return len(self._open)

    def has_open(self, sequence: int) -> bool:
        return sequence in self._open

    def opened(self, answer: Answer) -> None:
        """It is connected: its sender may speak."""
        self._tell(answer)

    def fence(self, now_s: float, why: str = "this node has ended the link") -> None:
        """Destroys this end. Afterwards nothing lands, forgotten sinks are quiet, and cut layers are free for another try."""
        self._tell(PeerUnreachable(why))
        end, self._end = self._end, None
        if end is not None:
            frames = list(self._open.values())
            self._engine.bury(self.cnic, end, now_s, partial(self._quiet, frames))

    def revoke_forgotten(self, now_s: float) -> None:
        """Frames whose sink was forgotten: their sender must let go of them within the fence's time."""
        if self._end is None:
            # Already fenced: they are let go of once the device has destroyed the end.
            return
        for frame in [frame for frame in self._open.values() if frame.granted.forgotten and frame.fence_s == math.inf]:
            if frame.wholly_granted:
                frame.fence_s = now_s + self._settings.fence_s
                self._say(Revoke(frame.sequence))
            else:
                self._refuse(frame, f"sink {frame.granted.claim.opened.sink.sink_id} was closed while the frame came")

    # Party

    def pump(self, now_s: float) -> None:
        end = self._end
        if end is None:
            return
        end.flush()
        for frame in self._open.values():
            while not frame.wholly_granted and not end.unsaid:
                places = frame.granted.places
                part = places[frame.said : frame.said + PLACES_PER_MESSAGE]
                end.say(Grant(frame.sequence, len(places), frame.said, part))
                frame.said += len(part)
                end.flush()

    def take(self, done: Completion, now_s: float) -> None:
        end = self._end
        if end is None:
            return
        found = end.take(done)
        self._engine.stir(self)
        match found:
            case None:
                return
            case Heard(message):
                self._heard_s = now_s
                self._hear(message, now_s)
            case Told(immediate):
                self._heard_s = now_s
                self._applied(immediate)
            case ChainEnd():
                raise LinkBroken("a chain ended at the end that is written to")

    def due_s(self) -> float:
        if self._end is None:
            return math.inf
        if not self._open:
            return self._heard_s + SILENCE_S
        fence_s = min(frame.fence_s for frame in self._open.values())
        return min(fence_s, self._heard_s + self._settings.io_timeout_s)

    def tick(self, now_s: float) -> None:
        if not self._open:
            self.fence(now_s)
            return
        if min(frame.fence_s for frame in self._open.values()) <= now_s:
            raise LinkBroken(f"its sender did not let go of a forgotten sink within {self._settings.fence_s:g} s")
        raise LinkBroken(f"its sender said nothing for {self._settings.io_timeout_s:g} s")

    def broke(self, error: LinkBroken | FabricError, now_s: float) -> None:
        self.fence(now_s)

    # Frames

    def _hear(self, message: Message, now_s: float) -> None:
        match message:
            case Ask():
                self._asked(message, now_s)
            case Abandoned(sequence):
                frame = self._open.get(sequence)
                if frame is None:
                    raise LinkBroken(f"frame {sequence} was abandoned, it is not open")
                self._refuse(frame, f"sink {frame.granted.claim.opened.sink.sink_id} was closed while the frame came")
            case Credit():
                return
            case Bye():
                if self._open:
                    raise LinkBroken(f"goodbye with {len(self._open)} frames open")
                self.fence(now_s)
            case _:
                raise LinkBroken(f"{type(message).__name__} came to the end that is written to")

    def _asked(self, ask: Ask, now_s: float) -> None:
        if ask.sequence & U32_MAX in self._open_by_immediate() or len(self._open) >= WINDOW_FRAMES:
            raise LinkBroken(
                f"frame {ask.sequence} is asked for, {len(self._open)} are open, at most {WINDOW_FRAMES} may be"
            )
        if ask.again:
            if self._siblings.told(self.name[0], ask.sequence):
                self._say(Applied(ask.sequence))
                return
            self._siblings.take_over(self, ask.sequence, now_s)
        found = self._claims.enter(self.name[0], self.cnic, ask)
        if isinstance(found, Granted):
            self._open[ask.sequence] = _Open(ask.sequence, found)
            return
        if isinstance(found, Applied):
            self._past.told.append(ask.sequence)
        self._say(found)

    def _applied(self, immediate: int) -> None:
        frame = self._open_by_immediate().get(immediate)
        if frame is None or not frame.wholly_granted:
            raise LinkBroken(f"immediate {immediate:#x} of a frame that was not granted")
        del self._open[frame.sequence]
        answer = self._claims.end(frame.granted, frame.sequence)
        if isinstance(answer, Applied):
            self._past.told.append(frame.sequence)
        self._say(answer)

    def _refuse(self, frame: _Open, words: str) -> None:
        """Nothing of it is on its way."""
        del self._open[frame.sequence]
        self._claims.drop(frame.granted)
        self._say(Refused(frame.sequence, Status.REFUSED, 0, words))

    def _quiet(self, frames: list[_Open], now_s: float) -> None:
        self._open.clear()
        for frame in frames:
            self._claims.drop(frame.granted)
        self._siblings.gone(self, fenced=bool(frames))

    def _open_by_immediate(self) -> dict[int, _Open]:
        return {sequence & U32_MAX: frame for sequence, frame in self._open.items()}

    def _tell(self, answer: Answer | KvmoverError) -> None:
        answered, self._answered = self._answered, None
        if answered is not None:
            with contextlib.suppress(Exception):
                # Who asked may be gone.
                answered(answer)

    def _say(self, message: Message) -> None:
        if self._end is not None:
            self._end.say(message)
            self._engine.stir(self)
