"""The references in C, compiled on demand with the system's compiler and called without the interpreter's lock."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from kvmoverd.adapters.memory.iovec import address_of
from kvmoverd.ports.transport import IoVec
from tests.bench.daemon import BenchFailed

SOURCE = Path(__file__).with_name("reference.c")
COMPILE_S = 60.0


class Reference:
    """The compiled loops. Raises `BenchFailed` where there is no compiler, or it fails."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "reference.so"
        if not self.path.exists():
            compile_library(SOURCE, self.path)
        self._c = ctypes.CDLL(str(self.path), use_errno=True)
        self._c.copy_slices.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._c.copy_slices.restype = None
        for name in ("write_slices", "read_slices"):
            getattr(self._c, name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]

    def copy(self, destination: IoVec, source: IoVec) -> None:
        """`memcpy` of each slice; the two must be cut alike."""
        assert (destination[:, 1] == source[:, 1]).all(), "the slices are not cut alike"
        self._c.copy_slices(address_of(destination), address_of(source), len(source))

    def write(self, fd: int, source: IoVec) -> None:
        """All slices into a blocking socket. Raises `OSError`."""
        _check(self._c.write_slices(fd, address_of(source), len(source)))

    def read(self, fd: int, destination: IoVec) -> None:
        """All slices out of a blocking socket. Raises `OSError`, `EOFError`."""
        _check(self._c.read_slices(fd, address_of(destination), len(destination)))


def _check(status: int) -> None:
    if status < 0:
        raise EOFError("the stream ended before the last slice")
    if status:
        raise OSError(status, "the stream broke")


def compile_library(source: Path, path: Path) -> None:
    """Raises `BenchFailed`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchFailed("there is no C compiler: neither cc nor gcc is on the path")
    command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode:
        raise BenchFailed(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
