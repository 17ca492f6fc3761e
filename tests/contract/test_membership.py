"""What a daemon may rely on, whichever way it knows the other nodes: a fixed list, or etcd."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from etcd_kit import PREFIX, TTL_S, Etcd, Recorder, access, needs_etcd, running, until

from kvmoverd.adapters.membership.etcd import EtcdMembership
from kvmoverd.adapters.membership.static import StaticMembership
from kvmoverd.ports.membership import Member, Membership

NODES = {"pe": "10.0.0.1:9401", "de": "10.0.0.2:9401", "h0": "[fd00::3]:9401"}
CLOSE_S = 4.0


@dataclass
class World:
    """One way of knowing nodes. `others`: those of `NODES` but "pe", where daemons have to be there to be known."""

    make: Callable[[], Membership]
    others: Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture(params=["static", pytest.param("etcd", marks=needs_etcd)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made: list[Membership] = []
    if request.param == "static":
        yield World(lambda: StaticMembership(NODES), _nothing)
        return
    server: Etcd = request.getfixturevalue("etcd")
    server.ctl("del", "--prefix", PREFIX)

    def make() -> Membership:
        made.append(EtcdMembership(access(server.endpoint), PREFIX, ttl_s=TTL_S))
        return made[-1]

    async def others() -> None:
        for name in ("de", "h0"):
            await make().start(Member(name, NODES[name], f"boot of {name}".replace(" ", "-")))

    yield World(make, others)
    for membership in made:
        await membership.close()


async def _nothing() -> None:
    pass


OWN = Member("pe", NODES["pe"], "boot-1")


async def test_the_nodes_are_known_after_the_start(world: World) -> None:
    await world.others()
    membership = world.make()
    await membership.start(OWN)
    assert sorted(membership.nodes()) == sorted(NODES)
    assert {name: membership.address_of(name) for name in NODES} == NODES
    for name, address in NODES.items():
        member = membership.member(name)
        assert member is not None
        assert (member.node, member.address) == (name, address)
    await membership.close()


async def test_who_is_no_node_has_no_address(world: World) -> None:
    membership = world.make()
    await membership.start(OWN)
    assert membership.address_of("nobody") is None
    assert membership.member("nobody") is None
    assert "nobody" not in membership.nodes()
    await membership.close()


async def test_the_list_of_nodes_is_the_callers(world: World) -> None:
    await world.others()
    membership = world.make()
    await membership.start(OWN)
    membership.nodes().clear()
    assert sorted(membership.nodes()) == sorted(NODES)
    await membership.close()


async def test_nobody_is_told_of_what_was_there_before_it_watched(world: World) -> None:
    await world.others()
    membership, recorder = world.make(), Recorder()
    await membership.start(OWN)
    membership.watch(recorder)
    assert recorder.told == []
    await membership.close()


async def test_one_that_only_looks_is_no_member(world: World) -> None:
    await world.others()
    membership = world.make()
    await membership.start(None)
    assert {"de", "h0"} <= set(membership.nodes())
    later = world.make()
    await later.start(None)
    assert sorted(later.nodes()) == sorted(membership.nodes())
    await membership.close()
    await later.close()


async def test_without_a_leading_scheduler_its_address_is_empty(world: World) -> None:
    membership = world.make()
    await membership.start(OWN)
    assert membership.scheduler() == ""
    await membership.close()


async def test_close_ends_soon_also_before_the_start_and_twice(world: World) -> None:
    begun_s = time.monotonic()
    unstarted, started = world.make(), world.make()
    await unstarted.close()
    await started.start(OWN)
    await started.close()
    await started.close()
    assert time.monotonic() - begun_s < CLOSE_S


@needs_etcd
async def test_who_closes_is_gone_for_the_others_at_once(etcd: Etcd, tmp_path: Path) -> None:
    """Of the list nobody leaves."""
    etcd.ctl("del", "--prefix", PREFIX)
    recorder = Recorder()
    stays, leaves = (EtcdMembership(access(etcd.endpoint), PREFIX, ttl_s=600.0) for _ in range(2))
    stays.watch(recorder)
    await stays.start(OWN)
    await leaves.start(Member("de", NODES["de"], "boot-2"))
    await until(lambda: "de" in stays.nodes(), recorder.told)
    await leaves.close()
    await until(lambda: "de" not in stays.nodes(), recorder.told)
    assert recorder.told == [
        "+pe@10.0.0.1:9401/boot-1",
        "+de@10.0.0.2:9401/boot-2",
        "-de@10.0.0.2:9401/boot-2",
    ]
    await stays.close()
