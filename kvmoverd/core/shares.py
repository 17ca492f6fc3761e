"""Who reads what of one request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmoverd.core.errors import BadPlan
from kvmoverd.core.runs import NO_RUNS, Runs


@dataclass(frozen=True, slots=True)
class Share:
    """Blocks that one node reads, or has in its pool, and sends to the prefill engine's pages."""

    node: str
    blocks: Runs


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The parts of one request: disjoint, none empty. `held`: blocks that lie in the prefill engine's pages and are clean in the
    decode node's pool, so that nobody moves them. `why`: for logs and metrics."""

    shares: tuple[Share, ...]
    held: Runs = NO_RUNS
    why: str = ""


@dataclass(frozen=True, slots=True)
class Depth:
    """A node's storage NIC, now: bytes that wait or are under way, and the rate that it was last seen to read at while it was
    busy; 0: not known. `silent_ns`: for so long nothing has come from it, though reads are under way; 0 when none is."""

    queue_bytes: int = 0
    rate_bytes_per_s: int = 0
    silent_ns: int = 0


def check_whole(shares: Iterable[Share], blocks: Runs) -> None:
    """Each of `blocks` is somebody's, and none that is not among them. Raises `BadPlan`."""
    planned = Runs.union(share.blocks for share in shares)
    if planned != blocks:
        missing, more = blocks.minus(planned).count, planned.minus(blocks).count
        raise BadPlan(
            f"the parts lack {missing} of the {blocks.count} blocks from {blocks.first} on, and have {more} others"
        )
