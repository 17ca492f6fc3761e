"""Membership over a real etcd that is killed, stopped, compacted, and full of what others have put there."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cable_kit import cable
from etcd_kit import (
    PREFIX,
    TTL_S,
    Etcd,
    Recorder,
    access,
    crash,
    free_ports,
    joined,
    needs_etcd,
    running,
    until,
    wire_of,
)

from kvmover_proto import etcd_pb2
from kvmoverd.adapters.membership import etcd as etcd_module
from kvmoverd.adapters.membership import etcd_keys, etcd_wire
from kvmoverd.adapters.membership.etcd import EtcdMembership
from kvmoverd.adapters.membership.etcd_lease import EtcdLease
from kvmoverd.core.errors import ConfigError
from kvmoverd.ports.membership import Member

pytestmark = needs_etcd

SHORT_TTL_S = 1.0
"""The shortest that this etcd grants."""
EXPIRED_S = SHORT_TTL_S + 1.0
"""etcd looks for leases whose time is over twice a second."""
CLOSE_S = 3.5
PE = Member("pe", "10.0.0.1:9401", "boot-1")
DE = Member("de", "10.0.0.2:9401", "boot-2")
KEYS = etcd_keys.Keys(PREFIX)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
def etcd(server: Etcd) -> Etcd:
    """It runs, with nothing in it; a test may kill it."""
    if server.process is None:
        server.start()
    server.ctl("del", "--prefix", PREFIX)
    return server


def words(member: Member) -> str:
    return etcd_keys.member_value(member, "1").decode()


def there(member: Member) -> str:
    return f"+{member.node}@{member.address}/{member.boot_id}"


def gone(member: Member) -> str:
    return "-" + there(member)[1:]


async def test_members_stay_known_while_etcd_is_dead_and_after_it_has_come_back(etcd: Etcd) -> None:
    recorder = Recorder()
    async with (
        joined(etcd.endpoint, own=DE, ttl_s=SHORT_TTL_S),
        joined(etcd.endpoint, own=PE, ttl_s=SHORT_TTL_S, told=recorder) as membership,
    ):
        await until(lambda: len(membership.nodes()) == 2)
        before = list(recorder.told)
        etcd.kill()
        await until(lambda: membership.silent_s > SHORT_TTL_S, within_s=10.0)
        assert membership.address_of("de") == DE.address
        await asyncio.to_thread(etcd.start)
        await until(lambda: membership.silent_s == 0.0)
        await asyncio.sleep(EXPIRED_S)
        assert sorted(membership.nodes()) == ["de", "pe"]
        assert recorder.told == before, "nobody was gone"


async def test_after_etcd_stood_still_everybody_is_known_again_by_the_same_boot(etcd: Etcd) -> None:
    recorder = Recorder()
    async with (
        joined(etcd.endpoint, own=DE, ttl_s=SHORT_TTL_S),
        joined(etcd.endpoint, own=PE, ttl_s=SHORT_TTL_S, told=recorder) as membership,
    ):
        await until(lambda: len(membership.nodes()) == 2)
        etcd.signal(signal.SIGSTOP)
        await asyncio.sleep(SHORT_TTL_S + 0.5)
        assert membership.member("de") == DE
        etcd.signal(signal.SIGCONT)
        await asyncio.sleep(1.5)
        await until(lambda: sorted(membership.nodes()) == ["de", "pe"], recorder.told)
        assert set(recorder.told) <= {there(PE), there(DE), gone(PE), gone(DE)}
        assert (membership.member("pe"), membership.member("de")) == (PE, DE)


async def test_of_a_member_that_has_died_the_others_are_told_when_its_lease_expires(etcd: Etcd) -> None:
    recorder = Recorder()
    async with (
        joined(etcd.endpoint, own=DE, ttl_s=SHORT_TTL_S) as dies,
        joined(etcd.endpoint, own=PE, ttl_s=60.0, told=recorder) as membership,
    ):
        await until(lambda: "de" in membership.nodes())
        await crash(dies)
        took_s = await until(lambda: gone(DE) in recorder.told, recorder.told, EXPIRED_S + 2.0)
        assert took_s > SHORT_TTL_S / 2
        assert membership.nodes() == ["pe"]


async def test_a_name_that_another_boot_holds_is_refused_while_that_lives(etcd: Etcd) -> None:
    recorder = Recorder()
    async with joined(etcd.endpoint, own=PE, ttl_s=60.0, told=recorder):
        begun_s = time.monotonic()
        with pytest.raises(ConfigError, match=r"'pe'.*10\.0\.0\.1:9401.*boot-1.*two daemons can't have one name"):
            async with joined(etcd.endpoint, own=Member("pe", "10.0.0.9:9401", "boot-9"), ttl_s=SHORT_TTL_S):
                pass
        assert SHORT_TTL_S < time.monotonic() - begun_s < SHORT_TTL_S + 4.0, (
            "it waited for what might have been its former start"
        )
        assert recorder.told == [there(PE)]


async def test_a_name_whose_boot_has_died_is_taken_over_when_its_lease_expires(etcd: Etcd) -> None:
    recorder = Recorder()
    async with (
        joined(etcd.endpoint, told=recorder) as membership,
        joined(etcd.endpoint, own=PE, ttl_s=SHORT_TTL_S) as dies,
    ):
        await crash(dies)
        again = Member("pe", "10.0.0.1:9401", "boot-9")
        async with joined(etcd.endpoint, own=again):
            await until(lambda: membership.member("pe") == again)
        await until(lambda: membership.nodes() == [])
        assert recorder.told == [there(PE), gone(PE), there(again), gone(again)]


async def test_a_member_whose_lease_was_revoked_joins_again(etcd: Etcd) -> None:
    recorder = Recorder()
    async with joined(etcd.endpoint, told=recorder), joined(etcd.endpoint, own=PE) as membership:
        assert membership._lease is not None
        etcd.ctl("lease", "revoke", f"{membership._lease.lease_id:x}")
        await until(lambda: len(recorder.told) == 3, recorder.told)
        assert recorder.told == [there(PE), gone(PE), there(PE)]


async def test_a_node_at_another_ones_address_is_a_new_node_and_the_old_one_is_gone(etcd: Etcd) -> None:
    """Whichever name comes first."""
    recorder = Recorder()
    old, new = Member("z-old", "10.0.0.7:9401", "boot-3"), Member("a-new", "10.0.0.7:9401", "boot-4")
    async with (
        joined(etcd.endpoint, own=old, ttl_s=60.0) as dies,
        joined(etcd.endpoint, told=recorder) as membership,
    ):
        await crash(dies)
        async with joined(etcd.endpoint, own=new):
            await until(lambda: there(new) in recorder.told, recorder.told, 1.0)
            assert recorder.told == [there(old), gone(old), there(new)]
            assert membership.nodes() == ["a-new"]
            async with joined(etcd.endpoint) as later:
                assert later.nodes() == ["a-new"], "the key of the old one is still there"
            for _ in range(3):
                await membership._read_all()
            assert recorder.told == [there(old), gone(old), there(new)], "reading again changes nothing"


async def test_what_changed_while_a_watch_was_cut_off_is_told_afterwards_though_etcd_forgot_it(etcd: Etcd) -> None:
    recorder = Recorder()
    etcd.ctl("put", KEYS.node("de").decode(), words(DE))
    etcd.ctl("put", KEYS.node("h0").decode(), words(Member("h0", "10.0.0.3:1", "boot-3")))
    async with cable(etcd.port) as line, joined(line.endpoint, told=recorder) as membership:
        assert sorted(membership.nodes()) == ["de", "h0"]
        del recorder.told[:]
        line.cut()
        again = Member("h0", "10.0.0.3:1", "boot-4")
        etcd.ctl("del", KEYS.node("de").decode())
        etcd.ctl("put", KEYS.node("h0").decode(), words(again))
        etcd.ctl("put", KEYS.node("pe").decode(), words(PE))
        revision = json.loads(etcd.ctl("get", "/", "-w", "json"))["header"]["revision"]
        etcd.ctl("compact", str(revision))
        await asyncio.sleep(0.5)
        assert recorder.told == []
        line.release()
        await until(lambda: len(recorder.told) == 4, recorder.told)
        assert set(recorder.told[:2]) == {gone(DE), gone(Member("h0", "10.0.0.3:1", "boot-3"))}
        assert set(recorder.told[2:]) == {there(again), there(PE)}


async def test_a_watch_from_a_revision_that_is_forgotten_ends_and_all_is_read_again(etcd: Etcd) -> None:
    async with joined(etcd.endpoint) as membership:
        for _ in range(3):
            etcd.ctl("put", "/elsewhere", "x")
        etcd.ctl("compact", str(await membership._read_all()))
        async with asyncio.timeout(2.0):
            await membership._watch_from(1)
        etcd.ctl("put", KEYS.node("de").decode(), words(DE))
        await until(lambda: membership.nodes() == ["de"])


async def test_an_endpoint_that_is_dead_or_hangs_does_not_keep_a_node_from_joining(etcd: Etcd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        first = f"localhost:{free_ports(1)[0]}", f"localhost:{mute.getsockname()[1]}"
        begun_s = time.monotonic()
        async with joined(*first, etcd.endpoint, own=PE) as membership:
            assert membership.nodes() == ["pe"]
            assert time.monotonic() - begun_s < 3.0
            await asyncio.sleep(EXPIRED_S)
            assert membership.nodes() == ["pe"], "its lease is kept"
            assert membership.silent_s == 0.0


async def test_a_watch_that_hangs_is_opened_elsewhere_though_all_else_goes_on(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "PROGRESS_S", 0.3)
    recorder = Recorder()
    async with cable(etcd.port) as line, joined(line.endpoint, etcd.endpoint, told=recorder) as membership:
        await asyncio.sleep(1.0)
        assert membership.silent_s == 0.0, "a quiet watch that answers goes on"
        line.hold()
        etcd.ctl("put", KEYS.node("de").decode(), words(DE))
        took_s = await until(lambda: recorder.told == [there(DE)], recorder.told)
        assert took_s < 3.0


GARBAGE = [
    ("nodes/x1", "no JSON"),
    ("nodes/x2", ""),
    ("nodes/x3", "[" * 4_000),
    ("nodes/x4", '{"address": 5, "boot_id": "b"}'),
    ("nodes/x5", '{"address": "h:1"}'),
    ("nodes/x6", '{"address": "h:1", "boot_id": ["b"]}'),
    ("nodes/x7", '{"address": "\\ud800:1", "boot_id": "b"}'),
    ("nodes/x8", '{"address": "http://h:1/", "boot_id": "b"}'),
    ("nodes/x9", '{"address": "h:1", "boot_id": "new\\nline"}'),
    ("nodes/x10", '{"address": "h:1", "boot_id": "b", "more": "' + "y" * 5_000 + '"}'),
    ("nodes/", '{"address": "h:1", "boot_id": "b"}'),
    ("nodes/a/b", '{"address": "h:1", "boot_id": "b"}'),
    ("nodes/-a", '{"address": "h:1", "boot_id": "b"}'),
    ("nodes/ä", '{"address": "h:1", "boot_id": "b"}'),
    ("nodes/" + "n" * 129, '{"address": "h:1", "boot_id": "b"}'),
    ("scheduler/leader", "[" * 4_000),
    ("scheduler/leader/more", '{"address": "h:1", "boot_id": "b"}'),
    ("elsewhere", "x"),
]


async def test_what_others_have_put_under_the_prefix_is_left_alone(etcd: Etcd) -> None:
    recorder = Recorder()
    async with joined(etcd.endpoint, own=PE, told=recorder) as watched:
        async with wire_of(etcd) as wire:
            for name, value in GARBAGE:
                put = etcd_pb2.PutRequest(key=f"{PREFIX}/{name}".encode(), value=value.encode())
                await wire.call(etcd_wire.PUT, put, etcd_pb2.PutResponse)
            binary = etcd_pb2.PutRequest(key=f"{PREFIX}/nodes/".encode() + b"\xff\xfe", value=b"\x00\xff")
            await wire.call(etcd_wire.PUT, binary, etcd_pb2.PutResponse)
            over = etcd_pb2.PutRequest(key=KEYS.node("pe"), value=b"rubbish")
            await wire.call(etcd_wire.PUT, over, etcd_pb2.PutResponse)
        async with joined(etcd.endpoint, own=DE, told=recorder) as reads:
            assert reads.nodes() == ["de"]
            await until(lambda: sorted(watched.nodes()) == ["de", "pe"], recorder.told)
            for membership in (watched, reads):
                await membership._read_all()
                assert membership.scheduler() == ""
        assert watched.member("pe") == PE
        await until(lambda: watched.nodes() == ["pe"])
        assert all(told[1:3] in ("pe", "de") for told in recorder.told), recorder.told


async def test_two_thousand_members_are_read_at_once(etcd: Etcd) -> None:
    members = [Member(f"n{number}", f"10.1.{number >> 8}.{number & 255}:9401", "b" * 32) for number in range(2_000)]
    async with wire_of(etcd) as wire:
        for begin in range(0, len(members), 100):
            puts = [
                etcd_pb2.RequestOp(put=etcd_pb2.PutRequest(key=KEYS.node(m.node), value=words(m).encode()))
                for m in members[begin : begin + 100]
            ]
            await wire.call(etcd_wire.TXN, etcd_pb2.TxnRequest(success=puts), etcd_pb2.TxnResponse)
    recorder = Recorder()
    begun_s = time.monotonic()
    async with joined(etcd.endpoint, told=recorder) as membership:
        assert len(membership.nodes()) == len(recorder.told) == 2_000
        assert time.monotonic() - begun_s < 2.0
        begun_s = time.monotonic()
        await membership._read_all()
        assert time.monotonic() - begun_s < 1.0
        assert len(recorder.told) == 2_000


async def test_members_past_the_limit_are_left_out(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "MEMBERS_MAX", 1)
    async with joined(etcd.endpoint, own=PE) as first:
        etcd.ctl("put", KEYS.node("de").decode(), words(DE))
        await asyncio.sleep(0.2)
        assert first.nodes() == ["pe"]


async def test_close_is_bounded_while_etcd_stands_still(etcd: Etcd) -> None:
    membership = EtcdMembership(access(etcd.endpoint, timeout_s=60.0), PREFIX, ttl_s=600.0)
    await membership.start(PE)
    etcd.signal(signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        await membership.close()
        assert time.monotonic() - begun_s < CLOSE_S
    finally:
        etcd.signal(signal.SIGCONT)


async def test_a_node_that_starts_without_etcd_joins_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "FIRST_READ_S", 0.3)
    etcd = Etcd(tmp_path)
    try:
        begun_s = time.monotonic()
        async with joined(etcd.endpoint, own=PE) as membership:
            assert time.monotonic() - begun_s < 2.0
            assert membership.nodes() == []
            assert membership.silent_s > 0.0
            await asyncio.to_thread(etcd.start)
            await until(lambda: membership.nodes() == ["pe"], within_s=6.0)
    finally:
        etcd.kill()


async def test_who_is_told_and_fails_keeps_nobody_else_from_being_told(etcd: Etcd) -> None:
    def fails(member: Member, there: bool) -> None:
        raise RuntimeError("no")

    recorder = Recorder()
    membership = EtcdMembership(access(etcd.endpoint), PREFIX, ttl_s=TTL_S)
    membership.watch(fails)
    membership.watch(recorder)
    await membership.start(PE)
    assert recorder.told == [there(PE)]
    await membership.close()


async def test_the_leading_schedulers_address_is_known_while_its_key_is_there(etcd: Etcd) -> None:
    async with joined(etcd.endpoint) as membership, wire_of(etcd) as wire:
        lease = await EtcdLease.grant(wire, TTL_S)
        value = etcd_keys.leader_value("10.0.0.5:9402", "boot-5")
        assert (await etcd_keys.make(wire, KEYS.leader, value, lease.lease_id)).is_ours
        await until(lambda: membership.scheduler() == "10.0.0.5:9402")
        async with joined(etcd.endpoint) as later:
            assert later.scheduler() == "10.0.0.5:9402"
        await lease.revoke()
        await until(lambda: membership.scheduler() == "")
        assert membership.nodes() == []
