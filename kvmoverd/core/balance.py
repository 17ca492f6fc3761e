"""Whether a request that is being read should move blocks from one of its readers to another: work stealing. Pure.

Who would end last gives to who gains most by it, so that both end together, by the rates that were seen lately. A move costs a
call to each of them, and what is known of other nodes is some milliseconds old: it has to gain more than a floor, more than that
age, and more than a share of what is left. Readers that are equal keep what they have, and parts never swing to and fro.

Before the prefix is known whole blocks move; afterwards the rest of a part, once: of its last blocks the layers that no device
reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvmoverd.core.levelling import RATE_ASSUMED_BYTES_PER_S
from kvmoverd.core.remains import Remains
from kvmoverd.core.shares import Depth
from kvmoverd.core.split import Reader

ASK_AGAIN_NS = 50_000_000
"""The readers of a request are left alone for so long after a move: the rates of those who took blocks have to show first."""
PROGRESS_NS = 20_000_000
"""How often other nodes tell how far they are."""
GAIN_NS = PROGRESS_NS
"""Who is late by less than what is not known of the others may not be late at all."""
GAIN_SHARE = 0.1
"""Of the time that is left, which a move has to gain at least."""
REST_GAIN_SHARE = 0.2
"""The same for the rest of a part, which it gives once only: later it could not help itself any more."""
WINDOW_NS = 100_000_000
"""Rates are those of the last so many nanoseconds of reading."""
SETTLED_NS = WINDOW_NS // 2
SETTLED_SHARE = 0.75
"""A rate has settled when it was nearly the same over half the window."""
LEAD_NS = 50_000_000
"""Who has that long to read is not waited for by anybody."""
SILENCE_NS = 30_000_000
"""Progress from other nodes takes a while to come: until then a reader is taken to go on as before."""
STOPPED_NS = 100_000_000
"""Who reads nothing for so long, and for as long as `STOPPED_BLOCKS` take it, gives all it can."""
STOPPED_BLOCKS = 4
TURN_NS = 1_000_000_000
"""A part whose storage NIC reads does not stand still: for so long, and as long again as it had to wait for what was ahead of it,
others are taken to have their turn, or its news to be late."""
STARVED_SHARE = 0.01
"""Of its rate is what a reader counts for whose lane to the prefill node starves."""
_MARKS = 8
_NEVER_NS = 1 << 63
_ANY_ROOM: Mapping[str, int] = MappingProxyType({})
_PRIOR_NS = 5_000_000
"""A rate that was known before counts as if it had been seen for so long, and for what lacks of the window: a few blocks more or
less in a few milliseconds are no rate."""


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
    it can be asked now; `may_take`: its node can get one more part. `depth`: its node's storage NIC when it began; `nic`: now, or
    None when that is not known.
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
    nic: Depth | None = None
    remains: Remains | None = None
    """Of a part that sends: layers that it has left, and could give. None of its blocks is unbegun."""

    @property
    def unbegun_blocks(self) -> int:
        return 0 if self.done or self.remains is not None else max(0, self.blocks - self.begun_blocks)

    def unbegun_bytes(self, block_bytes: int) -> int:
        """What it could give."""
        if self.remains is not None and not self.done:
            return self.remains.most_bytes
        return self.unbegun_blocks * block_bytes

    def left_bytes(self, block_bytes: int) -> int:
        if self.done:
            return 0
        if self.remains is not None:
            return self.remains.left_bytes
        return max(0, (self.blocks - self.pooled_blocks) * block_bytes - self.read_bytes)

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
    """One node's reading of this request, as far as it can be foretold. `waits_s`: until it begins; `queue_s`: what its storage
    NIC has to read for all requests; `gives`: the part to ask."""

    node: str
    left_bytes: float
    rate: float
    waits_s: float
    takes: bool
    queue_s: float = 0.0
    gives: Going | None = None
    fixed: bool = True
    """It has no block that it could give, now or later."""
    why: str = "late"
    recent: float = 0.0
    """Its rate over half the window."""
    is_silent: bool = False
    """Nothing comes from its storage NIC: it may have stopped, and is to give all it can then."""

    @property
    def is_settled(self) -> bool:
        """Does it still read as it did?"""
        return self.rate * SETTLED_SHARE <= self.recent <= self.rate / SETTLED_SHARE

    @property
    def gain_share(self) -> float:
        """Of what is left, which a move from here has to gain."""
        return GAIN_SHARE if self.gives is None or self.gives.remains is None else REST_GAIN_SHARE

    def ends_s(self, less_bytes: float = 0.0) -> float:
        """When it has read its part, or what is left of it."""
        left = self.left_bytes - less_bytes
        return self.waits_s + left / self.rate if left > 0 else 0.0

    @property
    def free_s(self) -> float:
        """When it could begin with one part more: what comes last is read last."""
        return max(self.queue_s, self.waits_s + self.left_bytes / self.rate)


def choose_move(
    parts: Sequence[Going],
    *,
    idle: Sequence[Reader],
    block_bytes: int,
    now_ns: int,
    floor_s: float,
    room_blocks: Mapping[str, int] = _ANY_ROOM,
) -> Move | None:
    """The one move that is worth most now; None when nothing is worth it. `idle`: nodes of the request without a part.

    `room_blocks`: how many blocks a node could take; as many as you like where it says nothing.

    A reader that is late gives as much as lets both end together, one whose lane starves or that has stopped gives all it can. It
    is late only by more than what is not known of the others.
    A part that gets slow just now is not asked for its rest, which it gives but once: it is when its rate has settled, or who
    would take it is about to run out of work; and when it has fallen silent, only as one that has stopped.
    Nothing is moved while a reader that can't give anything would keep the request waiting all the same.
    """
    if block_bytes <= 0 or not any(part.may_give and part.unbegun_bytes(block_bytes) for part in parts):
        return None
    pulls = _pulls(parts, idle, block_bytes, now_ns)
    givers = [pull for pull in pulls if pull.gives is not None]
    giver = max(givers, key=lambda pull: (pull.why != "late", pull.ends_s()))
    best = _best(giver, pulls, block_bytes, floor_s, room_blocks)
    if best is None or best.why != "late" or giver.gives is None or giver.gives.remains is None:
        return best
    if giver.is_silent or (
        not giver.is_settled and min(pull.free_s for pull in pulls if pull.node == best.to_node) > LEAD_NS / 1e9
    ):
        return None
    slow = replace(giver, rate=min(giver.rate, giver.recent))
    return _best(slow, [slow if pull is giver else pull for pull in pulls], block_bytes, floor_s, room_blocks)


def _best(
    giver: _Pull, pulls: Sequence[_Pull], block_bytes: int, floor_s: float, room_blocks: Mapping[str, int]
) -> Move | None:
    """From this giver, to whom most is gained by it."""
    others_s = max((pull.ends_s() for pull in pulls if pull.fixed and pull is not giver), default=0.0)
    best: Move | None = None
    best_s = max(floor_s, GAIN_NS / 1e9, giver.gain_share * giver.ends_s()) if giver.why == "late" else floor_s
    for taker in pulls:
        if not taker.takes or taker.node == giver.node:
            continue
        move, ends_s = _moved(giver, taker, block_bytes, room_blocks.get(taker.node))
        gain_s = giver.ends_s() - max(ends_s, others_s)
        if move is not None and gain_s > best_s:
            best, best_s = move, gain_s
    return best


def _moved(giver: _Pull, taker: _Pull, block_bytes: int, room_blocks: int | None) -> tuple[Move | None, float]:
    """What goes from the one to the other, and when both have ended then."""
    part = giver.gives
    assert part is not None, f"{giver.node} has nothing to give"
    most = part.blocks if room_blocks is None else min(part.blocks, room_blocks)
    level_bytes = math.inf
    if giver.why == "late":
        level_bytes = max(0.0, (giver.ends_s() - taker.free_s) / (1 / giver.rate + 1 / taker.rate))
    remains = part.remains or Remains(0, ((part.unbegun_blocks, block_bytes),))
    blocks, size_bytes = remains.gift(min(level_bytes, remains.most_bytes), most)
    if not blocks:
        return None, 0.0
    # Of layers, all that it can: how far its device is, it knows best.
    given = most if part.remains is not None and giver.why != "late" else blocks
    moved_bytes = float(blocks * size_bytes)
    move = Move(part.part, part.blocks - given, taker.node, giver.why)
    return move, max(giver.ends_s(moved_bytes), taker.free_s + moved_bytes / taker.rate)


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
            takes = not (reader.starved and heed_starved) and reader.depth.silent_ns < STOPPED_NS
            pulls.append(_Pull(reader.node, 0.0, rate, reader.depth.queue_bytes / rate, takes))
    return pulls


def _pull(parts: list[Going], assumed: float, block_bytes: int, now_ns: int, *, heed_starved: bool) -> _Pull:
    """All parts of one node: they share its storage NIC."""
    nic = parts[0].nic or Depth()
    known = float(nic.rate_bytes_per_s or parts[0].depth.rate_bytes_per_s or assumed)
    left_bytes = float(sum(part.left_bytes(block_bytes) for part in parts))
    reads = parts[0].nic is not None and nic.silent_ns < STOPPED_NS
    rate, recent, silent_s, late_s, waits_s = _seen(parts, known, left_bytes, now_ns, reads=reads)
    starved = heed_starved and any(part.starved for part in parts)
    turns_at = known if reads else _before(parts, known, now_ns)
    stopped = late_s > max(STOPPED_NS / 1e9, STOPPED_BLOCKS * block_bytes / turns_at)
    left_bytes -= min(left_bytes, rate * min(silent_s, (STOPPED_NS if reads else SILENCE_NS) / 1e9))
    left_bytes = max(left_bytes, float(sum(part.unbegun_blocks for part in parts) * block_bytes))
    unbegun = max(parts, key=lambda part: (part.may_give, part.unbegun_bytes(block_bytes)))
    return _Pull(
        parts[0].node,
        left_bytes,
        rate * STARVED_SHARE if starved else rate,
        waits_s,
        takes=not (starved or stopped) and nic.silent_ns < STOPPED_NS and all(part.may_take for part in parts),
        queue_s=nic.queue_bytes / known,
        gives=unbegun if unbegun.may_give and unbegun.unbegun_bytes(block_bytes) else None,
        fixed=not any(part.unbegun_bytes(block_bytes) for part in parts),
        why="starved" if starved else "stopped" if stopped else "late",
        recent=recent,
        is_silent=silent_s * 1e9 > SILENCE_NS and (parts[0].nic is None or nic.silent_ns > SILENCE_NS),
    )


def _seen(
    parts: Sequence[Going], known: float, left_bytes: float, now_ns: int, *, reads: bool
) -> tuple[float, float, float, float, float]:
    """Bytes per second that a node reads, and has read in half the window; how long it has told nothing, how much of that it can
    be blamed for, and how long it waits for its turn, in seconds.

    The rate is what was seen in the last window in which it had something to read; for what lacks of a window, what was known
    before. Before the first bytes it has to hear of them, and to do what is ahead of it: waiting for that says nothing of its
    rate. Nor does it later while its NIC is known to stand still no more than it should (`reads`): it reads for others, or its
    news is late.
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
    waits_s, queue_s = 0.0, parts[0].depth.queue_bytes / known
    if not any(pace.read_bytes for pace in paces):
        silent_s, waits_s = max(0.0, silent_s - queue_s), max(0.0, queue_s - silent_s)
    late_s = max(0.0, silent_s - queue_s - TURN_NS / 1e9) if reads else silent_s
    seen_s = (heard_ns - begin_ns) / 1e9 + max(0.0, late_s - SILENCE_NS / 1e9)
    prior_s = max(_PRIOR_NS, WINDOW_NS - seen_s * 1e9) / 1e9
    rate = (seen_bytes + known * prior_s) / (seen_s + prior_s)
    recent_ns = max(first_ns, heard_ns - SETTLED_NS)
    recent_bytes = sum(pace.read_bytes - pace.read_by(recent_ns) for pace in paces)
    recent_s = (heard_ns - recent_ns) / 1e9 + max(0.0, late_s - SILENCE_NS / 1e9)
    recent = (recent_bytes + rate * _PRIOR_NS / 1e9) / (recent_s + _PRIOR_NS / 1e9)
    return rate, recent, silent_s, late_s, waits_s


def _before(parts: Sequence[Going], known: float, now_ns: int) -> float:
    """Bytes per second that a node has read at. Of one that stands still, what is known now only says for how long it has."""
    paces = [part.pace_at(now_ns) for part in parts]
    seen = max(pace.read_bytes * 1e9 / max(1, pace.heard_ns - pace.begun_ns) for pace in paces)
    return max(known, seen, float(parts[0].depth.rate_bytes_per_s))


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
