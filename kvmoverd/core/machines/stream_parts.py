"""The parts of a stream: who reads what by now, what is missing for a layer, and who may read a part whose reader failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvmoverd.core.machines.actions import Grant
from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, Reason


class StreamParts:
    """The parts of the plan as it is now, by number, in `live`. `decode_node` may be empty."""

    def __init__(self, *, layers: int, decode_node: str, own_node: str) -> None:
        self.layers = layers
        self.decode_node = decode_node
        self.own_node = own_node
        self.live: dict[int, StreamPart] = {}

    def is_helper(self, node: str) -> bool:
        """Is it neither of the two nodes that own the request?"""
        return node not in (self.own_node, self.decode_node)

    def loading(self) -> Iterator[StreamPart]:
        """Parts with blocks of the prefix."""
        return (known for known in self.live.values() if known.granted_blocks)

    def lost_blocks(self) -> dict[int, BlockOutcome | None]:
        """The first block that each part has lost, if any, and why."""
        return {block: known.first_lost for known in self.live.values() if (block := known.lost_block()) is not None}

    def ready_layers(self) -> int:
        """Leading layers that every part has brought."""
        return min((known.ready_layers for known in self.loading()), default=self.layers)

    def grants(self, layers: int) -> list[Grant]:
        """So many layers, to every reader that may still send."""
        return [self.grant_to(known, layers) for known in self.live.values() if not known.ended and not known.fenced]

    @staticmethod
    def grant_to(known: StreamPart, layers: int) -> Grant:
        """One that gave a rest is granted what it keeps, and so knows that it was heard; or, keeping nothing, what it owes."""
        if known.kept_blocks == 0:
            layers = min(layers, known.cut_layer)
        return Grant(known.part, known.kept_blocks or known.granted_blocks or 0, layers)

    def fills_buffer(self, known: StreamPart) -> bool:
        """Does it, or who follows it, still bring layers to the decode node that were, or are, a third node's to bring?"""
        if known.rest:
            return False
        replaces, is_over = known.first_layer == self.layers, known.ended and not known.fenced
        return bool(self.decode_node) and not is_over and (replaces or self.is_helper(known.share.node))

    def has_spare(self, failed: StreamPart, reason: Reason) -> bool:
        """May another node read what this one could not? No page has then been used that it would have to fill again.

        Of the two that own the request, one that is full hands on to the other, while either may read. The decode node that has
        no buffer any more was to take over what its engine has already: only this node's pages still wait for that. A rest is
        read for these pages alone, and from the layer on that did not come.
        """
        if self.is_helper(failed.share.node) or not self.spare(failed):
            return self.is_helper(failed.share.node)
        if failed.rest:
            return True
        if failed.granted_blocks is None:
            return reason is Reason.POOL_EXHAUSTED
        is_void = reason is Reason.LEASE_EXPIRED and failed.share.node == self.decode_node and bool(failed.refused)
        return is_void and failed.arrived.in_order == failed.first_layer

    def spare(self, known: StreamPart) -> str:
        """Who reads a part instead, or "". None of the two is asked twice, but for a third node that has failed.

        Of a rest who gave it is the last to be asked: it is slow.
        """
        if known.rest:
            nodes = sorted((self.own_node, self.decode_node), key=lambda node: node == known.giver)
            return next((node for node in nodes if node not in ("", known.share.node, *known.refused)), "")
        others = [node for node in (self.decode_node, self.own_node) if node not in ("", known.share.node)]
        if known.granted_blocks is None:
            others = [node for node in others if node not in known.refused] or others * self.is_helper(known.share.node)
        return next(iter(others), "")


def plan_fault(shares: Sequence[Share], wanted: Runs) -> str:
    """What is wrong with a plan that is to give each of the wanted blocks to one reader; empty: nothing."""
    planned = Runs.union(share.blocks for share in shares)
    total_blocks = sum(share.blocks.count for share in shares)
    if planned == wanted and total_blocks == wanted.count and all(share.blocks for share in shares):
        return ""
    return f"a plan of {total_blocks} blocks in {len(shares)} parts does not give each of {wanted.count} once"
