"""The RAM of the index: what is dead is swept while others look up, and the coldest namespaces are left out beyond the limit."""

from __future__ import annotations

import threading

import numpy as np

from kvmoverd.adapters.storage.segments import index_spaces
from kvmoverd.adapters.storage.segments.index_memory import MappedMemory
from kvmoverd.adapters.storage.segments.index_segments import REUSE_NS
from tests.unit.index_kit import ONE, THREE, TWO, Shop, some_keys


def test_authors_and_namespaces_that_come_and_go_take_no_more_ram() -> None:
    shop = Shop()
    (key,) = some_keys(1)
    ram_bytes = []
    for turn in range(300):
        space = turn.to_bytes(16, "little")
        shop.add(shop.segment(f"author-{turn}", 1, space), [key])
        shop.index.drop_author(f"author-{turn}")
        shop.clock.ns += REUSE_NS + 1
        while shop.index.tidy():
            pass
        ram_bytes.append(shop.index.load_state().ram_bytes)
    assert shop.index.load_state().segments == 0
    assert ram_bytes[-1] == ram_bytes[20]


def test_what_is_dead_is_swept_and_its_number_used_again_only_much_later() -> None:
    shop = Shop()
    segment_id = shop.segment()
    shop.add(segment_id, some_keys(5000))
    shop.touches.touch(np.array([segment_id], np.uint32), np.array([3], np.uint32))
    kept = shop.segment(number=2)
    shop.add(kept, some_keys(10, seed=2))
    shop.index.drop_segments("a", [1])
    while shop.index.tidy():
        pass
    state = shop.index.load_state()
    assert (state.keys, state.keys_dead, state.segments) == (10, 0, 1)
    assert shop.index.segment_id("a", 1) is None
    assert not shop.touches.heat(segment_id).any()
    assert shop.segment(number=3) != segment_id
    shop.clock.ns += REUSE_NS
    assert shop.segment(number=4) == segment_id
    assert not shop.index.segment(shop.segment(number=1)).alive


def test_a_namespace_of_which_nothing_is_left_takes_no_ram() -> None:
    shop = Shop()
    shop.index.opened(TWO)
    shop.add(shop.segment(), some_keys(100))
    shop.index.drop_segments("a", [1])
    shop.index.tidy()
    shop.clock.ns += 2 * index_spaces.DWELL_NS
    assert shop.index.load_state().namespaces == 2
    while shop.index.tidy():
        pass
    state = shop.index.load_state()
    assert (state.namespaces, state.segments, state.namespaces_left_out) == (0, 0, 0)
    assert state.ram_bytes < 4096
    shop.add(shop.segment(number=2), some_keys(100))
    assert all(shop.found(some_keys(100)))


def test_beyond_the_limit_the_coldest_namespaces_are_left_out_until_they_are_wanted() -> None:
    shop = Shop(ram_bytes_max=950_000)
    keys = {space: some_keys(15_000, seed) for seed, space in enumerate([ONE, TWO, THREE])}
    for space in (ONE, TWO):
        shop.add(shop.segment(space=space, number=space[0]), keys[space])
    shop.index.opened(TWO)
    shop.clock.ns += 1
    shop.index.opened(THREE)
    shop.add(shop.segment(space=THREE, number=3), keys[THREE])
    state = shop.index.load_state()
    assert (state.namespaces, state.namespaces_left_out, state.namespaces_dropped) == (2, 1, 1)
    assert state.ram_bytes <= shop.ram_bytes_max
    assert [shop.index.wants(space) for space in keys] == [False, True, True]
    assert shop.segment(space=ONE, number=50) == -1
    assert not any(shop.found(keys[ONE][:10]))
    assert not shop.wanted, "what was just left out is not loaded again at once"
    shop.clock.ns += index_spaces.DWELL_NS
    assert not any(shop.found(keys[ONE][:10]))
    assert shop.wanted == [ONE]
    assert shop.index.wants(ONE)
    shop.add(shop.segment(space=ONE, number=49), keys[ONE])
    assert all(shop.found(keys[ONE], ONE))
    assert shop.index.wants(THREE)
    assert not shop.index.wants(TWO)


def test_the_coldest_namespace_is_left_out_itself_and_the_only_one_keeps_what_fits() -> None:
    shop = Shop(ram_bytes_max=600_000)
    keys = some_keys(15_000)
    shop.add(shop.segment(), keys)
    shop.index.opened(ONE)
    shop.clock.ns += 2 * index_spaces.DWELL_NS
    shop.add(shop.segment(space=TWO, number=2), keys)
    assert (shop.index.wants(ONE), shop.index.wants(TWO)) == (True, False)
    assert all(shop.found(keys))
    shop.add(shop.segment(), some_keys(60_000, seed=2), 15_000)
    state = shop.index.load_state()
    assert state.keys_refused > 10_000
    assert state.ram_bytes <= shop.ram_bytes_max
    assert all(shop.found(keys))


def test_look_ups_go_on_while_another_thread_adds_and_a_third_sweeps() -> None:
    shop = Shop()
    keys = some_keys(30_000)
    joined = b"".join(keys[:500])
    shop.add(shop.segment(number=99), keys[:500])
    stop = threading.Event()

    def add() -> None:
        for number in range(1, 60):
            shop.add(shop.segment(number=number), keys[number * 500 : number * 500 + 500])
            if number > 10:
                shop.index.drop_segments("a", [number - 10])
        stop.set()

    def sweep() -> None:
        while not stop.is_set():
            shop.index.tidy()

    threads = [threading.Thread(target=run) for run in (add, sweep)]
    for thread in threads:
        thread.start()
    looks = 0
    while not stop.is_set():
        assert shop.index.locate(ONE, joined)[2].all()
        looks += 1
    for thread in threads:
        thread.join(20)
    assert looks
    assert shop.found([keys[50 * 500], keys[45 * 500]]) == [True, False]


def test_memory_of_large_tables_is_mapped_and_given_back_from_the_front() -> None:
    memory = MappedMemory()
    small, large = memory.words(100), memory.words(1 << 21)
    assert (small.ctypes.data % 64, large.ctypes.data % (2 << 20)) == (0, 0) or large.ctypes.data % (2 << 20) == 0
    large[:] = 7
    assert memory.release(small, 100) == 0
    assert memory.release(large, (1 << 18) + 5) == 1 << 18
    assert not large[: 1 << 18].any()
    assert (large[1 << 18 :] == 7).all()
