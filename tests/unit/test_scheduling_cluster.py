"""The scheduler's state: one live attempt a request, reports that repeat, go stale or come from another start, and limits."""

from __future__ import annotations

import pytest

from kvmoverd.core.errors import BadRequest, QueueFull, UnknownModel, UnknownPeer, UnknownRequest
from kvmoverd.core.scheduling import ended
from kvmoverd.core.scheduling.explain import classes
from kvmoverd.core.scheduling.limits import Limits
from kvmoverd.core.scheduling.reports import BadReport, Done, EngineReport, GroupReport, NodeReport, Role
from kvmoverd.core.scheduling.requests import ATTEMPT_STEP, Assignment, Request, Revoked, State, Ticket
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path
from tests.unit.scheduling_kit import KV, MS, Bench, assert_sound

IDLE = (0, 0)
SECOND = 1_000 * MS


def assigned(bench: Bench | None = None, *, prompts: int = 1) -> Bench:
    """Requests r1, ... that engine a/0 prefills and engine x/0 decodes; both leaders have heard of them."""
    bench = bench or Bench()
    for node in ("a", "x"):
        bench.node(node)
    bench.submit(*[100] * prompts, hit=64)
    bench.pull("d", {"x/0": IDLE})
    bench.pull("p", {"a/0": IDLE})
    bench.pull("d", {"x/0": (prompts, 100 * prompts)})
    assert all(entry.assignment for entry in bench.cluster.entries())
    return bench


def state(bench: Bench, name: str = "r1") -> tuple[State, int]:
    ticket = bench.cluster.ticket(name)
    return ticket.state, ticket.attempt


def test_both_leaders_are_told_of_the_same_assignment_once_both_engines_are_known() -> None:
    bench = Bench()
    bench.submit(100)
    assert bench.pull("p", {"a/0": IDLE}) == []
    (for_decode,) = bench.pull("d", {"x/0": IDLE})
    (for_prefill,) = bench.pull("p", {"a/0": IDLE})
    assert for_decode is for_prefill
    assert isinstance(for_prefill, Assignment)
    assert (for_prefill.request_id, for_prefill.attempt) == ("r1", 1)
    assert (for_prefill.prefill_engine, for_prefill.prefill_node) == ("a/0", "a")
    assert (for_prefill.decode_engine, for_prefill.decode_node) == ("x/0", "x")
    assert bench.cluster.take_news() == [for_prefill] and bench.cluster.take_news() == []


def test_what_a_leader_has_not_heard_is_told_again_and_counts_on_top_of_its_numbers() -> None:
    bench = Bench()
    bench.submit(100, 50)
    bench.pull("d", {"x/0": IDLE}, hear=False)
    first = bench.pull("p", {"a/0": (0, 7)}, hear=False)
    assert [what.request_id for what in first] == ["r1", "r2"]
    again = bench.pull("p", {"a/0": (0, 7)})
    assert again == first
    engine = next(group for group in bench.cluster.groups() if group.name == "p").engines["a/0"]
    assert (engine.seq_e, engine.tok_e) == (2, 157)
    assert bench.pull("p", {"a/0": (2, 157)}) == []
    assert (engine.seq_e, engine.tok_e, engine.unheard_tokens) == (2, 157, 0)
    assert_sound(bench.cluster)


def test_a_request_is_done_when_its_decode_is() -> None:
    bench = assigned()
    assert bench.cluster.nodes["x"].reserved_bytes == 100 * KV
    bench.pull("p", {"a/0": IDLE}, done=(Done("r1", 1),))
    assert state(bench) == (State.ASSIGNED, 1)
    bench.pull("d", {"x/0": IDLE}, done=(Done("r1", 1),))
    assert state(bench) == (State.DONE, 1) and bench.cluster.live == 0
    assert bench.cluster.nodes["x"].reserved_bytes == 0
    assert bench.cluster.ticket("r1").assignment is not None
    assert_sound(bench.cluster)


def test_a_submit_that_comes_again_is_the_same_request_whatever_became_of_it() -> None:
    bench = Bench()
    again = Request("r1", "m", 100, 64)
    assert bench.cluster.submit(again, 0) == Ticket("r1", State.WAITING, 1)
    assert bench.cluster.submit(again, 5).state is State.WAITING and bench.cluster.waiting == 1
    bench.pull("d", {"x/0": IDLE})
    bench.pull("p", {"a/0": IDLE})
    assert bench.cluster.submit(again, 6).assignment is not None
    bench.pull("d", {"x/0": IDLE}, done=(Done("r1", 1),))
    assert bench.cluster.submit(again, 7).state is State.DONE
    assert bench.cluster.counts.submitted == 1 and bench.cluster.live == 0


