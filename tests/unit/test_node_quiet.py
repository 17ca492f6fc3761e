"""What a device does not let go of in time: the caller is told so, then told again, and nothing is unmapped before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from node_kit import Engine, node_kit, until
from node_world import World
from test_node_incidents import SHORT

from kvmoverd.core.machines.actions import AnnounceQuiet
from kvmoverd.core.status import Reason
from kvmoverd.node import driver, node

QUIESCE_S = 0.1


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "QUIESCE_S", QUIESCE_S)


async def until_held(world: World, name: str) -> None:
    """Steps until a send of this call is under way and nothing else can happen."""
    for _ in range(40):
        if any(heard.name == name and heard.end is None for heard in world.heard) and world.kit.wire.held:
            kinds = {live.kind for live in world.kit.node.requests.live()}
            if name != "push" or "prefill" not in kinds:
                return
        await world.step()
    raise AssertionError(f"no send of {name} came")


CASES = [
    (World.load_only, "stream", "prefill"),
    (World.fetch_pages, "fetch", "prefill"),
    (World.store_blocks, "store", "prefill"),
    (World.push_only, "push", "prefill"),
    (World.turn_pe, "deliver", "decode"),
]


@pytest.mark.parametrize(("flow", "name", "side"), CASES, ids=lambda value: value if isinstance(value, str) else "")
async def test_pages_under_a_stuck_send_are_not_quiet_and_stay_mapped_until_it_ends(
    flow: Callable[[World], None], name: str, side: str
) -> None:
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        flow(world)
        await until_held(world, name)
        engine: Engine = getattr(world, side)
        heard = next(heard for heard in world.heard if heard.name == name)
        kit.node.session_closed(engine.session.session_id, "the engine died")
        await world.settle()
        assert heard.end is None, "told before its time"
        await until(lambda: heard.end is not None, "the end")
        assert heard.end is not None
        assert heard.end.reason is Reason.ENGINE_GONE and not heard.end.pages_quiet
        assert engine.region.users > 0 and not engine.memory.closed
        counts = kit.pool.slot_counts()[0]
        assert counts["quarantined"] + counts["leased"] + counts["filling"] > 0
        while await world.step():
            pass
        assert isinstance(heard.events[-1], AnnounceQuiet)
        assert engine.memory.closed, "unmapped once it is quiet"
        await world.finish()


async def test_a_region_with_a_stuck_send_is_unregistered_at_the_second_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "UNREGISTER_WAIT_S", 0.05)
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        world.fetch_pages()
        await until_held(world, "fetch")
        engine = world.prefill
        region_id = engine.region.region_id
        assert not await kit.node.unregister_region(engine.session, region_id)
        assert not engine.memory.closed
        while await world.step():
            pass
        assert await kit.node.unregister_region(engine.session, region_id)
        assert engine.memory.closed and region_id not in engine.session.regions
        await world.finish()


async def test_a_store_that_was_accepted_holds_its_region_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "UNREGISTER_WAIT_S", 0.05)
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        world.store_blocks()
        heard = world.heard[0]
        while not heard.copied:
            assert await world.step()
        assert kit.disk.held, "the writes hang"
        assert await kit.node.unregister_region(world.prefill.session, world.prefill.region.region_id)
        assert heard.end is None, "the store goes on"
        await world.finish()
        assert heard.end is not None and heard.end.reason is Reason.OK


async def test_pages_said_to_be_quiet_may_be_used_in_the_same_breath() -> None:
    async with node_kit(slots=24, limits=SHORT) as kit:
        world = World(kit)
        await world.prepare()
        world.turn_pe()
        while not any(heard.name == "deliver" for heard in world.heard):
            await world.step()
        delivery = world.heard[-1]
        kit.pumping = False
        while delivery.end is None:
            kit.wire.release_one()
            kit.mover.pump()
            await world.settle()
        assert delivery.end.reason is Reason.OK
        assert kit.mover._sinks, "the sink's fence has not been told yet"
        pages = next(used.pages for used in world.in_use if delivery in used.calls)
        assert not world.decode.region.written[pages].any(), "told to be quiet, and still booked as being written"
        kit.pumping = True
        await world.finish()
