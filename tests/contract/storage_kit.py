"""What the storage tests share: one shop per adapter, slots of real memory, and ops run to their completions."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.file_storage import FileStorage
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_root import RootSettings
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.adapters.storage.throttled import ThrottledStorage
from kvmoverd.adapters.storage.uring_probe import uring_refusal
from kvmoverd.core.keys import ROOT
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.manifest import Manifest, Namespace
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place, segment_name
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, Storage, StorageDone, StorageOp

if TYPE_CHECKING:
    from kvmoverd.adapters.storage.uring import UringStorage
    from kvmoverd.adapters.storage.uring_ring import Ring

WAIT_S = 10.0
OPS_MAX = 64
UNEVEN = Layout(block_tokens=16, layers=((1000,), (37,), (656 * 64,)))
"""Sizes that are multiples of nothing."""
SMALL_SEGMENTS = SegmentSettings(segment_bytes=4 << 20, log_pages=64)
WHOLE = range(0)
"""All layers of a block, as a read has it."""


def namespace(layout: Layout = UNEVEN, *, model_id: str = "model", epoch: int = 0) -> Namespace:
    manifest = Manifest(
        model_id=model_id,
        weights_digest=b"w" * 32,
        tokenizer_digest=b"t" * 32,
        layout=layout,
        dtype="fp8_e4m3",
        epoch=epoch,
    )
    return Namespace(manifest)


class Slots:
    """Page-aligned memory for `count` records, each filled with the given byte."""

    def __init__(self, layout: Layout, count: int) -> None:
        self.layout = layout
        self._map = mmap.mmap(-1, layout.record_bytes * count)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def address(self, slot: int) -> int:
        return self._base + slot * self.layout.record_bytes

    def fill(self, slot: int, payload: bytes) -> int:
        """Puts a payload into a slot whose every other byte is 0xAA; gives the slot's address."""
        ctypes.memset(self.address(slot), 0xAA, self.layout.record_bytes)
        ctypes.memmove(self.address(slot) + HEADER_BYTES, payload, len(payload))
        return self.address(slot)

    def record(self, slot: int) -> bytes:
        return ctypes.string_at(self.address(slot), self.layout.record_bytes)

    def payload(self, slot: int) -> bytes:
        return ctypes.string_at(self.address(slot) + HEADER_BYTES, self.layout.block_bytes)


class Shop(Protocol):
    """An adapter under test and the way around it, to the stored bytes.

    `by_name`: a record is a thing of its own, under its key's name: it may be of a wrong size, and be replaced in its place.
    """

    by_name: bool

    @property
    def storage(self) -> Storage: ...

    def stored(self, namespace: Namespace, key: bytes) -> bytes | None: ...

    def tamper(self, namespace: Namespace, key: bytes, record: bytes | None) -> None:
        """Replaces the stored bytes; None: the record goes away."""

    def lose(self, namespace: Namespace, key: bytes) -> None:
        """The record is not found any more, and may be written anew."""


def needs_names(shop: Shop) -> None:
    """Skips what only a record under a name of its own can be."""
    if not shop.by_name:
        pytest.skip("a record in a segment has neither a name nor a size of its own: see test_segment_store.py")


class MemoryShop:
    by_name = True

    def __init__(self) -> None:
        self.storage = MemoryStorage("memory")

    def stored(self, namespace: Namespace, key: bytes) -> bytes | None:
        return self.storage.stored(namespace, key)

    def tamper(self, namespace: Namespace, key: bytes, record: bytes | None) -> None:
        self.storage.tamper(namespace, key, record)

    def lose(self, namespace: Namespace, key: bytes) -> None:
        self.tamper(namespace, key, None)


