"""Blocks in pool slots and layers in an engine's pages: the memory of the rows that need no disk, and slices of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.record import memory_view
from kvmoverd.ports.transport import IoVec

PIECE_BYTES = 64 << 20
LAYER_BYTES = 64 * 656


@dataclass(frozen=True, slots=True)
class Shape:
    """So many streams of so many blocks, layer by layer; all layers alike, one slice per block and layer."""

    streams: int = 4
    blocks: int = 64
    layers: int = 61

    @property
    def layout(self) -> Layout:
        return Layout.uniform(layers=self.layers, tokens=64, token_bytes=656)

    @property
    def all_blocks(self) -> int:
        return self.streams * self.blocks

    @property
    def total_bytes(self) -> int:
        return self.all_blocks * self.layers * LAYER_BYTES


class PoolBlocks:
    """Filled slots in the pool's kind of memory, one block after the other in each."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._slot_bytes = shape.layout.record_bytes
        size_bytes = -(-shape.all_blocks * self._slot_bytes // PIECE_BYTES) * PIECE_BYTES
        self.arena = Arena(size_bytes, PIECE_BYTES)
        self.arena.touch()
        words = np.frombuffer(memory_view(self.arena.address, size_bytes), dtype=np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 1 << 64, len(words), dtype=np.uint64)

    def slices(self, stream: int, layer: int) -> IoVec:
        """A layer of all blocks of a stream."""
        first = self.arena.address + HEADER_BYTES + layer * LAYER_BYTES
        return _strided(first + stream * self._shape.blocks * self._slot_bytes, self._slot_bytes, self._shape.blocks)

    def crc(self) -> int:
        """Checksum of what must lie in the pages: layer after layer, each of all blocks of all streams."""
        value = 0
        for layer in range(self._shape.layers):
            for stream in range(self._shape.streams):
                for address, size_bytes in self.slices(stream, layer).tolist():
                    value = crc32c(memory_view(address, size_bytes), value)
        return value


@dataclass(frozen=True)
class EnginePages:
    """Pages at an address, as a paged engine has them: each layer has a page for every block."""

    shape: Shape
    address: int

    def slices(self, stream: int, layer: int) -> IoVec:
        page = layer * self.shape.all_blocks + stream * self.shape.blocks
        return _strided(self.address + page * LAYER_BYTES, LAYER_BYTES, self.shape.blocks)

    def crc_and_clear(self) -> int:
        """Checksum of all pages, which are zero afterwards."""
        view = memory_view(self.address, self.shape.total_bytes)
        value = crc32c(view)
        np.frombuffer(view, dtype=np.uint8)[:] = 0
        return value


def in_order(shape: Shape) -> list[tuple[int, int]]:
    """(stream, layer) in the order in which they move: layer after layer, all streams."""
    return [(stream, layer) for layer in range(shape.layers) for stream in range(shape.streams)]


def joined(of: PoolBlocks | EnginePages, shape: Shape) -> IoVec:
    """All slices as one list, in order."""
    return np.concatenate([of.slices(stream, layer) for stream, layer in in_order(shape)])


def _strided(first: int, stride_bytes: int, count: int) -> IoVec:
    found = np.empty((count, 2), dtype=np.uint64)
    found[:, 0] = first + np.arange(count) * stride_bytes
    found[:, 1] = LAYER_BYTES
    return found
