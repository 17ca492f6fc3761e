"""Whether a request that is being read should move blocks from one of its readers to another: work stealing. Pure.

Who would end last gives to who gains most by it, so that both end together, by the rates that were seen lately. A move costs a
call to each of them, so it has to gain more than a floor and a share of what is left: parts never swing to and fro.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvmoverd.core.shares import Depth
from kvmoverd.core.split import RATE_ASSUMED_BYTES_PER_S, Reader

ASK_AGAIN_NS = 50_000_000
"""A part is left alone for so long after it gave up blocks: the rates of those who took them have to show first."""
GAIN_SHARE = 0.1
"""Of the time that is left, which a move has to gain at least."""
WINDOW_NS = 100_000_000
"""Rates are those of the last so many nanoseconds of reading."""
SILENCE_NS = 30_000_000
"""Progress from other nodes comes every 20 ms and takes a while: until then a reader is taken to go on as before."""
STOPPED_NS = 100_000_000
"""Who reads nothing for so long, and for as long as `STOPPED_BLOCKS` take it, gives all it can."""
STOPPED_BLOCKS = 4
STARVED_SHARE = 0.01
"""Of its rate is what a reader counts for whose lane to the prefill node starves."""
_MARKS = 8
_NEVER_NS = 1 << 63
_PRIOR_S = 0.005
"""A rate that was known before counts as if it had been seen for so long."""


class Pace:
    """What one part has read, and when. `begun_ns`: when it was started."""

    def __init__(self, begun_ns: int) -> None:
        self.begun_ns = begun_ns
        self.heard_ns = begun_ns
        """When it last had read more than before."""
        self.first_ns: int | None = None
        """When it was heard of for the first time, with more than nothing."""
        self.read_bytes = 0
        self._marks = deque([(begun_ns, 0)], maxlen=_MARKS + 2)

    def heard(self, read_bytes: int, now_ns: int) -> None:
        """It has read so many bytes by now, of all; what is no more than before changes nothing."""
        if read_bytes <= self.read_bytes:
            return
        self.read_bytes, self.heard_ns = read_bytes, now_ns
        if self.first_ns is None:
            self.first_ns = now_ns
            self._marks.append((now_ns, read_bytes))
        if now_ns - self._marks[-1][0] >= WINDOW_NS // _MARKS:
            self._marks.append((now_ns, read_bytes))

    def read_by(self, at_ns: int) -> float:
        """Bytes that it had read then, within the last window; between two marks it read evenly."""
        if at_ns >= self.heard_ns:
            return self.read_bytes
        before_ns, before = self._marks[0]
        for mark_ns, read_bytes in self._marks:
            if mark_ns > at_ns:
                return before + (read_bytes - before) * (at_ns - before_ns) / max(1, mark_ns - before_ns)
            before_ns, before = mark_ns, read_bytes
        return before + (self.read_bytes - before) * (at_ns - before_ns) / (self.heard_ns - before_ns)


@dataclass(frozen=True, slots=True)
class Going:
    """A part that is being read, or has been. `blocks`: how many it has; `begun_blocks`: leading ones that it can't give up.

    `read_bytes`: since `since_ns`, when it began. `pooled_blocks`: of its blocks, those that were never to be read. `may_give`:
    it can be asked now; `may_take`: its node can get one more part. `depth`: its node's storage NIC when it began.
    """

    part: int
    node: str
    blocks: int
    begun_blocks: int
    read_bytes: int
    since_ns: int
    starved: bool
    may_give: bool
    may_take: bool
    depth: Depth
    pooled_blocks: int = 0
    pace: Pace | None = None
    """Without it the rate is that of its whole life."""
    done: bool = False
    """It waits for no read any more."""

    @property
    def unbegun_blocks(self) -> int:
        return 0 if self.done else max(0, self.blocks - self.begun_blocks)

    def left_bytes(self, block_bytes: int) -> int:
        return 0 if self.done else max(0, (self.blocks - self.pooled_blocks) * block_bytes - self.read_bytes)

    def pace_at(self, now_ns: int) -> Pace:
        if self.pace is not None:
            return self.pace
        pace = Pace(self.since_ns)
        pace.heard(self.read_bytes, now_ns)
        return pace


@dataclass(frozen=True, slots=True)
class Move:
    """The part keeps `kept_blocks` of its blocks, the rest goes to `to_node`. `why`: "late", "starved" or "stopped"."""

    part: int
    kept_blocks: int
    to_node: str
    why: str


@dataclass(frozen=True, slots=True)
class _Pull:
    """One node's reading of this request, as far as it can be foretold. `waits_s`: until it begins; `gives`: the part to ask."""

    node: str
    left_bytes: float
    rate: float
    waits_s: float
    takes: bool
    gives: Going | None = None
    fixed: bool = True
    """It has no block that it could give, now or later."""
    why: str = "late"

    def ends_s(self, more_bytes: float = 0.0) -> float:
        left = self.left_bytes + more_bytes
        return self.waits_s + left / self.rate if left > 0 else 0.0