class FileShop:
    by_name = True

    def __init__(self, root: Path, *, direct: bool, make: Callable[..., FileStorage] | None = None) -> None:
        self.root = root
        self.storage = (make or threads_storage)(root, direct=direct)

    def path(self, namespace: Namespace, key: bytes) -> Path:
        name = key.hex()
        return self.root / "kvm1" / namespace.fingerprint[:16].hex() / name[:2] / name[2:4] / f"{name}.blk"

    def stored(self, namespace: Namespace, key: bytes) -> bytes | None:
        path = self.path(namespace, key)
        return path.read_bytes() if path.exists() else None

    def tamper(self, namespace: Namespace, key: bytes, record: bytes | None) -> None:
        path = self.path(namespace, key)
        if record is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)

    def lose(self, namespace: Namespace, key: bytes) -> None:
        self.tamper(namespace, key, None)


class SegmentShop:
    """Segments of a few records, behind threads or a ring. A record that is cut is the last one of its segment then."""

    by_name = False

    def __init__(self, root: Path, *, make: Callable[[Blocks], FileStorage]) -> None:
        self.root = root
        self.store = open_segment_store(root, node="node", boot_id="boot", settings=SMALL_SEGMENTS)
        self.storage = make(self.store)

    def path(self, place: Place) -> Path:
        return self.root / "kvm1/authors" / place.author / "seg" / segment_name(place.segment)

    def place(self, namespace: Namespace, key: bytes) -> Place | None:
        return self.store.index.find(namespace.fingerprint[:16], key)

    def stored(self, namespace: Namespace, key: bytes) -> bytes | None:
        place = self.place(namespace, key)
        if place is None:
            return None
        with open(self.path(place), "rb") as file:
            file.seek(place.offset_bytes)
            return file.read(namespace.layout.record_bytes)

    def tamper(self, namespace: Namespace, key: bytes, record: bytes | None) -> None:
        place = self.place(namespace, key)
        assert place is not None, "only a stored record can be tampered with"
        self.store.files.drop(place.author, [place.segment])  # whoever opens it next sees how long it is
        if record is None:
            self.path(place).unlink()
            return
        with open(self.path(place), "r+b") as file:
            file.seek(place.offset_bytes)
            file.write(record)
            if len(record) < namespace.layout.record_bytes:
                file.truncate()

    def lose(self, namespace: Namespace, key: bytes) -> None:
        place = self.place(namespace, key)
        if place is not None:
            self.store.index.mark_bad(namespace.fingerprint[:16], key, place, for_s=None)


@contextlib.contextmanager
def open_shop(name: str, root: Path, *spaces: Namespace) -> Iterator[Shop]:
    """One of `SHOPS` with its namespaces open, over an empty directory; it must be quiet in the end."""
    shop = SHOPS[name](root)
    for space in spaces:
        shop.storage.open_namespace(space)
    yield shop
    assert shop.storage.close(5.0)


def threads_storage(root: Path, *, threads: int = 4, direct: bool = True) -> ThreadsStorage:
    return threads_over(file_blocks(root, direct=direct), threads=threads)


def threads_over(blocks: Blocks, *, threads: int = 4) -> ThreadsStorage:
    return ThreadsStorage(blocks, name="root", threads=threads, ops_max=OPS_MAX)


def uring_storage(
    root: Path, *, threads: int = 4, direct: bool = True, ring: Callable[[int], Ring] | None = None
) -> UringStorage:
    """Skips the test where io_uring can't be used."""
    return uring_over(lambda: file_blocks(root, direct=direct), threads=threads, ring=ring)


def uring_over(
    make_blocks: Callable[[], Blocks], *, threads: int = 4, ring: Callable[[int], Ring] | None = None
) -> UringStorage:
    """As `uring_storage`."""
    from kvmoverd.adapters.storage.uring import UringStorage
    from kvmoverd.adapters.storage.uring_ring import Ring

    if refused := uring_refusal():
        pytest.skip(f"io_uring can't be used here: {refused}")
    return UringStorage(make_blocks(), (ring or Ring)(OPS_MAX), name="root", threads=threads, ops_max=OPS_MAX)


def one_root(shop: Shop) -> Shop:
    """The same storage as the only root of a set."""
    settings = RootSettings(ops_max=OPS_MAX)
    shop.storage = RootSet([(shop.storage, settings)], pool_bytes=1 << 30)  # type: ignore[misc]
    return shop


