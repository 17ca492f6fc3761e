"""One seeded history of a cluster: turns, faults, and what must be true all along and at the end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

from node_kit import LAYOUT
from sim_daemon import Cluster, VirtualClock
from sim_engines import NAMESPACE, Heard, SimEngine, content_of
from sim_faults import Faults
from sim_loop import START_S, VirtualLoop
from sim_moves import Moves
from sim_turns import ATTEMPTS_MAX, Turn, Wish

from kvmoverd.core.keys import ROOT, block_key
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.rpc import node_service, peer_client

TURNS_S = 2.0
END_S = 120.0
HOME_S = 30.0
"""After all calls have ended and all faults are over, everything is home within this time."""
PATIENT_S = 8.0
FULL = (Reason.POOL_EXHAUSTED, Reason.TOO_BIG)
WISHED = ("as the seed wants", "gave the request up")
"""What an `INTERNAL` end may say where frames fail: a frame was refused by chance, or the prefill node tells of it."""


@dataclass
class Outcome:
    """What a history came to; `wrong` empty: nothing is."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    delivered: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """Plans and moves, by why."""
    faults: list[str] = field(default_factory=list)
    steps: int = 0
    virtual_s: float = 0.0


class History:
    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.outcome = Outcome(seed)
        self.random = random.Random(f"history {seed}")
        self.names = [f"n{number}" for number in range(self.random.choice([2, 3, 3, 4]))]
        self.cluster = Cluster(loop, seed, self.names, self.random)
        self.turns: list[Turn] = []
        self.engines: list[SimEngine] = []
        self.faults = Faults(self.cluster, self.turns, self.engines, random.Random(f"faults {seed}"))
        self.moves = Moves(self.cluster, self.faults, random.Random(f"moves {seed}"))

    async def run(self) -> Outcome:
        for name in self.names:
            self.cluster.launch(name)
        await asyncio.sleep(0.1)
        living = [asyncio.create_task(self._live(number)) for number in range(self.random.randrange(1, 9))]
        breaking = asyncio.create_task(self.faults.run())
        moving = asyncio.create_task(self.moves.run())
        await self._until_over(living)
        await breaking
        assert not moving.done() or moving.result() is None
        moving.cancel()
        self.faults.end()
        await self._everything_is_home()
        self._last_look()
        outcome = self.outcome
        outcome.faults = self.faults.done
        outcome.steps, outcome.virtual_s = self.loop.steps, self.loop.time() - START_S
        await self.cluster.bury()
        gc.collect()
        outcome.wrong += self.loop.errors
        return outcome

    async def _live(self, number: int) -> None:
        await asyncio.sleep(self.random.random() * TURNS_S)
        rng = random.Random(f"turn {self.outcome.seed} {number}")
        turn = self._turn(number, rng)
        self.turns.append(turn)
        running = turn.prefill.process.task(turn.run())
        while not (running.done() or turn.prefill.process.is_dead):  # noqa: ASYNC110 - the dead say nothing
            await asyncio.sleep(0.05)

    def _turn(self, number: int, rng: random.Random) -> Turn:
        place, decode_place = rng.choice(self.names), rng.choice([*self.names, *self.names, ""])
        wish = self._wish(number, rng, place, decode_place)
        pages = ATTEMPTS_MAX * (len(wish.keys) + 1)
        slow_s = rng.choice([0.0, 0.0, 0.001, 0.3])
        prefill = SimEngine(self.cluster.daemons[place], f"pe{number}@{place}", pages, compute_s=slow_s)
        self.engines.append(prefill)
        decode = None
        if decode_place:
            decode = SimEngine(self.cluster.daemons[decode_place], f"de{number}@{decode_place}", pages)
            self.engines.append(decode)
        return Turn(wish, prefill, decode, rng)

    def _wish(self, number: int, rng: random.Random, prefill: str, decode: str) -> Wish:
        salt = rng.choice([0, 1, 100 + number, 100 + number])
        keys, parent = [], ROOT
        for n in range(rng.choice([1, 8, 24, 24])):
            parent = block_key(NAMESPACE.fingerprint, parent, [salt, n])
            keys.append(parent)
        hit = rng.choice([0, len(keys), max(1, len(keys) // 2), len(keys) - 1])
        self.cluster.store.open(NAMESPACE)
        for key in keys[:hit]:
            if not self.cluster.store.is_lost(key):
                self.cluster.store.put(NAMESPACE, key, content_of(key))
        path = rng.choice([Path.PE, Path.DE if decode else Path.PE, Path.AUTO, Path.AUTO, Path.PARTS])
        resident = rng.choice([0, 0, 0, hit // 2, hit])
        return Wish(
            f"r{number}",
            tuple(keys),
            hit,
            rng.choice([0, 3]),
            path,
            rng.choice([0.2, 4.0, 8.0, 8.0, 8.0]),
            resident,
            self._shares(rng, resident, hit, prefill, decode) if path is Path.PARTS else (),
            no_helpers=path is Path.AUTO and rng.random() < 0.2,
        )

    def _shares(self, rng: random.Random, resident: int, hit: int, prefill: str, decode: str) -> tuple[Share, ...]:
        """Each block is somebody's, by runs of chance."""
        readers = sorted({prefill, decode, *rng.sample(self.names, min(3, len(self.names)))} - {""})
        rng.shuffle(readers)
        edges = sorted({resident, hit, *(rng.randrange(resident, hit + 1) for _ in range(rng.randrange(5)))})
        runs: dict[str, list[tuple[int, int]]] = {}
        for first, stop in itertools.pairwise(edges):
            runs.setdefault(rng.choice(readers), []).append((first, stop))
        return tuple(Share(node, Runs.of(*spans)) for node, spans in runs.items())

    # Checks -----------------------------------------------------------------------------------------------------------

    async def _until_over(self, living: list[asyncio.Task[None]]) -> None:
        """All turns are over, or somebody waits for too long."""
        until_s = self.loop.time() + END_S
        while self.loop.time() < until_s:
            for daemon in self.cluster.running():
                daemon.slots_add_up()
            self._look_for_hangs()
            if all(task.done() for task in living) and self._all_over():
                return
            await asyncio.sleep(0.25)
        self.outcome.wrong.append(f"turns are not over after {END_S:g} s: {self._waiting()}")

    def _all_over(self) -> bool:
        return all(call.over for engine in self.engines if not engine.is_gone for call in engine.heard)

    def _waiting(self) -> list[str]:
        return [call.name for engine in self.engines if not engine.is_gone for call in engine.heard if not call.over]

    def _look_for_hangs(self) -> None:
        now_s = self.loop.time()
        for engine in self.engines:
            for call in engine.heard:
                if engine.is_gone or call in self._hanging or call.over:
                    continue
                if now_s > call.made_s + call.bound_s + self.faults.frozen_s(engine):
                    self._hanging.append(call)
                    self.outcome.wrong.append(f"{call.name} hangs since {call.made_s - START_S:.3f} s: {call.events}")

    @property
    def _hanging(self) -> list[Heard]:
        return self.__dict__.setdefault("hanging", [])

    async def _everything_is_home(self) -> None:
        for engine in self.engines:
            daemon = engine.daemon
            if not engine.is_gone and not daemon.process.is_dead and hasattr(engine, "session"):
                session_id = engine.session.session_id
                await self._quiet(engine)
                self.outcome.wrong += engine.last_look()
                engine.is_gone = True
                daemon.process.soon(lambda d=daemon, s=session_id: d.node.session_closed(s, "the end"))
        until_s = self.loop.time() + HOME_S
        while self.loop.time() < until_s:
            if not any(daemon.left_over() for daemon in self.cluster.running() if not daemon.process.is_dead):
                return
            await asyncio.sleep(0.1)
        for daemon in self.cluster.running():
            if left := daemon.left_over():
                self.outcome.wrong.append(f"{daemon.name}: not home: {left}")

    async def _quiet(self, engine: SimEngine) -> None:
        until_s = self.loop.time() + HOME_S
        while self.loop.time() < until_s:
            if all(call.quiet or call.gone for call in engine.heard):
                return
            await asyncio.sleep(0.1)
        noisy = [call.name for call in engine.heard if not (call.quiet or call.gone)]
        self.outcome.wrong.append(f"pages never become quiet: {noisy}")

    def _last_look(self) -> None:
        for engine in self.engines:
            self.outcome.wrong += [text for text in engine.last_look() if text not in self.outcome.wrong]
            for call in engine.heard:
                self.outcome.calls += 1
                self.outcome.ends[call.end.reason.name if call.end else "GONE" if call.gone else "NONE"] += 1
        for daemon in self.cluster.all:
            counts = daemon.node.services.counts
            self.outcome.seen.update({f"plan {why}": count for why, count in counts.plans.items()})
            self.outcome.seen.update({f"move {why}": count for why, count in counts.moves.items()})
        self.outcome.seen.update(self.moves.seen)
        self.outcome.delivered = sum(turn.delivered for turn in self.turns)
        self._no_wrong_blocks()
        self._nothing_ends_internal_by_itself()
        self._everything_went_well()

    def _no_wrong_blocks(self) -> None:
        """Whatever a look-up could find is the block of its key."""
        known = {key for turn in self.turns for key in turn.wish.keys}
        for daemon in self.cluster.running():
            for key, payload in daemon.pooled().items():
                if key in known and payload != content_of(key):
                    self.outcome.wrong.append(f"{daemon.name}: block {key.hex()[:8]} is clean with wrong bytes")
        store = self.cluster.store
        for key in known:
            record = store.records.stored(NAMESPACE, key)
            good = record is None or record[HEADER_BYTES : HEADER_BYTES + LAYOUT.block_bytes] == content_of(key)
            if not good and not store.is_lost(key):
                self.outcome.wrong.append(f"block {key.hex()[:8]} is stored with wrong bytes")

    def _nothing_ends_internal_by_itself(self) -> None:
        """No loss of nodes, ways, blocks or time is an error of the daemons: only a frame that was refused by chance may be."""
        ends = [(call.name, call.end) for engine in self.engines for call in engine.heard if call.end is not None]
        for name, end in ends:
            wished = self.faults.frames_failed and end.message.endswith(WISHED)
            if end.reason is Reason.INTERNAL and not wished:
                self.outcome.wrong.append(f"{name} ended INTERNAL by itself: {end.message}")

    def _everything_went_well(self) -> None:
        """A turn delivers, and nothing is read twice for it, whatever happens to third nodes; pools may be too full for it."""
        for turn in self.turns:
            if turn.decode is None or turn.wish.timeout_s < PATIENT_S or not self.faults.spares(turn):
                continue
            calls = [call for engine in (turn.prefill, turn.decode) for call in engine.heard if call.end is not None]
            ends = [(call.name, call.end) for call in calls]
            waited = any(call.end.message == f"{turn.wish.timeout_s:g} s passed" for call in calls if call.end)
            was_full = any(call.end.reason in FULL for call in calls if call.end)
            if waited or not (turn.delivered or was_full):
                self.outcome.wrong.append(f"{turn.wish.request_id} was spared, and did not deliver in time: {ends}")
        # A third node that owes layers for too long counts as dead: it is not waited for, and what it had is read again.
        if not (self.faults.done or self.outcome.seen["move stalled"]):
            self._nothing_was_read_twice()

    def _nothing_was_read_twice(self) -> None:
        """Blocks of one turn alone, whose pools kept them."""
        for turn in self.turns:
            keys = set(turn.wish.keys[turn.wish.resident_blocks : turn.wish.hit_blocks])
            shared = {key for other in self.turns if other is not turn for key in other.wish.keys}
            readers = self.cluster.store.layer_readers
            read = [(key, layer) for key in keys - shared for layer in range(LAYOUT.layer_count)]
            if turn.attempt == 1 and (twice := [place for place in read if len(readers.get(place, ())) > 1]):
                text = f"{turn.wish.request_id}: {len(twice)} Layer Blocks were read twice: {readers[twice[0]]}"
                self.outcome.wrong.append(text)


def run_seed(seed: int) -> Outcome:
    """One history; the same seed gives the same."""
    if gc.isenabled():
        gc.collect()
        gc.freeze()
    gc.disable()
    loop = VirtualLoop(seed)
    asyncio.set_event_loop(None)
    clock = VirtualClock(loop)
    try:
        with ExitStack() as patches:
            history = _made(loop, seed)
            patches.callback(logging.getLogger("kvmoverd").setLevel, logging.getLogger("kvmoverd").level)
            logging.getLogger("kvmoverd").setLevel(logging.CRITICAL)
            for module in (peer_client, node_service):
                patches.enter_context(patch.object(module, "time", clock))
            patches.enter_context(patch("grpc.aio.insecure_channel", history.cluster.town.channel))
            return loop.run_until_complete(history.run())
    finally:
        loop.close()
        gc.enable()


def _made(loop: VirtualLoop, seed: int) -> History:
    """Its books belong to no process."""
    asyncio._set_running_loop(loop)
    try:
        return History(loop, seed)
    finally:
        asyncio._set_running_loop(None)
