"""Who reads what of one request: sides, helpers, what lies in pools, lanes that starve."""

from __future__ import annotations

import pytest

from kvmoverd.core.levelling import RATE_ASSUMED_BYTES_PER_S
from kvmoverd.core.runs import NO_RUNS, Runs
from kvmoverd.core.shares import Depth, ReadPlan
from kvmoverd.core.split import SPANS_MAX, Reader, decide, share_of_prefill

BLOCK = 1_000_000
RATE = 1_000_000_000
"""A block a millisecond."""
FLOOR_S = 0.002


def reader(
    node: str, queue_blocks: int = 0, rate: int = RATE, pooled: Runs = NO_RUNS, *, starved: bool = False
) -> Reader:
    return Reader(node, Depth(queue_blocks * BLOCK, rate), pooled, starved)


def plan(
    blocks: int | Runs,
    prefill: Reader | None = None,
    decode: Reader | None = None,
    *helpers: Reader,
    floor_s: float = FLOOR_S,
    to_decode: bool = False,
) -> ReadPlan:
    return decide(
        blocks=Runs.of((0, blocks)) if isinstance(blocks, int) else blocks,
        block_bytes=BLOCK,
        prefill=prefill or reader("p"),
        decode=decode or reader("d"),
        helpers=helpers,
        floor_s=floor_s,
        starved_to_decode=to_decode,
    )


def spans(found: ReadPlan) -> dict[str, tuple[tuple[int, int], ...]]:
    return {share.node: share.blocks.spans for share in found.shares}


def counts(found: ReadPlan) -> dict[str, int]:
    return {share.node: share.blocks.count for share in found.shares}


def test_two_idle_nodes_read_half_each_the_prefill_node_the_head() -> None:
    found = plan(500)
    assert spans(found) == {"p": ((0, 250),), "d": ((250, 500),)}
    assert [share.node for share in found.shares] == ["p", "d"] and found.why == "split"


def test_an_odd_block_goes_to_the_decode_side() -> None:
    assert counts(plan(501)) == {"p": 250, "d": 251}


@pytest.mark.parametrize(
    ("ahead_p", "ahead_d", "read_by_p"), [(0, 100, 300), (100, 0, 200), (50, 150, 300), (40, 40, 250)]
)
def test_both_sides_end_together_whatever_is_ahead_of_them(ahead_p: int, ahead_d: int, read_by_p: int) -> None:
    assert counts(plan(500, reader("p", ahead_p), reader("d", ahead_d))) == {"p": read_by_p, "d": 500 - read_by_p}


def test_the_faster_side_reads_more() -> None:
    assert counts(plan(400, reader("p", rate=3 * RATE), reader("d"))) == {"p": 300, "d": 100}


def test_the_share_is_that_of_the_formula_clipped() -> None:
    assert share_of_prefill(queue_p=0, queue_d=0, rate_p=1, rate_d=3, size=100) == 0.25
    assert share_of_prefill(queue_p=0, queue_d=500, rate_p=1, rate_d=1, size=100) == 1.0
    assert share_of_prefill(queue_p=500, queue_d=0, rate_p=1, rate_d=1, size=100) == 0.0
    assert share_of_prefill(queue_p=30, queue_d=10, rate_p=2, rate_d=2, size=100) == 0.4


