"""Options of the whole suite."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): set below; one worker runs all tests of a group")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write scenarios/*.txt anew, to be reviewed as a diff")


REAL_PARTS = ("test_rpc_", "test_client_", "test_companion")
"""Unit tests by their place, but over real sockets and servers."""
WHOLE_MACHINE = ("e2e", "faults", "netns", "test_storage_usrbio", "test_segment_sharing_model")
"""Directories and files with tests that look at, or leave for a while, what all processes see: /dev/shm, ports, daemons."""

LEFT_OUT = tuple(TESTS / name for name in ("contract", "e2e", "netns", "rdma_vm", "verbs"))
"""Where every test has a marker that the default options leave out."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What the default options leave out is not read, unless it was named: that takes longer than many tests."""
    if not {"not contract", "not e2e", "not rdma"} <= set(config.option.markexpr.split(" and ")):
        return None
    is_left_out = collection_path in LEFT_OUT or collection_path.name.startswith(REAL_PARTS)
    named = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return True if is_left_out and not any(path.is_relative_to(collection_path) for path in named) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Contract suites and servers are marked by where they stand, so that none can forget it.

    With `-n 2` files run side by side, but those of the whole machine one after another.
    """
    for item in items:
        place = item.path.parent.name
        if place == "contract" or item.path.name.startswith(REAL_PARTS):
            item.add_marker(pytest.mark.contract)
        is_alone = place in WHOLE_MACHINE or item.path.name.startswith(WHOLE_MACHINE)
        item.add_marker(pytest.mark.xdist_group("machine" if is_alone else item.path.stem))


def pytest_collection_finish() -> None:
    """What was made until here stays to the end: who collects garbage need not look at it, some ten times 0.4 s."""
    gc.collect()
    gc.freeze()
