"""Leases: granted, renewed, released and run out, each by its own session only."""

from __future__ import annotations

from random import Random

import pytest

from kvmoverd.core.errors import QueueFull
from kvmoverd.core.leases import DUE_SPARE, Lease, LeaseTable

Ref = tuple[int, int]


def ref(lease: Lease) -> Ref:
    return lease.lease_id, lease.generation


def test_a_lease_ends_when_its_time_has_come_and_not_before() -> None:
    table = LeaseTable(4)
    late, soon = table.grant("s1", 11, 200), table.grant("s1", 12, 100)
    assert table.expire(99) == []
    assert table.expire(100) == [soon]
    assert table.expire(1000) == [late]
    assert (len(table), table.expire(2000)) == (0, [])
    assert soon.waiter == 12


def test_a_renewed_lease_outlives_its_first_end_and_is_never_shortened() -> None:
    table = LeaseTable(4)
    lease = table.grant("s1", 11, 100)
    assert table.renew("s1", [ref(lease)], 50, 300) == [True]
    assert table.renew("s1", [ref(lease)], 60, 70) == [True]
    assert table.expire(299) == []
    assert table.expire(300) == [lease]


def test_renewal_says_in_order_which_leases_go_on() -> None:
    table = LeaseTable(9)
    good, over, ended = (table.grant("s1", 0, expires_ns) for expires_ns in (100, 50, 100))
    foreign = table.grant("s2", 0, 100)
    table.release("s1", [ref(ended)])
    unknown, old = (77, 1), (good.lease_id, good.generation + 1)
    refs = [unknown, ref(good), ref(over), ref(ended), ref(foreign), old, ref(good)]
    assert table.renew("s1", refs, 60, 500) == [False, True, False, False, False, False, True]
    assert table.renew("s1", [], 60, 500) == []
    assert table.expire(100) == [over, foreign]


def test_release_ends_each_lease_once_and_ignores_what_it_does_not_know() -> None:
    table = LeaseTable(9)
    mine, foreign = table.grant("s1", 0, 100), table.grant("s2", 0, 100)
    assert table.release("s1", [ref(mine), ref(mine), ref(foreign), (99, 1)]) == [mine]
    assert table.release("s1", [ref(mine)]) == []
    assert table.expire(100) == [foreign]


def test_the_end_of_a_session_ends_all_its_leases_and_no_others() -> None:
    table = LeaseTable(9)
    first, other, second = table.grant("s1", 1, 100), table.grant("s2", 2, 100), table.grant("s1", 3, 100)
    assert table.session_gone("s1") == [first, second]
    assert table.session_gone("s1") == []
    assert table.expire(100) == [other]


def test_one_lease_too_many_is_refused_with_the_numbers_and_an_ended_one_makes_room() -> None:
    table = LeaseTable(2)
    table.grant("s1", 0, 100)
    table.grant("s1", 0, 200)
    with pytest.raises(QueueFull, match="2 leases are out, at most 2 may be"):
        table.grant("s2", 0, 100)
    table.expire(100)
    assert table.grant("s2", 0, 100).lease_id == 3


def test_a_lease_of_an_earlier_table_is_void_under_another_generation() -> None:
    before = LeaseTable(2, generation=7).grant("s1", 0, 100)
    table = LeaseTable(2, generation=8)
    now = table.grant("s1", 0, 100)
    assert now.lease_id == before.lease_id
    assert table.renew("s1", [ref(before), ref(now)], 0, 200) == [False, True]


def test_leases_that_are_quickly_released_leave_nothing_behind() -> None:
    table = LeaseTable(8)
    kept = [table.grant("s1", 0, expires_ns) for expires_ns in (50, 10, 40, 20, 30, 60)]
    for _ in range(10_000):
        table.release("s1", [ref(table.grant("s1", 0, 10**12))])
    assert len(table._due) <= 2 * len(table) + DUE_SPARE + 1
    assert [lease.expires_ns for lease in table.expire(45)] == [10, 20, 30, 40]
    assert table.expire(1_000) == [kept[0], kept[5]]


@pytest.mark.parametrize("seed", range(10))
def test_each_lease_ends_exactly_once_at_its_time_or_by_its_session(seed: int) -> None:
    random, table, now_ns = Random(seed), LeaseTable(20), 0
    live: dict[Ref, tuple[str, int]] = {}
    for _ in range(800):
        now_ns += random.randint(0, 10)
        gone = {ref(lease) for lease in table.expire(now_ns)}
        assert gone == {known for known, (_, expires_ns) in live.items() if expires_ns <= now_ns}
        for known in gone:
            del live[known]
        session = random.choice("abc")
        refs = random.sample(sorted(live), min(len(live), 4))
        mine = [known for known in refs if live[known][0] == session]
        match random.randrange(8):
            case 0:
                ended = {ref(lease) for lease in table.release(session, refs)}
                assert ended == set(mine)
            case 1:
                ended = {ref(lease) for lease in table.session_gone(session)}
                assert ended == {known for known, (owner, _) in live.items() if owner == session}
            case 2 | 3:
                ended = set()
                until_ns = now_ns + random.randint(1, 300)
                assert table.renew(session, refs, now_ns, until_ns) == [known in mine for known in refs]
                live.update({known: (session, max(live[known][1], until_ns)) for known in mine})
            case _:
                ended = set()
                if len(live) < 20:
                    expires_ns = now_ns + random.randint(1, 300)
                    live[ref(table.grant(session, 0, expires_ns))] = (session, expires_ns)
        for known in ended:
            del live[known]
        assert len(table) == len(live)
