"""Whoever dies, and whenever: what was told durable is found by every node that lives, and what was told dead by none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sharing_sim import Simulation

SHM = Path("/dev/shm")


@pytest.fixture
def authors(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is some: thousands of looks at files, and what a disk does is not what is tried here."""
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="segment-sharing-", dir=SHM) as made:
        yield Path(made)


def simulate(authors: Path, seed: int, steps: int, crash: float) -> Simulation:
    simulation = Simulation(authors, seed, crash=crash)
    try:
        found = simulation.run(steps)
        assert found > 0, f"seed {seed}: nothing was left to be found"
    finally:
        simulation.close()
    return simulation


@pytest.mark.parametrize("seed", range(2))
def test_nodes_that_die_and_stand_still_at_any_step_agree_in_the_end(authors: Path, seed: int) -> None:
    simulation = simulate(authors, seed, 80, 0.006)
    assert simulation.crashes > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 109))
def test_many_more_of_them_agree_too(authors: Path, seed: int) -> None:
    simulate(authors, seed, 400, [0.001, 0.004, 0.02][seed % 3])
