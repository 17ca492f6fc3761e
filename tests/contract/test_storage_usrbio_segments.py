"""Segments read through rings of 3FS: the segment store's own suite over them, and what lasting descriptors need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import test_segment_store
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots
from test_segment_store import PAYLOAD, RECORDS, SMALL, SPACE, Node, read_at, stored
from usrbio_kit import PIECE_BYTES, Shim, compile_shim, mounted, shared_arena

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.usrbio import UsrbioStorage
from kvmoverd.adapters.storage.usrbio_library import Library
from kvmoverd.adapters.storage.usrbio_rings import UsrbioRings
from kvmoverd.core.status import Reason

globals().update({name: value for name, value in vars(test_segment_store).items() if name.startswith("test_")})


class UsrbioNode(Node):
    def __init__(self, shim: Shim, root: Path, arena: Arena) -> None:
        self.store = open_segment_store(root, node="node-0", boot_id="0001", settings=SMALL)
        rings = UsrbioRings(Library(shim.path), arena, root, PIECE_BYTES, depth=OPS_MAX // 2)
        self.usrbio = UsrbioStorage(self.store, rings, name="root", threads=4, ops_max=OPS_MAX)
        self.storage = self.usrbio  # type: ignore[assignment]
        self.driver = Driver(self.storage)
        self.storage.open_namespace(SPACE)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def node(shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UsrbioNode]:
    with mounted(shim, tmp_path, monkeypatch) as root, shared_arena(monkeypatch) as arena:
        node = UsrbioNode(shim, root, arena)
        yield node
        assert node.storage.close(5.0) and not node.usrbio.reads.refused


@pytest.fixture
def slots(node: UsrbioNode) -> Slots:
    return Slots(UNEVEN, 8)


def test_each_segment_is_registered_once_for_all_its_reads(shim: Shim, node: UsrbioNode, slots: Slots) -> None:
    written = [stored(node, slots) for _ in range(RECORDS + 2)]
    for _ in range(3):
        for key, place in written:
            assert read_at(node, key, slots, place).reason is Reason.OK
            assert slots.payload(1) == PAYLOAD
    assert len({place.segment for _, place in written}) == 2 == shim.count("registered")
    assert shim.count("reads") == 3 * len(written)


def test_a_segment_that_goes_is_taken_out_of_the_library_first(shim: Shim, node: UsrbioNode, slots: Slots) -> None:
    key, place = stored(node, slots)
    assert read_at(node, key, slots, place).reason is Reason.OK and shim.count("registered") == 1
    node.store.files.drop(place.author, [place.segment])
    assert shim.count("registered") == 0
    assert read_at(node, key, slots, place).reason is Reason.OK and shim.count("registered") == 1
