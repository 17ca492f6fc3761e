"""What the suites of one port share: each has its own `shop`, the storage under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_kit import NEWEST, Shim, compile_shim
from cuda_region_kit import PIECE_BYTES, wait_for
from storage_kit import UNEVEN, Driver, Shop, Slots
from transport_kit import WAIT_S, End, outliving, tcp
from verbs_kit import FakeWire
from verbs_rig_kit import Rig
from verbs_town import Town

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.cuda import Gpus


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


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shim_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    home, made = tmp_path_factory.mktemp("shim"), dict[int, Path]()

    def file(version: int) -> Path:
        if version not in made:
            made[version] = compile_shim(home, version)
        return made[version]

    return file


@pytest.fixture(params=[NEWEST])
def shim(
    request: pytest.FixtureRequest,
    shim_files: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shim]:
    monkeypatch.setenv("CUDA_SHIM_DIR", str(tmp_path))
    shim = Shim(shim_files(request.param), request.param, tmp_path)
    shim.reset()
    yield shim
    shim.do(hang=0, close_hang=0, broken=0)
    wait_for(lambda: shim.count("opened") == 0)
    assert {name: shim.count(name) for name in ("pinned", "straddles", "streams", "events")} == {
        "pinned": 0,
        "straddles": 0,
        "streams": 0,
        "events": 0,
    }


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * PIECE_BYTES, PIECE_BYTES)
    arena.touch()
    yield arena
    arena.close()


@pytest.fixture
def gpus(shim: Shim, arena: Arena) -> Iterator[Gpus]:
    gpus = Gpus(arena, piece_bytes=PIECE_BYTES, load=shim.library)
    yield gpus
    shim.do(hang=0, broken=0)
    assert gpus.close(5.0)
