"""What a request knows of the blocks it reads."""

from __future__ import annotations

from random import Random

from kvmoverd.core.machines.reads import BlockReads
from kvmoverd.core.status import Reason

LAYERS = 4


def test_blocks_that_are_given_up_leave_the_books_as_if_they_had_never_been_asked_for() -> None:
    for seed in range(300):
        rng = Random(seed)
        blocks = rng.randint(0, 6)
        kept = rng.randint(0, blocks)
        before, after = BlockReads(blocks=blocks, layers=LAYERS), BlockReads(blocks=kept, layers=LAYERS)
        for step in range(rng.randint(0, 12)):
            if step == 6:
                before.keep(kept)
            block = rng.randrange(blocks) if blocks else 0
            if rng.random() < 0.3:
                reason = rng.choice((Reason.OK, Reason.CORRUPT))
                lost = [before.ended([(block, reason)]), after.ended([(block, reason)])]
                assert lost[0] == lost[1] or block >= kept
            else:
                told = [(block, rng.randint(0, LAYERS))]
                before.went_on(told)
                after.went_on(told)
            before.readable_layers(rng.randint(0, blocks))
        before.keep(kept)
        assert (before.unknown_blocks, before.ended_blocks, before.lost) == (
            after.unknown_blocks,
            after.ended_blocks,
            after.lost,
        ), f"seed {seed}"
        for count in range(kept + 1):
            assert before.readable_layers(count) == after.readable_layers(count), f"seed {seed}, {count} blocks"