def choose_move(
    parts: Sequence[Going], *, idle: Sequence[Reader], block_bytes: int, now_ns: int, floor_s: float
) -> Move | None:
    """The one move that is worth most now; None when nothing is worth it. `idle`: nodes of the request without a part.

    A reader that is late gives as much as lets both end together, one whose lane starves or that has stopped gives all it can.
    Nothing is moved while a reader that can't give anything would keep the request waiting all the same.
    """
    if block_bytes <= 0 or not any(part.may_give and part.unbegun_blocks for part in parts):
        return None
    pulls = _pulls(parts, idle, block_bytes, now_ns)
    givers = [pull for pull in pulls if pull.gives is not None]
    giver = max(givers, key=lambda pull: (pull.why != "late", pull.ends_s()))
    others_s = max((pull.ends_s() for pull in pulls if pull.fixed and pull is not giver), default=0.0)
    best: Move | None = None
    best_s = max(floor_s, GAIN_SHARE * giver.ends_s() if giver.why == "late" else 0.0)
    for taker in pulls:
        if not taker.takes or taker.node == giver.node:
            continue
        move, ends_s = _moved(giver, taker, block_bytes)
        gain_s = giver.ends_s() - max(ends_s, others_s)
        if move is not None and gain_s > best_s:
            best, best_s = move, gain_s
    return best


def _moved(giver: _Pull, taker: _Pull, block_bytes: int) -> tuple[Move | None, float]:
    """What goes from the one to the other, and when both have ended then."""
    assert giver.gives is not None, f"{giver.node} has nothing to give"
    blocks = giver.gives.unbegun_blocks
    if giver.why == "late":
        apart_s = giver.ends_s() - taker.waits_s - taker.left_bytes / taker.rate
        blocks = min(blocks, int(apart_s / (1 / giver.rate + 1 / taker.rate) / block_bytes))
    if blocks <= 0:
        return None, 0.0
    moved_bytes = float(blocks * block_bytes)
    move = Move(giver.gives.part, giver.gives.blocks - blocks, taker.node, giver.why)
    return move, max(giver.ends_s(-moved_bytes), taker.ends_s(moved_bytes))


def _pulls(parts: Sequence[Going], idle: Sequence[Reader], block_bytes: int, now_ns: int) -> list[_Pull]:
    depths = [part.depth for part in parts] + [reader.depth for reader in idle]
    fastest = max((depth.rate_bytes_per_s for depth in depths), default=0)
    assumed = float(fastest if fastest > 0 else RATE_ASSUMED_BYTES_PER_S)
    heed_starved = not all([*(part.starved for part in parts), *(reader.starved for reader in idle)])
    by_node: dict[str, list[Going]] = {}
    for part in parts:
        by_node.setdefault(part.node, []).append(part)
    pulls = [_pull(found, assumed, block_bytes, now_ns, heed_starved=heed_starved) for found in by_node.values()]
    for reader in idle:
        if reader.node not in by_node:
            rate = float(reader.depth.rate_bytes_per_s or assumed)
            takes = not (reader.starved and heed_starved)
            pulls.append(_Pull(reader.node, 0.0, rate, reader.depth.queue_bytes / rate, takes))
    return pulls


