"""What nodes tell each other of the shared store, over real servers: authors, places of blocks, purges. And pins."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from rpc_kit import HERE, THERE, Kit, keys_of, refused, rpc_kit, until
from test_rpc_peers import pair, peer_of, reservation

from kvmover_proto import engine_pb2, node_pb2
from kvmoverd.core.errors import BadRequest
from kvmoverd.core.store.places import Place
from kvmoverd.rpc import places


async def refuses(call: Any, reason: str) -> None:
    refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, reason), refusal


def heard_by(kit: Kit, monkeypatch: pytest.MonkeyPatch, signature: tuple[str, int] = ("", 0)) -> list[tuple[str, int]]:
    """Authors that the node's storage hears of; it says itself that it writes as `signature`."""
    heard: list[tuple[str, int]] = []
    storage = kit.daemon.devices.storage
    monkeypatch.setattr(storage, "heard", lambda author, log: heard.append((author, log)), raising=False)
    monkeypatch.setattr(storage, "signature", lambda: signature, raising=False)
    return heard


async def test_a_hello_tells_both_nodes_as_whom_the_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (here, there):
        ours = heard_by(here, monkeypatch, ("here.0001", 4))
        theirs = heard_by(there, monkeypatch, ("there.0002", 9))
        await peer_of(here).route()
        assert (ours, theirs) == ([("there.0002", 9)], [("here.0001", 4)])


async def test_a_node_that_writes_nothing_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as (here, there):
        ours, theirs = heard_by(here, monkeypatch), heard_by(there, monkeypatch)
        await peer_of(here).route()
        assert (ours, theirs) == ([], [])


@pytest.mark.parametrize("author", ["../x", "a/b", ".hidden", "n" * 257, "nul\0"])
async def test_what_can_be_no_authors_name_is_refused(tmp_path: Path, author: str) -> None:
    async with rpc_kit(tmp_path) as kit:
        request = node_pb2.HelloRequest(node=HERE, boot_id="boot", protocol=2, transport="tcp", store_author=author)
        await refuses(kit.ask_node("Hello", request), "BAD_REQUEST")


async def test_a_reservation_carries_places_and_the_decode_node_looks_for_their_authors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (here, there):
        prefill = await here.engine()
        await there.engine()
        heard, seen = heard_by(there, monkeypatch), list[Any]()
        reserve = there.node.decode_side.reserve

        async def watched(namespace: Any, asked: Any) -> Any:
            seen.append(asked)
            return await reserve(namespace, asked)

        monkeypatch.setattr(there.node.decode_side, "reserve", watched)
        hints = (Place("a.1", 7, 1), None)
        await peer_of(here).reserve(reservation(prefill, places=hints))
        assert tuple(seen[0].places) == hints and heard == [("a.1", 0)]
        await peer_of(here).reserve(reservation(prefill, "r2"))
        assert tuple(seen[1].places) == () and len(heard) == 1


async def test_a_purge_is_told_to_the_other_nodes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (here, there):
        ours, theirs = await here.engine(), await there.engine()
        await theirs.store(2)
        looking = engine_pb2.LookupRequest(
            fingerprint=theirs.fingerprint, block_keys=b"".join(keys_of(theirs.fingerprint, 2))
        )
        assert (await theirs.ask("Lookup", looking)).pooled_blocks == 2
        space = there.node.models.get(theirs.fingerprint)
        there.daemon.devices.storage.purge(space)  # the store is shared: what one node purges is gone for all
        await ours.ask("PurgeNamespace", engine_pb2.PurgeNamespaceRequest(fingerprint=ours.fingerprint))
        await until(lambda: there.node.services.reader.catalog.purges(space) > 0, "the other node hears of it")
        looked = await theirs.ask("Lookup", looking)
        assert (looked.prefix_blocks, looked.pooled_blocks) == (0, 0)


async def test_a_purge_is_not_held_up_by_a_node_that_does_not_answer(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path, peers=[{"name": THERE, "address": "127.0.0.1:1"}]) as kit:
        engine = await kit.engine()
        await engine.store(2)
        request = engine_pb2.PurgeNamespaceRequest(fingerprint=engine.fingerprint)
        assert (await engine.ask("PurgeNamespace", request, timeout_s=1.0)).purged_blocks == 2


