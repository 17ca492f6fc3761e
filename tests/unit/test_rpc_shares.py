"""Who reads what, in words between nodes: what goes out comes in again, and what no honest node says is refused."""

from __future__ import annotations

import random

import pytest

from kvmover_proto import common_pb2, node_pb2
from kvmoverd.core.errors import BadPlan, BadRequest, KvmoverError
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share
from kvmoverd.node.peer import Helped, SplitFacts
from kvmoverd.rpc import shares


def runs(first: list[int], count: list[int]) -> common_pb2.BlockRuns:
    return common_pb2.BlockRuns(first=first, count=count)


def part(node: str, first: int, count: int) -> common_pb2.PlannedPart:
    return common_pb2.PlannedPart(node=node, blocks=runs([first], [count]))


def some_runs(chance: random.Random, blocks: int) -> Runs:
    edges = sorted(chance.sample(range(blocks + 1), 2 * chance.randrange(1, 6)))
    return Runs.of(*zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_runs_come_in_as_they_went_out(seed: int) -> None:
    blocks = some_runs(random.Random(seed), 500)
    sent = common_pb2.BlockRuns.FromString(shares.runs_message(blocks).SerializeToString())
    assert shares.runs_from(sent, blocks_max=500) == blocks


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (runs([0, 4], [2]), "2 runs of blocks with 1 counts"),
        (runs([0], [0]), "a run of 0 blocks from 0"),
        (runs([4, 0], [2, 2]), "a run of 2 blocks from 0 follows one that ends at 6"),
        (runs([0, 1], [2, 2]), "a run of 2 blocks from 1 follows one that ends at 2"),
        (runs([0], [11]), "a run of blocks ends at 11, 10 are to be read"),
        (runs([(1 << 32) - 1], [(1 << 32) - 1]), "a run of blocks ends at 8589934590"),
        (runs([2 * run for run in range(4097)], [1] * 4097), "4097 runs of blocks"),
    ],
)
def test_runs_that_no_node_says_are_refused(message: common_pb2.BlockRuns, words: str) -> None:
    with pytest.raises(BadPlan, match=words):
        shares.runs_from(message, blocks_max=10)


def test_as_many_runs_as_are_allowed_are_taken() -> None:
    message = runs([2 * run for run in range(shares.RUNS_MAX)], [1] * shares.RUNS_MAX)
    assert shares.runs_from(message, blocks_max=2 * shares.RUNS_MAX).count == shares.RUNS_MAX


def many_runs(parts: int, each: int) -> list[common_pb2.BlockRuns]:
    """Disjoint: the parts' runs stand in turn."""
    step = 2 * parts
    return [runs([2 * number + step * run for run in range(each)], [1] * each) for number in range(parts)]


