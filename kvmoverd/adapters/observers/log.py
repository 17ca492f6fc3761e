"""Writes what happens to the log: one line per event, repeats of one kind thinned out."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvmoverd.core.status import Reason

log = logging.getLogger("kvmoverd.events")

BURST_EVENTS_MAX = 10
WINDOW_NS = 10_000_000_000
KINDS_MAX = 1024

QUIET = frozenset({Reason.OK, Reason.MISS})
EXPECTED = frozenset({Reason.PREFIX_CUT, Reason.CANCELLED, Reason.STALE_ATTEMPT, Reason.SHUTTING_DOWN, Reason.DROPPED})


@dataclass(slots=True)
class _Window:
    began_ns: int
    level: int
    said: int = 0
    left_out: int = 0


class LogObserver:
    """At most `BURST_EVENTS_MAX` lines of one kind in a window; at its end one more says how many were left out.

    `tell_left_out` sees to that, and is to be called now and then; else the next line of that kind says so.

    What went as it should is logged at debug, what a caller or an operator wanted at info, the rest as a warning, and
    our own faults as errors. `now_ns` is monotonic.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._windows: OrderedDict[tuple[str, ...], _Window] = OrderedDict()

    def request_ended(self, kind: str, request_id: str, reason: Reason, message: str) -> None:
        self._say(_level(reason), ("request_ended", kind, reason.name), request_id=request_id, message=message)

    def blocks_read(self, blocks: int, read_bytes: int) -> None:
        self._say(logging.DEBUG, ("blocks_read",), blocks=blocks, read_bytes=read_bytes)

    def block_failed(self, root: str, key: bytes, reason: Reason, message: str) -> None:
        self._say(_level(reason), ("block_failed", root, reason.name), key=key.hex(), message=message)

    def blocks_dropped(self, why: str, blocks: int, message: str) -> None:
        self._say(logging.WARNING, ("blocks_dropped", why), blocks=blocks, message=message)

    def session_ended(self, session_id: str, client: str, why: str) -> None:
        self._say(logging.INFO, ("session_ended",), session_id=session_id, client=client, why=why)

    def peer_changed(self, node: str, state: str, message: str) -> None:
        level = logging.WARNING if state == "down" else logging.INFO
        self._say(level, ("peer_changed", node, state), message=message)

    def lane_changed(self, lane: str, node: str, state: str, message: str) -> None:
        level = logging.WARNING if state == "starved" else logging.INFO
        self._say(level, ("lane_changed", lane, node, state), message=message)

    def tell_left_out(self, *, all_windows: bool = False) -> None:
        """One line for each window that is over and left lines out; `all_windows`: whether it is over or not."""
        now_ns = self._now_ns()
        over = [kind for kind, one in self._windows.items() if all_windows or now_ns - one.began_ns >= WINDOW_NS]
        for kind in over:
            self._end(kind, self._windows.pop(kind))

    def _end(self, kind: tuple[str, ...], window: _Window) -> None:
        if window.left_out:
            fields = {**_labels(kind), "left_out": window.left_out, "message": "as those before"}
            log.log(window.level, kind[0], extra={"fields": fields})

    def _say(self, level: int, kind: tuple[str, ...], **fields: object) -> None:
        """`kind` is the event and the labels that make two lines repeats of each other."""
        if not log.isEnabledFor(level):
            return
        left_out = self._left_out(kind, level)
        if left_out is None:
            return
        more = {"left_out": left_out} if left_out else {}
        log.log(level, kind[0], extra={"fields": {**_labels(kind), **fields, **more}})

    def _left_out(self, kind: tuple[str, ...], level: int) -> int | None:
        """None: this line is one too many. Else how many of its kind were left out before it."""
        now_ns = self._now_ns()
        window = self._windows.get(kind)
        left_out = 0
        if window is None or now_ns - window.began_ns >= WINDOW_NS:
            left_out = window.left_out if window is not None else 0
            window = self._windows[kind] = _Window(now_ns, level)
            self._windows.move_to_end(kind)
            if len(self._windows) > KINDS_MAX:
                self._end(*self._windows.popitem(last=False))
        if window.said >= BURST_EVENTS_MAX:
            window.left_out += 1
            return None
        window.said += 1
        return left_out


_LABELS = {
    "request_ended": ("kind", "reason"),
    "blocks_read": (),
    "block_failed": ("root", "reason"),
    "blocks_dropped": ("why",),
    "session_ended": (),
    "peer_changed": ("node", "state"),
    "lane_changed": ("lane", "node", "state"),
}


def _labels(kind: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(_LABELS[kind[0]], kind[1:], strict=True))


def _level(reason: Reason) -> int:
    if reason in QUIET:
        return logging.DEBUG
    if reason is Reason.INTERNAL:
        return logging.ERROR
    return logging.INFO if reason in EXPECTED else logging.WARNING
