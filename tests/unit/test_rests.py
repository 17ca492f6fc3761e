"""Which rectangle of blocks and layers a reader gives: as much as it can, and nothing that is begun."""

from __future__ import annotations

import random

import pytest

from kvmoverd.core.layout import Layout
from kvmoverd.core.rests import choose_rest

LAYOUT = Layout.uniform(layers=8, tokens=1, token_bytes=100)


def test_of_blocks_read_one_range_after_the_other_those_are_given_whose_next_range_has_not_begun() -> None:
    begun = [6] * 5 + [2] * 7
    assert choose_rest(begun.__getitem__, 12, 0, LAYOUT) == (5, 2)
    assert choose_rest(begun.__getitem__, 12, 8, LAYOUT) == (8, 2), "no more than was asked for"


def test_a_last_block_that_came_early_does_not_keep_the_others_from_being_given() -> None:
    begun = [2] * 11 + [4]
    assert choose_rest(begun.__getitem__, 12, 3, LAYOUT) == (3, 4)


def test_few_blocks_with_many_layers_are_given_where_that_is_more() -> None:
    assert choose_rest([7, 7, 1, 1].__getitem__, 4, 0, LAYOUT) == (2, 1)
    assert choose_rest([2, 2, 2, 1].__getitem__, 4, 0, LAYOUT) == (0, 2)


@pytest.mark.parametrize("begun", [[8, 8], [1, 8], [0, 0], []])
def test_nothing_is_given_when_the_last_block_is_begun_to_the_end_or_not_at_all(begun: list[int]) -> None:
    assert choose_rest(begun.__getitem__, len(begun), 0, LAYOUT) == (len(begun), 0)


def test_whoever_keeps_all_gives_nothing() -> None:
    assert choose_rest([1, 1].__getitem__, 2, 2, LAYOUT) == (2, 0)
    assert choose_rest([1, 1].__getitem__, 2, 9, LAYOUT) == (2, 0)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_rectangle_has_more_bytes(seed: int) -> None:
    chance = random.Random(seed)
    layout = Layout(1, tuple((chance.randint(1, 50),) for _ in range(6)))
    for _ in range(50):
        begun = [chance.randint(0, 6) for _ in range(chance.randint(1, 8))]
        asked = chance.randint(0, len(begun))
        kept, first_layer = choose_rest(begun.__getitem__, len(begun), asked, layout)

        def given_bytes(kept: int, first_layer: int, blocks: int = len(begun)) -> int:
            left = layout.block_bytes - layout.layer_offsets[first_layer] if first_layer else 0
            return (blocks - kept) * left

        fitting = [
            given_bytes(at, layer)
            for at in range(asked, len(begun))
            for layer in range(1, 6)
            if 0 < max(begun[at:]) <= layer
        ]
        assert given_bytes(kept, first_layer) == max(fitting, default=0)
        if first_layer:
            assert asked <= kept and max(begun[kept:]) <= first_layer
