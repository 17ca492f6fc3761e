"""A queue pair without a device, compiled on demand: what it is posted can be counted and read back, and nothing leaves."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.daemon import BenchFailed
from tests.bench.reference import compile_library

SOURCE = Path(__file__).with_name("null_device.c")
PLACES = 4_096
UNLIMITED = (1 << 64) - 1
ENTRY = np.dtype(
    [
        *((name, "<u8") for name in ("work_id", "local", "remote")),
        *((name, "<u4") for name in ("size_bytes", "local_key", "remote_key", "opcode", "flags", "immediate")),
        ("chain", "<u8"),
        ("_", "<u8"),
    ]
)


class NullDevice:
    """`pair`: the address of its `struct ibv_qp`. Raises `BenchFailed` without a compiler or the headers of libibverbs."""

    def __init__(self, directory: Path, *, takes_max: int = UNLIMITED) -> None:
        path = directory / "null_device.so"
        if not path.exists():
            compile_library(SOURCE, path)
        self._c = ctypes.CDLL(str(path))
        pointer = ctypes.c_void_p
        self._c.null_open.restype = self._c.null_pair.restype = self._c.null_ring.restype = pointer
        self._c.null_open.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self._c.null_taken.restype = ctypes.c_uint64
        for name in ("null_pair", "null_ring", "null_taken", "null_close"):
            getattr(self._c, name).argtypes = [pointer]
        self._c.post_built.argtypes = [pointer, pointer]
        self._device: Any = self._c.null_open(PLACES, takes_max)
        if not self._device:
            raise BenchFailed(f"no memory for {PLACES} places")
        self.pair = int(self._c.null_pair(self._device))

    @property
    def taken(self) -> int:
        """Requests it was given."""
        return int(self._c.null_taken(self._device))

    def entries(self) -> npt.NDArray[np.void]:
        """What they said, oldest first; of the last `PLACES`."""
        assert self.taken <= PLACES, f"{self.taken} requests, {PLACES} places"
        raw = ctypes.string_at(self._c.null_ring(self._device), self.taken * ENTRY.itemsize)
        return np.frombuffer(raw, dtype=ENTRY)

    def post(self, request: int, pair: int = 0) -> int:
        """A chain that begins at an address, to its own queue pair or to that of a device: 0, or an errno."""
        return int(self._c.post_built(pair or self.pair, request))

    def close(self) -> None:
        self._c.null_close(self._device)


def address_of_request(request: Any, work_id: int) -> int:
    """Of the C struct within a work request of pyverbs, which begins with its work id."""
    raw = ctypes.string_at(id(request), type(request).__basicsize__)
    return id(request) + raw.index(work_id.to_bytes(8, "little"))
