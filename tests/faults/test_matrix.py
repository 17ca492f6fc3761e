"""A sample of the matrix on real processes; `python -m tests.faults` runs all of it."""

from __future__ import annotations

import pytest
from fault_cells import BETWEEN_NODES, PATHS, Incident, Process, all_cells
from fault_matrix import chosen, line, report, run_cells

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SAMPLE = 32
SEED = 10


@pytest.mark.timeout(180)
async def test_a_sample_of_the_matrix_finds_no_wrong_byte_no_hang_and_no_slot_that_is_lost() -> None:
    verdicts = await run_cells(chosen("", SAMPLE, SEED, all_paths=False))
    found = report(verdicts)
    assert {name: found[name] for name in ("cells", "wrong_bytes", "hangs", "leaked_slots")} == {
        "cells": SAMPLE,
        "wrong_bytes": 0,
        "hangs": 0,
        "leaked_slots": 0,
    }, found
    assert found["failures"] == [], "\n".join(map(line, verdicts))


def test_the_sample_meets_every_process_incident_and_path() -> None:
    sample = chosen("", SAMPLE, SEED, all_paths=False)
    assert {cell.process for cell in sample} == set(Process)
    assert {cell.incident for cell in sample} == set(Incident)
    assert {cell.path for cell in sample if cell.machine in BETWEEN_NODES} == set(PATHS)
    assert any(cell.machine == "move" for cell in sample)
    assert set(sample) <= set(all_cells())
