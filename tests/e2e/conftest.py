"""Every test here starts real daemons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, running


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A prefill and a decode node, with the transport of the parameter, or TCP, between them."""
    with running(transport=getattr(request, "param", "tcp")) as cluster:
        yield cluster


@pytest.fixture
def single() -> Iterator[Cluster]:
    """One node."""
    with running(nodes=1) as cluster:
        yield cluster
