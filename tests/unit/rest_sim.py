"""Requests in mid-stream, simulated: storage NICs that read range by range, and what an owner knows of them when it balances.

What a reader gives is chosen as readers choose it; what it has left is estimated as owners do, from old news.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmoverd.core.balance import ASK_AGAIN_NS, Going, Move, Pace, choose_move
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.remains import Extent, Remains, remains_of
from kvmoverd.core.rests import choose_rest
from kvmoverd.core.shares import Depth
from kvmoverd.core.split import Reader
from kvmoverd.node.read_meter import ReadMeter

MS = 1_000_000
LAYOUT = Layout.uniform(layers=32, tokens=64, token_bytes=2048)
"""4 MiB a block: ranges of 4, 4, 8 and 16 layers."""
BLOCK_BYTES = LAYOUT.record_bytes
RANGE_BYTES = 512 << 10
RATE = 4 * BLOCK_BYTES * 1000
"""Four blocks a millisecond."""
FLOOR_S = 0.002
NEWS_MS, LOOK_MS = 20, 10
WARM_MS = 1000

Rate = Callable[[int], float]
"""Of a storage NIC: share of `RATE` in the millisecond."""


@dataclass(eq=False)
class Part:
    """`begun` and `there`: leading layers of each block. `told`: bytes read, as its owner knows."""

    number: int
    node: str
    blocks: int
    pace: Pace
    depth: Depth
    first_layer: int = 0
    read_bytes: int = 0
    kept_blocks: int | None = None
    cut_layer: int = 0
    gave: bool = False
    tasks: int = 0
    begun: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return not self.tasks

    def wants(self, block: int, stop_layer: int) -> bool:
        return self.kept_blocks is None or block < self.kept_blocks or stop_layer <= self.cut_layer

    def streams(self) -> bool:
        return min(self.there, default=1) > 0


@dataclass
class Request:
    number: int
    parts: list[Part] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    moved_ns: int | None = None
    ended_ms: int | None = None


class Nic:
    """Reads range after range, those of older requests first; `window` of them are in the device, for good."""

    def __init__(self, rate: Rate, chance: random.Random, window: int) -> None:
        self.rate, self._chance, self._window = rate, chance, window
        self._line: list[tuple[int, int, Part, int, int, int]] = []
        self._device: list[tuple[Part, int, int, int]] = []
        self._order, self._budget, self._meter = 0, 0.0, ReadMeter()
        self.told = Depth(0, RATE)
        for before_ms in range(WARM_MS):
            self._meter.begun(1, before_ms * MS)
            self._meter.ended(RATE // 1000, (before_ms + 1) * MS)

    def add(self, request: int, part: Part) -> None:
        """All ranges of a part's blocks, from its first layer on; the first range of all blocks before the next."""
        first = part.first_layer
        part.begun = [first] * part.blocks
        part.there = list(part.begun)
        while first < LAYOUT.layer_count:
            stop = LAYOUT.range_stop(first, max(RANGE_BYTES, LAYOUT.layer_offsets[first]))
            size_bytes = len(LAYOUT.read_span(first, stop)) + HEADER_BYTES * (0 < first == part.first_layer)
            for block in range(part.blocks):
                self._order, part.tasks = self._order + 1, part.tasks + 1
                heapq.heappush(self._line, (request, self._order, part, block, stop, size_bytes))
            first = stop

    def give_rest(self, part: Part, kept_blocks: int) -> tuple[int, int]:
        """As a reader: what is in the device stays."""
        kept, first_layer = choose_rest(part.begun.__getitem__, part.blocks, kept_blocks, LAYOUT)
        part.gave = True
        if first_layer:
            part.kept_blocks, part.cut_layer = kept, first_layer
            dropped = [task for task in self._line if task[2] is part and not part.wants(task[3], task[4])]
            self._line = [task for task in self._line if task[2] is not part or part.wants(task[3], task[4])]
            heapq.heapify(self._line)
            part.tasks -= len(dropped)
        return kept, first_layer

    def read(self, ms: int) -> None:
        """In bursts whose length is chance."""
        now_ns = (WARM_MS + ms) * MS
        self._budget = min(self._budget + self.rate(ms) * RATE / 1000, 40.0 * RATE / 1000)
        bursts = self._chance.random() < 0.3
        while True:
            while self._line and len(self._device) < self._window:
                _, _, part, block, stop, size_bytes = heapq.heappop(self._line)
                part.begun[block] = stop
                self._device.append((part, block, stop, size_bytes))
                self._meter.begun(1, now_ns)
            if not bursts or not self._device or self._device[0][3] > self._budget:
                return
            part, block, stop, size_bytes = self._device.pop(0)
            self._budget -= size_bytes
            part.there[block], part.tasks, part.read_bytes = stop, part.tasks - 1, part.read_bytes + size_bytes
            self._meter.ended(size_bytes, now_ns)

    def depth(self, ms: int) -> Depth:
        now_ns = (WARM_MS + ms) * MS
        queue_bytes = sum(task[-1] for task in self._line) + sum(task[-1] for task in self._device)
        return Depth(queue_bytes, self._meter.rate_bytes_per_s(now_ns) or RATE, self._meter.silent_ns(now_ns))


