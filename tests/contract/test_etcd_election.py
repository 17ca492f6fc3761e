"""One scheduler leads at a time, whatever becomes of etcd, of the way to it, and of the schedulers; over a real etcd."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from cable_kit import Cable, cable
from etcd_kit import Etcd, access, needs_etcd, running, until

from kvmoverd.adapters.membership.etcd_election import EtcdElection
from kvmoverd.adapters.membership.etcd_wire import EtcdAccess

pytestmark = [pytest.mark.contract, needs_etcd]

TTL_S = 2.0
SHORT_TTL_S = 1.0
"""The shortest that this etcd grants."""
AT_ONCE_S = 1.0
EXPIRES_S = TTL_S + 1.5
"""etcd looks for leases that have expired twice a second."""
CLOSED_S = 4.0
SAMPLE_S = 0.001
ORDEAL_S = 10.0

_prefixes = (f"/election-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


@dataclass
class Candidate:
    """An election, and what it has told: epochs as numbers, addresses that it follows as words."""

    name: str
    election: EtcdElection
    told: list[int | str] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.election.leads()

    @property
    def epoch(self) -> int:
        """Of the last time that it came to lead; 0: it never did."""
        return next((word for word in reversed(self.told) if isinstance(word, int)), 0)


@asynccontextmanager
async def candidates(
    prefix: str, *ways: str | EtcdAccess, ttl_s: float = TTL_S, on_lead: Callable[[int], None] = lambda epoch: None
) -> AsyncIterator[list[Candidate]]:
    """One after another, named "a", "b" and so on; the first leads when the second comes."""
    found: list[Candidate] = []
    async with AsyncExitStack() as built:
        for name, way in zip("abcdefgh", ways, strict=False):
            found.append(_candidate(prefix, name, way, ttl_s, on_lead))
            built.push_async_callback(found[-1].election.close)
            found[-1].election.start()
            if len(found) == 1:
                await until(lambda: bool(found[0].told), "nobody leads")
        yield found


def _candidate(
    prefix: str, name: str, way: str | EtcdAccess, ttl_s: float, on_lead: Callable[[int], None] = lambda epoch: None
) -> Candidate:
    told: list[int | str] = []

    def leads(epoch: int) -> None:
        told.append(epoch)
        on_lead(epoch)

    election = EtcdElection(
        way if isinstance(way, EtcdAccess) else access(way),
        prefix,
        address=f"{name}:9402",
        boot_id=f"boot-{name}-{next(_boots)}",
        ttl_s=ttl_s,
        on_lead=leads,
        on_follow=told.append,
    )
    return Candidate(name, election, told)


_boots = itertools.count()


def key_of(etcd: Etcd, prefix: str) -> dict[str, int]:
    """What etcd itself has; empty: no key."""
    found = json.loads(etcd.ctl("get", f"{prefix}/scheduler/leader", "--write-out=json").splitlines()[0])
    return dict(found["kvs"][0]) if "kvs" in found else {}


async def test_the_first_leads_and_the_second_follows_it(etcd: Etcd, prefix: str) -> None:
    async with candidates(prefix, etcd.endpoint, etcd.endpoint) as (first, second):
        await until(lambda: bool(second.told), "it follows nobody")
        assert first.leads
        assert not second.leads
        assert second.told == ["a:9402"]
        assert first.told == [key_of(etcd, prefix)["create_revision"]]


async def test_clusters_with_prefixes_of_their_own_have_leaders_of_their_own(etcd: Etcd, prefix: str) -> None:
    async with (
        candidates(prefix, etcd.endpoint) as (one,),
        candidates(f"{prefix}-and-more", etcd.endpoint) as (other,),
    ):
        assert one.leads
        assert other.leads


async def test_a_lease_is_kept_for_as_long_as_its_holder_lives(etcd: Etcd, prefix: str) -> None:
    async with candidates(prefix, etcd.endpoint, ttl_s=SHORT_TTL_S) as (only,):
        await asyncio.sleep(3 * SHORT_TTL_S)
        assert only.leads
        assert len(only.told) == 1


async def test_one_that_closes_hands_over_at_once(etcd: Etcd, prefix: str) -> None:
    async with candidates(prefix, etcd.endpoint, etcd.endpoint, ttl_s=60.0) as (first, second):
        await until(lambda: bool(second.told))
        await first.election.close()
        assert not first.leads
        await until(lambda: second.leads, second.told, AT_ONCE_S)
        assert second.epoch > first.epoch


async def test_one_that_is_cut_off_stops_before_the_next_one_begins(etcd: Etcd, prefix: str) -> None:
    async with (
        cable(etcd.port) as line,
        candidates(prefix, line.endpoint, etcd.endpoint) as (first, second),
    ):
        await until(lambda: bool(second.told))
        line.hold()
        stopped_s = await until(lambda: not first.leads, "it leads")
        assert stopped_s < TTL_S * 2 / 3 + 0.2
        began_s = await until(lambda: second.leads, "nobody leads", EXPIRES_S)
        assert began_s > 0.1
        assert second.epoch > first.epoch
        await until(lambda: first.told[-1] == "", first.told)
        line.release()
        await until(lambda: first.told[-1] == "b:9402", first.told)
        assert not first.leads


async def test_one_whose_lease_outlives_its_time_leads_anew_and_never_follows_itself(etcd: Etcd, prefix: str) -> None:
    async with cable(etcd.port) as line, candidates(prefix, line.endpoint, ttl_s=6.0) as (only,):
        before = only.epoch
        line.hold()
        await until(lambda: not only.leads, "it leads")
        line.release()
        waited_s = await until(lambda: only.leads, only.told)
        assert waited_s < 1.5
        assert only.epoch > before
        assert "a:9402" not in only.told


async def test_one_that_stood_still_knows_that_its_time_is_over_before_it_hears_anything(
    etcd: Etcd, prefix: str
) -> None:
    async with candidates(prefix, etcd.endpoint) as (only,):
        before = only.epoch
        time.sleep(TTL_S * 0.7)  # noqa: ASYNC251 - the whole loop is to stand still
        assert not only.leads
        assert only.told == [before]
        await until(lambda: only.leads and only.epoch > before, only.told)


@pytest.mark.parametrize("way", ["stopped", "killed"])
async def test_without_etcd_nobody_leads_and_with_it_again_somebody_does(etcd: Etcd, prefix: str, way: str) -> None:
    async with candidates(prefix, etcd.endpoint, etcd.endpoint) as both:
        before = both[0].epoch
        try:
            if way == "stopped":
                etcd.signal(signal.SIGSTOP)
            else:
                etcd.kill()
            away_s = await until(lambda: not both[0].leads, "it leads")
            assert away_s < TTL_S * 2 / 3 + 0.2
            await until(lambda: both[0].told[-1] == "", both[0].told)
            await asyncio.sleep(TTL_S)
            assert not any(each.leads for each in both)
        finally:
            if way == "stopped":
                etcd.signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(etcd.start)
        await until(lambda: any(each.leads for each in both), [each.told for each in both], EXPIRES_S)
        assert max(each.epoch for each in both) > before


async def test_a_short_absence_of_etcd_changes_nothing(etcd: Etcd, prefix: str) -> None:
    async with candidates(prefix, etcd.endpoint, etcd.endpoint, ttl_s=20.0) as (first, second):
        await until(lambda: bool(second.told))
        await asyncio.to_thread(etcd.restart)
        await asyncio.sleep(2.0)
        assert first.leads
        assert len(first.told) == 1
        assert not second.leads


async def test_a_key_that_is_deleted_by_hand_ends_its_leader(etcd: Etcd, prefix: str) -> None:
    async with candidates(prefix, etcd.endpoint, ttl_s=60.0) as (only,):
        before = only.epoch
        await asyncio.to_thread(etcd.ctl, "del", f"{prefix}/scheduler/leader")
        await until(lambda: only.epoch > before, only.told)
        assert only.told == [before, "", only.epoch]
        assert only.leads


async def test_a_lease_that_is_revoked_by_hand_ends_its_leader(etcd: Etcd, prefix: str) -> None:
    async with candidates(prefix, etcd.endpoint, ttl_s=60.0) as (only,):
        before = only.epoch
        lease = key_of(etcd, prefix)["lease"]
        await asyncio.to_thread(etcd.ctl, "lease", "revoke", f"{lease:x}")
        await until(lambda: only.epoch > before, only.told)
        assert only.leads


@pytest.mark.parametrize("value", ["0", "no json", "[" * 4000, '{"address": 7}', "x" * 10_000])
async def test_a_key_with_nobody_behind_it_is_followed_to_nowhere_until_it_is_gone(
    etcd: Etcd, prefix: str, value: str
) -> None:
    await asyncio.to_thread(etcd.ctl, "put", f"{prefix}/scheduler/leader", put=value)
    async with candidates(prefix, etcd.endpoint) as (only,):
        assert only.told == [""]
        assert not only.leads
        await asyncio.to_thread(etcd.ctl, "del", f"{prefix}/scheduler/leader")
        await until(lambda: only.leads, only.told, AT_ONCE_S)


async def test_one_whose_callback_fails_does_not_lead_and_stands_again(etcd: Etcd, prefix: str) -> None:
    fails = [True, True]

    def on_lead(epoch: int) -> None:
        if fails:
            fails.pop()
            raise OSError("no room for the log")

    async with candidates(prefix, etcd.endpoint, on_lead=on_lead) as (only,):
        await until(lambda: only.leads and not fails, only.told)
        epochs = [word for word in only.told if isinstance(word, int)]
        assert len(epochs) == 3
        assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("fault", ["hangs", "is dead"])
async def test_another_endpoint_is_asked_when_the_first_one_gives_no_answer(
    etcd: Etcd, prefix: str, fault: str
) -> None:
    async with cable(etcd.port) as line:
        if fault == "hangs":
            line.hold()
        else:
            line.cut()
        async with candidates(prefix, access(line.endpoint, etcd.endpoint)) as (only,):
            await until(lambda: only.leads, only.told)


async def test_one_that_leads_goes_on_over_another_endpoint_when_its_own_hangs(etcd: Etcd, prefix: str) -> None:
    async with cable(etcd.port) as line, candidates(prefix, access(line.endpoint, etcd.endpoint), ttl_s=3.0) as (only,):
        line.hold()
        await asyncio.sleep(4.0)
        assert only.leads
        assert len(only.told) == 1


@pytest.mark.parametrize("role", ["leads", "follows"])
async def test_closing_takes_a_bounded_time_with_an_etcd_that_hangs(etcd: Etcd, prefix: str, role: str) -> None:
    async with candidates(prefix, etcd.endpoint, access(etcd.endpoint, timeout_s=60.0)) as both:
        await until(lambda: bool(both[1].told))
        one = both[0] if role == "leads" else both[1]
        etcd.signal(signal.SIGSTOP)
        try:
            begun_s = time.monotonic()
            await one.election.close()
            assert time.monotonic() - begun_s < CLOSED_S
            assert not one.leads
        finally:
            etcd.signal(signal.SIGCONT)


@dataclass
class Ordeal:
    """Three candidates, each with a way of its own to etcd, and all that goes wrong with them."""

    etcd: Etcd
    prefix: str
    chance: random.Random
    lines: list[Cable]
    standing: list[Candidate] = field(default_factory=list)
    closed: list[Candidate] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def stand(self, number: int) -> None:
        made = _candidate(self.prefix, "abc"[number], self.lines[number].endpoint, SHORT_TTL_S, self._led)
        self.standing[number : number + 1] = [made]
        made.election.start()

    def _led(self, epoch: int) -> None:
        if self.epochs and epoch <= self.epochs[-1]:
            self.wrong.append(f"epoch {epoch} after {self.epochs[-1]}")
        self.epochs.append(epoch)

    def look(self) -> None:
        leading = [each.name for each in (*self.standing, *self.closed[-8:]) if each.leads]
        if len(leading) > 1:
            self.wrong.append(f"{leading} lead at once, after {self.events[-3:]}")

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_S)

    async def run(self, until_s: float) -> None:
        faults = [self._hold, self._cut, self._replace, self._stand_still, self._stop_etcd]
        while time.monotonic() < until_s:
            fault = self.chance.choice(faults)
            number = next((each for each, one in enumerate(self.standing) if one.leads), self.chance.randrange(3))
            self.events.append(f"{fault.__name__} {self.standing[number].name}")
            await fault(number)
            await asyncio.sleep(self.chance.uniform(0.0, 0.6))

    async def _hold(self, number: int) -> None:
        self.lines[number].hold()
        await asyncio.sleep(self.chance.uniform(0.3, 1.6))
        self.lines[number].release()

    async def _cut(self, number: int) -> None:
        self.lines[number].cut()
        await asyncio.sleep(self.chance.uniform(0.3, 1.6))
        self.lines[number].release()

    async def _replace(self, number: int) -> None:
        one = self.standing[number]
        self.closed.append(one)
        await one.election.close()
        self.stand(number)

    async def _stand_still(self, number: int) -> None:
        time.sleep(self.chance.uniform(0.3, 1.3))  # noqa: ASYNC251 - the whole loop is to stand still
        self.look()

    async def _stop_etcd(self, number: int) -> None:
        self.etcd.signal(signal.SIGSTOP)
        await asyncio.sleep(self.chance.uniform(0.3, 1.6))
        self.etcd.signal(signal.SIGCONT)


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_never_lead_at_once_and_epochs_rise(etcd: Etcd, prefix: str, seed: int) -> None:
    async with AsyncExitStack() as built:
        lines = [await built.enter_async_context(cable(etcd.port)) for _ in range(3)]
        ordeal = Ordeal(etcd, prefix, random.Random(seed), lines)
        for number in range(3):
            ordeal.stand(number)
        watching = asyncio.ensure_future(ordeal.watch())
        try:
            await ordeal.run(time.monotonic() + ORDEAL_S)
            await until(lambda: any(each.leads for each in ordeal.standing), ordeal.events)
        finally:
            etcd.signal(signal.SIGCONT)
            watching.cancel()
            await asyncio.gather(watching, *(each.election.close() for each in ordeal.standing), return_exceptions=True)
    assert ordeal.wrong == []
    assert len(ordeal.epochs) >= 5, ordeal.events
