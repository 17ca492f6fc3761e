"""Who reads, in whole blocks: every block is somebody's, in the prompt's order, whatever the fractions are."""

from __future__ import annotations

import random

import pytest

from kvmover_client import BadRequest, Part, PartOfRead, Path, ReadChoice, Shares, TicketState


def parts(*nodes: tuple[str, float]) -> ReadChoice:
    """Parts that end at these fractions."""
    firsts = [0.0, *(stop for _, stop in nodes)]
    return ReadChoice(
        Path.PARTS, tuple(PartOfRead(node, first, stop) for (node, stop), first in zip(nodes, firsts, strict=False))
    )


def test_a_side_or_the_nodes_read_all_of_it() -> None:
    assert ReadChoice(Path.PE).shares(0, 10) == Shares(Path.PE)
    assert ReadChoice(Path.AUTO).shares(3, 10) == Shares(Path.AUTO)


@pytest.mark.parametrize("choice", [ReadChoice(Path.DE), parts(("a", 0.5), ("b", 1.0))])
def test_where_there_is_nothing_to_read_nobody_does(choice: ReadChoice) -> None:
    assert choice.shares(4, 0) == Shares(None)


def test_parts_follow_each_other_from_the_first_block_that_is_read() -> None:
    assert parts(("a", 0.25), ("b", 1.0)).shares(10, 8) == Shares(
        Path.PARTS, (Part("a", ((10, 12),)), Part("b", ((12, 18),)))
    )


def test_left_over_blocks_go_to_the_largest_remainders_and_to_the_first_of_equals() -> None:
    thirds = parts(("a", 1 / 3), ("b", 2 / 3), ("c", 1.0))
    assert [part.blocks for part in thirds.shares(0, 4).parts] == [((0, 2),), ((2, 3),), ((3, 4),)]
    assert [part.blocks for part in parts(("a", 0.1), ("b", 1.0)).shares(0, 14).parts] == [((0, 1),), ((1, 14),)]
    assert [part.blocks for part in parts(("a", 0.12), ("b", 1.0)).shares(0, 14).parts] == [((0, 2),), ((2, 14),)]


def test_a_part_without_a_block_is_left_out() -> None:
    assert parts(("a", 0.01), ("b", 0.99), ("c", 1.0)).shares(0, 3) == Shares(Path.PARTS, (Part("b", ((0, 3),)),))


def test_a_node_has_one_part_however_often_it_is_named() -> None:
    choice = parts(("a", 0.25), ("b", 0.5), ("a", 0.75), ("a", 1.0))
    assert choice.shares(0, 8).parts == (Part("a", ((0, 2), (4, 8))), Part("b", ((2, 4),)))


def test_every_block_is_somebodys_for_any_fractions() -> None:
    chance = random.Random(7)
    for _ in range(300):
        stops = sorted(chance.random() for _ in range(chance.randrange(12)))
        choice = parts(*((f"n{chance.randrange(5)}", stop) for stop in [*stops, 1.0]))
        first, blocks = chance.randrange(100), chance.randrange(1, 200)
        shares = choice.shares(first, blocks)
        taken = [block for part in shares.parts for run in part.blocks for block in range(*run)]
        assert sorted(taken) == list(range(first, first + blocks))
        exact: dict[str, float] = {}
        for part in choice.parts:
            exact[part.node] = exact.get(part.node, 0.0) + (part.stop - part.first) * blocks
        for share in shares.parts:
            count = sum(stop - start for start, stop in share.blocks)
            assert abs(count - exact[share.node]) < len(choice.parts), "no part is more than a block off"
            assert list(share.blocks) == sorted(share.blocks)


@pytest.mark.parametrize(
    "choice",
    [
        ReadChoice(Path.PARTS),
        parts(("a", 0.5)),
        parts(("a", 1.5)),
        ReadChoice(Path.PARTS, (PartOfRead("a", 0.0, 0.4), PartOfRead("b", 0.5, 1.0))),
        ReadChoice(Path.PARTS, (PartOfRead("a", 0.1, 1.0),)),
        ReadChoice(Path.PARTS, (PartOfRead("a", 0.0, 0.6), PartOfRead("b", 0.6, 0.5), PartOfRead("c", 0.5, 1.0))),
        ReadChoice(Path.PARTS, (PartOfRead("a", 0.0, float("nan")),)),
    ],
)
def test_parts_that_do_not_follow_each_other_from_0_to_1_are_refused(choice: ReadChoice) -> None:
    with pytest.raises(BadRequest, match=r"does not follow|must end at 1"):
        choice.shares(0, 8)


def test_blocks_below_none_are_refused() -> None:
    with pytest.raises(BadRequest, match="-1 blocks from block 0 on"):
        ReadChoice(Path.PE).shares(0, -1)


def test_three_states_are_the_last_ones() -> None:
    assert {state for state in TicketState if state.is_over} == {
        TicketState.DONE,
        TicketState.FAILED,
        TicketState.WITHDRAWN,
    }
