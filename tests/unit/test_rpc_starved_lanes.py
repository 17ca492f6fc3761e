"""An engine learns of lanes that starve with its look-up, in time to name a path around them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rpc_kit import HERE, LAYERS, THERE, Engine, Kit, end_of, keys_of, rpc_kit
from test_node_lanes import MARKS, MIB
from test_rpc_peers import pair

from kvmover_client import LookupResult
from kvmover_client import Path as ReadPath
from kvmover_proto import engine_pb2
from kvmoverd.core.qos import KvClass
from kvmoverd.node.lane_watch import LaneWatch

SHORT = {"silence": "400ms"}
LONG_AGO_NS = 3_000_000_000


def starve(kit: Kit, node: str) -> Callable[[], None]:
    """KV from a daemon to that node stands still, until what is returned is called."""
    services = kit.node.services
    lanes = services.mover.lanes = LaneWatch(MARKS, floor_bytes_per_s=MIB, window_s=1.0, observer=services.observer)
    clock, place = services.clock, (node, "boot")
    lanes.begun(place, KvClass.LAYERS, MIB, clock.now_ns() - LONG_AGO_NS)

    def well_again() -> None:
        services.mover.lanes = LaneWatch(MARKS, floor_bytes_per_s=0, window_s=1.0, observer=services.observer)

    return well_again


async def looked(engine: Engine) -> engine_pb2.LookupReply:
    keys = b"".join(keys_of(engine.fingerprint, 2))
    reply = await engine.ask("Lookup", engine_pb2.LookupRequest(fingerprint=engine.fingerprint, block_keys=keys))
    assert isinstance(reply, engine_pb2.LookupReply)
    return reply


async def soon(holds: Callable[[], Awaitable[bool]]) -> None:
    """Within some beats of the watch, of 100 ms each."""
    async with asyncio.timeout(5.0):
        while not await holds():  # noqa: ASYNC110 - as an engine would
            await asyncio.sleep(0.02)


async def test_a_lookup_names_the_nodes_to_which_kv_starves(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        assert not (await looked(engine)).starved_to
        well_again = starve(kit, THERE)
        assert (await looked(engine)).starved_to == [THERE]
        well_again()
        assert not (await looked(engine)).starved_to


async def test_what_starves_on_its_way_here_is_told_by_the_node_it_comes_from(tmp_path: Path) -> None:
    async with pair(tmp_path, node_api=SHORT) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        await end_of(prefill.push(prefill.plan("r", decode_node=THERE), LAYERS))
        assert not (await looked(prefill)).starved_from
        well_again = starve(there, HERE)

        async def told() -> bool:
            return list((await looked(prefill)).starved_from) == [THERE]

        async def told_no_more() -> bool:
            return not (await looked(prefill)).starved_from

        await soon(told)
        (peer,) = (await here.status()).peers
        assert peer.lane_starved_from and not peer.lane_starved
        well_again()
        await soon(told_no_more)


async def test_a_node_that_is_gone_says_nothing_any_more(tmp_path: Path) -> None:
    async with pair(tmp_path, node_api=SHORT) as (here, there):
        prefill, _ = await here.engine(), await there.engine()
        starve(there, HERE)
        await end_of(prefill.push(prefill.plan("r", decode_node=THERE), LAYERS))
        assert (await looked(prefill)).starved_from == [THERE], "the first word says it already"
        await there.daemon.stop()

        async def forgotten() -> bool:
            return not (await looked(prefill)).starved_from

        await soon(forgotten)


@pytest.mark.parametrize(
    ("starved_to", "starved_from", "path"),
    [
        ((), (), "as wanted"),
        (("d", "x"), (), "DE"),
        ((), ("d",), "PE"),
        (("d",), ("d",), "as wanted"),
        (("x",), ("y",), "as wanted"),
    ],
)
@pytest.mark.parametrize("wanted", [ReadPath.PE, ReadPath.DE])
def test_the_path_is_the_one_that_keeps_hit_blocks_off_a_lane_that_starves(
    starved_to: tuple[str, ...], starved_from: tuple[str, ...], path: str, wanted: ReadPath
) -> None:
    found = LookupResult(2, 1, starved_to, starved_from).path_to("d", wanted)
    assert found is (wanted if path == "as wanted" else ReadPath[path])


@pytest.mark.parametrize("wanted", [ReadPath.AUTO, ReadPath.PARTS])
def test_nodes_that_decide_themselves_and_parts_that_are_given_need_no_advice(wanted: ReadPath) -> None:
    assert LookupResult(2, 1, ("d",), ()).path_to("d", wanted) is wanted
