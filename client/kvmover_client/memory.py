"""KV memory that an engine shares with its daemon, and where the pages lie in it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmover_client.errors import BadPages, BadRegion
from kvmover_client.words import Layout

ALIGN_BYTES = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An unsealed file could be cut under the daemon's mapping and kill it; the daemon refuses one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of equal pages: page i lies at base_bytes + i * page_stride_bytes."""

    base_bytes: int
    page_stride_bytes: int
    page_bytes: int
    pages: int


@dataclass(frozen=True)
class Geometry:
    """Segments of each layer in a region of `size_bytes`; a ring has one layer, which all layers use in turn."""

    layers: tuple[tuple[Segment, ...], ...]
    size_bytes: int

    def page_span(self, layer: int, segment: int, page: int) -> slice:
        """Bytes of one page in the region. Raises `BadPages` for one that does not exist."""
        where = self.layers[0 if len(self.layers) == 1 else layer][segment]
        if not 0 <= page < where.pages:
            raise BadPages(f"page {page} is out of bounds, the segment has {where.pages}")
        start = where.base_bytes + page * where.page_stride_bytes
        return slice(start, start + where.page_bytes)


def paged_geometry(layout: Layout, pages: int, pages_per_block: int = 1) -> Geometry:
    """Each layer has its own `pages` pages, as paged engines do; a block takes `pages_per_block` of them.

    Raises `BadRegion` when blocks can't be cut into so many pages.
    """
    return _laid_out(layout, layout.layers, pages, pages_per_block)


def ring_geometry(layout: Layout, pages: int, pages_per_block: int = 1) -> Geometry:
    """One run of `pages` pages that all layers use in turn; enough for all page sets together.

    Raises `BadRegion` when the layers are not alike, or blocks can't be cut into so many pages.
    """
    if len(set(layout.layers)) != 1:
        raise BadRegion(f"a ring needs equal layers, the layout has {len(set(layout.layers))} kinds")
    return _laid_out(layout, layout.layers[:1], pages, pages_per_block)


def _laid_out(layout: Layout, layers: Sequence[Sequence[int]], pages: int, pages_per_block: int) -> Geometry:
    """Segments one after the other, each from an aligned offset, pages without gaps."""
    if pages < 1 or pages_per_block < 1 or layout.block_tokens % pages_per_block:
        raise BadRegion(
            f"{pages} pages, {pages_per_block} a block: both must be 1 or more, and the latter must divide "
            f"{layout.block_tokens} tokens"
        )
    base_bytes, laid = 0, []
    for layer, segments in enumerate(layers):
        runs = []
        for segment_bytes in segments:
            page_bytes, rest = divmod(segment_bytes, pages_per_block)
            if rest or page_bytes < 1:
                raise BadRegion(f"layer {layer}: {segment_bytes} bytes can't be cut into {pages_per_block} pages")
            runs.append(Segment(base_bytes, page_bytes, page_bytes, pages))
            base_bytes += -(-page_bytes * pages // ALIGN_BYTES) * ALIGN_BYTES
        laid.append(tuple(runs))
    return Geometry(tuple(laid), base_bytes)


class RegionMemory:
    """A sealed memfd, mapped here and, once registered, by the daemon. Owned by the caller, who closes it."""

    def __init__(self, fd: int, size_bytes: int, name: str) -> None:
        """Maps `fd`, which now belongs to this object."""
        self.name = name
        self.size_bytes = size_bytes
        self._fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, size_bytes)

    @classmethod
    def create(cls, size_bytes: int, name: str) -> RegionMemory:
        """New zeroed memory that can neither grow nor shrink. Raises `BadRegion`, or `OSError` when there is none."""
        if size_bytes < 1:
            raise BadRegion(f"a region of {size_bytes} bytes is refused, 1 is the least")
        fd = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, size_bytes, name)
        except BaseException:
            os.close(fd)
            raise

    def fileno(self) -> int:
        """Raises `ValueError` after `close`."""
        if self._map is None:
            raise ValueError(f"region memory {self.name!r} is closed")
        return self._fd

    def array(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """The whole memory as a flat, writable view; a rest that fills no element is left out."""
        if self._map is None:
            raise ValueError(f"region memory {self.name!r} is closed")
        kind = np.dtype(dtype)
        return np.frombuffer(self._map, dtype=kind, count=self.size_bytes // kind.itemsize)

    def page_view(self, geometry: Geometry, layer: int, segment: int, page: int) -> npt.NDArray[np.uint8]:
        """Bytes of one page, writable."""
        view: npt.NDArray[np.uint8] = self.array()[geometry.page_span(layer, segment, page)]
        return view

    def close(self) -> None:
        """Gives the memory back; views that still live keep the mapping until the last of them goes."""
        if self._map is None:
            return
        mapped, self._map = self._map, None
        os.close(self._fd)
        try:
            mapped.close()
        except BufferError:
            # A view lives: the mapping goes with it, since only views refer to it from here on.
            del mapped

    def __enter__(self) -> RegionMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Region:
    """Registered memory. Valid page numbers are 0 to `pages` - 1; it ends with the session or `unregister_region`."""

    region_id: int
    pages: int
    pages_per_block: int
    memory: RegionMemory = field(repr=False)
    geometry: Geometry = field(repr=False)

    def page_view(self, layer: int, segment: int, page: int) -> npt.NDArray[np.uint8]:
        """Bytes of one page, writable. Raises `BadPages`."""
        return self.memory.page_view(self.geometry, layer, segment, page)
