"""GPU regions over the library of CUDA's calls that tests have: the bytes behind them, and copies into them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from cuda_kit import NEWEST, WITH_FAILED, WITHOUT_BATCH, Shim, gpu_share

from kvmoverd.adapters.memory import iovec
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.memory.cuda import Gpus
from kvmoverd.ports.transport import IoVec

MIB = 1 << 20
PIECE_BYTES = 4 * MIB
REGION_BYTES = 2 * MIB
every_runtime = pytest.mark.parametrize("shim", [NEWEST, WITH_FAILED, WITHOUT_BATCH], indirect=True)


class Opened:
    """A region and the bytes behind it."""

    def __init__(self, gpus: Gpus, shim: Shim, size_bytes: int = REGION_BYTES, offset_bytes: int = 0, gpu: int = 0):
        self.handle = shim.share(offset_bytes + size_bytes, gpu)
        self.region = gpus.open(gpu_share(self.handle, size_bytes, offset_bytes, gpu))
        self.bytes = shim.bytes_of(self.handle)[offset_bytes:]


def wait_for(done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.001)


def slices(*rows: tuple[int, int]) -> IoVec:
    return np.array(rows, dtype=np.uint64)


def host_view(arena: Arena, size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(arena.address))


def move(gpus: Gpus, destination: IoVec, source: IoVec) -> int:
    step = gpus.step(destination, source)
    assert step is not None
    return iovec.copy(destination, source, step)
