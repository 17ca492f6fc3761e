"""CUDA's runtime and driver libraries, by ctypes: the only module that knows their structures.

They are looked for at run time and are no dependency. All calls run without the interpreter lock. A thread has a current GPU
(`use`), and most calls are about that one.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any

from kvmoverd.adapters.memory.iovec import Words
from kvmoverd.core.errors import NoCuda

RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")
RUNTIME_PLACES = ("/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib")
WHEEL_PLACES = ("cu13/lib", "cuda_runtime/lib")
"""Of NVIDIA's packages for Python, within their namespace."""
DRIVER = "libcuda.so.1"
BATCH_SINCE, BATCH_WITHOUT_FAILED_SINCE = 12_080, 13_000
"""Versions of cudaMemcpyBatchAsync; until 13.0 it has a place for the index of the copy that failed."""

HANDLE_BYTES = 64
OK, NOT_READY, ALREADY_PINNED = 0, 600, 712
STICKY = frozenset((214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721))
"""Errors that leave a process's work on a GPU in ruins: CUDA does nothing more for it there, and nothing of it goes on."""
DEVICE_MEMORY = 2
_ENABLE_PEER_ACCESS = 1
_COPY_DEFAULT = 4
_STREAM_ORDER = 1
_NON_BLOCKING_STREAM = 1
_EVENT_WITHOUT_TIMING = 2
_PIN_PORTABLE = 1
_DMABUF_SUPPORTED, _DMABUF = 124, 1
_WRITES_ORDERING, _ORDERED_FOR_OWNER = 118, 100
"""Whether what other devices wrote is there for the kernel that is started next; below this only after a flush."""
_PCI_BYTES = 32


class IpcHandle(ctypes.Structure):
    """`cudaIpcMemHandle_t`; goes by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class PointerAttributes(ctypes.Structure):
    """`cudaPointerAttributes`, with room for all that newer runtimes write."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 16),
    ]


class CopyAttributes(ctypes.Structure):
    """`cudaMemcpyAttributes`: order of access to the source, places of both ends (type and number), flags."""

    _fields_ = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


_INT, _INTS, _WORD, _POINTER = ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_size_t, ctypes.c_void_p
_WORDS, _POINTERS = ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p)
_RUNTIME_CALLS: dict[str, list[Any]] = {
    "cudaRuntimeGetVersion": [_INTS],
    "cudaDriverGetVersion": [_INTS],
    "cudaGetDeviceCount": [_INTS],
    "cudaSetDevice": [_INT],
    "cudaDeviceGetByPCIBusId": [_INTS, ctypes.c_char_p],
    "cudaDeviceGetPCIBusId": [ctypes.c_char_p, _INT, _INT],
    "cudaIpcOpenMemHandle": [_POINTERS, IpcHandle, ctypes.c_uint],
    "cudaIpcCloseMemHandle": [_POINTER],
    "cudaPointerGetAttributes": [ctypes.POINTER(PointerAttributes), _POINTER],
    "cudaHostRegister": [_POINTER, _WORD, ctypes.c_uint],
    "cudaHostUnregister": [_POINTER],
    "cudaStreamCreateWithFlags": [_POINTERS, ctypes.c_uint],
    "cudaStreamDestroy": [_POINTER],
    "cudaEventCreateWithFlags": [_POINTERS, ctypes.c_uint],
    "cudaEventDestroy": [_POINTER],
    "cudaEventRecord": [_POINTER, _POINTER],
    "cudaEventQuery": [_POINTER],
    "cudaMemcpyAsync": [_POINTER, _POINTER, _WORD, _INT, _POINTER],
    "cudaGetLastError": [],
}
_BATCH: list[Any] = [_POINTER, _POINTER, _POINTER, _WORD, ctypes.POINTER(CopyAttributes), _WORDS, _WORD]
_DRIVER_CALLS: dict[str, list[Any]] = {
    "cuMemGetAddressRange_v2": [_WORDS, _WORDS, _WORD],
    "cuDeviceGet": [_INTS, _INT],
    "cuDeviceGetAttribute": [_INTS, _INT, _INT],
}
_DMABUF_CALL: list[Any] = [_INTS, _WORD, _WORD, _INT, ctypes.c_ulonglong]


