"""Memory that a CNIC may touch: registered in pieces, found again by arrays of addresses.

A piece is pinned in one call, which takes some 0.1 ms a MiB. Straight through libibverbs the interpreter's lock is not held
meanwhile; by pyverbs, where the address of its protection domain is not found, it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.verbs.fabric import FabricError
from kvmoverd.adapters.transport.verbs.library import Library, errno_of

PAGE_BYTES = 4096
_WORDS = {
    errno.EFAULT: "not all of it is mapped and writable",
    errno.ENOMEM: "the limit for locked memory, or the device's own room for memory regions, is too small",
    errno.EOPNOTSUPP: "the device or its driver can't register a dmabuf",
    errno.EINVAL: "the device refuses this size or kind of memory",
    errno.EPERM: "locking memory is not permitted",
}
_REMEDIES = {
    errno.ENOMEM: "set LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`",
    errno.EPERM: "set LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`",
    errno.EOPNOTSUPP: "leave GPU memory to copies, or load the driver that exports it (nvidia-peermem, or a kernel >= 5.12)",
}


class Piece(Protocol):
    """One memory region of the device."""

    @property
    def keys(self) -> tuple[int, int]:
        """Local and remote."""

    def close(self) -> None:
        """Raises `FabricError`."""


class Pins(Protocol):
    """Makes pieces. Raises `OSError`."""

    def __call__(self, address: int, size_bytes: int, dmabuf_fd: int, offset_bytes: int) -> Piece: ...


class Pieces:
    """A `Registration`: one memory region after the other, without a gap."""

    def __init__(
        self, pieces: list[Piece], starts: npt.NDArray[np.uint64], end: int, closed: Callable[[], None]
    ) -> None:
        self._pieces = pieces
        self._starts = starts
        self._ends = np.append(starts[1:], np.uint64(end))
        self._keys = np.array([piece.keys for piece in pieces], dtype=np.uint32)
        self._closed = closed

    def keys(self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Local and remote key of each slice. Raises `FabricError` for one that is in no piece, or in two."""
        places = self._starts.searchsorted(addresses, side="right") - 1
        # Below the first piece the place is -1, which is the last one's: no address is both below and within.
        bad = (places < 0) | (addresses >= self._ends[places]) | (sizes > self._ends[places] - addresses)
        if bad.any():
            row = int(bad.argmax())
            raise FabricError(
                f"slice {row}, {int(sizes[row])} bytes at {int(addresses[row]):#x}, is in none of the {len(self._pieces)} "
                f"pieces from {int(self._starts[0]):#x} to {int(self._ends[-1]):#x}"
            )
        found: npt.NDArray[np.uint32] = self._keys[places]
        return found

    @property
    def cuts(self) -> npt.NDArray[np.uint64]:
        return self._starts[1:]

    def close(self) -> None:
        """Raises `FabricError` when the device keeps a piece; those before it are closed."""
        while self._pieces:
            self._pieces[-1].close()
            self._pieces.pop()
            if not self._pieces:
                self._closed()


def register(
    pins: Pins,
    address: int,
    size_bytes: int,
    piece_bytes: int,
    *,
    dmabuf_fd: int = -1,
    closed: Callable[[], None] = lambda: None,
) -> Pieces:
    """Pieces of `piece_bytes`, all or nothing. `closed` is called when they are gone. Raises `FabricError`."""
    if size_bytes < 1 or piece_bytes < 1:
        raise FabricError(f"{size_bytes} bytes in pieces of {piece_bytes} are no memory")
    starts = np.arange(address, address + size_bytes, piece_bytes, dtype=np.uint64)
    pieces: list[Piece] = []
    for start in starts.tolist():
        size = min(piece_bytes, address + size_bytes - start)
        try:
            pieces.append(pins(start, size, dmabuf_fd, start - address))
        except OSError as why:
            for piece in reversed(pieces):
                piece.close()
            raise FabricError(refusal(start, size, len(pieces), len(starts), why)) from why
    return Pieces(pieces, starts, address + size_bytes, closed)


