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


@dataclass(eq=False)
class Landing:
    """Blocks that one node sends. Until they are named nothing is let in; from then on their slots are a device's."""

    sink_id: int = 0
    blocks: Runs = field(default_factory=Runs)
    slots: list[int] = field(default_factory=list)
    payloads: Addresses | None = None
    tail_tokens: int = 0


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
        landing.payloads = buffer.payloads(blocks)

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
        payloads = landing.payloads
        if payloads is None or first_block != landing.blocks.first or layer >= self._layout.layer_count:
            return None
        return slot_iovec(self._layout, layer, payloads, landing.tail_tokens)