def test_a_rate_that_is_not_known_is_the_fastest_known_one() -> None:
    assert share_of_prefill(queue_p=0, queue_d=0, rate_p=0, rate_d=7, size=100) == 0.5
    assert counts(plan(300, reader("p", rate=0), reader("d", rate=2 * RATE), reader("h", rate=RATE // 10**6))) == {
        "p": 150,
        "d": 150,
    }


def test_without_any_known_rate_all_are_equal_and_only_large_requests_are_split() -> None:
    unknown = reader("p", rate=0), reader("d", rate=0)
    enough = int(2 * FLOOR_S * RATE_ASSUMED_BYTES_PER_S / BLOCK)
    assert counts(plan(3 * enough, *unknown)) == {"p": 3 * enough // 2, "d": 3 * enough - 3 * enough // 2}
    assert counts(plan(enough // 2, *unknown)) == {"d": enough // 2}


def test_no_bytes_go_to_the_side_that_is_free_sooner() -> None:
    assert share_of_prefill(queue_p=1, queue_d=2, rate_p=1, rate_d=1, size=0) == 1.0
    assert share_of_prefill(queue_p=2, queue_d=2, rate_p=1, rate_d=1, size=0) == 0.0


def test_what_a_split_gains_has_to_exceed_the_floor() -> None:
    """Halves of n blocks end n / 2 ms sooner than all of them."""
    assert counts(plan(4)) == {"d": 4}
    assert counts(plan(6)) == {"p": 3, "d": 3}
    assert counts(plan(4, floor_s=0.0019)) == {"p": 2, "d": 2}


def test_below_the_floor_the_shorter_queue_reads_all_and_on_ties_the_decode_side() -> None:
    assert counts(plan(3)) == {"d": 3}
    assert counts(plan(3, reader("p", 5), reader("d", 7))) == {"p": 3}
    assert counts(plan(3, reader("p", 7), reader("d", 5))) == {"d": 3}
    assert plan(3, reader("p", 5), reader("d", 7)).why == "prefill"
    assert plan(3).why == "decode"


def test_queues_count_by_time_and_not_by_bytes() -> None:
    assert counts(plan(2, reader("p", 20, rate=10 * RATE), reader("d", 4))) == {"p": 2}


def test_rates_that_differ_by_a_hair_are_a_tie() -> None:
    assert counts(plan(2, reader("p", rate=RATE + RATE // 100), reader("d"))) == {"d": 2}


def test_a_single_block_is_never_split() -> None:
    assert counts(plan(1, floor_s=0.0)) == {"d": 1}
    assert counts(plan(1, decode=reader("d", 9), floor_s=0.0)) == {"p": 1}


def test_two_idle_helpers_make_it_four_times_as_fast_in_runs_between_the_sides() -> None:
    found = plan(500, None, None, reader("h1"), reader("h2"))
    assert spans(found) == {"p": ((0, 125),), "h1": ((125, 250),), "h2": ((250, 375),), "d": ((375, 500),)}
    assert [share.node for share in found.shares] == ["p", "h1", "h2", "d"] and found.why == "helped"


def test_a_helper_that_gains_less_than_the_floor_is_left_alone() -> None:
    """From halves to thirds is n / 6 ms."""
    assert counts(plan(11, None, None, reader("h"))) == {"p": 5, "d": 6}
    assert counts(plan(15, None, None, reader("h"))) == {"p": 5, "h": 5, "d": 5}
    assert counts(plan(500, None, None, reader("h", 249))) == {"p": 250, "d": 250}


def test_the_helpers_that_help_most_come_first_and_no_more_than_gain_the_floor() -> None:
    helpers = [reader(f"h{index}", queue) for index, queue in enumerate((30, 0, 20, 0, 10))]
    assert counts(plan(40, None, None, *helpers)) == {"p": 10, "h1": 10, "h3": 10, "d": 10}


def test_a_busy_side_leaves_its_part_to_a_helper() -> None:
    assert counts(plan(100, reader("p", 1000), None, reader("h"))) == {"h": 50, "d": 50}


def test_helpers_that_are_the_request_s_own_nodes_are_no_third_ones() -> None:
    assert counts(plan(500, None, None, reader("p"), reader("d"))) == {"p": 250, "d": 250}


def test_blocks_in_a_pool_are_their_node_s_and_cost_no_queue() -> None:
    found = plan(500, None, reader("d", pooled=Runs.of((0, 100))))
    assert spans(found) == {"p": ((100, 300),), "d": ((0, 100), (300, 500))}


def test_a_block_in_several_pools_is_the_decode_node_s_then_the_prefill_node_s_then_a_helper_s() -> None:
    found = plan(
        100,
        reader("p", pooled=Runs.of((20, 60))),
        reader("d", pooled=Runs.of((0, 40))),
        reader("h", pooled=Runs.of((50, 100))),
    )
    assert spans(found) == {"d": ((0, 40),), "p": ((40, 60),), "h": ((60, 100),)}
    assert found.why == "pooled"


def test_what_lies_in_a_pool_beside_the_request_s_blocks_is_not_looked_at() -> None:
    found = plan(
        Runs.of((10, 20), (30, 40)),
        reader("p", pooled=Runs.of((0, 12))),
        reader("d", pooled=Runs.of((18, 32), (50, 60))),
    )
    assert spans(found) == {"p": ((10, 18), (32, 33)), "d": ((18, 20), (30, 32), (33, 40))}


def test_nothing_to_read_is_nobody_s() -> None:
    assert plan(0).shares == () and plan(0).why == "pooled"


def test_a_part_has_few_spans_however_pools_are_speckled() -> None:
    speckled = Runs.of(*((block, block + 1) for block in range(0, 900, 2)), (900, 1000))
    found = plan(1000, None, reader("d", pooled=speckled), reader("h"))
    assert max(len(share.blocks.spans) for share in found.shares) <= SPANS_MAX
    assert Runs.union(share.blocks for share in found.shares) == Runs.of((0, 1000))
    assert all(block in found.shares[-1].blocks for block in range(900, 1000)), "the longest run stays its node's"


def test_a_side_whose_lane_starves_reads_nothing() -> None:
    assert counts(plan(500, None, reader("d", starved=True))) == {"p": 500}
    assert counts(plan(500, None, None, reader("h", starved=True))) == {"p": 250, "d": 250}


def test_with_a_starved_lane_to_the_decode_node_the_prefill_node_reads_nothing() -> None:
    assert counts(plan(500, to_decode=True)) == {"d": 500}
    assert counts(plan(500, None, None, reader("h"), to_decode=True)) == {"h": 250, "d": 250}


def test_where_all_lanes_starve_all_read() -> None:
    assert counts(plan(500, None, reader("d", starved=True), to_decode=True)) == {"p": 250, "d": 250}


def test_where_both_sides_starve_a_helper_reads_alone() -> None:
    found = plan(500, None, reader("d", starved=True), reader("h", 7), reader("g", 8), to_decode=True)
    assert counts(found) == {"h": 250, "g": 250} or counts(found) == {"h": 251, "g": 249}
    assert counts(plan(500, None, reader("d", starved=True), reader("h"), to_decode=True)) == {"h": 500}


def test_what_lies_in_a_starved_node_s_pool_and_in_another_s_is_the_other_s() -> None:
    both = Runs.of((0, 100))
    assert counts(plan(100, reader("p", pooled=both), reader("d", pooled=both, starved=True))) == {"p": 100}
    assert counts(plan(100, None, reader("d", pooled=both, starved=True))) == {"d": 100}


def test_without_a_decode_node_the_prefill_node_and_helpers_read() -> None:
    def alone(*helpers: Reader) -> ReadPlan:
        return decide(
            blocks=Runs.of((4, 104)),
            block_bytes=BLOCK,
            prefill=reader("p"),
            decode=None,
            helpers=helpers,
            floor_s=FLOOR_S,
            starved_to_decode=True,
        )

    assert spans(alone()) == {"p": ((4, 104),)} and alone().why == "prefill"
    assert spans(alone(reader("h"))) == {"p": ((4, 54),), "h": ((54, 104),)}


def test_prefill_and_decode_on_one_node_are_one_reader() -> None:
    one = reader("n", pooled=Runs.of((0, 10)))
    assert spans(plan(500, one, one)) == {"n": ((0, 500),)}
    assert spans(plan(500, one, one, reader("h"))) == {"h": ((10, 255),), "n": ((0, 10), (255, 500))}
    assert plan(500, one, one).why == "decode"
