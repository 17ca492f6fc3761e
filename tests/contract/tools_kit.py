"""Stores of both layouts, made by the real code, for the tools to look at."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvmoverd.adapters.storage.block_files import FileBlocks, file_blocks
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.status import Reason
from kvmoverd.core.store.log_pages import Kind, decode_page
from kvmoverd.core.store.places import PAGE_BYTES, Place, segment_name
from kvmoverd.ports.storage import BlockRead, BlockWrite, StorageDone

WAIT_S = 10.0
LAYOUT = Layout(block_tokens=16, layers=((1000,), (37,), (5000,)))
RECORD_BYTES = LAYOUT.record_bytes
RECORDS = 8
"""A segment."""
SETTINGS = SegmentSettings(segment_bytes=(1 + 3 * RECORDS) * PAGE_BYTES, log_pages=16, commit_wait_s=0.002)
FILES, SEGMENTS = "files", "segments"


def namespace(model_id: str = "model", tenant: str = "", epoch: int = 0) -> Namespace:
    return Namespace(Manifest(model_id, b"w" * 32, b"t" * 32, LAYOUT, "u8", tenant=tenant, epoch=epoch))


SPACE = namespace()


class Store:
    """One node's, open. `keys`: what was written, in order."""

    def __init__(self, root: Path, layout: str, *, node: str = "node", settings: SegmentSettings = SETTINGS) -> None:
        self.root, self.layout = root, layout
        root.mkdir(exist_ok=True)
        self.blocks: SegmentStore | FileBlocks = (
            open_segment_store(root, node=node, boot_id=os.urandom(4).hex(), settings=settings)
            if layout == SEGMENTS
            else file_blocks(root)
        )
        self.keys: list[bytes] = []
        self._memory = mmap.mmap(-1, RECORD_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def author(self) -> str:
        assert isinstance(self.blocks, SegmentStore)
        return self.blocks.appender.author.name

    def chain(self, count: int, space: Namespace = SPACE, *, parent: bytes = ROOT, depth: int = 0) -> list[bytes]:
        """Writes so many blocks, each the next one's parent."""
        self.blocks.open_namespace(space)
        keys = [os.urandom(32) for _ in range(count)]
        for at, key in enumerate(keys):
            self.write(key, space, parent=keys[at - 1] if at else parent, depth=depth + at)
        return keys

    def write(self, key: bytes, space: Namespace = SPACE, *, parent: bytes = ROOT, depth: int = 0) -> None:
        payload = np.random.default_rng(list(key)).bytes(space.layout.block_bytes)
        ctypes.memmove(self._address + HEADER_BYTES, payload, len(payload))
        ended = threading.Event()
        dones: list[StorageDone] = []

        def end(done: StorageDone) -> None:
            dones.append(done)
            ended.set()

        self.blocks.write(BlockWrite(1, space, key, parent, depth, self._address), end)
        assert ended.wait(WAIT_S), "no end"
        assert dones[0].reason is Reason.OK, dones
        self.keys.append(key)

    def read(self, key: bytes, space: Namespace = SPACE) -> Reason:
        """How a read ends; MISS where it is not there."""
        try:
            return self.blocks.read(BlockRead(1, space, key, self._address, 0, 3, None), looks=2).reason
        except FileNotFoundError:
            return Reason.MISS

    def place(self, key: bytes, space: Namespace = SPACE) -> Place:
        found = self.blocks.index.find(space.fingerprint[:16], key)  # type: ignore[union-attr]
        assert found is not None
        return found

    def path(self, key: bytes, space: Namespace = SPACE) -> tuple[Path, int]:
        """The file that holds the block, and where in it."""
        if self.layout == FILES:
            name = key.hex()
            at = self.root / "kvm1" / space.fingerprint[:16].hex() / name[:2] / name[2:4] / f"{name}.blk"
            return at, 0
        place = self.place(key, space)
        return segment_path(self.root, place), place.offset_bytes

    def close(self) -> None:
        assert self.blocks.close(WAIT_S)


def segment_path(root: Path, place: Place) -> Path:
    return root / "kvm1/authors" / place.author / "seg" / segment_name(place.segment)


@contextlib.contextmanager
def store(root: Path, layout: str, *, node: str = "node", settings: SegmentSettings = SETTINGS) -> Iterator[Store]:
    made = Store(root, layout, node=node, settings=settings)
    try:
        yield made
    finally:
        made.close()


def flip(path: Path, offset_bytes: int) -> None:
    """Turns one bit."""
    with open(path, "r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 4]))


def page_of_kind(log: Path, kind: Kind, number: int = 1) -> int:
    """Where in a log the first page of a kind lies."""
    raw = log.read_bytes()
    for at in range(len(raw) // PAGE_BYTES):
        page = decode_page(raw[at * PAGE_BYTES : (at + 1) * PAGE_BYTES], number, at)
        if page is not None and page.kind is kind:
            return at * PAGE_BYTES
    raise AssertionError(f"{log} has no page of kind {kind.name}")


def names_below(root: Path) -> dict[str, tuple[int, int]]:
    """All files with size and time: what a tool that only looks must leave as it is."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*")) if path.is_file()
    }


def same_but_leases(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> bool:
    moving: Sequence[str] = ("lease", "touch.")
    return {name: was for name, was in before.items() if not any(word in name for word in moving)} == {
        name: now for name, now in after.items() if not any(word in name for word in moving)
    }
