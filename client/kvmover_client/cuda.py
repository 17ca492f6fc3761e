"""GPU memory that an engine shares with its daemon: by the NVIDIA driver's library, and nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from kvmover_client.errors import BadRegion, NoCuda
from kvmover_client.memory import Geometry

DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
_PCI_BYTES = 32
_DEVICE_ORDINAL = 9


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """`size_bytes` of GPU memory, from `offset_bytes` on of the allocation that the IPC handle stands for.

    It stays the engine's, which frees it only after `unregister_region` has said True, or the daemon is gone. `pci_address`
    names the GPU, e.g. "0000:3b:00.0".
    """

    ipc_handle: bytes = field(repr=False)
    offset_bytes: int
    size_bytes: int
    pci_address: str

    @classmethod
    def of_pointer(cls, pointer: int, size_bytes: int) -> CudaMemory:
        """What lies at an address of GPU memory, e.g. `tensor.data_ptr()`; call it in a thread that uses this GPU.

        Only memory of cudaMalloc can be shared so: PyTorch's expandable segments and cudaMallocAsync's pools can't. Raises
        `NoCuda` without a driver, `BadRegion` for memory that can't be shared or ends before `size_bytes`.
        """
        calls = _driver()
        base, allocated_bytes = ctypes.c_size_t(), ctypes.c_size_t()
        _check(calls, "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(allocated_bytes), _word(pointer))
        room_bytes = base.value + allocated_bytes.value - pointer
        if not 1 <= size_bytes <= room_bytes:
            raise BadRegion(
                f"{size_bytes} bytes of GPU memory are to be shared, the allocation has {room_bytes} from there on"
            )
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        _check(calls, "cuIpcGetMemHandle", handle, base)
        ordinal, device = ctypes.c_int(), ctypes.c_int()
        _check(calls, "cuPointerGetAttribute", ctypes.byref(ordinal), _DEVICE_ORDINAL, _word(pointer))
        _check(calls, "cuDeviceGet", ctypes.byref(device), ordinal)
        address = ctypes.create_string_buffer(_PCI_BYTES)
        _check(calls, "cuDeviceGetPCIBusId", address, _PCI_BYTES, device)
        return cls(handle.raw, pointer - base.value, size_bytes, address.value.decode().lower())


@dataclass(frozen=True)
class CudaRegion:
    """Registered GPU memory. Valid page numbers are 0 to `pages` - 1; it ends with the session or `unregister_region`."""

    region_id: int
    pages: int
    pages_per_block: int
    memory: CudaMemory = field(repr=False)
    geometry: Geometry = field(repr=False)


def _driver() -> Any:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError as error:
        raise NoCuda(f"no NVIDIA driver can be used here: {error}") from error


def _word(pointer: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(pointer)


def _check(calls: Any, name: str, *arguments: object) -> None:
    code = int(getattr(calls, name)(*arguments))
    if code:
        raise BadRegion(f"GPU memory can't be shared: {name}: error {code}", details={"code": str(code)})
