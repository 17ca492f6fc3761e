"""Storage by io_uring: reads go through a ring."""

from __future__ import annotations

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.engine_storage import EngineStorage
from kvmoverd.adapters.storage.uring_pool import register_pool
from kvmoverd.adapters.storage.uring_reads import UringReads
from kvmoverd.adapters.storage.uring_ring import BUFFER_BYTES_MAX, Ring


class UringStorage(EngineStorage):
    """Storage port over `blocks`. Takes over the ring too, which must have room for `ops_max` reads, and closes both.

    `memory`: where the slots lie, in pieces that none of them straddles; registered with the ring where that works.
    Raises `StorageUnusable`; blocks and ring are the caller's then.
    """

    kind = "uring"

    def __init__(
        self,
        blocks: Blocks,
        ring: Ring,
        *,
        name: str,
        threads: int,
        ops_max: int,
        memory: Arena | None = None,
        piece_bytes: int = BUFFER_BYTES_MAX,
    ) -> None:
        ring.by_workers = not blocks.io.direct  # what the page cache has would be copied within the submit
        registered = ""
        if memory is not None:
            registered = register_pool(ring, memory, piece_bytes, blocks.io, blocks.trial_path())
        super().__init__(
            blocks,
            lambda ends: UringReads(ring, ends, name=name, depth=-(-ops_max // 2)),
            name=name,
            threads=threads,
            ops_max=ops_max,
        )
        self.notes += [registered] if registered else []
