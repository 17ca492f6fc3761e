"""Turns: tenants by their weights, nobody for ever, those that come back first."""

from __future__ import annotations

import random

import pytest

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.scheduling.joint_queue import FairQueue
from kvmoverd.core.scheduling.joint_ranked import Ranked
from kvmoverd.core.scheduling.joint_settings import JointSettings
from kvmoverd.core.scheduling.requests import Entry, Request

MS = 1_000_000
S = 1_000 * MS


class Line:
    """A queue, and a clock that is moved by hand."""

    def __init__(self, **settings: object) -> None:
        self.queue = FairQueue(JointSettings(**settings))  # type: ignore[arg-type]
        self.now_ns = 0
        self.orders = 0
        self.entries: dict[str, Entry] = {}

    def add(self, tenant: str, tokens: int = 100, *, again: bool = False) -> Entry:
        self.orders += 1
        name = f"{tenant}{self.orders}"
        entry = self.entries[name] = Entry(Request(name, "m", tokens, tenant=tenant), self.orders, 1, self.now_ns)
        self.queue.add(entry, again=again)
        return entry

    def serve(self) -> Entry | None:
        entry = self.queue.next(self.now_ns, {})
        if entry is not None:
            self.queue.took(entry)
        self.queue.end_round()
        return entry

    def served(self, turns: int) -> list[Entry]:
        return [entry for entry in (self.serve() for _ in range(turns)) if entry is not None]


def tokens_of(entries: list[Entry], tenant: str) -> int:
    return sum(entry.tokens for entry in entries if entry.request.tenant == tenant)


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    line = Line()
    entries = [line.add("a", tokens) for tokens in (900, 5, 70)]
    assert line.served(5) == entries


def test_a_tenant_with_a_thousand_requests_does_not_keep_another_one_waiting() -> None:
    line = Line()
    for _ in range(1_000):
        line.add("flood")
    line.served(10)
    one = line.add("one")
    assert one in line.served(2)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_follow_the_weights_whatever_the_sizes(seed: int) -> None:
    chance = random.Random(seed)
    line = Line(weights=(("a", 3.0), ("b", 1.0)))
    for _ in range(2_000):
        line.add("a", chance.randrange(1, 1_000))
        line.add("b", chance.randrange(1, 300))
    found = line.served(2_000)
    assert tokens_of(found, "a") == pytest.approx(3 * tokens_of(found, "b"), abs=2 * 3_000)


def test_who_comes_back_after_a_while_has_saved_nothing_up() -> None:
    line = Line()
    line.add("late")
    line.served(1)
    for _ in range(100):
        line.add("busy")
    line.served(50)
    for _ in range(100):
        line.add("late")
    found = line.served(20)
    assert tokens_of(found, "late") == tokens_of(found, "busy")


def test_each_fourth_turn_is_that_of_the_oldest_which_has_waited_too_long() -> None:
    line = Line(weights=(("heavy", 1000.0), ("light", 0.001)), age_ns=30 * S)
    line.add("light")
    line.add("heavy")
    line.served(1)
    old = [line.add("light") for _ in range(5)]
    line.now_ns = 31 * S
    for _ in range(100):
        line.add("heavy")
    found = line.served(20)
    assert [entry for entry in found if entry.request.tenant == "light"] == old
    assert [place for place, entry in enumerate(found) if entry in old] == [2, 6, 10, 14, 18]


def test_one_that_came_back_and_finds_no_room_keeps_nobody_from_the_turns_of_the_old() -> None:
    line = Line(weights=(("heavy", 1000.0), ("light", 0.001)), age_ns=30 * S)
    line.add("light")
    line.add("heavy")
    line.served(1)
    old = line.add("light")
    line.now_ns = 31 * S
    for _ in range(20):
        line.add("heavy")
    back = line.add("heavy", again=True)
    found = []
    for _ in range(8):
        entry = line.queue.next(line.now_ns, {back.request.request_id: back})
        assert entry is not None
        line.queue.took(entry)
        line.queue.end_round()
        found.append(entry)
    assert old in found


def test_nobody_waits_longer_than_the_turns_of_those_that_are_older() -> None:
    chance = random.Random(7)
    line = Line(weights=(("heavy", 1000.0), ("light", 0.001)), age_ns=S)
    line.add("light", 1_000)
    line.add("heavy", 1_000)
    line.served(1)
    waits = []
    for _ in range(3_000):
        line.now_ns += 10 * MS
        line.add(chance.choice(["heavy", "heavy", "heavy", "light"]), chance.randrange(1, 500))
        served = line.serve()
        assert served is not None
        waits.append(line.now_ns - served.since_ns)
    assert max(waits) <= S + 4 * 10 * MS * max(1, len(line.queue)) + S


def test_those_that_come_back_are_first_in_the_order_of_arrival() -> None:
    line = Line()
    first = line.add("a")
    line.add("a")
    two, one = line.add("b", again=True), line.add("b", again=True)
    assert line.served(3) == [two, one, first]


def test_who_is_passed_over_keeps_the_place() -> None:
    line = Line()
    back, first, second = line.add("a", again=True), line.add("a"), line.add("a")
    passed: dict[str, Entry] = {}
    for entry in (back, first):
        assert line.queue.next(0, passed) is entry
        passed[entry.request.request_id] = entry
    assert line.queue.next(0, passed) is second
    line.queue.took(second)
    assert line.queue.next(0, passed) is None
    line.queue.end_round()
    assert line.served(3) == [back, first]


def test_withdrawn_requests_leave_nothing_behind() -> None:
    line = Line(tenants_max=2)
    for number in range(500):
        line.queue.drop(line.add(f"t{number}-").request.request_id)
    line.queue.drop("unknown")
    assert len(line.queue) == 0 and line.serve() is None
    assert len(line.queue._heap) <= 66
    kept = line.add("x")
    assert line.served(2) == [kept]


def test_idle_tenants_are_forgotten_those_first_that_have_used_the_least() -> None:
    line = Line(tenants_max=10)
    line.add("always")
    line.add("greedy", 100_000)
    line.served(1)
    for number in range(200):
        line.add(f"t{number}-", 10)
        line.serve()
        assert len(line.queue._ends) <= 12
    last = line.add("greedy")
    assert line.served(1) != [last]


@pytest.mark.parametrize(
    "wrong",
    [
        {"floor_ns": -1},
        {"candidates": 0},
        {"aged_every": 1},
        {"decode_level": float("nan")},
        {"weights": (("a", 0.0),)},
        {"weights": (("a", float("inf")),)},
        {"weights": (("a", 1.0), ("a", 2.0))},
        {"weights": (("x" * 300, 1.0),)},
    ],
)
def test_settings_out_of_their_bounds_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"must be|at most"):
        JointSettings(**wrong)  # type: ignore[arg-type]


def test_ranked_names_are_in_the_order_of_their_last_numbers() -> None:
    chance = random.Random(3)
    ranked, numbers = Ranked(), dict[str, float]()
    for _ in range(2_000):
        name = f"n{chance.randrange(30)}"
        if chance.random() < 0.2:
            ranked.drop(name)
            numbers.pop(name, None)
        else:
            numbers[name] = float(chance.randrange(10))
            ranked.put(name, numbers[name])
        assert ranked.first(5) == sorted((number, name) for name, number in numbers.items())[:5]
        assert len(ranked) == len(numbers)