def test_another_request_of_the_same_name_is_refused() -> None:
    bench = Bench()
    bench.submit("r")
    with pytest.raises(BadRequest, match=r"is known with 100 tokens .* now has 101"):
        bench.cluster.submit(Request("r", "m", 101), 0)


def test_a_client_that_knows_of_an_attempt_from_an_earlier_scheduler_gets_a_higher_one() -> None:
    bench = Bench()
    for name, known in (("a", 1), ("b", 5), ("c", 17)):
        bench.submit(name, after_attempt=known)
    assert [state(bench, name)[1] for name in "abc"] == [17, 17, 33]


@pytest.mark.parametrize("lost", ["p", "d"])
def test_when_an_engine_is_lost_its_requests_go_to_others_under_a_higher_attempt(lost: str) -> None:
    bench = assigned()
    bench.cluster.lose_group(lost, bench.now_ns)
    assert state(bench) == (State.WAITING, 1 + ATTEMPT_STEP)
    assert_sound(bench.cluster)
    other = {"p": ("d", "x/0"), "d": ("p", "a/0")}[lost]
    told = bench.pull(other[0], {other[1]: (1, 100)})
    assert told[0] == Revoked("r1", 1)
    bench.pull("p2", {"b/0": IDLE})
    bench.pull("d2", {"y/0": IDLE})
    assert state(bench) == (State.ASSIGNED, 1 + ATTEMPT_STEP)
    assert_sound(bench.cluster)


def test_a_prefill_that_is_done_does_not_need_its_engine_any_more() -> None:
    bench = assigned()
    bench.pull("p", {"a/0": IDLE}, done=(Done("r1", 1),))
    bench.cluster.lose_group("p", bench.now_ns)
    assert state(bench) == (State.ASSIGNED, 1)
    bench.cluster.lose_group("d", bench.now_ns)
    assert state(bench) == (State.WAITING, 1 + ATTEMPT_STEP)


def test_a_request_that_nobody_was_told_of_keeps_its_attempt() -> None:
    bench = Bench()
    bench.submit(100)
    bench.pull("p", {"a/0": IDLE})
    bench.cluster.lose_group("p", bench.now_ns)
    assert state(bench) == (State.WAITING, 1) and bench.cluster.counts.requeued == 0
    bench.pull("p2", {"b/0": IDLE})
    assert bench.prefill_of("r1") == "b/0"


def test_what_is_given_out_again_goes_before_what_waits_in_its_old_order() -> None:
    bench = assigned(prompts=3)
    bench.submit(10)
    bench.cluster.lose_group("p", bench.now_ns)
    bench.pull("p2", {"b/0": IDLE})
    assert list(next(g for g in bench.cluster.groups() if g.name == "p2").engines["b/0"].live) == [
        "r1",
        "r2",
        "r3",
        "r4",
    ]


def test_a_late_done_of_a_lower_attempt_ends_nothing() -> None:
    bench = assigned()
    bench.cluster.lose_group("d", bench.now_ns)
    bench.pull("d2", {"y/0": IDLE})
    bench.pull("p", {"a/0": IDLE})
    assert state(bench) == (State.ASSIGNED, 17)
    bench.pull("d", {"x/0": IDLE}, done=(Done("r1", 1), Done("unheard of", 3)))
    assert state(bench) == (State.ASSIGNED, 17)


def test_an_attempt_that_the_engines_raised_themselves_ends_the_request_and_the_next_of_ours_does_not() -> None:
    bench = assigned()
    bench.pull("d", {"x/0": IDLE}, done=(Done("r1", 1 + ATTEMPT_STEP),))
    assert state(bench)[0] is State.ASSIGNED
    bench.pull("d", {"x/0": IDLE}, done=(Done("r1", ATTEMPT_STEP),))
    assert state(bench)[0] is State.DONE


def test_a_group_under_a_new_boot_id_has_lost_what_the_former_had_and_the_former_may_not_come_back() -> None:
    bench = assigned()
    bench.pull("p", {"a/0": IDLE}, boot="b2")
    assert state(bench)[1] == 17
    with pytest.raises(BadReport, match=r"report \d+ of boot 'b' is overtaken"):
        bench.pull("p", {"a/0": IDLE}, boot="b")
    assert_sound(bench.cluster)


