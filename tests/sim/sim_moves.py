"""Moves in mid-stream: what the balancing may decide at any time, and storage NICs that get slow just when a prefix is known."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

from sim_daemon import Cluster, SimDaemon
from sim_faults import Faults

from kvmoverd.core.machines.stream import StreamState
from kvmoverd.node.streaming import StreamDriver

LOOK_S = 0.02
SLOWNESS = 10.0
SLOW_S = 1.0


class Moves:
    """Asks parts for their rests by chance, and slows readers down. `seen`: what it did, by kind."""

    def __init__(self, cluster: Cluster, faults: Faults, rng: random.Random) -> None:
        self.cluster = cluster
        self.faults = faults
        self.random = rng
        self.seen: Counter[str] = Counter()
        self._asks = rng.choice([0.0, 0.2, 0.8])
        self._slows = rng.choice([0.0, 0.0, 0.3])
        self._known: set[int] = set()
        self._given: set[int] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S * self.random.random())
            for daemon, stream in list(self._streaming()):
                self._look(daemon, stream)

    def _streaming(self) -> Iterator[tuple[SimDaemon, StreamDriver]]:
        for daemon in self.cluster.running():
            node = getattr(daemon, "node", None)
            for driver in node.requests.live() if node is not None else ():
                if isinstance(driver, StreamDriver) and driver.machine.state is StreamState.STREAMING:
                    yield daemon, driver

    def _look(self, daemon: SimDaemon, stream: StreamDriver) -> None:
        number = id(stream)
        self._note(stream)
        if number not in self._known:
            self._known.add(number)
            if self.random.random() < self._slows:
                self._slow(stream)
        if self.random.random() < self._asks:
            daemon.process.soon(self._ask, stream)

    def _note(self, stream: StreamDriver) -> None:
        """Parts that bring what was another's rest."""
        for part in stream.machine.parts.values():
            if part.rest and part.part not in self._given:
                self._given.add(part.part)
                self.seen["rest given"] += 1

    def _ask(self, stream: StreamDriver) -> None:
        parts = list(stream.machine.parts.values())
        if stream.is_gone or stream.machine.state is not StreamState.STREAMING or not parts:
            return
        part = self.random.choice(parts)
        others = [name for name in self.cluster.names if name != part.share.node]
        kept_blocks = self.random.choice([0, 0, self.random.randrange(part.count + 1)])
        if actions := stream.machine.on_move(part.part, kept_blocks, self.random.choice(others)):
            self.seen["rest asked"] += 1
            stream.run(actions)

    def _slow(self, stream: StreamDriver) -> None:
        """A reader that still has layers to bring is a tenth as fast from now on."""
        nodes = sorted({part.share.node for part in stream.machine.parts.values() if not part.ended})
        running = [self.cluster.daemons[node] for node in nodes if not self.cluster.daemons[node].process.is_dead]
        if not running:
            return
        storage = self.random.choice(running).devices.storage
        storage.slowness = SLOWNESS
        self.faults.hit_nodes.add(storage.node)
        self.seen["slow reader"] += 1
        asyncio.get_running_loop().call_later(SLOW_S, setattr, storage, "slowness", 1.0)
