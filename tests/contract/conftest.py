"""What the suites of one port share: each has its own `shop`, the storage under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from storage_kit import UNEVEN, Driver, Shop, Slots
from transport_kit import WAIT_S, End, outliving, tcp
from verbs_kit import FakeWire
from verbs_town import Town


@pytest.fixture(autouse=True)
def memory_outlives_devices() -> Iterator[None]:
    """Ends after all other fixtures: locals of a test are gone before its transports are closed."""
    yield
    outliving.clear()


@pytest.fixture
def driver(shop: Shop) -> Driver:
    return Driver(shop.storage)


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 8)


@pytest.fixture
def receiver() -> Iterator[End]:
    """A TCP end that others send to."""
    end = End(tcp("boot-2"))
    yield end
    assert end.transport.close(WAIT_S)


@pytest.fixture
def town() -> Iterator[Town]:
    """Nodes with fake CNICs. At its end nothing was written where a test had forbidden it."""
    with FakeWire() as wire:
        made = Town(wire)
        yield made
        wire.release()
        made.close()
        assert wire.tally.trespasses == []
