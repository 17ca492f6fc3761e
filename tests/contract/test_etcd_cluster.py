"""Membership over three etcds that are one cluster: any of them may die, and one that is alone is not believed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import pytest
from etcd_kit import PREFIX, TTL_S, Etcd, Recorder, access, joined, needs_etcd, until

from kvmoverd.adapters.membership.etcd_election import EtcdElection
from kvmoverd.ports.membership import Member

pytestmark = needs_etcd

PE = Member("pe", "10.0.0.1:9401", "boot-1")
DE = Member("de", "10.0.0.2:9401", "boot-2")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Etcd]]:
    made = [Etcd(tmp_path_factory.mktemp(name), name=name) for name in ("one", "two", "three")]
    for etcd in made:
        etcd.cluster = ",".join(each.peer for each in made)
    try:
        for etcd in made:
            etcd.launch()
        for etcd in made:
            etcd.wait()
        yield made
    finally:
        for etcd in made:
            etcd.kill()


@pytest.fixture
def three(servers: list[Etcd]) -> list[Etcd]:
    """All run, the one that leads the others first."""
    servers[0].ctl("del", "--prefix", PREFIX)
    leads: list[Etcd] = []
    for etcd in servers:
        status = json.loads(etcd.ctl("endpoint", "status", "-w", "json"))[0]["Status"]
        leads += [etcd] if status["leader"] == status["header"]["member_id"] else []
    assert len(leads) == 1
    return leads + [etcd for etcd in servers if etcd is not leads[0]]


async def test_the_etcd_that_leads_dies_and_nobody_is_gone(three: list[Etcd]) -> None:
    recorder, terms = Recorder(), list[int | str]()
    endpoints = [etcd.endpoint for etcd in three]
    election = EtcdElection(
        access(*endpoints),
        PREFIX,
        address="10.0.0.7:9402",
        boot_id="boot-7",
        ttl_s=6.0,
        on_lead=terms.append,
        on_follow=terms.append,
    )
    async with joined(*endpoints, own=PE, ttl_s=6.0, told=recorder) as membership:
        election.start()
        await until(lambda: membership.scheduler() == "10.0.0.7:9402", terms)
        three[0].kill()
        async with joined(*endpoints, own=DE):
            await until(lambda: "de" in membership.nodes(), recorder.told)
        await until(lambda: "de" not in membership.nodes(), recorder.told)
        assert [told for told in recorder.told if "pe" in told] == [f"+pe@{PE.address}/{PE.boot_id}"]
        assert election.leads()
        assert len(terms) == 1
        await election.close()
        await until(lambda: membership.scheduler() == "")
    three[0].start()


async def test_a_watch_at_an_etcd_that_is_cut_off_from_the_others_is_not_believed_to_be_quiet(
    three: list[Etcd],
) -> None:
    leads, follower, other = three
    async with joined(follower.endpoint, own=PE, ttl_s=60.0) as membership:
        for etcd in (leads, other):
            etcd.signal(signal.SIGSTOP)
        try:
            await until(lambda: membership.silent_s > 0, "it takes silence for peace", 8.0)
            assert membership.member("pe") == PE
        finally:
            for etcd in (leads, other):
                etcd.signal(signal.SIGCONT)
        await until(lambda: membership.silent_s == 0, within_s=8.0)
        assert membership.member("pe") == PE


async def test_a_watch_moves_on_from_an_etcd_that_stands_still(three: list[Etcd]) -> None:
    recorder = Recorder()
    async with joined(*(etcd.endpoint for etcd in reversed(three)), own=PE, ttl_s=8.0, told=recorder) as membership:
        three[2].signal(signal.SIGSTOP)
        try:
            async with joined(three[0].endpoint, own=DE, ttl_s=8.0):
                await until(lambda: "de" in membership.nodes(), recorder.told, 8.0)
        finally:
            three[2].signal(signal.SIGCONT)
        await asyncio.sleep(TTL_S / 2)
        assert [told for told in recorder.told if "pe" in told] == [f"+pe@{PE.address}/{PE.boot_id}"]
