"""Storage by rings of 3FS over a small library of the same calls, which is compiled here and does real reads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, FileShop, Slots

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage import usrbio_iov
from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.usrbio import UsrbioStorage
from kvmoverd.adapters.storage.usrbio_lane import SILENCE_S
from kvmoverd.adapters.storage.usrbio_library import Library
from kvmoverd.adapters.storage.usrbio_rings import UsrbioRings
from kvmoverd.core.layout import Layout

SOURCE = Path(__file__).with_name("usrbio_shim.c")
ARENA_BYTES = 64 << 20
PIECE_BYTES = 4 << 20
KNOBS = (
    "hang",
    "short_bytes",
    "error",
    "error_times",
    "full_times",
    "refuse_ring",
    "strict_depth",
    "delay_us",
    "strays",
    "refuse_fd",
    "wait_error",
)
TOTALS = ("reads", "low_reads", "twice", "taken_out", "bad_memory", "submits", "before_submit")
"""What is counted from the start of a test."""
COUNTS = ("reads", "low_reads", "registered", "twice", "taken_out", "bad_memory", "rings", "submits", "before_submit")
"""In the order of the library's own tables."""


class Shim:
    """The library's own books, and what it is to do wrong."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.calls = ctypes.CDLL(self.path)
        self._knobs = (ctypes.c_long * len(KNOBS)).in_dll(self.calls, "shim_knobs")
        self._counts = (ctypes.c_long * len(COUNTS)).in_dll(self.calls, "shim_counts")

    def do(self, **knobs: int) -> None:
        for name, value in knobs.items():
            self._knobs[KNOBS.index(name)] = value

    def knob(self, name: str) -> int:
        return int(self._knobs[KNOBS.index(name)])

    def count(self, name: str) -> int:
        return int(self._counts[COUNTS.index(name)])

    def reset(self) -> None:
        for number in range(len(KNOBS)):
            self._knobs[number] = 0
        for name in TOTALS:
            self._counts[COUNTS.index(name)] = 0


def compile_shim(directory: Path) -> Shim:
    """Skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the library of 3FS's calls can't be compiled")
    path = directory / "libhf3fs_api_shared.so"
    command = [
        compiler,
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-pthread",
        "-o",
        str(path),
        str(SOURCE),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return Shim(path)


@contextlib.contextmanager
def mounted(shim: Shim, directory: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that the library takes for a mount of 3FS: the root in it. Its books must be even in the end."""
    root = directory / "mount" / "store"
    root.mkdir(parents=True)
    (directory / "mount" / "3fs-virt" / "iovs").mkdir(parents=True)
    patch.setenv("USRBIO_SHIM_MOUNT", str(directory / "mount"))
    shim.reset()
    yield root
    shim.do(hang=0)
    assert links(root) == []
    books = {name: shim.count(name) for name in ("registered", "twice", "taken_out", "bad_memory", "rings")}
    assert books == dict.fromkeys(books, 0)


def links(root: Path) -> list[str]:
    """What is published to the daemon."""
    return sorted(os.listdir(root.parent / "3fs-virt" / "iovs"))


def pool_names() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("kvmover-pool")]


@contextlib.contextmanager
def shared_arena(patch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """A shared pool, in which every `Slots` of the test lies; the daemon registers it by pieces."""
    arena, used_bytes = Arena(ARENA_BYTES, PIECE_BYTES, shared=True), 0

    def take(slots: Slots, layout: Layout, count: int) -> None:
        nonlocal used_bytes
        slots.layout, slots._base = layout, arena.address + used_bytes
        used_bytes += -(-layout.record_bytes * count // PIECE_BYTES) * PIECE_BYTES
        assert used_bytes <= ARENA_BYTES and layout.record_bytes * count <= PIECE_BYTES

    arena.touch()
    patch.setattr(Slots, "__init__", take)
    patch.setattr(usrbio_iov, "BLOCK_BYTES_MAX", PIECE_BYTES)
    yield arena
    arena.close()


def same_modules() -> dict[str, str]:
    """An environment in which a child finds the modules of this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def usrbio_storage(
    shim: Shim,
    root: Path,
    arena: Arena,
    *,
    direct: bool = True,
    depth: int = OPS_MAX // 2,
    silence_s: float = SILENCE_S,
) -> UsrbioStorage:
    rings = UsrbioRings(Library(shim.path), arena, root, PIECE_BYTES, depth=depth)
    blocks = file_blocks(root, direct=direct)
    return UsrbioStorage(blocks, rings, name="root", threads=4, ops_max=OPS_MAX, silence_s=silence_s)


class UsrbioShop(FileShop):
    def __init__(self, shim: Shim, root: Path, arena: Arena, *, silence_s: float = SILENCE_S) -> None:
        self.usrbio = usrbio_storage(shim, root, arena, silence_s=silence_s)
        super().__init__(root, direct=True, make=lambda root, direct: self.usrbio)
