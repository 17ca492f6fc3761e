"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write scenarios/*.txt anew, to be reviewed as a diff")


REAL_PARTS = ("test_rpc_", "test_client_", "test_companion")
"""Unit tests by their place, but over real sockets and servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Contract suites and servers are marked by where they stand, so that none can forget it."""
    for item in items:
        if item.path.parent.name == "contract" or item.path.name.startswith(REAL_PARTS):
            item.add_marker(pytest.mark.contract)
