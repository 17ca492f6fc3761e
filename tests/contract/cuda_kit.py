"""GPUs without a GPU: a small library of CUDA's calls, which is compiled here and moves real bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmoverd.adapters.memory.cuda_library import HANDLE_BYTES, CudaLibrary
from kvmoverd.ports.memory import GpuShare

SOURCE = Path(__file__).with_name("cuda_shim.c")
NEWEST, WITH_FAILED, WITHOUT_BATCH = 13_000, 12_080, 12_040
"""Runtimes: today's, the first with batches, which also says where one failed, and one before."""
PCI = ("0000:3b:00.0", "0000:5e:00.0")
KNOBS = (
    "gpus",
    "delay_us",
    "hang",
    "broken",
    "open_error",
    "batch_error_at",
    "pin_error_at",
    "no_dmabuf",
    "close_hang",
    "driver",
    "open_delay_us",
    "each_error_at",
    "event_error",
    "unordered",
)
COUNTS = (
    "opened",
    "pinned",
    "streams",
    "events",
    "batches",
    "each",
    "copies",
    "pageable",
    "straddles",
    "dmabuf_start",
    "dmabuf_bytes",
    "pins",
    "dropped",
)
"""In the order of the library's own tables."""


class Shim:
    """The library's own books, and what it is to do wrong."""

    def __init__(self, path: Path, version: int, home: Path) -> None:
        self.path, self.version, self.home = str(path), version, home
        self.calls = ctypes.CDLL(self.path)
        self.calls.shim_share.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
        self._knobs = (ctypes.c_long * len(KNOBS)).in_dll(self.calls, "shim_knobs")
        self._counts = (ctypes.c_long * len(COUNTS)).in_dll(self.calls, "shim_counts")

    def do(self, **knobs: int) -> None:
        for name, value in knobs.items():
            self._knobs[KNOBS.index(name)] = value

    def count(self, name: str) -> int:
        return int(self._counts[COUNTS.index(name)])

    def reset(self) -> None:
        for number in range(len(KNOBS)):
            self._knobs[number] = 0
        self.do(gpus=2, driver=self.version)
        for number in range(len(COUNTS)):
            self._counts[number] = 0

    def forget(self, name: str) -> None:
        self._counts[COUNTS.index(name)] = 0

    def library(self) -> CudaLibrary:
        return CudaLibrary(self.path, self.path)

    def share(self, size_bytes: int, gpu: int = 0) -> bytes:
        """A handle of new memory on a GPU, as of another process."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        assert self.calls.shim_share(gpu, size_bytes, handle) == 0
        return handle.raw

    def bytes_of(self, handle: bytes) -> npt.NDArray[np.uint8]:
        """What lies on the GPU behind a handle, writable."""
        pid, number, _, size_bytes = np.frombuffer(handle[8:40], np.int64).tolist()
        with open(self.home / f"gpu-{pid}-{number}", "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)


def gpu_share(handle: bytes, size_bytes: int, offset_bytes: int = 0, gpu: int = 0) -> GpuShare:
    return GpuShare(handle, offset_bytes, size_bytes, PCI[gpu])


def compile_shim(directory: Path, version: int = NEWEST) -> Path:
    """Skips the test where there is no compiler. The same file under the names of both libraries lies beside it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the library of CUDA's calls can't be compiled")
    place = directory / f"cuda-{version}"
    place.mkdir(exist_ok=True)
    path = place / "libcudart.so.13"
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-DCUDART={version}"]
    subprocess.run([compiler, *flags, "-o", str(path), str(SOURCE)], check=True, capture_output=True)
    (place / "libcuda.so.1").symlink_to(path)
    return path


def same_modules() -> dict[str, str]:
    """An environment in which a child finds the modules of this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
