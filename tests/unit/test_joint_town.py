"""The policies in a virtual town: how level storage NICs are, and how soon first tokens come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

import pytest

from kvmoverd.core.scheduling.requests import Request
from tests.unit.joint_town_kit import BUFFER, GPU, KV, MS, SNIC, STEP_NS, JointTown, PoolTown, S, hinted, trace

SECONDS = 30


def ran(policy: str, seed: int = 1, **more: int) -> JointTown:
    town = JointTown(policy, 3, 6, **more)
    town.run(trace(seed, seconds=SECONDS, requests_per_s=9), (SECONDS + 120) * S)
    assert len(town.ttft_ns) == len(town.requests)
    return town


@pytest.mark.parametrize("seed", [1, 2])
def test_joint_levels_storage_nics_better_than_the_paper_and_that_better_than_turns(seed: int) -> None:
    towns = {policy: ran(policy, seed) for policy in ("joint", "paper", "round-robin")}
    levels = {policy: town.snic_max_over_avg(SECONDS * S) for policy, town in towns.items()}
    waits = {policy: town.ttft_mean_s for policy, town in towns.items()}
    print({policy: (round(levels[policy], 3), round(waits[policy], 3)) for policy in towns})
    assert 1.0 <= levels["joint"] < levels["paper"] < levels["round-robin"]
    assert waits["joint"] <= 0.6 * waits["paper"] and waits["joint"] <= 0.6 * waits["round-robin"]


DECODE_NODES = [f"d{n:02}" for n in range(6)]
PREFILL_NODES = [f"p{n:02}" for n in range(3)]


def told(
    policy: str, seed: int, places: list[str], true: Callable[[Request], bool] = lambda request: False
) -> JointTown:
    """Each client says that one of these nodes has its KV."""
    town = JointTown(policy, 3, 6, true=true)
    town.run(hinted(trace(seed, seconds=SECONDS, requests_per_s=9), seed, places), (SECONDS + 120) * S)
    return town


def half(request: Request) -> bool:
    return crc32(request.request_id.encode()) % 2 == 0


@pytest.mark.parametrize("places", [["d00"], ["p00"], ["d00", "d01", "p00"], DECODE_NODES, PREFILL_NODES])
def test_what_clients_say_of_pools_and_is_not_so_does_not_make_joint_worse_than_the_paper(places: list[str]) -> None:
    towns = {policy: told(policy, 1, places) for policy in ("joint", "paper")}
    levels = {policy: town.snic_max_over_avg(SECONDS * S) for policy, town in towns.items()}
    print({policy: (round(levels[policy], 3), round(town.ttft_mean_s, 3)) for policy, town in towns.items()})
    assert 1.0 <= levels["joint"] <= levels["paper"]
    assert towns["joint"].ttft_mean_s <= 0.6 * towns["paper"].ttft_mean_s


def test_what_clients_say_of_pools_saves_reads_where_it_is_so() -> None:
    read = {}
    for name, true in (("none", lambda request: False), ("half", half), ("all", lambda request: True)):
        town = told("joint", 1, DECODE_NODES, true)
        read[name] = sum(snic.read_within(0, 200 * S) for snic in town.snics.values())
        print(name, read[name] / 1e9, town.ttft_mean_s, town.snic_max_over_avg(SECONDS * S))
    assert read["all"] < 0.4 * read["half"] and read["half"] < 0.95 * read["none"]


@pytest.mark.parametrize("pool_bytes", [6_000_000_000, 20_000_000_000])
def test_what_clients_see_in_pools_saves_reads_and_is_level_however_soon_it_is_gone(pool_bytes: int) -> None:
    towns = {}
    for policy, silent in (("joint", False), ("joint", True), ("paper", False)):
        town = towns[policy, silent] = PoolTown(policy, pool_bytes, silent=silent)
        chance, arrivals = random.Random(1), trace(1, seconds=SECONDS, requests_per_s=9)
        turns = deque((at_ns, replace(one, session=f"s{chance.randrange(40)}")) for at_ns, one in arrivals)
        town.run(turns, (SECONDS + 120) * S)
    told, untold, paper = towns.values()
    assert told.read_bytes < untold.read_bytes and told.ttft_mean_s <= 1.02 * untold.ttft_mean_s
    assert told.snic_max_over_avg(SECONDS * S) <= paper.snic_max_over_avg(SECONDS * S)


def test_buffers_are_never_overcommitted_though_they_are_the_limit() -> None:
    small = 6_000_000_000
    town = ran("joint", buffer_bytes=small)
    assert small / 2 < town.fullest <= small
    assert ran("joint").fullest <= BUFFER


def test_reads_leave_a_node_that_becomes_slow() -> None:
    town = JointTown("joint", 3, 6)
    arrivals = trace(3, seconds=SECONDS, requests_per_s=7)
    town.run(arrivals, 10 * S)
    before = town.snics["d00"].read_within(0, 10 * S)
    town.snics["d00"].slow = 0.1
    town.run(arrivals, 11 * S)
    assigned = len(town.snics["d00"].busy)
    town.run(arrivals, 20 * S)
    later = sum(size for _, _, size in town.snics["d00"].busy[assigned:])
    others = sum(snic.read_within(11 * S, 20 * S) for snic in town.snics.values()) / 9
    assert before > 0 and later <= 0.3 * others


def test_an_idle_town_answers_as_soon_as_both_nodes_and_two_helpers_have_read() -> None:
    town = JointTown("joint", 2, 2)
    town.run(deque([(200 * MS, Request("r", "m", 40_000, 39_000))]), 20 * S)
    own_s, alone_s = 40_000 / GPU, 39_000 * KV / SNIC
    assert own_s + alone_s / 4 - 1e-6 <= town.ttft_ns["r"] / S <= own_s + alone_s / 4 + 2 * STEP_NS / S
    assert town.rules == {("soonest", "soonest", "helped"): 1}
