"""The engines of each side by what they have to do, what they have room for, and how soon their nodes read.

Engines of one group on one node are a stand: they share a storage NIC and a buffer. Of each stand the best engine is at hand, and
of all stands those whose best engine is the best, and those whose node reads first.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heapreplace

from kvmoverd.core.scheduling.joint_pace import Pace, Rates
from kvmoverd.core.scheduling.joint_ranked import Ranked
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.reports import NodeReport
from kvmoverd.core.scheduling.requests import Entry
from kvmoverd.core.scheduling.state import BETA_S, Engine, Group, Model

ROOM_UNKNOWN_BYTES = 1 << 62
"""Of a node that does not report a buffer: only HBM limits what decodes there."""
LOOK_MAX = 4
"""Times the candidates that are wanted: so many decode stands are looked at for those with room."""


class Stand:
    """Engines of one group on one node. `heap`: their numbers and places, the best one first."""

    __slots__ = ("best", "engines", "group", "heap", "name", "pace", "pending")

    def __init__(self, name: str, group: Group, engines: list[Engine], pace: Pace) -> None:
        self.name = name
        self.group = group
        self.engines = engines
        self.pace = pace
        self.heap: list[tuple[float, int]] = []
        self.best = engines[0]
        self.pending: _Pending | None = None
        """Of its node, where it decodes."""

    def rank(self, numbers: list[float]) -> None:
        """Its engines have these numbers, in their order."""
        self.heap = [(number, place) for place, number in enumerate(numbers)]
        heapify(self.heap)
        self.best = self.engines[self.heap[0][1]]

    def shift(self, engine: Engine, number: float) -> None:
        """The engine's number is this one; it was the best one nearly always."""
        if self.best is engine:
            heapreplace(self.heap, (number, self.heap[0][1]))
        else:
            place = self.engines.index(engine)
            self.heap = [(number, place), *(item for item in self.heap if item[1] != place)]
            heapify(self.heap)
        self.best = self.engines[self.heap[0][1]]


class Stands:
    """Those of one role."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._groups: dict[str, list[Stand]] = {}
        self._named: dict[str, Stand] = {}
        self.by_engine: dict[str, Engine] = {}
        self._stands: dict[str, Stand] = {}
        """By their engines' names."""
        self._nodes: dict[str, list[Stand]] = {}
        self.best = Ranked()
        """By the number of their best engine."""
        self.first = Ranked()
        """By when their node's storage NIC is free."""

    def __len__(self) -> int:
        return len(self._named)

    def of_group(self, group: Group) -> list[Stand]:
        """Made anew where engines have joined."""
        stands = self._groups.get(group.name)
        if stands is None or sum([len(stand.engines) for stand in stands]) != len(group.engines):
            self.drop(group.name)
            stands = self._made(group)
        return stands

    def drop(self, group: str) -> list[Stand]:
        """Its engines get nothing. Returns what there was."""
        stands = self._groups.pop(group, [])
        for stand in stands:
            del self._named[stand.name]
            self.best.drop(stand.name)
            self.first.drop(stand.name)
            for engine in stand.engines:
                self.by_engine.pop(engine.name, None)
                self._stands.pop(engine.name, None)
            of_node = self._nodes[stand.pace.node.name]
            of_node.remove(stand)
            if not of_node:
                del self._nodes[stand.pace.node.name]
        return stands

    def put(self, stand: Stand) -> None:
        """Its numbers are others than before."""
        self.best.put(stand.name, stand.heap[0][0])
        self.first.put(stand.name, stand.pace.free_ns)

    def read_more(self, pace: Pace) -> None:
        """A node has more to read."""
        for stand in self._nodes.get(pace.node.name, ()):
            self.first.put(stand.name, pace.free_ns)

    def of(self, engine: Engine) -> Stand:
        return self._stands[engine.name]

    def on_node(self, node: str) -> list[Stand]:
        return self._nodes.get(node, [])

    def foremost(self, most: int) -> list[Stand]:
        """Up to so many whose best engine is the best, and as many whose nodes read first; each once."""
        named = self._named
        names = dict.fromkeys([name for _, name in self.best.first(most) + self.first.first(most)])
        return [named[name] for name in names]

    @property
    def first_ns(self) -> float:
        """When the first storage NIC is free."""
        return self.first.least()

    def readers(self, most: int) -> list[Pace]:
        """Nodes whose storage NICs are free first."""
        named = self._named
        return [named[name].pace for _, name in self.first.first(most)]

    def _made(self, group: Group) -> list[Stand]:
        by_node: dict[str, list[Engine]] = {}
        for engine in group.engines.values():
            by_node.setdefault(engine.node.name, []).append(engine)
        stands = []
        for engines in by_node.values():
            stand = Stand(_name(engines[0]), group, engines, self._rates.of(engines[0].node))
            stands.append(stand)
            self._named[stand.name] = stand
            self._nodes.setdefault(stand.pace.node.name, []).append(stand)
            self.by_engine.update({engine.name: engine for engine in engines})
            self._stands.update({engine.name: stand for engine in engines})
        self._groups[group.name] = stands
        return stands


