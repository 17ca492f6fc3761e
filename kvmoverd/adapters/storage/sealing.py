"""Makes a record of what an engine's block is written from."""

from __future__ import annotations

import time

from kvmoverd.core.record import memory_view, seal
from kvmoverd.ports.storage import BlockWrite


def seal_write(op: BlockWrite, generation: int | None = None) -> memoryview:
    """Fills the header page of the slot and zeroes the padding: the whole record. `generation`: as in `seal`."""
    record = memory_view(op.address, op.namespace.layout.record_bytes)
    seal(
        record,
        op.namespace,
        key=op.key,
        parent=op.parent,
        depth=op.depth,
        write_time_ns=time.time_ns(),
        generation=generation,
        layer_crcs=op.layer_crcs,
    )
    return record
