"""Who reads what of a request, in words: runs of blocks, parts, plans, queues. Everything is checked on its way in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from kvmover_proto import common_pb2, node_pb2
from kvmoverd.core.errors import BadPlan, BadRequest
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share, check_whole
from kvmoverd.node.peer import Helped, SplitFacts

RUNS_MAX = 4096
PARTS_MAX = 64
HELPERS_MAX = 64
POOLED_BYTES_MAX = 8192
NODE_CHARS_MAX = 128
WHY_CHARS_MAX = 64


def runs_message(runs: Runs) -> common_pb2.BlockRuns:
    """
    >>> runs_from(runs_message(Runs.of((0, 2), (5, 9))), blocks_max=9).spans
    ((0, 2), (5, 9))
    """
    firsts = [first for first, _ in runs.spans]
    return common_pb2.BlockRuns(first=firsts, count=[stop - first for first, stop in runs.spans])


def runs_from(message: common_pb2.BlockRuns, *, blocks_max: int) -> Runs:
    """Blocks with indexes below `blocks_max`. Raises `BadPlan`."""
    firsts, counts = list(message.first), list(message.count)
    if len(firsts) != len(counts) or len(firsts) > RUNS_MAX:
        raise BadPlan(f"{len(firsts)} runs of blocks with {len(counts)} counts, as many of each and at most {RUNS_MAX}")
    end = 0
    for first, count in zip(firsts, counts, strict=True):
        if first < end or not count:
            raise BadPlan(
                f"a run of {count} blocks from {first} follows one that ends at {end}: must ascend, none empty"
            )
        end = first + count
    if end > blocks_max:
        raise BadPlan(f"a run of blocks ends at {end}, {blocks_max} are to be read")
    return Runs.of(*((first, first + count) for first, count in zip(firsts, counts, strict=True)))


def part_messages(shares: Iterable[Share]) -> list[common_pb2.PlannedPart]:
    return [common_pb2.PlannedPart(node=share.node, blocks=runs_message(share.blocks)) for share in shares]


def shares_from(messages: Sequence[common_pb2.PlannedPart], *, blocks_max: int) -> tuple[Share, ...]:
    """Parts that are disjoint and not empty, one a node. Raises `BadPlan`, `BadRequest`."""
    if len(messages) > PARTS_MAX:
        raise BadPlan(f"{len(messages)} parts are given, at most {PARTS_MAX} are taken")
    _check_runs([part.blocks for part in messages])
    shares = tuple(Share(checked_node(part.node), runs_from(part.blocks, blocks_max=blocks_max)) for part in messages)
    for share in shares:
        if not share.blocks:
            raise BadPlan(f"the part of {share.node!r} has no blocks")
    if len({share.node for share in shares}) < len(shares):
        raise BadPlan(f"a node has more than one part: {', '.join(sorted(share.node for share in shares))}"[:256])
    check_disjoint([share.blocks for share in shares])
    return shares


def _check_runs(parts: Sequence[common_pb2.BlockRuns]) -> None:
    """Before any is looked at: what comes after is done on the loop, for all runs together. Raises `BadPlan`."""
    total = sum(len(blocks.first) for blocks in parts)
    if total > RUNS_MAX:
        raise BadPlan(f"{total} runs of blocks in {len(parts)} parts, at most {RUNS_MAX} are taken")


def check_disjoint(parts: Sequence[Runs]) -> None:
    """Raises `BadPlan`."""
    told, distinct = sum(part.count for part in parts), Runs.union(parts).count
    if told != distinct:
        spans = sorted(span for part in parts for span in part.spans)
        first = next(block for (_, stop), (block, _) in pairwise(spans) if block < stop)
        raise BadPlan(f"{told - distinct} blocks are in more than one part, the first is {first}")


def checked_node(name: str) -> str:
    """Raises `BadRequest`."""
    if not 1 <= len(name) <= NODE_CHARS_MAX:
        raise BadRequest(f"a node's name has {len(name)} characters, must have 1 to {NODE_CHARS_MAX}")
    return name


def plan_message(plan: ReadPlan) -> node_pb2.ReadPlan:
    held = runs_message(plan.held) if plan.held else None
    return node_pb2.ReadPlan(parts=part_messages(plan.shares), held=held, why=plan.why[:WHY_CHARS_MAX])


def plan_from(message: node_pb2.ReadPlan, *, resident_blocks: int, hit_blocks: int) -> ReadPlan:
    """The plan of a decode node: all blocks from `resident_blocks` on, once each. Raises `BadPlan`."""
    shares = shares_from(message.parts, blocks_max=hit_blocks)
    held = runs_from(message.held, blocks_max=resident_blocks)
    check_whole(shares, Runs.of((resident_blocks, hit_blocks)))
    return ReadPlan(shares, held, message.why[:WHY_CHARS_MAX])


def helpers_from(names: Sequence[str]) -> tuple[str, ...]:
    """Third nodes that an engine names. Raises `BadRequest`."""
    if len(names) > HELPERS_MAX:
        raise BadRequest(f"{len(names)} helpers are named, at most {HELPERS_MAX} are taken")
    return tuple(checked_node(name) for name in names)


def depth_message(depth: Depth) -> common_pb2.ReaderDepth:
    return common_pb2.ReaderDepth(
        queue_bytes=depth.queue_bytes, rate_bytes_per_s=depth.rate_bytes_per_s, silent_ns=depth.silent_ns
    )


def depth_from(message: common_pb2.ReaderDepth) -> Depth:
    return Depth(message.queue_bytes, message.rate_bytes_per_s, message.silent_ns)


def facts_message(facts: SplitFacts) -> node_pb2.SplitFacts:
    return node_pb2.SplitFacts(
        prefill=depth_message(facts.prefill),
        pooled=_bits(facts.pooled),
        helpers=[node_pb2.HelperDepth(node=node, depth=depth_message(depth)) for node, depth in facts.helpers],
        starved_to_decode=facts.starved_to_decode,
        starved_from_decode=facts.starved_from_decode,
        floor_us=round(facts.floor_s * 1e6),
    )


def facts_from(message: node_pb2.SplitFacts, *, blocks_max: int) -> SplitFacts:
    """Raises `BadRequest`."""
    if len(message.pooled) > POOLED_BYTES_MAX or len(message.helpers) > HELPERS_MAX:
        raise BadRequest(
            f"facts have {len(message.pooled)} bytes of pooled blocks and {len(message.helpers)} helpers, at most "
            f"{POOLED_BYTES_MAX} and {HELPERS_MAX} are taken"
        )
    return SplitFacts(
        prefill=depth_from(message.prefill),
        pooled=_runs_of_bits(message.pooled, blocks_max),
        helpers=tuple((checked_node(helper.node), depth_from(helper.depth)) for helper in message.helpers),
        starved_to_decode=message.starved_to_decode,
        starved_from_decode=message.starved_from_decode,
        floor_s=message.floor_us / 1e6,
    )


def helped_messages(helped: Iterable[Helped]) -> list[node_pb2.HelpedPart]:
    return [
        node_pb2.HelpedPart(node=part.node, boot_id=part.boot_id, blocks=runs_message(part.blocks)) for part in helped
    ]


def helped_from(messages: Sequence[node_pb2.HelpedPart], *, blocks_max: int) -> list[Helped]:
    """Raises `BadPlan`, `BadRequest`."""
    if len(messages) > PARTS_MAX:
        raise BadPlan(f"{len(messages)} helped parts are given, at most {PARTS_MAX} are taken")
    _check_runs([part.blocks for part in messages])
    helped = [
        Helped(checked_node(part.node), part.boot_id, runs_from(part.blocks, blocks_max=blocks_max))
        for part in messages
    ]
    check_disjoint([part.blocks for part in helped])
    return helped


def _bits(blocks: Runs) -> bytes:
    """Bit i, lowest of each byte first: block i is one of them."""
    mask = np.zeros(blocks.stop, dtype=np.bool_)
    for first, stop in blocks.spans:
        mask[first:stop] = True
    return np.packbits(mask, bitorder="little").tobytes()


def _runs_of_bits(bits: bytes, blocks_max: int) -> Runs:
    """Those below `blocks_max`."""
    mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[:blocks_max]
    return Runs.of_mask(mask.astype(np.bool_))