def test_an_engine_that_is_missing_from_its_groups_report_is_lost_and_one_that_moved_too() -> None:
    bench = Bench()
    bench.submit(100, 100)
    bench.pull("d", {"x/0": IDLE})
    bench.pull("p", {"a/0": IDLE, "a/1": IDLE})
    bench.pull("p", {"a/1": (1, 100)})
    assert (state(bench, "r1")[1], state(bench, "r2")[1]) == (17, 1)
    moved = GroupReport("p", "m", Role.PREFILL, "b", 10**6, (EngineReport("a/1", "elsewhere"),))
    bench.cluster.pull(moved, bench.now_ns)
    assert state(bench, "r2")[1] == 17
    assert_sound(bench.cluster)


def test_a_leader_that_is_silent_for_too_long_is_dead() -> None:
    bench = assigned()
    bench.now_ns += 5 * SECOND
    bench.cluster.tick(bench.now_ns)
    assert state(bench) == (State.ASSIGNED, 1)
    bench.pull("d", {"x/0": (1, 100)})
    bench.now_ns += 1
    bench.cluster.tick(bench.now_ns)
    assert state(bench) == (State.WAITING, 17)
    assert [group.name for group in bench.cluster.groups()] == ["d"]
    # The same start may come back: whatever it still does is fenced by the attempt.
    bench.pull("p", {"a/0": IDLE})
    assert state(bench) == (State.WAITING, 17) and bench.prefill_of("r1") == "a/0"


def test_the_numbers_of_a_silent_node_are_not_believed() -> None:
    bench = assigned()
    assert bench.cluster.nodes["a"].queue_bytes >= 0
    bench.now_ns += 2 * SECOND + 1
    bench.cluster.tick(bench.now_ns)
    assert bench.cluster.nodes["a"].queue_bytes == -1
    assert state(bench) == (State.ASSIGNED, 1)
    bench.node("a", 5)
    assert bench.cluster.nodes["a"].queue_bytes == 5 * KV


def test_a_node_under_a_new_boot_id_has_nothing_of_what_was_given_to_the_former() -> None:
    bench = assigned()
    node = bench.cluster.nodes["x"]
    assert node.given_bytes == 64 * KV
    bench.node("x", 3, boot="b2")
    assert (node.queue_bytes, node.boot_id) == (3 * KV, "b2")
    with pytest.raises(BadReport, match="overtaken"):
        bench.node("x", 4)


def test_a_node_that_is_lost_takes_its_engines_along() -> None:
    bench = Bench()
    bench.node("a")
    bench.node("b")
    bench.submit(100, 100)
    bench.pull("d", {"x/0": IDLE})
    bench.pull("p", {"a/0": IDLE, "b/0": IDLE})
    bench.cluster.lose_node("a", bench.now_ns)
    bench.cluster.lose_node("nowhere", bench.now_ns)
    assert (state(bench, "r1"), state(bench, "r2")[1]) == ((State.WAITING, 17), 1)
    assert "a" not in bench.cluster.nodes
    assert_sound(bench.cluster)


def test_a_request_whose_engines_die_each_time_fails_in_the_end() -> None:
    bench = Bench(limits=Limits(attempts_max=3))
    bench.submit(100)
    for start in range(3):
        bench.pull("d", {"x/0": IDLE})
        bench.pull("p", {"a/0": IDLE}, boot=f"b{start}")
        assert state(bench) == (State.ASSIGNED, 1 + ATTEMPT_STEP * start)
        bench.cluster.lose_group("p", bench.now_ns)
    ticket = bench.cluster.ticket("r1")
    assert (ticket.state, ticket.why) == (
        State.FAILED,
        "given out 3 times, and each time an engine was lost or gave it back",
    )
    assert bench.cluster.take_news()[-1] == ticket and bench.cluster.live == 0
    assert_sound(bench.cluster)


def test_a_request_that_waits_for_too_long_fails_and_leaves_the_queue() -> None:
    bench = Bench(limits=Limits(wait_max_ns=SECOND))
    bench.submit(100)
    bench.now_ns += SECOND
    bench.submit(50)
    bench.cluster.tick(bench.now_ns)
    assert bench.cluster.waiting == 2
    bench.now_ns += SECOND // 2
    bench.cluster.tick(bench.now_ns)
    assert bench.cluster.ticket("r1").state is State.FAILED
    bench.pull("p", {"a/0": IDLE})
    assert bench.prefill_of("r2") == "a/0"
    assert_sound(bench.cluster)