async def test_the_bounds_of_a_told_purge_are_kept(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        for request in (
            node_pb2.PurgedRequest(fingerprints=[b"f" * 31]),
            node_pb2.PurgedRequest(fingerprints=[b"f" * 32] * 1025),
            node_pb2.PurgedRequest(tenant="t" * 129),
        ):
            await refuses(kit.ask_node("Purged", request), "BAD_REQUEST")
        assert (await kit.ask_node("Purged", node_pb2.PurgedRequest(fingerprints=[b"f" * 32]))).forgotten == 0


async def test_a_tenant_is_purged_and_its_blocks_are_counted(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await (await kit.connect()).register(tenant="acme")
        await engine.store(3)
        reply = await engine.ask("PurgeTenant", engine_pb2.PurgeTenantRequest(tenant="acme"))
        assert (reply.purged_blocks, reply.purged_bytes) == (3, 3 * 4096 * 2)
        for tenant in ("", "t" * 129):
            call = engine.ask("PurgeTenant", engine_pb2.PurgeTenantRequest(tenant=tenant))
            await refuses(call, "BAD_REQUEST")


async def test_pins_say_how_many_blocks_are_known(tmp_path: Path) -> None:
    async with rpc_kit(tmp_path) as kit:
        engine = await kit.engine()
        await engine.store(2)
        fields: dict[str, Any] = {
            "fingerprint": engine.fingerprint,
            "block_keys": b"".join(keys_of(engine.fingerprint, 3)),
        }
        for pin_ms in (0, 1, 604_800_000):
            assert (await engine.ask("Pin", engine_pb2.PinRequest(**fields, pin_ms=pin_ms))).pinned_blocks == 2
        await refuses(engine.ask("Pin", engine_pb2.PinRequest(**fields, pin_ms=604_800_001)), "BAD_REQUEST")
        fields["block_keys"] = b"k" * 33
        await refuses(engine.ask("Pin", engine_pb2.PinRequest(**fields)), "BAD_KEYS")


@pytest.mark.parametrize("seed", range(5))
def test_places_come_back_as_they_were_put_into_words(seed: int) -> None:
    random_ = random.Random(seed)
    known = [
        Place(f"node-{random_.randrange(5)}.boot", random_.randrange(1 << 32), random_.randrange(1 << 32))
        if random_.random() < 0.7
        else None
        for _ in range(random_.randrange(1, 100))
    ]
    message = places.message_of([*known, Place("last.boot", 1, 1)])
    assert message is not None
    assert places.places_from(message, len(known) + 1) == [*known, Place("last.boot", 1, 1)]
    with pytest.raises(BadRequest):
        places.places_from(message, len(known))


def test_nothing_known_is_no_message_and_authors_beyond_the_table_are_left_out() -> None:
    assert places.message_of([]) is None and places.message_of([None, None]) is None
    many = [Place(f"{number}.boot", 1, number) for number in range(places.AUTHORS_MAX + 3)]
    message = places.message_of(many)
    assert message is not None
    assert places.places_from(message, len(many)) == [*many[:-3], None, None, None]


@pytest.mark.parametrize(
    "message",
    [
        node_pb2.BlockPlaces(authors=["a"] * 257),
        node_pb2.BlockPlaces(authors=[""], author=[1], segment=[1], page=[1]),
        node_pb2.BlockPlaces(authors=["../a"], author=[1], segment=[1], page=[1]),
        node_pb2.BlockPlaces(authors=["a"], author=[2], segment=[1], page=[1]),
        node_pb2.BlockPlaces(authors=["a"], author=[1], segment=[1, 2], page=[1]),
        node_pb2.BlockPlaces(authors=["a"], author=[1] * 3, segment=[1] * 3, page=[1] * 3),
    ],
)
def test_places_outside_their_bounds_are_refused(message: node_pb2.BlockPlaces) -> None:
    with pytest.raises(BadRequest):
        places.places_from(message, 2)
