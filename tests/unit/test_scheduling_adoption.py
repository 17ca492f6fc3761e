"""A scheduler that starts anew: what leaders hold goes on, what nobody holds is given out again, what is over is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmoverd.core.scheduling import baselines, paper
from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.held import Held
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.reports import BadReport, Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import (
    FIRST_NS,
    Assignment,
    Fence,
    ReadChoice,
    Request,
    Revoked,
    State,
)
from kvmoverd.core.scheduling.state import Node
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path
from tests.unit.scheduling_kit import MODEL, MS, ROOM, Bench, Load

SETTLE_NS = 2_000 * MS
IDLE = (0, 0)
SECOND_NS = 1_000_000_000


class Anew:
    """A scheduler just started, and the leaders of one prefill and one decode group that were there before."""

    def __init__(self) -> None:
        self.now_ns = 10_000 * MS
        self.cluster = Cluster([MODEL], settled_ns=self.now_ns + SETTLE_NS)
        self.sequence = 0
        self.heard = {"p": 0, "d": 0, "p2": 0}

    def pull(self, group: str, *held: Held, done: tuple[Done, ...] = ()) -> list[Assignment | Revoked]:
        self.sequence += 1
        node = {"p": "a", "d": "x", "p2": "b"}[group]
        role = Role.DECODE if group == "d" else Role.PREFILL
        said = (EngineReport(f"{node}/0", node, len(held), 100 * len(held), ROOM),)
        found = self.cluster.pull(
            GroupReport(group, MODEL.name, role, "b", self.sequence, said, self.heard[group], done, held), self.now_ns
        )
        if found:
            self.heard[group] = found[-1].number
        return [delivery.what for delivery in found]

    def submit(self, after: int) -> State:
        return self.cluster.submit(Request("r", MODEL.name, 100, 50, "t", after_attempt=after), self.now_ns).state

    def settle(self) -> None:
        """All who live have pulled meanwhile."""
        self.now_ns += SETTLE_NS
        self.cluster.tick(self.now_ns)

    def now(self) -> tuple[State, int]:
        ticket = self.cluster.ticket("r")
        return ticket.state, ticket.attempt


def held(attempt: int = 17, *, prefill_done: bool = False) -> Held:
    return Held("r", attempt, "a/0", "a", "x/0", "x", ReadChoice(Path.DE), 100, 50, prefill_done)


@pytest.mark.parametrize("client_first", [True, False])
def test_what_both_leaders_hold_goes_on_whoever_comes_first(client_first: bool) -> None:
    anew = Anew()
    if client_first:
        assert anew.submit(17) is State.WAITING
    assert anew.pull("p", held()) == [] and anew.pull("d", held()) == []
    assert anew.submit(17) is State.ASSIGNED
    anew.settle()
    assert anew.now() == (State.ASSIGNED, 17)
    assert anew.pull("p", done=(Done("r", 17),)) == []
    anew.pull("d", done=(Done("r", 17),))
    assert anew.now() == (State.DONE, 17)


def test_what_nobody_holds_is_given_out_under_a_higher_attempt_once_all_have_spoken() -> None:
    anew = Anew()
    anew.pull("p"), anew.pull("d")
    assert anew.submit(17) is State.WAITING
    assert anew.pull("p") == [] and anew.pull("d") == []
    assert anew.now() == (State.WAITING, 33)
    anew.settle()
    anew.pull("p"), anew.pull("d")
    assert anew.now() == (State.ASSIGNED, 33)


def test_a_request_that_is_new_waits_for_nobody() -> None:
    anew = Anew()
    anew.submit(0)
    anew.pull("p"), anew.pull("d")
    assert anew.now() == (State.ASSIGNED, 1)


@pytest.mark.parametrize("group", ["p", "d"])
def test_one_whose_other_engine_is_gone_is_given_out_anew_and_its_leader_is_told(group: str) -> None:
    anew = Anew()
    anew.submit(17)
    assert anew.pull(group, held()) == []
    anew.settle()
    assert anew.now() == (State.WAITING, 33)
    assert Revoked("r", 17) in anew.pull(group)


def test_one_that_is_prefilled_needs_no_prefill_engine() -> None:
    anew = Anew()
    anew.pull("d", held(prefill_done=True))
    anew.settle()
    assert anew.now() == (State.ASSIGNED, 17)


def test_of_two_attempts_the_later_one_counts() -> None:
    anew = Anew()
    anew.pull("p", held(1))
    anew.pull("d", held(17))
    assert anew.now() == (State.ASSIGNED, 17)
    assert anew.pull("p") == [Revoked("r", 1)]


def test_a_later_attempt_of_the_engines_own_is_the_same_one() -> None:
    anew = Anew()
    anew.pull("p", held(19))
    anew.pull("d", held(17))
    anew.settle()
    assert anew.now() == (State.ASSIGNED, 19)


def test_what_has_ended_or_went_to_others_is_not_taken_up_again() -> None:
    anew = Anew()
    anew.submit(0)
    anew.cluster.cancel("r")
    assert anew.pull("p", held(1)) == [Revoked("r", 1)]
    later = Anew()
    later.submit(17)
    later.settle()
    later.pull("d")
    assert later.pull("p", held(17))[0] == Revoked("r", 17)


def test_one_that_waits_for_its_engines_goes_on_where_it_is_held() -> None:
    anew = Anew()
    anew.submit(0)
    anew.pull("p")
    assert anew.now() == (State.WAITING, 1)
    assert anew.pull("d", held(1)) == [] and anew.now() == (State.ASSIGNED, 1)
    anew.settle()
    assert anew.now() == (State.WAITING, 17)


def test_when_two_schedulers_gave_out_one_number_neither_goes_on_and_a_third_attempt_follows() -> None:
    anew = Anew()
    anew.submit(0)
    anew.pull("p"), anew.pull("d")
    assert anew.now() == (State.ASSIGNED, 1)
    anew.pull("p")
    other = replace(held(1), prefill_engine="b/0", prefill_node="b", decode_engine="y/0", decode_node="y")
    assert anew.pull("p2", other)[0] == Revoked("r", 1)
    assert Revoked("r", 1) in anew.pull("p") and Revoked("r", 1) in anew.pull("d")
    assert anew.now() == (State.ASSIGNED, 17)


def test_attempts_rise_by_the_wall_clock_from_one_scheduler_to_the_next() -> None:
    given = []
    for after_s in (60, 68, 120):
        anew = Anew()
        anew.cluster = Cluster([MODEL], numbers_from=FIRST_NS + after_s * SECOND_NS, settled_ns=0)
        anew.submit(1)
        anew.pull("p"), anew.pull("d")
        given.append(anew.now())
    assert given == [(State.ASSIGNED, 129), (State.ASSIGNED, 145), (State.ASSIGNED, 257)]


def test_a_leader_is_told_though_one_of_its_nodes_is_said_to_be_gone() -> None:
    bench = Bench()
    bench.node("a"), bench.node("b"), bench.node("x")
    engines: dict[str, Load] = {"a/0": IDLE, "b/0": IDLE}
    bench.submit(100)
    bench.pull("p", engines), bench.pull("d", {"x/0": IDLE})
    assert bench.prefill_of("r1") == "a/0"
    bench.pull("p", engines)
    bench.cluster.lose_node("a", bench.now_ns)
    assert Revoked("r1", 1) in bench.pull("p", engines)


def test_of_fences_that_a_node_never_hears_of_the_oldest_are_dropped_and_counted() -> None:
    node = Node("a", 0)
    for number in range(Node.FENCES_MAX + 2):
        node.fence(Fence(number, "r", 1))
    assert node.fences_dropped == 2 and node.fences(0, 1)[0].number == 2
    assert len(node.fences(Node.FENCES_MAX, 4)) == 1


def test_nodes_are_told_to_refuse_an_attempt_that_is_over_until_they_have_heard() -> None:
    bench = Bench()
    bench.node("a"), bench.node("x")
    bench.submit(100)
    bench.pull("p", {"a/0": IDLE}), bench.pull("d", {"x/0": IDLE})
    bench.cluster.lose_group("p", bench.now_ns)
    told = {}
    for name in ("a", "x"):
        for sequence in (100, 101):
            told[name] = bench.cluster.node_reported(NodeReport(name, "b", sequence, Depth(0, 1)), bench.now_ns)
            assert [(fence.request_id, fence.attempt) for fence in told[name]] == [("r1", 16)]
        heard = told[name][-1].number
        said = NodeReport(name, "b", 102, Depth(0, 1), fences_heard=heard)
        assert bench.cluster.node_reported(said, bench.now_ns) == ()


def test_what_is_done_is_fenced_nowhere() -> None:
    bench = Bench()
    bench.node("a"), bench.node("x")
    bench.submit(100)
    bench.pull("p", {"a/0": IDLE}), bench.pull("d", {"x/0": IDLE})
    bench.pull("d", {"x/0": IDLE}, done=(Done("r1", 1),))
    assert bench.cluster.node_reported(NodeReport("x", "b", 100, Depth(0, 1)), bench.now_ns) == ()


def test_only_the_group_that_was_given_a_request_can_say_that_it_is_done() -> None:
    bench = Bench()
    bench.submit(100)
    bench.pull("p", {"a/0": IDLE}), bench.pull("d", {"x/0": IDLE})
    bench.pull("d2", {"y/0": IDLE}, done=(Done("r1", 1),))
    assert bench.cluster.ticket("r1").state is State.ASSIGNED


def test_a_leader_that_takes_nothing_of_what_it_is_told_is_lost() -> None:
    bench = Bench(limits=Limits(told_max=3))
    for number in range(2):
        bench.submit(1)
        bench.pull("p", {"a/0": IDLE}, hear=False)
        bench.pull("d", {"x/0": IDLE})
        bench.cluster.cancel(f"r{number + 1}")
    with pytest.raises(BadReport, match="has not taken 4 deliveries, at most 3"):
        bench.pull("p", {"a/0": IDLE}, hear=False)
    assert bench.cluster.group("p") is None


def test_of_a_group_that_drains_in_part_the_other_engines_take_all() -> None:
    bench = Bench()
    bench.node("a", draining=True), bench.node("b"), bench.node("x", draining=True), bench.node("y")
    bench.submit(100, 100, 100)
    for _ in range(2):
        bench.pull("p", {"a/0": IDLE, "b/0": IDLE}), bench.pull("d", {"x/0": IDLE, "y/0": IDLE})
    assert {bench.prefill_of(name) for name in ("r1", "r2", "r3")} == {"b/0"}
    assert {bench.decode_of(name) for name in ("r1", "r2", "r3")} == {"y/0"}
    bench.node("a")
    bench.submit(100)
    bench.pull("p", {"a/0": IDLE, "b/0": (3, 300)})
    assert bench.prefill_of("r4") == "a/0"


@pytest.mark.parametrize("policy", ["paper", "round-robin"])
def test_a_node_that_drains_gets_nothing_new(policy: str) -> None:
    bench = Bench(policy)
    bench.node("a", draining=True), bench.node("b"), bench.node("x")
    bench.pull("d", {"x/0": IDLE})
    bench.pull("p", {"a/0": IDLE}), bench.pull("p2", {"b/0": IDLE})
    bench.node("a", draining=True)
    bench.submit(100)
    assert bench.pull("p", {"a/0": IDLE}) == []
    bench.pull("p2", {"b/0": IDLE}), bench.pull("d", {"x/0": IDLE})
    assert bench.prefill_of("r1") == "b/0"


def test_what_is_held_and_done_in_one_report_is_done() -> None:
    anew = Anew()
    anew.pull("p", held())
    anew.pull("d", held(), done=(Done("r", 17),))
    assert anew.now() == (State.DONE, 17)


@pytest.mark.parametrize("group", ["p", "d"])
def test_what_an_engine_gives_back_goes_to_others_and_both_nodes_refuse_it(group: str) -> None:
    bench = Bench()
    bench.node("a"), bench.node("b"), bench.node("x")
    bench.submit(100)
    bench.pull("p", {"a/0": IDLE}), bench.pull("d", {"x/0": IDLE})
    node = "a" if group == "p" else "x"
    bench.pull(group, {f"{node}/0": IDLE}, done=(Done("r1", 1, failed=True),))
    ticket = bench.cluster.ticket("r1")
    assert (ticket.state, ticket.attempt) == (State.WAITING, 17)
    for name in ("a", "x"):
        told = bench.cluster.node_reported(NodeReport(name, "b", 100, Depth(0, 1)), bench.now_ns)
        assert [(fence.request_id, fence.attempt) for fence in told] == [("r1", 16)]


@pytest.mark.parametrize("policy", ["paper", "round-robin", "prefill-only"])
def test_a_pull_gives_out_so_many_and_the_rest_goes_with_the_next(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paper, baselines):
        monkeypatch.setattr(module, "GIVEN_MAX", 3)
    bench = Bench(policy)
    bench.submit(*[1] * 7)
    given = []
    for _ in range(8):
        bench.pull("p", {"a/0": IDLE})
        bench.pull("d", {"x/0": IDLE})
        given.append(bench.cluster.counts.assigned)
    assert given[0] <= 4 and given[-1] == 7
