"""GPU memory of engines, opened by CUDA's IPC handles. CUDA is loaded when the first region wants it, not before.

A context takes some hundreds of megabytes of GPU memory and a second, so a node whose engines share host memory has none.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable
from functools import partial

from kvmoverd.adapters.memory.cuda_copy import GpuCopies
from kvmoverd.adapters.memory.cuda_library import HANDLE_BYTES, CudaError, CudaLibrary, load_cuda
from kvmoverd.adapters.memory.cuda_pins import Pins
from kvmoverd.adapters.memory.iovec import CopyStep
from kvmoverd.core.errors import BadRegion, NoCuda
from kvmoverd.ports.memory import GpuShare, Memory
from kvmoverd.ports.transport import IoVec

log = logging.getLogger(__name__)

_PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
CLOSE_S = 3.0


class GpuMemory:
    """A region in GPU memory, implements `LentMemory`. No processor of the host can touch its addresses.

    `dmabuf_fd`: a descriptor for RDMA devices, in which the region begins at `dmabuf_offset_bytes`; it stays this object's. -1:
    there is none, and `dmabuf_refusal` says why.
    """

    def __init__(self, library: CudaLibrary, share: GpuShare, gpu: int, base: int) -> None:
        """`base`: address of the opened allocation; this object closes it."""
        self._library = library
        self._base = base
        self._size_bytes = share.size_bytes
        self._address = base + share.offset_bytes
        self._open = True
        self._given_back = threading.Event()
        self._before_close: list[Callable[[], None]] = []
        self.gpu = gpu
        self.pci_address = library.pci_address(gpu)
        self.dmabuf_fd, self.dmabuf_offset_bytes, self.dmabuf_refusal = -1, 0, ""
        self._export()

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def page_kind(self) -> str:
        return f"GPU {self.gpu}"

    @property
    def given_back(self) -> bool:
        return self._given_back.is_set()

    def on_close(self, before_close: Callable[[], None]) -> None:
        """Has `before_close` called while all is still this region's; at once where it is not any more."""
        self._before_close.append(before_close)
        if not self._open:
            before_close()

    def close(self) -> None:
        """Gives the memory back in the background, for the driver may take its time; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        for before_close in self._before_close:
            before_close()
        if self.dmabuf_fd >= 0:
            os.close(self.dmabuf_fd)
            self.dmabuf_fd = -1
        try:
            threading.Thread(target=self._give_back, name="kvmover-gpu-close", daemon=True).start()
        except RuntimeError:
            # The system starts no thread: then the loop has to wait.
            self._give_back()

    def _give_back(self) -> None:
        """A driver that refuses has no use of it either, or is lost as a whole: both are said in the log."""
        try:
            self._library.use(self.gpu)
            self._library.close_handle(self._base)
        except CudaError as error:
            log.warning("%d bytes of GPU %d were not given back: %s", self._size_bytes, self.gpu, error)
        self._given_back.set()

    def _export(self) -> None:
        """The driver shares whole pages only; the allocation has them, it begins and ends at larger ones."""
        start = self._address - self._address % mmap.PAGESIZE
        end = -(-(self._address + self._size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self.dmabuf_fd = self._library.export_dmabuf(self.gpu, start, end - start)
            self.dmabuf_offset_bytes = self._address - start
        except (CudaError, OSError) as error:
            self.dmabuf_refusal = str(error)


class Gpus:
    """The GPUs of this node, as far as this process sees them. All methods may be called from any thread.

    `pool`: host memory that is pinned with the first region, so that copies go past the processor; in pieces of
    `piece_bytes`, which no copy straddles. `load` finds CUDA.
    """

    def __init__(
        self,
        pool: Memory | None = None,
        *,
        piece_bytes: int = 0,
        load: Callable[[], CudaLibrary] = load_cuda,
    ) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._library: CudaLibrary | None = None
        self._copies: GpuCopies | None = None
        self._spans: tuple[tuple[int, int, int], ...] = ()
        self._closed = False
        self._pins = Pins(pool, piece_bytes) if pool is not None else None

    @property
    def text(self) -> str:
        """For status, e.g. "CUDA 13.0, cudaMemcpyBatchAsync, 8 GiB of the pool pinned"; empty until it is loaded."""
        library = self._library
        if library is None:
            return ""
        version = f"CUDA {library.version // 1000}.{library.version % 1000 // 10}"
        how = "cudaMemcpyBatchAsync" if library.has_batch else "cudaMemcpyAsync for each slice"
        return ", ".join(filter(None, (version, how, self._pins.text if self._pins is not None else "")))

    def open(self, share: GpuShare) -> GpuMemory:
        """Blocks, for seconds where it is the first. Raises `NoCuda`, `BadRegion`."""
        _check_share(share)
        library = self._loaded()
        try:
            gpu = library.gpu_at(share.pci_address)
        except CudaError as error:
            raise NoCuda(
                f"this daemon sees no GPU at {share.pci_address}, but {_seen(library)}: {error}",
                pci_address=share.pci_address,
            ) from error
        region = _opened(library, share, gpu)
        log.info(
            "a region of %d bytes on GPU %d (%s): %s",
            share.size_bytes,
            gpu,
            share.pci_address,
            region.dmabuf_refusal or "shared with RDMA devices by dmabuf",
        )
        self._enter(region)
        if self._pins is not None:
            self._pins.begin(library, gpu)
        return region

    def step(self, destination: IoVec, source: IoVec) -> CopyStep | None:
        """What copies these slices, each list of one memory, where either is a region's on a GPU; None: neither is.

        A memory copy of the processor's would end the process there.
        """
        for slices in (destination, source):
            gpu = self._gpu_of(slices)
            if gpu is not None:
                assert self._copies is not None, f"a region on GPU {gpu} without CUDA"
                return partial(self._copies.copy, gpu)
        return None

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Opens nothing any more and lets go of the pool; only when no copy runs. False: CUDA may still hold it."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._closed = True
        self._lock.release()
        if self._copies is not None:
            self._copies.close()
        return self._pins is None or self._pins.close(timeout_s)

    def _loaded(self) -> CudaLibrary:
        with self._lock:
            if self._closed:
                raise NoCuda("the daemon is shutting down")
            if self._library is None:
                self._library = self._load()
                self._copies = GpuCopies(self._library)
                log.info("CUDA is loaded: %s, driver for %d", self._library.path, self._library.driver_version)
            return self._library

    def _enter(self, region: GpuMemory) -> None:
        """Its addresses are the region's until it is closed."""
        span = (region.address, region.address + region.size_bytes, region.gpu)
        region.on_close(lambda: self._leave(span))
        with self._lock:
            self._spans += (span,)

    def _leave(self, span: tuple[int, int, int]) -> None:
        """Two regions may be the same bytes: an allocation that is opened twice has one address."""
        with self._lock:
            at = self._spans.index(span)
            self._spans = (*self._spans[:at], *self._spans[at + 1 :])

    def _gpu_of(self, slices: IoVec) -> int | None:
        """A list that lies around a GPU's addresses is taken for one of its: CUDA copies that, too."""
        spans = self._spans
        if not spans or not len(slices):
            return None
        first, last = int(slices[:, 0].min()), int(slices[:, 0].max())
        return next((gpu for low, high, gpu in spans if first < high and last >= low), None)


