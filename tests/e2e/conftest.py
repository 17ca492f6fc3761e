"""Every test here starts real daemons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, running


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """A prefill and a decode node, TCP between them."""
    with running() as cluster:
        yield cluster


@pytest.fixture
def single() -> Iterator[Cluster]:
    """One node."""
    with running(nodes=1) as cluster:
        yield cluster
