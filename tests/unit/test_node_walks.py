"""Random histories: many requests at once over a tiny pool, with incidents; the books add up after every step."""

from __future__ import annotations

import asyncio
import random

import pytest
from markers import slow_only
from node_kit import NodeKit, node_kit
from node_time import pass_time
from node_world import World
from test_node_incidents import FLOWS, SHORT

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import Reason
from kvmoverd.node import desk, reader
from kvmoverd.ports.storage import BlockRead

STEPS = 400
WORLDS_MAX = 6


class Walk:
    """One seeded history."""

    def __init__(self, kit: NodeKit, seed: int) -> None:
        self.kit = kit
        self.random = random.Random(seed)
        self.worlds: list[World] = []
        self.begun = 0

    async def run(self) -> None:
        self.kit.disk.closed = self.kit.wire.closed = True
        self.kit.disk.fails = self._fate
        steps = [self.step, self.step, self.step, self.step, self.burst]
        moves = [self.begin, *steps, self.pass_time, self.incident, self.hint]
        for _ in range(STEPS):
            self.random.choice(moves)()
            for _ in range(self.random.randrange(6)):
                await asyncio.sleep(0)
            self.look()
        await self.end()

    def begin(self) -> None:
        if len(self.worlds) >= WORLDS_MAX:
            return
        self.begun += 1
        hit = self.random.choice([1, 2, 2, 3])
        world = World(self.kit, request_id=f"w{self.begun}", salt=self.random.randrange(3), hit=hit)
        self.worlds.append(world)
        try:
            self.random.choice(FLOWS)(world)
        except KvmoverError as error:
            world.refused.append(error)

    def step(self) -> None:
        self.random.choice([self.kit.disk, self.kit.wire]).release_one()

    def burst(self) -> None:
        """Ops happen out of order, and their ends are handed out at once, with those of ops that follow from them."""
        self.kit.pumping = False
        self.random.shuffle(self.kit.disk.held)
        for _ in range(self.random.randrange(2, 9)):
            self.step()
        self.kit.pumping = True

    def pass_time(self) -> None:
        pass_time(self.random.choice([0.001, 0.02, 0.06]))

    def hint(self) -> None:
        keys = self.kit.chain(3, self.random.randrange(3))
        self.kit.node.prefetch("nobody", self.kit.namespace, keys)

    def incident(self) -> None:
        if not self.worlds:
            return
        world, node = self.random.choice(self.worlds), self.kit.node
        engine = self.random.choice([world.prefill, world.decode])
        match self.random.randrange(6):
            case 0:
                node.cancel(world.request_id, 1, engine.session.session_id)
            case 1:
                node.session_closed(engine.session.session_id, "the engine died")
            case 2:
                self.kit.wire.fails = self._one_failure()
            case 3:
                call = world.call(world.prefill, attempt=2)
                try:
                    world.listen("later", node.fetch(call, self.kit.namespace, (), FetchKind.LEASE).outbox)
                except KvmoverError as error:
                    world.refused.append(error)
            case 4:
                self.kit.forget_clean()
            case _:
                node.leases.session_gone(engine.session.session_id)

    def _one_failure(self):  # type: ignore[no-untyped-def]
        failures = iter([Reason.PEER_LOST])
        return lambda send: next(failures, None)

    def _fate(self, op: object) -> Reason | None:
        fate = self.random.random()
        if isinstance(op, BlockRead):
            return Reason.CORRUPT if fate < 0.03 else Reason.IO_ERROR if fate < 0.06 else None
        return Reason.NO_SPACE if fate < 0.06 else None

    def look(self) -> None:
        self.kit.no_wrong_bytes()
        for world in list(self.worlds):
            world.look()
            if not world.tasks and self.random.random() < 0.3:
                world.close()
                self.worlds.remove(world)
        for purpose in Purpose:
            assert self.kit.admission.taken_bytes(purpose) <= self.kit.arena.size_bytes

    async def end(self) -> None:
        while self.kit.disk.release_one() or self.kit.wire.release_one():
            pass_time(0.01)
            for _ in range(6):
                await asyncio.sleep(0)
            self.look()
        self.kit.disk.closed = self.kit.wire.closed = False
        pass_time(3.0)
        for world in self.worlds:
            await world.ended()
            world.close()
        await self.kit.everything_is_home()


async def _walk(seed: int, slots: int) -> int:
    async with node_kit(slots=slots, limits=SHORT) as kit:
        walk = Walk(kit, seed)
        await walk.run()
        return walk.begun


@pytest.mark.parametrize("seed", [0, 1, *slow_only([2, 3])])
async def test_books_and_bytes_survive_a_random_history(seed: int) -> None:
    assert await _walk(seed, 8 + 4 * (seed % 3)) > 10, f"seed {seed} began hardly anything"


@pytest.mark.parametrize("seed", [100, 101, *slow_only(range(102, 112))])
async def test_books_and_bytes_survive_it_too_when_reads_start_and_end_one_by_one(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(reader, "STARTS_MAX", 1)
    monkeypatch.setattr(desk, "COMPLETIONS_MAX", 1 + seed % 2)
    assert await _walk(seed, 8 + 4 * (seed % 3)) > 10, f"seed {seed} began hardly anything"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4, 8), *range(100, 160)])
async def test_books_and_bytes_survive_many_random_histories(seed: int) -> None:
    await _walk(seed, 8 + 4 * (seed % 3))
