"""The paper's policy, rule by rule: each class, each tie, each empty case. Alpha is 300 tokens, beta 500."""

from __future__ import annotations

import pytest

from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.explain import classes
from kvmoverd.core.scheduling.requests import Assignment, Request
from kvmoverd.core.scheduling.state import Model
from kvmoverd.core.status import Path
from tests.unit.scheduling_kit import ALPHA, BETA, KV, MS, Bench, assert_sound


def prefill(loads: dict[str, tuple[int, int]], queues: dict[str, int], *prompts: int) -> tuple[Bench, list[str]]:
    """Who prefills each of the prompts after one pull of a group."""
    bench = Bench()
    for node, tokens in queues.items():
        bench.node(node, tokens)
    names = bench.submit(*prompts)
    bench.pull("p", dict(loads))
    return bench, [bench.prefill_of(name) for name in names]


def test_alpha_and_beta_are_three_seconds_of_reads_and_five_of_one_gpu_in_prompt_tokens() -> None:
    model = Model.of("v3.2", kv_bytes_per_token=40_016, snic_bytes_per_s=50e9, gpu_tokens_per_s=1.6e5)
    assert model.alpha_tokens == pytest.approx(3.75e6, rel=0.001) and model.beta_tokens == 800_000
    assert model.alpha_bytes == pytest.approx(150e9, rel=0.001)


def test_the_least_loaded_engine_gets_the_first_request_and_its_load_counts_for_the_next() -> None:
    _, chosen = prefill({"a/0": (3, 40), "a/1": (1, 10), "a/2": (2, 200)}, {"a": 0}, 100, 50, 10)
    assert chosen == ["a/1", "a/0", "a/0"]


def test_load_counts_tokens_and_not_requests() -> None:
    assert prefill({"a/0": (9, 40), "a/1": (1, 50)}, {"a": 0}, 100)[1] == ["a/0"]


def test_equal_loads_go_in_the_order_of_the_report() -> None:
    assert prefill({"a/1": (0, 7), "a/0": (0, 7)}, {"a": 0}, 1)[1] == ["a/1"]


def test_requests_go_first_come_first_served_and_all_of_a_prompt_counts_hit_or_not() -> None:
    bench = Bench()
    bench.node("a")
    first, second = *bench.submit(300, hit=299), *bench.submit(10)
    bench.pull("p", {"a/0": (0, 0), "a/1": (0, 250)})
    assert (bench.prefill_of(first), bench.prefill_of(second)) == ("a/0", "a/1")


@pytest.mark.parametrize(("load", "taken"), [(BETA, "a/0"), (BETA + 1, "")])
def test_an_engine_at_beta_is_used_and_one_above_it_never(load: int, taken: str) -> None:
    assert prefill({"a/0": (1, load)}, {"a": 0}, 5)[1] == [taken]


def test_an_engine_takes_one_that_lifts_it_over_beta_and_no_more() -> None:
    bench, chosen = prefill({"a/0": (0, 0)}, {"a": 0}, 400, 400, 400)
    assert chosen == ["a/0", "a/0", ""]
    assert bench.cluster.waiting == 3 and bench.rule_of("r3") == ("", "")


def test_one_that_lifts_it_to_beta_itself_leaves_room_for_another() -> None:
    assert prefill({"a/0": (0, 0)}, {"a": 0}, BETA, 5, 5)[1] == ["a/0", "a/0", ""]


def test_a_short_read_queue_is_preferred_to_a_lesser_load() -> None:
    bench, chosen = prefill({"a/0": (0, 0), "b/0": (4, 400)}, {"a": ALPHA + 1, "b": ALPHA}, 50, 51, 1, 1)
    assert chosen == ["b/0", "b/0", "a/0", "a/0"]
    assert [bench.rule_of(f"r{n}")[0] for n in (1, 2, 3)] == ["C2", "C2", "C3"]


def test_among_long_read_queues_the_least_load_counts() -> None:
    bench, chosen = prefill({"a/0": (0, 30), "b/0": (0, 20)}, {"a": ALPHA + 1, "b": 10 * ALPHA}, 5)
    assert chosen == ["b/0"] and bench.rule_of("r1")[0] == "C3"


def test_a_read_queue_that_nobody_reported_counts_as_too_long() -> None:
    bench, chosen = prefill({"a/0": (0, 0), "b/0": (4, 400)}, {"b": 0}, 5)
    assert chosen == ["b/0"] and bench.rule_of("r1")[0] == "C2"


def test_no_engine_below_beta_ends_it_and_the_queue_keeps_its_order() -> None:
    bench, chosen = prefill({"a/0": (9, BETA + 1), "b/0": (9, BETA + 9)}, {"a": 0, "b": ALPHA + 1}, 100, 200)
    assert chosen == ["", ""]
    bench.pull("p", {"a/0": (0, 100), "b/0": (0, 0)})
    assert (bench.prefill_of("r1"), bench.prefill_of("r2")) == ("a/0", "a/0")