def throttled(shop: Shop) -> Shop:
    """The same storage behind a pipe that is fast enough not to be felt."""
    shop.storage = ThrottledStorage(shop.storage, 1 << 30)  # type: ignore[misc]
    return shop


SHOPS: dict[str, Callable[[Path], Shop]] = {
    "direct": lambda root: FileShop(root, direct=True),
    "buffered": lambda root: FileShop(root, direct=False),
    "uring": lambda root: FileShop(root, direct=True, make=uring_storage),
    "uring buffered": lambda root: FileShop(root, direct=False, make=uring_storage),
    "segments threads": lambda root: SegmentShop(root, make=threads_over),
    "segments uring": lambda root: SegmentShop(root, make=lambda blocks: uring_over(lambda: blocks)),
    "one root": lambda root: one_root(FileShop(root, direct=True)),
    "one root of segments": lambda root: one_root(SegmentShop(root, make=threads_over)),
    "throttled": lambda root: throttled(FileShop(root, direct=True)),
    "throttled root of segments": lambda root: one_root(throttled(SegmentShop(root, make=threads_over))),
    "memory": lambda root: MemoryShop(),
}
"""Every adapter that keeps blocks."""


class Driver:
    """Runs ops on a storage until each has its completion, by the eventfd as the loop does."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._ids = itertools.count(1)
        self._places: dict[tuple[bytes, int], Place | None] = {}

    def run(self, ops: Iterable[StorageOp], *, poll_max: int = OPS_MAX) -> list[StorageDone]:
        """Completions in the order of the ops."""
        batch = list(ops)
        self.storage.submit(batch)
        done = {completion.op_id: completion for completion in self.collect(len(batch), poll_max=poll_max)}
        for op in batch:
            if isinstance(op, BlockRead) and done[op.op_id].reason is Reason.OK:
                self._places[op.key, op.address] = done[op.op_id].place
        return [done[op.op_id] for op in batch]

    def collect(self, count: int, *, poll_max: int = OPS_MAX) -> list[StorageDone]:
        taken: list[StorageDone] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(taken) < count:
            readable, _, _ = select.select([self.storage.fileno()], [], [], deadline_s - time.monotonic())
            assert readable, f"{len(taken)} of {count} completions came within {WAIT_S} s"
            taken += self.storage.poll(poll_max)
        assert len(taken) == count and self.storage.poll(poll_max) == []
        return taken

    def write_op(self, space: Namespace, key: bytes, address: int) -> BlockWrite:
        return BlockWrite(next(self._ids), space, key, ROOT, 0, address)

    def read_op(self, space: Namespace, key: bytes, address: int, layers: range = WHOLE) -> BlockRead:
        """A later range goes on where the one before it was read."""
        place = self._places.get((key, address)) if layers.start else None
        return BlockRead(next(self._ids), space, key, address, layers.start, layers.stop, place)

    def write(self, space: Namespace, key: bytes, address: int) -> StorageDone:
        return self.run([self.write_op(space, key, address)])[0]

    def read(self, space: Namespace, key: bytes, address: int, layers: range = WHOLE) -> StorageDone:
        return self.run([self.read_op(space, key, address, layers)])[0]

    def found(self, space: Namespace, *keys: bytes) -> int:
        """Leading keys whose headers are there, as a write would find them."""
        (done,) = self.run([BlockProbe(next(self._ids), space, keys, looks=True)])
        assert done.reason is Reason.OK
        return done.present

    def present(self, space: Namespace, *keys: bytes) -> int:
        return self.run([BlockProbe(next(self._ids), space, keys)])[0].present


def new_key() -> bytes:
    return os.urandom(32)


@contextlib.contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[None]:
    """A filesystem mounted at `place`; skips the test where that is not allowed."""
    if os.getuid():
        pytest.skip("mounting needs root")
    made = subprocess.run(["mount", *arguments, place], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, at most `WAIT_S`."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"still not so after {WAIT_S} s"
        time.sleep(0.005)
