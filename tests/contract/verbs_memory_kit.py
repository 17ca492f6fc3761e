"""Registered memory of the fakes in `verbs_kit`: pieces, each with a local and a remote key that nothing else ever had."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.verbs.fabric import FabricError

PIECES_MAX = 65_536
KEY_STRIDE = 0x101
"""Keys lie apart: one that was made up, or meant for another piece, opens nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    address: int
    end: int
    local_key: int
    remote_key: int

    def holds(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.end


class KeyBook:
    """What one CNIC may touch. `piece_bytes_max`: the device takes no more at once."""

    def __init__(self, piece_bytes_max: int, first_key: int) -> None:
        self.registered_bytes = 0
        self._piece_bytes_max = piece_bytes_max
        self._keys = itertools.count(first_key, KEY_STRIDE)
        self._lock = threading.Lock()
        self._local: dict[int, Piece] = {}
        self._remote: dict[int, Piece] = {}

    def __len__(self) -> int:
        return len(self._local)

    def add(self, address: int, size_bytes: int, piece_bytes: int) -> list[Piece]:
        step_bytes = min(piece_bytes, self._piece_bytes_max)
        if size_bytes <= 0 or step_bytes <= 0 or not 0 < address < 1 << 64 or address + size_bytes > 1 << 64:
            raise FabricError(f"can't register {size_bytes} B at {address:#x} in pieces of {piece_bytes} B")
        with self._lock:
            if len(self._local) + -(-size_bytes // step_bytes) > PIECES_MAX:
                raise FabricError(f"{len(self._local)} pieces are registered, at most {PIECES_MAX} may be")
            starts = range(address, address + size_bytes, step_bytes)
            end = address + size_bytes
            pieces = [Piece(at, min(at + step_bytes, end), next(self._keys), next(self._keys)) for at in starts]
            self._local.update({piece.local_key: piece for piece in pieces})
            self._remote.update({piece.remote_key: piece for piece in pieces})
            self.registered_bytes += size_bytes
            return pieces

    def remove(self, pieces: list[Piece]) -> None:
        with self._lock:
            for piece in pieces:
                del self._local[piece.local_key], self._remote[piece.remote_key]
                self.registered_bytes -= piece.end - piece.address

    def may_read(self, key: int, address: int, size_bytes: int) -> bool:
        return _holds(self._local.get(key), address, size_bytes)

    may_receive = may_read

    def may_be_written(self, key: int, address: int, size_bytes: int) -> bool:
        return _holds(self._remote.get(key), address, size_bytes)


def _holds(piece: Piece | None, address: int, size_bytes: int) -> bool:
    return piece is not None and piece.holds(address, size_bytes)


class FakeRegistration:
    """Memory of this process that a fake CNIC may touch; whoever registers it keeps it mapped until `close`."""

    def __init__(self, book: KeyBook, address: int, size_bytes: int, piece_bytes: int) -> None:
        self.pieces = book.add(address, size_bytes, piece_bytes)
        self.closed = False
        self._book = book
        self._starts = np.array([piece.address for piece in self.pieces], dtype=np.uint64)
        self._ends = np.array([piece.end for piece in self.pieces], dtype=np.uint64)
        keys = [(piece.local_key, piece.remote_key) for piece in self.pieces]
        self._keys = np.array(keys, dtype=np.uint32)

    def keys(self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        assert not self.closed, "keys of memory that is not registered any more"
        if not len(addresses):
            return np.empty((0, 2), dtype=np.uint32)
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (at < 0) | (addresses + sizes > self._ends[np.maximum(at, 0)])
        if outside.any():
            first = int(np.argmax(outside))
            raise FabricError(f"slice {first}, {int(sizes[first])} B at {int(addresses[first]):#x}, is in no one piece")
        return self._keys[at]

    @property
    def cuts(self) -> npt.NDArray[np.uint64]:
        return self._starts[1:]

    def close(self) -> None:
        assert not self.closed, "a registration is closed twice"
        self.closed = True
        self._book.remove(self.pieces)
