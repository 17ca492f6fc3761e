"""A receiver in a process of its own: `kind place size_bytes`. Prints its endpoint; lives until its stdin closes."""

from __future__ import annotations

import select
import sys
from pathlib import Path

import numpy as np
from transport_kit import PATIENT_S, SENDER, shm, tcp

from kvmoverd.ports.transport import Sink

LIFETIME_S = 60.0


def main() -> None:
    kind, place, size_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    transport = tcp("boot-2", port=int(place)) if kind == "tcp" else shm(Path(place), "boot-2")
    memory = np.zeros(size_bytes, dtype=np.uint8)
    slices = np.array([[memory.ctypes.data, size_bytes]], dtype=np.uint64)
    transport.expect(Sink(1, lambda layer, first_block: slices, SENDER))
    print(transport.endpoint, flush=True)
    select.select([sys.stdin], [], [], LIFETIME_S)
    transport.close(PATIENT_S)


main()
