"""A process that has GPU memory and shares it, as an engine does, until its standard input ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator

from cuda_kit import same_modules

from kvmover_client import CudaMemory
from kvmover_client import cuda as client_cuda
from kvmoverd.ports.memory import GpuShare

ANSWER_S = 30.0


@contextlib.contextmanager
def sharing(runtime: str, driver: str, *, size_bytes: int, offset_bytes: int, fill: int) -> Iterator[GpuShare]:
    """Memory of a child, filled; it lies at an offset in its allocation. `runtime`, `driver`: libraries to take."""
    command = [sys.executable, __file__, runtime, driver, *map(str, (size_bytes, offset_bytes, fill))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=same_modules())
    assert child.stdin is not None and child.stdout is not None
    try:
        said = json.loads(child.stdout.readline())
        handle = bytes.fromhex(said["handle"])
        yield GpuShare(handle, said["offset_bytes"], said["size_bytes"], said["pci_address"])
    finally:
        child.stdin.close()
        child.wait(ANSWER_S)
        child.stdout.close()
    assert child.returncode == 0


def share_until_eof(runtime: str, driver: str, size_bytes: int, offset_bytes: int, fill: int) -> None:
    calls = ctypes.CDLL(runtime)
    client_cuda.DRIVER = driver
    pointer = ctypes.c_void_p()
    assert calls.cudaSetDevice(0) == 0
    assert calls.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(offset_bytes + size_bytes)) == 0
    assert pointer.value is not None
    at = pointer.value + offset_bytes
    assert calls.cudaMemset(ctypes.c_void_p(at), fill, ctypes.c_size_t(size_bytes)) == 0
    assert calls.cudaDeviceSynchronize() == 0
    memory = CudaMemory.of_pointer(at, size_bytes)
    said = {
        "handle": memory.ipc_handle.hex(),
        "offset_bytes": memory.offset_bytes,
        "size_bytes": memory.size_bytes,
        "pci_address": memory.pci_address,
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    assert calls.cudaFree(pointer) == 0


if __name__ == "__main__":
    share_until_eof(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