class CudaError(Exception):
    """A call that failed: its name, and CUDA's number and words. `sticky`: this process can't use the GPU any more."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: error {code}: {text}")
        self.code = code
        self.sticky = code in STICKY


class CudaLibrary:
    """The calls, with errors as `CudaError`. Raises `OSError` when a library, or a function of it, is not there."""

    def __init__(self, runtime: str, driver: str = DRIVER) -> None:
        self.path = runtime
        self._runtime = _typed(ctypes.CDLL(runtime), runtime, _RUNTIME_CALLS)
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._driver = _typed(ctypes.CDLL(driver), driver, _DRIVER_CALLS)
        self.version = self._number(self._runtime.cudaRuntimeGetVersion)
        self.driver_version = self._number(self._runtime.cudaDriverGetVersion)
        self.has_batch = self._find_batch()
        self._attributes = CopyAttributes(order=_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def gpus(self) -> int:
        """How many this process sees. Raises `CudaError` for none, and for a driver that is too old."""
        return self._number(self._runtime.cudaGetDeviceCount)

    def gpu_at(self, pci_address: str) -> int:
        """Number of the GPU there, in this process. Raises `CudaError`."""
        return self._number(self._runtime.cudaDeviceGetByPCIBusId, pci_address.encode("ascii", "replace"))

    def pci_address(self, gpu: int) -> str:
        """Raises `CudaError`."""
        found = ctypes.create_string_buffer(_PCI_BYTES)
        self._check("cudaDeviceGetPCIBusId", self._runtime.cudaDeviceGetPCIBusId(found, _PCI_BYTES, gpu))
        return found.value.decode().lower()

    def use(self, gpu: int) -> None:
        """From now on calls of this thread are about `gpu`; the first one makes a context there. Raises `CudaError`."""
        self._check("cudaSetDevice", self._runtime.cudaSetDevice(gpu))

    def open_handle(self, handle: bytes) -> int:
        """Address here of the allocation behind an IPC handle; to be closed as often as it was opened. Raises `CudaError`."""
        assert len(handle) == HANDLE_BYTES, f"a handle of {len(handle)} bytes"
        # A field of characters would end at the first zero.
        return self._made(
            "cudaIpcOpenMemHandle", ctypes.c_void_p(), IpcHandle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS
        )

    def close_handle(self, address: int) -> None:
        """Raises `CudaError`."""
        self._check("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle(address))

    def allocation(self, address: int) -> tuple[int, int]:
        """Where the allocation that holds `address` begins, and its bytes. Raises `CudaError`."""
        base, size = ctypes.c_size_t(), ctypes.c_size_t()
        self._check("cuMemGetAddressRange", self._driver.cuMemGetAddressRange_v2(base, size, address))
        return base.value, size.value

    def lies_on(self, address: int) -> int | None:
        """Number of the GPU whose memory this is; None where it is another kind of memory. Raises `CudaError`."""
        found = PointerAttributes()
        self._check("cudaPointerGetAttributes", self._runtime.cudaPointerGetAttributes(found, address))
        return int(found.device) if found.type == DEVICE_MEMORY else None

    def export_dmabuf(self, gpu: int, address: int, size_bytes: int) -> int:
        """A descriptor of this memory, both ends at whole pages, that other devices can map. Raises `CudaError`, `OSError`."""
        device, supported, ordering, fd = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int(-1)
        self._check("cuDeviceGet", self._driver.cuDeviceGet(device, gpu))
        self._check(
            "cuDeviceGetAttribute", self._driver.cuDeviceGetAttribute(supported, _DMABUF_SUPPORTED, device.value)
        )
        if not supported.value:
            raise OSError(
                "the GPU's driver shares no memory by dmabuf (proprietary kernel module, or before Linux 5.12)"
            )
        self._check("cuDeviceGetAttribute", self._driver.cuDeviceGetAttribute(ordering, _WRITES_ORDERING, device.value))
        if ordering.value < _ORDERED_FOR_OWNER:
            raise OSError(
                "a kernel of this GPU may start before what RDMA wrote is there (GPU_DIRECT_RDMA_WRITES_ORDERING)"
            )
        try:
            call = self._driver.cuMemGetHandleForAddressRange
        except AttributeError as error:
            raise OSError(f"{DRIVER} is too old for dmabuf: {error}") from error
        call.argtypes = _DMABUF_CALL
        self._check("cuMemGetHandleForAddressRange", call(fd, address, size_bytes, _DMABUF, 0))
        return fd.value

    def pin(self, address: int, size_bytes: int) -> None:
        """Lets every GPU read and write host memory by itself. Raises `CudaError`."""
        self._check("cudaHostRegister", self._runtime.cudaHostRegister(address, size_bytes, _PIN_PORTABLE))

    def unpin(self, address: int) -> None:
        """Raises `CudaError`."""
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister(address))

    def make_stream(self) -> int:
        """Raises `CudaError`."""
        return self._made("cudaStreamCreateWithFlags", ctypes.c_void_p(), _NON_BLOCKING_STREAM)

    def make_event(self) -> int:
        """Raises `CudaError`."""
        return self._made("cudaEventCreateWithFlags", ctypes.c_void_p(), _EVENT_WITHOUT_TIMING)

    def destroy(self, stream: int, event: int) -> None:
        """Errors don't matter any more."""
        self._runtime.cudaEventDestroy(event)
        self._runtime.cudaStreamDestroy(stream)

    def record(self, event: int, stream: int) -> None:
        """The event happens when all that the stream was given before is done. Raises `CudaError`."""
        self._check("cudaEventRecord", self._runtime.cudaEventRecord(event, stream))

    def happened(self, event: int) -> bool:
        """Raises `CudaError`: then something that the GPU did has failed."""
        code = int(self._runtime.cudaEventQuery(event))
        if code == NOT_READY:
            return False
        self._check("cudaEventQuery", code)
        return True

    def copy_batch(self, to: Words, source: Words, sizes: Words, stream: int) -> None:
        """All copies in one submission, in any order among themselves; only with `has_batch`. Raises `CudaError`."""
        failed = ctypes.c_size_t(_NO_INDEX)
        last = (ctypes.byref(failed), stream) if self.version < BATCH_WITHOUT_FAILED_SINCE else (stream,)
        code = self._runtime.cudaMemcpyBatchAsync(
            to.ctypes.data,
            source.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            self._attributes,
            self._first,
            1,
            *last,
        )
        where = "" if failed.value == _NO_INDEX else f" at copy {failed.value} of {len(sizes)}"
        self._check(f"cudaMemcpyBatchAsync{where}", code)

    def copy_each(self, to: Words, source: Words, sizes: Words, stream: int) -> None:
        """A submission for each copy, for runtimes without batches. Raises `CudaError`."""
        call = self._runtime.cudaMemcpyAsync
        for to_address, address, size_bytes in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            self._check("cudaMemcpyAsync", call(to_address, address, size_bytes, _COPY_DEFAULT, stream))

    def _find_batch(self) -> bool:
        """The driver does the work, the runtime has the call: both must be new enough."""
        if min(self.version, self.driver_version) < BATCH_SINCE:
            return False
        try:
            call = self._runtime.cudaMemcpyBatchAsync
        except AttributeError:
            return False
        failed: list[Any] = [_WORDS] if self.version < BATCH_WITHOUT_FAILED_SINCE else []
        call.argtypes = [*_BATCH, *failed, _POINTER]
        return True

    def _number(self, call: Any, *arguments: object) -> int:
        found = ctypes.c_int()
        self._check(call.__name__, call(found, *arguments))
        return found.value

    def _made(self, name: str, made: ctypes.c_void_p, *arguments: object) -> int:
        self._check(name, getattr(self._runtime, name)(made, *arguments))
        assert made.value is not None, f"{name} made nothing and called it a success"
        return made.value

    def _check(self, name: str, code: int) -> None:
        """An error is forgotten by the runtime once it was told: another call must not find it. Raises `CudaError`."""
        if code != OK:
            self._runtime.cudaGetLastError()
            raise CudaError(name, code, str(self._runtime.cudaGetErrorString(code).decode("utf-8", "replace")))


