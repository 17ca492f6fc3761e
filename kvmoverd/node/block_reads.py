"""What the block reader knows of the reads that it has started."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.store.places import Place
from kvmoverd.node.block_set import BlockSet
from kvmoverd.node.desk import Rank


@dataclass(eq=False, slots=True)
class Batch:
    """What the reads have in common that one request has started."""

    namespace: Namespace
    starter: BlockSet
    purges: int
    by_ranges: bool
    rank: Rank
    unstarted: deque[tuple[bytes, int, int, int]]
    """Key, slot, its generation and address of each read that no device knows of yet."""
    hints: Mapping[bytes, Place]
    rest_from: int = 0
    """If not 0: only layers from there on are read, and the header page before them."""

    @property
    def block_bytes(self) -> int:
        """What is read of each block."""
        layout = self.namespace.layout
        return layout.rest_bytes(self.rest_from) if self.rest_from else layout.record_bytes


@dataclass(eq=False, slots=True)
class Reading:
    """One read in flight, shared by its waiters; range by range, `layers` are there, or are not wanted."""

    batch: Batch
    key: bytes
    slot: int
    generation: int
    address: int
    rank: Rank
    place: Place | None = None
    layers: int = 0
    stop_layer: int = 0
    """Where the range under way ends; 0: with the block."""
    end_layer: int = 0
    """If not 0: layers from there on were given to another reader."""
    op_id: int = 0
    is_late: bool = False
    """It has ended, while a device still has the slot: it takes too long, or a copy is made of what came."""

    def next_range(self, range_bytes: int, times: int) -> None:
        """Sets `stop_layer` of what follows: so many `times` as long as all ranges before together, or as `range_bytes`."""
        batch, layout = self.batch, self.batch.namespace.layout
        if batch.rest_from and not self.layers:
            self.stop_layer = batch.rest_from
        elif batch.by_ranges:
            read_bytes = layout.layer_offsets[self.layers] - layout.layer_offsets[batch.rest_from]
            stop = layout.range_stop(self.layers, max(range_bytes, read_bytes) * times)
            stop = min(stop, self.end_layer or stop)
            self.stop_layer = stop if stop < layout.layer_count else 0

    def end_at(self, end_layer: int) -> None:
        """Nothing is read from `end_layer` on; the range under way, or waiting, ends there at the latest."""
        self.end_layer = end_layer
        if not 0 < self.stop_layer <= end_layer:
            self.stop_layer = end_layer

    def bytes_behind(self) -> int:
        """What would be read of the block beyond `layers`."""
        layout = self.batch.namespace.layout
        span = layout.rest_span if self.layers == self.batch.rest_from else layout.read_span
        return len(span(self.layers, self.end_layer or layout.layer_count))
