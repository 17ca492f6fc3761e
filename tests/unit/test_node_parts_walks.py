"""Seeded walks over whole parts: several readers of one request on one node, with blocks given up and taken over, devices that
fail, are late or stand still, credits, sinks and stops at any moment. No wrong byte, no second read, no slot left."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from markers import slow_only
from node_gates import NEVER
from node_kit import LAYOUT, WHOLE, NodeKit, node_kit, until
from part_kit import OWNER, ROUTES, Owner, Pages, order_of, own_part

from kvmoverd.core.status import Reason
from kvmoverd.node.reading import PartDriver
from kvmoverd.ports.storage import BlockRead

WALKS = [30, *slow_only([100])]
STEPS_MAX = 90
LAYERS = LAYOUT.layer_count
BAD = (Reason.CORRUPT, Reason.IO_ERROR, Reason.MISS)


class Reader:
    """One part and what its owner does with it: a helper's, or this node's own."""

    def __init__(self, kit: NodeKit, rng: Random, keys: tuple[bytes, ...], first_block: int, *, helps: bool) -> None:
        self.kit, self.keys, self.first_block, self.helps = kit, keys, first_block, helps
        self.owner = Owner()
        self.pages = Pages(kit, len(keys), first_block=first_block)
        self.buffer = Pages(kit, len(keys), first_block=first_block)
        self.credited: int | None = None
        self.blocks = len(keys)
        self.part = self._open(next(kit.services.ids))

    def _open(self, number: int) -> PartDriver:
        if not self.helps:
            return own_part(self.kit, self.keys, self.pages, self.owner, holds=True)
        order = order_of(self.keys, self.pages, part=number, kit=self.kit)
        part = self.kit.node.helper_side.open(order, owner=OWNER, **ROUTES, listener=self.owner.listener)
        part.start()
        return part

    def give_up(self, rng: Random) -> Reader | None:
        """What it gives up goes to another reader at once."""
        told = len(self.owner.gave_up)
        self.part.give_up(rng.randint(0, self.blocks))
        if len(self.owner.gave_up) == told:
            assert self.part.machine.state.name in ("DRAINING", "ENDED"), "else it answers"
            return None
        kept = self.owner.gave_up[-1]
        assert kept <= self.blocks
        if kept == self.blocks:
            return None
        self.blocks = kept
        left = self.keys[kept:]
        assert not any(self.kit.disk.reads[key] for key in left), "a device has read it already"
        self.keys = self.keys[:kept]
        return Reader(self.kit, rng, left, self.first_block + kept, helps=rng.random() < 0.5)

    def credit(self, rng: Random) -> None:
        if self.owner.prefix is None:
            return
        if self.credited is None:
            self.credited = rng.randint(0, self.owner.prefix[0])
            for sink in (self.pages, self.buffer):
                sink.prefix_of(self.credited)
        self.part.credit(self.credited, rng.randint(0, LAYERS))

    def finish(self) -> None:
        if self.owner.prefix is not None:
            self.credit(Random(0))
            assert self.credited is not None
            self.part.credit(self.credited, LAYERS)
        self.part.assemble(self.buffer.sink_id)

    def check(self) -> None:
        end = self.owner.end
        assert end is not None
        if end.reason is Reason.OK and self.owner.prefix is not None and self.credited:
            assert sorted(self.pages.arrived) == list(range(LAYERS))
            assert sorted(self.buffer.arrived) == (list(range(LAYERS)) if self.helps else [])
        for sink in (self.pages, self.buffer):
            for layer in sink.arrived:
                span = LAYOUT.layer_span(layer)
                for n in range(self.credited or 0):
                    assert sink.layer(layer, n) == self.kit.content(self.keys[n])[span.start : span.stop]


class Walk:
    def __init__(self, kit: NodeKit, rng: Random, keys: tuple[bytes, ...]) -> None:
        self.kit, self.rng = kit, rng
        cut = rng.randint(1, len(keys) - 1)
        self.readers = [
            Reader(kit, rng, keys[:cut], 0, helps=False),
            Reader(kit, rng, keys[cut:], cut, helps=True),
        ]

    def step(self) -> None:
        rng, kit = self.rng, self.kit
        reader = rng.choice(self.readers)
        dice = rng.random()
        if dice < 0.45:
            kit.disk.release_one()
        elif dice < 0.62:
            kit.wire.release_one()
        elif dice < 0.72:
            if taken := reader.give_up(rng):
                self.readers.append(taken)
        elif dice < 0.84:
            reader.credit(rng)
        elif dice < 0.90:
            reader.part.assemble(reader.buffer.sink_id)
        elif dice < 0.94:
            self._late()
        elif dice < 0.96:
            kit.disk.fails = lambda op: rng.choice(BAD) if isinstance(op, BlockRead) else None
            kit.disk.release_one()
            kit.disk.fails = NEVER
        elif dice < 0.97:
            reader.part.stop()

    def _late(self) -> None:
        if self.kit.disk.late:
            self.kit.disk.let_go_one()
        elif self.kit.disk.held:
            self.kit.disk.give_up_one()

    async def finish(self) -> None:
        """The devices come back, every part gets what it waits for; some are stopped first."""
        kit = self.kit
        if self.rng.random() < 0.3:
            kit.parts.peer_lost(*OWNER, "gone")
        kit.disk.closed = kit.wire.closed = False
        async with asyncio.timeout(5.0):
            while not all(reader.part.is_gone for reader in self.readers) or kit.disk.held or kit.wire.held:
                kit.disk.release_one()
                kit.wire.release_one()
                for reader in self.readers:
                    reader.finish()
                await asyncio.sleep(0)
        while kit.disk.late:
            kit.disk.let_go_one()
        sinks = [sink for reader in self.readers for sink in (reader.pages, reader.buffer)]
        for sink in sinks:
            sink.close()
        await until(lambda: all(sink.quiet for sink in sinks), "sinks are quiet")
        for reader in self.readers:
            reader.check()
        await kit.everything_is_home()


async def _walk(seed: int) -> int:
    rng = Random(seed)
    async with node_kit(range_bytes=rng.choice((1, LAYOUT.layer_bytes[0], WHOLE))) as kit:
        _, keys = await kit.stored_and_held(rng.randint(4, 28))
        kit.wire.closed = rng.random() < 0.7
        walk = Walk(kit, rng, keys)
        for _ in range(rng.randint(0, STEPS_MAX)):
            walk.step()
            kit.slots_add_up()
            if rng.random() < 0.6:
                await asyncio.sleep(0)
        await walk.finish()
        assert all(kit.disk.reads[key] <= 1 for key in keys), kit.disk.reads
        return len(walk.readers)


@pytest.mark.parametrize("walks", WALKS)
async def test_random_schedules_of_parts_keep_bytes_slots_and_reads(walks: int) -> None:
    moves = 0
    for seed in range(walks):
        try:
            moves += await _walk(seed) - 2
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert moves > walks // 2, f"{moves} parts were taken over in {walks} walks"
