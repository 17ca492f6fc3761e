"""The pool's pieces: two layouts compete, the cache grows before it forgets, the oldest block goes first."""

from __future__ import annotations

import itertools

import pytest
from node_kit import Anonymous, end_of, node_kit, told

from kvmoverd.core.errors import PoolExhausted, TooBig
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.machines.fetch import FetchKind
from kvmoverd.core.status import Reason
from kvmoverd.node.pool import BufferPool, SizeClass

SMALL = Layout.uniform(layers=1, tokens=1, token_bytes=4096)
LARGE = Layout.uniform(layers=1, tokens=1, token_bytes=3 * 4096)
PIECE_BYTES = 4 * SMALL.record_bytes
FINGERPRINT = b"f" * 32


def a_pool(pieces: int) -> BufferPool:
    return BufferPool(Anonymous(pieces * PIECE_BYTES), piece_bytes=PIECE_BYTES)


def clean(pool: BufferPool, size_class: SizeClass, name: int) -> int:
    """A block that was read and let go: clean in the pool."""
    waiter = pool.new_holder()
    wanted = size_class.want([(FINGERPRINT, bytes([name]) * 32)], waiter)
    for index in wanted.to_read:
        slot = wanted.slots[index]
        size_class.cache.read_done(slot, size_class.slots.generation(slot), ok=True)
    size_class.cache.drop(waiter)
    return wanted.slots[0]


def is_clean(size_class: SizeClass, name: int) -> bool:
    return size_class.cache.is_clean((FINGERPRINT, bytes([name]) * 32))


def test_memory_that_nobody_uses_is_taken_before_a_block_is_forgotten() -> None:
    pool = a_pool(3)
    small = pool.size_class(SMALL)
    for name in range(12):
        clean(pool, small, name)
    assert all(is_clean(small, name) for name in range(12))
    assert pool.slot_counts() == [
        {
            "layout": "8192 B",
            "slot_bytes": 8192,
            "total": 12,
            "free": 0,
            "filling": 0,
            "clean": 12,
            "leased": 0,
            "quarantined": 0,
        }
    ]


def test_the_block_used_longest_ago_is_forgotten_first() -> None:
    pool = a_pool(1)
    small = pool.size_class(SMALL)
    for name in (0, 1, 2, 3, 0):
        clean(pool, small, name)
    clean(pool, small, 9)
    assert [name for name in (0, 1, 2, 3, 9) if is_clean(small, name)] == [0, 2, 3, 9]


def test_a_class_gets_the_idle_piece_of_another_and_it_can_come_back() -> None:
    pool = a_pool(2)
    small, large = pool.size_class(SMALL), pool.size_class(LARGE)
    for name in range(8):
        clean(pool, small, name)
    for turn in range(20):
        owner = pool.new_holder()
        taken, other = (large, small) if turn % 2 == 0 else (small, large)
        slots = taken.private(2 * taken.slots_per_piece, owner)
        assert other.slots.counts()["total"] == 0, "both pieces went over"
        spans = sorted((int(address), int(address) + taken.slot_bytes) for address in taken.addresses(slots))
        start = int(pool.piece_address(0))
        assert spans[0][0] >= start and spans[-1][1] <= start + 2 * PIECE_BYTES
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans)), "slots share bytes"
        taken.give_back(owner)
        assert pool.idle()
    assert len(small._addresses) == 2 * small.slots_per_piece, "ids of returned pieces are used again"


@pytest.mark.parametrize("holding", ["held", "touched by a device"])
def test_a_piece_in_use_is_never_given_up(holding: str) -> None:
    pool = a_pool(2)
    small, large = pool.size_class(SMALL), pool.size_class(LARGE)
    owner = pool.new_holder()
    slots = small.private(5, owner)
    if holding != "held":
        small.device_begin(slots)
        small.give_back(owner)
        assert small.slots.counts()["quarantined"] == 5
    with pytest.raises(PoolExhausted):
        large.private(1, pool.new_holder())
    if holding == "held":
        small.give_back(owner)
    else:
        small.device_end(slots)
    assert large.private(4, pool.new_holder())


def test_a_want_that_fails_takes_nothing_and_forgets_nothing() -> None:
    pool = a_pool(1)
    small = pool.size_class(SMALL)
    for name in range(3):
        clean(pool, small, name)
    small.private(1, pool.new_holder())
    before = pool.slot_counts()
    with pytest.raises(PoolExhausted):
        small.want([(FINGERPRINT, bytes([name]) * 32) for name in range(20, 25)], pool.new_holder())
    assert pool.slot_counts() == before and all(is_clean(small, name) for name in range(3))


def test_a_record_larger_than_a_piece_is_refused_with_both_sizes() -> None:
    giant = Layout.uniform(layers=1, tokens=1, token_bytes=PIECE_BYTES)
    with pytest.raises(TooBig, match=f"has {PIECE_BYTES + HEADER_BYTES} bytes, pool.piece_bytes is {PIECE_BYTES}"):
        a_pool(2).size_class(giant)


def test_holders_are_told_apart() -> None:
    pool = a_pool(1)
    assert len({pool.new_holder() for _ in range(100)}) == 100


async def test_a_store_that_ends_takes_no_blocks_from_a_lease() -> None:
    """Readers and stores hold slots of one cache: their numbers must come from one source."""
    async with node_kit(slots=16) as kit:
        engine, keys = kit.engine(), kit.chain(2)
        await kit.store(engine, keys)
        leases = [kit.node.fetch(kit.call(engine), kit.namespace, keys, FetchKind.LEASE, lease_s=60) for _ in range(6)]
        for driver in leases:
            assert end_of(await told(driver.outbox)).reason is Reason.OK
        for salt in range(1, 8):
            await kit.store(engine, kit.chain(1, salt=salt))
            assert kit.pool.slot_counts()[0]["leased"] == 2
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()