class PrefillStands(Stands):
    """The number of an engine is for how many seconds it has work."""

    def __init__(self, rates: Rates, model: Model, settings: JointSettings) -> None:
        super().__init__(rates)
        self.model_rate = model.beta_tokens / BETA_S
        self._beta_s = settings.beta_ns / 1e9

    def rate(self, engine: Engine) -> float:
        """Prompt tokens per second: as measured, else the model's figure."""
        return engine.tokens_per_s or self.model_rate

    def pulled(self, group: Group) -> None:
        """Its engines' numbers are new."""
        for stand in self.of_group(group):
            stand.pace.look()
            stand.rank([engine.tok_e / (engine.tokens_per_s or self.model_rate) for engine in stand.engines])
            self.put(stand)

    def gave(self, engine: Engine) -> None:
        """It has more to do."""
        stand = self.of(engine)
        stand.shift(engine, engine.tok_e / (engine.tokens_per_s or self.model_rate))
        self.best.put(stand.name, stand.heap[0][0])
        self.first.put(stand.name, stand.pace.free_ns)

    @property
    def idle(self) -> bool:
        """Whether any may be given work: has at most beta."""
        return self.best.least() <= self._beta_s

    def takes(self, engine: Engine) -> bool:
        return engine.tok_e <= self._beta_s * (engine.tokens_per_s or self.model_rate) and not engine.node.draining


