"""What goes wrong in a history: drawn by the seed, from everything that can."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from sim_daemon import Cluster, SimDaemon
from sim_engines import NAMESPACE, SimEngine
from sim_loop import START_S
from sim_turns import Turn

from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead, StorageOp

FAULTS_S = 4.0


class Faults:
    """`done`: what has happened, in words. `end` lets all of it be over."""

    def __init__(
        self, cluster: Cluster, turns: Sequence[Turn], engines: Sequence[SimEngine], rng: random.Random
    ) -> None:
        self.cluster = cluster
        self.turns = turns
        self.engines = engines
        self.random = rng
        self.done: list[str] = []
        self.kinds: list[Callable[[], str]] = [
            self.kill,
            self.freeze,
            self.cut_two,
            self.cut_off,
            self.slow_storage,
            self.stuck_storage,
            self.failing_storage,
            self.damage,
            self.engine_dies,
            self.engine_stops,
            self.cancel,
            self.fence_off,
            self.frames_fail,
            self.shut_down,
        ]
        self.hit_nodes: set[str] = set()
        """Nodes that something has happened to."""
        self.hit_ways: list[set[str]] = []
        """Ways between two nodes that were cut."""
        self.hit_turns: set[str] = set()
        self.hit_all = False
        """Something has happened that may concern every turn: blocks are lost, frames fail."""
        self.frames_failed = False
        """Frames were refused by chance, with a status that ends calls `INTERNAL`."""
        self._frozen_s: dict[str, float] = {}
        self._later: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = self.cluster.loop
        count = self.random.choice([0, 1, 1, 1, 2, 3])
        times = sorted(self.random.random() ** 2 * FAULTS_S for _ in range(count))
        began_s = loop.time()
        for at_s in times:
            await asyncio.sleep(max(0.0, began_s + at_s - loop.time()))
            if text := self.random.choice(self.kinds)():
                self.done.append(f"{loop.time() - START_S:.3f} s: {text}")

    def end(self) -> None:
        for task in self._later:
            task.cancel()
        self.cluster.net.heal()
        for daemon in self.cluster.all:
            daemon.process.thaw()
            storage = getattr(daemon, "devices", None)
            if storage is not None:
                daemon.devices.storage.stuck, daemon.devices.storage.slowness = False, 1.0
        for engine in self.engines:
            engine.process.thaw()

    def frozen_s(self, engine: SimEngine) -> float:
        """How much longer its calls may take, as it or its daemon stood still."""
        return self._frozen_s.get(engine.process.name, 0.0) + self._frozen_s.get(engine.daemon.name, 0.0)

    def _for_a_while(self, undo: Callable[[], object]) -> float:
        """The fault ends by itself, most of the time."""
        for_s = self.random.choice([0.05, 0.5, 1.5, 3.0, 10.0])

        async def later() -> None:
            await asyncio.sleep(for_s)
            undo()

        task = asyncio.get_running_loop().create_task(later())
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return for_s

    def spares(self, turn: Turn) -> bool:
        """Has nothing happened but to third nodes, and to the ways to them?"""
        engines = [engine for engine in (turn.prefill, turn.decode) if engine is not None]
        nodes = {engine.daemon.name for engine in engines}
        hit = nodes & self.hit_nodes or {engine.process.name for engine in engines} & self.hit_nodes
        return not (self.hit_all or hit or any(way <= nodes for way in self.hit_ways) or self._is_hit(turn))

    def _is_hit(self, turn: Turn) -> bool:
        return turn.wish.request_id in self.hit_turns

    def _daemon(self) -> SimDaemon:
        """One that has to do with a turn, rather."""
        busy = [engine.daemon for engine in self.engines if not engine.daemon.process.is_dead]
        chosen = self.random.choice(busy or self.cluster.running())
        self.hit_nodes.add(chosen.name)
        return chosen

    def kill(self) -> str:
        daemon = self._daemon()
        if daemon.process.is_dead or len(self.cluster.running()) < 2:
            return ""
        daemon.kill()
        if self.random.random() < 0.7:
            self._for_a_while(lambda: self.cluster.launch(daemon.name))
        return f"{daemon.name} is killed"

    def freeze(self) -> str:
        daemon = self._daemon()
        daemon.process.freeze()
        for_s = self._for_a_while(daemon.process.thaw)
        self._frozen_s[daemon.name] = self._frozen_s.get(daemon.name, 0.0) + for_s
        return f"{daemon.name} is frozen for {for_s:g} s"

    def cut_two(self) -> str:
        two = self.random.sample(self.cluster.names, 2)
        self.cluster.net.cut(*two)
        self.hit_ways.append(set(two))
        return f"{two} are cut for {self._for_a_while(self.cluster.net.heal):g} s"

    def cut_off(self) -> str:
        name = self._daemon().name
        for other in self.cluster.names:
            if other != name:
                self.cluster.net.cut(name, other)
        return f"{name} is cut off for {self._for_a_while(self.cluster.net.heal):g} s"

    def slow_storage(self) -> str:
        storage = self._daemon().devices.storage
        storage.slowness = 100.0
        for_s = self._for_a_while(lambda: setattr(storage, "slowness", 1.0))
        return f"storage of {storage.node} is slow for {for_s:g} s"

    def stuck_storage(self) -> str:
        storage = self._daemon().devices.storage
        storage.stuck = True
        for_s = self._for_a_while(lambda: setattr(storage, "stuck", False))
        return f"storage of {storage.node} is stuck for {for_s:g} s"

    def failing_storage(self) -> str:
        self.hit_all = True
        storage, rng = self._daemon().devices.storage, self.random

        def fate(op: StorageOp) -> Reason | None:
            chance = rng.random()
            if isinstance(op, BlockRead):
                return Reason.CORRUPT if chance < 0.1 else Reason.IO_ERROR if chance < 0.2 else None
            return Reason.NO_SPACE if chance < 0.2 else None

        storage.fate = fate
        return f"storage of {storage.node} fails"

    def damage(self) -> str:
        self.hit_all = True
        keys = [key for turn in self.turns for key in turn.wish.keys[: turn.wish.hit_blocks]]
        if not keys:
            return ""
        key = self.random.choice(keys)
        at = self.random.choice([None, 4096 + self.random.randrange(100)])
        self.cluster.store.damage(NAMESPACE, key, at)
        return f"block {key.hex()[:8]} is {'lost' if at is None else 'damaged'}"

    def engine_dies(self) -> str:
        alive = [engine for engine in self.engines if not engine.is_gone and hasattr(engine, "memory_of")]
        if not alive:
            return ""
        engine = self.random.choice(alive)
        engine.die()
        self.hit_nodes.add(engine.process.name)
        return f"{engine.process.name} dies"

    def engine_stops(self) -> str:
        alive = [engine for engine in self.engines if not engine.is_gone]
        if not alive:
            return ""
        engine = self.random.choice(alive)
        engine.process.freeze()
        self.hit_nodes.add(engine.process.name)
        for_s = self._for_a_while(engine.process.thaw)
        self._frozen_s[engine.process.name] = self._frozen_s.get(engine.process.name, 0.0) + for_s
        return f"{engine.process.name} stops for {for_s:g} s"

    def cancel(self) -> str:
        if not self.turns:
            return ""
        turn = self.random.choice(list(self.turns))
        turn.prefill.process.task(turn.cancel())
        self.hit_turns.add(turn.wish.request_id)
        return f"{turn.wish.request_id} is cancelled"

    def fence_off(self) -> str:
        """The scheduler has given an attempt up, and most of the nodes hear of it, each in its own time."""
        if not self.turns:
            return ""
        turn = self.random.choice(list(self.turns))
        name = (turn.wish.request_id, max(1, turn.attempt))
        self.hit_turns.add(name[0])
        for daemon in self.cluster.running():
            if hasattr(daemon, "node") and self.random.random() < 0.9:
                asyncio.get_running_loop().call_later(
                    self.random.choice([0.0, 0.001, 0.2]),
                    daemon.process.soon,
                    lambda daemon=daemon: daemon.node.requests.fence_off(*name),
                )
        return f"attempt {name[1]} of {name[0]} is fenced off"

    def frames_fail(self) -> str:
        self.hit_all = self.frames_failed = True
        transport, rng = self._daemon().devices.remote, self.random
        transport.frame_fails = lambda: rng.random() < 0.2  # type: ignore[attr-defined]
        return f"frames to {transport.node} fail"  # type: ignore[attr-defined]

    def shut_down(self) -> str:
        daemon = self._daemon()
        if len(self.cluster.running()) < 2 or daemon.stopping:
            return ""
        daemon.stopping = True

        async def stopping() -> None:
            await daemon.stop()
            daemon.kill()

        daemon.process.task(stopping())
        return f"{daemon.name} shuts down"
