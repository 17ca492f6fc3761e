"""Landings: the sinks of one DE buffer, one for each node that sends into it, and the slots that each may write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvmoverd.core.layout import Layout
from kvmoverd.core.runs import Runs
from kvmoverd.node.de_buffer import DeBuffer
from kvmoverd.node.services import Services
from kvmoverd.node.slices import Addresses, slot_iovec
from kvmoverd.ports.transport import IoVec, Sender


@dataclass(frozen=True, slots=True)
class Field:
    """What a frame brings of each layer from `first_layer` on, until the next field begins; a frame has the blocks in order."""

    first_layer: int
    blocks: Runs
    payloads: Addresses


@dataclass(eq=False)
class Landing:
    """Blocks that one node sends. Until they are named nothing is let in; from then on their slots are a device's.

    `rests`: more blocks, of which it sends the layers from there on. `fields`: both, ascending by layer. `asked_layers`: no
    frame of that layer or a later one has had places here yet.
    """

    sink_id: int = 0
    blocks: Runs = field(default_factory=Runs)
    slots: list[int] = field(default_factory=list)
    tail_tokens: int = 0
    rests: list[tuple[int, Runs]] = field(default_factory=list)
    fields: list[Field] = field(default_factory=list)
    asked_layers: int = 0

    def field_of(self, layer: int) -> Field | None:
        """None: nothing of this layer is let in."""
        return next((one for one in reversed(self.fields) if one.first_layer <= layer and one.blocks), None)


class Landings:
    """`none_left` is called when all was fenced, and each time again: no late frame can land in the buffer any more."""

    def __init__(self, services: Services, layout: Layout, none_left: Callable[[], None]) -> None:
        self._services = services
        self._layout = layout
        self._none_left = none_left
        self._open: set[Landing] = set()

    def add(self, sender: Sender, on_layer: Callable[[int, int], None]) -> Landing:
        """A sink for a node that calls itself so; nothing is let in yet."""
        landing = Landing()
        own = self._services.node, self._services.boot_id
        resolve = partial(self._resolve, landing)
        landing.sink_id = self._services.mover.expect(resolve, on_layer, None if sender == own else sender)
        self._open.add(landing)
        return landing

    @staticmethod
    def let_in(landing: Landing, buffer: DeBuffer, blocks: Runs, tail_tokens: int) -> None:
        """Its sender may write these blocks from now on. `tail_tokens`: of the last one; 0: it is a full one."""
        landing.blocks, landing.slots, landing.tail_tokens = blocks, buffer.slots(blocks), tail_tokens
        buffer.size_class.device_begin(landing.slots)
        landing.fields = [Field(0, blocks, buffer.payloads(blocks))]

    @staticmethod
    def let_in_rest(landing: Landing, buffer: DeBuffer, blocks: Runs, first_layer: int) -> None:
        """Its sender may write other blocks' layers from there on, too: in the same frames, all blocks in their order."""
        slots = buffer.slots(blocks)
        buffer.size_class.device_begin(slots)
        landing.slots += slots
        landing.rests.append((first_layer, blocks))
        firsts = sorted({0, *(first for first, _ in landing.rests)})
        rests = [Runs.union(rest for at, rest in landing.rests if at <= first) for first in firsts]
        unions = [Runs.union((landing.blocks, rest)) for rest in rests]
        landing.fields = [Field(*found, buffer.payloads(found[1])) for found in zip(firsts, unions, strict=True)]

    def first_layer(self, landing: Landing) -> int:
        """The first layer of which anything is let in; the number of layers: nothing ever is."""
        return next((one.first_layer for one in landing.fields if one.blocks), self._layout.layer_count)

    def fence(self, landing: Landing, buffer: DeBuffer, then: Callable[[], None] = lambda: None) -> None:
        """Lets nothing in any more. `then` is called when no write can land, and no device has the slots for it."""

        def quiet() -> None:
            buffer.size_class.device_end(landing.slots)
            self._open.remove(landing)
            then()
            if not self._open:
                self._none_left()

        self._services.mover.forget(landing.sink_id, quiet)

    def _resolve(self, landing: Landing, layer: int, first_block: int) -> IoVec | None:
        found = landing.field_of(layer) if layer < self._layout.layer_count else None
        if found is None or first_block != found.blocks.first:
            return None
        landing.asked_layers = max(landing.asked_layers, layer + 1)
        return slot_iovec(self._layout, layer, found.payloads, landing.tail_tokens)