_NO_INDEX = (1 << 64) - 1


def _typed(library: ctypes.CDLL, path: str, calls: dict[str, list[Any]]) -> ctypes.CDLL:
    try:
        for name, arguments in calls.items():
            getattr(library, name).argtypes = arguments
    except AttributeError as error:
        raise OSError(f"{path} is another version: {error}") from error
    return library


def load_cuda(candidates: Callable[[], Iterator[str]] | None = None, driver: str = DRIVER) -> CudaLibrary:
    """The newest runtime that the driver can serve, of those that this process finds. Raises `NoCuda` with what it tried."""
    tried: list[str] = []
    try:
        ctypes.CDLL(driver)
    except OSError as error:
        raise NoCuda(f"no NVIDIA driver can be used here: {error}") from error
    for path in (candidates or runtime_candidates)():
        try:
            library = CudaLibrary(path, driver)
            if library.gpus() > 0:
                return library
            tried.append(f"{path}: it sees 0 GPUs")
        except (OSError, CudaError) as error:
            tried.append(str(error) if path in str(error) else f"{path}: {error}")
    raise NoCuda(f"no CUDA can be used here: {'; '.join(tried)}")


def runtime_candidates() -> Iterator[str]:
    """Where libcudart may be: wherever the loader looks, NVIDIA's packages for this Python, its usual places."""
    yield from RUNTIMES
    spec = importlib.util.find_spec("nvidia")
    homes = (spec.submodule_search_locations or ()) if spec is not None else ()
    wheels = [Path(home) / place for home in homes for place in WHEEL_PLACES]
    installed = [Path(found) for place in RUNTIME_PLACES for found in sorted(glob(place), reverse=True)]
    files = [place / name for place in (*wheels, *installed) for name in RUNTIMES]
    yield from dict.fromkeys(str(path.resolve()) for path in files if path.exists())