def test_a_full_queue_says_when_to_come_again() -> None:
    bench = Bench(limits=Limits(waiting_max=2))
    bench.submit(1, 1)
    with pytest.raises(QueueFull, match="2 requests wait and 2 live, at most 2 and 400000 may") as caught:
        bench.submit("late")
    assert caught.value.details["retry_after_ms"] == "10000" and bench.cluster.counts.refused == 1
    with pytest.raises(UnknownRequest):
        bench.cluster.ticket("late")


def test_the_faster_requests_go_the_sooner_another_try_makes_sense() -> None:
    bench = Bench("round-robin", limits=Limits(live_max=100_000))
    bench.pull("p", {"a/0": IDLE})
    bench.pull("d", {"x/0": IDLE})
    for _ in range(210):
        bench.now_ns += 10 * MS
        bench.submit(1)
    # A hundred a second: a twentieth of 2,000 waiting ones are gone in a second.
    assert bench.cluster._drain.retry_after_ms(2_000, bench.now_ns) == pytest.approx(1_000, rel=0.02)


def test_when_nothing_goes_any_more_the_rate_of_before_is_not_believed() -> None:
    bench = Bench("round-robin", limits=Limits(live_max=211))
    bench.pull("p", {"a/0": IDLE})
    bench.pull("d", {"x/0": IDLE})
    for _ in range(210):
        bench.now_ns += 10 * MS
        bench.submit(1)
    bench.submit(1)
    waits = []
    for _ in range(3):
        with pytest.raises(QueueFull) as caught:
            bench.submit("late")
        waits.append(int(caught.value.details["retry_after_ms"]))
        bench.now_ns += 60_000 * MS
    # Of 211 live ones a twentieth are gone in a tenth of a second at first; none waits.
    assert waits == [pytest.approx(105, abs=3), 10_000, 10_000]


def test_a_client_may_leave_and_both_leaders_are_told() -> None:
    bench = assigned()
    assert bench.cluster.cancel("r1").state is State.CANCELLED
    assert bench.pull("p", {"a/0": IDLE}) == [Revoked("r1", 1)]
    assert bench.pull("d", {"x/0": IDLE})[-1] == Revoked("r1", 1)
    assert bench.cluster.cancel("r1").state is State.CANCELLED and bench.cluster.counts.cancelled == 1
    bench.submit("waits")
    bench.cluster.cancel("waits")
    bench.pull("p", {"a/0": IDLE})
    assert bench.cluster.live == bench.cluster.waiting == 0
    assert_sound(bench.cluster)


def test_ended_requests_are_remembered_up_to_a_limit() -> None:
    bench = Bench(limits=Limits(ended_max=2))
    for name in bench.submit("a", "b", "c"):
        bench.cluster.cancel(name)
    with pytest.raises(UnknownRequest, match="the last 2 that ended are"):
        bench.cluster.ticket("a")
    assert bench.cluster.ticket("c").state is State.CANCELLED


