"""Engines of a test's node: sessions with a paged region each, and memory that tells whether it was left alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvmoverd.core.layout import Layout
from kvmoverd.node.peer import Peer
from kvmoverd.node.sessions import Region, Session

if TYPE_CHECKING:
    from node_kit import NodeKit

LAYOUT = Layout(block_tokens=4, layers=((48, 20), (48, 20), (48, 20)))
POISON = 0xEE
"""What a test writes where nothing may be written any more."""


class Anonymous:
    """Memory of this process, page-aligned."""

    def __init__(self, size_bytes: int) -> None:
        self._raw = np.zeros(size_bytes + 4096, dtype=np.uint8)
        start = -self._raw.ctypes.data % 4096
        self.bytes = self._raw[start : start + size_bytes]
        self.address = int(self.bytes.ctypes.data)
        self.size_bytes = size_bytes
        self.page_kind = "4 KiB"
        self.closed = False

    def close(self) -> None:
        """Unmapped, in earnest: whoever writes here afterwards is found by `was_left_alone`."""
        self.closed = True
        self.bytes[:] = POISON

    def was_left_alone(self) -> bool:
        """Has nobody written since it was closed?"""
        return not self.closed or bool((self.bytes == POISON).all())


class OwnPeers:
    """A cluster of one node, under two names."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def peer(self, node: str) -> Peer | None:
        return self._peer if node in ("here", "there") else None

    def describe(self) -> list[dict[str, object]]:
        return []

    def starved_from(self) -> set[str]:
        return set()

    def tell_purged(self, fingerprints: Sequence[bytes], tenant: str) -> None:
        """There is nobody else to tell."""


@dataclass
class Engine:
    """An engine's session with one paged region: `pages` pages of one block each."""

    kit: NodeKit
    session: Session
    region: Region
    memory: Anonymous
    pages: int

    def block(self, page: int) -> bytes:
        """All layers of one page, canonical order."""
        return b"".join(bytes(self.memory.bytes[a:b]) for a, b in self._spans(page))

    def fill(self, page: int, content: bytes) -> None:
        at = 0
        for a, b in self._spans(page):
            self.memory.bytes[a:b] = np.frombuffer(content[at : at + b - a], dtype=np.uint8)
            at += b - a

    def fill_layer(self, layer: int, page: int, content: bytes) -> None:
        """One layer of a page from the Full Block that `content` is."""
        spans = self._spans(page)[2 * layer : 2 * layer + 2]
        at = LAYOUT.layer_offsets[layer]
        for a, b in spans:
            self.memory.bytes[a:b] = np.frombuffer(content[at : at + b - a], dtype=np.uint8)
            at += b - a

    def _spans(self, page: int) -> list[tuple[int, int]]:
        found = []
        for segments in self.region.geometry.layers:
            for segment in segments:
                start = segment.base_bytes + page * segment.page_stride_bytes
                found.append((start, start + segment.page_bytes))
        return found
