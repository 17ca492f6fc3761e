"""Arrays of addresses for one layer of a request: the only place where slots, pages and geometry become memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmoverd.core.geometry import iovec, layer_slices
from kvmoverd.core.layout import Layout
from kvmoverd.node.sessions import Pages, Region
from kvmoverd.ports.transport import IoVec

Addresses = npt.NDArray[np.uint64]
"""Shape (blocks,): address of each block's payload in the pool, the tail's last."""


def slot_iovec(layout: Layout, layer: int, payloads: Addresses, tail_tokens: int) -> IoVec:
    """Slices of a layer in pool slots. With `tail_tokens` the last of `payloads` is a partial block."""
    if not tail_tokens:
        found = np.empty((len(payloads), 2), dtype=np.uint64)
        np.add(payloads, np.uint64(layout.layer_offsets[layer]), out=found[:, 0])
        found[:, 1] = layout.layer_bytes[layer]
        return found
    offsets, lengths, owners = layer_slices(layout, layer, len(payloads), tail_tokens)
    return iovec(payloads, offsets, lengths, owners)


def region_iovec(region: Region, layer: int, pages: Pages, blocks: int, tail_tokens: int) -> IoVec:
    """Slices of a layer in an engine's pages. With `tail_tokens` the last of `blocks` is a partial block."""
    only = region.geometry.only_segment(layer)
    if only is not None and not tail_tokens:
        found = np.empty((len(pages), 2), dtype=np.uint64)
        starts = found[:, 0]
        np.multiply(pages, np.uint64(only.page_stride_bytes), out=starts)
        starts += np.uint64(region.memory.address + only.base_bytes)
        found[:, 1] = only.page_bytes
        return found
    offsets, lengths = region.geometry.region_slices(layer, pages, blocks, tail_tokens)
    base = np.full(1, region.memory.address, dtype=np.uint64)
    return iovec(base, offsets, lengths)


def blocks_iovec(region: Region, pages: Pages, blocks: int) -> IoVec:
    """Slices of whole blocks in an engine's pages, all layers of a block before the next block; the same number of each."""
    offsets, lengths = region.geometry.block_slices(pages, blocks)
    found = np.empty((offsets.size, 2), dtype=np.uint64)
    by_block = found.reshape(*offsets.shape, 2)
    np.add(offsets, np.uint64(region.memory.address), out=by_block[..., 0])
    by_block[..., 1] = lengths
    return found


def payloads_iovec(layout: Layout, payloads: Addresses) -> IoVec:
    """Slices of whole blocks in pool slots: a payload is one."""
    found = np.empty((len(payloads), 2), dtype=np.uint64)
    found[:, 0] = payloads
    found[:, 1] = layout.block_bytes
    return found
