"""What a filesystem can do, found out by doing it in a directory of one's own, with memory as the pool has it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.block_io import create_file, errno_name, open_regular, read_into, write_from
from kvmoverd.adapters.storage.namespaces import sync_directory
from kvmoverd.core.layout import ALIGN_BYTES
from kvmoverd.core.record import memory_view

ALIGNMENTS = (512, 4096)
_RECORD_BYTES = 512 << 10
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_AT, _MEM_AT, _OFFSET_AT = 0, 152, 156
"""In `struct statx`."""
_AT_EMPTY_PATH = 0x1000
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

Found = dict[str, object]


class Trials:
    """In `directory`, which is the caller's to remove. Each trial says "ok", or what went wrong."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> Found:
        """What may be done to names, and to whole files."""
        trials: dict[str, Callable[[], None]] = {
            "exclusive_create": self._exclusive_create,
            "link": self._link,
            "rename": self._rename,
            "flock": self._flock,
            "fallocate": self._fallocate,
            "punch_hole": self._punch_hole,
            "fdatasync": self._fdatasync,
            "directory_sync": lambda: sync_directory(self._directory),
            "hole_reads": self._hole_reads,
        }
        return {name: _tried(trial) for name, trial in trials.items()}

    def direct(self, arena: Arena) -> Found:
        """O_DIRECT: by what the kernel says, and by reads and writes of lengths, offsets and addresses so aligned.

        The arena's first 2 MiB are overwritten.
        """
        found: Found = {"pool_pages": arena.page_kind}
        for align_bytes in ALIGNMENTS:
            found[f"aligned_{align_bytes}"] = _tried(partial(self._direct, arena.address, align_bytes))
        found["record"] = _tried(partial(self._direct, arena.address, _RECORD_BYTES))
        memory_bytes, offset_bytes = self._said()
        return {**found, "said_memory_align": memory_bytes, "said_offset_align": offset_bytes}

    def _direct(self, address: int, size_bytes: int) -> None:
        """Writes at one such offset, and reads it back."""
        step_bytes = min(size_bytes, ALIGN_BYTES)
        written = memory_view(address + step_bytes, size_bytes)
        back = memory_view(address + step_bytes + max(size_bytes, ALIGN_BYTES), size_bytes)
        content = os.urandom(size_bytes)
        written[:] = content
        path = self._directory / f"direct.{size_bytes}"
        fd = create_file(path, os.O_DIRECT)
        try:
            write_from(fd, written, step_bytes)
        finally:
            os.close(fd)
        fd, _ = open_regular(str(path), os.O_DIRECT)
        try:
            got = read_into(fd, back, step_bytes)
        finally:
            os.close(fd)
        if got != size_bytes or bytes(back) != content:
            raise OSError(errno.EIO, f"{got} of {size_bytes} bytes came back, or others than written")

    def _said(self) -> tuple[int | None, int | None]:
        """Alignment of memory and of offsets by statx; None where the filesystem or kernel does not say."""
        path = self._directory / "said"
        fd = create_file(path)
        try:
            found = ctypes.create_string_buffer(_STATX_BYTES)
            try:
                failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found)
            except AttributeError:
                return None, None
            mask, memory, offset = (
                ctypes.c_uint32.from_buffer(found, at).value for at in (_MASK_AT, _MEM_AT, _OFFSET_AT)
            )
            return (memory, offset) if not failed and mask & _STATX_DIOALIGN else (None, None)
        finally:
            os.close(fd)

    def _exclusive_create(self) -> None:
        path = self._directory / "once"
        os.close(create_file(path))
        with contextlib.suppress(FileExistsError):
            os.close(create_file(path))
            raise OSError(errno.EIO, "a file was created that was there already")

    def _link(self) -> None:
        """A name that is taken must be refused: that is how a block is published."""
        one, two = self._file("link.1"), self._directory / "link.2"
        os.link(one, two)
        with contextlib.suppress(FileExistsError):
            os.link(one, two)
            raise OSError(errno.EIO, "a name was given twice")

    def _rename(self) -> None:
        one, two = self._file("rename.1"), self._file("rename.2")
        inode = os.stat(one).st_ino
        os.rename(one, two)
        if os.path.exists(one) or os.stat(two).st_ino != inode:
            raise OSError(errno.EIO, "the file has not got the new name")

    def _flock(self) -> None:
        with open(self._file("flock"), "rb+") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _fallocate(self) -> None:
        self._allocate("fallocate", 0)

    def _punch_hole(self) -> None:
        self._allocate("punch", _KEEP_SIZE | _PUNCH_HOLE)

    def _allocate(self, name: str, mode: int) -> None:
        with open(self._file(name), "rb+") as file:
            if _libc.fallocate(file.fileno(), mode, 0, _RECORD_BYTES):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    def _fdatasync(self) -> None:
        with open(self._file("sync"), "rb+") as file:
            os.fdatasync(file.fileno())

    def _hole_reads(self) -> None:
        """What was never written in a file of full length reads as zeros, all of it: segments and logs are made so."""
        path = self._file("hole")
        os.truncate(path, _RECORD_BYTES)
        with open(path, "rb") as file:
            found = os.pread(file.fileno(), _RECORD_BYTES, 0)
        if found[ALIGN_BYTES:] != bytes(_RECORD_BYTES - ALIGN_BYTES):
            raise OSError(errno.EIO, f"{len(found)} of {_RECORD_BYTES} bytes came back, or not zeros")

    def _file(self, name: str) -> Path:
        path = self._directory / name
        with open(create_file(path), "wb") as file:
            file.write(bytes(ALIGN_BYTES))
        return path


def _tried(trial: Callable[[], None]) -> str:
    try:
        trial()
    except OSError as error:
        return errno_name(error) if error.errno != errno.EIO else str(error)
    return "ok"
