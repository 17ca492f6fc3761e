"""Plan of a DE buffer: who reads the hit blocks of a request, as the decode node sees it when it has the buffer's room."""

from __future__ import annotations

from kvmoverd.core.errors import BadPlan
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share, check_whole
from kvmoverd.core.split import Reader, decide
from kvmoverd.core.status import Path
from kvmoverd.node.peer import Reservation, SplitFacts
from kvmoverd.node.services import Services


def plan_of(services: Services, namespace: Namespace, asked: Reservation) -> tuple[ReadPlan, Depth]:
    """Shares of all hit blocks that are not resident, what is held, and this node's storage NIC now.

    A share of this node is read into the buffer, also when the prefill node is this very node. Raises `BadPlan` for parts that
    are not all of these blocks, once each.
    """
    loaded = Runs.of((asked.resident_blocks, asked.hit_blocks))
    clean = Runs.of_mask(services.reader.pooled(namespace, asked.block_keys[: asked.hit_blocks]))
    held, depth = clean.cut(0, asked.resident_blocks), services.reader.depth()
    if not loaded:
        return ReadPlan((), held, "resident"), depth
    match asked.path:
        case Path.PE:
            return ReadPlan((Share(asked.node, loaded),), held, "prefill"), depth
        case Path.DE:
            return ReadPlan((Share(services.node, loaded),), held, "decode"), depth
        case Path.PARTS:
            return ReadPlan(_checked(asked.shares, loaded), held, "parts"), depth
        case Path.AUTO if asked.facts is not None:
            decided = _decided(services.node, namespace, asked, asked.facts, loaded, clean, depth)
            return ReadPlan(decided.shares, held, decided.why), depth
        case _:
            raise BadPlan(f"{loaded.count} hit blocks, and nothing says who reads them: path is {asked.path}")


def _decided(
    node: str, namespace: Namespace, asked: Reservation, facts: SplitFacts, loaded: Runs, clean: Runs, depth: Depth
) -> ReadPlan:
    """`starved_from_decode`: what this node reads reaches the prefill node too late."""
    return decide(
        blocks=loaded,
        block_bytes=namespace.layout.record_bytes,
        prefill=Reader(asked.node, facts.prefill, facts.pooled.both(loaded)),
        decode=Reader(node, depth, clean.both(loaded), starved=facts.starved_from_decode),
        helpers=[Reader(helper, its_depth) for helper, its_depth in facts.helpers],
        floor_s=facts.floor_s,
        starved_to_decode=facts.starved_to_decode,
    )


def _checked(shares: tuple[Share, ...], loaded: Runs) -> tuple[Share, ...]:
    """Raises `BadPlan` unless each block is in one share, and each node has one."""
    check_whole(shares, loaded)
    if sum(share.blocks.count for share in shares) > loaded.count or len({share.node for share in shares}) < len(
        shares
    ):
        parts = [(share.node, share.blocks.spans) for share in shares[:8]]
        raise BadPlan(f"the parts are {parts}: they must be disjoint, and each node may have one")
    return tuple(share for share in shares if share.blocks)
