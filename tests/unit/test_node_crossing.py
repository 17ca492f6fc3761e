"""Requests that cross over several nodes while buffers and room are scarce: all go on, nobody starves, no slot is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from node_kit import LAYOUT, end_of, told, until
from node_net import NAMES, Net, node_net
from node_world import World

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import PoolExhausted
from kvmoverd.core.status import Path, Reason
from kvmoverd.node import prefill
from kvmoverd.node.peer import Reservation
from kvmoverd.node.services import Limits

PATIENT = Limits(admission_wait_s=30, attach_timeout_s=30)
HOLD_S = 0.03
END_S = 30.0
ROOM = {Purpose.READ: 8, Purpose.DE_BUFFER: 10, Purpose.HELP: 4, Purpose.WRITE_BACK: 40}
"""Slots of a node, for requests of up to 9 each."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "HOLD_S", HOLD_S)


def scarce(limits: Limits = PATIENT) -> dict[str, object]:
    """Options of nodes whose pools are as large as the room in them."""
    return {
        "slots": sum(ROOM.values()) + 8,
        "room_slots": ROOM,
        "limits": limits,
        "queue_max": 512,
        "live_max": 8192,
    }


class Crowd:
    """Many turns at once, each from one node to another, with helpers."""

    def __init__(self, net: Net, seed: int) -> None:
        self.net, self.rng = net, Random(seed)
        self.names = list(net.kits)
        self.worlds: list[World] = []

    async def add(self, source: str, to: str, hit: int, blocks: int) -> World:
        kit = self.net[source]
        number = len(self.worlds)
        world = World(
            kit,
            request_id=f"r{number}",
            salt=1000 + number,
            hit=hit,
            blocks=blocks,
            net=self.net,
            to=to,
            timeout_s=END_S,
        )
        if hit:
            await kit.store(world.prefill, world.keys[:hit])
        self.worlds.append(world)
        return world

    async def add_some(self, count: int) -> None:
        for _ in range(count):
            blocks = self.rng.randint(1, 8)
            await self.add(*self.rng.choices(self.names, k=2), self.rng.randint(0, blocks), blocks)
        for kit in self.net.kits.values():
            kit.forget_clean()

    def start(self, world: World) -> None:
        """By any plan: one side, both, some with a helper."""
        source, to = world.kit.services.node, world.there.services.node
        nodes = list(dict.fromkeys((source, to, *self.rng.sample(self.names, len(self.names)))))[:3]
        cuts = sorted(self.rng.choices(range(world.hit + 1), k=len(nodes) - 1))
        edges = [0, *cuts, world.hit]
        shares = [(node, (a, b)) for node, a, b in zip(nodes, edges, edges[1:], strict=False) if a < b]
        match self.rng.randrange(4) if world.hit else 0:
            case 0:
                world.turn_pe() if world.hit else world.push_only()
            case 1:
                world.turn_de()
            case 2:
                world.turn_auto()
            case _:
                world.turn_parts(*shares)

    async def ends(self) -> Counter[tuple[str, Reason]]:
        """How the calls ended; all of them have, and all is home."""
        async with asyncio.timeout(END_S):
            while not all(heard.quiet for world in self.worlds for heard in world.heard):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for world in self.worlds:
            await world.ended()
            world.close()
        await self.net.everything_is_home()
        return Counter((heard.name, heard.end.reason) for world in self.worlds for heard in world.heard if heard.end)


@pytest.mark.parametrize("nodes", [2, 3])
async def test_requests_that_cross_each_other_all_end_well(nodes: int) -> None:
    """Each node is a prefill node for the next and the decode node of the one before; a buffer leaves room for no second."""
    async with node_net(nodes, **scarce()) as net:
        crowd = Crowd(net, 0)
        for n in [*range(nodes)] * 3:
            await crowd.add(NAMES[n], NAMES[(n + 1) % nodes], 6, 8)
        for world in crowd.worlds:
            world.turn_pe()
        ends = await crowd.ends()
        assert {reason for _, reason in ends} == {Reason.OK}
        assert ends["deliver", Reason.OK] == 3 * nodes


@pytest.mark.parametrize("seed", range(2))
async def test_of_many_requests_at_once_none_starves_and_no_slot_is_lost(seed: int) -> None:
    async with node_net(4, **scarce()) as net:
        crowd = Crowd(net, seed)
        await crowd.add_some(50)
        for world in crowd.worlds:
            crowd.start(world)
        ends = await crowd.ends()
        assert {reason for _, reason in ends} == {Reason.OK}, ends
        assert ends["deliver", Reason.OK] == 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
async def test_of_two_hundred_requests_at_once_none_starves_and_no_slot_is_lost(seed: int) -> None:
    async with node_net(4, **scarce()) as net:
        crowd = Crowd(net, seed)
        await crowd.add_some(200)
        for world in crowd.worlds:
            crowd.start(world)
        ends = await crowd.ends()
        assert {reason for _, reason in ends} == {Reason.OK}, ends