def _pull(parts: list[Going], assumed: float, block_bytes: int, now_ns: int, *, heed_starved: bool) -> _Pull:
    """All parts of one node: they share its storage NIC."""
    known = float(parts[0].depth.rate_bytes_per_s or assumed)
    left_bytes = float(sum(part.left_bytes(block_bytes) for part in parts))
    rate, silent_s, waits_s = _seen(parts, known, left_bytes, now_ns)
    starved = heed_starved and any(part.starved for part in parts)
    stopped = silent_s > max(STOPPED_NS / 1e9, STOPPED_BLOCKS * block_bytes / known)
    left_bytes -= min(left_bytes, rate * min(silent_s, SILENCE_NS / 1e9))
    left_bytes = max(left_bytes, float(sum(part.unbegun_blocks for part in parts) * block_bytes))
    unbegun = max(parts, key=lambda part: (part.may_give, part.unbegun_blocks))
    return _Pull(
        parts[0].node,
        left_bytes,
        rate * STARVED_SHARE if starved else rate,
        waits_s,
        takes=not (starved or stopped) and all(part.may_take for part in parts),
        gives=unbegun if unbegun.may_give and unbegun.unbegun_blocks else None,
        fixed=not any(part.unbegun_blocks for part in parts),
        why="starved" if starved else "stopped" if stopped else "late",
    )


def _seen(parts: Sequence[Going], known: float, left_bytes: float, now_ns: int) -> tuple[float, float, float]:
    """Bytes per second that a node reads, how long it has read nothing, and how long it waits for its turn, in seconds.

    The rate is what was seen in the last window in which it had something to read, and a little of what was known before.
    Before the first bytes it has to hear of them, and to do what is ahead of it: waiting for that says nothing of its rate.
    """
    paces = [part.pace_at(now_ns) for part in parts]
    busy_ns = _busy_since(parts, paces)
    heard_ns = max(busy_ns, *(pace.heard_ns for pace in paces))
    first_ns = min(
        (pace.first_ns for pace in paces if pace.first_ns is not None and pace.first_ns >= busy_ns), default=busy_ns
    )
    begin_ns = max(first_ns, heard_ns - WINDOW_NS)
    seen_bytes = sum(pace.read_bytes - pace.read_by(begin_ns) for pace in paces)
    silent_s = (now_ns - heard_ns) / 1e9 if left_bytes > 0 else 0.0
    waits_s = 0.0
    if not any(pace.read_bytes for pace in paces):
        queue_s = parts[0].depth.queue_bytes / known
        silent_s, waits_s = max(0.0, silent_s - queue_s), max(0.0, queue_s - silent_s)
    seen_s = (heard_ns - begin_ns) / 1e9 + max(0.0, silent_s - SILENCE_NS / 1e9)
    return (seen_bytes + known * _PRIOR_S) / (seen_s + _PRIOR_S), silent_s, waits_s


def _busy_since(parts: Sequence[Going], paces: Sequence[Pace]) -> int:
    """Since when a node has always had a part to read."""
    if len(paces) == 1:
        return paces[0].begun_ns
    since_ns = until_ns = 0
    for place, (pace, part) in enumerate(sorted(zip(paces, parts, strict=True), key=lambda pair: pair[0].begun_ns)):
        if not place or pace.begun_ns > until_ns:
            since_ns, until_ns = pace.begun_ns, pace.begun_ns
        until_ns = max(until_ns, pace.heard_ns if part.done else _NEVER_NS)
    return since_ns
