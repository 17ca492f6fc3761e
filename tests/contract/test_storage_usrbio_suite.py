"""The storage port's contract over rings of 3FS: the suites of the port, with a shop of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import test_storage
import test_storage_ranges
import test_storage_rests
from storage_kit import UNEVEN, Shop, Slots
from usrbio_kit import Shim, UsrbioShop, compile_shim, mounted, shared_arena

SUITES = (test_storage, test_storage_ranges, test_storage_rests)
for suite in SUITES:
    globals().update({name: value for name, value in vars(suite).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def shop(request: pytest.FixtureRequest, shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    module = next(suite for suite in SUITES if suite.__name__ == request.function.__module__)
    with mounted(shim, tmp_path, monkeypatch) as root, shared_arena(monkeypatch) as arena:
        shop = UsrbioShop(shim, root, arena)
        shop.storage.open_namespace(module.SPACE)
        yield shop
        assert shop.storage.close(5.0)
        assert not shop.usrbio.reads.refused and not shop.usrbio.reads.poisoned


@pytest.fixture
def slots(request: pytest.FixtureRequest, shop: Shop) -> Slots:
    if request.function.__module__ in (test_storage_ranges.__name__, test_storage_rests.__name__):
        return Slots(test_storage_ranges.LAYOUT, 2)
    return Slots(UNEVEN, 8)