class DecodeStands(Stands):
    """The number of an engine is its free HBM in tokens, that of a stand what its best engine and its node's buffer have room
    for; both negative, so that the most room is first.

    A request needs room in the buffer from when its prefill is begun until its KV is in the engine's pages. The node says how
    much is free; of requests that were given here and are not prefilled nobody knows whether they have theirs already. So there
    is room for what is free by the report, and for no more than the whole buffer less what was given here and is not prefilled.
    """

    def __init__(self, rates: Rates, model: Model, settings: JointSettings) -> None:
        super().__init__(rates)
        self._kv_bytes_per_token = model.kv_bytes_per_token
        self._level = settings.decode_level
        self._pending: dict[str, _Pending] = {}
        self._largest = Ranked()
        self._tok_sums: dict[str, int] = {}
        self._tok_sum = 0
        self._unprefilled: dict[str, tuple[_Pending, int]] = {}
        """Requests that were given here and are not prefilled, by name: whose buffer has how much of theirs."""
        self.kept: Stand | None = None
        """For one request that has been passed over too often: nobody else gets an engine there."""

    def pulled(self, group: Group) -> None:
        """Its engines' numbers are new."""
        for stand in self.of_group(group):
            stand.pace.look()
            stand.rank([-engine.free_hbm for engine in stand.engines])
            self.refresh(stand)
            self._largest.put(stand.name, -self._capacity(stand))
        self._tok_sum += group.tok_sum - self._tok_sums.get(group.name, 0)
        self._tok_sums[group.name] = group.tok_sum

    def drop(self, group: str) -> list[Stand]:
        stands = super().drop(group)
        for stand in stands:
            self._largest.drop(stand.name)
            if self.kept is stand:
                self.kept = None
            if not self.on_node(stand.pace.node.name):
                self._pending.pop(stand.pace.node.name, None)
        self._tok_sum -= self._tok_sums.pop(group, 0)
        return stands

    def gave(self, entry: Entry, engine: Engine, now_ns: int) -> None:
        """The entry decodes there."""
        stand = self.of(engine)
        pending, size_bytes = self._pending_of(stand), entry.tokens * self._kv_bytes_per_token
        pending.add(size_bytes, now_ns)
        self._unprefilled[entry.request.request_id] = pending, size_bytes
        group = engine.group
        self._tok_sum += group.tok_sum - self._tok_sums[group.name]
        self._tok_sums[group.name] = group.tok_sum
        stand.shift(engine, -engine.free_hbm)
        for other in self.on_node(stand.pace.node.name):
            self.refresh(other)

    def prefilled(self, entry: Entry) -> None:
        """It takes no more room in a buffer, or not there; one that was not given here is ignored."""
        pending, size_bytes = self._unprefilled.pop(entry.request.request_id, (None, 0))
        if pending is not None:
            pending.drop(size_bytes)

    def refresh(self, stand: Stand) -> int:
        """How many tokens it has room for now."""
        room = (stand.pending or self._pending_of(stand)).room_bytes() // self._kv_bytes_per_token
        pace, free_hbm = stand.pace, stand.best.free_hbm
        if pace.node.draining:
            room = 0
        elif free_hbm < room:
            room = free_hbm
        self.best.put(stand.name, -room)
        self.first.put(stand.name, pace.free_ns)
        return room

    def room(self, stand: Stand) -> int:
        """How many tokens it had room for when that was last looked at."""
        return int(-self.best.number(stand.name))

    def with_room(self, tokens: int, most: int) -> list[Stand]:
        """Up to so many that have the most room, and as many of those whose nodes read first; each once."""
        named, number = self._named, self.best.number
        found = [named[name] for negative, name in self.best.first(most) if -negative >= tokens]
        enough = len(found) + most
        for _, name in self.first.first(LOOK_MAX * most):
            stand = named[name]
            if -number(name) >= tokens and stand not in found:
                found.append(stand)
                if len(found) >= enough:
                    break
        return found

    @property
    def room_tokens(self) -> int:
        """The largest request that has room somewhere, apart from what is kept."""
        for negative, name in self.best.first(2):
            if self._named[name] is not self.kept:
                return int(-negative)
        return 0

    @property
    def largest_tokens(self) -> int:
        """The largest request that would have room in an empty cluster."""
        first = self._largest.first(1)
        return int(-first[0][0]) if first else 0

    def short_of(self) -> str:
        """What there is too little of where there is the most room: "hbm" or "buffer"."""
        first = self.best.first(1)
        if not first:
            return "hbm"
        stand = self._named[first[0][1]]
        return "hbm" if stand.best.free_hbm <= -first[0][0] else "buffer"

    def keep_for(self, tokens: int) -> bool:
        """Of those that could hold so much the one with the most room is kept. False: there is none."""
        found: tuple[float, Stand] | None = None
        for stand in self._named.values():
            room = self.refresh(stand)
            if self._capacity(stand) >= tokens and not stand.pace.node.draining and (found is None or room > found[0]):
                found = room, stand
        self.kept = None if found is None else found[1]
        return found is not None

    def level(self, stands: list[Stand], tokens: int) -> list[Stand]:
        """Those whose best engine is at most half full with so many tokens more, or not well above the mean; all if none is."""
        found = []
        for stand in stands:
            load = stand.best.tok_e + tokens
            if load <= stand.best.free_hbm or load * len(self.by_engine) <= self._level * (self._tok_sum + tokens):
                found.append(stand)
        return found or stands

    def _capacity(self, stand: Stand) -> int:
        """The largest request that would have room if nothing else were there."""
        hbm = max([engine.tok_e + engine.free_hbm for engine in stand.engines])
        return min(hbm, self._pending_of(stand).whole_bytes // self._kv_bytes_per_token)

    def _pending_of(self, stand: Stand) -> _Pending:
        if stand.pending is not None:
            return stand.pending
        name = stand.pace.node.name
        pending = self._pending.get(name)
        if pending is None or pending.pace is not stand.pace:
            pending = self._pending[name] = _Pending(stand.pace)
        stand.pending = pending
        return pending


class _Pending:
    """What was given to decode on a node and is not prefilled. Of that, what its last report can't hold yet is `_fresh`."""

    __slots__ = ("_bytes", "_fresh", "_fresh_bytes", "_report", "pace", "whole_bytes")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._bytes = 0
        self._fresh: deque[tuple[int, int]] = deque()
        self._fresh_bytes = 0
        self._report: NodeReport | None = None
        self.whole_bytes = ROOM_UNKNOWN_BYTES
        """The buffer's size, as last told."""

    def add(self, size_bytes: int, now_ns: int) -> None:
        self._bytes += size_bytes
        if self.pace.node.report is not None:
            self._fresh.append((now_ns, size_bytes))
            self._fresh_bytes += size_bytes

    def drop(self, size_bytes: int) -> None:
        self._bytes -= size_bytes

    def room_bytes(self) -> int:
        """As of the last report; of a node that has fallen silent its buffer's size is known, and what was given here."""
        node = self.pace.node
        report = node.report
        if report is not self._report:
            self._report = report
            while self._fresh and node.heard_ns - self._fresh[0][0] >= node.lag_ns:
                self._fresh_bytes -= self._fresh.popleft()[1]
            if report is not None:
                self.whole_bytes = report.buffer_bytes or ROOM_UNKNOWN_BYTES
        room_bytes = self.whole_bytes - self._bytes
        if report is None or not report.buffer_bytes:
            return room_bytes
        free_bytes = report.buffer_free_bytes - self._fresh_bytes
        return free_bytes if free_bytes < room_bytes else room_bytes


def _name(engine: Engine) -> str:
    return f"{engine.group.name}\0{engine.node.name}"
