"""Plan of a DE buffer: who reads the hit blocks of a request, as the decode node sees it when it has the buffer's room."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from kvmoverd.core.errors import BadPlan
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share, check_whole
from kvmoverd.core.split import Reader, decide
from kvmoverd.core.status import Path
from kvmoverd.node.peer import Reservation, SplitFacts
from kvmoverd.node.services import Services

UNHEARD_NS = 20_000_000
"""What was decided so lately is not in the queues yet that a prefill node told when it asked."""
_GIVEN_MAX = 256


class Given:
    """What this node's latest plans gave others to read: of many requests that are asked for at once, each knows of those before
    it."""

    def __init__(self) -> None:
        self._given: deque[tuple[int, str, int]] = deque(maxlen=_GIVEN_MAX)

    def add(self, node: str, size_bytes: int, now_ns: int) -> None:
        self._given.append((now_ns, node, size_bytes))

    def with_it(self, node: str, told: Depth, now_ns: int) -> Depth:
        """A node's storage NIC, longer by what it may not have heard of when that was told."""
        while self._given and now_ns - self._given[0][0] > UNHEARD_NS:
            self._given.popleft()
        more_bytes = sum(size_bytes for _, one, size_bytes in self._given if one == node)
        return replace(told, queue_bytes=told.queue_bytes + more_bytes)


def plan_of(services: Services, namespace: Namespace, asked: Reservation, given: Given) -> tuple[ReadPlan, Depth]:
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
            now_ns, facts = services.clock.now_ns(), _with_given(asked, asked.facts, given, services.clock.now_ns())
            decided = _decided(services.node, namespace, asked, facts, loaded, clean, depth)
            for share in decided.shares:
                if share.node != services.node:
                    size_bytes = share.blocks.minus(facts.pooled).count * namespace.layout.record_bytes
                    given.add(share.node, size_bytes, now_ns)
            return ReadPlan(decided.shares, held, decided.why), depth
        case _:
            raise BadPlan(f"{loaded.count} hit blocks, and nothing says who reads them: path is {asked.path}")


def _with_given(asked: Reservation, facts: SplitFacts, given: Given, now_ns: int) -> SplitFacts:
    return replace(
        facts,
        prefill=given.with_it(asked.node, facts.prefill, now_ns),
        helpers=tuple((node, given.with_it(node, depth, now_ns)) for node, depth in facts.helpers),
    )


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
