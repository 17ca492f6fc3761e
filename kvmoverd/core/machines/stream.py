"""Stream: the prefill side's owner of a request's hit blocks. Layer after layer arrives in the engine's pages.

Several nodes may read, each a part of the blocks. A layer is ready when every part has it. Until the prefix is known, blocks
that a reader has not begun may go to another one; from then on, of its last blocks, the layers that it has not begun: the
rest. A third node's part that fails is read again by one of the two that own the request. Whoever had a page before must have
let go of it first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from kvmoverd.core.errors import BadRequest
from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AnnouncePrefix,
    AnnounceQuiet,
    AskForRest,
    AskToGiveUp,
    FencePart,
    Finish,
    Grant,
    PushRest,
    Quiesce,
    Reserve,
    SetPrefix,
    StartPart,
)
from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.core.machines.stream_parts import StreamParts, plan_fault
from kvmoverd.core.machines.window import Arrivals
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, End, Reason


class StreamState(enum.Enum):
    RESERVING = "reserving"
    READING = "reading"
    STREAMING = "streaming"
    DRAINING = "draining"
    UNQUIET = "unquiet"
    ENDED = "ended"


class StreamMachine:
    """Reserves the DE buffer, lets the plan's readers run, announces layers, grants credits, moves parts.

    Blocks [resident_blocks, hit_blocks) are loaded. `ring_sets` 0: every layer has its own pages, credits only pace.
    Otherwise layer l uses set l mod ring_sets, and a set is granted again when its layer was computed and, with `pushes`,
    pushed. `decode_node` may be empty; `new_part` gives numbers that are never used twice. Parts' blocks are counted among
    their own in whatever is said of a part, and among the request's in all else.
    """

    def __init__(
        self,
        *,
        layers: int,
        resident_blocks: int,
        hit_blocks: int,
        decode_node: str,
        own_node: str,
        ring_sets: int,
        pushes: bool,
        new_part: Callable[[], int],
    ) -> None:
        self.state = StreamState.RESERVING
        self.layers = layers
        self.resident_blocks = resident_blocks
        self.hit_blocks = hit_blocks
        self.prefix_blocks = hit_blocks
        self.decode_node = decode_node
        self.ring_sets = ring_sets
        self.pushes = pushes
        self.ready = Arrivals(layers)
        self.computed = 0
        self.pushed = 0
        self._new_part = new_part
        self._parts = StreamParts(layers=layers, decode_node=decode_node, own_node=own_node)
        self._end: End | None = None

    @property
    def parts(self) -> Mapping[int, StreamPart]:
        """The parts of the plan as it is now."""
        return self._parts.live

    @property
    def went_well(self) -> bool:
        """Is it over, or nearly, and the prefix whole?"""
        return self._end is not None and self._end.reason is Reason.OK

    def is_helper(self, node: str) -> bool:
        """Is it neither of the two nodes that own the request?"""
        return self._parts.is_helper(node)

    def start(self) -> list[Action]:
        return [Reserve()]

    def on_reserved(self, shares: Sequence[Share]) -> list[Action]:
        """The buffer is there, and it is decided who reads; a plan that leaves blocks out, or gives some twice, is refused."""
        if self.state is not StreamState.RESERVING:
            return []
        fault = plan_fault(shares, Runs.of((self.resident_blocks, self.hit_blocks)))
        if fault:
            return self._finished(End(Reason.INTERNAL, fault))
        self.state = StreamState.READING
        holds = len(shares) > 1
        started: list[Action] = [self._started(share, holds=holds) for share in shares]
        return started or self._decide()

    def on_reserve_failed(self, reason: Reason, message: str) -> list[Action]:
        """The decode node refused the buffer, or what was asked of it later."""
        if self.state in _TAKING:
            return self._failed(reason, message)
        return self._finished(End(reason, message)) if self.state is StreamState.RESERVING else []

    def on_part_prefix(self, part: int, prefix_blocks: int, first_lost: BlockOutcome | None) -> list[Action]:
        """A reader knows how much of its part is good; once. One that claims more than was asked for has failed."""
        known = self._live_part(part)
        if known is None or known.prefix is not None:
            return []
        if prefix_blocks > known.count:
            asked = f"the reader says that {prefix_blocks} blocks are good, {known.count} were asked for"
            return self.on_part_failed(part, Reason.INTERNAL, asked)
        known.prefix, known.first_lost = prefix_blocks, first_lost
        lost = known.lost_block()
        if self.state is StreamState.STREAMING:
            return [] if lost is None else self._cut(lost, f"block {lost} was lost when its part moved")
        if lost is not None:
            # After a cut the layers that came before it are not those of the prefix.
            known.arrived = Arrivals(self.layers, known.first_layer)
        return self._decide()

    def credit_layers(self) -> int:
        """Layers that may be delivered now."""
        if not self.ring_sets:
            return self.layers
        free = min(self.computed, self.pushed) if self.pushes else self.computed
        return min(self.layers, free + self.ring_sets)

    def on_part_layer(self, part: int, layer: int) -> list[Action]:
        """A layer of a part was applied to the pages, every block of its prefix, checked.

        It may overtake the word about the prefix, which takes another way between nodes, and waits for it then.
        """
        known = self._live_part(part)
        if known is None:
            return []
        known.arrived.add(layer)
        return self._ready() if self.state is StreamState.STREAMING else []

    def on_part_ended(self, part: int) -> list[Action]:
        """A reader has sent all that it was to send, or has nothing left to send.

        What it was asked to give up meanwhile it did not hear of in time: it keeps all.
        """
        known = self._live_part(part)
        if known is None or known.ended:
            return []
        if known.prefix is None and known.count:
            return self.on_part_failed(part, Reason.INTERNAL, "the reader ended before it knew what is good")
        known.ended, known.moving_to, known.rest_to = True, "", ""
        return self._ready() if self.state is StreamState.STREAMING else self._decide()

    def on_part_failed(self, part: int, reason: Reason, message: str, good_blocks: int | None = None) -> list[Action]:
        """A reader ended without having sent all layers. With PREFIX_CUT it lost block `good_blocks` of its part."""
        known = self._live_part(part)
        if known is None or known.ended:
            return []
        known.ended = True
        if known.granted_blocks == 0:
            return []
        if known.rest and known.arrived.complete:
            return self._ready()
        if reason is Reason.PREFIX_CUT:
            good = known.share.blocks.at(min(known.count if good_blocks is None else good_blocks, known.count))
            return self._cut(good, message)
        if reason is Reason.LEASE_EXPIRED and known.refused and known.arrived.complete:
            # It was to fill a buffer that is gone: whoever waited for that hears of it there.
            return self._ready()
        return self._fence(known) if self._parts.has_spare(known, reason) else self._failed(reason, message)

    def awaits(self, part: int) -> bool:
        """Does a third node owe layers that are granted, ended or not, or the decode node's when all are ready here?"""
        known = self._live_part(part)
        if known is None or not known.granted_blocks or not self.is_helper(known.share.node):
            return False
        owes = known.arrived.in_order < self.credit_layers()
        return owes or (self.ready.complete and self._parts.fills_buffer(known))

    def on_part_stalled(self, part: int) -> list[Action]:
        """A third node answers nothing before the prefix is known, or then does not send what is awaited: it counts as dead.

        The two others are watched elsewhere.
        """
        known = self._live_part(part)
        if known is None or not self.is_helper(known.share.node):
            return []
        is_silent = self.state is StreamState.READING and known.prefix is None
        return self._fence(known) if is_silent or self.awaits(part) else []

    def on_part_fenced(self, part: int) -> list[Action]:
        """Nothing of the part can land any more: another reader takes its blocks, and the layers that had not come."""
        known = self._parts.live.get(part)
        if known is None or not known.fenced or self.state not in _TAKING:
            return []
        del self._parts.live[part]
        spare, refused = self._parts.spare(known), known.refused | {known.share.node}
        if self.state is StreamState.READING:
            return [self._started(Share(spare, known.share.blocks), holds=bool(self._parts.live), refused=refused)]
        assert known.granted_blocks is not None, "streaming without grants"
        blocks = Share(spare, known.share.blocks.head(known.granted_blocks))
        layer = known.arrived.in_order
        return [self._started(blocks, holds=False, first_layer=layer, refused=refused, giver=known.giver)]

    def on_move(self, part: int, kept_blocks: int, to_node: str) -> list[Action]:
        """Somebody else has time for all but the first `kept_blocks` blocks of a part, or for the rest of them.

        Between its prefix and that of all it is too late for the one and too soon for the other.
        """
        known = self._live_part(part)
        if known is None or to_node in known.refused:
            return []
        if self.state is StreamState.STREAMING:
            return [AskForRest(part, kept_blocks)] if known.ask_for_rest(kept_blocks, to_node) else []
        if not known.may_give or kept_blocks >= known.count:
            return []
        known.moving_to = to_node
        return [AskToGiveUp(part, kept_blocks)]

    def on_gave_up(self, part: int, kept_blocks: int) -> list[Action]:
        """The reader keeps its first `kept_blocks` blocks; all of them: it has nothing to give.

        What it was not asked for, or has promised, it can't give up.
        """
        known = self._live_part(part)
        if known is None:
            return []
        to_node, known.moving_to = known.moving_to, ""
        if kept_blocks >= known.count:
            return self._decide() if self.state is StreamState.READING else []
        if not to_node or known.prefix is not None:
            text = f"the reader gives up all but {kept_blocks} of {known.count} blocks, unasked or after its prefix"
            return self.on_part_failed(part, Reason.INTERNAL, text)
        given = known.share.blocks.tail(kept_blocks)
        known.share = Share(known.share.node, known.share.blocks.head(kept_blocks))
        known.holds = True
        if not kept_blocks:
            del self._parts.live[part]
        return [self._started(Share(to_node, given), holds=bool(self._parts.live), refused=known.refused)]

    def on_gave_rest(self, part: int, kept_blocks: int, first_layer: int) -> list[Action]:
        """The reader brings its blocks from `kept_blocks` on no further than to layers [0, first_layer); 0: it keeps all.

        One that has sent such a layer, or was not asked, has failed. Its credits count for what it keeps from now on: those that
        are on their way were granted for more.
        """
        known = self._live_part(part)
        if known is None:
            return []
        to_node, known.rest_to = known.rest_to, ""
        if not first_layer or (kept_blocks, first_layer) == (known.kept_blocks, known.cut_layer):
            return []
        given = known.give_rest(kept_blocks, first_layer) if to_node else None
        if given is None:
            text = f"of {known.granted_blocks} blocks it gives all but {kept_blocks} from layer {first_layer} on: it may not"
            return self.on_part_failed(part, Reason.INTERNAL, text)
        pushed: list[Action] = [PushRest(given, first_layer)] if known.share.node == self.decode_node else []
        rest = self._started(Share(to_node, given), holds=False, first_layer=first_layer, giver=known.share.node)
        return [*pushed, self._parts.grant_to(known, self.credit_layers()), rest]

    def on_computed(self, layers: int) -> list[Action]:
        """The engine has computed layers [0, layers). Raises `BadRequest` when these are not ready or do not exist."""
        if layers > self.ready.in_order and self.state in _LIVE:
            raise BadRequest(
                f"layers [0, {layers}) said to be computed, {self.ready.in_order} of {self.layers} are ready"
            )
        return self._freed(max(self.computed, layers), self.pushed)

    def on_pushed(self, layers: int) -> list[Action]:
        return self._freed(self.computed, max(self.pushed, layers))

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
        """The readers could not be stopped in time: say so, keep the books open until they are quiet."""
        if self.state is not StreamState.DRAINING:
            return []
        assert self._end is not None, "draining without an end"
        self.state = StreamState.UNQUIET
        end = self._end
        return [Finish(End(end.reason, end.message, pages_quiet=False, prefix_blocks=end.prefix_blocks))]

    def _live_part(self, part: int) -> StreamPart | None:
        """The part, if what is said of it still counts."""
        known = self._parts.live.get(part)
        return None if known is None or known.fenced or self.state not in _TAKING else known

    def _started(
        self,
        share: Share,
        *,
        holds: bool,
        first_layer: int = 0,
        refused: frozenset[str] = frozenset(),
        giver: str = "",
    ) -> StartPart:
        part = self._new_part()
        known = StreamPart(part, share, first_layer, holds, Arrivals(self.layers, first_layer), refused)
        known.is_helpers, known.giver = self.is_helper(share.node), giver
        if self.state is StreamState.STREAMING:
            known.granted_blocks = known.count
        self._parts.live[part] = known
        return StartPart(part, share, first_layer, holds, rest=known.rest)

    def _decide(self) -> list[Action]:
        """The prefix, once every part has told its own and none of them moves."""
        parts = self._parts.live.values()
        if any(known.prefix is None or known.moving_to or known.fenced for known in parts):
            return []
        lost = self._parts.lost_blocks()
        self.state = StreamState.STREAMING
        self.prefix_blocks = min(lost, default=self.hit_blocks)
        told: list[Action] = [AnnouncePrefix(self.prefix_blocks, lost.get(self.prefix_blocks))]
        if self.decode_node:
            told.append(SetPrefix(self.prefix_blocks))
        for known in parts:
            known.granted_blocks = known.share.blocks.below(self.prefix_blocks)
        grants = [grant for grant in self._grants() if grant.blocks or self._parts.live[grant.part].holds]
        return [*told, *grants, *self._ready()]

    def _ready(self) -> list[Action]:
        """Layers that every part has brought by now, and the end when there is no more to come.

        A third node's part is over only when the decode node has its layers, too: it may have to be read again just for that.
        """
        first = self.ready.in_order
        self.ready.in_order = self._parts.ready_layers()
        told: list[Action] = [AnnounceLayers(first, self.ready.in_order - 1)] if self.ready.in_order > first else []
        if self.ready.complete and not any(self._parts.fills_buffer(known) for known in self._parts.loading()):
            told += self._drain(End(Reason.OK, prefix_blocks=self.prefix_blocks))
        return told

    def _fence(self, known: StreamPart) -> list[Action]:
        known.fenced, known.moving_to, known.rest_to = True, "", ""
        return [FencePart(known.part)]

    def _cut(self, block: int, message: str) -> list[Action]:
        """A block is lost after its part was said to be good: the attempt ends there, or at one that was lost before it."""
        good_blocks = min(block, self.prefix_blocks, *self._parts.lost_blocks())
        return self._drain(End(Reason.PREFIX_CUT, message, prefix_blocks=good_blocks))

    def _failed(self, reason: Reason, message: str) -> list[Action]:
        if self.ready.in_order:
            # What the readers have read of the prefix lies in their pools: the next attempt finds it there.
            return self._drain(End(Reason.PREFIX_CUT, f"{reason.name}: {message}", prefix_blocks=self.prefix_blocks))
        return self._drain(End(reason, message))

    def _freed(self, computed: int, pushed: int) -> list[Action]:
        before = self.credit_layers()
        self.computed, self.pushed = computed, pushed
        if self.state is StreamState.STREAMING and self.credit_layers() > before:
            return [grant for grant in self._grants() if grant.blocks]
        return []

    def _grants(self) -> list[Grant]:
        return self._parts.grants(self.credit_layers())

    def _drain(self, end: End) -> list[Action]:
        self._end = end
        self.state = StreamState.DRAINING
        return [Quiesce()]

    def _finished(self, end: End) -> list[Action]:
        self.state = StreamState.ENDED
        return [Finish(end)]


_TAKING = (StreamState.READING, StreamState.STREAMING)
_LIVE = (StreamState.RESERVING, *_TAKING)