def _opened(library: CudaLibrary, share: GpuShare, gpu: int) -> GpuMemory:
    """Raises `BadRegion`: the handle opens nothing, nothing of this GPU, or too little; nothing stays open then."""
    try:
        library.use(gpu)
        base = library.open_handle(share.ipc_handle)
    except CudaError as error:
        text = f"the IPC handle of {share.size_bytes} bytes on {share.pci_address} can't be opened: {error}"
        raise BadRegion(text, size_bytes=share.size_bytes) from error
    try:
        _check_allocation(library, share, gpu, base)
        return GpuMemory(library, share, gpu, base)
    except (CudaError, BadRegion) as error:
        with contextlib.suppress(CudaError):
            library.close_handle(base)
        if isinstance(error, BadRegion):
            raise
        raise BadRegion(f"what lies behind the IPC handle can't be learnt: {error}") from error


def _check_allocation(library: CudaLibrary, share: GpuShare, gpu: int, base: int) -> None:
    found = library.lies_on(base)
    if found != gpu:
        where = "no GPU's memory" if found is None else f"memory of {library.pci_address(found)}"
        raise BadRegion(f"behind the IPC handle is {where}, pci_address says {share.pci_address}")
    begin, allocated_bytes = library.allocation(base)
    room_bytes = begin + allocated_bytes - base
    if share.offset_bytes + share.size_bytes > room_bytes:
        raise BadRegion(
            f"the region takes {share.size_bytes} bytes from offset {share.offset_bytes} on, the allocation has {room_bytes}",
            room_bytes=room_bytes,
        )


def _check_share(share: GpuShare) -> None:
    if len(share.ipc_handle) != HANDLE_BYTES:
        raise BadRegion(f"the IPC handle has {len(share.ipc_handle)} bytes, must have {HANDLE_BYTES}")
    if share.size_bytes < 1 or share.offset_bytes < 0:
        raise BadRegion(
            f"a region of {share.size_bytes} bytes from offset {share.offset_bytes} on is refused, "
            "must be 1 byte or more from 0 or more on"
        )
    if not _PCI_ADDRESS.fullmatch(share.pci_address.lower()):
        raise BadRegion(f"pci_address is {share.pci_address[:40]!r}, must be as 0000:3b:00.0")


def _seen(library: CudaLibrary) -> str:
    return ", ".join(library.pci_address(gpu) for gpu in range(library.gpus()))
