"""Actions that machines ask of the node: a closed set of plain data. What they act on, the node keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, End


@dataclass(frozen=True, slots=True)
class TakeSlots:
    """Wait for room and take the request's slots; answered by `on_slots` or `on_no_slots`."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the decode node for a DE buffer, and decide who reads; answered by `on_reserved` or `on_reserve_failed`."""


@dataclass(frozen=True, slots=True)
class StartPart:
    """Let the share's node read its blocks and send their layers from `first_layer` on.

    `holds`: it sends nothing before its first `Grant`, which says how many of its blocks belong to the prefix. `rest`: nobody
    needs the layers before `first_layer` from it, in no place: it does not read them.
    """

    part: int
    share: Share
    first_layer: int
    holds: bool
    rest: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Layers [0, layers) of the part's first `blocks` blocks may be sent."""

    part: int
    blocks: int
    layers: int


@dataclass(frozen=True, slots=True)
class AskToGiveUp:
    """Let the part's reader keep its first `kept_blocks` blocks, and more only if it has begun them; answered by `on_gave_up`."""

    part: int
    kept_blocks: int


@dataclass(frozen=True, slots=True)
class AskForRest:
    """Let the reader of a part that sends keep its first `kept_blocks` blocks, or more, and give the layers of the others that
    no device reads yet; answered by `on_gave_rest`."""

    part: int
    kept_blocks: int


@dataclass(frozen=True, slots=True)
class FencePart:
    """Let nothing of the part land any more, and stop its reader; answered by `on_part_fenced`."""

    part: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The part goes on with its first `kept_blocks` blocks; reads of the others that no device knows of are dropped."""

    kept_blocks: int


@dataclass(frozen=True, slots=True)
class GaveRest:
    """The part brings its blocks from `kept_blocks` on no further than to layers [0, first_layer); 0: it keeps all."""

    kept_blocks: int
    first_layer: int


@dataclass(frozen=True, slots=True)
class PushRest:
    """Layers from `first_layer` on of these blocks are not read by the decode node any more: they are pushed to it."""

    blocks: Runs
    first_layer: int


@dataclass(frozen=True, slots=True)
class SendAssembly:
    """Move one layer of a helper's part into the DE buffer; answered by `on_assembled`."""

    layer: int


@dataclass(frozen=True, slots=True)
class SetPrefix:
    """Tell the decode node which blocks are new, and let the push begin."""

    prefix_blocks: int


@dataclass(frozen=True, slots=True)
class SendLayer:
    """Move one layer of the request; answered by `on_sent`."""

    layer: int


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Store the blocks with these indexes; answered by `on_written`."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Stop the part and fence its sink; answered by `on_quiet`, or by `on_quiesce_timeout` when that takes too long."""


@dataclass(frozen=True, slots=True)
class AnnouncePrefix:
    prefix_blocks: int
    first_lost: BlockOutcome | None


@dataclass(frozen=True, slots=True)
class AnnounceLayers:
    """Layers [first, last] are where they should be."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class AnnounceAttached:
    pass


@dataclass(frozen=True, slots=True)
class AnnounceWhole:
    prefix_blocks: int


@dataclass(frozen=True, slots=True)
class AnnounceStored:
    durable_blocks: int
    dropped_blocks: int


@dataclass(frozen=True, slots=True)
class AnnounceAccepted:
    pass


@dataclass(frozen=True, slots=True)
class AnnounceProgress:
    done_blocks: int


@dataclass(frozen=True, slots=True)
class AnnounceBlocks:
    """Outcome of each block, in the request's order."""

    outcomes: tuple[BlockOutcome, ...]


@dataclass(frozen=True, slots=True)
class FindStored:
    """Which of the blocks are stored, or being written here? To be answered with `on_found`."""


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Turn the references of the good blocks into a lease of the session, before `AnnounceBlocks`."""


@dataclass(frozen=True, slots=True)
class AnnounceQuiet:
    """After a `Finish` that said pages_quiet = False."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give back the slots, the room and the place in the queue, if held. Slots a device still uses go to quarantine."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Last word to the caller."""

    end: End


@dataclass(frozen=True, slots=True)
class FinishDelivery:
    """Last word to the caller of Deliver."""

    end: End


Action: TypeAlias = (
    TakeSlots
    | Reserve
    | StartPart
    | Grant
    | AskToGiveUp
    | AskForRest
    | FencePart
    | GaveUp
    | GaveRest
    | PushRest
    | SetPrefix
    | SendLayer
    | SendAssembly
    | FindStored
    | WriteBlocks
    | Quiesce
    | AnnouncePrefix
    | AnnounceLayers
    | AnnounceAttached
    | AnnounceWhole
    | AnnounceStored
    | AnnounceAccepted
    | AnnounceProgress
    | AnnounceBlocks
    | GrantLease
    | AnnounceQuiet
    | Release
    | Finish
    | FinishDelivery
)