async def test_requests_that_wait_too_long_are_told_so_in_time_and_leave_nothing() -> None:
    limits = Limits(admission_wait_s=0.1, attach_timeout_s=1)
    async with node_net(3, **scarce(limits)) as net:
        crowd = Crowd(net, 5)
        await crowd.add_some(60)
        for kit in net.kits.values():
            kit.wire.closed = True
        for world in crowd.worlds:
            crowd.start(world)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.sleep(0.3)
        net.open_gates()
        for kit in net.kits.values():
            while kit.wire.release_one():
                pass
        ends = await crowd.ends()
        # A decode engine that waits for a buffer may yet get it under the next attempt: it waits until its time is over.
        assert ends["assemble", Reason.DEADLINE] == ends["push", Reason.POOL_EXHAUSTED] > 0, (
            "the test is one of scarcity"
        )
        ends -= Counter({("assemble", Reason.DEADLINE): ends["assemble", Reason.DEADLINE]})
        assert {reason for _, reason in ends} <= {Reason.OK, Reason.POOL_EXHAUSTED}, ends
        assert loop.time() - began_s < 5


async def test_a_buffer_is_not_held_while_its_request_waits_for_room_at_home() -> None:
    """The room at home comes free only when another request, which needs that buffer's room, has been served."""
    async with node_net(2, **scarce()) as net:
        room, size_bytes = net["p"].services.room, ROOM[Purpose.READ] * LAYOUT.record_bytes
        room.ask(Purpose.READ, "all of it", size_bytes, granted=lambda: None, refused=lambda error: None)
        crowd = Crowd(net, 0)
        waiting = await crowd.add("p", "d", 6, 8)
        other = await crowd.add("d", "d", 0, 8)
        waiting.turn_pe()
        await until(lambda: net["d"].admission.taken_bytes(Purpose.DE_BUFFER) > 0, "the buffer is taken")
        other.push_only()
        await until(lambda: all(heard.quiet for heard in other.heard), "the other is served meanwhile")
        room.give_back("all of it")
        assert {reason for _, reason in await crowd.ends()} == {Reason.OK}


async def test_who_waits_longest_gets_the_next_buffer_also_when_it_came_back_from_elsewhere() -> None:
    async with node_net(2, **scarce()) as net:
        side, kit = net["d"].node.decode_side, net["d"]
        keys = kit.chain(8)
        served: list[str] = []

        async def ask(name: str, waited_s: float) -> None:
            asked = Reservation(
                name, 1, kit.namespace.fingerprint, keys, 0, 0, None, 5.0, "p", "boot-p", waited_s=waited_s
            )
            reserved = await side.reserve(kit.namespace, asked)
            served.append(name)
            await asyncio.sleep(0.01)
            side.release_ticket(reserved.ticket, Reason.CANCELLED)

        first = asyncio.create_task(ask("first", 0.0))
        await until(lambda: served == ["first"], "the only buffer is taken")
        others = [asyncio.create_task(ask(name, age)) for name, age in (("young", 0.0), ("old", 2.0), ("middle", 1.0))]
        await asyncio.gather(first, *others)
        assert served == ["first", "old", "middle", "young"]
        await net.everything_is_home()


async def test_a_refused_reservation_says_how_many_wait_since_when_and_when_to_come_again() -> None:
    async with node_net(2, **scarce(Limits(admission_wait_s=2, attach_timeout_s=5))) as net:
        side, kit = net["d"].node.decode_side, net["d"]
        keys = kit.chain(8)

        def asked(name: str, waited_s: float = 0.0) -> Reservation:
            return Reservation(
                name, 1, kit.namespace.fingerprint, keys, 0, 0, None, 5.0, "p", "boot-p", waited_s=waited_s
            )

        reserved = await side.reserve(kit.namespace, asked("first"))
        waiting = [asyncio.create_task(side.reserve(kit.namespace, asked(f"w{n}"))) for n in range(3)]
        await until(lambda: len(side._places) == 3, "they wait")
        with pytest.raises(PoolExhausted) as refused:
            await side.reserve(kit.namespace, asked("old", waited_s=1.95))
        said = {key: int(refused.value.details[key]) for key in ("waiting", "oldest_wait_ms", "retry_after_ms")}
        assert said["waiting"] == 4
        assert 1950 <= said["oldest_wait_ms"] < 4000
        assert said["retry_after_ms"] == 2000, "as long as the oldest has waited, and never longer than one may wait"
        side.release_ticket(reserved.ticket, Reason.CANCELLED)
        for one in waiting:
            side.release_ticket((await one).ticket, Reason.CANCELLED)
        await net.everything_is_home()
        again = await side.reserve(kit.namespace, asked("again"))
        side.release_ticket(again.ticket, Reason.CANCELLED)
        await net.everything_is_home()


async def test_an_engine_that_waits_for_a_buffer_in_vain_hears_of_it_in_time() -> None:
    async with node_net(2, **scarce(Limits(admission_wait_s=0.1, attach_timeout_s=5))) as net:
        kit = net["p"]
        room = net["d"].services.room
        size_bytes = ROOM[Purpose.DE_BUFFER] * LAYOUT.record_bytes
        room.ask(Purpose.DE_BUFFER, "all of it", size_bytes, granted=lambda: None, refused=lambda error: None)
        engine, keys = kit.engine(), kit.chain(4)
        await kit.store(kit.engine(), keys)
        stream = kit.node.stream(kit.plan(engine, kit.call(engine), keys, hit=4, path=Path.AUTO, decode_node="d"))
        end = end_of(await told(stream.outbox))
        assert (end.reason, end.pages_quiet) == (Reason.POOL_EXHAUSTED, True)
        room.give_back("all of it")
        kit.node.session_closed(engine.session.session_id, "the test ends")
        await net.everything_is_home()
