"""Two daemons over RDMA, from their config to the bytes in an engine's pages; the CNICs are fakes, all else is real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rpc_kit import LAYERS, THERE, Engine, Kit, end_of, refused, rpc_kit, until
from verbs_node_kit import (
    Fakes,
    check,
    everything_is_home,
    fake_cnics,
    fill,
    store,
    transport,
    verbs_pair,
)

from kvmover_proto import common_pb2, engine_pb2, node_pb2
from kvmoverd.core.qos import KvClass
from kvmoverd.rpc.status_client import plain_status

PAGES = [0, 1, 2]
DELIVERED = [4, 5, 6]


@pytest.fixture
def cnics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with fake_cnics(monkeypatch) as fakes:
        yield fakes


async def whole_way(prefill: Engine, decode: Engine, path: int, request_id: str = "r") -> None:
    """Two hit blocks and a new one: streamed, computed, pushed, delivered; every byte is held to what it must be."""
    await store(prefill if path == common_pb2.PATH_PE else decode, 1)
    fill(prefill, PAGES, 2)
    sets = [common_pb2.PageSet(pages=PAGES)]
    plan = prefill.plan(request_id, blocks=3, hit_blocks=2, decode_node=THERE, path=path, page_sets=sets)
    assembled, streamed = decode.assemble(request_id), prefill.stream(plan)
    pushed = prefill.ask("PushLayers")
    await pushed.write(engine_pb2.PushLayersRequest(plan=plan))
    ready = await end_of(streamed)
    assert (ready.status.reason, ready.prefix_blocks) == (common_pb2.OK, 2), ready
    check(prefill, PAGES, [(1, 0), (1, 1), (2, 2)])
    await pushed.write(engine_pb2.PushLayersRequest(computed=engine_pb2.Computed(layers=LAYERS)))
    assert (await end_of(pushed)).status.reason == common_pb2.OK
    async with asyncio.timeout(5.0):
        while (await assembled.read()).WhichOneof("kind") != "whole":
            pass
    deliver = engine_pb2.DeliverRequest(
        request_id=request_id, attempt=1, region_id=decode.region_id, pages=common_pb2.PageSet(pages=DELIVERED)
    )
    assert (await end_of(decode.ask("Deliver", deliver))).status.reason == common_pb2.OK
    assert (await end_of(assembled)).status.reason == common_pb2.OK
    check(decode, DELIVERED, [(1, 0), (1, 1), (2, 2)])


async def links_of(kit: Kit) -> None:
    """Until status, which is half a second old at most, knows of a link to it."""
    async with asyncio.timeout(5.0):
        while (await kit.status()).rdma.counters["links_in"] < 1:  # noqa: ASYNC110 - another process would ask so
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("local", ["shm", "verbs"])
@pytest.mark.parametrize("path", [common_pb2.PATH_PE, common_pb2.PATH_DE])
async def test_every_byte_is_right_on_both_paths(cnics: Fakes, tmp_path: Path, path: int, local: str) -> None:
    async with verbs_pair(tmp_path, transport("fake0", local=local), transport("fake1", "fake2", local=local)) as (
        a,
        b,
    ):
        prefill, decode = await a.engine(), await b.engine()
        await whole_way(prefill, decode, path)
        await everything_is_home(a, b)
        await links_of(b)
        status = await a.status()
        assert status.peers[0].sent_bytes > 0
        for _ in range(200):
            if (await a.status()).rdma.queue_pairs:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("no queue pair is counted, though KV went over one")
        assert (status.local_copies == "RDMA writes of a CNIC to itself") is (local == "verbs")
    assert not any(fabric.queue_pairs or len(fabric.book) for fabric in cnics.opened.values())


async def test_status_says_what_the_cnics_are_and_how_kv_is_marked(cnics: Fakes, tmp_path: Path) -> None:
    marks = {"service_level": 3, "classes": {"prefetch": {"traffic_class": 64}}}
    async with verbs_pair(tmp_path, transport("fake0", "fake1", **marks), transport("fake2", qps_max=64)) as (a, b):
        engines = [await a.engine(), await b.engine(), await a.engine()]
        await whole_way(engines[0], engines[1], common_pb2.PATH_PE)
        told: Any = plain_status(await a.status())
        rdma = told["rdma"]
        assert told["transport"] == "verbs" and "SL 3" in told["lane"]
        assert [cnic["name"] for cnic in rdma["cnics"]] == ["fake0:1", "fake1:1"]
        assert [cnic["regions"] for cnic in rdma["cnics"]] == [1, 1], "each engine by a CNIC of its own"
        first = rdma["cnics"][0]
        assert (first["state"], first["link_layer"], first["netdev"], first["numa_node"]) == (
            "ACTIVE",
            "Ethernet",
            "veth0",
            -1,
        )
        assert first["gid"].startswith("GID 1 of 2") and rdma["library"] == "no pyverbs" and rdma["posting"]
        assert set(rdma["marks"]) == {kv_class.value for kv_class in KvClass}
        assert rdma["marks"]["prefetch"] != rdma["marks"]["layers"]
        assert rdma["registered_bytes"] > a.node.services.pool.size_bytes and rdma["queue_pairs_max"] == 4096
        await links_of(b)
        other: Any = plain_status(await b.status())
        assert other["rdma"]["queue_pairs_max"] == 64
        assert {"reconnects", "fences", "repeats"} <= set(other["rdma"]["counters"])


async def test_the_log_says_at_the_start_which_gid_each_cnic_has(
    cnics: Fakes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvmoverd.devices_verbs"):
        async with rpc_kit(tmp_path, transport=transport("fake0", "fake1")):
            said = [record.getMessage() for record in caplog.records if record.name == "kvmoverd.devices_verbs"]
    gid = "GID 1 of 2: ::ffff:10.77.0.1, RoCE v2, veth0"
    assert said[0].startswith("RDMA by no pyverbs; slices are posted: ")
    assert said[1:] == [f"CNIC {name}: Ethernet, {gid}" for name in ("fake0:1", "fake1:1")]


async def test_a_node_without_rdma_says_nothing_of_it(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        assert not (await kit.status()).HasField("rdma")


async def test_hello_names_the_number_of_cnics_and_needs_the_same_transport(cnics: Fakes, tmp_path: Path) -> None:
    async with verbs_pair(tmp_path, transport("fake0", "fake1"), transport("fake2")) as (a, _):
        request = node_pb2.HelloRequest(node=THERE, boot_id="boot", protocol=2, transport="verbs")
        assert (await a.ask_node("Hello", request)).data_endpoint == "verbs:2"
        request.transport = "tcp"
        assert (await refused(a.ask_node("Hello", request))).reason == "TRANSPORT_MISMATCH"


async def test_queue_pairs_that_break_are_made_anew_and_the_next_request_is_whole(cnics: Fakes, tmp_path: Path) -> None:
    async with verbs_pair(tmp_path, transport("fake0"), transport("fake1")) as (a, b):
        prefill, decode = await a.engine(), await b.engine()
        await whole_way(prefill, decode, common_pb2.PATH_PE)
        with cnics.wire.changed:
            for fabric in cnics.opened.values():
                for end in list(fabric.queue_pairs):
                    end.break_down()
        await whole_way(prefill, decode, common_pb2.PATH_DE, "r2")
        async with asyncio.timeout(5.0):
            while not sum([(await kit.status()).rdma.counters["reconnects"] for kit in (a, b)]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await everything_is_home(a, b)


async def test_a_node_that_stops_is_a_lost_peer_and_its_queue_pairs_are_destroyed(cnics: Fakes, tmp_path: Path) -> None:
    async with verbs_pair(tmp_path, transport("fake0"), transport("fake1")) as (a, b):
        prefill, decode = await a.engine(), await b.engine()
        await whole_way(prefill, decode, common_pb2.PATH_PE)
        pairs = cnics.opened["fake0:1"].queue_pairs
        assert pairs
        await b.daemon.stop()
        await until(lambda: not pairs, f"{pairs} are left for a peer that is gone")
        end = await end_of(prefill.push(prefill.plan("r2", decode_node=THERE)))
        assert end.status.reason == common_pb2.PEER_LOST and end.pages_quiet
        await everything_is_home(a)


async def test_a_region_that_can_not_be_registered_is_refused_and_the_engine_goes_on(
    cnics: Fakes, tmp_path: Path
) -> None:
    async with rpc_kit(tmp_path, transport=transport("fake0", "fake1")) as kit:
        cnics.opened["fake1:1"].register_fails = True
        with pytest.raises(Exception, match=r"not taken by the CNICs.*locked memory"):
            await kit.engine()
        cnics.opened["fake1:1"].register_fails = False
        await kit.engine()
        assert (await kit.status()).regions == 1


async def test_an_engine_that_leaves_takes_its_registrations_along(cnics: Fakes, tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, transport=transport("fake0")) as kit:
        book = cnics.opened["fake0:1"].book
        before_bytes = book.registered_bytes
        engine = await kit.engine()
        assert book.registered_bytes > before_bytes
        engine.companion.close()
        await until(lambda: book.registered_bytes == before_bytes, "its region is registered still")