@pytest.mark.parametrize("each", [shares.RUNS_MAX // 4, shares.RUNS_MAX // 4 + 1])
def test_parts_have_no_more_runs_together_than_one_may_have(each: int) -> None:
    """They are compared on the loop: a plan of 64 parts of 4,096 runs each would hold it for a quarter of a second."""
    blocks_max = 4 * shares.RUNS_MAX
    numbered = list(enumerate(many_runs(4, each)))
    planned = [common_pb2.PlannedPart(node=f"n{number}", blocks=blocks) for number, blocks in numbered]
    helped = [node_pb2.HelpedPart(node=f"n{number}", boot_id="b", blocks=blocks) for number, blocks in numbered]
    if 4 * each <= shares.RUNS_MAX:
        assert len(shares.shares_from(planned, blocks_max=blocks_max)) == 4
        assert len(shares.helped_from(helped, blocks_max=blocks_max)) == 4
        return
    with pytest.raises(BadPlan, match="4100 runs of blocks in 4 parts, at most 4096"):
        shares.shares_from(planned, blocks_max=blocks_max)
    with pytest.raises(BadPlan, match="4100 runs of blocks in 4 parts, at most 4096"):
        shares.helped_from(helped, blocks_max=blocks_max)


def test_a_plan_comes_in_as_it_went_out() -> None:
    plan = ReadPlan(
        (Share("pe", Runs.of((2, 5), (8, 9))), Share("third", Runs.of((9, 10))), Share("de", Runs.of((5, 8)))),
        held=Runs.of((0, 1)),
        why="split",
    )
    assert shares.plan_from(shares.plan_message(plan), resident_blocks=2, hit_blocks=10) == plan
    nothing = ReadPlan((), why="nothing to read")
    assert shares.plan_from(shares.plan_message(nothing), resident_blocks=3, hit_blocks=3) == nothing


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part("a", 2, 3)], "the parts lack 5 of the 8 blocks from 2 on, and have 0 others"),
        ([part("a", 0, 10)], "the parts lack 0 of the 8 blocks from 2 on, and have 2 others"),
        ([part("a", 2, 5), part("b", 6, 4)], "1 blocks are in more than one part, the first is 6"),
        ([part("a", 2, 4), part("a", 6, 4)], "a node has more than one part: a, a"),
        ([part("a", 2, 9)], "a run of blocks ends at 11"),
        ([part("a", 2, 8), common_pb2.PlannedPart(node="b")], "the part of 'b' has no blocks"),
        ([part("", 2, 8)], "a node's name has 0 characters"),
        ([part("x" * 129, 2, 8)], "a node's name has 129 characters"),
        ([part(str(number), number, 1) for number in range(65)], "65 parts are given, at most 64"),
    ],
)
def test_plans_that_read_a_block_twice_or_never_are_refused(parts: list[common_pb2.PlannedPart], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        shares.plan_from(node_pb2.ReadPlan(parts=parts), resident_blocks=2, hit_blocks=10)


def test_only_resident_blocks_are_held() -> None:
    held = node_pb2.ReadPlan(parts=[part("a", 2, 8)], held=runs([1], [2]))
    with pytest.raises(BadPlan, match="a run of blocks ends at 3, 2 are to be read"):
        shares.plan_from(held, resident_blocks=2, hit_blocks=10)


@pytest.mark.parametrize("seed", range(20))
def test_facts_come_in_as_they_went_out(seed: int) -> None:
    chance = random.Random(seed)
    facts = SplitFacts(
        prefill=Depth(chance.randrange(1 << 40), chance.randrange(1 << 40)),
        pooled=some_runs(chance, 300),
        helpers=tuple((f"node-{number}", Depth(number, 7)) for number in range(chance.randrange(4))),
        starved_to_decode=chance.random() < 0.5,
        starved_from_decode=chance.random() < 0.5,
        floor_s=0.002,
    )
    assert shares.facts_from(shares.facts_message(facts), blocks_max=300) == facts


def test_pooled_blocks_beyond_the_hits_are_nobody_s() -> None:
    facts = node_pb2.SplitFacts(pooled=b"\xff\xff")
    assert shares.facts_from(facts, blocks_max=11).pooled == Runs.of((0, 11))
    assert shares.facts_from(node_pb2.SplitFacts(), blocks_max=11).pooled == Runs()


@pytest.mark.parametrize(
    "facts",
    [
        node_pb2.SplitFacts(pooled=bytes(8193)),
        node_pb2.SplitFacts(helpers=[node_pb2.HelperDepth(node="n")] * 65),
        node_pb2.SplitFacts(helpers=[node_pb2.HelperDepth(node="")]),
        node_pb2.SplitFacts(helpers=[node_pb2.HelperDepth(node="n" * 129)]),
    ],
)
def test_facts_out_of_bounds_are_refused(facts: node_pb2.SplitFacts) -> None:
    with pytest.raises(BadRequest):
        shares.facts_from(facts, blocks_max=10)


def test_helped_parts_come_in_as_they_went_out_and_overlap_never() -> None:
    helped = [Helped("a", "boot-a", Runs.of((1, 3))), Helped("b", "boot-b", Runs.of((3, 4), (6, 7)))]
    assert shares.helped_from(shares.helped_messages(helped), blocks_max=7) == helped
    twice = [Helped("a", "boot-a", Runs.of((1, 4))), Helped("b", "boot-b", Runs.of((3, 4)))]
    for wrong, blocks_max in ((helped, 6), (twice, 7), ([helped[0]] * 65, 7)):
        with pytest.raises(KvmoverError):
            shares.helped_from(shares.helped_messages(wrong), blocks_max=blocks_max)


def test_a_depth_goes_there_and_back() -> None:
    depth = Depth(5_000_000_000, 64 << 20, 120_000_000)
    assert shares.depth_from(shares.depth_message(depth)) == depth
