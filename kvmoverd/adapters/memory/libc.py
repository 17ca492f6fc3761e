"""Calls of the C library that Python does not offer on bare addresses. All of them release the interpreter lock."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

_C = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value
_INTERRUPTS_MAX = 1_000

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23
MAP_HUGETLB = 0x40000
MSG_NOSIGNAL = 0x4000
HUGETLBFS_MAGIC = 0x958458F6
STATFS_WORDS = 32
"""More than any 64-bit Linux has."""
PR_SET_PTRACER = 0x59616D61
PR_SET_PTRACER_ANY = -1


class _MessageHeader(ctypes.Structure):
    """`struct msghdr` of 64-bit machines."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mmap": (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long],
    ),
    "munmap": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t]),
    "madvise": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]),
    "sendmsg": (ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]),
    "readv": (ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]),
    "process_vm_readv": (ctypes.c_ssize_t, [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]),
    "process_vm_writev": (ctypes.c_ssize_t, [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]),
    "fstatfs": (ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    "prctl": (ctypes.c_int, [ctypes.c_int, *[ctypes.c_long] * 4]),
}
for _name, (_result, _arguments) in _SIGNATURES.items():
    _function = getattr(_C, _name)
    _function.restype, _function.argtypes = _result, _arguments


def map_memory(size_bytes: int, protection: int, flags: int, fd: int = -1) -> int:
    """Address of a new mapping. Raises `OSError`."""
    address = _C.mmap(None, size_bytes, protection, flags, fd, 0)
    if address is None or address == _FAILED:
        raise _error("mmap")
    return int(address)


def unmap_memory(address: int, size_bytes: int) -> None:
    """Raises `OSError`."""
    if _C.munmap(address, size_bytes) != 0:
        raise _error("munmap")


def advise(address: int, size_bytes: int, advice: int) -> None:
    """`madvise`. Raises `OSError`."""
    _checked("madvise", address, size_bytes, advice)


def filesystem_type(fd: int) -> int:
    """Magic number of the filesystem behind a descriptor: the first word of `struct statfs`. Raises `OSError`."""
    words = (ctypes.c_long * STATFS_WORDS)()
    _checked("fstatfs", fd, ctypes.addressof(words))
    return int(words[0])


def fill_zero(address: int, size_bytes: int) -> None:
    """Writes every byte; the memory must be mapped."""
    ctypes.memset(address, 0, size_bytes)


def move(to_address: int, from_address: int, size_bytes: int) -> None:
    """Copies; both sides must be mapped."""
    ctypes.memmove(to_address, from_address, size_bytes)


def send_slices(fd: int, iov_address: int, iov_count: int) -> int:
    """One `sendmsg` without SIGPIPE: bytes taken. Raises `OSError`, `BlockingIOError` among them."""
    header = _MessageHeader(iov=iov_address, iov_count=iov_count)
    return _checked("sendmsg", fd, ctypes.addressof(header), MSG_NOSIGNAL)


def read_slices(fd: int, iov_address: int, iov_count: int) -> int:
    """One `readv`: bytes read, 0 at the end. Raises `OSError`, `BlockingIOError` among them."""
    return _checked("readv", fd, iov_address, iov_count)


def pull_slices(pid: int, to_iov: int, to_count: int, from_iov: int, from_count: int) -> int:
    """Copies from slices of process `pid` into own ones until either list ends: bytes copied. Raises `OSError`."""
    return _checked("process_vm_readv", pid, to_iov, to_count, from_iov, from_count, 0)


def push_slices(pid: int, to_iov: int, to_count: int, from_iov: int, from_count: int) -> int:
    """Copies own slices into those of process `pid` until either list ends: bytes copied. Raises `OSError`."""
    return _checked("process_vm_writev", pid, from_iov, from_count, to_iov, to_count, 0)


def allow_pulls() -> bool:
    """Lets other processes of this user pull from this one where Yama restricts it; False where there is no Yama."""
    return bool(_C.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) == 0)


def _checked(name: str, *arguments: int) -> int:
    """Calls again when a signal interrupted it, a bounded number of times."""
    function = getattr(_C, name)
    for _ in range(_INTERRUPTS_MAX):
        result = int(function(*arguments))
        if result >= 0:
            return result
        if ctypes.get_errno() != errno.EINTR:
            break
    raise _error(name)


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")
