"""Many requests at once on storage NICs that read in the order of requests: what moves between equal nodes, and what does not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from markers import slow_only

from kvmoverd.core.balance import ASK_AGAIN_NS, Going, Pace, choose_move
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth
from kvmoverd.core.split import Reader, decide
from kvmoverd.node.read_meter import ReadMeter

MS = 1_000_000
BLOCK = 1_000_000
RATE = 1_000_000_000
"""A block a millisecond."""
FLOOR_S = 0.002
WINDOW_BLOCKS = 8
NEWS_MS, LOOK_MS = 20, 10
WARM_NS = 1000 * MS
"""What a storage NIC has read before."""


@dataclass
class Part:
    """`told`: what its owner knows of it."""

    node: str
    blocks: int
    pace: Pace
    depth: Depth
    read: int = 0

    @property
    def is_over(self) -> bool:
        return self.read >= self.blocks


@dataclass
class Request:
    parts: list[Part] = field(default_factory=list)
    moved_ns: int | None = None
    moves: int = 0
    ended_ms: int | None = None


class Nic:
    """Reads its parts in the order they came, in bursts whose length is chance; what it tells is up to `NEWS_MS` old."""

    def __init__(self, rate: Callable[[int], float], chance: random.Random) -> None:
        self.rate, self._chance = rate, chance
        self.parts: deque[Part] = deque()
        self.told = Depth(0, RATE)
        self._budget, self._meter, self._under_way = 0.0, ReadMeter(), 0
        for before_ms in range(1000):
            self._meter.begun(1, before_ms * MS)
            self._meter.ended(BLOCK, (before_ms + 1) * MS)

    def depth(self, ms: int) -> Depth:
        queue_bytes = BLOCK * sum(part.blocks - part.read for part in self.parts)
        rate = self._meter.rate_bytes_per_s(WARM_NS + ms * MS) or RATE
        return Depth(queue_bytes, rate, self._meter.silent_ns(WARM_NS + ms * MS))

    def read(self, ms: int) -> None:
        if self.parts and not self._under_way:
            self._meter.begun(1, WARM_NS + ms * MS)
            self._under_way = 1
        self._budget = min(self._budget + self.rate(ms), 40.0)
        if self._chance.random() < 0.3:
            while self._budget >= 1 and self.parts:
                self._read_one(ms)

    def _read_one(self, ms: int) -> None:
        part = self.parts[0]
        part.read, self._budget = part.read + 1, self._budget - 1
        if part.is_over:
            self.parts.popleft()
        self._under_way = int(bool(self.parts))
        self._meter.begun(self._under_way, WARM_NS + ms * MS)
        self._meter.ended(BLOCK, WARM_NS + ms * MS)

    def tell(self, ms: int) -> None:
        if ms % NEWS_MS == 0:
            self.told = self.depth(ms)
            for part in self.parts:
                part.pace.heard(part.read * BLOCK, ms * MS)


class Town:
    """Requests of 32 blocks, all there at the beginning; each is decided when the one before it was."""

    def __init__(self, rates: dict[str, Callable[[int], float]], *, seed: int, requests: int) -> None:
        chance = random.Random(seed)
        self.nics = {node: Nic(rate, chance) for node, rate in rates.items()}
        self.requests = [Request() for _ in range(requests)]

    def run(self, until_ms: int = 20_000) -> int:
        """Milliseconds until all is read."""
        for request in self.requests:
            self._begin(request)
        ms = 0
        while any(request.ended_ms is None for request in self.requests):
            assert ms < until_ms, f"not over after {until_ms} ms"
            ms += 1
            for nic in self.nics.values():
                nic.read(ms)
                nic.tell(ms)
            for number, request in enumerate(self.requests):
                if request.ended_ms is None and all(part.is_over for part in request.parts):
                    request.ended_ms = ms
                    for part in request.parts:
                        part.pace.heard(part.read * BLOCK, ms * MS)
                elif request.ended_ms is None and (ms + number) % LOOK_MS == 0:
                    self._look(request, ms)
        return ms

    def _begin(self, request: Request) -> None:
        prefill, decode = (Reader(node, self.nics[node].depth(0)) for node in ("p", "d"))
        plan = decide(blocks=Runs.of((0, 32)), block_bytes=BLOCK, prefill=prefill, decode=decode, floor_s=FLOOR_S)
        for share in plan.shares:
            self._add(request, share.node, share.blocks.count, 0, self.nics[share.node].depth(0))

    def _add(self, request: Request, node: str, blocks: int, ms: int, depth: Depth) -> None:
        part = Part(node, blocks, Pace(ms * MS), depth)
        request.parts.append(part)
        self.nics[node].parts.append(part)

    def _is_read(self, part: Part) -> bool:
        waiting = self.nics[part.node].parts
        return bool(waiting) and waiting[0] is part

    def _look(self, request: Request, ms: int) -> None:
        settled = request.moved_ns is None or ms * MS - request.moved_ns >= ASK_AGAIN_NS
        going = [
            Going(
                number,
                part.node,
                part.blocks,
                min(part.blocks, part.read + WINDOW_BLOCKS * self._is_read(part)),
                part.pace.read_bytes,
                part.pace.begun_ns,
                False,
                settled,
                True,
                part.depth,
                pace=part.pace,
                done=part.is_over,
                nic=self.nics[part.node].told,
            )
            for number, part in enumerate(request.parts)
        ]
        busy = {part.node for part in request.parts}
        idle = [Reader(node, nic.told) for node, nic in self.nics.items() if node not in busy]
        found = choose_move(going, idle=idle, block_bytes=BLOCK, now_ns=ms * MS, floor_s=FLOOR_S)
        if found is None:
            return
        giver = request.parts[found.part]
        request.moves, request.moved_ns = request.moves + 1, ms * MS
        moved, giver.blocks = giver.blocks - found.kept_blocks, found.kept_blocks
        if giver.is_over and giver in self.nics[giver.node].parts:
            self.nics[giver.node].parts.remove(giver)
        taker = self.nics[found.to_node]
        self._add(request, found.to_node, moved, ms, taker.told)
        taker.told = replace(taker.told, queue_bytes=taker.told.queue_bytes + moved * BLOCK)


def steady(ms: int) -> float:
    return 1.0


@pytest.mark.parametrize("seed", [0, *slow_only(range(1, 4))])
def test_many_requests_on_equal_nodes_move_next_to_nothing(seed: int) -> None:
    town = Town({"p": steady, "d": steady}, seed=seed, requests=64)
    assert town.run() <= 64 * 32 / 2 * 1.03
    assert sum(request.moves for request in town.requests) < 0.1 * 64


@pytest.mark.parametrize("seed", [0, *slow_only(range(1, 4))])
def test_one_request_on_equal_nodes_moves_once_at_most(seed: int) -> None:
    town = Town({"p": steady, "d": steady}, seed=seed, requests=1)
    town.run()
    assert town.requests[0].moves <= 1


@pytest.mark.parametrize("at_ms", [0, 200])
def test_many_requests_leave_a_node_that_gets_slow(at_ms: int) -> None:
    town = Town({"p": steady, "d": lambda ms: 1.0 if ms < at_ms else 0.1}, seed=1, requests=32)
    took, ideal = town.run(), at_ms + (32 * 32 - 2 * at_ms) / 1.1
    assert took <= ideal * 1.5, f"{took} ms, {ideal:.0f} would be ideal"


def test_many_requests_leave_a_node_that_stands_still_for_a_while() -> None:
    town = Town({"p": steady, "d": lambda ms: 0.0 if 100 <= ms < 3000 else 1.0}, seed=1, requests=32)
    assert town.run() <= 3000 + 100
    ended = sorted(request.ended_ms or 0 for request in town.requests)
    assert ended[-2] <= 1200, "all but what a device had begun is read elsewhere meanwhile"
