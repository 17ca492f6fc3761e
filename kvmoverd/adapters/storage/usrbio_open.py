"""The storage by rings of 3FS where they can be had, and the one by io_uring or threads, which says why, where not."""

from __future__ import annotations

from pathlib import Path

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.file_storage import FileStorage
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.adapters.storage.usrbio import UsrbioStorage
from kvmoverd.adapters.storage.usrbio_library import LIBRARY, Library
from kvmoverd.adapters.storage.usrbio_probe import usrbio_refusal
from kvmoverd.adapters.storage.usrbio_rings import URGENT_RINGS, UsrbioRings, try_rings
from kvmoverd.ports.storage import Storage


def open_usrbio(
    root: Path,
    blocks: Blocks,
    arena: Arena,
    piece_bytes: int,
    *,
    name: str,
    threads: int,
    ops_max: int,
    library: str = LIBRARY,
    urgent_rings: int = URGENT_RINGS,
) -> Storage:
    """`root`: where `blocks` lie. `arena`: the pool, made to be shared, in pieces that no slot straddles.

    Blocks while a child process tries; all roots of one mount are opened in the same thread. Raises `StorageUnusable`, also
    when a trial read hangs; `blocks` are the caller's then, else the storage's, which closes them.
    """
    refused = usrbio_refusal(root, library)
    if not refused:
        try:
            rings = UsrbioRings(Library(library), arena, root, piece_bytes, depth=-(-ops_max // 2), urgent=urgent_rings)
        except OSError as error:
            refused = f"its rings can't be had: {errno_name(error)} ({error})"
        else:
            try:
                note = try_rings(rings, arena, blocks.io, blocks.trial_path())
            except OSError as error:
                rings.close()
                refused = f"a read was tried and failed: {errno_name(error)} ({error})"
            else:
                return UsrbioStorage(blocks, rings, name=name, threads=threads, ops_max=ops_max, note=note)
    storage = open_uring(blocks, arena, piece_bytes, name=name, threads=threads, ops_max=ops_max)
    assert isinstance(storage, FileStorage)
    storage.notes.insert(0, f"3FS's rings can't be used: {refused}")
    return storage
