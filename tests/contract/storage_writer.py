"""A process that writes blocks until it is killed: `storage_writer.py ROOT`. Payloads follow from keys."""

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path

from storage_kit import Driver, Slots, namespace, new_key, threads_storage

from kvmoverd.core.layout import Layout

LAYOUT = Layout(block_tokens=64, layers=((41_984,),) * 7)
BATCH = 8


def payload_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(LAYOUT.block_bytes)


def main(root: Path) -> None:
    storage, space, slots = threads_storage(root), namespace(LAYOUT), Slots(LAYOUT, BATCH)
    storage.open_namespace(space)
    driver = Driver(storage)
    for batch in itertools.count():
        keys = [new_key() for _ in range(BATCH)]
        driver.run(driver.write_op(space, key, slots.fill(slot, payload_of(key))) for slot, key in enumerate(keys))
        print(batch, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
