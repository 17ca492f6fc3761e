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
    said: int = 0
    left_out: int = 0


class LogObserver:
    """At most `BURST_EVENTS_MAX` lines of one kind in a window; the next line of that kind says how many were left out.

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

    def session_ended(self, session_id: str, client: str, why: str) -> None:
        self._say(logging.INFO, ("session_ended",), session_id=session_id, client=client, why=why)

    def peer_changed(self, node: str, state: str, message: str) -> None:
        level = logging.WARNING if state == "down" else logging.INFO
        self._say(level, ("peer_changed", node, state), message=message)

    def _say(self, level: int, kind: tuple[str, ...], **fields: object) -> None:
        """`kind` is the event and the labels that make two lines repeats of each other."""
        if not log.isEnabledFor(level):
            return
        left_out = self._left_out(kind)
        if left_out is None:
            return
        names = dict(zip(_LABELS[kind[0]], kind[1:], strict=True))
        more = {"left_out": left_out} if left_out else {}
        log.log(level, kind[0], extra={"fields": {**names, **fields, **more}})

    def _left_out(self, kind: tuple[str, ...]) -> int | None:
        """None: this line is one too many. Else how many of its kind were left out before it."""
        now_ns = self._now_ns()
        window = self._windows.get(kind)
        left_out = 0
        if window is None or now_ns - window.began_ns >= WINDOW_NS:
            left_out = window.left_out if window is not None else 0
            window = self._windows[kind] = _Window(now_ns)
            self._windows.move_to_end(kind)
            if len(self._windows) > KINDS_MAX:
                self._windows.popitem(last=False)
        if window.said >= BURST_EVENTS_MAX:
            window.left_out += 1
            return None
        window.said += 1
        return left_out


_LABELS = {
    "request_ended": ("kind", "reason"),
    "blocks_read": (),
    "block_failed": ("root", "reason"),
    "session_ended": (),
    "peer_changed": ("node", "state"),
}


def _level(reason: Reason) -> int:
    if reason in QUIET:
        return logging.DEBUG
    if reason is Reason.INTERNAL:
        return logging.ERROR
    return logging.INFO if reason in EXPECTED else logging.WARNING
