"""Pins the pool for GPUs, piece by piece beside all other work: what is not pinned is copied by way of a buffer of CUDA's."""

from __future__ import annotations

import logging
import threading
import time

from kvmoverd.adapters.memory.cuda_library import ALREADY_PINNED, CudaError, CudaLibrary
from kvmoverd.ports.memory import Memory

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""About as much as is pinned at a time, for a tenth of a second."""


class Pins:
    """What of the pool is pinned. Pieces are multiples of `piece_bytes`: CUDA refuses a copy that straddles two of them."""

    def __init__(self, pool: Memory, piece_bytes: int) -> None:
        assert piece_bytes > 0, f"pieces of {piece_bytes} bytes"
        self._pool = pool
        self._step_bytes = max(1, PIECE_BYTES // piece_bytes) * piece_bytes
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._library: CudaLibrary | None = None
        self._gpu = 0
        self._stop = False
        self._pinned: list[int] = []
        self._pinned_bytes = 0
        self._refusal = ""

    @property
    def text(self) -> str:
        """How much is pinned, and why not all where that will not come."""
        refused = f": {self._refusal}" if self._refusal else ""
        return f"{self._pinned_bytes >> 20} of {self._pool.size_bytes >> 20} MiB of the pool pinned{refused}"

    def begin(self, library: CudaLibrary, gpu: int) -> None:
        """Begins once, in a thread; `gpu`: the one that is asked, all of them profit."""
        with self._lock:
            if self._thread is not None or self._stop:
                return
            self._library, self._gpu = library, gpu
            self._thread = threading.Thread(target=self._pin_all, name="kvmover-gpu-pins", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Unpins all; only when no copy runs. False when CUDA has not let go of all within `timeout_s`."""
        with self._lock:
            self._stop = True
            thread = self._thread
        if thread is None or self._library is None:
            return True
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        return self._unpin(self._library)

    def _pin_all(self) -> None:
        assert self._library is not None, "pinning was begun without CUDA"
        began_s = time.monotonic()
        end = self._pool.address + self._pool.size_bytes
        try:
            self._library.use(self._gpu)
            for start in range(self._pool.address, end, self._step_bytes):
                if self._stop:
                    return
                self._pin(self._library, start, min(self._step_bytes, end - start))
        except CudaError as error:
            self._refusal = str(error)
            log.warning("copies to and from GPUs will be slower: %s", self.text)
            return
        log.info("%s in %.1f s", self.text, time.monotonic() - began_s)

    def _pin(self, library: CudaLibrary, start: int, size_bytes: int) -> None:
        try:
            library.pin(start, size_bytes)
        except CudaError as error:
            if error.code != ALREADY_PINNED:
                raise
        else:
            self._pinned.append(start)
        self._pinned_bytes += size_bytes

    def _unpin(self, library: CudaLibrary) -> bool:
        """A GPU that is lost has let go of everything."""
        while self._pinned:
            start = self._pinned.pop()
            try:
                library.use(self._gpu)
                library.unpin(start)
            except CudaError as error:
                if not error.sticky:
                    log.warning("a piece of the pool stays pinned: %s", error)
                    return False
        self._pinned_bytes = 0
        return True
