"""The policy "joint", rule by rule: the soonest pair, what lies somewhere already, room, and what is not known."""

from __future__ import annotations

import pytest

from kvmoverd.core.scheduling.reports import Done, NodeReport
from kvmoverd.core.scheduling.requests import Part
from kvmoverd.core.shares import Depth
from kvmoverd.core.status import Path
from tests.unit.joint_kit import BUFFER, GPU, KV, MS, ROOM, SNIC, Yard, numbers, only


def test_a_request_is_assigned_as_soon_as_it_comes() -> None:
    yard = Yard().begin()
    what = only(yard.submit("r", 1_000))
    assert what.explain.rules == ("soonest", "soonest", "split")
    found = numbers(what)
    assert found["own_ns"] == 100 * MS and found["wait_ns"] == 0
    assert found["ttft_ns"] == found["own_ns"] + found["read_ns"]
    assert found["read_ns"] == pytest.approx(900 / 200_000 * 1e9)


def test_the_prefill_engine_with_the_least_to_do_at_its_own_rate_is_the_soonest() -> None:
    yard = Yard(3, 1)
    yard.busy = {"p0/0": 5_000, "p1/0": 1_000, "p2/0": 1_500}
    yard.rates = {"p1/0": GPU // 4, "p2/0": GPU}
    yard.begin()
    what = only(yard.submit("r"))
    assert what.prefill_engine == "p2/0"
    assert numbers(what)["next_ttft_ns"] > numbers(what)["ttft_ns"]


def test_long_reads_make_a_busier_engine_on_an_idle_node_the_sooner_one() -> None:
    yard = Yard(2, 1)
    yard.busy = {"p1/0": 2_000}
    yard.begin()
    yard.node("p0", 100_000)
    yard.node("d0", 100_000)
    yard.pull()
    assert only(yard.submit("r", 10_000)).prefill_engine == "p1/0"


def test_engines_above_beta_get_nothing_until_they_are_below() -> None:
    yard = Yard(1, 1, beta_ns=2_000 * MS)
    yard.busy = {"p0/0": 2 * GPU + 1}
    yard.begin()
    assert yard.submit("r") is None
    yard.busy = {"p0/0": 2 * GPU}
    assert [what.request_id for what in yard.pull("p0")] == ["r"]


def test_beta_follows_the_measured_rate() -> None:
    yard = Yard(1, 1, beta_ns=2_000 * MS)
    yard.busy, yard.rates = {"p0/0": 3_000}, {"p0/0": 1_000}
    yard.begin()
    assert yard.submit("r") is None


def test_kv_in_an_engines_pages_is_not_read_and_draws_the_request_there() -> None:
    yard = Yard(4, 2).begin()
    yard.busy = {"p3/0": 200}
    yard.pull()
    what = only(yard.submit("r", 10_000, cached="p3/0"))
    assert what.prefill_engine == "p3/0" and what.explain.rules == ("cached", "soonest", "pooled")
    assert what.read.path is Path.PE and what.explain.path.hit_bytes == 0


def test_kv_elsewhere_is_read_again_where_waiting_for_it_costs_more() -> None:
    yard = Yard(2, 2)
    yard.busy = {"p1/0": 5_000}
    yard.begin()
    what = only(yard.submit("r", 10_000, cached="p1/0"))
    assert what.prefill_engine == "p0/0" and what.explain.prefill.rule == "soonest"


def test_kv_in_a_decode_nodes_pool_draws_the_request_there_and_crosses_its_lane() -> None:
    yard = Yard(1, 3).begin()
    yard.node("d2", lane_bytes_per_s=10 * SNIC)
    what = only(yard.submit("r", 10_000, cached="d2"))
    assert what.decode_node == "d2" and what.explain.rules == ("soonest", "cached", "pooled")
    assert what.read.path is Path.DE and numbers(what)["lane_ns"] == 9 * MS


def test_a_cached_head_is_its_nodes_part_and_the_rest_is_levelled() -> None:
    yard = Yard(1, 1, helpers_max=0).begin()
    what = only(yard.submit("r", 10_000, hit=4_000, cached="p0"))
    assert what.read.path is Path.PE
    from_pool = only(yard.submit("s", 10_000, hit=8_000, cached="d0", head=4_000))
    assert from_pool.read.path is Path.PARTS
    assert [part.node for part in from_pool.read.parts] == ["d0", "p0"]
    assert from_pool.read.parts[0].stop > 0.5 and from_pool.explain.path.hit_bytes == 4_000 * KV


def test_what_lies_in_an_engines_pages_is_nobodys_part() -> None:
    """Who has it leaves it out of what is shared: `ReadChoice.shares` takes blocks that are not resident."""
    yard = Yard(1, 1, helpers_max=0).begin()
    what = only(yard.submit("r", 10_000, hit=8_000, cached="p0/0", head=4_000))
    assert what.explain.path.hit_bytes == 4_000 * KV
    assert what.read.parts == (Part("p0", 0.0, 0.5), Part("d0", 0.5, 1.0))


def test_only_what_a_node_has_to_read_of_its_part_counts_as_given_to_it() -> None:
    yard = Yard(1, 1, helpers_max=0).begin()
    what = only(yard.submit("r", 10_000, hit=8_000, cached="d0", head=4_000))
    assert what.read.parts == (Part("d0", 0.0, 0.75), Part("p0", 0.75, 1.0))
    assert [yard.cluster.nodes[name].given_bytes for name in ("d0", "p0")] == [2_000 * KV, 2_000 * KV]
    assert what.explain.path.reads == (("d0", 2_000 * KV), ("p0", 2_000 * KV))


def test_a_session_goes_back_to_the_engine_whose_pages_keep_its_kv() -> None:
    yard = Yard(4, 4, pages_tokens=100_000).begin()
    first = only(yard.submit("a", 20_000, hit=0, session="s"))
    for node in yard.nodes:
        yard.node(node, lane_bytes_per_s=SNIC)
    yard.finish(first)
    yard.busy = {first.prefill_engine: 300}
    yard.pull()
    again = only(yard.submit("b", 21_000, hit=20_000, session="s"))
    assert (again.prefill_engine, again.explain.rules[0]) == (first.prefill_engine, "affinity")
    assert again.explain.rules[2] == "pooled"


def test_unless_told_no_engine_is_believed_to_keep_pages_only_the_decode_nodes_pool_is() -> None:
    yard = Yard(4, 4).begin()
    for node in yard.nodes:
        yard.node(node, lane_bytes_per_s=10 * SNIC)
    yard.pull()
    first = only(yard.submit("a", 20_000, hit=0, session="s"))
    yard.finish(first)
    yard.busy = {first.prefill_engine: 300}
    yard.pull()
    again = only(yard.submit("b", 21_000, hit=20_000, session="s"))
    assert again.prefill_engine != first.prefill_engine
    assert (again.decode_node, again.explain.rules) == (first.decode_node, ("soonest", "affinity", "pooled"))


def test_a_sessions_engine_that_is_busy_for_longer_than_a_read_is_left() -> None:
    yard = Yard(4, 4).begin()
    first = only(yard.submit("a", 20_000, hit=0, session="s"))
    yard.finish(first)
    yard.busy = {first.prefill_engine: 10_000}
    yard.pull()
    assert only(yard.submit("b", 21_000, hit=20_000, session="s")).prefill_engine != first.prefill_engine


@pytest.mark.parametrize("ends", ["by time", "by others' tokens", "by loss", "by limit"])
def test_what_a_session_left_is_not_believed_for_ever(ends: str) -> None:
    yard = Yard(1, 1, session_ns=5_000 * MS, sessions_max=2).begin()
    yard.finish(only(yard.submit("a", 20_000, hit=0, session="s")))
    if ends == "by time":
        yard.now_ns += 6_000 * MS
    elif ends == "by others' tokens":
        yard.submit("x", ROOM - 10_000, hit=0)
        yard.pull()
        yard.finish(yard.assigned[-1])
    elif ends == "by loss":
        for name in ("p0", "d0"):
            yard.cluster.lose_group(name, yard.now_ns)
        yard.heard.clear()
    else:
        for name in ("t", "u"):
            yard.finish(only(yard.submit(name, 100, hit=0, session=name)))
    yard.begin()
    yard.now_ns += 100 * MS
    again = only(yard.submit("b", 21_000, hit=20_000, session="s"))
    assert "affinity" not in again.explain.rules and again.explain.path.hit_bytes == 20_000 * KV


def test_a_decode_node_without_room_in_its_buffer_is_no_candidate() -> None:
    yard = Yard(1, 2).begin()
    yard.node("d0", buffer_free_bytes=5_000 * KV)
    yard.pull()
    assert [only(yard.submit(f"r{n}", 6_000)).decode_node for n in range(3)] == ["d1"] * 3


def test_what_is_given_at_once_takes_its_room_before_any_report() -> None:
    yard = Yard(4, 1).begin()
    yard.node("d0", buffer_free_bytes=15_000 * KV)
    yard.pull()
    assert [yard.submit(f"r{n}", 6_000) is not None for n in range(3)] == [True, True, False]


def test_room_in_the_buffer_is_free_again_when_the_prefill_is_done() -> None:
    yard = Yard(4, 1).begin()
    for node in ("d0",):
        yard.node(node, buffer_bytes=10_000 * KV, buffer_free_bytes=10_000 * KV)
    yard.pull()
    first = only(yard.submit("a", 8_000))
    assert yard.submit("b", 8_000) is None
    yard.now_ns += 300 * MS
    yard.has[first.prefill_engine].clear()
    yard.pull(first.prefill_node, done=(Done("a", 1),))
    yard.node("d0", buffer_bytes=10_000 * KV, buffer_free_bytes=10_000 * KV)
    (second,) = yard.pull()
    assert second.request_id == "b" and ("waited_for_buffer", 1) in second.explain.decode.numbers


def test_a_decode_engine_without_free_hbm_is_no_candidate() -> None:
    yard = Yard(1, 2, ranks=2)
    yard.room = {"d0/0": 500, "d0/1": 900, "d1/0": 100, "d1/1": 5_000}
    yard.begin()
    assert only(yard.submit("r", 1_000)).decode_engine == "d1/1"
    assert yard.submit("s", 4_500) is None
    yard.room = {}
    (late,) = yard.pull()
    assert late.request_id == "s" and ("waited_for_hbm", 1) in late.explain.decode.numbers


def test_a_large_request_is_passed_by_small_ones_so_often_and_no_more() -> None:
    yard = Yard(4, 1, bypass_max=10)
    yard.room = {"d0/0": 10_000}
    yard.begin()
    held = [only(yard.submit("first", 6_000, hit=0))]
    assert yard.submit("large", 9_000, hit=0) is None
    large = None
    for number in range(60):
        yard.now_ns += 100 * MS
        yard.submit(f"small{number}", 1_000, hit=0)
        held += [what for what in yard.pull() if what.request_id != "first"]
        if number % 3 == 2 and held:
            yard.finish(held.pop(0))
            held += yard.news()
        if any(what.request_id == "large" for what in yard.assigned):
            large = number
            break
    ids = [what.request_id for what in yard.assigned]
    assert large is not None and 2 <= len([name for name in ids if name.startswith("small")]) <= 12


def test_a_request_that_fits_nowhere_does_not_stand_in_the_way_and_waits_for_a_larger_engine() -> None:
    yard = Yard(1, 1, look_max=1, beta_ns=3_600_000 * MS)
    yard.room = {"d0/0": 5_000}
    yard.begin()
    assert yard.submit("huge", 8_000) is None
    assert [only(yard.submit(f"r{n}", 100)).decode_engine for n in range(3)] == ["d0/0"] * 3
    yard.room = {}
    assert [what.request_id for what in yard.pull()] == ["huge"]


def test_without_any_report_of_a_node_loads_and_what_was_given_decide() -> None:
    yard = Yard(2, 2)
    yard.busy = {"p0/0": 3_000, "d1/0": 900_000}
    yard.pull()
    what = only(yard.submit("r"))
    assert (what.prefill_engine, what.decode_engine) == ("p1/0", "d0/0")
    assert dict(what.explain.path.queues) == {"p1": -1, "d0": -1}
    many = [only(yard.submit(f"r{n}", 300)) for n in range(20)]
    assert {what.decode_node for what in many} == {"d0", "d1"} or yard.busy["d1/0"] > ROOM / 2
    assert {what.prefill_node for what in many} == {"p0", "p1"} or len(many) < 10


def test_the_choice_leaves_a_node_within_one_report_of_its_becoming_slow() -> None:
    yard = Yard(1, 2, helpers_max=0).begin()
    yard.node("d0", 0, SNIC)
    yard.node("d1", 1_000, SNIC)
    yard.pull()
    assert only(yard.submit("a", 1_000)).decode_node == "d0"
    yard.now_ns += 1_000 * MS
    yard.node("p0", 100_000)
    yard.node("d0", 1_000, SNIC // 10)
    yard.node("d1", 1_000, SNIC)
    assert only(yard.submit("b", 1_000)).decode_node == "d1"


def test_one_rate_that_is_far_too_high_is_not_believed() -> None:
    yard = Yard(1, 2).begin()
    yard.node("p0", 100_000)
    yard.node("d0", 50_000, SNIC * 10_000)
    yard.node("d1", 10_000, SNIC)
    yard.pull()
    assert only(yard.submit("a", 1_000)).decode_node == "d1"


def test_a_node_that_is_silent_though_it_reads_is_avoided() -> None:
    yard = Yard(1, 2).begin()
    yard.sequence += 1
    said = NodeReport("d0", "b", yard.sequence, Depth(1, SNIC, 900 * MS), BUFFER, BUFFER)
    yard.cluster.node_reported(said, yard.now_ns)
    yard.pull()
    assert only(yard.submit("a", 1_000)).decode_node == "d1"


@pytest.mark.parametrize(("starved", "reads"), [("p0", Path.DE), ("d0", Path.PE)])
def test_a_side_whose_lane_starves_reads_nothing(starved: str, reads: Path) -> None:
    yard = Yard(1, 1).begin()
    yard.node(starved, starved=True)
    assert only(yard.submit("r", 50_000)).read.path is reads


def test_a_slow_lane_of_the_decode_node_leaves_more_to_the_prefill_node() -> None:
    yard = Yard(1, 1).begin()
    yard.node("d0", lane_bytes_per_s=SNIC // 4)
    first, second = only(yard.submit("r", 50_000)).read.parts
    assert (first.node, second.node) == ("p0", "d0") and first.stop == pytest.approx(0.8, abs=0.001)


def test_idle_third_nodes_with_room_help_and_their_room_is_counted() -> None:
    yard = Yard(1, 4).begin()
    for node, room in (("d1", 100_000), ("d2", 10), ("d3", 100_000)):
        yard.node(node, help_free_bytes=room * KV, lane_bytes_per_s=10 * SNIC)
    yard.node("d0", lane_bytes_per_s=10 * SNIC)
    yard.pull()
    what = only(yard.submit("r", 100_000))
    assert what.explain.rules[2] == "helped" and len(what.read.parts) == 3 + (what.decode_node not in ("d1", "d3"))
    assert "d2" not in [part.node for part in what.read.parts] or what.decode_node == "d2"


def test_a_draining_node_gets_nothing() -> None:
    yard = Yard(2, 2).begin()
    yard.node("p0", draining=True)
    yard.node("d1", draining=True)
    what = [only(yard.submit(f"r{n}", 100)) for n in range(6)]
    assert {(each.prefill_node, each.decode_node) for each in what} == {("p1", "d0")}


def test_decode_engines_far_above_the_mean_are_avoided() -> None:
    yard = Yard(1, 3)
    yard.busy = {"d0/0": 700_000, "d1/0": 100_000, "d2/0": 100_000}
    yard.begin()
    yard.node("d1", 300_000)
    yard.node("d2", 300_000)
    yard.pull()
    assert only(yard.submit("r", 1_000, hit=0)).decode_node in ("d1", "d2")


def test_choose_path_gives_the_same_plan_for_two_given_nodes() -> None:
    yard = Yard(1, 1).begin()
    read, why = yard.cluster.choose_path("m", "p0", "d0", 10_000, yard.now_ns)
    assert read.parts == (Part("p0", 0.0, 0.5), Part("d0", 0.5, 1.0)) and why.rule == "split"
    again, _ = yard.cluster.choose_path("m", "p0", "d0", 10, yard.now_ns)
    assert again.path is Path.DE
    alone, _ = yard.cluster.choose_path("m", "p0", "p0", 10_000, yard.now_ns)
    assert alone.path is Path.DE


def test_requests_of_an_engine_that_is_lost_are_given_to_others_first() -> None:
    yard = Yard(2, 1).begin()
    lost = only(yard.submit("r", 1_000))
    yard.cluster.lose_group(lost.prefill_node, yard.now_ns)
    yard.nodes.remove(lost.prefill_node)
    (again,) = yard.pull()
    assert again.request_id == "r" and again.attempt > lost.attempt and again.prefill_engine != lost.prefill_engine


def test_one_call_gives_out_so_many_and_the_next_ones_the_rest() -> None:
    """The scheduler's other callers wait meanwhile."""
    yard = Yard(2, 1, beta_ns=3_600_000 * MS)
    for number in range(1_200):
        yard.submit(f"r{number}", 10)
    yard.pull("d0")
    counts = [len(yard.pull("p0")) for _ in range(4)]
    assert counts == [512, 512, 176, 0]


def test_nodes_that_come_and_go_without_engines_are_forgotten() -> None:
    yard = Yard(1, 1).begin()
    rates = yard.cluster._books["m"].policy._rates  # type: ignore[attr-defined]
    for number in range(500):
        name = f"n{number}"
        yard.node(name)
        yard.cluster.choose_path("m", "p0", name, 10_000, yard.now_ns)
        yard.cluster.lose_node(name, yard.now_ns)
    assert len(rates) < 100
