"""One part on a node, without the request around it: a pretended owner opens the sinks, and hears what the part tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from node_kit import LAYOUT, WAIT_S, Anonymous, NodeKit

from kvmoverd.core.runs import Runs
from kvmoverd.core.status import BlockOutcome, End
from kvmoverd.core.store.places import Place
from kvmoverd.node.driver import Call
from kvmoverd.node.peer import Help, PartListener, PartOrder
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.ports.transport import IoVec

OWNER = ("owner", "boot-1")
ROUTES: MappingProxyType[str, None] = MappingProxyType({"to_owner": None, "to_decode": None})
"""Sinks of this process stand for those of other nodes."""


class Pages:
    """A sink: memory for some blocks, layer by layer, that lets in what an engine's pages or a DE buffer would."""

    def __init__(self, kit: NodeKit, blocks: int, *, first_block: int = 0) -> None:
        self.kit, self.blocks, self.first_block = kit, blocks, first_block
        self.memory = Anonymous(blocks * LAYOUT.block_bytes)
        self.arrived: list[int] = []
        self.quiet = False
        self.given = blocks, LAYOUT.layer_count
        self.sink_id = kit.mover.expect(self._resolve, lambda layer, moved_bytes: self.arrived.append(layer))

    def prefix_of(self, blocks: int) -> None:
        """So many blocks are expected from now on."""
        self.blocks = blocks

    def given_from(self, kept_blocks: int, first_layer: int) -> None:
        """Layers from `first_layer` on come with so many blocks."""
        self.given = kept_blocks, first_layer

    def block(self, index: int) -> bytes:
        start = index * LAYOUT.block_bytes
        return bytes(self.memory.bytes[start : start + LAYOUT.block_bytes])

    def layer(self, layer: int, index: int) -> bytes:
        span = LAYOUT.layer_span(layer)
        return self.block(index)[span.start : span.stop]

    def close(self) -> None:
        def over() -> None:
            self.quiet = True

        self.kit.mover.forget(self.sink_id, over)

    def _resolve(self, layer: int, first_block: int) -> IoVec | None:
        if first_block != self.first_block:
            return None
        blocks = self.blocks if layer < self.given[1] else self.given[0]
        found = np.empty((blocks, 2), dtype=np.uint64)
        starts = np.arange(blocks, dtype=np.uint64) * np.uint64(LAYOUT.block_bytes)
        found[:, 0] = starts + np.uint64(self.memory.address + LAYOUT.layer_offsets[layer])
        found[:, 1] = LAYOUT.layer_bytes[layer]
        return found


@dataclass
class Owner:
    """Hears what a part tells, in order."""

    said: list[object] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    prefix: tuple[int, BlockOutcome | None] | None = None
    gave_up: list[int] = field(default_factory=list)
    gave_rest: list[tuple[int, int]] = field(default_factory=list)
    end: End | None = None

    @property
    def listener(self) -> PartListener:
        return PartListener(self._on_prefix, self._on_end, self._on_progress, self._on_gave_up, self._on_gave_rest)

    @property
    def is_told_end(self) -> bool:
        return self.end is not None

    def _say(self, what: object) -> None:
        assert self.end is None, f"{what} after {self.end}"
        self.said.append(what)

    def _on_prefix(self, prefix_blocks: int, first_lost: BlockOutcome | None) -> None:
        assert self.prefix is None, "the prefix is told once"
        self._say(("prefix", prefix_blocks))
        self.prefix = prefix_blocks, first_lost

    def _on_progress(self, begun_blocks: int, read_bytes: int) -> None:
        assert not self.progress or (begun_blocks, read_bytes) != self.progress[-1]
        assert not self.progress or read_bytes >= self.progress[-1][1]
        self._say(("progress", begun_blocks))
        self.progress.append((begun_blocks, read_bytes))

    def _on_gave_up(self, kept_blocks: int) -> None:
        self._say(("gave up", kept_blocks))
        self.gave_up.append(kept_blocks)

    def _on_gave_rest(self, kept_blocks: int, first_layer: int) -> None:
        self._say(("gave rest", kept_blocks, first_layer))
        self.gave_rest.append((kept_blocks, first_layer))

    def _on_end(self, end: End) -> None:
        self._say(("end", end.reason.name))
        self.end = end


def own_part(
    kit: NodeKit,
    keys: tuple[bytes, ...],
    pages: Pages,
    owner: Owner,
    *,
    holds: bool = False,
    first_layer: int = 0,
    credit_layers: int = LAYOUT.layer_count,
    waits_for_blocks: bool = False,
    rest: bool = False,
) -> PartDriver:
    """A part that this node reads for a request of its own; started. `waits_for_blocks`: a DE buffer's, which has none yet."""
    part = PartDriver(
        kit.services,
        Call(f"part {next(kit.services.ids)}", 1, "", WAIT_S),
        namespace=kit.namespace,
        keys=keys,
        credit_layers=credit_layers,
        destination=Destination(None, pages.sink_id),
        listener=owner.listener,
        first_block=pages.first_block,
        first_layer=first_layer,
        holds=holds,
    )
    if rest:
        part.read_rest()
    if waits_for_blocks:
        part.wait_for_blocks()
    part.start()
    return part


def order_of(
    keys: tuple[bytes, ...],
    pages: Pages,
    *,
    part: int = 1,
    attempt: int = 1,
    request_id: str = "request",
    holds: bool = True,
    assembles: bool = True,
    places: Sequence[Place | None] = (),
    timeout_s: float = WAIT_S,
    rest_layer: int = 0,
    kit: NodeKit,
) -> PartOrder:
    """What a prefill node asks a third one. `rest_layer`: from which on it reads, where somebody else has read those before."""
    blocks = Runs.of((pages.first_block, pages.first_block + len(keys)))
    wanted = Help(request_id, attempt, kit.namespace, keys, places, "decode" if assembles else "")
    layers = LAYOUT.layer_count
    return PartOrder(
        part, blocks, pages.sink_id, layers, rest_layer, holds, timeout_s, None, wanted, rest=rest_layer > 0
    )
