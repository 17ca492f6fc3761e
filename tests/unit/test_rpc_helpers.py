"""Three daemons over gRPC: plans of the decode node, parts of a third one, and what ends when one of the three goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rpc_kit import HERE, LAYERS, THERE, Engine, Kit, free_port, keys_of, rpc_kit, until
from test_rpc_peers import Heard, order, peer_of, reservation

from kvmoverd.core.errors import BadPlan, UnknownPeer
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, Share
from kvmoverd.core.status import Path as ReadPath
from kvmoverd.core.status import Reason
from kvmoverd.node.peer import Help, Helped, Reservation, SplitFacts
from kvmoverd.node.reading import PartDriver
from kvmoverd.ports.transport import RouteLost

THIRD = "third"
SINK = 1
"""Where the layers of a waiting part would go."""
Three = tuple[Kit, Kit, Kit]


@asynccontextmanager
async def three(home: Path, **changed: Any) -> AsyncIterator[Three]:
    """A prefill node `here`, a decode node `there` and a `third` one, each the others' peer."""
    names = (HERE, THERE, THIRD)
    ports = dict(zip(names, (free_port(), free_port(), free_port()), strict=True))

    def started(name: str) -> Any:
        peers = [{"name": peer, "address": f"127.0.0.1:{port}"} for peer, port in ports.items() if peer != name]
        return rpc_kit(home, name=name, port=ports[name], peers=peers, **changed)

    async with started(HERE) as here, started(THERE) as there, started(THIRD) as third:
        yield here, there, third


def facts(**changed: Any) -> SplitFacts:
    fields: dict[str, Any] = {
        "prefill": Depth(),
        "pooled": Runs(),
        "helpers": (),
        "starved_to_decode": False,
        "starved_from_decode": False,
        "floor_s": 0.0,
    }
    return SplitFacts(**(fields | changed))


def auto(engine: Engine, request_id: str = "r", **changed: Any) -> Reservation:
    return reservation(engine, request_id, path=ReadPath.AUTO, facts=facts(**changed))


def help_for(engine: Engine, decode_node: str = "") -> Help:
    namespace = engine.kit.node.models.get(engine.fingerprint)
    keys = tuple(keys_of(engine.fingerprint, 2))
    return Help("r", 1, namespace, keys, (None, None), decode_node)


async def test_the_decode_node_decides_by_what_it_is_told(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, there, _):
        prefill, decode = await here.engine(), await there.engine()
        peer = peer_of(here)
        for pooled, shares in (
            (Runs.of((0, 2)), (Share(HERE, Runs.of((0, 2))),)),
            (Runs.of((0, 1)), (Share(HERE, Runs.of((0, 1))), Share(THERE, Runs.of((1, 2))))),
        ):
            held = await peer.reserve(auto(prefill, f"r{pooled.count}", pooled=pooled))
            assert held.plan.shares == shares
            await peer.release_ticket(held.ticket, Reason.CANCELLED)
            await there.everything_is_home()
        assert decode.fingerprint == prefill.fingerprint


async def test_parts_go_to_the_decode_node_as_they_are_given(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, there, _):
        prefill, _ = await here.engine(), await there.engine()
        peer, shares = peer_of(here), (Share(HERE, Runs.of((0, 1))), Share(THIRD, Runs.of((1, 2))))
        held = await peer.reserve(reservation(prefill, path=ReadPath.PARTS, shares=shares))
        assert held.plan.shares == shares
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        for wrong, error in (
            ((Share(HERE, Runs.of((0, 1))),), BadPlan),
            ((Share(HERE, Runs.of((0, 1))), Share("stranger", Runs.of((1, 2)))), UnknownPeer),
        ):
            with pytest.raises(error):
                await peer.reserve(reservation(prefill, "other", path=ReadPath.PARTS, shares=wrong))
        with pytest.raises(BadPlan, match="PATH_AUTO goes with facts"):
            await peer.reserve(reservation(prefill, "other", path=ReadPath.AUTO))
        await there.everything_is_home()


async def test_helpers_that_the_decode_node_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three(tmp_path) as (here, there, _):
        prefill, _ = await here.engine(), await there.engine()
        seen: list[Reservation] = []
        reserve = there.node.decode_side.reserve

        async def watched(namespace: Any, asked: Reservation) -> Any:
            seen.append(asked)
            return await reserve(namespace, asked)

        monkeypatch.setattr(there.node.decode_side, "reserve", watched)
        peer = peer_of(here)
        held = await peer.reserve(auto(prefill, helpers=(("stranger", Depth(1, 2)), (THIRD, Depth(3, 4)))))
        (asked,) = seen
        assert asked.facts is not None and asked.facts.helpers == ((THIRD, Depth(3, 4)),)
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()


async def test_a_node_tells_its_depth_and_its_boot(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, _, third):
        told = await peer_of(here, THIRD).depth()
        assert (told.depth.queue_bytes, told.helps, told.boot_id) == (0, True, third.daemon.boot_id)
        assert told.help_free_bytes == third.daemon.config.pool.help_bytes