def test_an_empty_queue_and_a_group_that_pulls_first_are_nothing_special() -> None:
    assert Bench().pull("p", {"a/0": (0, 0)}) == []
    assert Bench().pull("d", {"x/0": (0, 0)}) == []


def test_only_engines_of_the_group_that_pulls_are_given_prefills() -> None:
    bench = Bench()
    bench.node("a")
    bench.node("b")
    bench.pull("p1", {"a/0": (0, 0)})
    bench.submit(10)
    bench.pull("p2", {"b/0": (5, 400)})
    assert bench.prefill_of("r1") == "b/0"


def test_the_number_that_a_class_is_made_of_is_that_of_the_moment() -> None:
    """A decode engine is known before, so that the read is given out at once and shows in the next request's class."""
    bench = Bench()
    for node in ("a", "b"):
        bench.node(node)
    bench.node("x", 10_000)
    bench.submit(ALPHA + 1, hit=ALPHA + 1)
    bench.submit(10, 10)
    bench.pull("d", {"x/0": (0, 0)})
    bench.pull("p", {"a/0": (0, 0), "b/0": (0, 450)})
    # The first read makes a's queue too long: b is the only one in C2, though its load is greater.
    assert [bench.prefill_of(f"r{n}") for n in (1, 2, 3)] == ["a/0", "b/0", "b/0"]
    assert bench.cluster.explain("r2").prefill.rule == "C2"


