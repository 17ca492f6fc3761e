"""Single blocks of many sequences, over the real store: they share their commits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import node_gates
import pytest
from node_kit import LAYOUT, NodeKit, end_of, node_kit, told, until

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place, segment_name
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.storing import Chain, Chains, StoreDriver

pytestmark = pytest.mark.contract
CALLS, THREADS, PAGES = 64, 8, 8
COMMITS_MAX = CALLS // 2
"""Without groups it were one each. Seen here: 2 to 15; the quicker a disk syncs, the smaller its groups."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentStore]:
    """What the next node's storage is over."""
    made = open_segment_store(tmp_path, node="here", boot_id="boot", settings=SegmentSettings(segment_bytes=16 << 20))
    assert made.background.wait_ready(5.0)
    storage = ThreadsStorage(made, name="root", threads=THREADS, ops_max=CALLS)
    monkeypatch.setattr(node_gates, "MemoryStorage", lambda name: storage)
    yield made
    assert storage.close(5.0)


def store_one(kit: NodeKit, number: int) -> StoreDriver:
    """The block that sequence `number` has filled."""
    engine, page = kit.engines[number // PAGES], number % PAGES
    key = kit.chain(1, salt=number)
    kit.fill(engine, key, page)
    return kit.node.store(kit.call(engine), kit.namespace, Chain(key, ROOT, 0), engine.region, as_pages([page]))


def check_stored(kit: NodeKit, made: SegmentStore, root: Path) -> None:
    for number in range(CALLS):
        (key,) = kit.chain(1, salt=number)
        place = made.index.find(kit.namespace.fingerprint[:16], key)
        assert isinstance(place, Place)
        path = root / "kvm1/authors" / place.author / "seg" / segment_name(place.segment)
        record = path.read_bytes()[place.offset_bytes + HEADER_BYTES :][: LAYOUT.block_bytes]
        assert record == kit.content(key)


async def test_many_calls_of_one_block_share_few_commits(store: SegmentStore, tmp_path: Path) -> None:
    async with node_kit(slots=2 * CALLS, has_threads=True) as kit:
        for _ in range(CALLS // PAGES):
            kit.engine(PAGES)
        kit.services.desk.ops_max = kit.services.desk.writes_max = CALLS
        drivers = [store_one(kit, number) for number in range(CALLS)]
        for driver in drivers:
            assert end_of(await told(driver.outbox)).reason is Reason.OK
        counters = store.appender.counters
        assert counters.appended_blocks == CALLS and counters.commits <= COMMITS_MAX, counters
        check_stored(kit, store, tmp_path)
        before = counters.commits
        for driver in [store_one(kit, number) for number in range(CALLS)]:
            end = end_of(await told(driver.outbox))
            assert (end.reason, end.moved_bytes) == (Reason.OK, 0)
        assert counters.commits == before, "what is stored costs a look"
        await until(lambda: kit.pool.idle() and not kit.mover._sinks, "slots come home")


async def test_one_call_of_many_chains_costs_no_more(store: SegmentStore, tmp_path: Path) -> None:
    async with node_kit(slots=2 * CALLS, has_threads=True) as kit:
        engine = kit.engine(CALLS)
        kit.services.desk.ops_max = kit.services.desk.writes_max = CALLS
        keys = tuple(kit.chain(1, salt=number)[0] for number in range(CALLS))
        kit.fill(engine, keys)
        chains, pages = Chains(tuple(Chain((key,), ROOT, 0) for key in keys)), as_pages(list(range(CALLS)))
        driver = kit.node.store(kit.call(engine), kit.namespace, chains, engine.region, pages)
        assert end_of(await told(driver.outbox)).reason is Reason.OK
        counters = store.appender.counters
        assert counters.appended_blocks == CALLS and counters.commits <= COMMITS_MAX, counters
        check_stored(kit, store, tmp_path)
        await until(lambda: kit.pool.idle() and not kit.mover._sinks, "slots come home")