def test_of_requests_that_ended_long_ago_the_candidates_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds all engines of its group, and a hundred thousand requests are remembered."""
    monkeypatch.setattr(ended, "CANDIDATES_MAX", 2 * 4)
    bench = Bench()
    bench.submit(1, 1, 1)
    bench.pull("d", {"x/0": IDLE, "x/1": IDLE})
    bench.pull("p", {"a/0": IDLE, "a/1": IDLE})
    before = bench.cluster.explain("r1")
    bench.pull("d", {"x/0": IDLE, "x/1": IDLE}, done=tuple(Done(f"r{number}", 1) for number in (1, 2, 3)))
    first, second = bench.cluster.explain("r1"), bench.cluster.explain("r2")
    assert (first.rules, first.json(), first.path) == (before.rules, before.json(), before.path)
    assert (classes(first.prefill), classes(first.decode)) == ([], [])
    assert len(classes(second.prefill)) == len(classes(second.decode)) == 2
    assert bench.cluster.submit(Request("r1", "m", 1), bench.now_ns).state is State.DONE


def test_a_pulls_answer_is_bounded_and_the_rest_comes_next() -> None:
    bench = Bench(limits=Limits(deliveries_max=2))
    bench.submit(1, 1, 1)
    bench.pull("d", {"x/0": IDLE})
    assert len(bench.pull("p", {"a/0": IDLE})) == 2
    assert [what.request_id for what in bench.pull("p", {"a/0": IDLE})] == ["r3"]


def test_unknown_models_nodes_and_engines_of_others_are_refused() -> None:
    bench = assigned()
    with pytest.raises(UnknownModel, match="'other' is none of the 1 that are scheduled, such as m"):
        bench.cluster.submit(Request("q", "other", 1), 0)
    with pytest.raises(UnknownModel):
        bench.cluster.pull(GroupReport("p", "other", Role.PREFILL, "b", 1, (EngineReport("a/0", "a"),)), 0)
    with pytest.raises(BadReport, match="engine 'a/0' of group 'p2' is one of 'p'"):
        bench.pull("p2", {"a/0": IDLE})
    with pytest.raises(BadReport, match="was prefill of 'm' in this boot"):
        bench.cluster.pull(GroupReport("p", "m", Role.DECODE, "b", 10**6, (EngineReport("a/0", "a"),)), 0)
    with pytest.raises(UnknownPeer, match="node 'z' is none of the 2"):
        bench.cluster.choose_path("m", "a", "z", 5, 0)
    assert_sound(bench.cluster)


def test_engines_and_nodes_are_bounded_before_anything_is_changed() -> None:
    bench = Bench(limits=Limits(engines_max=2, nodes_max=2))
    bench.pull("p", {"a/0": IDLE})
    with pytest.raises(BadReport, match="3 engines on 2 nodes, at most 2 and 2"):
        bench.pull("d", {"x/0": IDLE, "x/1": IDLE})
    bench.node("x")
    with pytest.raises(BadReport, match="node 'y' would be the 3th"):
        bench.node("y")
    assert [group.name for group in bench.cluster.groups()] == ["p"]


def test_nodes_that_nothing_is_left_of_are_forgotten_so_that_names_that_change_never_fill_the_limit() -> None:
    bench = Bench(limits=Limits(nodes_max=1))
    for n in range(3):
        bench.pull(f"p{n}", {f"n{n}/0": (0, 0)})
        bench.cluster.lose_group(f"p{n}", bench.now_ns)
    bench.node("m")
    bench.pull("p", {"m/0": (0, 0)})
    bench.now_ns += bench.cluster.limits.node_silent_ns + MS
    bench.cluster.tick(bench.now_ns)
    assert list(bench.cluster.nodes) == ["m"], "it is silent, and has an engine"
    bench.cluster.lose_group("p", bench.now_ns)
    assert not bench.cluster.nodes


def test_a_router_of_ones_own_may_ask_who_reads() -> None:
    bench = Bench()
    bench.node("a", 10)
    bench.node("x", 20)
    found = [bench.cluster.choose_path("m", "a", "x", 15, bench.now_ns)[0].path for _ in range(3)]
    assert found == [Path.PE, Path.DE, Path.PE]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineReport("", "n"),
        lambda: EngineReport("e", "n" * 257),
        lambda: EngineReport("e", "n", seq_e=-1),
        lambda: EngineReport("e", "n", tok_e=(1 << 40) + 1),
        lambda: EngineReport("e", "n", free_hbm_tokens=-1),
        lambda: GroupReport("g", "m", Role.DECODE, "b", -1, (EngineReport("e", "n"),)),
        lambda: GroupReport("g", "m", Role.DECODE, "b", 1, ()),
        lambda: GroupReport("g", "m", Role.DECODE, "b", 1, (EngineReport("e", "n"),) * 2),
        lambda: GroupReport("g", "m", Role.DECODE, "", 1, (EngineReport("e", "n"),)),
        lambda: Done("r", 0),
        lambda: Done("", 1),
        lambda: NodeReport("n", "b", 1, Depth(-1)),
        lambda: NodeReport("n", "b", 1, buffer_free_bytes=1 << 63),
        lambda: Request("r" * 129, "m", 1),
        lambda: Request("r", "m", 0),
        lambda: Request("r", "m", 5, 6),
        lambda: Request("r", "m", 5, tenant="t" * 257),
        lambda: Request("r", "m", 5, after_attempt=-1),
        lambda: Model("m", 0, 1, 1),
        lambda: Limits(waiting_max=0),
    ],
)
def test_numbers_and_names_out_of_bounds_are_refused_with_numbers(make: object) -> None:
    with pytest.raises(BadRequest, match=r"\d"):
        make()  # type: ignore[operator]