def test_a_candidate_is_explained_by_the_read_queue_of_its_own_decision_and_not_of_the_pulls_beginning() -> None:
    bench = Bench()
    bench.node("a", ALPHA - 10)
    bench.node("x", 10 * ALPHA)
    bench.submit(50, 50, 50, hit=50)
    bench.pull("d", {"x/0": (0, 0)})
    bench.pull("p", {"a/0": (0, 0), "a/1": (0, 0)})
    whys = [bench.cluster.explain(f"r{n}").prefill for n in (1, 2, 3)]
    assert [why.rule for why in whys] == ["C2", "C3", "C3"]
    assert [classes(why) for why in whys] == [["C2", "C2"], ["C3", "C3"], ["C3", "C3"]]
    queues = [[seen.read_queue_bytes // KV for seen in why.board.at(why.step)] for why in whys]
    assert queues == [[ALPHA - 10] * 2, [ALPHA + 40] * 2, [ALPHA + 90] * 2]


# Decode: two levels.


def test_each_request_goes_to_the_group_with_the_least_load_and_that_counts_for_the_next() -> None:
    bench = Bench()
    bench.pull("d1", {"x/0": (1, 60), "x/1": (1, 60)})
    bench.pull("d2", {"y/0": (1, 50), "y/1": (1, 40)})
    bench.submit(20, 30, 40, 1)
    bench.pull("d1", {"x/0": (1, 60), "x/1": (1, 60)})
    bench.pull("d2", {"y/0": (1, 50), "y/1": (1, 40)})
    # 120 : 90 + 20 = 110, + 30 = 140; then 120 + 40 = 160; then 140 + 1.
    assert [bench.decode_of(f"r{n}")[0] for n in (1, 2, 3, 4)] == ["y", "y", "x", "y"]


def test_groups_of_equal_load_go_by_name_and_the_private_queue_counts() -> None:
    bench = Bench()
    bench.pull("d2", {"y/0": (0, 0, 0)})
    bench.pull("d1", {"x/0": (0, 0, 0)})
    bench.submit(5, 5, 5, 5)
    bench.pull("d2", {"y/0": (0, 0, 0)})
    groups = {group.name: list(group.private) for group in bench.cluster.groups()}
    assert groups == {"d1": ["r1", "r3"], "d2": ["r2", "r4"]}
    assert_sound(bench.cluster)


def decode(loads: dict[str, tuple[int, int, int]], *prompts: int) -> list[str]:
    bench = Bench()
    names = bench.submit(*prompts)
    bench.pull("d", dict(loads))
    assert_sound(bench.cluster)
    return [bench.decode_of(name) for name in names]


def test_below_the_level_the_engine_with_the_fewest_requests_is_chosen_whatever_its_tokens() -> None:
    # Z = 1.05 (10 + 62 + 60 + 300) / 3 = 151.2: two stay below it.
    assert decode({"x/0": (1, 62, 999), "x/1": (2, 60, 999), "x/2": (0, 300, 999)}, 10) == ["x/0"]


def test_an_engine_that_would_come_above_the_level_is_passed_over() -> None:
    # Z = 1.05 (10 + 100 + 20) / 2 = 68.25.
    assert decode({"x/0": (1, 100, 999), "x/1": (2, 20, 999)}, 10) == ["x/1"]


def test_the_level_itself_is_still_below() -> None:
    # Z = 1.05 (20 + 20 + 0) / 2 = 21 exactly: 1 + 20 fits, 2 + 20 does not.
    assert decode({"x/0": (0, 1, 999), "x/1": (5, 19, 999)}, 20) == ["x/0"]
    assert decode({"x/0": (0, 2, 999), "x/1": (5, 0, 999), "x/2": (0, 38, 999)}, 20) == ["x/1"]
    # Z = 1.05 (20 + 400 + 380) / 2 = 420: both are below, and the one with fewer requests has more tokens.
    assert decode({"x/0": (0, 400, 999), "x/1": (5, 380, 999)}, 20) == ["x/0"]
    assert decode({"x/0": (0, 401, 999), "x/1": (5, 379, 999)}, 20) == ["x/1"]


def test_below_the_level_equal_numbers_of_requests_go_by_tokens_and_then_by_the_report() -> None:
    busy = {"x/9": (0, 300, 999)}
    assert decode({"x/0": (1, 50, 999), "x/1": (1, 45, 999), **busy}, 10) == ["x/1"]
    assert decode({"x/1": (1, 45, 999), "x/0": (1, 45, 999), **busy}, 10) == ["x/1"]


def test_above_the_level_equal_tokens_go_by_numbers_of_requests_and_then_by_the_report() -> None:
    # Z = 1.05 (90 + 40) / 2 = 68.25: nobody is below it.
    assert decode({"x/0": (9, 20, 999), "x/1": (3, 20, 999)}, 90) == ["x/1"]
    assert decode({"x/1": (3, 20, 999), "x/0": (3, 20, 999)}, 90) == ["x/1"]


def test_with_nobody_below_the_level_the_least_tokens_of_those_with_room_are_chosen() -> None:
    # Z = 1.05 (90 + 10 + 20) / 2 = 63: nobody has room for 90 below it.
    assert decode({"x/0": (9, 10, 999), "x/1": (0, 20, 999)}, 90) == ["x/0"]
    assert decode({"x/0": (9, 10, 80), "x/1": (0, 20, 999)}, 90) == ["x/1"]


def test_the_level_is_that_of_the_longest_head_that_fits_into_all_free_memory() -> None:
    bench = Bench()
    bench.submit(50, 60, 40)
    bench.pull("d", {"x/0": (0, 0, 70), "x/1": (1, 30, 40)})
    # 50 + 60 = 110 fit, 40 more do not: Z = 1.05 (110 + 30) / 2.
    entry = next(entry for entry in bench.cluster.entries() if entry.request.request_id == "r1")
    assert entry.decode is not None
    assert dict(entry.decode.why.numbers)["z_tokens"] == pytest.approx(73.5)
    assert [bench.decode_of(f"r{n}") for n in (1, 2, 3)] == ["x/0", "", ""]


def test_no_engine_with_room_ends_it_and_nobody_overtakes() -> None:
    assert decode({"x/0": (0, 0, 60), "x/1": (0, 0, 60)}, 100, 10) == ["", ""]
    assert decode({"x/0": (0, 0, 0)}, 1) == [""]


def test_a_request_that_takes_all_memory_there_is_fits() -> None:
    assert decode({"x/0": (0, 0, 9), "x/1": (4, 40, 10)}, 10) == ["x/1"]


def test_an_engine_that_was_given_more_than_it_says_is_free_takes_nothing_from_others() -> None:
    bench = Bench()
    bench.submit(60)
    bench.pull("d", {"x/0": (0, 0, 100), "x/1": (0, 0, 0)}, hear=False)
    bench.submit(40)
    bench.pull("d", {"x/0": (0, 0, 30), "x/1": (0, 0, 40)}, hear=False)
    assert [bench.decode_of(f"r{n}") for n in (1, 2)] == ["x/0", "x/1"]


def test_what_is_given_takes_memory_at_once() -> None:
    assert decode({"x/0": (0, 0, 100), "x/1": (9, 0, 100)}, 60, 60, 60) == ["x/0", "x/1", ""]


def test_what_waits_privately_goes_to_others_when_its_group_is_lost() -> None:
    bench = Bench()
    bench.pull("d1", {"x/0": (0, 0, 0)})
    bench.submit(5, 6)
    bench.pull("d1", {"x/0": (0, 0, 0)})
    bench.cluster.lose_group("d1", bench.now_ns)
    bench.submit(7)
    bench.pull("d2", {"y/0": (0, 0)})
    assert [bench.decode_of(f"r{n}") for n in (1, 2, 3)] == ["y/0"] * 3
    assert list(next(iter(bench.cluster.groups())).engines["y/0"].live) == ["r1", "r2", "r3"]


def test_when_a_group_joins_what_waits_privately_is_dealt_anew() -> None:
    bench = Bench()
    bench.pull("d1", {"x/0": (0, 0, 0)})
    bench.submit(*[10] * 6)
    bench.pull("d1", {"x/0": (0, 0, 0)})
    bench.now_ns += 2_000 * MS
    bench.pull("d2", {"y/0": (0, 0)})
    assert [bench.decode_of(f"r{n}") for n in range(1, 7)] == ["", "y/0", "", "y/0", "", "y/0"]
    assert_sound(bench.cluster)


# Who reads.


@pytest.mark.parametrize(
    ("ahead_p", "ahead_d", "path", "rule"),
    [
        (10, 11, Path.PE, "shorter"),
        (11, 10, Path.DE, "shorter"),
        (10, 10, Path.DE, "tie"),
        (None, 10, Path.DE, "unknown"),
        (10, None, Path.PE, "unknown"),
        (None, None, Path.DE, "unknown"),
    ],
)
def test_the_side_with_the_shorter_read_queue_reads(
    ahead_p: int | None, ahead_d: int | None, path: Path, rule: str
) -> None:
    bench = Bench()
    for node, ahead in (("a", ahead_p), ("x", ahead_d)):
        if ahead is not None:
            bench.node(node, ahead)
    bench.submit(100, hit=64)
    bench.pull("d", {"x/0": (0, 0)})
    (assignment,) = bench.pull("p", {"a/0": (0, 0)})
    assert isinstance(assignment, Assignment)
    assert assignment.read.path is path and assignment.read.parts == ()
    assert assignment.explain.path.rule == rule and assignment.explain.path.hit_bytes == 64 * KV


def test_what_was_given_out_counts_until_the_node_has_had_time_to_show_it() -> None:
    bench = Bench()
    bench.node("a", 50)
    bench.node("x")
    bench.submit(100, 100, hit=100)
    bench.pull("d", {"x/0": (0, 0)})
    found = bench.pull("p", {"a/0": (0, 0)})
    assert [what.read.path for what in found if isinstance(what, Assignment)] == [Path.DE, Path.PE]
    node = bench.cluster.nodes["x"]
    assert node.queue_bytes == 100 * KV
    bench.now_ns += 100 * MS
    bench.node("x", 7)
    assert node.queue_bytes == 107 * KV
    bench.now_ns += 150 * MS
    bench.node("x", 80)
    assert node.queue_bytes == 80 * KV


def test_every_choice_says_why_with_all_candidates_as_they_were() -> None:
    bench = Bench()
    bench.node("a", ALPHA + 1)
    bench.node("b")
    bench.node("x")
    bench.submit(100, 100, hit=64)
    bench.pull("d", {"x/0": (0, 0, 150), "x/1": (1, 340, 250), "x/2": (0, 0, 20)})
    bench.pull("p", {"a/0": (0, 0), "b/0": (0, 20), "b/1": (0, BETA + 1)})
    why = bench.cluster.explain("r2")
    assert (why.policy, why.rules) == ("paper", ("C2", "least", "shorter"))
    seen = why.prefill.board.at(why.prefill.step)
    # Of the three engines b/0 was given the first request before.
    assert [(one.engine, one.tok_e) for one in seen] == [("a/0", 0), ("b/0", 120), ("b/1", BETA + 1)]
    assert classes(why.prefill) == ["C3", "C2", "C1"]
    assert classes(bench.cluster.explain("r1").decode) == ["low", "rest", "full"]
    assert classes(why.decode) == ["full", "rest", "full"]
    text, words = why.text(), why.json(candidates=True)
    assert "prefill: b/0 by C2 (tok_e 120, read_queue_bytes 0" in text and " * b/0: seq_e 1" in text
    assert words["prefill"]["candidates"][0]["class"] == "C3"  # type: ignore[index]


def test_fifteen_thousand_tokens_of_a_queue_never_meet_an_engine_above_beta() -> None:
    """In bulk: whoever was chosen was at most at beta just before."""
    cluster = Cluster([Model("m", KV, ALPHA, BETA)])
    bench = Bench()
    bench.cluster = cluster
    for number in range(300):
        cluster.submit(Request(f"q{number}", "m", 1 + number * 37 % 90), bench.now_ns)
    bench.pull("p", {f"a/{n}": (0, n * 61 % 700) for n in range(24)})
    seen = 0
    for entry in cluster.entries():
        if entry.prefill is not None:
            assert dict(entry.prefill.why.numbers)["tok_e"] <= BETA
            seen += 1
    assert 0 < seen < 300
