"""Whole daemons under a virtual clock: seeded histories with faults, thousands of them."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
from sim_history import Outcome, run_seed

SEEDS = 2000
CHUNK = 50


def told(outcome: Outcome) -> str:
    """How to see it again."""
    return f"python -m tests.sim --first {outcome.seed} --seeds 1: {outcome.faults}: {outcome.wrong[:3]}"


def run_seeds(seeds: Sequence[int]) -> tuple[list[str], Counter[str], int]:
    """What is wrong, what was planned and moved, and how many turns delivered."""
    outcomes = [run_seed(seed) for seed in seeds]
    seen = sum((outcome.seen for outcome in outcomes), Counter[str]())
    return [told(outcome) for outcome in outcomes if outcome.wrong], seen, sum(one.delivered for one in outcomes)


@pytest.mark.parametrize("seed", range(16))
def test_everyone_is_told_and_every_byte_is_right_whatever_breaks(seed: int) -> None:
    outcome = run_seed(seed)
    assert not outcome.wrong, told(outcome)


def test_a_seed_does_again_what_it_did() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first == second
    assert first.steps > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_histories_end_well() -> None:
    chunks = [range(first, first + CHUNK) for first in range(0, SEEDS, CHUNK)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as workers:
        done = list(workers.map(run_seeds, chunks))
    wrong = [text for texts, _, _ in done for text in texts]
    assert not wrong, f"{len(wrong)} of {SEEDS} histories went wrong:\n" + "\n".join(wrong[:5])
    seen = sum((seen for _, seen, _ in done), Counter[str]())
    assert sum(delivered for _, _, delivered in done) > SEEDS
    for what in ("plan split", "plan helped", "plan parts", "plan pooled", "move failed"):
        assert seen[what] > 10, f"{what} hardly ever happened: {dict(seen)}"
