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
    """A stream of one thread on one GPU, and the event that ends each step of it. `words`: what is wrong with its step."""

    def __init__(self, library: CudaLibrary, gpu: int) -> None:
        self.words = ""
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
        """Returns when nothing of this lane is under way. Raises `CudaError` for what failed on the GPU.

        Only an error that ruins the context ends all copies with it. After any other it isn't known whether they run: until
        CUDA says that they have ended, nothing is quiet.
        """
        if error is not None and error.sticky:
            raise self._given_up(lane, error)
        began_s, pause_s, recorded, lane.words = self._now_s(), _PAUSE_FIRST_S, False, ""
        doubt: CudaError | None = None
        while True:
            try:
                if not recorded:
                    self._library.record(lane.event, lane.stream)
                    recorded = True
                if self._library.happened(lane.event):
                    break
            except CudaError as failed:
                if failed.sticky:
                    raise self._given_up(lane, failed) from None
                if not lane.words:
                    self._doubt(lane, f"does not say whether its copies have ended: {failed}")
                doubt, recorded = doubt or failed, False
            pause_s = self._pause(lane, began_s, pause_s)
        if lane.words and self._lost.get(lane.gpu) == lane.words:
            del self._lost[lane.gpu]
            log.warning("GPU %d has ended its copy after %.1f s", lane.gpu, self._now_s() - began_s)
        if doubt is not None:
            raise doubt

    def _given_up(self, lane: _Lane, error: CudaError) -> CudaError:
        self._lost[lane.gpu] = f"GPU {lane.gpu} can't be used by this process any more, restart it: {error}"
        log.error("%s", self.lost(lane.gpu))
        return error

    def _doubt(self, lane: _Lane, words: str) -> None:
        lane.words = f"GPU {lane.gpu} {words}"
        self._lost.setdefault(lane.gpu, lane.words)
        log.error("%s; its memory stays in use until it does, nothing more is given to it", lane.words)

    def _pause(self, lane: _Lane, began_s: float, pause_s: float) -> float:
        """Looks often at first: most steps take less than a pause of the system's. The next pause."""
        waited_s = self._now_s() - began_s
        if waited_s > self._stuck_s and not lane.words:
            self._doubt(lane, f"has not ended a copy for {waited_s:.0f} s")
        if waited_s <= _SPIN_S:
            return pause_s
        time.sleep(pause_s)
        return min(_PAUSE_MAX_S, pause_s * 1.5)