async def test_sinks_for_helped_parts_come_in_their_order(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, there, third):
        prefill, _ = await here.engine(), await there.engine()
        peer, shares = peer_of(here), (Share(HERE, Runs.of((0, 1))), Share(THIRD, Runs.of((1, 2))))
        held = await peer.reserve(reservation(prefill, path=ReadPath.PARTS, shares=shares))
        helped = Helped(THIRD, third.daemon.boot_id, Runs.of((1, 2)))
        sinks = await peer.set_prefix(held.ticket, 2, [helped])
        assert len(sinks) == 1 and sinks[0] not in (0, held.push_sink)
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()


async def waiting_part(owner: Kit, reader: str, engine: Engine, decode_node: str = "") -> Heard:
    """A third node's part that has read all and may send nothing yet."""
    heard = Heard()
    asked = order(
        None, sink_id=SINK, credit_layers=LAYERS, holds=True, timeout_s=60.0, help=help_for(engine, decode_node)
    )
    peer = peer_of(owner, reader)
    await peer.route()
    peer.read_part(asked, heard.listener)
    await until(lambda: heard.prefixes or heard.ends, "the prefix is told")
    assert heard.prefixes == [(2, None)], heard.ends
    return heard


async def test_a_part_ends_when_its_helper_is_gone(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, _, third):
        prefill, helping = await here.engine(), await third.engine()
        await helping.store(2)
        heard = await waiting_part(here, THIRD, prefill)
        peer_of(here, THIRD).gone("a test says so")
        assert [end.reason for end in heard.ends] == [Reason.PEER_LOST]
        await third.everything_is_home()


@pytest.mark.parametrize("lost", [HERE, THERE])
async def test_a_helper_s_part_ends_when_either_node_that_gets_its_layers_is_gone(tmp_path: Path, lost: str) -> None:
    async with three(tmp_path) as (here, there, third):
        prefill, helping = await here.engine(), await third.engine()
        await there.engine()
        await helping.store(2)
        heard = await waiting_part(here, THIRD, prefill, decode_node=THERE)
        assert len(third.node.parts) == 1
        peer_of(third, lost).gone("a test says so")
        await until(lambda: heard.ends, "the owner hears of it")
        assert [end.reason for end in heard.ends] == [Reason.PEER_LOST]
        await third.everything_is_home()


async def test_a_data_channel_that_breaks_ends_parts_at_both_ends(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, _, third):
        prefill, helping = await here.engine(), await third.engine()
        await helping.store(2)
        heard = await waiting_part(here, THIRD, prefill)
        boot_id = third.daemon.boot_id
        here.daemon._route_lost(RouteLost(THIRD, boot_id, True, "cut", frozenset((SINK + 1,))))
        assert not heard.ends, "what came over that channel is not this part's"
        here.daemon._route_lost(RouteLost(THIRD, boot_id, True, "cut", frozenset((SINK,))))
        assert [end.reason for end in heard.ends] == [Reason.PEER_LOST]
        await third.everything_is_home()
        again = await waiting_part(here, THIRD, prefill)
        third.daemon._route_lost(RouteLost(HERE, here.daemon.boot_id, False, "cut"))
        await until(lambda: again.ends, "the owner hears of it")
        assert [end.reason for end in again.ends] == [Reason.PEER_LOST]
        await third.everything_is_home()


async def test_give_ups_and_their_answers_travel(tmp_path: Path) -> None:
    async with three(tmp_path) as (here, there, _):
        prefill, decode = await here.engine(), await there.engine()
        await decode.store(2)
        peer, heard, kept = peer_of(here), Heard(), list[int]()
        held = await peer.reserve(reservation(prefill))
        listener = replace(heard.listener, on_gave_up=kept.append)
        part = peer.read_part(order(held.ticket, credit_layers=LAYERS, holds=True), listener)
        await until(lambda: heard.prefixes, "the prefix is told")
        for asked in (0, 1):
            part.give_up(asked)
            await until(lambda asked=asked: len(kept) == asked + 1, "it is answered")
        assert kept == [2, 2], "what was told in the prefix stays"
        part.credit(0, LAYERS)
        await until(lambda: heard.ends, "a part that is wanted no more ends")
        assert [end.reason for end in heard.ends] == [Reason.OK]
        part.give_up(0)
        await peer.release_ticket(held.ticket, Reason.CANCELLED)
        await there.everything_is_home()


async def test_the_sink_of_an_assembly_goes_with_the_first_credit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(PartDriver, "assemble", lambda part, sink_id: told.append(sink_id))
    async with three(tmp_path) as (here, _, third):
        prefill, helping = await here.engine(), await third.engine()
        await helping.store(2)
        heard, peer = Heard(), peer_of(here, THIRD)
        await peer.route()
        part = peer.read_part(order(None, holds=True, help=help_for(prefill, THERE)), heard.listener)
        part.assemble(77)
        await until(lambda: heard.prefixes, "the prefix is told")
        assert told == []
        part.credit(2, 0)
        part.credit(2, 0)
        await until(lambda: told, "the sink is told")
        part.stop()
        await until(lambda: heard.ends, "the part ends")
        assert told == [77]
        await third.everything_is_home()
