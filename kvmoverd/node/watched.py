"""What is known of a part while others read it, and what it still has to read."""

from __future__ import annotations

from dataclasses import dataclass

from kvmoverd.core.balance import Pace
from kvmoverd.core.layout import HEADER_BYTES, Layout
from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.core.remains import Extent, Remains, remains_of
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth


@dataclass(eq=False, slots=True)
class Watched:
    """What is known of one part. `heard_ns`: when its reader last said anything; `grew_ns`: when it last was further than
    before. `queue_ns`: what its storage NIC had to do first. `begun_blocks`: it can't give these. `asked`: it owes the answer
    to whether it is there, and can't be asked for blocks before: the one answer would be taken for the other."""

    since_ns: int
    depth: Depth
    pace: Pace
    pooled_blocks: int
    heard_ns: int
    grew_ns: int
    begun_blocks: int = 0
    read_bytes: int = 0
    why: str = ""
    probed_ns: int | None = None
    asked: bool = False
    stalled: bool = False

    @property
    def queue_ns(self) -> int:
        return self.depth.queue_bytes * 1_000_000_000 // max(1, self.depth.rate_bytes_per_s)

    def heard(self, begun_blocks: int, read_bytes: int, now_ns: int) -> None:
        """Its reader tells how far it is."""
        self.heard_ns, self.probed_ns = now_ns, None
        if begun_blocks > self.begun_blocks or read_bytes > self.read_bytes:
            self.grew_ns = now_ns
        self.begun_blocks = max(self.begun_blocks, begun_blocks)
        self.read_bytes = max(self.read_bytes, read_bytes)
        self.pace.heard(self.read_bytes, now_ns)


def granted(known: StreamPart) -> Runs:
    """The part's blocks that belong to the prefix, when that is known."""
    return known.share.blocks.head(known.granted_blocks or 0)


def remains(known: StreamPart, watched: Watched, layout: Layout, range_bytes: int) -> Remains:
    """Of a part that sends. `range_bytes`: the shortest range that its reader reads.

    Layers that have arrived are read, whoever read them: what it found in a pool it does not tell. Of blocks behind the prefix it
    reads as much as of the others.
    """
    blocks = known.granted_blocks or 0
    if known.ended or not blocks:
        return Remains(0)
    is_cut = known.kept_blocks is not None
    extent = Extent(
        blocks,
        kept_blocks=blocks if known.kept_blocks is None else known.kept_blocks,
        first_layer=known.first_layer if known.rest else 0,
        stop_layer=known.cut_layer if is_cut else layout.layer_count,
    )
    wanted_bytes = extent.bytes_from(layout, 0) + blocks * HEADER_BYTES * known.rest
    pooled_bytes = min(watched.pooled_blocks, blocks) * layout.record_bytes
    by_read = wanted_bytes - pooled_bytes - watched.read_bytes * blocks // known.count
    left_bytes = max(0, min(by_read, extent.bytes_from(layout, known.arrived.in_order)))
    if is_cut or known.rest:
        return Remains(left_bytes)
    return remains_of(layout, blocks=blocks, left_bytes=left_bytes, range_bytes=range_bytes)
