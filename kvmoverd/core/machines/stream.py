"""Stream: the prefill side's owner of a request's hit blocks. Layer after layer arrives in the engine's pages."""

from __future__ import annotations

import enum

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AnnouncePrefix,
    AnnounceQuiet,
    Finish,
    Grant,
    Quiesce,
    Reserve,
    SetPrefix,
    StartPart,
)
from kvmoverd.core.machines.window import Arrivals
from kvmoverd.core.status import BlockOutcome, End, Reason


class StreamState(enum.Enum):
    RESERVING = "reserving"
    READING = "reading"
    STREAMING = "streaming"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class StreamMachine:
    """Reserves the DE buffer, lets the plan's reader run, announces layers, grants credits.

    `ring_sets` 0: every layer has its own pages, credits only pace. Otherwise layer l uses set l mod ring_sets, and a
    set is granted again when its layer was computed and, with `pushes`, pushed.
    """

    def __init__(self, *, layers: int, hit_blocks: int, has_decode_side: bool, ring_sets: int, pushes: bool) -> None:
        self.state = StreamState.RESERVING
        self.layers = layers
        self.hit_blocks = hit_blocks
        self.prefix_blocks = hit_blocks
        self.has_decode_side = has_decode_side
        self.ring_sets = ring_sets
        self.pushes = pushes
        self.ready = Arrivals(layers)
        self.computed = 0
        self.pushed = 0
        self._before_prefix: set[int] = set()
        self._end: End | None = None

    def start(self) -> list[Action]:
        return [Reserve()] if self.has_decode_side else self.on_reserved()

    def on_reserved(self) -> list[Action]:
        if self.state is not StreamState.RESERVING:
            return []
        self.state = StreamState.READING
        return [StartPart()] if self.hit_blocks else self.on_prefix(0, None)

    def on_reserve_failed(self, reason: Reason, message: str) -> list[Action]:
        if self.state is not StreamState.RESERVING:
            return []
        return self._finished(End(reason, message))

    def on_prefix(self, prefix_blocks: int, first_lost: BlockOutcome | None) -> list[Action]:
        """The reader knows how much is good; once. A reader that claims more than was asked for has failed."""
        if self.state is not StreamState.READING:
            return []
        if prefix_blocks > self.hit_blocks:
            asked = f"the reader says that {prefix_blocks} blocks are good, {self.hit_blocks} were asked for"
            return self.on_part_failed(Reason.INTERNAL, asked)
        self.state = StreamState.STREAMING
        self.prefix_blocks = prefix_blocks
        told: list[Action] = [AnnouncePrefix(prefix_blocks, first_lost)]
        if self.has_decode_side:
            told.append(SetPrefix(prefix_blocks))
        if prefix_blocks == 0:
            self.ready.in_order = self.layers
            return [*told, AnnounceLayers(0, self.layers - 1), *self._drain(End(Reason.OK))]
        told.append(self._grant())
        # After a cut the layers that came before it are not those of the prefix.
        early = sorted(self._before_prefix) if prefix_blocks == self.hit_blocks else []
        return told + [action for layer in early for action in self.on_layer(layer)]

    def credit_layers(self) -> int:
        """Layers that may be delivered now."""
        if not self.ring_sets:
            return self.layers
        free = min(self.computed, self.pushed) if self.pushes else self.computed
        return min(self.layers, free + self.ring_sets)

    def on_layer(self, layer: int) -> list[Action]:
        """A layer was applied to the pages, every block of the prefix, checked.

        It may overtake the word about the prefix, which takes another way between nodes, and waits for it then.
        """
        if self.state is StreamState.READING:
            self._before_prefix.add(layer)
        if self.state is not StreamState.STREAMING:
            return []
        told: list[Action] = list(self.ready.add(layer))
        if self.ready.complete:
            told += self._drain(End(Reason.OK, prefix_blocks=self.prefix_blocks))
        return told

    def on_computed(self, layers: int) -> list[Action]:
        """The engine has computed layers [0, layers). Raises `BadRequest` when these are not ready or do not exist."""
        if layers > self.ready.in_order and self.state in _LIVE:
            raise BadRequest(
                f"layers [0, {layers}) said to be computed, {self.ready.in_order} of {self.layers} are ready"
            )
        return self._freed(max(self.computed, layers), self.pushed)

    def on_pushed(self, layers: int) -> list[Action]:
        return self._freed(self.computed, max(self.pushed, layers))

    def on_part_failed(self, reason: Reason, message: str, good_blocks: int | None = None) -> list[Action]:
        """The reader ended without having sent all layers. With PREFIX_CUT it lost block `good_blocks` of the prefix."""
        if self.state not in (StreamState.READING, StreamState.STREAMING):
            return []
        if reason is Reason.PREFIX_CUT:
            good = self.prefix_blocks if good_blocks is None else min(good_blocks, self.prefix_blocks)
            return self._drain(End(reason, message, prefix_blocks=good))
        if self.ready.in_order:
            # What the reader has read of the prefix lies in its pool: the next attempt finds it there.
            return self._drain(End(Reason.PREFIX_CUT, f"{reason.name}: {message}", prefix_blocks=self.prefix_blocks))
        return self._drain(End(reason, message))

    def on_stop(self, reason: Reason, message: str = "") -> list[Action]:
        """Cancel, deadline, death of the engine, shutdown: all end in the same way."""
        if self.state not in _LIVE:
            return []
        if self.state is StreamState.RESERVING:
            return self._finished(End(reason, message))
        return self._drain(End(reason, message))

    def on_quiet(self) -> list[Action]:
        """No reader sends and no write can land any more."""
        if self.state is StreamState.UNQUIET:
            self.state = StreamState.ENDED
            return [AnnounceQuiet()]
        if self.state is not StreamState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        return self._finished(self._end)

    def on_quiesce_timeout(self) -> list[Action]:
        """The reader could not be stopped in time: say so, keep the books open until it is quiet."""
        if self.state is not StreamState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        self.state = StreamState.UNQUIET
        end = self._end
        return [Finish(End(end.reason, end.message, pages_quiet=False, prefix_blocks=end.prefix_blocks))]

    def _freed(self, computed: int, pushed: int) -> list[Action]:
        before = self.credit_layers()
        self.computed, self.pushed = computed, pushed
        if self.state is StreamState.STREAMING and self.credit_layers() > before:
            return [self._grant()]
        return []

    def _grant(self) -> Grant:
        return Grant(self.prefix_blocks, self.credit_layers())

    def _drain(self, end: End) -> list[Action]:
        self._end = end
        self.state = StreamState.DRAINING
        return [Quiesce()]

    def _finished(self, end: End) -> list[Action]:
        self.state = StreamState.ENDED
        return [Finish(end)]


_LIVE = (StreamState.RESERVING, StreamState.READING, StreamState.STREAMING)
