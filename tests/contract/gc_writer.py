"""A segment store under a tight budget, and a process that fills it until it is killed: `gc_writer.py ROOT BOOT_ID`."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, namespace, new_key

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.ports.storage import BlockWrite, StorageDone

MIB = 1 << 20
RECORDS = 16
BATCH = 16
PAUSE_S = 0.02
"""Between two batches: on a fast disk the logs of what was written would else be more than the budget."""
SEGMENT_BYTES = HEADER_BYTES + RECORDS * UNEVEN.record_bytes
SPACE = namespace()
BUDGET_BYTES = 24 * MIB
TIGHT = SegmentSettings(
    segment_bytes=SEGMENT_BYTES, log_pages=32, bytes_max=BUDGET_BYTES, grace_s=0.3, heartbeat_s=0.5, commit_wait_s=0.002
)


class Filling:
    """A store, and batches of new blocks for it; payloads follow from keys."""

    def __init__(self, root: Path, boot_id: str, settings: SegmentSettings = TIGHT, *, node: str = "node-0") -> None:
        self.store: SegmentStore = open_segment_store(root, node=node, boot_id=boot_id, settings=settings)
        self.storage = ThreadsStorage(self.store, name="root", threads=4, ops_max=OPS_MAX)
        self.storage.open_namespace(SPACE)
        self.driver, self.slots = Driver(self.storage), Slots(UNEVEN, BATCH)

    def write(self) -> tuple[list[bytes], list[StorageDone]]:
        """Keys of a batch, and how they ended, in the same order."""
        keys = [new_key() for _ in range(BATCH)]
        ops: list[BlockWrite] = [
            self.driver.write_op(SPACE, key, self.slots.fill(slot, payload_of(key))) for slot, key in enumerate(keys)
        ]
        done = {one.op_id: one for one in self.driver.run(ops)}
        return keys, [done[op.op_id] for op in ops]

    def reads(self, key: bytes) -> StorageDone:
        """Reads a block, and asserts that what comes is right."""
        op = self.driver.read_op(SPACE, key, self.slots.address(0))
        done = self.driver.run([op])[0]
        assert done.reason.name != "OK" or self.slots.payload(0) == payload_of(key), "another block's bytes"
        return done


def payload_of(key: bytes) -> bytes:
    return (key * (UNEVEN.block_bytes // len(key) + 1))[: UNEVEN.block_bytes]


def main(root: Path, boot_id: str) -> None:
    filling = Filling(root, boot_id)
    for batch in itertools.count():
        keys, ended = filling.write()
        durable = [key.hex() for key, done in zip(keys, ended, strict=True) if done.reason.name == "OK"]
        print(batch, *durable, flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