def piece_size(piece_bytes: int, most_bytes: int) -> int:
    """What a piece may have on a device that takes `most_bytes` at once: cuts of `piece_bytes` stay cuts.

    >>> piece_size(64 << 20, 1 << 60), piece_size(64 << 20, 40 << 20), piece_size(3 * 4096, 2 * 4096)
    (67108864, 33554432, 4096)
    """
    if piece_bytes <= most_bytes:
        return piece_bytes
    parts = -(-piece_bytes // most_bytes)
    while piece_bytes % parts or piece_bytes // parts % PAGE_BYTES:
        parts += 1
        if parts > piece_bytes // PAGE_BYTES:
            raise FabricError(
                f"pieces of {piece_bytes} bytes can't be cut at pages for a device that takes {most_bytes}"
            )
    return piece_bytes // parts


def refusal(address: int, size_bytes: int, done: int, count: int, why: OSError) -> str:
    """What to say of a piece that was refused."""
    code = why.errno or 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    words = _WORDS.get(code, os.strerror(code) if code else str(why))
    remedy = f"; {_REMEDIES[code]}" if code in _REMEDIES else ""
    name = errno.errorcode.get(code, "no errno")
    return (
        f"piece {done} of {count}, {size_bytes} bytes at {address:#x}, can't be registered: {words} ({name}; memlock is "
        f"{limit}){remedy}"
    )


class _Region(ctypes.Structure):
    """`struct ibv_mr`."""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    ]


@dataclass(slots=True)
class _DirectPiece:
    verbs: ctypes.CDLL
    region: Any

    @property
    def keys(self) -> tuple[int, int]:
        return int(self.region.contents.lkey), int(self.region.contents.rkey)

    def close(self) -> None:
        if code := int(self.verbs.ibv_dereg_mr(self.region)):
            raise FabricError(f"a memory region can't be taken back: {os.strerror(code)}")


class DirectPins:
    """By libibverbs itself, at the address of the protection domain; a dmabuf keeps the addresses it has here."""

    def __init__(self, library: Library, domain: int) -> None:
        self._access = access(library)
        self._domain = domain
        self._verbs = verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        pointer = ctypes.POINTER(_Region)
        verbs.ibv_reg_mr.restype = verbs.ibv_reg_dmabuf_mr.restype = pointer
        verbs.ibv_reg_mr.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        verbs.ibv_reg_dmabuf_mr.argtypes = [
            *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
        ]
        verbs.ibv_dereg_mr.argtypes = [pointer]

    def __call__(self, address: int, size_bytes: int, dmabuf_fd: int, offset_bytes: int) -> Piece:
        if dmabuf_fd < 0:
            region = self._verbs.ibv_reg_mr(self._domain, address, size_bytes, self._access)
        else:
            region = self._verbs.ibv_reg_dmabuf_mr(
                self._domain, offset_bytes, size_bytes, address, dmabuf_fd, self._access
            )
        if not region:
            raise OSError(ctypes.get_errno(), "registering memory")
        return _DirectPiece(self._verbs, region)


@dataclass(slots=True)
class _PyverbsPiece:
    region: Any
    error: type[Exception]

    @property
    def keys(self) -> tuple[int, int]:
        return self.region.lkey, self.region.rkey

    def close(self) -> None:
        try:
            self.region.close()
        except self.error as why:
            raise FabricError(f"a memory region can't be taken back: {why}") from why


class PyverbsPins:
    """By pyverbs, whose calls hold the interpreter's lock, and which can't give a dmabuf an address."""

    def __init__(self, library: Library, domain: Any) -> None:
        self._library = library
        self._domain = domain
        self._access = access(library)

    def __call__(self, address: int, size_bytes: int, dmabuf_fd: int, offset_bytes: int) -> Piece:
        if dmabuf_fd >= 0:
            raise OSError(errno.EOPNOTSUPP, "a dmabuf needs libibverbs itself")
        try:
            region = self._library.mr.MR(self._domain, size_bytes, self._access, address=address)
        except self._library.error as why:
            raise OSError(errno_of(why), str(why)) from why
        return _PyverbsPiece(region, self._library.error)


def access(library: Library) -> int:
    """Written by this node's own work and by the peers' writes; never read by them: nothing here reads remotely."""
    return int(library.enums.IBV_ACCESS_LOCAL_WRITE | library.enums.IBV_ACCESS_REMOTE_WRITE)
