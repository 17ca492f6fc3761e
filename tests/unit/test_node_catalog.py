"""What the node knows of stored blocks: look-ups in RAM, uses that are booked, places between ranges, hints, purges, pins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from node_kit import LAYOUT, MANIFEST, NodeKit, end_of, node_kit, told, until

from kvmoverd.adapters.storage.learned_index import LearnedIndex
from kvmoverd.core.errors import BadRequest, UnknownModel
from kvmoverd.core.keys import ROOT
from kvmoverd.core.machines.actions import AnnounceAccepted, AnnounceBlocks
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Path, Reason
from kvmoverd.core.store.places import Place
from kvmoverd.node import catalog
from kvmoverd.node.namespaces import PIN_S_MAX
from kvmoverd.node.peer import Reservation
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain
from kvmoverd.ports.storage import BlockProbe, BlockWrite, StorageOp

HINT, ELSEWHERE = Place("other.0001", 7, 1), Place("here.0002", 3, 99)


class Used:
    """What an index was told to be used, by key."""

    def __init__(self, kit: NodeKit, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[bytes] = []
        self.calls: list[int] = []
        monkeypatch.setattr(kit.storage.index, "touch", self.touch)

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        self.keys += keys
        self.calls.append(len(keys))


async def fetch(kit: NodeKit, keys: tuple[bytes, ...]) -> None:
    engine = kit.engine()
    driver = kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE)
    assert end_of(await told(driver.outbox)).reason is Reason.OK
    kit.node.session_closed(engine.session.session_id, "done")


async def test_a_store_whose_index_is_complete_is_never_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_kit() as kit:
        keys, probes = kit.chain(3), list[StorageOp]()
        await kit.store(kit.engine(), keys)
        monkeypatch.setattr(kit.disk, "fails", lambda op: probes.append(op) if isinstance(op, BlockProbe) else None)
        assert (await kit.node.namespaces.lookup(kit.namespace, (*keys, b"x" * 32))).prefix_blocks == 3
        assert len(probes) == 1
        monkeypatch.setattr(LearnedIndex, "complete", True)
        assert (await kit.node.namespaces.lookup(kit.namespace, (*keys, b"x" * 32))).prefix_blocks == 3
        assert (await kit.node.namespaces.lookup(kit.namespace, (b"x" * 32, *keys))).prefix_blocks == 0
        assert (await kit.node.namespaces.lookup(kit.namespace, ())).prefix_blocks == 0
        assert len(probes) == 1


async def test_a_long_chain_is_looked_up_in_steps_to_the_first_key_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "LOOKED_KEYS_MAX", 3)
    monkeypatch.setattr(LearnedIndex, "complete", True)
    async with node_kit() as kit:
        keys, looked = kit.chain(11), list[int]()
        kit.storage.index.found(kit.namespace, keys)
        known = kit.storage.index.known

        def counting(namespace: Namespace, some: Sequence[bytes]) -> npt.NDArray[np.bool_]:
            looked.append(len(some))
            return known(namespace, some)

        monkeypatch.setattr(kit.storage.index, "known", counting)
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 11
        assert looked == [3, 3, 3, 2]
        looked.clear()
        kit.storage.index.lost(kit.namespace, keys[4])
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 4
        assert looked == [3, 3], "what comes after a miss is not looked at"


async def test_a_store_is_accepted_before_it_is_durable_and_found_only_then() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(3)
        kit.fill(engine, keys)
        kit.disk.closed = True
        pages = as_pages(list(range(3)))
        driver = kit.node.store(kit.call(engine), kit.namespace, Chain(keys, ROOT, 0), engine.region, pages)
        assert isinstance(await asyncio.wait_for(driver.outbox.get(), 5.0), AnnounceAccepted)
        assert engine.region.users == 0, "the pages are the engine's again"
        reader = kit.services.reader
        assert await reader.catalog.known_prefix(kit.namespace, keys) == 0, "nothing is promised before it is durable"
        assert reader.pooled_prefix(kit.namespace, keys) == 0
        kit.disk.fails = lambda op: Reason.IO_ERROR if isinstance(op, BlockWrite) and op.key == keys[2] else None
        kit.disk.closed = False
        kit.disk.submit([])
        events = await told(driver.outbox)
        outcomes = next(event for event in events if isinstance(event, AnnounceBlocks)).outcomes
        assert [outcome.reason for outcome in outcomes] == [Reason.OK, Reason.OK, Reason.IO_ERROR]
        assert (end_of(events).reason, end_of(events).prefix_blocks) == (Reason.IO_ERROR, 2)
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 2
        await kit.everything_is_home()


async def test_every_block_that_a_request_uses_is_booked_read_or_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_kit() as kit:
        keys, used = kit.chain(3), Used(kit, monkeypatch)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        await fetch(kit, keys[:2])
        await until(lambda: len(used.keys) == 2, "what was read is booked")
        await fetch(kit, keys)
        await until(lambda: len(used.keys) == 5, "what was in the pool is booked, too")
        assert used.keys == [*keys[:2], *keys]
        await kit.everything_is_home()


async def test_uses_are_booked_a_bounded_number_at_a_time_and_the_oldest_of_too_many_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "TOUCH_KEYS_MAX", 3)
    async with node_kit() as kit:
        used, keys = Used(kit, monkeypatch), kit.chain(8)
        for some in (keys[:1], keys[1:2], keys[2:], ()):
            kit.services.reader.catalog.used(kit.namespace, some)
        assert used.keys == [], "not at once: something more urgent may be under way"
        await until(lambda: len(used.keys) == 8, "all are booked")
        assert used.keys == list(keys) and max(used.calls) <= 3
        for _ in range(catalog.USES_MAX + 10):
            kit.services.reader.catalog.used(kit.namespace, keys[:1])
        assert len(kit.services.reader.catalog._uses) == catalog.USES_MAX


async def test_later_ranges_go_on_where_the_first_one_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_kit() as kit:
        keys = kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        kit.disk.places = {keys[0]: HINT, keys[1]: ELSEWHERE}
        blocks = kit.services.reader.acquire(
            kit.namespace, keys, priority=1, due_ns=1, by_ranges=True, hints={keys[1]: HINT}
        )
        await until(lambda: blocks.whole_prefix() == 2, "both blocks are read")
        asked = {(key, layer): place for key, layer, place in kit.disk.asked}
        assert [asked[keys[0], layer] for layer in range(LAYOUT.layer_count)] == [None, HINT, HINT]
        assert [asked[keys[1], layer] for layer in range(LAYOUT.layer_count)] == [HINT, ELSEWHERE, ELSEWHERE]
        kit.services.reader.release(blocks)
        await kit.everything_is_home()


@pytest.mark.parametrize("path", [Path.PE, Path.DE])
async def test_a_decode_node_that_reads_goes_by_the_places_that_its_reservation_names(path: Path) -> None:
    async with node_kit() as kit:
        keys = kit.chain(3)
        await kit.store(kit.engine(), keys)
        kit.forget_clean()
        kit.disk.places = dict.fromkeys(keys, ELSEWHERE)
        asked = Reservation(
            "x", 1, kit.namespace.fingerprint, keys, 0, 2, path, 5.0, "there", "boot", places=(None, HINT)
        )
        reserved = await kit.node.decode_side.reserve(kit.namespace, asked)
        expected = {keys[0]: None, keys[1]: HINT} if path is Path.DE else {}
        await until(lambda: len(kit.disk.asked) >= 2 * len(expected), "the hit blocks are read")
        assert {key: place for key, layer, place in kit.disk.asked if not layer} == expected
        kit.node.decode_side.release_ticket(reserved.ticket, Reason.CANCELLED)
        await kit.everything_is_home()


async def test_a_reservation_names_places_only_to_another_node_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_kit() as kit:
        engine, keys, reserved = kit.engine(), kit.chain(3), list[Reservation]()
        peer = kit.node.peers.peer("there") if kit.node.peers else None
        monkeypatch.setattr(kit.storage.index, "places", lambda namespace, keys: [HINT] * len(keys))

        async def reserve(reservation: Reservation) -> None:
            reserved.append(reservation)
            raise UnknownModel("the test has seen enough")

        monkeypatch.setattr(peer, "reserve", reserve)
        for path, node in ((Path.DE, "there"), (Path.DE, "here"), (Path.PE, "there")):
            plan = kit.plan(engine, kit.call(engine), keys, hit=2, path=path, decode_node=node)
            assert end_of(await told(kit.node.stream(plan).outbox)).reason is not Reason.OK
        assert [reservation.places for reservation in reserved] == [[HINT, HINT], (), ()]
        await kit.everything_is_home()


async def test_a_purged_tenant_is_not_found_any_more_and_its_namespaces_stay_registered() -> None:
    async with node_kit() as kit:
        theirs = await kit.node.namespaces.register(replace(MANIFEST, tenant="acme"))
        ours, keys = kit.namespace, kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.namespace = theirs
        await kit.store(kit.engine(), keys)
        assert await kit.node.namespaces.purge_tenant("acme") == (2, 2 * LAYOUT.record_bytes)
        for space, stored in ((theirs, 0), (ours, 2)):
            looked = await kit.node.namespaces.lookup(space, keys)
            assert (looked.prefix_blocks, looked.pooled_blocks) == (stored, stored)
        await kit.store(kit.engine(), keys)
        assert (await kit.node.namespaces.lookup(theirs, keys)).prefix_blocks == 2
        for tenant in ("", "t" * 129):
            with pytest.raises(BadRequest, match=f"tenant has {len(tenant)} characters"):
                await kit.node.namespaces.purge_tenant(tenant)


@pytest.mark.parametrize("by_tenant", [False, True])
async def test_what_another_node_has_purged_is_forgotten_here(by_tenant: bool) -> None:
    async with node_kit() as kit:
        space = kit.namespace = await kit.node.namespaces.register(replace(MANIFEST, tenant="acme"))
        keys = kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.storage.purge(space)
        assert (await kit.node.namespaces.lookup(space, keys)).pooled_blocks == 2, "nobody has told yet"
        unknown = [b"u" * 32]
        heard = (unknown, "acme") if by_tenant else ([*unknown, space.fingerprint], "")
        assert await kit.node.namespaces.purged_elsewhere(*heard) == 1
        looked = await kit.node.namespaces.lookup(space, keys)
        assert (looked.prefix_blocks, looked.pooled_blocks) == (0, 0)
        assert await kit.node.namespaces.purged_elsewhere(unknown, "") == 0


async def test_a_namespace_that_a_later_epoch_has_replaced_is_forgotten_all_the_same() -> None:
    async with node_kit() as kit:
        keys = kit.chain(2)
        await kit.store(kit.engine(), keys)
        kit.storage.open_namespace(Namespace(replace(MANIFEST, epoch=1)))
        kit.storage.purge(kit.namespace)
        assert await kit.node.namespaces.purged_elsewhere([kit.namespace.fingerprint], "") == 1
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 0


async def test_a_purge_waits_for_writes_under_way_which_nobody_finds_afterwards() -> None:
    async with node_kit() as kit:
        engine, keys = kit.engine(), kit.chain(2)
        kit.disk.closed = True
        storing = asyncio.get_running_loop().create_task(kit.store(engine, keys))
        await until(lambda: kit.disk.held, "the write is under way")
        purging = asyncio.get_running_loop().create_task(kit.node.namespaces.purge(kit.namespace))
        await asyncio.sleep(0.02)
        assert not purging.done()
        kit.disk.closed = False
        kit.disk.submit([])
        assert (await asyncio.wait_for(purging, 5.0))[0] == 2
        await asyncio.wait([storing], timeout=5.0)
        assert storing.done()
        assert (await kit.node.namespaces.lookup(kit.namespace, keys)).prefix_blocks == 0


async def test_pins_are_for_what_is_known_and_for_a_week_at_most() -> None:
    async with node_kit() as kit:
        keys = kit.chain(3)
        await kit.store(kit.engine(), keys[:2])
        assert kit.node.namespaces.pin(kit.namespace, keys, PIN_S_MAX) == 2
        assert kit.node.namespaces.pin(kit.namespace, keys, 0.0) == 2
        with pytest.raises(BadRequest, match="at most 604800 s are taken"):
            kit.node.namespaces.pin(kit.namespace, keys, PIN_S_MAX + 1)
