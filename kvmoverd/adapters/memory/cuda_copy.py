"""Copies from, to and within GPU memory: one submission for all slices of a step, in a stream of the thread that asks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvmoverd.adapters.memory.cuda_library import CudaError, CudaLibrary
from kvmoverd.adapters.memory.iovec import NEVER, Cursor, cut_alike

log = logging.getLogger(__name__)

STEP_BYTES_MAX = 64 << 20
"""Some milliseconds of a PCIe link: a forgotten sink is left after that."""
STEP_SLICES_MAX = 8_192
STUCK_S = 10.0
_SPIN_S = 50e-6
_PAUSE_FIRST_S, _PAUSE_MAX_S = 20e-6, 1e-3


class GpuLost(Exception):
    """A GPU that does not end its copies, or that this process can't use any more: nothing more is given to it."""


class _Lane:
    """A stream of one thread on one GPU, and the event that ends each step of it."""

    def __init__(self, library: CudaLibrary, gpu: int) -> None:
        library.use(gpu)
        self.gpu = gpu
        self.stream = library.make_stream()
        self.event = library.make_event()


class _Lanes(threading.local):
    """Those of the thread that asks, by GPU."""

    def __init__(self) -> None:
        self.by_gpu: dict[int, _Lane] = {}


class GpuCopies:
    """Copies for any number of threads. `copy` moves bytes of one GPU and returns when they have arrived.

    A copy that does not end makes its GPU lost for all others until it does, and keeps its thread: nobody may have memory that
    a device still writes. `stuck_s`: how long that takes.
    """

    def __init__(
        self, library: CudaLibrary, *, stuck_s: float = STUCK_S, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._library = library
        self._stuck_s = stuck_s
        self._now_s = now_s
        self._lanes = _Lanes()
        self._made: list[_Lane] = []
        self._lost: dict[int, str] = {}

    def lost(self, gpu: int) -> str:
        """Why nothing more is given to this GPU; empty while it is well."""
        return self._lost.get(gpu, "")

    def copy(self, gpu: int, destination: Cursor, source: Cursor, stop: bytearray = NEVER) -> int:
        """A step, see `iovec.CopyStep`: bytes moved. Either end may be on `gpu`, the other on another one or in host memory.

        Raises `GpuLost`, `CudaError`; no byte is on its way then.
        """
        if stop[0]:
            return 0
        if why := self.lost(gpu):
            raise GpuLost(why)
        rows = cut_alike(
            destination.window(STEP_BYTES_MAX, STEP_SLICES_MAX), source.window(STEP_BYTES_MAX, STEP_SLICES_MAX)
        )
        lane = self._lane(gpu)
        submit = self._library.copy_batch if self._library.has_batch else self._library.copy_each
        try:
            submit(*rows, lane.stream)
        except CudaError as error:
            # What was submitted before it failed is under way all the same.
            self._settle(lane, error)
            raise
        self._settle(lane)
        moved_bytes = int(rows[2].sum())
        destination.advance(moved_bytes)
        source.advance(moved_bytes)
        return moved_bytes

    def close(self) -> None:
        """Destroys the streams of all threads; none of them may copy any more."""
        while self._made:
            lane = self._made.pop()
            self._library.destroy(lane.stream, lane.event)

    def _lane(self, gpu: int) -> _Lane:
        lane = self._lanes.by_gpu.get(gpu)
        if lane is None:
            lane = self._lanes.by_gpu[gpu] = _Lane(self._library, gpu)
            self._made.append(lane)
        else:
            self._library.use(gpu)
        return lane

    def _settle(self, lane: _Lane, error: CudaError | None = None) -> None:
        """Returns when nothing of this lane is under way. Raises `CudaError` for what failed on the GPU."""
        try:
            if error is not None and error.sticky:
                raise error
            self._library.record(lane.event, lane.stream)
            self._wait(lane)
        except CudaError as failed:
            self._lost[lane.gpu] = f"GPU {lane.gpu} can't be used by this process any more, restart it: {failed}"
            log.error("%s", self.lost(lane.gpu))
            raise

    def _wait(self, lane: _Lane) -> None:
        """Looks often at first: most steps take less than a pause of the system's."""
        began_s, pause_s, stuck = self._now_s(), _PAUSE_FIRST_S, False
        while not self._library.happened(lane.event):
            waited_s = self._now_s() - began_s
            if waited_s > self._stuck_s and not stuck:
                stuck = True
                self._lost[lane.gpu] = f"GPU {lane.gpu} has not ended a copy for {waited_s:.0f} s"
                log.error("%s; its memory stays in use until it does, nothing more is given to it", self.lost(lane.gpu))
            if waited_s > _SPIN_S:
                time.sleep(pause_s)
                pause_s = min(_PAUSE_MAX_S, pause_s * 1.5)
        if stuck:
            self._lost.pop(lane.gpu, None)
            log.warning("GPU %d has ended its copy after %.1f s", lane.gpu, self._now_s() - began_s)
