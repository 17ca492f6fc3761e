"""The storage by io_uring where it can be had, and the one by threads, which says why, where not."""

from __future__ import annotations

from collections.abc import Callable

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.adapters.storage.uring_probe import uring_refusal
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.ports.storage import Storage


def open_uring(
    blocks: Blocks,
    memory: Arena,
    piece_bytes: int,
    *,
    name: str,
    threads: int,
    ops_max: int,
    refusal: Callable[[], str] = uring_refusal,
) -> Storage:
    """`memory`: the pool, in pieces that no slot straddles. Blocks while a child process tries.

    Raises `StorageUnusable`; `blocks` are the caller's then, else the storage's, which closes them.
    """
    refused = refusal()
    if not refused:
        # Not before the trial: the package may hold instructions that this CPU lacks, and may be missing.
        from kvmoverd.adapters.storage.uring import UringStorage  # noqa: PLC0415
        from kvmoverd.adapters.storage.uring_ring import Ring  # noqa: PLC0415

        try:
            ring = Ring(ops_max)
        except OSError as error:
            refused = f"no ring can be had: {errno_name(error)}"
        else:
            try:
                return UringStorage(
                    blocks, ring, name=name, threads=threads, ops_max=ops_max, memory=memory, piece_bytes=piece_bytes
                )
            except StorageUnusable:
                if ring.idle:
                    ring.close()
                raise
    note = f"io_uring can't be used: {refused}"
    return ThreadsStorage(blocks, name=name, threads=threads, ops_max=ops_max, note=note)