class Stage:
    """Requests that are all there at the beginning, `shares` blocks of each by node; nothing moves before the prefix is known."""

    def __init__(
        self,
        rates: Mapping[str, Rate],
        shares: Mapping[str, int],
        *,
        seed: int = 0,
        requests: int = 1,
        window: int = 16,
        idle: Sequence[str] = (),
        room_blocks: Mapping[str, int] | None = None,
    ) -> None:
        chance = random.Random(seed)
        self.nics = {node: Nic(rate, chance, window) for node, rate in rates.items()}
        self.idle, self.room_blocks = idle, room_blocks or {}
        self.requests = [Request(number) for number in range(requests)]
        for request in self.requests:
            for node, blocks in shares.items():
                self._add(request, node, blocks, 0)

    @property
    def moves(self) -> list[Move]:
        return [move for request in self.requests for move in request.moves]

    def run(self, *, until_ms: int = 20_000) -> int:
        """Milliseconds until all is read."""
        ms = 0
        while any(request.ended_ms is None for request in self.requests):
            assert ms < until_ms, f"not over after {until_ms} ms"
            ms += 1
            for nic in self.nics.values():
                nic.read(ms)
            if ms % NEWS_MS == 0:
                self._tell(ms)
            for request in self.requests:
                if request.ended_ms is None and all(part.is_over for part in request.parts):
                    request.ended_ms = ms
                elif request.ended_ms is None and (ms + request.number) % LOOK_MS == 0:
                    self._look(request, ms)
        return ms

    def _tell(self, ms: int) -> None:
        for nic in self.nics.values():
            nic.told = nic.depth(ms)
        for request in self.requests:
            for part in request.parts:
                part.pace.heard(part.read_bytes, ms * MS)

    def _add(self, request: Request, node: str, blocks: int, ms: int, first_layer: int = 0) -> None:
        part = Part(len(request.parts), node, blocks, Pace(ms * MS), self.nics[node].depth(ms), first_layer)
        request.parts.append(part)
        self.nics[node].add(request.number, part)

    def _going(self, part: Part, request: Request, ms: int) -> Going:
        settled = request.moved_ns is None or ms * MS - request.moved_ns >= ASK_AGAIN_NS
        found = self._remains(part)
        may_give = not part.gave and not part.first_layer
        return Going(
            part.number,
            part.node,
            part.blocks,
            part.blocks,
            part.pace.read_bytes,
            part.pace.begun_ns,
            False,
            may_give and settled,
            True,
            part.depth,
            pace=part.pace,
            done=part.is_over or not found.left_bytes,
            nic=self.nics[part.node].told,
            remains=found if may_give else Remains(found.left_bytes),
        )

    def _remains(self, part: Part) -> Remains:
        kept = part.blocks if part.kept_blocks is None else part.kept_blocks
        extent = Extent(part.blocks, kept, part.first_layer, part.cut_layer if part.gave else LAYOUT.layer_count)
        header_bytes = part.blocks * HEADER_BYTES * (part.first_layer > 0)
        left_bytes = max(0, extent.bytes_from(LAYOUT, 0) + header_bytes - part.pace.read_bytes)
        return remains_of(LAYOUT, blocks=part.blocks, left_bytes=left_bytes, range_bytes=RANGE_BYTES)

    def _look(self, request: Request, ms: int) -> None:
        if not all(part.streams() for part in request.parts):
            return
        busy = {part.node for part in request.parts}
        found = choose_move(
            [self._going(part, request, ms) for part in request.parts],
            idle=[Reader(node, self.nics[node].told) for node in self.idle if node not in busy],
            block_bytes=BLOCK_BYTES,
            now_ns=ms * MS,
            floor_s=FLOOR_S,
            room_blocks=self.room_blocks,
        )
        if found is None:
            return
        giver = request.parts[found.part]
        assert not giver.gave and not giver.first_layer and found.to_node != giver.node
        kept, first_layer = self.nics[giver.node].give_rest(giver, found.kept_blocks)
        request.moved_ns = ms * MS
        if first_layer:
            request.moves.append(found)
            self._add(request, found.to_node, giver.blocks - kept, ms, first_layer)
